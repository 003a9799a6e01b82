"""StepBlock: T steps of N environments as they are recorded, before anything is derived from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from aiorl.acting.graph_policy import ActRows
from aiorl.data import columns as c
from aiorl.data.arena import allocate_together

__all__ = ["BlockSpec", "FinalRows", "StepBlock"]

Array = NDArray[Any]
F32 = NDArray[np.float32]

_DERIVED = (c.ADVANTAGES, c.VALUE_TARGETS, c.BOOTSTRAP_VALUES)


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """Shapes and dtypes of what is recorded.

    Attributes:
        steps: T.
        num_envs: N.
        obs_shape: shape of one filtered observation.
        obs_dtype: its dtype.
        action_shape: shape of one action.
        action_dtype: its dtype.
        num_dist_inputs: P.
        keep_dist_inputs: False records only the latest row of them.
        keep_values: False records only the latest row of values.
        sent: names of the columns that leave with the fragment. Those of them made here lie together in memory.
        state_every: recurrent states are recorded at every so many steps; 0 = at the first alone.
    """

    steps: int
    num_envs: int
    obs_shape: tuple[int, ...]
    obs_dtype: DTypeLike
    action_shape: tuple[int, ...]
    action_dtype: DTypeLike
    num_dist_inputs: int
    keep_dist_inputs: bool
    keep_values: bool
    sent: frozenset[str] = frozenset()
    state_every: int = 0

    def arrays(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and dtype of each array of a block by column name, in the order in which they lie in memory.

        What is sent comes first: integers before floats, because integers leave compressed and would part the floats
        otherwise, and observations last, because the one that follows the last step may leave too.
        """
        each_step = (self.steps, self.num_envs)
        float32, flag = np.dtype(np.float32), np.dtype(np.bool_)
        arrays: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
            c.ACTIONS: ((*each_step, *self.action_shape), np.dtype(self.action_dtype)),
            c.TERMINATEDS: (each_step, flag),
            c.TRUNCATEDS: (each_step, flag),
            c.ACTION_DIST_INPUTS: (
                (self.steps if self.keep_dist_inputs else 1, self.num_envs, self.num_dist_inputs),
                float32,
            ),
            c.ACTION_LOGP: (each_step, float32),
            c.VF_PREDS: ((self.steps if self.keep_values else 1, self.num_envs), float32),
            c.REWARDS: (each_step, float32),
            **{name: (each_step, float32) for name in _DERIVED if name in self.sent},
            c.OBS: ((self.steps + 1, self.num_envs, *self.obs_shape), np.dtype(self.obs_dtype)),
        }
        order = sorted(arrays, key=lambda name: (name not in self.sent, name == c.OBS, arrays[name][1].kind == "f"))
        return {name: arrays[name] for name in order}


@dataclass(frozen=True, slots=True)
class FinalRows:
    """True final observations of environments that were reset inside step t.

    Attributes:
        t: row of the block.
        index: int64 [K] environments.
        obs: [K, ...] filtered.
        state: recurrent state [K, ...] to evaluate them with, per component.
    """

    t: int
    index: NDArray[np.int64]
    obs: Array
    state: list[F32]


class StepBlock:
    """Preallocated arrays that the sampler's loop writes into.

    Attributes:
        obs: [T + 1, N, ...], the last one follows the last step.
        actions: [T, N, ...] unclipped.
        logp: [T, N] float32.
        dist_inputs: [T, N, P] float32, or [1, N, P] when not kept.
        values: [T, N] float32, or [1, N] when not kept.
        rewards: [T, N] float32.
        terminateds: [T, N] bool.
        truncateds: [T, N] bool.
        valid: [T, N] bool, None as long as every row is a transition.
        derived: [T, N] float32 columns that are sent and not recorded, to be filled in by whoever can.
        finals: true final observations, in the order of steps.
        states: recurrent states at the first step, and at every `state_every` steps behind it.
        filled: steps recorded so far.
    """

    __slots__ = (
        "actions",
        "derived",
        "dist_inputs",
        "filled",
        "finals",
        "logp",
        "noise",
        "obs",
        "rewards",
        "spec",
        "states",
        "terminateds",
        "truncateds",
        "valid",
        "values",
    )

    def __init__(self, spec: BlockSpec, noise: F32, state_in: Sequence[F32]) -> None:
        """Take memory for one block.

        Args:
            spec: shapes and dtypes.
            noise: [T, N, K] randomness of the actions to come.
            state_in: recurrent state at the first step.
        """
        layout = spec.arrays()
        arrays = dict(zip(layout, allocate_together(list(layout.values())), strict=True))
        self.spec = spec
        self.noise = noise
        self.obs: Array = arrays[c.OBS]
        self.actions: Array = arrays[c.ACTIONS]
        self.logp: F32 = arrays[c.ACTION_LOGP]
        self.dist_inputs: F32 = arrays[c.ACTION_DIST_INPUTS]
        self.values: F32 = arrays[c.VF_PREDS]
        self.rewards: F32 = arrays[c.REWARDS]
        self.terminateds: NDArray[np.bool_] = arrays[c.TERMINATEDS]
        self.truncateds: NDArray[np.bool_] = arrays[c.TRUNCATEDS]
        self.derived: dict[str, F32] = {name: arrays[name] for name in _DERIVED if name in arrays}
        self.valid: NDArray[np.bool_] | None = None
        self.finals: list[FinalRows] = []
        self.states: list[list[F32]] = []
        self.filled = 0
        self.note_state(0, state_in)

    def note_state(self, t: int, state: Sequence[F32]) -> None:
        """Record the recurrent state that goes into step t, if it is wanted and not there yet."""
        if t == len(self.states) * self.spec.state_every:
            self.states.append([component.copy() for component in state])

    def state_columns(self) -> dict[str, F32]:
        """Recurrent states by column name, of each environment the first one [N, ...], or all [N, C, ...]."""
        if not self.spec.state_every:
            return {c.state_in(number): component for number, component in enumerate(self.states[0])}
        by_component = zip(*self.states, strict=True)
        return {c.state_in(number): np.stack(parts, axis=1) for number, parts in enumerate(by_component)}

    def policy_rows(self, *, with_logp: bool) -> Iterator[ActRows]:
        """For each step from the first one that is not recorded, where the policy writes what it gives.

        Args:
            with_logp: False leaves log-probabilities to be filled in later.
        """
        left = slice(self.filled, None)
        return map(
            ActRows,
            self.actions[left],
            self.dist_inputs[left] if self.spec.keep_dist_inputs else repeat(self.dist_inputs[0]),
            self.values[left] if self.spec.keep_values else repeat(self.values[0]),
            self.logp[left] if with_logp else repeat(None),
        )

    def mark_valid(self, t: int, valid: NDArray[np.bool_]) -> None:
        """Note which environments' row t is a transition."""
        if self.valid is None:
            self.valid = np.ones(self.rewards.shape, np.bool_)
        self.valid[t] = valid

    def followers(self) -> tuple[NDArray[np.int64], Array]:
        """Final observations of all rows that end an episode: int64 [K, 2] (t, n), and [K, ...].

        Ordered by t, then n, whichever way the environments are reset.
        """
        index = np.argwhere(self.terminateds | self.truncateds)
        obs = self.obs[index[:, 0] + 1, index[:, 1]]
        place = {(int(t), int(n)): row for row, (t, n) in enumerate(index)}
        for final in self.finals:
            for row, n in enumerate(final.index.tolist()):
                obs[place[final.t, n]] = final.obs[row]
        return index, obs
