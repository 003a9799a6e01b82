from __future__ import annotations

import numpy as np

from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.learner.publish import Publisher
from aiorl.observation.filters import MeanStdFilter, NoFilter


def delta(*rows: float) -> dict[str, dict[str, np.ndarray]]:
    seen = MeanStdFilter((1,))
    seen(np.array(rows, np.float32)[:, None])
    return {DEFAULT_POLICY_ID: seen.take_delta(1)}


def test_versions_rise_by_one_and_snapshots_carry_weights_vars_and_acknowledgements() -> None:
    publisher = Publisher(NoFilter())
    first = publisher.next_snapshot({"w": np.zeros(2)}, {"timestep": 0})
    publisher.merge_deltas("a", 3, {})
    second = publisher.next_snapshot({"w": np.ones(2)}, {"timestep": 9})
    assert (first.version, second.version) == (0, 1)
    assert second.filters == {}
    assert second.filter_acks == {"a": 3}
    assert second.global_vars == {"timestep": 9}
    np.testing.assert_array_equal(second.weights[DEFAULT_POLICY_ID]["w"], np.ones(2))


def test_r142_a_delta_delivered_twice_is_merged_once() -> None:
    publisher = Publisher(MeanStdFilter((1,)))
    publisher.merge_deltas("a", 1, delta(1, 2))
    publisher.merge_deltas("a", 1, delta(1, 2))
    publisher.merge_deltas("b", 1, delta(6))
    state = publisher.next_snapshot({}, {}).filters[DEFAULT_POLICY_ID]
    assert state["n"] == 3
    np.testing.assert_allclose(state["mean"], [3.0])


def test_a_forgotten_incarnation_is_acknowledged_no_more_but_its_data_stays() -> None:
    publisher = Publisher(MeanStdFilter((1,)))
    publisher.merge_deltas("a", 1, delta(4))
    publisher.forget("a")
    snapshot = publisher.next_snapshot({}, {})
    assert snapshot.filter_acks == {}
    assert snapshot.filters[DEFAULT_POLICY_ID]["n"] == 1


def test_r145_published_state_has_no_buffer() -> None:
    publisher = Publisher(MeanStdFilter((1,)))
    publisher.merge_deltas("a", 1, delta(4, 8))
    assert set(publisher.next_snapshot({}, {}).filters[DEFAULT_POLICY_ID]) == {"n", "mean", "m2"}
    assert publisher.filter.buffer_count == 0  # type: ignore[attr-defined]
