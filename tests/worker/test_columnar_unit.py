from __future__ import annotations

import dataclasses
import importlib.util
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from aiorl.config.worker import WorkerPart
from aiorl.data import columns as c
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.sample_plan import SamplePlan
from aiorl.env.base_env import FinishedGame
from aiorl.env.wrapping import Wrapping
from aiorl.errors import ConfigError, EnvError, PolicyError
from aiorl.log_once import log_once
from aiorl.wire.messages import Snapshot
from aiorl.worker.apply import StopSampling
from aiorl.worker.columnar_unit import ColumnarUnit, _is_deepmind
from aiorl.worker.make_unit import make_unit
from aiorl.worker.unit import Produced, UnitPlace
from benchmarks.acting_mlp import make_acting_graph, mlp_weights

PLAN = SamplePlan("gae", {"gamma": 0.99, "lam": 0.95}, (c.OBS, c.ACTIONS, c.REWARDS, c.ADVANTAGES), (c.LAST_OBS,))


WEIGHTS = mlp_weights(4, 2)
GRAPH, SPEC = make_acting_graph(4, spaces.Discrete(2), 2, WEIGHTS)


def make(
    *, slot: int = 1, version: int = 0, policy: dict[str, object] | None = None, **settings: object
) -> ColumnarUnit:
    part = WorkerPart.from_dict(
        {
            "env": "CartPole-v1", "num_envs_per_worker": 3, "rollout_fragment_length": 20, "seed": 5,
            "vectorize": "serial",
            "policies": {DEFAULT_POLICY_ID: {"sample_plan": dataclasses.asdict(PLAN), **(policy or {})}}, **settings,
        }
    )  # fmt: skip
    graphs = {DEFAULT_POLICY_ID: {"graph": GRAPH, "spec": SPEC.to_dict()}}
    unit = make_unit(part, graphs, snapshot(version), UnitPlace(slot, "ab12"))
    assert isinstance(unit, ColumnarUnit)
    return unit


def snapshot(version: int, scale: float = 1.0) -> Snapshot:
    weights = {name: array * np.float32(scale) for name, array in WEIGHTS.items()}
    return Snapshot(version, {DEFAULT_POLICY_ID: weights}, {}, {}, {"timestep": 10 * version})


def rows(produced: Produced) -> dict[str, np.ndarray]:
    return dict(produced.batches[DEFAULT_POLICY_ID])


def test_a_unit_samples_the_columns_of_the_plan_under_the_snapshots_version() -> None:
    unit = make(version=4)
    produced = unit.sample()
    assert rows(produced)[c.OBS].shape == (20, 3, 4)
    assert rows(produced).keys() == {*PLAN.columns, c.LAST_OBS}
    assert (produced.env_steps, produced.agent_steps, produced.length, produced.num_envs) == (60, 60, 20, 3)
    assert (produced.first_version, produced.last_version, unit.version) == (4, 4, 4)
    assert unit.policy.global_timestep == 40
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


def test_an_environment_of_other_spaces_than_the_learners_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"observations of shape|action space"):
        make(env="Acrobot-v1")
    with pytest.raises(PolicyError, match="no graph"):
        ColumnarUnit(WorkerPart.from_dict({"env": "CartPole-v1"}), {}, snapshot(0), UnitPlace(1, "1"))


def test_other_policies_than_the_learners_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="one policy"):
        make(policy={"policy_class": "plain_policies:PlainPolicy"})


def test_a_failing_environment_comes_through_with_its_traceback() -> None:
    with pytest.raises(EnvError):
        make(env="aiorl.testing.envs:FaultyEnv", env_config={"fault": "constructor"})


def test_the_policys_own_settings_reach_it() -> None:
    unit = make(policy={"config": {"exploration": {"type": "EpsilonGreedy", "epsilon": 1.0}}})
    assert unit.policy.exploration is not None
    assert unit.policy.config["worker_index"] == 1
    unit.close()


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
    unit = ColumnarUnit(
        part,
        {DEFAULT_POLICY_ID: {"graph": graph, "spec": described}},
        Snapshot(0, {DEFAULT_POLICY_ID: weights}, {}, {}, {}),
        UnitPlace(1, "1"),
    )
    assert unit.env.observation_space.shape == shape
    assert unit.sampler._assembler._limit == limit
    unit.close()


def test_where_wrappers_cut_games_into_episodes_whole_games_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = make(rollout_fragment_length=100)
    monkeypatch.setattr(unit.env, "take_finished_games", lambda: [FinishedGame(3.0, 120)])
    episodes = unit.sample().episodes
    assert (episodes.rewards.tolist(), episodes.lengths.tolist()) == ([3.0], [120])
    unit.close()


def test_a_columnar_worker_loads_nothing_of_the_general_path() -> None:
    code = (
        "import sys\n"
        "import aiorl.worker.service\n"
        "from aiorl.config.worker import WorkerPart\n"
        "from aiorl.errors import PolicyError\n"
        "from aiorl.worker.make_unit import make_unit\n"
        "from aiorl.worker.unit import UnitPlace\n"
        "try:\n"
        "    make_unit(WorkerPart(env='CartPole-v1'), {}, None, UnitPlace(1, '1'))\n"
        "except PolicyError:\n"
        "    pass\n"
        "assert 'aiorl.worker.columnar_unit' in sys.modules\n"
        "bad = [name for name in sys.modules if name.startswith(('aiorl.rollout', 'aiorl.offline'))\n"
        "       or name in ('aiorl.worker.general_unit', 'aiorl.sampler.iteration')]\n"
        "raise SystemExit(f'loaded {bad}' if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.skipif(importlib.util.find_spec("ale_py") is None, reason="needs the extra atari")
@pytest.mark.parametrize(("shape", "expected"), [((128,), False), ((210, 160), False), ((84, 84, 4), True)])
def test_r88_a_game_of_another_process_is_preprocessed_only_where_it_shows_its_screen(
    shape: tuple[int, ...], expected: bool
) -> None:
    env: Any = SimpleNamespace(unwrapped=[], observation_space=spaces.Box(0, 255, shape, np.uint8))
    assert _is_deepmind("ALE/Pong-v5", env, Wrapping(deepmind=True)) is expected
    assert not _is_deepmind("CartPole-v1", env, Wrapping(deepmind=True))
