"""Tables: observations and actions of one policy's agents as columns ``[T, S, ...]``, with T rows
for each of S seats.

In a LevelTable all seats step together, and rows are written as whole columns. In a Table each seat
has its own rows. There, a seat is a place where one agent acts, and its rows cycle through its T
places. T and S are powers of two: row r of seat s lies at ``(r * S + s) & (T * S - 1)``, and the
next row S places further. A row holds an observation, the policy's outputs for it and, once they
are known, the results of the action. So the successor of a row and its predecessor lie in adjacent
rows, and nothing is stored twice. The row before an episode's first one holds the initial values of
an episode: no action, no reward, the initial state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from aiorl.acting.graph_policy import ActRows
from aiorl.data import columns as c
from aiorl.data.columns import F32, I64, Array
from aiorl.errors import BatchError

Layout = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]

_NOTHING_WAITS = np.iinfo(np.int64).max
_LEAST_LENGTH = 16
_LOOK_BACK = 4
"""Number of rows before the latest one that can still be read: previous actions and states, also at
a soft reset."""
_NUMBERS = "biufc"
DERIVED = (c.ADVANTAGES, c.VALUE_TARGETS, c.BOOTSTRAP_VALUES)
"""Columns of a LevelTable that are computed when it is full."""

ALIGN_BYTES = 8
"""Each array starts at a multiple of this, counted from the first byte of the first array."""


class Table:
    """Columns whose length depends on the number of waiting rows, and whose width depends on the
    number of agents.

    Attributes:
        length: T.
    """

    def __init__(self) -> None:
        """Make a table without seats or columns."""
        self.length = _LEAST_LENGTH
        self._width = 1
        self._shift = 0
        self._mask = self.length - 1
        self._free = [0]
        self._columns: dict[str, Array] = {}
        self._start: dict[str, Array] = {}
        self._cursor = np.zeros(1, np.int64)  # place of each seat's latest row, not wrapped
        # first row of each seat that waits to be taken out
        self._waiting = np.full(1, _NOTHING_WAITS, np.int64)
        self._room = 0  # number of rows that every seat can add before `_make_room` is needed

    # --- columns ---

    def define(self, name: str, shape: Sequence[int], dtype: DTypeLike, start: Any = None) -> None:
        """Add a column.

        Args:
            name: its name; if it exists, nothing happens.
            shape: shape of one entry.
            dtype: dtype.
            start: entry before an episode's first row; None = any.
        """
        if name in self._columns:
            return
        self._columns[name] = np.zeros((self.length * self._width, *shape), dtype)
        if start is not None:
            self._start[name] = np.asarray(start)

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def write(self, name: str, index: I64, values: Array) -> None:
        """Write entries; the column is made on first use, and gets a wider dtype if values would
        not fit.

        Raises:
            BatchError: the entries have another shape than before, or a kind that the column cannot
                hold.
        """
        column = self._columns.get(name)
        if column is None:
            self.define(name, values.shape[1:], values.dtype)
            column = self._columns[name]
        if values.shape[1:] != column.shape[1:]:
            raise BatchError(name, f"entries of shape {column.shape[1:]}", values.shape[1:])
        if values.dtype != column.dtype:
            dtype = _widened(name, column.dtype, values.dtype)
            column = self._columns[name] = column.astype(dtype, copy=False)
        column[index] = values

    def put(self, name: str, index: I64, values: Any) -> None:
        """Write values that fit an existing column."""
        self._columns[name][index] = values

    def read(self, name: str, index: I64) -> Array:
        """Return copies of entries."""
        return self._columns[name].take(index, 0)

    def entry(self, name: str, row: int, seat: int) -> Array:
        """Return a copy of one entry."""
        value = self._columns[name][(row * self._width + seat) & self._mask]
        return value.copy() if isinstance(value, np.ndarray) else value

    def excerpt(self, seat: int, row: int) -> Table:
        """Return a table with copies of a seat's row and of the few rows before it, to be read by
        the same numbers.
        """
        excerpt = Table()
        excerpt._mask = _LOOK_BACK - 1
        # in the excerpt, row r lies at (r + seat) & mask
        rows = row - ((row + seat - np.arange(_LOOK_BACK)) & excerpt._mask)
        index = (rows * self._width + seat) & self._mask
        excerpt._columns = {name: column[index] for name, column in self._columns.items()}
        return excerpt

    # --- seats ---

    @property
    def num_seats(self) -> int:
        """Number of seats in use."""
        return self._width - len(self._free)

    def take_seat(self) -> int:
        """Take a seat for an agent before its first observation; its next row opens an episode."""
        if not self._free:
            self._free = list(range(2 * self._width - 1, self._width - 1, -1))
            self._relocate(self.length, 2 * self._width)
        seat = self._free.pop()
        self.restart(seat)
        return seat

    def free_seat(self, seat: int) -> None:
        """Give back a seat without waiting rows."""
        self._waiting[seat] = _NOTHING_WAITS
        self._free.append(seat)

    def row_of(self, seat: int) -> int:
        """Return the number of a seat's latest row."""
        return int(self._cursor[seat]) >> self._shift

    def rows_of(self, seats: I64) -> list[int]:
        """Return the numbers of the latest rows of several seats."""
        rows: list[int] = (self._cursor[seats] >> self._shift).tolist()
        return rows

    def start_anew(self, seat: int, *, again: str | None) -> None:
        """Begin an episode in a seat whose agent continues: its state stays.

        Args:
            seat: the seat.
            again: column whose latest entry, which has no action yet, is also the new episode's
                first; None if the latest row has an action and the first entry is still to come.
        """
        latest, following = self.add(np.array([seat]))
        acted = latest
        neutral = following
        if again is not None:
            self._columns[again][following] = self._columns[again][latest]
            acted = self.before(latest)
            neutral = latest
        for name, start in self._start.items():
            column = self._columns[name]
            column[neutral] = column[acted] if name.startswith("state_out_") else start

    def restart(self, seat: int) -> None:
        """Prepare a seat so that its next row opens the episode of another agent."""
        place = self._cursor[seat] & self._mask
        for name, start in self._start.items():
            self._columns[name][place] = start

    # --- rows ---

    def at(self, seats: I64) -> I64:
        """Return the index of each seat's latest row."""
        index: I64 = self._cursor[seats] & self._mask
        return index

    def before(self, index: I64) -> I64:
        """Return the index of the previous rows."""
        previous: I64 = (index - self._width) & self._mask
        return previous

    def add(self, seats: I64) -> tuple[I64, I64]:
        """Add a row to each of some seats, which must be distinct.

        Returns:
            Index of the previously latest rows, and of the new ones.
        """
        if self._room <= 0:
            self._make_room()
        self._room -= 1
        places = self._cursor[seats]
        latest = places & self._mask
        places += self._width
        self._cursor[seats] = places
        places &= self._mask
        return latest, places

    def keep_from(self, seat: int, row: int) -> None:
        """Keep a seat's rows, from this one or an earlier waiting one, until they are taken out."""
        if row < self._waiting[seat]:
            self._waiting[seat] = row

    def taken(self, seats: I64) -> None:
        """Release the waiting rows of these seats."""
        self._waiting[seats] = _NOTHING_WAITS

    def places(self, seats: I64, first: I64, lengths: I64) -> I64:
        """Return places of runs of rows, run after run:

        ``lengths[i]`` rows of ``seats[i]`` from ``first[i]`` on.
        """
        return _runs(first * self._width + seats, lengths, self._width)

    def gaps(self, places: I64) -> I64:
        """Return the indices in a list of places at which a place is not the next row of its
        predecessor.
        """
        gaps: I64 = np.flatnonzero(places[1:] - places[:-1] != self._width) + 1
        return gaps

    def gather(self, sources: Mapping[str, tuple[str, int]], places: I64) -> dict[str, Array]:
        """Return entries of several columns at places, or in rows before or after them.

        Args:
            sources: name of the result -> column, and offset in rows: 1 for the next row, -1 for the
                previous one.
            places: result of `places`.
        """
        index = {
            offset: (places + offset * self._width) & self._mask
            for offset in {offset for _, offset in sources.values()}
        }
        return {
            name: self._columns[column].take(index[offset], 0)
            for name, (column, offset) in sources.items()
        }

    # --- room ---

    def _rows_needed(self) -> tuple[I64, I64]:
        """Return each seat's first row that is needed and the number of rows needed; older ones can
        be overwritten.
        """
        latest = self._cursor >> self._shift
        first = np.maximum(np.minimum(self._waiting, latest) - _LOOK_BACK, 0)
        return first, latest - first + 1

    def _make_room(self) -> None:
        length = self.length
        longest = int(self._rows_needed()[1].max())
        while length - longest < max(4, length >> 3):
            length *= 2
        if length > self.length:
            self._relocate(length, self._width)
        self._room = length - longest

    def _relocate(self, length: int, width: int) -> None:
        """Resize every column, and move the rows that are needed to their new places."""
        first, counts = self._rows_needed()
        seats = np.arange(self._width)
        source = _runs(first * self._width + seats, counts, self._width) & self._mask
        mask = length * width - 1
        target = _runs(first * width + seats, counts, width) & mask
        for name, column in self._columns.items():
            larger = np.zeros((length * width, *column.shape[1:]), column.dtype)
            larger[target] = column[source]
            self._columns[name] = larger
        cursor = np.arange(width)
        cursor[: self._width] = (self._cursor >> self._shift) * width + seats
        waiting = np.full(width, _NOTHING_WAITS, np.int64)
        waiting[: self._width] = self._waiting
        self._cursor = cursor
        self._waiting = waiting
        self.length = length
        self._width = width
        self._mask = mask
        self._shift = width.bit_length() - 1


def _runs(first: I64, lengths: I64, stride: int) -> I64:
    """Return ``first[i], first[i] + stride, ...``, ``lengths[i]`` values each, run after run."""
    ends = np.cumsum(lengths)
    count = int(ends[-1]) if len(ends) else 0
    runs: I64 = np.arange(count) * stride
    runs += np.repeat(first - (ends - lengths) * stride, lengths)
    return runs


def _widened(name: str, dtype: np.dtype[Any], new: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype for a column with entries of one dtype that must also hold those of another.

    Real numbers are rounded to the column's dtype if that is float32 or a wider float; no other
    value changes.
    """
    are_numbers = new.kind in _NUMBERS and dtype.kind in _NUMBERS
    is_wide_float = dtype.kind == "f" and dtype.itemsize >= 4
    if dtype.kind == "O" or (is_wide_float and are_numbers and new.kind != "c"):
        return dtype
    if not are_numbers and new.kind != dtype.kind:
        raise BatchError(name, f"entries of dtype {dtype}, as before", new)
    return np.result_type(dtype, new)


# --- level seats ---


class FinalRows(NamedTuple):
    """True final observations of environments that were reset within step t.

    Attributes:
        t: row of the table.
        envs: int64 [K].
        obs: [K, ...] filtered.
        state: recurrent state [K, ...] for their evaluation, per component.
    """

    t: int
    envs: I64
    obs: Array
    state: list[F32]


class LevelTable:
    """T steps that all N seats take together: rows lie side by side, and leave with the table as
    whole columns.

    The true final observations of seats that are reset immediately are stored separately, so that
    all seats stay level.

    Attributes:
        noise: [T, N, K] randomness of the actions.
        obs: [T + 1, N, ...]; the last one follows the last step.
        actions: [T, N, ...] unclipped.
        logp: [T, N] float32.
        dist_inputs: [T, N, P] float32, or [1, N, P] if not kept.
        values: [T, N] float32, or [1, N] if not kept.
        rewards: [T, N] float32.
        terminateds: [T, N] bool.
        truncateds: [T, N] bool.
        valid: [T, N] bool; None if every row is a transition.
        derived: [T, N] float32 columns to send that are computed later.
        finals: true final observations, in the order of steps.
        states: recurrent states at the first step and at every ``state_every`` steps after it.
        state_every: number of steps between recorded states; 0 = only the first state.
        filled: number of steps recorded so far.
    """

    def __init__(
        self, layout: Layout, noise: F32, state_in: Sequence[F32], state_every: int = 0
    ) -> None:
        """Allocate memory for T steps.

        Args:
            layout: shape and dtype of each array by column name, in the order in which they lie in
                memory.
            noise: see the class.
            state_in: recurrent state at the first step.
            state_every: number of steps between recorded states; 0 = only the first state.
        """
        arrays = dict(zip(layout, allocate_together(list(layout.values())), strict=True))
        self.noise = noise
        self.obs: Array = arrays[c.OBS]
        self.actions: Array = arrays[c.ACTIONS]
        self.logp: F32 = arrays[c.ACTION_LOGP]
        self.dist_inputs: F32 = arrays[c.ACTION_DIST_INPUTS]
        self.values: F32 = arrays[c.VF_PREDS]
        self.rewards: F32 = arrays[c.REWARDS]
        self.terminateds: NDArray[np.bool_] = arrays[c.TERMINATEDS]
        self.truncateds: NDArray[np.bool_] = arrays[c.TRUNCATEDS]
        self.derived: dict[str, F32] = {name: arrays[name] for name in DERIVED if name in arrays}
        self.valid: NDArray[np.bool_] | None = None
        self.finals: list[FinalRows] = []
        self.states: list[list[F32]] = []
        self.filled = 0
        self.state_every = state_every
        self.note_state(0, state_in)

    def note_state(self, t: int, state: Sequence[F32]) -> None:
        """Record the recurrent state before step t if it is due."""
        if t == len(self.states) * self.state_every:
            self.states.append([component.copy() for component in state])

    def state_columns(self) -> dict[str, F32]:
        """Return each environment's recurrent states by column name: the first one [N, ...], or all
        [N, C, ...].
        """
        if not self.state_every:
            return {
                c.state_in(number): component for number, component in enumerate(self.states[0])
            }
        by_component = zip(*self.states, strict=True)
        return {
            c.state_in(number): np.stack(parts, axis=1) for number, parts in enumerate(by_component)
        }

    def policy_rows(self, *, with_logp: bool) -> Iterator[ActRows]:
        """Return the policy's outputs as arrays to write into, for each step that is not recorded
        yet.

        Args:
            with_logp: False leaves out log-probabilities, which are filled in later.
        """
        rest = slice(self.filled, None)

        def rows_of(column: F32) -> Iterable[F32]:
            is_kept = len(column) == len(self.rewards)
            return column[rest] if is_kept else repeat(column[0])

        return map(
            ActRows,
            self.actions[rest],
            rows_of(self.dist_inputs),
            rows_of(self.values),
            self.logp[rest] if with_logp else repeat(None),
        )

    def mark_valid(self, t: int, valid: NDArray[np.bool_]) -> None:
        """Record which environments' row t is a transition."""
        if self.valid is None:
            self.valid = np.ones(self.rewards.shape, np.bool_)
        self.valid[t] = valid

    def followers(self) -> tuple[I64, Array]:
        """Return the final observations of all rows that end an episode: int64 [K, 2] (t, n), and
        [K, ...].

        They are ordered by t, then n, regardless of how the environments are reset.
        """
        index = np.argwhere(self.terminateds | self.truncateds)
        obs = self.obs[index[:, 0] + 1, index[:, 1]]
        place = {(int(t), int(n)): row for row, (t, n) in enumerate(index)}
        for final in self.finals:
            for row, n in enumerate(final.envs.tolist()):
                obs[place[final.t, n]] = final.obs[row]
        return index, obs


def allocate_together(specs: Sequence[tuple[tuple[int, ...], DTypeLike]]) -> list[Array]:
    """Return uninitialised C-contiguous arrays in one allocation, in this order, with zeros between
    them.

    The allocation lives as long as any of them.

    Args:
        specs: shape and dtype of each array.
    """
    places = []
    gaps = []
    end = 0
    for shape, kind in specs:
        dtype = np.dtype(kind)
        start = end + -end % ALIGN_BYTES
        if start != end:
            gaps.append(slice(end, start))
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        end = start + size
        places.append((shape, dtype, start))
    arena = np.empty(end, np.uint8)
    for gap in gaps:
        arena[gap] = 0
    return [np.ndarray(shape, dtype, arena, start) for shape, dtype, start in places]
