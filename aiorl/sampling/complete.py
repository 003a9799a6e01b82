"""EpisodeCollector: keeps rows of lockstep environments until their episodes are complete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.process.log_once import warn_of_long_episode

__all__ = ["CompleteEpisodes", "EpisodeCollector", "Recorded"]

Array = NDArray[Any]

_MANY_ROWS = 5000


@dataclass(frozen=True, slots=True)
class Recorded:
    """T steps of N environments.

    Attributes:
        columns: name -> [T, N, ...].
        dones: [T, N] the row ends its episode.
        final_index: [K, 2] (t, n) of all rows that end an episode, or None when final observations are not
            wanted.
        final_obs: [K, ...] their true final observations.
    """

    columns: dict[str, Array]
    dones: NDArray[np.bool_]
    final_index: NDArray[np.int64] | None
    final_obs: Array | None


@dataclass(frozen=True, slots=True)
class CompleteEpisodes:
    """Whole episodes one after the other.

    Attributes:
        columns: name -> [B, 1, ...], transitions only.
        final_rows: [E] last row of each episode, or None.
        final_obs: [E, ...] true final observation of each episode, or None.
    """

    columns: dict[str, Array]
    final_rows: NDArray[np.int64] | None
    final_obs: Array | None


class EpisodeCollector:
    """Takes blocks of steps, gives the rows of episodes that are complete.

    Attributes:
        ready_rows: transitions of complete episodes not yet taken.
        kept_steps: steps of every environment that are kept.
    """

    def __init__(self) -> None:
        """Nothing kept yet."""
        self.ready_rows = 0
        self.kept_steps = 0
        self._blocks: list[tuple[dict[str, Array], NDArray[np.bool_]]] = []
        self._unfinished: NDArray[np.int64] | None = None
        self._finals: dict[tuple[int, int], Array] | None = None

    def add(self, block: Recorded) -> None:
        """Keep the next T steps. Many rows of one environment without an end are worth a warning, once."""
        columns = dict(block.columns)
        valid = columns.setdefault(c.VALID, np.ones(block.dones.shape, np.bool_))
        if block.final_index is not None and block.final_obs is not None:
            self._finals = self._finals if self._finals is not None else {}
            for (t, n), obs in zip(block.final_index.tolist(), block.final_obs, strict=True):
                self._finals[self.kept_steps + t, n] = obs
        self._blocks.append((columns, block.dones))
        self.kept_steps += len(block.dones)
        complete = _complete(block.dones)
        ends = complete[0]  # an episode ends in here
        before = np.zeros(len(ends), np.int64) if self._unfinished is None else self._unfinished
        self.ready_rows += int(before[ends].sum()) + int(np.count_nonzero(valid & complete))
        self._unfinished = np.where(ends, 0, before) + np.count_nonzero(valid & ~complete, axis=0)
        index = int(self._unfinished.argmax())
        if self._unfinished[index] > _MANY_ROWS:
            warn_of_long_episode(_MANY_ROWS, index, int(self._unfinished[index]))

    def take(self) -> CompleteEpisodes:
        """All complete episodes, environment after environment; rows of unfinished ones stay."""
        assert self._blocks, "nothing was added yet"
        kept, dones = self._joined()
        complete = _complete(dones)
        env_major = (kept[c.VALID] & complete).T
        columns = {name: column.swapaxes(0, 1)[env_major][:, None] for name, column in kept.items() if name != c.VALID}
        final_rows = final_obs = None
        if self._finals is not None:
            position = np.cumsum(env_major.reshape(-1)).reshape(env_major.shape) - 1
            ends = np.argwhere(dones.T & env_major)
            final_rows = position[ends[:, 0], ends[:, 1]]
            final_obs = np.stack([self._finals[t, n] for n, t in ends.tolist()])
            self._finals = {}  # every row that ends an episode has just been taken
        self._keep_unfinished(kept, dones, complete)
        return CompleteEpisodes(columns, final_rows, final_obs)

    def _joined(self) -> tuple[dict[str, Array], NDArray[np.bool_]]:
        if len(self._blocks) == 1:
            return self._blocks[0]
        kept = {name: np.concatenate([columns[name] for columns, _ in self._blocks]) for name in self._blocks[0][0]}
        return kept, np.concatenate([dones for _, dones in self._blocks])

    def _keep_unfinished(self, kept: dict[str, Array], dones: NDArray[np.bool_], complete: NDArray[np.bool_]) -> None:
        """Drop leading rows that are taken everywhere; mark the other taken rows as no transitions."""
        valid = kept[c.VALID] & ~complete
        needed: NDArray[np.bool_] = np.logical_or.reduce(valid, axis=1)
        first = int(needed.argmax()) if needed.any() else len(valid)
        columns = {name: column[first:].copy() for name, column in kept.items()}
        columns[c.VALID] = valid[first:]
        self._blocks = [(columns, (dones & ~complete)[first:])]
        self.kept_steps = len(valid) - first
        self.ready_rows = 0


def _complete(dones: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Rows [L, N] at or before the last end of an episode in their environment."""
    complete: NDArray[np.bool_] = np.logical_or.accumulate(dones[::-1], axis=0)[::-1]
    return complete
