"""Fragments of environments that show stacks of frames, in the form that workers send, and the
correct rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.acting.postprocess import n_step
from aiorl.data import columns as c
from aiorl.learning.replay.replay import Replay

Array = NDArray[Any]


def insert(replay: Replay, rows: Mapping[str, Any]) -> int:
    """Check rows [B, ...] and store them as steps of one environment; return the number of rows."""
    arrays = {name: np.asarray(column) for name, column in rows.items()}
    steps = {name: array[:, None] if array.ndim else array for name, array in arrays.items()}
    replay.check_fragment(steps)
    return replay.insert_fragment(steps)


@dataclass
class StackWorld:
    """N environments with stacks of random frames as observations; each row's `actions` is its own
    number.

    Attributes:
        rows: number -> (observation, observation after its steps), of all transitions.
        resets_in_next_step: the end of an episode is followed by a row that is not a transition.
        gives_new_obs: fragments have a column `new_obs`.
        is_still: frames often do not change.
        steps: maximum number of steps per row.
    """

    num_envs: int
    shape: tuple[int, ...]
    seed: int
    ends: float = 0.2
    resets_in_next_step: bool = False
    gives_new_obs: bool = False
    is_still: bool = False
    steps: int = 1
    dtype: str = "uint8"
    rows: dict[int, tuple[Array, Array]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self._obs = np.stack([self._first() for _ in range(self.num_envs)])
        self._is_over = np.zeros(self.num_envs, np.bool_)

    def fragment(self, length: int) -> dict[str, Array]:
        """Return the next T steps of all environments."""
        lead = (length, self.num_envs)
        obs = np.empty((*lead, *self.shape), self.dtype)
        following = np.empty_like(obs)
        terminateds, truncateds, valid = (
            np.zeros(lead, bool),
            np.zeros(lead, bool),
            np.ones(lead, bool),
        )
        finals: list[tuple[int, int]] = []
        for t in range(length):
            obs[t] = self._obs
            for env in range(self.num_envs):
                if self._is_over[env]:
                    valid[t, env], self._is_over[env] = False, False
                    self._obs[env] = following[t, env] = self._first()
                    continue
                following[t, env] = self._obs[env] = self._next(self._obs[env])
                if self._rng.random() < self.ends:
                    (terminateds if self._rng.random() < 0.5 else truncateds)[t, env] = True
                    if self.resets_in_next_step:
                        self._is_over[env] = True
                    else:
                        finals.append((t, env))
                        self._obs[env] = self._first()
        made = n_step(
            np.ones(lead, np.float32), terminateds, truncateds, gamma=0.9, n=self.steps, valid=valid
        )
        first = len(self.rows)
        actions = np.full(lead, -1)
        actions[valid] = np.arange(first, first + np.count_nonzero(valid))
        for t, env in np.argwhere(valid):
            behind = following[t + made.steps[t, env] - 1, env]
            self.rows[int(actions[t, env])] = obs[t, env].copy(), behind.copy()
        arrays = {c.OBS: obs, c.ACTIONS: actions, c.N_STEPS: made.steps}
        if not valid.all():
            arrays[c.VALID] = valid
        if self.gives_new_obs:
            return arrays | {c.NEW_OBS: following}
        arrays[c.LAST_OBS] = self._obs.copy()
        if finals:
            index = np.array(finals, np.int32)
            arrays |= {c.FINAL_INDEX: index, c.FINAL_OBS: following[tuple(index.T)]}
        return arrays

    def _first(self) -> Array:
        """Return an observation at an episode's start: the first frame repeated, or after empty
        ones.
        """
        stack = np.zeros(self.shape, self.dtype)
        if self._rng.random() < 0.5:
            stack[...] = self._frame()[..., None]
        else:
            stack[..., -1] = self._frame()
        return stack

    def _next(self, stack: Array) -> Array:
        frame = stack[..., -1] if self.is_still and self._rng.random() < 0.7 else self._frame()
        return np.concatenate([stack[..., 1:], frame[..., None]], axis=-1)

    def _frame(self) -> Array:
        return self._rng.integers(0, 256, self.shape[:-1]).astype(self.dtype)
