from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aiorl.errors import BatchError
from aiorl.net.wire.format import ALIGN
from aiorl.sampling.table import ALIGN_BYTES, Table, allocate_together


class Rows(RuleBasedStateMachine):
    """Model with dicts of lists: in any sequence of calls, waiting rows stay, and so do their
    neighbours.
    """

    def __init__(self):
        super().__init__()
        self.table = Table()
        self.table.define("x", (2,), np.float32, [7, 8])
        self.rows = {}  # seat -> all rows of its agent's episode, preceded by the row before it
        self.numbers = {}  # seat -> number of the first of these in the table
        self.waits = {}  # seat -> first row that waits
        self.next = 0.0

    @rule()
    def come(self):
        seat = self.table.take_seat()
        assert seat not in self.rows
        self.rows[seat] = [[7.0, 8.0]]
        self.numbers[seat] = self.table.row_of(seat)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def go(self, data):
        seat = data.draw(st.sampled_from(sorted(self.rows)))
        self.table.free_seat(seat)
        for by_seat in (self.rows, self.numbers, self.waits):
            by_seat.pop(seat, None)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), times=st.integers(1, 40))
    def add(self, data, times):
        seats = data.draw(st.permutations(sorted(self.rows)))
        seats = seats[: data.draw(st.integers(1, len(seats)))]
        for _ in range(times):
            _, index = self.table.add(np.array(seats))
            values = self.next + np.arange(2.0 * len(seats)).reshape(-1, 2)
            self.next += 2.0 * len(seats)
            self.table.write("x", index, values.astype(np.float32))
            for seat, value in zip(seats, values.tolist(), strict=True):
                self.rows[seat].append(value)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def wait(self, data):
        seat = data.draw(st.sampled_from(sorted(self.rows)))
        self.waits.setdefault(seat, len(self.rows[seat]) - 1)
        self.table.keep_from(seat, self.table.row_of(seat))

    @precondition(lambda self: self.waits)
    @rule()
    def take_out(self):
        seats = np.array(sorted(self.waits))
        first = np.array([self.waits[seat] + self.numbers[seat] for seat in seats.tolist()])
        lengths = np.array([len(self.rows[seat]) - self.waits[seat] for seat in seats.tolist()])
        places = self.table.places(seats, first, lengths)
        found = self.table.gather({"now": ("x", 0), "before": ("x", -1)}, places)
        now = [row for seat in seats.tolist() for row in self.rows[seat][self.waits[seat] :]]
        assert found["now"].tolist() == now
        ends = np.cumsum(lengths)
        assert set(self.table.gaps(places).tolist()) <= set(ends[:-1].tolist())
        for seat, end, length in zip(seats.tolist(), ends.tolist(), lengths.tolist(), strict=True):
            before = found["before"][end - length : end].tolist()
            wanted = self.rows[seat][: self.waits[seat] + length - 1][-length:]
            assert before[-len(wanted) :] == wanted if wanted else True
        self.table.taken(seats)
        self.waits.clear()

    @invariant()
    def the_latest_row_is_there(self):
        for seat, rows in self.rows.items():
            assert self.table.row_of(seat) == self.numbers[seat] + len(rows) - 1
            assert self.table.entry("x", self.table.row_of(seat), seat).tolist() == rows[-1]
        assert self.table.num_seats == len(self.rows)


TestRows = Rows.TestCase
TestRows.settings = settings(max_examples=30, stateful_step_count=15)


def test_its_length_follows_the_number_of_waiting_rows():
    table = Table()
    table.define("x", (), np.float32)
    seats = np.array([table.take_seat() for _ in range(3)])
    for _ in range(1000):
        table.add(seats)
    assert table.length == 16, "nothing waits"
    table.keep_from(0, table.row_of(0))
    for _ in range(100):
        table.add(seats)
    assert table.length == 128


def written(*parts):
    """Return a whole column that was written in this number of parts, in their order."""
    table = Table()
    rows = []
    for part in parts:
        values = np.asarray(part)
        seats = np.array([table.take_seat() for _ in range(len(values))])
        _, index = table.add(seats)
        table.write("x", index, values)
        rows += seats.tolist()
    return table.read("x", table.at(np.array(rows)))


def test_entries_of_another_shape_are_refused():
    with pytest.raises(BatchError, match="'x'"):
        written(np.zeros((1, 2)), np.zeros((1, 3)))


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
def test_r96_a_column_gets_a_wider_dtype_if_entries_would_not_fit(first, then, dtype):
    """R96, R114: in either order."""
    entries = written(first, then)
    assert entries.dtype == dtype
    assert entries.tolist() == [*np.asarray(first).tolist(), *np.asarray(then).tolist()]


@pytest.mark.parametrize(
    ("first", "then"), [(["21 or more characters"], [5]), ([5], ["a"]), ([5], [None])]
)
def test_entries_of_another_kind_are_refused(first, then):
    with pytest.raises(BatchError, match="'x'"):
        written(first, then)


specs = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
        st.sampled_from(["?", "f2", "f4", "i8", "u1"]),
    ),
    max_size=6,
)


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@given(specs)
def test_arrays_are_in_order_each_at_the_next_multiple_of_eight(given_specs) -> None:
    arrays = allocate_together(given_specs)
    assert [(array.shape, array.dtype) for array in arrays] == [
        (s, np.dtype(d)) for s, d in given_specs
    ]
    assert all(array.flags.c_contiguous and array.flags.writeable for array in arrays)
    for before, after in itertools.pairwise(arrays):
        end = address(before) + before.nbytes
        assert address(after) - end == -(end - address(arrays[0])) % ALIGN_BYTES
        assert after.base is before.base
        start = end - address(before.base)
        assert not before.base[start : start + -start % ALIGN_BYTES].any()
    for number, array in enumerate(arrays):
        array[...] = number % 2
    assert all((array == number % 2).all() for number, array in enumerate(arrays))
    assert ALIGN_BYTES == ALIGN, "like frames"
