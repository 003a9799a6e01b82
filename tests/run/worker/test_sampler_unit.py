"""Fragments of a worker's sampler, in lockstep and polled turn by turn."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
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
from units import LOCKSTEP, POLLED, entry, make_unit, network

from aiorl.compat.rollout_worker import RolloutWorker
from aiorl.config import registry
from aiorl.config.worker import WorkerPart
from aiorl.data import columns as c
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.fragment import SamplePlan
from aiorl.data.spaces import space_to_dict
from aiorl.env.base_env import FinishedGame
from aiorl.env.vector_env import SerialEnv
from aiorl.errors import BatchError, ConfigError, PolicyError
from aiorl.net.wire.decoding import decode
from aiorl.net.wire.encoding import encode
from aiorl.net.wire.messages import Samples, Snapshot
from aiorl.offline.estimators import ImportanceSamplingEstimator
from aiorl.process.log_once import log_once
from aiorl.run.ingest import check_samples
from aiorl.run.report.results import Progress, Results
from aiorl.run.worker.sampler_unit import (
    SamplerUnit,
    StopSampling,
    UnitPlace,
    monitor_directory,
    unit_seed,
)
from aiorl.sampling.callbacks import DefaultCallbacks
from aiorl.sampling.worker import get_global_worker
from benchmarks.acting_mlp import make_acting_graph, mlp_weights

PPO_PLAN = SamplePlan(
    "gae", {"gamma": 0.9, "lam": 0.8}, (c.OBS, c.ACTIONS, c.REWARDS, c.ADVANTAGES)
)
V_TRACE_PLAN = SamplePlan(
    "none",
    {},
    (c.OBS, c.REWARDS, c.TERMINATEDS, c.TRUNCATEDS, c.BOOTSTRAP_VALUES, c.EPS_ID, c.LAST_OBS),
)
NETWORK = network(3)
WEIGHTS = NETWORK[2]
MULTI = "aiorl.testing.multi_agent_envs:CountingMultiAgentEnv"
COUNTING = "aiorl.testing.envs:CountingEnv"
CARTPOLE: dict[str, Any] = {"env": "CartPole-v1", "network": network(4)}
WAYS = pytest.mark.parametrize("way", [LOCKSTEP, {}], ids=["in lockstep", "polled"])

Make = Callable[..., SamplerUnit]


def only(plan: SamplePlan = PPO_PLAN, **settings: Any) -> dict[str, Any]:
    """Return the default policy's part."""
    return {DEFAULT_POLICY_ID: entry(plan, **settings)}


def own_spaces() -> dict[str, Any]:
    return {
        "observation_space": space_to_dict(general_parts.VECTOR),
        "action_space": space_to_dict(spaces.Discrete(2)),
    }


def snapshot(version: int, policies: Any, scale: float = 1.0, **more: Any) -> Snapshot:
    weights = {name: array * np.float32(scale) for name, array in WEIGHTS.items()}
    filters, acks = more.pop("filters", {}), more.pop("acks", {})
    return Snapshot(
        version, dict.fromkeys(policies, weights), filters, acks, {"timestep": 10 * version}
    )


@pytest.fixture
def make() -> Iterator[Make]:
    """Return a factory of samplers, by default of CountingEnv and polled; all are closed at the
    end.
    """
    made: list[SamplerUnit] = []

    def make_one(policies: dict[str, Any] | None = None, **settings: Any) -> SamplerUnit:
        defaults = {"env": COUNTING, "num_envs_per_worker": 2, "network": NETWORK, **POLLED}
        made.append(make_unit(policies or only(), **{**defaults, **settings}))
        return made[-1]

    yield make_one
    for unit in made:
        unit.close()


def rows(produced: Samples) -> dict[str, np.ndarray]:
    return dict(produced.batches[DEFAULT_POLICY_ID])


def in_thread(unit: SamplerUnit) -> tuple[threading.Thread, list[BaseException]]:
    """Start to sample in a thread until an error is raised, which is put into the list."""
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


@WAYS
def test_a_unit_samples_the_columns_of_the_plan_under_the_snapshots_version(
    make: Make, way: dict[str, Any]
) -> None:
    unit = make(version=4, **way)
    produced = unit.sample()
    assert rows(produced).keys() == set(PPO_PLAN.columns)
    assert rows(produced)[c.OBS].shape == ((8, 2, 3) if way else (16, 1, 3))
    assert rows(produced)[c.ADVANTAGES].dtype == np.float32
    assert (produced.env_steps, produced.agent_steps, produced.length, produced.num_envs) == (
        16,
        16,
        8,
        2,
    )
    assert (produced.first_version, produced.last_version, unit.version) == (4, 4, 4)
    assert unit.worker.policy_map[DEFAULT_POLICY_ID].global_timestep == 40
    assert produced.episodes["lengths"].tolist() == [5, 5]
    assert unit.in_env_s == 0
    assert unit.sample().perf["iters"] == 8


@WAYS
def test_r27_the_same_seed_and_slot_give_the_same_rows_and_another_slot_others(
    make: Make, way: dict[str, Any]
) -> None:
    """Without a seed, workers have different rows."""
    more = {"rollout_fragment_length": 30, **way}
    seeded = [rows(make(slot=slot, **more).sample())[c.ACTIONS] for slot in (1, 1, 2)]
    np.testing.assert_array_equal(seeded[0], seeded[1])
    assert not np.array_equal(seeded[0], seeded[2])
    unseeded = [rows(make(seed=None, **more).sample())[c.ACTIONS] for _ in range(2)]
    assert not np.array_equal(*unseeded)


@WAYS
def test_r6_an_offered_snapshot_governs_the_next_fragment(make: Make, way: dict[str, Any]) -> None:
    unit = make(**way)
    unit.sample()
    unit.offer(snapshot(7, [DEFAULT_POLICY_ID], scale=0.5))
    produced = unit.sample()
    assert (produced.first_version, produced.last_version) == (7, 7)
    weights = unit.worker.policy_map[DEFAULT_POLICY_ID].get_weights()
    np.testing.assert_array_equal(weights["pi_w0"], WEIGHTS["pi_w0"] * np.float32(0.5))


@WAYS
def test_stop_abandons_the_fragment_for_good(make: Make, way: dict[str, Any]) -> None:
    unit = make(**way)
    unit.stop()
    for _ in range(2):
        with pytest.raises(StopSampling):
            unit.sample()


@WAYS
def test_filter_deltas_contain_observations_since_the_last_delta(
    make: Make, way: dict[str, Any]
) -> None:
    unit = make(observation_filter="MeanStdFilter", **way)
    for sequence in (1, 2):
        unit.sample()
        # every observation, including final ones
        assert unit.take_deltas(sequence)[DEFAULT_POLICY_ID]["n"] >= 16
    assert unit.take_deltas(3)[DEFAULT_POLICY_ID]["n"] == 0
    assert make(**way).take_deltas(1) == {}


@WAYS
def test_a_monitor_records_the_episodes_of_each_environment(
    make: Make, tmp_path: Path, way: dict[str, Any]
) -> None:
    make(monitor=True, log_dir=str(tmp_path), **way).sample()
    assert {path.name for path in (tmp_path / "monitor").iterdir()} == {
        "worker-1-env-0",
        "worker-1-env-1",
    }


@WAYS
def test_rows_of_a_raw_plan_contain_unfiltered_observations(
    make: Make, way: dict[str, Any]
) -> None:
    plan = SamplePlan("none", {}, (c.OBS, c.ACTION_DIST_INPUTS), raw_obs=True)
    unit, plain = (
        make(only(plan), observation_filter="MeanStdFilter", **way),
        make(only(plan), **way),
    )
    first = rows(plain.sample())[c.OBS].reshape(-1, 3)[0]
    own = unit.worker.filters[DEFAULT_POLICY_ID]
    own.learn(np.random.default_rng(0).normal(3.0, 2.0, (50, 3)))
    own.is_frozen = True
    found = {
        name: column.reshape(-1, column.shape[-1]) for name, column in rows(unit.sample()).items()
    }
    np.testing.assert_array_equal(found[c.OBS][0], first)
    graph: Any = plain.worker.policy_map[DEFAULT_POLICY_ID]
    np.testing.assert_allclose(
        found[c.ACTION_DIST_INPUTS], graph.graph.run(own(found[c.OBS]))[0], atol=1e-5
    )
    assert unit.take_deltas(1)[DEFAULT_POLICY_ID]["n"] == 50


@pytest.mark.parametrize(
    ("settings", "is_eager"),
    [({}, False), ({"eager": True}, True), ({"eager": True, "no_eager_on_workers": True}, False)],
)
def test_a_users_own_policies_are_eager_on_workers_if_set(
    make: Make, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], is_eager: bool
) -> None:
    eager = type("Eager", (PlainPolicy,), {})
    monkeypatch.setattr(PlainPolicy, "as_eager", classmethod(lambda cls: eager), raising=False)
    unit = make(only(policy_class="plain_policies:PlainPolicy"), **settings)
    assert isinstance(unit.worker.policy_map[DEFAULT_POLICY_ID], eager) == is_eager


def test_estimates_of_a_worker_come_out_in_the_runs_results(make: Make) -> None:
    """SPEC 11: off_policy_estimator; each estimate passes the wire once."""
    unit = make()
    assert unit.worker.sampler.lockstep is None, "its fragments are not of whole rows"
    estimator = ImportanceSamplingEstimator(unit.worker.policy_map[DEFAULT_POLICY_ID], 0.9)
    unit.worker.reader.reward_estimators = [estimator]
    produced = unit.sample()
    sent = produced.episodes
    assert {name for name in sent if name.startswith("estimate/")} == {
        "estimate/is/V_prev",
        "estimate/is/V_step_IS",
        "estimate/is/V_gain_est",
    }
    np.testing.assert_allclose(sent["estimate/is/V_step_IS"], sent["estimate/is/V_prev"], rtol=1e-5)
    assert estimator.get_metrics() == []
    arrived: Any = decode([bytes(frame) for frame in encode(produced)])
    results = Results(100, now=0.0)
    results.add_episodes(check_samples(arrived))
    found = results.finish_iteration(1.0, Progress(0, 0))["off_policy_estimator"]
    assert found["is"].keys() == {"V_prev", "V_step_IS", "V_gain_est"}
    assert found["is"]["V_prev"] == pytest.approx(sent["estimate/is/V_prev"].mean())


def test_a_fake_sampler_repeats_the_first_rows_forever(make: Make) -> None:
    unit = make(fake_sampler=True)
    first, again = (rows(unit.sample()) for _ in range(2))
    assert len(first[c.OBS]) == 16
    for name in first:
        np.testing.assert_array_equal(again[name], first[name])


def test_sequences_have_bootstrap_values_of_true_final_observations(make: Make) -> None:
    unit = make(
        only(V_TRACE_PLAN, layout="sequences", sequence_length=8), env_config={"end": "truncate"}
    )
    found = rows(unit.sample())
    assert found[c.OBS].shape == (8, 2, 3)
    assert found[c.VALID].all()
    policy = unit.worker.policy_map[DEFAULT_POLICY_ID]
    assert found[c.TRUNCATEDS].sum() == 2
    expected = np.zeros((8, 2), np.float32)
    finals = found[c.OBS] + np.array([0, 1, 0], np.float32)
    expected[found[c.TRUNCATEDS]] = policy.values(finals[found[c.TRUNCATEDS]])  # type: ignore[attr-defined]
    np.testing.assert_allclose(found[c.BOOTSTRAP_VALUES], expected, rtol=1e-5)
    assert found[c.LAST_OBS].tolist() == [[1.0, 3.0, 0.0]] * 2


def test_several_policies_send_trained_rows_and_report_rewards_by_policy(make: Make) -> None:
    unit = make(
        {
            "red": entry(PPO_PLAN, **own_spaces()),
            "blue": entry(
                PPO_PLAN,
                policy_class="plain_policies:PlainPolicy",
                is_trained=False,
                config={"level": 3},
            ),
        },
        env=MULTI,
        env_config={"lengths": [3, 5, 4]},
        multiagent={"policy_mapping_fn": "general_parts:by_number"},
        num_envs_per_worker=1,
        rollout_fragment_length=10,
        callbacks="general_parts:Noting",
    )
    produced = unit.sample()
    assert produced.batches.keys() == {"red"}
    assert produced.env_steps == 10
    assert produced.agent_steps == 2 * (3 + 5 + 4)
    assert produced.batches["red"][c.OBS].shape == (14, 1, 3)
    episodes = produced.episodes
    assert episodes["lengths"].tolist() == [5, 5]
    assert sorted(episodes["policy_reward/red"].tolist()) == [6.0, 6.0, 10.0, 10.0]
    assert episodes["policy_reward/blue"].tolist() == [15.0, 15.0]
    assert episodes["custom/height"].tolist() == [7.0, 7.0]
    assert episodes["hist/steps"].tolist() == [1.0, 5.0, 1.0, 5.0]
    blue = unit.worker.policy_map["blue"]
    assert blue.config["level"] == 3
    assert blue.observation_space == general_parts.VECTOR, "the environment's, since none was given"


def test_r131_agents_that_share_the_default_policy_are_counted_as_agents_not_as_env_steps(
    make: Make,
) -> None:
    produced = make(env=MULTI, env_config={"lengths": [5, 5, 5]}, num_envs_per_worker=2).sample()
    assert (produced.env_steps, produced.agent_steps) == (16, 48)


def test_each_policys_filter_has_its_delta(make: Make) -> None:
    unit = make(
        dict.fromkeys(("red", "blue"), entry(PPO_PLAN)),
        env=MULTI,
        multiagent={"policy_mapping_fn": "general_parts:by_number"},
        num_envs_per_worker=1,
        rollout_fragment_length=10,
        observation_filter="MeanStdFilter",
    )
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


def test_missing_or_unsuitable_objects_are_refused_with_their_key(make: Make) -> None:
    with pytest.raises(ConfigError, match="policy_mapping_fn"):
        make(multiagent={"policy_mapping_fn": "general_parts:missing"})
    with pytest.raises(ConfigError) as caught:
        make(callbacks="general_parts:by_number")
    assert caught.value.key == "callbacks"
    with pytest.raises(ConfigError, match="by_number"):
        make(only(policy_class="general_parts:by_number"))
    with pytest.raises(PolicyError, match=r"Discrete\(3\)"):
        make(env_config={"actions": 3})


def test_rows_without_a_needed_column_raise_an_error_that_names_it(make: Make) -> None:
    unit = make(only(SamplePlan(columns=("wishes",))))
    with pytest.raises(BatchError, match="wishes"):
        unit.sample()


def test_a_failing_callback_is_not_an_environment_error(make: Make) -> None:
    unit = make(callbacks="general_parts:Failing")
    with pytest.raises(
        ConfigError, match=r"'general_parts:Failing': on_episode_step .*callback fails"
    ):
        unit.sample()


def test_r75_sampling_in_the_background_takes_up_snapshots_and_ends_with_the_unit(
    make: Make,
) -> None:
    unit = make(
        sample_async=True, num_envs_per_worker=1, observation_filter="ConcurrentMeanStdFilter"
    )
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


# Lockstep


@pytest.mark.parametrize("slot", [1, 2])
def test_r31_worker_1_reports_its_data_flow_and_others_are_silent(
    make: Make, slot: int, caplog: pytest.LogCaptureFixture
) -> None:
    """4.11: at DEBUG periodically."""
    log_once.reset()
    try:
        unit = make(slot=slot, log_level="DEBUG", **LOCKSTEP)
        with caplog.at_level(logging.INFO, "aiorl"):
            unit.sample()
        assert ("aiorl.process.log_once" in [record.name for record in caplog.records]) == (
            slot == 1
        )
        assert (log_once.is_disabled, log_once.is_periodic) == (slot != 1, slot == 1)
    finally:
        log_once.reset()


def test_an_environment_with_other_spaces_than_the_learners_is_refused(make: Make) -> None:
    with pytest.raises(PolicyError):
        make(env="Acrobot-v1", **LOCKSTEP)
    with pytest.raises(PolicyError):
        SamplerUnit(
            WorkerPart.from_dict({"env": "CartPole-v1"}), {}, snapshot(0, []), UnitPlace(1, "1")
        )


@pytest.mark.rest_slow
@pytest.mark.skipif(importlib.util.find_spec("ale_py") is None, reason="needs the extra atari")
@pytest.mark.parametrize(
    ("preference", "shape", "limit"), [("deepmind", (20, 20, 1), 1.0), ("rllib", (210, 160, 3), 0)]
)
def test_r88_atari_games_get_wrappers_and_clipped_rewards_if_set(
    make: Make, preference: str, shape: tuple[int, ...], limit: float
) -> None:
    size = int(np.prod(shape))
    weights = mlp_weights(size, 4)
    graph, spec = make_acting_graph(size, spaces.Discrete(4), 4, weights)
    unit = make(
        only(SamplePlan(columns=(c.OBS, c.REWARDS))),
        env="BreakoutNoFrameskip-v4",
        preprocessor_pref=preference,
        model={"dim": 20, "framestack": False},
        network=(graph, dataclasses.replace(spec, obs_shape=shape), weights),
        callbacks=None,
        num_envs_per_worker=1,
    )
    assert unit.worker.sampler.lockstep.env.observation_space.shape == shape  # type: ignore[union-attr]
    assert unit.worker.reward_limit == limit


def test_whole_games_are_reported_if_wrappers_cut_them_into_episodes(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SerialEnv, "take_finished_games", lambda self: [FinishedGame(3.0, 120)])
    unit = make(**LOCKSTEP)
    episodes = unit.sample().episodes
    assert (episodes["rewards"].tolist(), episodes["lengths"].tolist()) == ([3.0], [120])


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"callbacks": "general_parts:Noting"}, "callbacks"),
        ({"soft_horizon": True, "horizon": 9}, "soft_horizon"),
        ({"no_done_at_end": True}, "no_done_at_end"),
        ({"sample_async": True}, "sample_async"),
        ({"fake_sampler": True}, "fake_sampler"),
        ({"multiagent": {"observation_fn": "general_parts:doubled"}}, "multiagent.observation_fn"),
        ({"policies": only(policy_class="plain_policies:PlainPolicy")}, ""),
        ({"policies": only(SamplePlan(columns=("wishes",)))}, "'wishes'"),
        ({"env": MULTI, "vectorize": "auto"}, ""),
        ({"env": MULTI, "vectorize": "remote"}, ""),
    ],
)
def test_environments_are_polled_if_whole_rows_are_needed_and_the_reason_is_logged(
    make: Make, settings: dict[str, Any], value: str, caplog: pytest.LogCaptureFixture
) -> None:
    log_once.reset()
    with caplog.at_level(logging.INFO, "aiorl"):
        unit = make(**{**LOCKSTEP, **settings})
    assert getattr(unit.worker.sampler, "lockstep", None) is None
    (said,) = [
        record.getMessage() for record in caplog.records if record.name == "aiorl.sampling.build"
    ]
    assert value in said


def test_exploration_without_memory_runs_in_lockstep(make: Make) -> None:
    plan = SamplePlan(columns=(c.OBS, c.ACTIONS))
    for exploration, explores in (
        ({"type": "EpsilonGreedy", "epsilon": 0.0}, False),
        ("Random", True),
    ):
        unit = make(
            only(plan, config={"exploration": exploration}), rollout_fragment_length=100, **LOCKSTEP
        )
        arrays = rows(unit.sample())
        policy = unit.worker.policy_map[DEFAULT_POLICY_ID]
        greedy = policy.compute_actions(arrays[c.OBS].reshape(-1, 3), explore=False)[0]
        assert arrays[c.ACTIONS].shape == (100, 2)
        assert (arrays[c.ACTIONS].reshape(-1) != greedy).any() == explores


def test_hooks_that_only_the_learner_calls_leave_lockstep_on(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type("Hooked", (DefaultCallbacks,), {"on_train_result": lambda self, **kwargs: None})
    monkeypatch.setattr("general_parts.Hooked", kind, raising=False)
    assert make(callbacks="general_parts:Hooked").worker.sampler.lockstep is not None


def test_hooks_get_the_same_rollout_worker_each_time(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: list[Any] = []

    def note(self: DefaultCallbacks, *, worker: Any, **kwargs: Any) -> None:
        arguments.append(worker)

    hooks = {"on_episode_start": note, "on_episode_step": note, "on_sample_end": note}
    kind = type("Noticing", (DefaultCallbacks,), hooks)
    monkeypatch.setattr("general_parts.Noticing", kind, raising=False)
    unit = make(callbacks="general_parts:Noticing", rollout_fragment_length=4)
    unit.sample()
    worker = arguments[0]
    assert isinstance(worker, RolloutWorker)
    assert len(arguments) > 4
    assert all(argument is worker for argument in arguments)
    assert worker is unit.worker.rollout_worker() is get_global_worker()
    assert worker.creation_args() == {}
    assert worker.policy_map is unit.worker.policy_map
    worker.global_vars = {"timestep": 3}
    assert unit.worker.global_vars == {"timestep": 3} == worker.get_global_vars()
    worker.notes = ["of the user"]
    assert not hasattr(unit.worker, "notes")


def test_a_run_without_code_of_users_makes_no_rollout_worker(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(registry, "wrap_worker")
    for settings in (LOCKSTEP, {"callbacks": None, "no_done_at_end": True}):
        assert make(**settings).sample().env_steps > 0


@pytest.mark.parametrize("vectorize", ["native", "remote"])
def test_every_form_of_environments_can_be_polled_too(make: Make, vectorize: str) -> None:
    unit = make(
        vectorize=vectorize,
        callbacks="general_parts:Noting",
        rollout_fragment_length=80,
        **CARTPOLE,
    )
    produced = unit.sample()
    assert rows(produced)[c.OBS].shape == (160, 1, 4)
    assert len(produced.episodes["custom/height"]) == len(produced.episodes["lengths"]) > 0


@pytest.mark.parametrize("vectorize", ["serial", "remote"])
def test_r102_a_step_excluded_from_training_ends_lockstep_and_leaves_no_row(
    make: Make, vectorize: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan = SamplePlan(columns=(c.OBS, c.REWARDS))
    unit = make(
        only(plan),
        env="general_parts:SometimesUntrained",
        rollout_fragment_length=10,
        callbacks=None,
        vectorize=vectorize,
    )
    with caplog.at_level(logging.INFO, "aiorl"):
        first, second = unit.sample(), unit.sample()
    assert "aiorl.sampling.sampler" in [record.name for record in caplog.records]
    for produced in (first, second):
        assert produced.env_steps == 20
        assert set(rows(produced)[c.OBS][..., 1].ravel()) == {
            0,
            1,
            2,
            4,
        }, "without the fourth step of each episode"
        assert min(produced.perf.values()) >= 0


# Places, seeds, clocks


def test_seeds_depend_on_run_seed_slot_and_unit_only() -> None:
    assert unit_seed(5, UnitPlace(2, "ff")) == unit_seed(5, UnitPlace(2, "aa")) == 7
    assert unit_seed(5, UnitPlace(2, "ff", 1)) == unit_seed(5, UnitPlace(2, "aa", 1))
    assert (
        len(
            {unit_seed(5, UnitPlace(slot, "ff", unit)) for slot in range(1, 9) for unit in range(4)}
        )
        == 32
    )


def test_the_successor_in_a_slot_has_another_but_reproducible_seed() -> None:
    seeds = [unit_seed(5, UnitPlace(2, "ff", unit), life) for life in range(3) for unit in range(2)]
    assert len(set(seeds)) == 6
    assert unit_seed(5, UnitPlace(2, "aa"), 1) == unit_seed(5, UnitPlace(2, "ff"), 1)


def worker_part(**settings: Any) -> WorkerPart:
    return WorkerPart.from_dict({"env": "CartPole-v1", **settings})


def test_a_monitor_writes_to_the_runs_directory_or_below_the_workers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = UnitPlace(1, "1")
    assert monitor_directory(worker_part(log_dir=str(tmp_path)), place) is None
    seen = worker_part(monitor=True, log_dir=str(tmp_path))
    assert monitor_directory(seen, place) == str(tmp_path / "monitor")
    assert monitor_directory(seen, UnitPlace(1, "1", 2)) == str(tmp_path / "monitor" / "sampler-2")
    monkeypatch.chdir(tmp_path)
    elsewhere = worker_part(monitor=True, log_dir="/learners/runs/one")
    assert monitor_directory(elsewhere, place) == os.path.join(str(tmp_path), "monitor", "one")
