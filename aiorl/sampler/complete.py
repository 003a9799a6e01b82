"""EpisodeCollector: keeps rows of lockstep environments until their episodes are complete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.data import columns as c

__all__ = ["CompleteEpisodes", "EpisodeCollector", "Recorded"]

Array = NDArray[Any]


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
    """

    def __init__(self) -> None:
        """Nothing kept yet."""
        self.ready_rows = 0
        self._kept: dict[str, Array] = {}
        self._dones: NDArray[np.bool_] | None = None
        self._finals: dict[tuple[int, int], Array] | None = None

    def add(self, block: Recorded) -> None:
        """Keep the next T steps."""
        before = 0 if self._dones is None else len(self._dones)
        columns = dict(block.columns)
        columns.setdefault(c.VALID, np.ones(block.dones.shape, np.bool_))
        if self._dones is None:
            self._kept, self._dones = columns, block.dones
        else:
            self._kept = {name: np.concatenate([self._kept[name], column]) for name, column in columns.items()}
            self._dones = np.concatenate([self._dones, block.dones])
        if block.final_index is not None and block.final_obs is not None:
            self._finals = self._finals if self._finals is not None else {}
            for (t, n), obs in zip(block.final_index.tolist(), block.final_obs, strict=True):
                self._finals[before + t, n] = obs
        self.ready_rows = int(np.count_nonzero(self._kept[c.VALID] & self._complete()))

    def _complete(self) -> NDArray[np.bool_]:
        """Rows [L, N] at or before the last end of an episode in their environment and not yet taken."""
        assert self._dones is not None, "nothing was added yet"
        ends_later: NDArray[np.bool_] = np.logical_or.accumulate(self._dones[::-1], axis=0)[::-1]
        return ends_later

    def take(self) -> CompleteEpisodes:
        """All complete episodes, environment after environment; rows of unfinished ones stay."""
        assert self._dones is not None, "nothing was added yet"
        keep = self._kept[c.VALID] & self._complete()
        env_major = keep.T
        columns = {
            name: column.swapaxes(0, 1)[env_major][:, None] for name, column in self._kept.items() if name != c.VALID
        }
        final_rows = final_obs = None
        if self._finals is not None:
            position = np.cumsum(env_major.reshape(-1)).reshape(env_major.shape) - 1
            ends = np.argwhere(self._dones.T & env_major)
            final_rows = position[ends[:, 0], ends[:, 1]]
            final_obs = np.stack([self._finals[t, n] for n, t in ends.tolist()])
        self._forget_complete()
        return CompleteEpisodes(columns, final_rows, final_obs)

    def _forget_complete(self) -> None:
        """Drop leading rows that are taken everywhere; mark the other taken rows as no transitions."""
        assert self._dones is not None, "nothing was added yet"
        taken = self._complete()
        valid = self._kept[c.VALID] & ~taken
        needed: NDArray[np.bool_] = np.logical_or.reduce(valid, axis=1)
        first = int(needed.argmax()) if needed.any() else len(valid)
        self._kept = {name: column[first:].copy() for name, column in self._kept.items()}
        self._kept[c.VALID] = valid[first:]
        self._dones = (self._dones & ~taken)[first:]
        if self._finals is not None:
            self._finals = {}  # every row that ends an episode has just been taken
        self.ready_rows = 0
