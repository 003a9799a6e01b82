"""Sequences on which recurrent networks are trained, cut out of fragments and stored as entries of
a replay.

A sequence lies within one episode. It begins with the episode, in a state of zeros, or where the
fragment has a state from the worker, which it has at regular steps. That state is as old as the
weights that produced it. So the first steps of such a sequence, its burn-in, only bring the state
up to date and are not trained on. Sequences overlap, so that these steps were trained on in the
previous sequence. Only the first steps of a fragment that continues an episode have no previous
sequence.

Source: Kapturowski et al. 2019, https://openreview.net/forum?id=r1lyTjAqYX.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from aiorl.acting.postprocess import n_step
from aiorl.data import columns as c
from aiorl.data.columns import I64, Array, Bools, Columns, ColumnSpec
from aiorl.data.fragment import check_fragment, check_numbers, new_obs
from aiorl.errors import BatchError
from aiorl.learning.replay.spec import EPISODE_COLUMNS, check_episode_columns

TRAINED = "trained"
"""Column: 1 for the steps of a sequence that are trained on, 0 for its burn-in and after its
end."""
FOLLOWING = "following"
"""Column: for each step, the step of the sequence whose observation follows the summed rewards."""

_PREVIOUS = {c.PREV_ACTIONS: c.ACTIONS, c.PREV_REWARDS: c.REWARDS}


class SequenceShape(NamedTuple):
    """Layout of sequences in an episode.

    Attributes:
        length: L, steps of a sequence, including its burn-in.
        burn_in: steps at its start that are not trained on, unless the episode begins with them.
        overlap: steps that it shares with the previous one, at least `burn_in` and less than
            `length`.
    """

    length: int
    burn_in: int
    overlap: int

    @property
    def stride(self) -> int:
        """Steps from the start of one sequence to the start of the next, and between the states of
        a fragment.
        """
        return self.length - self.overlap

    @property
    def trained_steps(self) -> int:
        """Trained steps of a whole sequence."""
        return self.length - self.burn_in


class _Window(NamedTuple):
    """Rows `first` to `stop` of an environment, trained on from row `trained_from` on."""

    env: int
    first: int
    stop: int
    trained_from: int


@dataclass(frozen=True, slots=True)
class Sequences:
    """Cutter of fragments into sequences.

    Attributes:
        shape: shape of the sequences.
        fragment_columns: columns that a fragment has for each row.
        states: columns of the recurrent state of one row.
        gamma: discount per step.
        n: steps whose rewards are summed; fewer at the end of a sequence.
    """

    shape: SequenceShape
    fragment_columns: tuple[ColumnSpec, ...]
    states: tuple[ColumnSpec, ...]
    gamma: float
    n: int

    @property
    def columns(self) -> tuple[ColumnSpec, ...]:
        """Columns of a stored sequence; observations and previous steps have one more entry than
        actions.
        """
        length = self.shape.length
        of_rows = {column.name: column for column in self.fragment_columns}
        columns = []
        for name in (c.OBS, *_PREVIOUS):
            if name in of_rows:
                column = of_rows[name]
                columns.append(ColumnSpec(name, (length + 1, *column.shape), column.dtype))
        actions = of_rows[c.ACTIONS]
        return (
            *columns,
            ColumnSpec(c.ACTIONS, (length, *actions.shape), actions.dtype),
            ColumnSpec(c.N_STEP_RETURNS, (length,)),
            ColumnSpec(c.DISCOUNTS, (length,)),
            ColumnSpec(TRAINED, (length,)),
            ColumnSpec(FOLLOWING, (length,), "int32"),
            *self.states,
        )

    def check(self, arrays: Columns) -> None:
        """Check that a fragment can be cut. Safe in any thread.

        Raises:
            BatchError: it can't; the error names the column at fault.
        """
        steps, num_envs = check_fragment(self.fragment_columns, arrays)
        for name in (c.TERMINATEDS, c.TRUNCATEDS):
            if arrays[name].dtype != np.bool_:
                raise BatchError(name, "dtype bool", arrays[name].dtype)
        num_states = -(-steps // self.shape.stride)
        for column in self.states:
            if column.name not in arrays:
                raise BatchError(column.name, "in every fragment", f"only {sorted(arrays)!r:.500}")
            column.check(arrays[column.name], (num_envs, num_states))
            check_numbers(column, arrays[column.name])
        largest = float(np.abs(arrays[c.REWARDS]).max())
        if largest * self.n > float(np.finfo(np.float32).max):
            raise BatchError(
                c.REWARDS, f"numbers whose sums of {self.n} fit into float32", f"{largest:g}"
            )
        if c.EPS_ID in arrays:
            check_episode_columns(arrays, (steps, num_envs))

    def cut(self, arrays: Columns) -> dict[str, Array]:
        """Return the sequences of a fragment, [S, 1, ...] by name, as S steps of one environment; S
        can be 0.

        Args:
            arrays: arrays of a checked fragment: columns [T, N, ...], the arrays from which
                `new_obs` is built, and states [N, C, ...] before every `shape.stride` rows. If there
                are EPISODE_COLUMNS, a sequence has those of its first row.
        """
        windows = list(self._windows(arrays))
        table = np.array(windows, np.int64).reshape(-1, len(_Window._fields))
        env, first, stop, trained_from = table.T
        rows = first[:, None] + np.arange(self.shape.length)
        is_row = rows < stop[:, None]
        rows = np.where(is_row, rows, first[:, None])
        steps_of = {
            name: _at(arrays[name], rows, env, is_row)
            for name in (c.ACTIONS, c.REWARDS, c.TERMINATEDS, c.TRUNCATEDS)
        }
        targets = n_step(
            steps_of[c.REWARDS].T,
            steps_of[c.TERMINATEDS].T,
            steps_of[c.TRUNCATEDS].T,
            gamma=self.gamma,
            n=self.n,
            valid=is_row.T,
        )
        following = np.arange(self.shape.length) + targets.steps.T
        is_trained = is_row & (rows >= trained_from[:, None])
        cut: dict[str, Array] = {
            c.ACTIONS: steps_of[c.ACTIONS],
            c.N_STEP_RETURNS: targets.returns.T,
            c.DISCOUNTS: targets.discounts.T,
            FOLLOWING: following.astype(np.int32),
            TRAINED: is_trained.astype(np.float32),
        }
        after = {name: arrays[of] for name, of in _PREVIOUS.items() if name in arrays}
        after[c.OBS] = new_obs(arrays)
        for name, next_entries in after.items():
            entries = _at(arrays[name], rows, env, is_row)
            cut[name] = np.pad(entries, _one_more(entries.ndim))
            cut[name][np.arange(len(windows)), stop - first] = next_entries[stop - 1, env]
        # a sequence that starts elsewhere starts an episode, with a state of zeros
        has_state = first % self.shape.stride == 0
        place = np.where(has_state, first // self.shape.stride, 0)
        for column in self.states:
            states = arrays[column.name][env, place]
            is_stored = has_state.reshape(-1, *[1] * len(column.shape))
            cut[column.name] = np.where(is_stored, states, np.float32(0.0))
        names = [column.name for column in self.columns]
        if c.EPS_ID in arrays:
            names += EPISODE_COLUMNS
            for name in EPISODE_COLUMNS:
                cut[name] = arrays[name][first, env]
        return {name: cut[name][:, None] for name in names}

    def _windows(self, arrays: Columns) -> Iterator[_Window]:
        ended = arrays[c.TERMINATEDS] | arrays[c.TRUNCATEDS]
        valid = arrays.get(c.VALID, np.ones(ended.shape, np.bool_))
        begins_episode = np.ones(ended.shape[1], np.bool_)
        for column in self.states:
            of_first_rows = arrays[column.name][:, 0].reshape(len(begins_episode), -1)
            begins_episode &= ~of_first_rows.any(axis=1)
        for env in range(ended.shape[1]):
            for first, stop in _runs(valid[:, env], ended[:, env]):
                begins = bool(first or begins_episode[env])
                yield from self._windows_of_run(env, first, stop, begins_episode=begins)

    def _windows_of_run(
        self, env: int, first: int, end: int, *, begins_episode: bool
    ) -> Iterator[_Window]:
        """Yield the sequences of rows `first` to `end`, which are consecutive in one episode."""
        stride = self.shape.stride
        trained_from = first
        if not begins_episode:
            trained_from += self.shape.burn_in
        while True:
            stop = min(first + self.shape.length, end)
            if trained_from < stop:
                yield _Window(env, first, stop, trained_from)
            if stop == end:
                return
            first = (first + stride) // stride * stride
            trained_from = first + self.shape.burn_in


def _runs(valid: Bools, ended: Bools) -> Iterator[tuple[int, int]]:
    """Yield the first row and the row after the last of each run of transitions [T] in one
    episode.
    """
    first = 0
    for row in np.flatnonzero(ended | ~valid).tolist():
        stop = row + int(valid[row])
        if first < stop:
            yield first, stop
        first = row + 1
    if first < len(valid):
        yield first, len(valid)


def _at(column: Array, rows: I64, env: I64, is_row: Bools) -> Array:
    """Return rows [S, L, ...] of a column [T, N, ...], with zeros where there is no row."""
    entries: Array = column[rows, env[:, None]]
    entries[~is_row] = 0
    return entries


def _one_more(ndim: int) -> list[tuple[int, int]]:
    """Return the padding that adds one step at the end of columns [S, L, ...]."""
    return [(0, 0), (0, 1), *[(0, 0)] * (ndim - 2)]
