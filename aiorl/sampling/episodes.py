"""Where episodes begin and end in a block of steps, as arrays: their lengths and returns.

Nothing is done per step: once per block, the rows of each environment are cut into segments at the ends of
episodes, and everything is computed per segment.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.data.metrics import EpisodeColumns

__all__ = ["EpisodeTracker"]


class EpisodeTracker:
    """Follows the episodes of N environments from block to block.

    A row with ``valid == False`` (the reset call of a NEXT_STEP environment) counts to no length.
    """

    def __init__(self, num_envs: int) -> None:
        """All environments start a new episode."""
        self._returns = np.zeros(num_envs, np.float64)
        self._lengths = np.zeros(num_envs, np.int64)
        self._finished: list[EpisodeColumns] = []

    def advance(self, rewards: NDArray[Any], dones: NDArray[np.bool_], valid: NDArray[np.bool_] | None = None) -> None:
        """Take in the next T steps.

        Args:
            rewards: [T, N] raw rewards.
            dones: [T, N] the row ended its episode.
            valid: [T, N] the row is a transition; None = all are.
        """
        steps, num_envs = rewards.shape
        after = np.flatnonzero(dones.T) + 1  # positions n * T + t
        first = np.arange(num_envs) * steps
        inner = after[after % steps != 0]
        start = np.union1d(first, inner) if len(inner) else first
        length = np.diff(start, append=steps * num_envs)
        last = start + length - 1
        env, is_first = start // steps, start % steps == 0
        totals = np.add.reduceat(rewards.T.reshape(-1).astype(np.float64), start)
        totals += np.where(is_first, self._returns[env], 0.0)
        lengths = length + np.where(is_first, self._lengths[env], 0)
        if valid is not None:
            lengths -= ~valid.T.reshape(-1)[start]  # a row that is no transition opens an episode
        closed = dones.T.reshape(-1)[last]
        if closed.any():
            order = np.lexsort((last[closed] // steps, last[closed] % steps))
            self._finished.append(EpisodeColumns(lengths[closed][order].astype(np.int32), totals[closed][order]))
        is_last = np.append(is_first[1:], True)
        goes_on = ~closed[is_last]
        self._returns = totals[is_last] * goes_on
        self._lengths = lengths[is_last] * goes_on

    def take_finished(self) -> EpisodeColumns:
        """Episodes that ended since the last call, in the order they ended."""
        finished, self._finished = self._finished, []
        if not finished:
            return EpisodeColumns.empty()
        return EpisodeColumns(
            np.concatenate([part.lengths for part in finished]),
            np.concatenate([part.rewards for part in finished]),
        )
