"""Snapshots: a restored replay continues bit for bit, and damaged data is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from replay_worlds import StackWorld

from aiorl.data import columns as c
from aiorl.data.columns import ColumnSpec
from aiorl.errors import CheckpointError
from aiorl.learning.replay.priorities import Prioritised
from aiorl.learning.replay.replay import Replay
from aiorl.learning.replay.ring import Snapshot
from aiorl.learning.replay.spec import ReplaySpec

SHAPE = (2, 2, 4)
COLUMNS = (
    ColumnSpec(c.OBS, SHAPE, "uint8"),
    ColumnSpec(c.NEW_OBS, SHAPE, "uint8"),
    ColumnSpec(c.ACTIONS, (), "int32"),
)

Piece = tuple[str, int, Any]


def make(
    *, is_prioritised: bool = True, stack: int = 4, capacity: int = 40, seed: int = 0
) -> Replay:
    return Replay(
        ReplaySpec(COLUMNS, capacity, Prioritised() if is_prioritised else None, stack), seed=seed
    )


def advance(replay: Replay, world: StackWorld, turns: int) -> list[Any]:
    """Insert, sample and update; return the drawn rows."""
    drawn: list[Any] = []
    for _ in range(turns):
        replay.insert_fragment(world.fragment(3))
        sample = replay.sample(6, num_batches=2, beta=0.4)
        drawn += [
            sample.ids.tolist(),
            sample.weights.tolist(),
            *(sample.columns[k.name].tolist() for k in COLUMNS),
        ]
        replay.update_priorities(sample.ids, 3 * np.cos(sample.ids + 0.5))
    frames = None if replay._frames is None else replay._frames.ring.written
    return [*drawn, len(replay), replay.stored, replay.evicted, replay.sampled, frames]


def through_json(values: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(json.dumps(values, allow_nan=False))
    return result


@pytest.mark.rest_slow
@pytest.mark.parametrize("stack", [0, 1, 4])
@pytest.mark.parametrize("is_prioritised", [False, True])
@pytest.mark.parametrize("turns", [0, 2, 20])
def test_a_restored_replay_draws_the_same_rows(
    stack: int, is_prioritised: bool, turns: int
) -> None:
    replay, world = make(is_prioritised=is_prioritised, stack=stack), StackWorld(2, SHAPE, seed=1)
    advance(replay, world, turns)
    snapshot = replay.snapshot()
    values, pieces = through_json(snapshot.values), list(snapshot.pieces(200))
    assert all(array.nbytes <= 200 for name, _, array in pieces if name in ("rows", "frames"))
    other = make(is_prioritised=is_prioritised, stack=stack, seed=99)
    other.restore(values, reversed(pieces))
    fragments = [world.fragment(3) for _ in range(30)]

    class Again:
        def __init__(self) -> None:
            self._left = iter(fragments)

        def fragment(self, length: int) -> Any:
            return next(self._left)

    expected = advance(replay, Again(), 30)  # type: ignore[arg-type]
    assert advance(other, Again(), 30) == expected  # type: ignore[arg-type]


@settings(max_examples=25)
@given(st.integers(0, 2**16), st.integers(0, 12), st.integers(1, 2000), st.sampled_from([0, 4]))
def test_a_snapshot_read_during_training_is_that_of_its_moment(
    seed: int, turns: int, max_bytes: int, stack: int
) -> None:
    rng = np.random.default_rng(seed)
    replay, world = make(stack=stack), StackWorld(2, SHAPE, seed=seed)
    advance(replay, world, turns)
    at_once = replay.snapshot()
    expected = through_json(at_once.values), joined(at_once.pieces())
    snapshot = replay.snapshot()
    reading: Iterator[Piece] = snapshot.pieces(max_bytes)
    pieces: list[Piece] = []
    for _ in range(20):
        pieces += [
            piece
            for _ in range(rng.integers(4))
            for piece in [next(reading, None)]
            if piece is not None
        ]
        advance(replay, world, int(rng.integers(3)))
    pieces += reading
    assert through_json(snapshot.values) == expected[0]
    found = joined(pieces)
    assert found.keys() == expected[1].keys()
    assert all((found[name] == expected[1][name]).all() for name in found)


@pytest.mark.parametrize("max_bytes", [16, 100, 10_000])
def test_columns_written_back_while_a_snapshot_is_read_do_not_change_it(max_bytes: int) -> None:
    columns = (ColumnSpec(c.OBS, (2,)), ColumnSpec("novelty"))
    replay = Replay(ReplaySpec(columns, 40, None, 0), seed=0)

    def insert(count: int) -> None:
        numbers = np.arange(replay.stored, replay.stored + count, dtype=np.float32)[:, None]
        replay.insert_fragment({c.OBS: np.stack([numbers, numbers], -1), "novelty": numbers})

    insert(40)
    insert(13)
    expected = joined(replay.snapshot().pieces())
    reading: Iterator[Piece] = replay.snapshot().pieces(max_bytes)
    pieces = [next(reading)]
    for _ in range(5):
        sample = replay.sample(6, num_batches=2)
        replay.write_back(sample.ids, {"novelty": np.full(sample.ids.shape, -1.0, np.float32)})
        insert(3)
        pieces += [piece for piece in [next(reading, None)] if piece is not None]
    pieces += reading
    found = joined(pieces)
    assert all((found[name] == expected[name]).all() for name in expected)
    assert (replay.sample(200).columns["novelty"] == -1.0).any()


def joined(pieces: Any) -> dict[str, Any]:
    parts: dict[str, list[Any]] = {}
    for name, _, array in pieces:
        parts.setdefault(name, []).append(array)
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def saved() -> tuple[dict[str, Any], list[Piece]]:
    replay = make()
    advance(replay, StackWorld(2, SHAPE, seed=1), 15)
    snapshot: Snapshot = replay.snapshot()
    return through_json(snapshot.values), list(snapshot.pieces(500))


def put(*path: Any, value: Any) -> Callable[[dict[str, Any], list[Piece]], None]:
    def change(values: dict[str, Any], pieces: list[Piece]) -> None:
        place: Any = values
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value

    return change


def drop(name: str) -> Callable[[dict[str, Any], list[Piece]], None]:
    def change(values: dict[str, Any], pieces: list[Piece]) -> None:
        pieces.remove(next(piece for piece in pieces if piece[0] == name))

    return change


def replace(
    name: str, make: Callable[[int, Any], tuple[int, Any]]
) -> Callable[[dict[str, Any], list[Piece]], None]:
    def change(values: dict[str, Any], pieces: list[Piece]) -> None:
        at = next(i for i, piece in enumerate(pieces) if piece[0] == name)
        pieces[at] = (name, *make(pieces[at][1], pieces[at][2]))

    return change


@pytest.mark.parametrize(
    "change",
    [
        put("stored", value=-1),
        put("stored", value="x"),
        put("oldest", value=0),
        put("oldest", value=10**6),
        put("frames_stored", value="x"),
        put("largest_error", value="x"),
        put("rng", value={}),
        put("rng", "bit_generator", value="MT19937"),
        put("spec", "capacity", value=41),
        put("spec", value=None),
        drop("rows"),
        drop("frames"),
        drop("priorities"),
        drop("groups"),
        drop("last"),
        replace("rows", lambda first, array: (-5, array)),
        replace("rows", lambda first, array: (first, array[:, :-1])),
        replace("priorities", lambda first, array: (first, array[:-1])),
        replace("priorities", lambda first, array: (first, array * np.nan)),
        lambda values, pieces: values.clear(),
    ],
)
def test_a_damaged_state_is_refused(change: Callable[[dict[str, Any], list[Piece]], None]) -> None:
    values, pieces = saved()
    make().restore(values, pieces)
    change(values, pieces)
    with pytest.raises(CheckpointError):
        make().restore(values, pieces)
