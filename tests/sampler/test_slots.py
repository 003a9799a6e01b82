from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aiorl.errors import BatchError
from aiorl.sampler.slots import SlotStore, as_index


class Store(RuleBasedStateMachine):
    """Against a dict: what is live is never lost, whatever is reserved and compacted in between."""

    def __init__(self):
        super().__init__()
        self.store = SlotStore()
        self.store.define("x", (2,), np.float32, [7, 8])
        self.live = {}
        self.next = 0

    @rule(count=st.integers(1, 90))
    def add(self, count):
        first = self.store.reserve(count)
        values = np.arange(self.next, self.next + 2 * count, dtype=np.float32).reshape(count, 2)
        self.next += 2 * count
        self.store.write("x", slice(first, first + count), values)
        for number in range(count):
            self.live[first + number] = values[number].tolist()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def forget(self, data):
        keep = data.draw(st.floats(0, 1))
        slots = sorted(self.live)
        live = slots[: int(keep * len(slots))]
        moved = self.store.compact(np.array(live, np.int64))
        self.live = {int(moved[slot]): self.live[slot] for slot in live}
        assert self.store.used == len(live) + 1

    @invariant()
    def nothing_is_lost(self):
        assert self.store["x"][0].tolist() == [7, 8]
        for slot, value in self.live.items():
            assert 0 < slot < self.store.used
            assert self.store["x"][slot].tolist() == value


TestStore = Store.TestCase
TestStore.settings = settings(max_examples=30, stateful_step_count=15, deadline=None)


def test_a_column_made_late_has_zeros_for_older_slots():
    store = SlotStore()
    store.reserve(3)
    store.write("late", np.array([2, 3]), np.array([5, 6]))
    assert store["late"][:4].tolist() == [0, 0, 5, 6]
    assert "late" in store
    assert "never" not in store


def test_entries_of_another_shape_are_refused():
    store = SlotStore()
    store.define("x", (2,), np.float32)
    store.reserve(1)
    with pytest.raises(BatchError, match="'x'"):
        store.write("x", slice(1, 2), np.zeros((1, 3)))


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ([4], slice(4, 5)),
        ([4, 5], slice(4, 6)),
        ([4, 5, 6], slice(4, 7)),
        ([4, 6], [4, 6]),
        ([4, 6, 5, 7], [4, 6, 5, 7]),
    ],
)
def test_slots_that_follow_each_other_are_a_slice(slots, expected):
    index = as_index(slots)
    assert index == expected if isinstance(expected, slice) else index.tolist() == expected


@pytest.mark.parametrize(
    ("first", "then", "dtype"),
    [
        ([0, 0], [0.75, 0.5], np.float64),
        ([True, False], [2, 3], np.int64),
        (np.array([1, 2], np.int32), [2**40, 3], np.int64),
        (np.array([1, 2], np.float16), np.array([1e30, 0.1], np.float32), np.float32),
        (np.zeros(2, np.float32), [0.5, 0.25], np.float32),
        (np.zeros(2, np.float32), [1j, 2], np.complex128),
        (["a", "b"], ["abc", "d"], "<U3"),
        (np.array([{}, {}]), [1, 2], object),
    ],
    ids=str,
)
def test_r96_a_column_is_widened_where_entries_would_lose_their_value(first, then, dtype):
    """R96, R114: whatever came first."""
    store = SlotStore()
    store.reserve(4)
    store.write("x", slice(1, 3), np.asarray(first))
    store.write("x", slice(3, 5), np.asarray(then))
    assert store["x"].dtype == dtype
    assert store["x"][1:5].tolist() == [*np.asarray(first).tolist(), *np.asarray(then).tolist()]


@pytest.mark.parametrize(("first", "then"), [(["21 or more characters"], [5]), ([5], ["a"]), ([5], [None])])
def test_entries_of_another_kind_are_refused(first, then):
    store = SlotStore()
    store.reserve(2)
    store.write("x", slice(1, 2), np.asarray(first))
    with pytest.raises(BatchError, match=r"'x': expected entries of dtype .*, as before"):
        store.write("x", slice(2, 3), np.asarray(then))
