from __future__ import annotations

from typing import Any

import numpy as np

from aiorl.acting.filters import MeanStdFilter
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.net.wire.messages import Snapshot
from aiorl.run.worker.sampler_unit import SnapshotSlot


class TapePolicy:
    """Writes down the weights and the timesteps it is given."""

    def __init__(self) -> None:
        self.tape: list[float] = []
        self.timesteps: list[int] = []

    def set_weights(self, weights: Any) -> None:
        self.tape.append(float(weights["w"][0]))

    def on_global_var_update(self, global_vars: Any) -> None:
        self.timesteps.append(global_vars["v"])


def snapshot(version: int, *, filters: dict[str, Any] | None = None, acks: dict[str, int] | None = None) -> Snapshot:
    return Snapshot(
        version, {DEFAULT_POLICY_ID: {"w": np.array([version], np.float32)}}, filters or {}, acks or {}, {"v": version}
    )


def make_slot(**options: Any) -> tuple[SnapshotSlot, TapePolicy, MeanStdFilter]:
    policy, observation_filter = TapePolicy(), MeanStdFilter((2,))
    options.setdefault("synchronize_filters", True)
    policies, filters = {DEFAULT_POLICY_ID: policy}, {DEFAULT_POLICY_ID: observation_filter}
    return SnapshotSlot(policies, filters, "me", **options), policy, observation_filter  # type: ignore[arg-type]


def test_r6_a_snapshot_takes_effect_between_two_steps_and_only_there() -> None:
    slot, policy, _ = make_slot()
    slot.offer(snapshot(1))
    assert policy.tape == []
    slot.between_steps()
    assert (policy.tape, slot.version, slot.global_vars) == ([1.0], 1, {"v": 1})
    slot.between_steps()
    assert policy.tape == [1.0]
    assert policy.timesteps == [1]


def test_the_newest_offer_wins_and_older_versions_are_ignored() -> None:
    slot, policy, _ = make_slot()
    for version in (3, 5, 4):
        slot.offer(snapshot(version))
    slot.between_steps()
    slot.offer(snapshot(2))
    slot.between_steps()
    assert policy.tape == [5.0]


def test_r143_the_filter_keeps_what_was_sent_but_not_acknowledged() -> None:
    slot, _, observation_filter = make_slot()
    rng = np.random.default_rng(0)
    seen = [rng.normal(size=(5, 2)).astype(np.float32) for _ in range(3)]
    observation_filter(seen[0])
    observation_filter.take_delta(1)
    observation_filter(seen[1])
    observation_filter.take_delta(2)
    observation_filter(seen[2])
    merged = MeanStdFilter((2,))
    merged(seen[0])
    slot.offer(snapshot(1, filters={DEFAULT_POLICY_ID: merged.state()}, acks={"me": 1, "other": 9}))
    slot.between_steps()
    everything = np.concatenate(seen).astype(np.float64)
    state = observation_filter.state()
    assert state["n"] == 15
    np.testing.assert_allclose(state["mean"], everything.mean(0), rtol=1e-9)
    np.testing.assert_allclose(state["m2"], ((everything - everything.mean(0)) ** 2).sum(0), rtol=1e-9)


def test_r144_without_synchronisation_only_the_first_filter_state_is_adopted() -> None:
    slot, _, observation_filter = make_slot(synchronize_filters=False)
    start = MeanStdFilter((2,))
    start(np.ones((4, 2), np.float32))
    slot.offer(snapshot(0, filters={DEFAULT_POLICY_ID: start.state()}))
    slot.between_steps()
    assert observation_filter.state()["n"] == 4
    slot.offer(snapshot(1, filters={DEFAULT_POLICY_ID: MeanStdFilter((2,)).state()}))
    slot.between_steps()
    assert observation_filter.state()["n"] == 4


def test_each_policy_and_each_filter_takes_up_what_is_its_own() -> None:
    policies = {"red": TapePolicy(), "blue": TapePolicy(), "own": TapePolicy()}
    filters = {"red": MeanStdFilter((2,)), "blue": MeanStdFilter((2,)), "own": MeanStdFilter((2,))}
    slot = SnapshotSlot(policies, filters, "me", synchronize_filters=True)  # type: ignore[arg-type]
    filters["own"](np.zeros((2, 2), np.float32))
    filters["own"].take_delta(1)
    states: dict[str, Any] = {}
    for number, name in enumerate(("red", "blue"), 1):
        seen = MeanStdFilter((2,))
        seen(np.full((number, 2), number, np.float32))
        states[name] = seen.state()
    weights = {"red": {"w": np.array([1.0])}, "blue": {"w": np.array([2.0])}, "gone": {"w": np.array([3.0])}}
    slot.offer(Snapshot(1, weights, states, {"me": 1}, {"v": 9}))
    slot.between_steps()
    assert [policy.tape for policy in policies.values()] == [[1.0], [2.0], []]
    assert [policy.timesteps for policy in policies.values()] == [[9], [9], [9]]
    assert [observation_filter.state()["n"] for observation_filter in filters.values()] == [1, 2, 2]
    filters["own"].adopt(MeanStdFilter((2,)).state(), 0)
    assert filters["own"].state()["n"] == 0, "acknowledged, though no state was published"
