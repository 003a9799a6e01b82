from __future__ import annotations

from typing import Any

import numpy as np

from aiorl.acting.filters import MeanStdFilter
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.net.wire.messages import Snapshot
from aiorl.run.worker.sampler_unit import SnapshotSlot


class TapePolicy:
    """Policy that records the weights and timesteps it gets."""

    def __init__(self) -> None:
        self.tape: list[float] = []
        self.timesteps: list[int] = []

    def set_weights(self, weights: Any) -> None:
        self.tape.append(float(weights["w"][0]))

    def on_global_var_update(self, global_vars: Any) -> None:
        self.timesteps.append(global_vars["v"])


def snapshot(
    version: int, *, filters: dict[str, Any] | None = None, acks: dict[str, int] | None = None
) -> Snapshot:
    return Snapshot(
        version,
        {DEFAULT_POLICY_ID: {"w": np.array([version], np.float32)}},
        filters or {},
        acks or {},
        {"v": version},
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
    np.testing.assert_allclose(
        state["m2"], ((everything - everything.mean(0)) ** 2).sum(0), rtol=1e-9
    )


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
