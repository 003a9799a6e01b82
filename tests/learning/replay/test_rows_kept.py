"""A replay of frames holds the number of rows it was made for, however trajectories are cut and
sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from replay_worlds import StackWorld

from aiorl.data import columns as c
from aiorl.data.columns import ColumnSpec
from aiorl.learning.replay.replay import Replay
from aiorl.learning.replay.spec import ReplaySpec

Array = NDArray[Any]
Rows = list[tuple[Array, Array]]

SHAPE = (2, 2, 4)
NUM_ENVS = 8


def make(capacity: int, *, stack: int = 4) -> Replay:
    columns = (
        ColumnSpec(c.OBS, SHAPE, "uint8"),
        ColumnSpec(c.NEW_OBS, SHAPE, "uint8"),
        ColumnSpec("no", (), "int32"),
    )
    return Replay(ReplaySpec(columns, capacity, stack=stack), seed=0)


@dataclass
class Workers:
    """Workers with 8 environments each, whose fragments arrive in turn, and their rows with whole
    observations.

    Attributes:
        is_polled: True if fragments are [B, 1], with the environments' trajectories one after the
            other and `new_obs`; False if they are [T, N] without `new_obs`.
    """

    count: int
    length: int
    is_polled: bool
    ends: float = 0.0
    rows: Rows = field(default_factory=list)

    def __post_init__(self) -> None:
        self._worlds = [
            StackWorld(NUM_ENVS, SHAPE, seed=seed, ends=self.ends, gives_new_obs=self.is_polled)
            for seed in range(self.count)
        ]

    def fragments(self) -> Iterator[dict[str, Array]]:
        """Yield fragments without end; before each is yielded, `rows` has its rows."""
        while True:
            for world in self._worlds:
                arrays = world.fragment(self.length)
                if self.is_polled:
                    arrays = {
                        name: array.swapaxes(0, 1).reshape(-1, 1, *array.shape[2:])
                        for name, array in arrays.items()
                    }
                numbers, first = arrays.pop(c.ACTIONS), len(self.rows)
                self.rows += [world.rows[number] for number in numbers.reshape(-1).tolist()]
                yield arrays | {"no": np.arange(first, len(self.rows)).reshape(numbers.shape)}


def check_rows(replay: Replay, rows: Rows) -> None:
    """Compare all rows that can be drawn with the newest inserted ones."""
    slots = np.arange(replay.evicted, replay.stored) % replay.spec.capacity
    found = {
        column.name: np.empty((len(slots), *column.shape), column.dtype)
        for column in replay.spec.columns
    }
    replay._read(slots, found)
    assert found["no"].tolist() == list(range(len(rows) - len(replay), len(rows)))
    newest = rows[len(rows) - len(replay) :]
    assert (found[c.OBS] == np.stack([obs for obs, _ in newest])).all()
    assert (found[c.NEW_OBS] == np.stack([new_obs for _, new_obs in newest])).all()


def frames_written(replay: Replay) -> int:
    assert replay._frames is not None
    return replay._frames.ring.written


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    ("is_polled", "num_workers", "length", "stack"),
    [(False, 16, 16, 4), (True, 2, 4, 4), (True, 16, 4, 4), (True, 2, 4, 1)],
)
def test_a_full_replay_stays_full(
    is_polled: bool, num_workers: int, length: int, stack: int
) -> None:
    replay, workers = make(1500, stack=stack), Workers(num_workers, length, is_polled, ends=1 / 200)
    for arrays in workers.fragments():
        replay.insert_fragment(arrays)
        assert len(replay) == min(len(workers.rows), 1500)
        if len(workers.rows) > 2500:
            break
    check_rows(replay, workers.rows)


@pytest.mark.rest_slow
@pytest.mark.parametrize("stack", [4, 1])
@pytest.mark.parametrize("length", [4, 16])
def test_cutting_a_trajectory_costs_no_frames(length: int, stack: int) -> None:
    """One for each row: the observation after the last one is the first observation of the next
    piece.
    """
    replay, workers = make(5000, stack=stack), Workers(3, length, is_polled=True)
    fragments = workers.fragments()
    for _ in range(3):
        replay.insert_fragment(next(fragments))
    at_start, rows = frames_written(replay), len(workers.rows)
    for _ in range(30):
        replay.insert_fragment(next(fragments))
    assert frames_written(replay) - at_start == len(workers.rows) - rows


def test_a_trajectory_can_continue_after_others_in_its_own_fragment() -> None:
    replay, world = make(500), StackWorld(3, SHAPE, seed=0, ends=0.0, gives_new_obs=True)
    pieces = [world.fragment(5) for _ in range(4)]
    joined = {
        name: np.concatenate(
            [piece[name].swapaxes(0, 1).reshape(-1, 1, *piece[name].shape[2:]) for piece in pieces]
        )
        for name in (c.OBS, c.NEW_OBS, c.ACTIONS)
    }
    numbers = joined.pop(c.ACTIONS)
    replay.insert_fragment(joined | {"no": np.arange(60)[:, None]})
    check_rows(replay, [world.rows[number] for number in numbers[:, 0].tolist()])
    assert 60 + 3 <= frames_written(replay) <= 60 + 3 * 2, (
        "starts have one frame throughout, or one after an empty one"
    )


@pytest.mark.parametrize("turns", [1, 40])
def test_trajectories_continue_from_a_snapshot_as_without_it(turns: int) -> None:
    replay, workers = make(400), Workers(3, 4, is_polled=True, ends=1 / 30)
    fragments = workers.fragments()
    for _ in range(turns):
        replay.insert_fragment(next(fragments))
    snapshot = replay.snapshot()
    other = make(400)
    other.restore(json.loads(json.dumps(snapshot.values)), list(snapshot.pieces(500)))
    for _ in range(30):
        arrays = next(fragments)
        drawn = []
        for one in (replay, other):
            one.insert_fragment(arrays)
            sample = one.sample(16)
            drawn.append(
                (
                    frames_written(one),
                    sample.ids.tolist(),
                    {n: a.tolist() for n, a in sample.columns.items()},
                )
            )
        assert drawn[0] == drawn[1]
    check_rows(other, workers.rows)
