"""A ring of rows of which the newest are kept, and a snapshot of it for a checkpoint, beside training."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.data.columns import Piece
from aiorl.errors import CheckpointError

Array = NDArray[Any]

_MAX_ASIDE_BYTES = 128 << 20


class Ring:
    """An array whose slots are written over in turn. Rows have numbers, from 0, that never come again.

    Row i lies in slot i modulo the capacity until row i + capacity is written.

    Attributes:
        slots: [capacity, ...], the array.
        written: rows ever written, which is the number of the next one.
    """

    def __init__(self, slots: Array) -> None:
        """Take an array, of which nothing is written yet."""
        self.slots = slots
        self.written = 0
        self._lock = threading.Lock()
        self._snapshot: RingSnapshot | None = None

    @property
    def capacity(self) -> int:
        """Rows that are kept."""
        return len(self.slots)

    @property
    def oldest(self) -> int:
        """Number of the oldest row that is not written over."""
        return max(0, self.written - self.capacity)

    def advance(self, count: int) -> list[tuple[slice, slice]]:
        """Make place for rows, at most as many as the capacity, which the caller writes at once.

        Returns: slots, and which of the new rows lie there; two pairs where the array's end is passed.
        """
        with self._lock:
            if self._snapshot is not None:
                self._snapshot.before_overwriting(self.written + count - self.capacity)
            runs = self.runs(self.written, self.written + count)
            self.written += count
        return runs

    def runs(self, first: int, end: int) -> list[tuple[slice, slice]]:
        """Slots of the rows from `first` to `end`, and which of them lie there, as whole slices."""
        count, start = end - first, first % self.capacity
        before_end = min(count, self.capacity - start)
        runs = [(slice(start, start + before_end), slice(0, before_end))]
        if before_end < count:
            runs.append((slice(0, count - before_end), slice(before_end, count)))
        return runs

    def newest_in(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of the rows that lie in slots."""
        newest = self.written - 1
        return newest - (newest - slots) % self.capacity

    def take_back(self, first: int, rows: Array) -> int:
        """Write rows of a snapshot where they were.

        Args:
            first: number of the first.
            rows: records, or uint8 [B, bytes of a record].
        Returns: B.

        Raises:
            ValueError: they do not fit, or were not there.
        """
        rows = np.ascontiguousarray(rows).view(self.slots.dtype).reshape(-1)
        if not self.oldest <= first <= first + len(rows) <= self.written:
            raise ValueError(f"rows from {first} on, {len(rows)} of them, were not there")
        for slots, part in self.runs(first, first + len(rows)):
            self.slots[slots] = rows[part]
        return len(rows)

    def snapshot(self) -> RingSnapshot:
        """Return the rows as they are now, to be read beside writing; the one before it ends."""
        with self._lock:
            if self._snapshot is not None:
                self._snapshot.fail("another one was begun")
            self._snapshot = RingSnapshot(self, self._lock)
            return self._snapshot

    def release(self, snapshot: RingSnapshot) -> None:
        """Keep nothing for a snapshot any longer."""
        with self._lock:
            if self._snapshot is snapshot:
                self._snapshot = None


class RingSnapshot:
    """The rows of a ring as they were at some moment, read piece by piece in any thread.

    Rows that are about to be written over before they are read are copied aside: few, since both go from the oldest
    row on, and only so many.

    Attributes:
        first: number of the oldest row.
        end: number behind the newest.
        row_bytes: bytes of a row.
    """

    def __init__(self, ring: Ring, lock: threading.Lock) -> None:
        """Cover the rows of now; for `Ring.snapshot`."""
        self.first, self.end = ring.oldest, ring.written
        self.row_bytes = ring.slots[:1].nbytes
        self._ring, self._lock = ring, lock
        self._next = self.first
        self._aside: deque[Array] = deque()
        self._num_aside = 0
        self._failure = ""

    def before_overwriting(self, end: int) -> None:
        """Copy aside what is not read yet of the rows before number `end`; with the lock held."""
        first = self._next + self._num_aside
        end = min(end, self.end)
        if first >= end or self._failure:
            return
        for slots, _ in self._ring.runs(first, end):
            self._aside.append(self._ring.slots[slots].copy())
        self._num_aside += end - first
        if self._num_aside * self.row_bytes > _MAX_ASIDE_BYTES:
            self.fail(f"more than {_MAX_ASIDE_BYTES:,} bytes were written over before they were saved")

    def fail(self, why: str) -> None:
        """Have who reads it get a CheckpointError; with the lock held."""
        self._failure = why
        self._aside.clear()

    def pieces(self, max_bytes: int) -> Iterator[tuple[int, Array]]:
        """Yield the rows from the oldest on: the number of each piece's first row, and a copy of its rows.

        Raises:
            CheckpointError: training wrote over too much of it, or another snapshot was begun.
        """
        try:
            while (piece := self._take(max_bytes)) is not None:
                yield piece
        finally:
            self.close()

    def close(self) -> None:
        """Keep nothing for it any longer."""
        self._ring.release(self)

    def _take(self, max_bytes: int) -> tuple[int, Array] | None:
        with self._lock:
            if self._failure:
                raise CheckpointError("replay", f"could not be saved beside training: {self._failure}")
            if self._next >= self.end:
                return None
            first, most = self._next, max(1, max_bytes // max(1, self.row_bytes))
            parts: list[Array] = []
            while self._aside and most:  # each is as small as what was written at once: many make a piece
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
                parts.append(self._ring.slots[slots].copy())
                self._next += len(parts[-1])
        return first, parts[0] if len(parts) == 1 else _joined(parts)


def _joined(parts: list[Array]) -> Array:
    """Rows one behind the other, bytes between their fields included."""
    rows = np.concatenate([np.ascontiguousarray(part).view(np.uint8).reshape(len(part), -1) for part in parts])
    return rows.view(parts[0].dtype).reshape(-1, *parts[0].shape[1:])


MAX_PIECE_BYTES = 16 << 20


class Snapshot:
    """All that a replay must get back to go on as if nothing had happened.

    Attributes:
        values: counters, random state and settings, as JSON can hold them.
    """

    def __init__(self, values: dict[str, Any], rings: Mapping[str, RingSnapshot], arrays: Mapping[str, Array]) -> None:
        """For `Replay.snapshot`."""
        self.values = values
        self._rings = rings
        self._arrays = arrays

    def pieces(self, max_bytes: int = MAX_PIECE_BYTES) -> Iterator[Piece]:
        """Yield name, number of the first row, and rows of each piece, those of one name in order; in any thread, once.

        Rows of records are uint8 [B, bytes of a record].

        Args:
            max_bytes: of a piece; priorities, of 8 bytes a row, are one piece.

        Raises:
            CheckpointError: training wrote over too much before it was read, or another snapshot was begun.
        """
        for name, array in self._arrays.items():
            yield name, 0, array
        for name, ring in self._rings.items():
            for first, rows in ring.pieces(max_bytes):
                yield name, first, rows.view(np.uint8).reshape(len(rows), -1)

    def close(self) -> None:
        """Keep nothing for it any longer, whether it was read or not."""
        for ring in self._rings.values():
            ring.close()
