from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import general_parts
import numpy as np
import pytest
from gymnasium import spaces
from plain_policies import PlainPolicy

from aiorl.config.worker import WorkerPart
from aiorl.data import columns as c
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.fragment import SamplePlan
from aiorl.data.spaces import space_to_dict
from aiorl.errors import BatchError, ConfigError, EnvError, PolicyError
from aiorl.net.wire.decoding import decode
from aiorl.net.wire.encoding import encode
from aiorl.net.wire.messages import Snapshot
from aiorl.offline.estimators import ImportanceSamplingEstimator
from aiorl.run.ingest import check_samples
from aiorl.run.report.results import Progress, Results
from aiorl.run.worker.sampler_unit import SamplerUnit, StepClock, StopSampling, UnitPlace, monitor_directory, unit_seed
from benchmarks.acting_mlp import make_acting_graph, mlp_weights

PPO_PLAN = SamplePlan("gae", {"gamma": 0.9, "lam": 0.8}, (c.OBS, c.ACTIONS, c.REWARDS, c.ADVANTAGES, c.EPS_ID, c.T))
V_TRACE_PLAN = SamplePlan(
    "none", {}, (c.OBS, c.REWARDS, c.TERMINATEDS, c.TRUNCATEDS, c.BOOTSTRAP_VALUES, c.EPS_ID, c.LAST_OBS)
)
WEIGHTS = mlp_weights(3, 2)
GRAPH, SPEC = make_acting_graph(3, spaces.Discrete(2), 2, WEIGHTS)
MULTI = "aiorl.testing.multi_agent_envs:CountingMultiAgentEnv"
COUNTING = "aiorl.testing.envs:CountingEnv"

Make = Callable[..., SamplerUnit]


def entry(plan: SamplePlan = PPO_PLAN, **settings: Any) -> dict[str, Any]:
    return {"sample_plan": dataclasses.asdict(plan), **settings}


def own_spaces() -> dict[str, Any]:
    return {
        "observation_space": space_to_dict(general_parts.VECTOR), "action_space": space_to_dict(spaces.Discrete(2))
    }  # fmt: skip


def snapshot(version: int, policies: Any, scale: float = 1.0, **more: Any) -> Snapshot:
    weights = {name: array * np.float32(scale) for name, array in WEIGHTS.items()}
    filters, acks = more.pop("filters", {}), more.pop("acks", {})
    return Snapshot(version, dict.fromkeys(policies, weights), filters, acks, {"timestep": 10 * version})


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[SamplerUnit] = []

    def make_one(
        policies: dict[str, Any] | None = None, *, slot: int = 1, version: int = 0, graph: Any = None, **settings: Any
    ) -> SamplerUnit:
        policies = policies or {DEFAULT_POLICY_ID: entry()}
        part = WorkerPart.from_dict(
            {
                "env": COUNTING, "num_envs_per_worker": 2, "rollout_fragment_length": 8, "seed": 5,
                "callbacks": "general_parts:Watching", "policies": policies, **settings,
            }
        )  # fmt: skip
        nets = [policy_id for policy_id, policy in policies.items() if "policy_class" not in policy]
        encoded, spec, weights = graph or (GRAPH, SPEC, WEIGHTS)
        graphs = {policy_id: {"graph": encoded, "spec": spec.to_dict()} for policy_id in nets}
        first = Snapshot(version, dict.fromkeys(nets, weights), {}, {}, {"timestep": 10 * version})
        unit = SamplerUnit(part, graphs, first, UnitPlace(slot, "ab12", num_workers=2))
        made.append(unit)
        return unit

    yield make_one
    for unit in made:
        unit.close()


def in_thread(unit: SamplerUnit) -> tuple[threading.Thread, list[BaseException]]:
    """Sample until it raises; what it raised is in the list then."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            while True:
                unit.sample()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, raised


@pytest.mark.parametrize(
    ("settings", "is_eager"),
    [({}, False), ({"eager": True}, True), ({"eager": True, "no_eager_on_workers": True}, False)],
)
def test_policies_of_a_users_own_are_eager_on_workers_where_that_is_asked_for(
    make: Make, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], is_eager: bool
) -> None:
    eager = type("Eager", (PlainPolicy,), {})
    monkeypatch.setattr(PlainPolicy, "as_eager", classmethod(lambda cls: eager), raising=False)
    unit = make({DEFAULT_POLICY_ID: entry(policy_class="plain_policies:PlainPolicy")}, **settings)
    assert isinstance(unit.worker.policy_map[DEFAULT_POLICY_ID], eager) == is_eager


@pytest.mark.parametrize("how", [True, "bulk"])
def test_observations_are_compressed_on_the_wire_and_not_before_it(make: Make, how: bool | str) -> None:
    obs = make(compress_observations=how).sample().batches[DEFAULT_POLICY_ID][c.OBS]
    assert (obs.shape, obs.dtype) == ((16, 1, 3), np.float32)


def test_estimates_of_a_worker_come_out_in_the_runs_results(make: Make) -> None:
    """SPEC 11: off_policy_estimator; over the wire, each once."""
    unit = make({DEFAULT_POLICY_ID: entry()})
    assert unit.worker.sampler.lockstep is None, "its fragments are not of whole rows"
    estimator = ImportanceSamplingEstimator(unit.worker.get_policy(), 0.9)
    unit.worker.reward_estimators = [estimator]
    produced = unit.sample()
    sent = produced.to_samples(0, 0, {}).episodes
    assert {name for name in sent if name.startswith("estimate/")} == {
        "estimate/is/V_prev", "estimate/is/V_step_IS", "estimate/is/V_gain_est"
    }  # fmt: skip
    np.testing.assert_allclose(sent["estimate/is/V_step_IS"], sent["estimate/is/V_prev"], rtol=1e-5)
    assert estimator.get_metrics() == []
    arrived: Any = decode([bytes(frame) for frame in encode(produced.to_samples(0, 0, {}))])
    results = Results(100, now=0.0)
    results.add_episodes(check_samples(arrived))
    found = results.finish_iteration(1.0, Progress(0, 0))["off_policy_estimator"]
    assert found["is"].keys() == {"V_prev", "V_step_IS", "V_gain_est"}
    assert found["is"]["V_prev"] == pytest.approx(sent["estimate/is/V_prev"].mean())


def test_rows_of_the_default_policy_are_sent_one_by_one(make: Make) -> None:
    unit = make(version=4)
    produced = unit.sample()
    rows = produced.batches[DEFAULT_POLICY_ID]
    assert rows.keys() == set(PPO_PLAN.columns)
    assert rows[c.OBS].shape == (16, 1, 3)
    assert rows[c.ADVANTAGES].dtype == np.float32
    assert (produced.env_steps, produced.agent_steps, produced.length, produced.num_envs) == (16, 16, 8, 2)
    assert (produced.first_version, produced.last_version, unit.version) == (4, 4, 4)
    assert unit.worker.global_vars == {"timestep": 40}
    assert unit.worker.policy_map[DEFAULT_POLICY_ID].global_timestep == 40
    assert produced.episodes.lengths.tolist() == [5, 5]
    assert produced.perf["iters"] > 0
    assert unit.in_env_s == 0
    assert unit.sample().perf["iters"] == 8


def test_r27_the_same_seed_and_slot_give_the_same_rows_and_another_slot_others(make: Make) -> None:
    actions = [
        make(slot=slot, rollout_fragment_length=30).sample().batches[DEFAULT_POLICY_ID][c.ACTIONS] for slot in (1, 1, 2)
    ]
    np.testing.assert_array_equal(actions[0], actions[1])
    assert not np.array_equal(actions[0], actions[2])


def test_a_fake_sampler_gives_the_first_rows_for_ever(make: Make) -> None:
    unit = make(fake_sampler=True)
    first, again = (unit.sample().batches[DEFAULT_POLICY_ID] for _ in range(2))
    assert len(first[c.OBS]) == 16
    for name in first:
        np.testing.assert_array_equal(again[name], first[name])


def test_without_a_seed_workers_differ(make: Make) -> None:
    actions = [
        make(seed=None, rollout_fragment_length=30).sample().batches[DEFAULT_POLICY_ID][c.ACTIONS] for _ in range(2)
    ]
    assert not np.array_equal(*actions)


def test_r6_an_offered_snapshot_governs_the_next_fragment(make: Make) -> None:
    unit = make()
    unit.sample()
    unit.offer(snapshot(7, [DEFAULT_POLICY_ID], scale=0.5))
    produced = unit.sample()
    assert (produced.first_version, produced.last_version) == (7, 7)
    weights = unit.worker.policy_map[DEFAULT_POLICY_ID].get_weights()
    np.testing.assert_array_equal(weights["pi_w0"], WEIGHTS["pi_w0"] * np.float32(0.5))


def test_sequences_carry_bootstrap_values_of_true_final_observations_and_what_followed(make: Make) -> None:
    unit = make(
        {DEFAULT_POLICY_ID: entry(V_TRACE_PLAN, layout="sequences", sequence_length=8)},
        env_config={"end": "truncate"},
    )
    rows = unit.sample().batches[DEFAULT_POLICY_ID]
    assert rows[c.OBS].shape == (8, 2, 3)
    assert rows[c.VALID].all()
    policy = unit.worker.policy_map[DEFAULT_POLICY_ID]
    assert rows[c.TRUNCATEDS].sum() == 2
    expected = np.zeros((8, 2), np.float32)
    finals = rows[c.OBS] + np.array([0, 1, 0], np.float32)
    expected[rows[c.TRUNCATEDS]] = policy.values(finals[rows[c.TRUNCATEDS]])  # type: ignore[attr-defined]
    np.testing.assert_allclose(rows[c.BOOTSTRAP_VALUES], expected, rtol=1e-5)
    assert rows[c.LAST_OBS].tolist() == [[1.0, 3.0, 0.0]] * 2


def test_several_policies_send_what_is_trained_and_report_rewards_by_policy(make: Make) -> None:
    unit = make(
        {
            "red": entry(**own_spaces()),
            "blue": entry(policy_class="plain_policies:PlainPolicy", is_trained=False, config={"level": 3}),
        },
        env=MULTI, env_config={"lengths": [3, 5, 4]}, multiagent={"policy_mapping_fn": "general_parts:by_number"},
        num_envs_per_worker=1, rollout_fragment_length=10, callbacks="general_parts:Noting",
    )  # fmt: skip
    produced = unit.sample()
    assert produced.batches.keys() == {"red"}
    assert produced.env_steps == 10
    assert produced.agent_steps == 2 * (3 + 5 + 4)
    assert produced.batches["red"][c.OBS].shape == (14, 1, 3)
    episodes = produced.episodes
    assert episodes.lengths.tolist() == [5, 5]
    assert sorted(episodes.policy_rewards["red"].tolist()) == [6.0, 6.0, 10.0, 10.0]
    assert episodes.policy_rewards["blue"].tolist() == [15.0, 15.0]
    assert episodes.custom["height"].tolist() == [7.0, 7.0]
    assert episodes.hist["steps"].tolist() == [1.0, 5.0, 1.0, 5.0]
    blue = unit.worker.policy_map["blue"]
    assert blue.config["level"] == 3
    assert blue.observation_space == general_parts.VECTOR, "the environment's, since none was given"


def test_r131_agents_that_share_the_default_policy_are_counted_as_agents_not_as_env_steps(make: Make) -> None:
    produced = make(env=MULTI, env_config={"lengths": [5, 5, 5]}, num_envs_per_worker=2).sample()
    assert (produced.env_steps, produced.agent_steps) == (16, 48)


def test_each_policys_filter_has_its_delta(make: Make) -> None:
    unit = make(
        {"red": entry(), "blue": entry()}, env=MULTI, multiagent={"policy_mapping_fn": "general_parts:by_number"},
        num_envs_per_worker=1, rollout_fragment_length=10, observation_filter="MeanStdFilter",
    )  # fmt: skip
    unit.sample()
    deltas = unit.take_deltas(1)
    assert deltas.keys() == {"red", "blue"}
    assert deltas["red"]["n"] < deltas["blue"]["n"]
    state = {"n": np.array(100), "mean": np.zeros(3), "m2": np.ones(3)}
    unit.offer(snapshot(1, ["red", "blue"], filters={"red": state}, acks={"ab12": 1}))
    unit.sample()
    seen = unit.take_deltas(2)
    assert unit.worker.filters["red"].state()["n"] == 100 + seen["red"]["n"]
    assert unit.worker.filters["blue"].state()["n"] == deltas["blue"]["n"] + seen["blue"]["n"]
    assert make().take_deltas(1) == {}


def test_nested_observations_and_actions_are_played_and_sent_as_vectors(make: Make) -> None:
    weights = mlp_weights(4, 4)
    graph, spec = make_acting_graph(4, general_parts.NestedEnv.action_space, 4, weights)
    spec = dataclasses.replace(spec, distribution="composite")
    unit = make(env="general_parts:NestedEnv", graph=(graph, spec, weights))
    rows = unit.sample().batches[DEFAULT_POLICY_ID]
    assert rows[c.OBS].shape == (16, 1, 4)
    assert rows[c.ACTIONS].shape == (16, 1, 2)


def test_an_observation_function_and_a_horizon_are_heeded(make: Make) -> None:
    unit = make(multiagent={"observation_fn": "general_parts:doubled"}, horizon=2, env_config={"end": "never"})
    produced = unit.sample()
    assert produced.batches[DEFAULT_POLICY_ID][c.OBS][1, 0].tolist() == [0.0, 2.0, 0.0]
    assert produced.episodes.lengths.tolist() == [2] * 8


def test_a_soft_horizon_goes_on_without_a_reset_and_is_never_done(make: Make) -> None:
    unit = make(
        {DEFAULT_POLICY_ID: entry(V_TRACE_PLAN, layout="sequences", sequence_length=8)},
        horizon=3, soft_horizon=True, no_done_at_end=True, env_config={"end": "never"}, num_envs_per_worker=1,
    )  # fmt: skip
    rows = unit.sample().batches[DEFAULT_POLICY_ID]
    assert not rows[c.TERMINATEDS].any()
    assert rows[c.VALID].sum(0).tolist() == [3, 3, 2], "cut where episodes are, and nothing follows in a sequence"
    assert rows[c.OBS][:3, 1, 1].tolist() == [3.0, 4.0, 5.0]


def test_callbacks_of_the_older_form_are_import_paths_by_hook(make: Make) -> None:
    general_parts.LEGACY_SEEN.clear()
    with pytest.warns(DeprecationWarning, match="callbacks given as a dict"):
        unit = make(callbacks={"on_episode_end": "general_parts:legacy_end"})
    unit.sample()
    assert general_parts.LEGACY_SEEN == [5, 5]


def test_what_is_named_but_not_there_or_of_another_kind_is_refused_by_its_key(make: Make) -> None:
    with pytest.raises(ConfigError, match="policy_mapping_fn"):
        make(multiagent={"policy_mapping_fn": "general_parts:nobody"})
    with pytest.raises(ConfigError, match="callbacks is"):
        make(callbacks="general_parts:by_number")
    with pytest.raises(ConfigError, match="subclass of aiorl"):
        make({DEFAULT_POLICY_ID: entry(policy_class="general_parts:SlowEnv")})
    with pytest.raises(PolicyError, match="action space"):
        make(env_config={"actions": 3})


def test_rows_without_a_column_that_is_wanted_are_an_error_that_names_it(make: Make) -> None:
    unit = make({DEFAULT_POLICY_ID: entry(SamplePlan(columns=("wishes",)))})
    with pytest.raises(BatchError, match="wishes"):
        unit.sample()


def test_a_failing_environment_or_client_is_an_environment_error_with_its_traceback(make: Make) -> None:
    unit = make(
        env=MULTI, env_config={"fault": "raise"}, policies={DEFAULT_POLICY_ID: entry()}, num_envs_per_worker=1
    )  # fmt: skip
    with pytest.raises(EnvError, match="on purpose") as caught:
        unit.sample()
    assert "Traceback" in caught.value.traceback_text
    unit = make(env="general_parts:Broken", num_envs_per_worker=1, seed=None)
    with pytest.raises(EnvError, match="client fails on purpose") as caught:
        unit.sample()
    assert "Traceback" in caught.value.traceback_text


def test_a_failing_callback_is_no_environment_error(make: Make) -> None:
    unit = make(callbacks="general_parts:Failing")
    with pytest.raises(ConfigError, match=r"'general_parts:Failing': on_episode_step failed: .*callback fails"):
        unit.sample()


def test_stop_leaves_between_two_turns_and_for_good(make: Make) -> None:
    unit = make()
    unit.stop()
    for _ in range(2):
        with pytest.raises(StopSampling):
            unit.sample()


def assert_stop_ends_a_wait(unit: SamplerUnit) -> None:
    thread, raised = in_thread(unit)
    deadline = time.monotonic() + 10
    while unit.in_env_s <= 0.1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    began = time.monotonic()
    unit.stop()
    thread.join(5)
    assert time.monotonic() - began < 2
    assert isinstance(raised[0], StopSampling)


def test_stop_ends_a_wait_for_clients(make: Make) -> None:
    unit = make(
        env="general_parts:Silent", num_envs_per_worker=1, rollout_fragment_length=10, seed=None
    )  # fmt: skip
    assert_stop_ends_a_wait(unit)


def test_stop_ends_a_wait_for_environments_in_other_processes(make: Make) -> None:
    unit = make(env="general_parts:SlowEnv", remote_worker_envs=True)
    assert_stop_ends_a_wait(unit)


def test_remote_environments_that_crash_are_replaced_as_often_as_is_allowed(make: Make) -> None:
    settings: dict[str, Any] = {
        "env": "aiorl.testing.envs:FaultyEnv", "env_config": {"fault": "exit", "at_step": 3},
        "remote_worker_envs": True, "num_envs_per_worker": 1, "rollout_fragment_length": 4,
    }  # fmt: skip
    unit = make(max_env_restarts_per_hour=5, **settings)
    assert unit.sample().env_steps == 4
    assert unit.worker.async_env.restarts == 1  # type: ignore[attr-defined]
    with pytest.raises(EnvError):
        make(**settings).sample()


def test_r75_sampling_in_the_background_takes_up_snapshots_and_ends_with_the_unit(make: Make) -> None:
    unit = make(sample_async=True, num_envs_per_worker=1, observation_filter="ConcurrentMeanStdFilter")
    assert unit.sample().first_version == 0
    unit.offer(snapshot(3, [DEFAULT_POLICY_ID]))
    assert unit.sample().first_version == 3, "as of what has arrived when the batch is taken"
    deadline = time.monotonic() + 5
    while unit.version < 3 and time.monotonic() < deadline:
        unit.sample()
    assert unit.version == 3
    thread, raised = in_thread(unit)
    unit.stop()
    thread.join(5)
    assert isinstance(raised[0], StopSampling)
    deadline = time.monotonic() + 5
    while unit.worker.sampler.is_alive and time.monotonic() < deadline:  # type: ignore[union-attr]
        time.sleep(0.01)
    assert not unit.worker.sampler.is_alive  # type: ignore[union-attr]


def test_sampling_in_the_background_stops_while_its_environment_blocks(make: Make) -> None:
    unit = make(env="general_parts:HeldEnv", sample_async=True, num_envs_per_worker=1)
    thread, raised = in_thread(unit)
    try:
        assert general_parts.HeldEnv.is_held.wait(10)
        began = time.monotonic()
        unit.stop()
        thread.join(5)
        assert time.monotonic() - began < 2
    finally:
        general_parts.HeldEnv.may_go_on.set()
    assert isinstance(raised[0], StopSampling)


def test_a_monitor_notes_the_episodes_of_each_environment(make: Make, tmp_path: Path) -> None:
    make(env="aiorl.testing.envs:CountingEnv", monitor=True, log_dir=str(tmp_path)).sample()
    assert {path.name for path in (tmp_path / "monitor").iterdir()} == {"worker-1-env-0", "worker-1-env-1"}


def worker_part(**settings: Any) -> WorkerPart:
    return WorkerPart.from_dict({"env": "CartPole-v1", **settings})


def test_seeds_depend_on_run_seed_slot_and_unit_only() -> None:
    assert unit_seed(5, UnitPlace(2, "ff")) == unit_seed(5, UnitPlace(2, "aa")) == 7
    assert unit_seed(5, UnitPlace(2, "ff", 1)) == unit_seed(5, UnitPlace(2, "aa", 1))
    assert len({unit_seed(5, UnitPlace(slot, "ff", unit)) for slot in range(1, 9) for unit in range(4)}) == 32


def test_who_takes_over_a_slot_gets_other_numbers_than_its_predecessor_and_the_same_each_time() -> None:
    seeds = [unit_seed(5, UnitPlace(2, "ff", unit), life) for life in range(3) for unit in range(2)]
    assert len(set(seeds)) == 6
    assert unit_seed(5, UnitPlace(2, "aa"), 1) == unit_seed(5, UnitPlace(2, "ff"), 1)


def test_a_monitor_writes_into_the_runs_directory_where_it_is_to_be_seen(tmp_path: Path) -> None:
    place = UnitPlace(1, "1")
    assert monitor_directory(worker_part(log_dir=str(tmp_path)), place) is None
    seen = worker_part(monitor=True, log_dir=str(tmp_path))
    assert monitor_directory(seen, place) == str(tmp_path / "monitor")
    assert monitor_directory(seen, UnitPlace(1, "1", 2)) == str(tmp_path / "monitor" / "sampler-2")


def test_a_monitor_on_another_host_writes_below_the_workers_own_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    elsewhere = worker_part(monitor=True, log_dir="/learners/runs/one")
    assert monitor_directory(elsewhere, UnitPlace(1, "1")) == os.path.join(str(tmp_path), "monitor", "one")


def test_the_step_clock_shows_time_only_while_a_step_is_under_way() -> None:
    clock = StepClock()
    assert clock.in_step_s == 0
    clock.step()
    assert 0 <= clock.in_step_s < 60
    clock.idle()
    assert clock.in_step_s == 0
