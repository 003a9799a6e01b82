from __future__ import annotations

import numpy as np
import pytest

from aiorl.acting.filters import MeanStdFilter, NoFilter
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.errors import BatchError
from aiorl.net.wire.decoding import decode
from aiorl.net.wire.encoding import encode
from aiorl.net.wire.format import DEFAULT_LIMITS
from aiorl.net.wire.messages import Snapshot
from aiorl.run.core import Publisher


def delta(*rows: float) -> dict[str, dict[str, np.ndarray]]:
    seen = MeanStdFilter((1,))
    seen(np.array(rows, np.float32)[:, None])
    return {DEFAULT_POLICY_ID: seen.take_delta(1)}


def test_the_highest_merged_number_is_acknowledged_in_any_order() -> None:
    publisher = Publisher({DEFAULT_POLICY_ID: MeanStdFilter((1,))})
    publisher.join("a")
    for sequence in (1, 4, 2, 3):
        publisher.merge_deltas("a", sequence, delta(10.0 * sequence))
    snapshot = publisher.next_snapshot({}, {})
    assert snapshot.filter_acks == {"a": 4}
    assert snapshot.filters[DEFAULT_POLICY_ID]["n"] == 4
    np.testing.assert_allclose(snapshot.filters[DEFAULT_POLICY_ID]["mean"], [25.0])


def test_a_forgotten_incarnation_is_no_longer_acknowledged_but_its_data_stays() -> None:
    publisher = Publisher({DEFAULT_POLICY_ID: MeanStdFilter((1,))})
    publisher.join("a")
    publisher.merge_deltas("a", 1, delta(4))
    publisher.forget("a")
    snapshot = publisher.next_snapshot({}, {})
    assert snapshot.filter_acks == {}
    assert snapshot.filters[DEFAULT_POLICY_ID]["n"] == 1


def test_fragments_used_after_their_worker_is_lost_count_and_leave_no_acknowledgement_behind() -> (
    None
):
    """Otherwise snapshots would become too large to read after many lost workers."""
    publisher = Publisher({DEFAULT_POLICY_ID: MeanStdFilter((1,))})
    num_lost = DEFAULT_LIMITS.max_map + 1
    for number in range(num_lost):
        incarnation = f"{number:032x}"
        publisher.join(incarnation)
        publisher.merge_deltas(incarnation, 1, delta(1))
        publisher.forget(incarnation)
        publisher.merge_deltas(incarnation, 2, delta(3))
    publisher.join("alive")
    publisher.merge_deltas("alive", 7, delta(2))
    snapshot = publisher.next_snapshot({}, {})
    assert snapshot.filters[DEFAULT_POLICY_ID]["n"] == 2 * num_lost + 1
    found = decode([memoryview(bytes(frame)) for frame in encode(snapshot)])
    assert isinstance(found, Snapshot)
    assert found.filter_acks == {"alive": 7}


def test_r145_published_state_has_no_buffer() -> None:
    publisher = Publisher({DEFAULT_POLICY_ID: MeanStdFilter((1,))})
    publisher.merge_deltas("a", 1, delta(4, 8))
    assert set(publisher.next_snapshot({}, {}).filters[DEFAULT_POLICY_ID]) == {"n", "mean", "m2"}
    assert publisher.filters[DEFAULT_POLICY_ID].buffer_count == 0  # type: ignore[attr-defined]


def test_each_policys_filter_gets_its_own_deltas_even_if_another_does_not_fit() -> None:
    publisher = Publisher({"a": MeanStdFilter((2,)), "b": MeanStdFilter((1,)), "plain": NoFilter()})
    one = delta(2, 4)[DEFAULT_POLICY_ID]
    with pytest.raises(BatchError):
        publisher.merge_deltas("x", 1, {"a": one, "b": one, "plain": one, "stranger": one})
    filters = publisher.next_snapshot({}, {}).filters
    assert {name: int(state["n"]) for name, state in filters.items()} == {"a": 0, "b": 2}


def test_policies_that_an_update_does_not_change_keep_their_weights_in_snapshots() -> None:
    publisher = Publisher({})
    first = {"fixed": {"w": np.zeros(1)}, "learns": {"w": np.zeros(1)}}
    publisher.next_snapshot(first, {})
    snapshot = publisher.next_snapshot({"learns": {"w": np.ones(1)}}, {})
    assert snapshot.version == 1
    assert {name: arrays["w"].item() for name, arrays in snapshot.weights.items()} == {
        "fixed": 0.0,
        "learns": 1.0,
    }
    assert first["learns"]["w"] == 0.0
