"""Episodes of environments in lockstep: their statistics, and whole episodes from rows that are cut
anywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.data.metrics import EpisodeColumns
from aiorl.process.log_once import warn_of_long_episode

Array = NDArray[Any]
Flags = NDArray[np.bool_]

_MANY_ROWS = 5000

FRAGMENT_COLUMNS = frozenset(
    {
        c.OBS,
        c.NEW_OBS,
        c.LAST_OBS,
        c.ACTIONS,
        c.REWARDS,
        c.TERMINATEDS,
        c.TRUNCATEDS,
        c.ACTION_LOGP,
        c.ACTION_DIST_INPUTS,
        c.VF_PREDS,
        c.ADVANTAGES,
        c.VALUE_TARGETS,
        c.BOOTSTRAP_VALUES,
        c.N_STEP_RETURNS,
        c.DISCOUNTS,
        c.N_STEPS,
        c.PRIORITIES,
    }
)
"""Names of the columns available in lockstep."""


class EpisodeTracker:
    """Lengths and returns of the episodes of N environments, from table to table.

    Nothing is computed per step: the rows of each environment are cut into segments at the ends of
    episodes, and all computation is per segment.

    A row with ``valid == False`` (the reset call of a NEXT_STEP environment) does not count as a
    step.
    """

    def __init__(self, num_envs: int) -> None:
        """Begin with a new episode in each environment."""
        self._returns = np.zeros(num_envs, np.float64)
        self._lengths = np.zeros(num_envs, np.int64)
        self._finished = [EpisodeColumns.empty()]

    def advance(
        self,
        rewards: NDArray[Any],
        dones: NDArray[np.bool_],
        valid: NDArray[np.bool_] | None = None,
    ) -> None:
        """Add the next T steps.

        Args:
            rewards: [T, N] raw rewards.
            dones: [T, N] True if the row ended its episode.
            valid: [T, N] True if the row is a transition; None = all are.
        """
        steps, num_envs = rewards.shape
        opens = np.ones((num_envs, steps), np.bool_)
        opens[:, 1:] = dones[:-1].T
        start = np.flatnonzero(opens)  # positions n * T + t
        env, row = np.divmod(start, steps)
        length = np.diff(start, append=steps * num_envs)
        is_first = row == 0
        totals = np.add.reduceat(rewards.T.astype(np.float64, order="C").reshape(-1), start)
        totals += np.where(is_first, self._returns[env], 0.0)
        lengths = length + np.where(is_first, self._lengths[env], 0)
        if valid is not None:
            lengths -= ~valid[row, env]  # a row that is not a transition opens an episode
        is_last = np.append(is_first[1:], True)
        closed = ~is_last
        closed[is_last] = dones[-1]
        if closed.any():
            # segments lie environment by environment
            order = np.argsort((row + length)[closed], kind="stable")
            self._finished.append(
                EpisodeColumns(lengths[closed][order].astype(np.int32), totals[closed][order])
            )
        goes_on = ~dones[-1]
        self._returns = totals[is_last] * goes_on
        self._lengths = lengths[is_last] * goes_on

    def take_finished(self) -> EpisodeColumns:
        """Return the episodes that ended since the last call, in the order in which they ended."""
        finished = self._finished
        self._finished = [EpisodeColumns.empty()]
        return EpisodeColumns(
            np.concatenate([part.lengths for part in finished]),
            np.concatenate([part.rewards for part in finished]),
        )


class EpisodeCollector:
    """Rows of environments in lockstep, kept until their episodes are complete.

    Attributes:
        ready_rows: number of transitions of complete episodes that wait.
    """

    def __init__(self, num_envs: int) -> None:
        """Begin empty."""
        self.ready_rows = 0
        self._parts: list[dict[str, Array]] = []
        self._finals: list[Array] = []
        self._unfinished = np.zeros(num_envs, np.int64)

    def add(self, columns: dict[str, Array], finals: Array | None) -> None:
        """Add the next T steps; warn once if many rows of one environment have no end.

        Args:
            columns: name -> [T, N, ...].
            finals: [K, ...] true final observations of all rows that end an episode, in the order
                of steps; None if they are not needed.
        """
        if finals is not None:
            self._finals.append(finals)
        dones = columns[c.DONES] = columns[c.TERMINATEDS] | columns[c.TRUNCATEDS]
        valid = columns.setdefault(c.VALID, np.ones(dones.shape, np.bool_))
        self._parts.append(columns)
        complete = _complete(dones)
        # True if an episode ends within these steps
        ends = complete[0]
        before = self._unfinished
        self.ready_rows += int(before[ends].sum()) + int(np.count_nonzero(valid & complete))
        self._unfinished = np.where(ends, 0, before) + np.count_nonzero(valid & ~complete, axis=0)
        index = int(self._unfinished.argmax())
        if self._unfinished[index] > _MANY_ROWS:
            warn_of_long_episode(_MANY_ROWS, index, int(self._unfinished[index]))

    def take(self) -> tuple[dict[str, Array], Array | None]:
        """Return the rows [B, 1, ...] of all complete episodes, environment by environment, and
        their finals.
        """
        columns = {
            name: np.concatenate([part[name] for part in self._parts]) for name in self._parts[0]
        }
        complete = _complete(columns[c.DONES])
        is_ready = (columns[c.VALID] & complete).T
        rows = {
            name: column.swapaxes(0, 1)[is_ready][:, None]
            for name, column in columns.items()
            if name != c.VALID
        }
        finals = None
        if self._finals:
            ends = np.argwhere(columns[c.DONES])
            # they were added step by step, and rows go environment by environment
            finals = np.concatenate(self._finals)[np.lexsort((ends[:, 0], ends[:, 1]))]
            self._finals = []
        columns[c.VALID] &= ~complete  # rows already taken no longer count as transitions
        columns[c.DONES] &= ~complete
        needed: Flags = np.logical_or.reduce(columns[c.VALID], axis=1)
        first = int(needed.argmax()) if needed.any() else len(needed)
        self._parts = [{name: column[first:].copy() for name, column in columns.items()}]
        self.ready_rows = 0
        return rows, finals


def _complete(dones: Flags) -> Flags:
    """Mark rows [L, N] up to the last end of an episode in their environment."""
    complete: Flags = np.logical_or.accumulate(dones[::-1], axis=0)[::-1]
    return complete
