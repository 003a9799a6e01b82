"""Replay alone: rows in, minibatches out, with 1 M CartPole transitions or 20 k stacks of Atari
frames.

Baselines do the same in a few lines of NumPy without checks: a column is an array, a sum tree is a
heap, and each stack of frames is stored whole, twice.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.data.columns import ColumnSpec
from aiorl.learning.replay.priorities import Prioritised
from aiorl.learning.replay.replay import Replay
from aiorl.learning.replay.spec import ReplaySpec
from benchmarks.measure import alternate, pin_to_one_core, run_fresh
from benchmarks.result import Figure

__all__ = ["replay_frames", "replay_prioritised", "replay_uniform"]

Array = NDArray[Any]
Turn = Callable[[], None]

ROWS = 1_000_000
BATCH = 256
TURNS = 300
ROUNDS = 7
BETA = 0.4
STACKS = 20_000
COLUMNS = (
    ColumnSpec("obs", (4,)),
    ColumnSpec("new_obs", (4,)),
    ColumnSpec("actions", (), "int32"),
    ColumnSpec("n_step_returns"),
    ColumnSpec("discounts"),
)


def replay_prioritised() -> list[Figure]:
    """Measure 1 M CartPole transitions: insert a row and draw 256 by priority; and take 256
    errors.
    """
    inserted, updated = run_fresh("benchmarks.replay", "prioritised")
    return [
        Figure(
            "replay/insert + 256 by priority of 1 M",
            inserted[0],
            "ms",
            inserted[1],
            target_ratio=1.5,
            smaller_is_better=True,
        ),
        Figure(
            "replay/priorities of 256",
            updated[0],
            "ms",
            updated[1],
            target_ratio=0.5,
            smaller_is_better=True,
        ),
    ]


def replay_uniform() -> list[Figure]:
    """Measure 1 M CartPole transitions: insert a row and draw 256 uniformly."""
    ((value, baseline),) = run_fresh("benchmarks.replay", "uniform")
    return [
        Figure(
            "replay/insert + 256 uniformly of 1 M",
            value,
            "ms",
            baseline,
            target_ratio=1.5,
            smaller_is_better=True,
        )
    ]


def replay_frames() -> list[Figure]:
    """Measure Atari stacks of 4 frames, each frame stored once: insert 4 steps and draw 32; and the
    size of 1 M.
    """
    ((value, baseline),) = run_fresh("benchmarks.replay", "frames")
    spec = ReplaySpec(_atari_columns(), ROWS, Prioritised(), stack=4)
    whole = ReplaySpec(_atari_columns(), ROWS, Prioritised())
    return [
        Figure("replay/4 Atari steps + 32 stacks", value, "ms", baseline, smaller_is_better=True),
        Figure(
            "replay/1 M Atari transitions",
            spec.bytes_needed / 1e9,
            "GB",
            whole.bytes_needed / 1e9,
            target_ratio=0.2,
            smaller_is_better=True,
        ),
    ]


def main(what: str) -> None:
    """Measure in this process and print pairs of value and baseline as JSON."""
    pin_to_one_core()
    pairs = {"prioritised": _prioritised, "uniform": _uniform, "frames": _frames}[what]()
    figures = [
        alternate(partial(_milliseconds, ours), partial(_milliseconds, baseline), ROUNDS)
        for ours, baseline in pairs
    ]
    sys.stdout.write(json.dumps(figures))


def _milliseconds(turn: Turn) -> float:
    started = time.perf_counter()
    for _ in range(TURNS):
        turn()
    return 1000 * (time.perf_counter() - started) / TURNS


def _prioritised() -> list[tuple[Turn, Turn]]:
    rng = np.random.default_rng(0)
    errors = rng.random(ROWS)
    replay = Replay(ReplaySpec(COLUMNS, ROWS, Prioritised()), seed=0)
    replay.insert_fragment(_steps(_rows(ROWS, rng)) | {c.PRIORITIES: errors[:, None]})
    bare = _Bare(ROWS, rng, errors)
    row = _rows(1, rng)
    step = _steps(row)
    ids, new = rng.integers(0, ROWS, (TURNS, BATCH)), rng.random((TURNS, BATCH))
    ids.sort(axis=1)
    turns = [iter(range(10**9)), iter(range(10**9))]

    def subject() -> None:
        replay.insert_fragment(step)
        replay.sample(BATCH, beta=BETA)

    def baseline() -> None:
        bare.insert(row)
        bare.by_priority()

    def subject_errors() -> None:
        at = next(turns[0]) % TURNS
        replay.update_priorities(ids[at] + replay.evicted, new[at])

    def baseline_errors() -> None:
        at = next(turns[1]) % TURNS
        bare.update(ids[at], new[at])

    return [(subject, baseline), (subject_errors, baseline_errors)]


def _uniform() -> list[tuple[Turn, Turn]]:
    rng = np.random.default_rng(0)
    replay = Replay(ReplaySpec(COLUMNS, ROWS), seed=0)
    replay.insert_fragment(_steps(_rows(ROWS, rng)))
    bare = _Bare(ROWS, rng, None)
    row = _rows(1, rng)
    step = _steps(row)

    def subject() -> None:
        replay.insert_fragment(step)
        replay.sample(BATCH)

    def baseline() -> None:
        bare.insert(row)
        bare.uniformly()

    return [(subject, baseline)]


def _frames() -> list[tuple[Turn, Turn]]:
    rng = np.random.default_rng(0)
    replay = Replay(ReplaySpec(_atari_columns(), STACKS, stack=4), seed=0)
    frames = rng.integers(0, 256, (84, 84, 64)).astype(np.uint8)
    stacks = np.stack([frames[..., at : at + 4] for at in range(60)])
    obs, new_obs = (np.zeros((STACKS, 84, 84, 4), np.uint8) for _ in range(2))
    small = {
        name: np.zeros((4, 1), dtype)
        for name, dtype in (
            ("actions", np.int32),
            ("n_step_returns", np.float32),
            ("discounts", np.float32),
        )
    }
    steps = [iter(range(10**9)), iter(range(10**9))]

    def fragment() -> dict[str, Array]:
        first = 4 * next(steps[0]) % 56
        return {
            **small,
            "obs": stacks[first : first + 4, None],
            "last_obs": stacks[first + 4, None],
        }

    def subject() -> None:
        replay.insert_fragment(fragment())
        replay.sample(32)

    def baseline() -> None:
        step = next(steps[1])
        first, slot = 4 * step % 56, 4 * step % STACKS
        obs[slot : slot + 4], new_obs[slot : slot + 4] = (
            stacks[first : first + 4],
            stacks[first + 1 : first + 5],
        )
        slots = rng.integers(0, STACKS, 32)
        obs[slots], new_obs[slots]

    for _ in range(STACKS // 4):
        subject()
        baseline()
    return [(subject, baseline)]


def _atari_columns() -> tuple[ColumnSpec, ...]:
    stacks = tuple(ColumnSpec(name, (84, 84, 4), "uint8") for name in ("obs", "new_obs"))
    return (*stacks, *COLUMNS[2:])


def _rows(count: int, rng: np.random.Generator) -> dict[str, Array]:
    rows = {column.name: rng.random((count, *column.shape), np.float32) for column in COLUMNS}
    return {**rows, "actions": rng.integers(0, 2, count)}


def _steps(rows: dict[str, Array]) -> dict[str, Array]:
    """Return rows [B, ...] as B steps of one environment."""
    return {name: column[:, None] for name, column in rows.items()}


class _Bare:
    """Hand-written replay: an array for each column, and a sum heap."""

    def __init__(self, capacity: int, rng: np.random.Generator, errors: Array | None) -> None:
        self._rng, self._capacity, self._next = rng, capacity, 0
        self._columns: Mapping[str, Array] = {
            name: array.astype(np.int32) if name == "actions" else array
            for name, array in _rows(capacity, rng).items()
        }
        self._size = 1 << (capacity - 1).bit_length()
        self._sums = np.zeros(2 * self._size)
        if errors is not None:
            self.update(np.arange(capacity), errors)

    def insert(self, row: Mapping[str, Array]) -> None:
        for name, column in self._columns.items():
            column[self._next] = row[name][0]
        node = self._size + self._next
        self._sums[node] = 1.0
        while node > 1:
            node >>= 1
            self._sums[node] = self._sums[2 * node] + self._sums[2 * node + 1]
        self._next = (self._next + 1) % self._capacity

    def uniformly(self) -> dict[str, Array]:
        slots = self._rng.integers(0, self._capacity, BATCH)
        return {name: column[slots] for name, column in self._columns.items()}

    def by_priority(self) -> tuple[dict[str, Array], Array]:
        sums = self._sums
        rest = (np.arange(BATCH) + self._rng.random(BATCH)) * (sums[1] / BATCH)
        nodes = np.ones(BATCH, np.int64)
        while nodes[0] < self._size:
            nodes = 2 * nodes
            left = sums[nodes]
            is_right = rest >= left
            rest = rest - np.where(is_right, left, 0.0)
            nodes = nodes + is_right
        slots = nodes - self._size
        weights = (self._capacity * sums[nodes] / sums[1]) ** -BETA
        return {
            name: column[slots] for name, column in self._columns.items()
        }, weights / weights.max()

    def update(self, slots: Array, errors: Array) -> None:
        nodes = slots + self._size
        self._sums[nodes] = (errors + 1e-6) ** 0.6
        while nodes[0] > 1:
            nodes = np.unique(nodes >> 1)
            self._sums[nodes] = self._sums[2 * nodes] + self._sums[2 * nodes + 1]


if __name__ == "__main__":
    main(*sys.argv[1:])
