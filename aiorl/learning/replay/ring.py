"""Ring of the newest rows, and a snapshot of it that is saved in a checkpoint while training
continues.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from aiorl.data.columns import I64, Array, Piece
from aiorl.errors import CheckpointError

_MAX_ASIDE_BYTES = 128 << 20


class Ring:
    """Array whose slots are overwritten in turn. Rows have unique numbers, from 0.

    Row i is in slot i modulo the capacity until row i + capacity is written.

    Attributes:
        slots: [capacity, ...], the array.
        written: number of rows written so far, which is the number of the next one.
    """

    def __init__(self, slots: Array) -> None:
        """Take over an empty array."""
        self.slots = slots
        self.written = 0
        self._lock = threading.Lock()
        self._snapshot: RingSnapshot | None = None

    @property
    def capacity(self) -> int:
        """Maximum number of rows."""
        return len(self.slots)

    @property
    def oldest(self) -> int:
        """Number of the oldest row that is not overwritten."""
        return max(0, self.written - self.capacity)

    def advance(self, count: int) -> list[tuple[slice, slice]]:
        """Make room for rows, at most as many as the capacity; the caller writes them immediately.

        Returns:
            Pairs of slots and the range of new rows for them; two pairs if the end of the array is
            passed.
        """
        with self._lock:
            if self._snapshot is not None:
                self._snapshot.before_overwriting(self.written + count - self.capacity)
            runs = self.runs(self.written, self.written + count)
            self.written += count
        return runs

    def replace(self, numbers: I64, field: str, values: Array) -> None:
        """Replace a field of rows that are records.

        Args:
            numbers: [B], numbers of rows that are not overwritten; for a repeated one, the last
                value counts.
            field: name of the field.
            values: [B, ...].
        """
        with self._lock:
            if self._snapshot is not None:
                self._snapshot.before_replacing(numbers)
            self.slots[field][numbers % self.capacity] = values

    def runs(self, first: int, end: int) -> list[tuple[slice, slice]]:
        """Return pairs of slices: slots of the rows from `first` to `end`, and the range of rows in
        them.
        """
        count = end - first
        start = first % self.capacity
        before_end = min(count, self.capacity - start)
        runs = [(slice(start, start + before_end), slice(0, before_end))]
        if before_end < count:
            runs.append((slice(0, count - before_end), slice(before_end, count)))
        return runs

    def newest_in(self, slots: I64) -> I64:
        """Return the numbers of the rows in slots."""
        newest = self.written - 1
        return newest - (newest - slots) % self.capacity

    def take_back(self, first: int, rows: Array) -> int:
        """Write rows of a snapshot to their former slots.

        Args:
            first: number of the first row.
            rows: records, or uint8 [B, bytes of a record].

        Returns:
            B.

        Raises:
            ValueError: they don't fit, or were not in the ring.
        """
        rows = np.ascontiguousarray(rows).view(self.slots.dtype).reshape(-1)
        if not self.oldest <= first <= first + len(rows) <= self.written:
            raise ValueError(f"the {len(rows)} rows from {first} on were not in the ring")
        for slots, part in self.runs(first, first + len(rows)):
            self.slots[slots] = rows[part]
        return len(rows)

    def snapshot(self) -> RingSnapshot:
        """Return the current rows, to be read while others are written; the previous snapshot
        ends.
        """
        with self._lock:
            if self._snapshot is not None:
                self._snapshot.fail("another snapshot was started")
            self._snapshot = RingSnapshot(self, self._lock)
            return self._snapshot

    def release(self, snapshot: RingSnapshot) -> None:
        """Stop keeping data for a snapshot."""
        with self._lock:
            if self._snapshot is snapshot:
                self._snapshot = None


class RingSnapshot:
    """Rows of a ring at one moment, read piece by piece in any thread.

    Rows that will be overwritten before they are read are copied aside. There are few of them,
    because reading and overwriting both start from the oldest row; their number is limited. Rows
    of which a field will be replaced can be anywhere; they are kept one by one.

    Attributes:
        first: number of the oldest row.
        end: number after the newest row.
        row_bytes: bytes of a row.
    """

    def __init__(self, ring: Ring, lock: threading.Lock) -> None:
        """Cover the current rows; called by `Ring.snapshot`."""
        self.first = ring.oldest
        self.end = ring.written
        self.row_bytes = ring.slots[:1].nbytes
        self._ring = ring
        self._lock = lock
        self._next = self.first
        self._aside: deque[Array] = deque()
        self._num_aside = 0
        self._kept: dict[int, Any] = {}  # number -> record
        self._failure = ""

    def before_overwriting(self, end: int) -> None:
        """Copy aside unread rows before number `end`; the caller holds the lock."""
        first = self._next + self._num_aside
        end = min(end, self.end)
        if first >= end or self._failure:
            return
        for slots, rows in self._ring.runs(first, end):
            self._aside.append(self._copied(first + rows.start, slots))
        self._num_aside += end - first
        self._limit()

    def before_replacing(self, numbers: I64) -> None:
        """Keep unread rows of these `numbers` as they are; the caller holds the lock."""
        if self._failure:
            return
        is_unread = (numbers >= self._next + self._num_aside) & (numbers < self.end)
        for number in np.unique(numbers[is_unread]).tolist():
            if number not in self._kept:
                self._kept[number] = self._ring.slots[number % self._ring.capacity].copy()
        self._limit()

    def fail(self, why: str) -> None:
        """Make reading raise CheckpointError; the caller holds the lock."""
        self._failure = why
        self._aside.clear()
        self._kept.clear()

    def pieces(self, max_bytes: int) -> Iterator[tuple[int, Array]]:
        """Yield the rows from the oldest on: the number of each piece's first row, and a copy of
        its rows.

        Raises:
            CheckpointError: training overwrote too much of it, or another snapshot was started.
        """
        try:
            piece = self._take(max_bytes)
            while piece is not None:
                yield piece
                piece = self._take(max_bytes)
        finally:
            self.close()

    def close(self) -> None:
        """Stop keeping data for this snapshot."""
        self._ring.release(self)

    def _take(self, max_bytes: int) -> tuple[int, Array] | None:
        with self._lock:
            if self._failure:
                raise CheckpointError(
                    "replay", f"it could not be saved during training: {self._failure}"
                )
            if self._next >= self.end:
                return None
            first = self._next
            most = max(1, max_bytes // max(1, self.row_bytes))
            parts: list[Array] = []
            while self._aside and most:  # each is only one write: many make a piece
                part = self._aside.popleft()
                if len(part) > most:
                    self._aside.appendleft(part[most:])
                    part = part[:most]
                parts.append(part)
                most -= len(part)
                self._next += len(part)
                self._num_aside -= len(part)
            if most and self._next < self.end:
                slots, _ = self._ring.runs(self._next, min(self.end, self._next + most))[0]
                parts.append(self._copied(self._next, slots))
                self._next += len(parts[-1])
        return first, _joined(parts)

    def _copied(self, first: int, slots: slice) -> Array:
        """Return a copy of unread rows, the first of them with number `first`, as they were."""
        rows = self._ring.slots[slots].copy()
        for number in self._kept.keys() & range(first, first + len(rows)):
            rows[number - first] = self._kept.pop(number)
        return rows

    def _limit(self) -> None:
        """Give up if too much is kept; the caller holds the lock."""
        if (self._num_aside + len(self._kept)) * self.row_bytes > _MAX_ASIDE_BYTES:
            self.fail(
                f"more than {_MAX_ASIDE_BYTES:,} bytes were overwritten before they were saved"
            )


def _joined(parts: list[Array]) -> Array:
    """Return rows one after the other, including the bytes between their fields."""
    if len(parts) == 1:
        return parts[0]
    rows = np.concatenate([_as_bytes(part) for part in parts])
    return rows.view(parts[0].dtype).reshape(-1, *parts[0].shape[1:])


def _as_bytes(rows: Array) -> Array:
    """Return rows as uint8 [B, bytes of a row]."""
    return np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)


MAX_PIECE_BYTES = 16 << 20


class Snapshot:
    """Everything that a replay needs to continue as if it had never stopped.

    Attributes:
        values: counters, random state and settings, JSON-serialisable.
    """

    def __init__(
        self, values: dict[str, Any], rings: Mapping[str, RingSnapshot], arrays: Mapping[str, Array]
    ) -> None:
        """Store the parts; called by `Replay.snapshot`."""
        self.values = values
        self._rings = rings
        self._arrays = arrays

    def pieces(self, max_bytes: int = MAX_PIECE_BYTES) -> Iterator[Piece]:
        """Yield name, number of the first row, and rows of each piece, in order for each name; in
        any thread, once.

        Rows of records are uint8 [B, bytes of a record].

        Args:
            max_bytes: maximum size of a piece; priorities, with 8 bytes a row, are one piece.

        Raises:
            CheckpointError: training overwrote too much before it was read, or another snapshot was
                started.
        """
        for name, array in self._arrays.items():
            yield name, 0, array
        for name, ring in self._rings.items():
            for first, rows in ring.pieces(max_bytes):
                yield name, first, rows.view(np.uint8).reshape(len(rows), -1)

    def close(self) -> None:
        """Stop keeping data for this snapshot, read or not."""
        for ring in self._rings.values():
            ring.close()
