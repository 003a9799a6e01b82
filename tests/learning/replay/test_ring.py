"""Rings: slots used in turn, and snapshots that don't change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from aiorl.errors import CheckpointError
from aiorl.learning.replay import ring as ring_module
from aiorl.learning.replay.ring import Ring


def write(ring: Ring, count: int) -> None:
    """Write rows that contain their own numbers."""
    first = ring.written
    for slots, part in ring.advance(count):
        ring.slots[slots] = np.arange(first, first + count)[part]


def joined(pieces: list[tuple[int, np.ndarray]], first: int) -> list[int]:
    """Return the rows of pieces, which must be consecutive from `first` on."""
    rows: list[int] = []
    for number, piece in pieces:
        assert number == first + len(rows)
        rows += piece.tolist()
    return rows


@settings(max_examples=100)
@given(st.integers(1, 9), st.lists(st.integers(0, 9), max_size=12))
def test_the_newest_rows_are_kept_and_slots_know_their_numbers(
    capacity: int, counts: list[int]
) -> None:
    ring = Ring(np.full(capacity, -1))
    for count in counts:
        write(ring, min(count, capacity))
    live = np.arange(ring.oldest, ring.written)
    assert len(live) == min(capacity, ring.written)
    assert ring.slots[live % capacity].tolist() == live.tolist()
    assert ring.newest_in(live % capacity).tolist() == live.tolist()


@settings(max_examples=100)
@given(
    st.integers(1, 9),
    st.integers(0, 20),
    st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=30),
    st.integers(1, 80),
)
def test_a_snapshot_is_not_changed_by_rows_written_while_it_is_read(
    capacity: int, before: int, steps: list[int | None], max_bytes: int
) -> None:
    ring = Ring(np.full(capacity, -1, np.int64))
    for _ in range(before):
        write(ring, 1)
    expected = list(range(ring.oldest, ring.written))
    snapshot = ring.snapshot()
    reading, pieces = snapshot.pieces(max_bytes), []
    for step in steps:
        if step is None:
            pieces += [piece for piece in [next(reading, None)] if piece is not None]
        else:
            write(ring, min(step, capacity))
    pieces += reading
    assert joined(pieces, snapshot.first) == expected
    assert ring._snapshot is None


def test_copies_aside_are_limited_and_slow_reading_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ring_module, "_MAX_ASIDE_BYTES", 100)
    ring = Ring(np.zeros(100, np.int64))
    write(ring, 100)
    reading = ring.snapshot().pieces(80)
    assert next(reading)[1].tolist() == list(range(10))
    write(ring, 20)
    assert next(reading)[0] == 10  # one of the 10 that were copied aside
    write(ring, 14)
    with pytest.raises(CheckpointError, match="100"):
        list(reading)
    assert ring._snapshot is None


def test_a_second_snapshot_ends_the_first() -> None:
    ring = Ring(np.zeros(4, np.int64))
    write(ring, 4)
    first, second = ring.snapshot(), ring.snapshot()
    with pytest.raises(CheckpointError):
        list(first.pieces(8))
    assert joined(list(second.pieces(8)), 0) == [0, 1, 2, 3]
