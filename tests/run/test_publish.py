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


def numbers(snapshot: Snapshot) -> dict[str, float]:
    return {name: arrays["w"].item() for name, arrays in snapshot.weights.items()}


def weights(**values: float) -> dict[str, dict[str, np.ndarray]]:
    return {name: {"w": np.full(1, value)} for name, value in values.items()}


def test_the_first_snapshot_is_whole_and_later_ones_have_what_has_changed() -> None:
    publisher = Publisher({})
    first = publisher.next_snapshot(weights(fixed=0.0, learns=0.0), {})
    second = publisher.next_snapshot(weights(learns=1.0), {})
    assert (first.is_whole, second.since, second.version) == (True, 0, 1)
    assert numbers(second) == {"learns": 1.0}
    assert numbers(second.after(first)) == {"fixed": 0.0, "learns": 1.0}
    assert publisher.next_snapshot(weights(fixed=2.0, learns=2.0), {}).is_whole


def test_statistics_of_a_fixed_policy_are_sent_with_its_weights_and_not_again() -> None:
    fixed, learns = MeanStdFilter((1,)), MeanStdFilter((1,))
    fixed.is_frozen = True
    publisher = Publisher({"fixed": fixed, "learns": learns})
    assert publisher.next_snapshot(weights(fixed=0.0, learns=0.0), {}).filters.keys() == {
        "fixed",
        "learns",
    }
    assert publisher.next_snapshot(weights(learns=1.0), {}).filters.keys() == {"learns"}
    assert publisher.next_snapshot(weights(fixed=1.0), {}).filters.keys() == {"fixed", "learns"}


def test_after_a_policy_has_joined_snapshots_are_partial_and_bring_it_once() -> None:
    publisher = Publisher({})
    whole = publisher.next_snapshot(weights(a=0.0), {})
    packed = np.ones(3, np.uint8)
    joins = publisher.next_snapshot(weights(b=1.0), {}, {"b": packed})
    later = publisher.next_snapshot(weights(a=2.0, b=2.0), {})
    leaves = publisher.next_snapshot({}, {}, {"b": packed[:0]})
    assert [snapshot.since for snapshot in (whole, joins, later, leaves)] == [-1, 0, 1, 2]
    assert not later.policies
    whole = later.after(joins.after(whole))
    assert whole.is_whole
    assert whole.policies.keys() == {"b"}
    whole = leaves.after(whole)
    assert (numbers(whole), dict(whole.policies)) == ({"a": 2.0}, {})
    merged = leaves.after(later.after(joins))
    assert (merged.since, numbers(merged), merged.policies["b"].size) == (0, {"a": 2.0}, 0)


def test_a_fixed_policy_costs_no_bytes_in_later_broadcasts() -> None:
    publisher = Publisher({})
    large = {f"fixed_{number}": {"w": np.zeros(250_000, np.float32)} for number in range(3)}
    learns = {"learns": {"w": np.ones(250_000, np.float32)}}
    first = encode(publisher.next_snapshot({**large, **learns}, {}), compress=False)
    second = encode(publisher.next_snapshot(learns, {}), compress=False)
    sizes = [sum(memoryview(frame).nbytes for frame in frames) for frames in (first, second)]
    assert sizes[0] > 4_000_000
    assert 1_000_000 < sizes[1] < 1_001_000
