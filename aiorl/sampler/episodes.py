"""Where episodes begin and end in a block of steps, as arrays: ids, steps within the episode, returns.

Nothing is done per step: once per block, the rows of each environment are cut into segments at the ends of
episodes, and everything is computed per segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.data.metrics import EpisodeColumns

__all__ = ["EpisodeTracker", "Segments"]


@dataclass(frozen=True, slots=True)
class Segments:
    """Runs of rows of one environment that belong to one episode, environment after environment.

    Attributes:
        start: int64 [S] position of the first row, counted as ``n * T + t``.
        length: int64 [S] rows.
        episode_id: int64 [S].
        first_t: int64 [S] step within the episode of the first row; -1 where that row is no transition.
        closed: bool [S] the last row ended the episode.
        block: (T, N).
    """

    start: NDArray[np.int64]
    length: NDArray[np.int64]
    episode_id: NDArray[np.int64]
    first_t: NDArray[np.int64]
    closed: NDArray[np.bool_]
    block: tuple[int, int]

    def spread(self, values: NDArray[Any]) -> NDArray[Any]:
        """One value per segment as a column [T, N]."""
        steps, num_envs = self.block
        return np.repeat(values, self.length).reshape(num_envs, steps).T

    def eps_id(self) -> NDArray[np.int64]:
        """Episode of each row, int64 [T, N]."""
        return np.ascontiguousarray(self.spread(self.episode_id))

    def t(self) -> NDArray[np.int32]:
        """Step within the episode of each row, int32 [T, N]; 0 where the row is no transition."""
        steps, num_envs = self.block
        position = np.arange(steps * num_envs).reshape(num_envs, steps).T
        column: NDArray[np.int32] = np.maximum(position + self.spread(self.first_t - self.start), 0).astype(np.int32)
        return column


class EpisodeTracker:
    """Follows the episodes of N environments from block to block.

    A row with ``valid == False`` (the reset call of a NEXT_STEP environment) counts to no length and opens
    the next episode's segment.
    """

    def __init__(self, num_envs: int, first_episode_id: int = 0) -> None:
        """All environments start a new episode.

        Args:
            num_envs: number of environments N.
            first_episode_id: ids count up from here.
        """
        self._returns = np.zeros(num_envs, np.float64)
        self._lengths = np.zeros(num_envs, np.int64)
        self._ids = first_episode_id + np.arange(num_envs, dtype=np.int64)
        self._next_id = first_episode_id + num_envs
        self._finished: list[EpisodeColumns] = []

    @property
    def unfinished_lengths(self) -> NDArray[np.int64]:
        """Transitions so far in the current episodes, [N]."""
        return self._lengths

    def advance(
        self,
        rewards: NDArray[Any],
        dones: NDArray[np.bool_],
        valid: NDArray[np.bool_] | None = None,
    ) -> Segments:
        """Take in the next T steps.

        Args:
            rewards: [T, N] raw rewards.
            dones: [T, N] the row ended its episode.
            valid: [T, N] the row is a transition; None = all are.
        Returns: the segments of this block.
        """
        steps, num_envs = rewards.shape
        ends = np.flatnonzero(dones.T)  # positions n * T + t
        first = np.arange(num_envs) * steps
        after = ends + 1
        inner = after[after % steps != 0]
        start = np.union1d(first, inner) if len(inner) else first
        length = np.diff(start, append=steps * num_envs)
        env = start // steps
        is_first = start % steps == 0
        closed = dones.T.reshape(-1)[start + length - 1]
        totals = np.add.reduceat(rewards.T.reshape(-1).astype(np.float64), start)
        transitions = length.copy()
        opens_invalid = np.zeros(len(start), np.bool_)
        if valid is not None:
            opens_invalid = ~valid.T.reshape(-1)[start]
            transitions -= opens_invalid
        carried = np.where(is_first, self._lengths[env], 0)
        totals = totals + np.where(is_first, self._returns[env], 0.0)
        transitions = transitions + carried
        episode_id = np.where(is_first, self._ids[env], 0)
        fresh = int(np.count_nonzero(~is_first))
        episode_id[~is_first] = self._next_id + np.arange(fresh)
        self._next_id += fresh
        self._collect(start, length, closed, transitions, totals, steps)

        is_last = np.append(is_first[1:], True)
        open_env = np.where(closed[is_last], 0, 1)
        self._returns = totals[is_last] * open_env
        self._lengths = transitions[is_last] * open_env
        self._ids = episode_id[is_last].copy()
        ended = closed[is_last]
        count = int(np.count_nonzero(ended))
        self._ids[ended] = self._next_id + np.arange(count)
        self._next_id += count
        return Segments(start, length, episode_id, carried - opens_invalid, closed, (steps, num_envs))

    def _collect(
        self,
        start: NDArray[np.int64],
        length: NDArray[np.int64],
        closed: NDArray[np.bool_],
        transitions: NDArray[np.int64],
        totals: NDArray[np.float64],
        steps: int,
    ) -> None:
        if not closed.any():
            return
        last = (start + length - 1)[closed]
        order = np.lexsort((last // steps, last % steps))
        self._finished.append(EpisodeColumns(transitions[closed][order].astype(np.int32), totals[closed][order]))

    def take_finished(self) -> EpisodeColumns:
        """Episodes that ended since the last call, in the order they ended."""
        finished, self._finished = self._finished, []
        if not finished:
            return EpisodeColumns.empty()
        return EpisodeColumns(
            np.concatenate([part.lengths for part in finished]),
            np.concatenate([part.rewards for part in finished]),
        )
