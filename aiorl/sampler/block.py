"""StepBlock: T steps of N environments as they are recorded, before anything is derived from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from aiorl.data import columns as c

__all__ = ["BlockSpec", "FinalRows", "StepBlock"]

Array = NDArray[Any]
F32 = NDArray[np.float32]


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
        finals: true final observations, in the order of steps.
        state_in: recurrent state at the first step.
        filled: steps recorded so far.
    """

    __slots__ = (
        "actions",
        "dist_inputs",
        "filled",
        "finals",
        "logp",
        "noise",
        "obs",
        "rewards",
        "spec",
        "state_in",
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
        steps, num_envs = spec.steps, spec.num_envs
        shape = (steps, num_envs)
        self.spec = spec
        self.noise = noise
        self.obs: Array = np.empty((steps + 1, num_envs, *spec.obs_shape), spec.obs_dtype)
        self.actions: Array = np.empty((*shape, *spec.action_shape), spec.action_dtype)
        self.logp: F32 = np.empty(shape, np.float32)
        kept = steps if spec.keep_dist_inputs else 1
        self.dist_inputs: F32 = np.empty((kept, num_envs, spec.num_dist_inputs), np.float32)
        self.values: F32 = np.empty((steps if spec.keep_values else 1, num_envs), np.float32)
        self.rewards: F32 = np.empty(shape, np.float32)
        self.terminateds: NDArray[np.bool_] = np.empty(shape, np.bool_)
        self.truncateds: NDArray[np.bool_] = np.empty(shape, np.bool_)
        self.valid: NDArray[np.bool_] | None = None
        self.finals: list[FinalRows] = []
        self.state_in = [component.copy() for component in state_in]
        self.filled = 0

    def policy_rows(self) -> list[dict[str, Array]]:
        """For each step, where the policy writes what it gives."""
        steps = self.spec.steps
        dist_inputs = list(self.dist_inputs) if self.spec.keep_dist_inputs else [self.dist_inputs[0]] * steps
        values = list(self.values) if self.spec.keep_values else [self.values[0]] * steps
        return [
            {c.ACTIONS: actions, c.ACTION_LOGP: logp, c.ACTION_DIST_INPUTS: inputs, c.VF_PREDS: value}
            for actions, logp, inputs, value in zip(self.actions, self.logp, dist_inputs, values, strict=True)
        ]

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
