from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from gymnasium import spaces

from aiorl.config.worker import WorkerPart
from aiorl.data import columns as c
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.sample_plan import SamplePlan
from aiorl.errors import EnvError, PolicyError
from aiorl.protocol.messages import Snapshot
from aiorl.worker.apply import StopSampling
from aiorl.worker.unit import SamplerUnit, unit_seed
from benchmarks.acting_mlp import make_acting_graph, mlp_weights

PLAN = SamplePlan("gae", {"gamma": 0.99, "lam": 0.95}, (c.OBS, c.ACTIONS, c.REWARDS, c.ADVANTAGES), (c.LAST_OBS,))


WEIGHTS = mlp_weights(4, 2)
GRAPH, SPEC = make_acting_graph(4, spaces.Discrete(2), 2, WEIGHTS)


def make_unit(*, slot: int = 1, version: int = 0, **settings: object) -> SamplerUnit:
    part = WorkerPart.from_dict(
        {
            "env": "CartPole-v1", "num_envs_per_worker": 3, "rollout_fragment_length": 20, "seed": 5,
            "vectorize": "serial", "sample_plan": dataclasses.asdict(PLAN), **settings,
        }
    )  # fmt: skip
    graphs = {DEFAULT_POLICY_ID: {"graph": GRAPH, "spec": SPEC.to_dict()}}
    return SamplerUnit(part, graphs, snapshot(version), slot=slot, unit_index=0, incarnation="ab12")


def snapshot(version: int, scale: float = 1.0) -> Snapshot:
    weights = {name: array * np.float32(scale) for name, array in WEIGHTS.items()}
    return Snapshot(version, {DEFAULT_POLICY_ID: weights}, {}, {}, {})


def test_a_unit_samples_the_columns_of_the_plan_under_the_snapshots_version() -> None:
    unit = make_unit(version=4)
    produced = unit.sample()
    assert produced.fragment.columns[c.OBS].shape == (20, 3, 4)
    assert set(PLAN.columns) <= produced.fragment.columns.keys()
    assert c.LAST_OBS in produced.fragment.extras
    assert (produced.first_version, produced.last_version, unit.version) == (4, 4, 4)
    assert produced.perf["iters"] == 20
    assert unit.in_env_s == 0
    unit.close()


def test_r27_the_same_seed_and_slot_give_the_same_rows_and_another_slot_others() -> None:
    rows = []
    for slot in (1, 1, 2):
        unit = make_unit(slot=slot)
        rows.append(unit.sample().fragment.columns[c.OBS])
        unit.close()
    np.testing.assert_array_equal(rows[0], rows[1])
    assert not np.array_equal(rows[0], rows[2])


def test_r6_an_offered_snapshot_governs_the_next_fragment() -> None:
    unit = make_unit()
    unit.sample()
    unit.offer(snapshot(7, scale=0.5))
    produced = unit.sample()
    assert (produced.first_version, produced.last_version) == (7, 7)
    unit.close()


def test_stop_leaves_the_fragment_unfinished() -> None:
    unit = make_unit()
    unit.stop()
    with pytest.raises(StopSampling):
        unit.sample()
    unit.close()


def test_filter_deltas_hold_what_was_seen_since_the_last_one() -> None:
    unit = make_unit(observation_filter="MeanStdFilter")
    unit.sample()
    first = unit.take_delta(1)
    unit.sample()
    second = unit.take_delta(2)
    assert first["n"] >= 60  # every observation, final ones included
    assert second["n"] >= 60
    assert unit.take_delta(3)["n"] == 0
    unit.close()
    unit = make_unit()
    assert unit.take_delta(1) == {}
    unit.close()


def test_an_environment_of_other_spaces_than_the_learners_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"observations of shape|action space"):
        make_unit(env="Acrobot-v1")
    with pytest.raises(PolicyError, match="no graph"):
        SamplerUnit(
            WorkerPart.from_dict({"env": "CartPole-v1"}), {}, snapshot(0), slot=1, unit_index=0, incarnation="1"
        )


def test_a_failing_environment_comes_through_with_its_traceback() -> None:
    with pytest.raises(EnvError):
        make_unit(env="aiorl.testing.envs:FaultyEnv", env_config={"fault": "constructor"})


def test_seeds_depend_on_run_seed_slot_and_unit_only() -> None:
    assert unit_seed(5, 2, 0, "ff") == unit_seed(5, 2, 0, "aa") == 7
    assert unit_seed(5, 2, 1, "ff") == unit_seed(5, 2, 1, "aa")
    assert len({unit_seed(5, slot, unit, "ff") for slot in range(1, 9) for unit in range(4)}) == 32
    assert unit_seed(None, 1, 0, "ff") != unit_seed(None, 1, 0, "aa")
