from __future__ import annotations

import dataclasses
import importlib.util
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from aiorl.config.worker import WorkerPart
from aiorl.data import columns as c
from aiorl.data.columns import DEFAULT_POLICY_ID, ColumnSpec
from aiorl.data.fragment import SamplePlan
from aiorl.env.base_env import FinishedGame
from aiorl.errors import EnvError, PolicyError
from aiorl.learning.algorithms.batch_buffers import BatchBuffers
from aiorl.net.wire.messages import Snapshot
from aiorl.process.log_once import log_once
from aiorl.run.worker.sampler_unit import Produced, SamplerUnit, StopSampling, UnitPlace
from aiorl.sampling.callbacks import DefaultCallbacks
from benchmarks.acting_mlp import make_acting_graph, mlp_weights

PLAN = SamplePlan("gae", {"gamma": 0.99, "lam": 0.95}, (c.OBS, c.ACTIONS, c.REWARDS, c.ADVANTAGES, c.LAST_OBS))


MULTI = "aiorl.testing.multi_agent_envs:CountingMultiAgentEnv"
WEIGHTS = mlp_weights(4, 2)
GRAPH, SPEC = make_acting_graph(4, spaces.Discrete(2), 2, WEIGHTS)


def make(
    *, slot: int = 1, version: int = 0, policy: dict[str, object] | None = None, **settings: object
) -> SamplerUnit:
    part = WorkerPart.from_dict(
        {
            "env": "CartPole-v1", "num_envs_per_worker": 3, "rollout_fragment_length": 20, "seed": 5,
            "vectorize": "serial",
            "policies": {DEFAULT_POLICY_ID: {"sample_plan": dataclasses.asdict(PLAN), **(policy or {})}}, **settings,
        }
    )  # fmt: skip
    graphs = {DEFAULT_POLICY_ID: {"graph": GRAPH, "spec": SPEC.to_dict()}}
    return SamplerUnit(part, graphs, snapshot(version), UnitPlace(slot, "ab12"))


def policy_of(unit: SamplerUnit) -> Any:
    return unit.worker.policy_map[DEFAULT_POLICY_ID]


def snapshot(version: int, scale: float = 1.0) -> Snapshot:
    weights = {name: array * np.float32(scale) for name, array in WEIGHTS.items()}
    return Snapshot(version, {DEFAULT_POLICY_ID: weights}, {}, {}, {"timestep": 10 * version})


def rows(produced: Produced) -> dict[str, np.ndarray]:
    return dict(produced.batches[DEFAULT_POLICY_ID])


def test_a_unit_samples_the_columns_of_the_plan_under_the_snapshots_version() -> None:
    unit = make(version=4)
    produced = unit.sample()
    assert rows(produced)[c.OBS].shape == (20, 3, 4)
    assert rows(produced).keys() == set(PLAN.columns)
    assert (produced.env_steps, produced.agent_steps, produced.length, produced.num_envs) == (60, 60, 20, 3)
    assert (produced.first_version, produced.last_version, unit.version) == (4, 4, 4)
    assert policy_of(unit).global_timestep == 40
    assert produced.perf["iters"] == 20
    assert unit.in_env_s == 0
    unit.close()


def test_r27_the_same_seed_and_slot_give_the_same_rows_and_another_slot_others() -> None:
    observed = []
    for slot in (1, 1, 2):
        unit = make(slot=slot)
        observed.append(rows(unit.sample())[c.OBS])
        unit.close()
    np.testing.assert_array_equal(observed[0], observed[1])
    assert not np.array_equal(observed[0], observed[2])


@pytest.mark.parametrize("slot", [1, 2])
def test_r31_worker_1_reports_its_data_flow_and_further_ones_keep_quiet(
    slot: int, caplog: pytest.LogCaptureFixture
) -> None:
    """4.11: at DEBUG again and again."""
    log_once.reset()
    try:
        unit = make(slot=slot, log_level="DEBUG")
        with caplog.at_level(logging.INFO, "aiorl"):
            unit.sample()
        assert ("Raw observations" in caplog.text) == (slot == 1)
        assert (log_once._disabled, log_once._periodic) == (slot != 1, slot == 1)
    finally:
        log_once.reset()


def test_r6_an_offered_snapshot_governs_the_next_fragment() -> None:
    unit = make()
    unit.sample()
    unit.offer(snapshot(7, scale=0.5))
    produced = unit.sample()
    assert (produced.first_version, produced.last_version) == (7, 7)
    unit.close()


def test_stop_leaves_the_fragment_unfinished() -> None:
    unit = make()
    unit.stop()
    with pytest.raises(StopSampling):
        unit.sample()
    unit.close()


def test_filter_deltas_hold_what_was_seen_since_the_last_one() -> None:
    unit = make(observation_filter="MeanStdFilter")
    unit.sample()
    first = unit.take_deltas(1)[DEFAULT_POLICY_ID]
    unit.sample()
    second = unit.take_deltas(2)[DEFAULT_POLICY_ID]
    assert first["n"] >= 60  # every observation, final ones included
    assert second["n"] >= 60
    assert unit.take_deltas(3)[DEFAULT_POLICY_ID]["n"] == 0
    unit.close()
    unit = make()
    assert unit.take_deltas(1) == {}
    unit.close()


@pytest.mark.parametrize("callbacks", [None, "general_parts:Watching"])  # in lockstep, and polled turn by turn
def test_rows_of_a_raw_plan_hold_observations_before_the_filter_that_the_policy_acts_behind(callbacks: Any) -> None:
    plan = SamplePlan("none", {}, (c.OBS, c.ACTION_DIST_INPUTS), raw_obs=True)
    settings = {"callbacks": callbacks, "policy": {"sample_plan": dataclasses.asdict(plan)}}
    unit, plain = make(observation_filter="MeanStdFilter", **settings), make(**settings)
    first = rows(plain.sample())[c.OBS].reshape(-1, 4)[0]
    own = unit.worker.filters[DEFAULT_POLICY_ID]
    own.learn(np.random.default_rng(0).normal(3.0, 2.0, (50, 4)))
    own.is_frozen = True
    found = {name: column.reshape(-1, column.shape[-1]) for name, column in rows(unit.sample()).items()}
    np.testing.assert_array_equal(found[c.OBS][0], first)
    graph = policy_of(plain).graph
    np.testing.assert_allclose(found[c.ACTION_DIST_INPUTS], graph.run(own(found[c.OBS]))[0], atol=1e-5)
    assert unit.take_deltas(1)[DEFAULT_POLICY_ID]["n"] == 50
    unit.close()
    plain.close()


def test_an_environment_of_other_spaces_than_the_learners_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"observations of shape|action space"):
        make(env="Acrobot-v1")
    with pytest.raises(PolicyError, match="no graph"):
        SamplerUnit(WorkerPart.from_dict({"env": "CartPole-v1"}), {}, snapshot(0), UnitPlace(1, "1"))


def test_a_failing_environment_comes_through_with_its_traceback() -> None:
    with pytest.raises(EnvError):
        make(env="aiorl.testing.envs:FaultyEnv", env_config={"fault": "constructor"})


def test_a_monitor_notes_the_episodes_of_each_environment(tmp_path: Path) -> None:
    unit = make(monitor=True, log_dir=str(tmp_path), rollout_fragment_length=80)
    unit.sample()
    unit.close()
    names = {path.name for path in (tmp_path / "monitor").iterdir()}
    assert names == {f"worker-1-env-{index}" for index in range(3)}


@pytest.mark.skipif(importlib.util.find_spec("ale_py") is None, reason="needs the extra atari")
@pytest.mark.parametrize(
    ("preference", "shape", "limit"), [("deepmind", (20, 20, 1), 1.0), ("rllib", (210, 160, 3), 0)]
)
def test_r88_atari_games_get_their_wrappers_and_clipped_rewards_where_the_settings_ask_for_them(
    preference: str, shape: tuple[int, ...], limit: float
) -> None:
    size = int(np.prod(shape))
    part = WorkerPart.from_dict(
        {
            "env": "BreakoutNoFrameskip-v4", "preprocessor_pref": preference, "model": {"dim": 20, "framestack": False},
            "policies": {DEFAULT_POLICY_ID: {"sample_plan": {"columns": [c.OBS, c.REWARDS]}}},
        }
    )  # fmt: skip
    weights = mlp_weights(size, 4)
    graph, spec = make_acting_graph(size, spaces.Discrete(4), 4, weights)
    described = {**spec.to_dict(), "obs_shape": list(shape)}
    unit = SamplerUnit(
        part,
        {DEFAULT_POLICY_ID: {"graph": graph, "spec": described}},
        Snapshot(0, {DEFAULT_POLICY_ID: weights}, {}, {}, {}),
        UnitPlace(1, "1"),
    )
    assert unit.worker.sampler.lockstep.env.observation_space.shape == shape  # type: ignore[union-attr]
    assert unit.worker.sampler.lockstep._reward_limit == limit  # type: ignore[union-attr]
    unit.close()


def test_where_wrappers_cut_games_into_episodes_whole_games_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = make(rollout_fragment_length=100)
    monkeypatch.setattr(unit.worker.sampler.lockstep.env, "take_finished_games", lambda: [FinishedGame(3.0, 120)])  # type: ignore[union-attr]
    episodes = unit.sample().episodes
    assert (episodes.rewards.tolist(), episodes.lengths.tolist()) == ([3.0], [120])
    unit.close()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"callbacks": "general_parts:Noting"}, "callbacks has hooks for workers"),
        ({"soft_horizon": True, "horizon": 9}, "soft_horizon is set"),
        ({"no_done_at_end": True}, "no_done_at_end is set"),
        ({"sample_async": True}, "sample_async is set"),
        ({"fake_sampler": True}, "fake_sampler is set"),
        ({"multiagent": {"observation_fn": "general_parts:doubled"}}, "multiagent.observation_fn is set"),
        ({"policy": {"policy_class": "plain_policies:PlainPolicy"}}, "the policy acts in a way of its own"),
        ({"policy": {"sample_plan": {"columns": ["wishes"]}}}, "the column 'wishes' is wanted"),
        ({"env": MULTI}, "whole arrays"),
        ({"env": MULTI, "vectorize": "remote"}, "whole arrays"),
    ],
)  # fmt: skip
def test_environments_are_polled_where_somebody_asks_for_more_than_columns_and_the_log_says_why(
    settings: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    log_once.reset()
    is_counting = "env" in settings
    weights = mlp_weights(3, 2) if is_counting else WEIGHTS
    graph, spec = make_acting_graph(3, spaces.Discrete(2), 2, weights) if is_counting else (GRAPH, SPEC)
    entry = {"sample_plan": dataclasses.asdict(PLAN), **settings.pop("policy", {})}
    part = WorkerPart.from_dict(
        {"env": "CartPole-v1", "num_envs_per_worker": 2, "policies": {DEFAULT_POLICY_ID: entry}, **settings}
    )
    first = Snapshot(0, {DEFAULT_POLICY_ID: weights}, {}, {}, {})
    graphs = {DEFAULT_POLICY_ID: {"graph": graph, "spec": spec.to_dict()}}
    with caplog.at_level(logging.INFO, "aiorl"):
        unit = SamplerUnit(part, graphs, first, UnitPlace(1, "ab12"))
    try:
        assert unit.worker.sample_in_lockstep() is None
        assert re.search(f"polled turn by turn: .*{reason}", caplog.text)
    finally:
        unit.close()


def test_exploration_without_memory_is_done_in_lockstep() -> None:
    plan = dataclasses.asdict(SamplePlan(columns=(c.OBS, c.ACTIONS)))
    for exploration, share in (({"type": "EpsilonGreedy", "epsilon": 0.0}, 0.0), ("Random", 1.0)):
        unit = make(policy={"sample_plan": plan, "config": {"exploration": exploration}}, rollout_fragment_length=100)
        arrays = rows(unit.sample())
        policy = unit.worker.policy_map[DEFAULT_POLICY_ID]
        greedy = policy.compute_actions(arrays[c.OBS].reshape(-1, 4), explore=False)[0]
        assert arrays[c.ACTIONS].shape == (100, 3)
        assert (arrays[c.ACTIONS].reshape(-1) != greedy).any() == bool(share)
        unit.close()


def test_environments_in_lockstep_and_polled_give_the_same_new_obs_to_a_train_batch() -> None:
    """The algorithm asks for a column; how it is kept is the fragment's own affair."""
    plan = SamplePlan(columns=(c.OBS, c.NEW_OBS, c.TERMINATEDS))
    buffers = BatchBuffers([ColumnSpec(c.OBS, (4,)), ColumnSpec(c.NEW_OBS, (4,)), ColumnSpec(c.TERMINATEDS)])
    found = []
    for callbacks in (None, "general_parts:Watching"):
        unit = make(policy={"sample_plan": dataclasses.asdict(plan)}, callbacks=callbacks, rollout_fragment_length=50)
        arrays = rows(unit.sample())
        buffers.check(arrays)
        steps, num_envs = arrays[c.OBS].shape[:2]
        batch = buffers.sequences([arrays], num_envs, steps)
        found.append([buffers.column(batch, name).reshape(150, -1).copy() for name in plan.columns])
        unit.close()
    assert found[0][2].any(), "an episode ended"
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_hooks_that_only_the_learner_calls_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("Hooked", (DefaultCallbacks,), {"on_train_result": lambda self, **kwargs: None})
    monkeypatch.setattr("general_parts.Hooked", kind, raising=False)
    unit = make(callbacks="general_parts:Hooked")
    assert rows(unit.sample())[c.OBS].shape == (20, 3, 4)
    unit.close()


@pytest.mark.parametrize("vectorize", ["native", "remote"])
def test_every_form_of_environments_can_be_polled_too(vectorize: str) -> None:
    unit = make(vectorize=vectorize, callbacks="general_parts:Noting", rollout_fragment_length=80)
    produced = unit.sample()
    assert rows(produced)[c.OBS].shape == (240, 1, 4)
    assert len(produced.episodes.custom["height"]) == len(produced.episodes.lengths) > 0
    unit.close()


@pytest.mark.parametrize("vectorize", ["serial", "remote"])
def test_r102_a_step_that_is_not_to_be_trained_on_ends_lockstep_and_leaves_no_row(
    vectorize: str, caplog: pytest.LogCaptureFixture
) -> None:
    weights = mlp_weights(3, 2)
    graph, spec = make_acting_graph(3, spaces.Discrete(2), 2, weights)
    columns = (c.OBS, c.REWARDS)
    part = WorkerPart.from_dict(
        {
            "env": "lockstep_envs:SometimesUntrained", "num_envs_per_worker": 2, "rollout_fragment_length": 10,
            "vectorize": vectorize, "policies": {DEFAULT_POLICY_ID: {"sample_plan": {"columns": columns}}},
        }
    )  # fmt: skip
    graphs = {DEFAULT_POLICY_ID: {"graph": graph, "spec": spec.to_dict()}}
    unit = SamplerUnit(part, graphs, Snapshot(0, {DEFAULT_POLICY_ID: weights}, {}, {}, {}), UnitPlace(1, "ab12"))
    with caplog.at_level(logging.INFO, "aiorl"):
        first, second = unit.sample(), unit.sample()
    assert "is not to be trained on, so the environments begin anew" in caplog.text
    for produced in (first, second):
        assert produced.env_steps == 20
        assert set(rows(produced)[c.OBS][..., 1].ravel()) == {0, 1, 2, 4}, "without the fourth step of each episode"
        assert min(produced.perf.values()) >= 0
    unit.close()
