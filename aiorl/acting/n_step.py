"""N-step returns from the columns of a fragment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiorl.data import columns as c
from aiorl.data.fragment import new_obs
from aiorl.errors import BatchError

__all__ = ["NStep", "check_n_steps", "n_step", "n_step_new_obs"]

Array = NDArray[Any]
F32 = NDArray[np.float32]
Bools = NDArray[np.bool_]


class NStep(NamedTuple):
    """What value-based algorithms learn from: ``returns + discounts V(observation behind those steps)``."""

    returns: F32
    discounts: F32
    steps: NDArray[np.int32]


def n_step(
    rewards: F32, terminateds: Bools, truncateds: Bools, *, gamma: float, n: int, valid: Bools | None = None
) -> NStep:
    """Rewards of up to n steps, and what they bootstrap with.

    Row t takes k steps: n, or fewer where its episode, the fragment or a run of transitions ends before.
    ``returns_t = sum of gamma^i r_{t+i}`` over i < k, ``discounts_t = gamma^k``, or 0 where the last of these steps
    terminated. A truncation bootstraps from the true final observation; a row that is both is terminated.

    Args:
        rewards: [T, N] float32.
        terminateds: [T, N] bool.
        truncateds: [T, N] bool.
        gamma: discount per step.
        n: most steps, at least 1.
        valid: [T, N] bool, False where a row is no transition: it has return and discount 0, and takes one step.
    Returns: returns and discounts [T, N] float32, computed in float64, and k, [T, N] int32.
    Raises: BatchError if the shapes differ.
    Source: Sutton 1988, Learning to predict by the methods of temporal differences; Mnih et al. 2016,
        https://arxiv.org/abs/1602.01783.
    """
    shape = rewards.shape
    for name, column in ((c.TERMINATEDS, terminateds), (c.TRUNCATEDS, truncateds), (c.VALID, valid)):
        if column is not None and column.shape != shape:
            raise BatchError(name, f"shape {shape}, that of rewards", column.shape)
    goes_on = ~(terminateds | truncateds)
    if valid is not None:
        goes_on &= valid
        goes_on[:-1] &= valid[1:]
    returns = rewards.astype(np.float64)
    steps = np.ones(shape, np.int32)
    is_taking = goes_on.copy()  # whether the row takes a step more, the one that `ahead` rows on begins
    for ahead in range(1, min(n, len(rewards))):
        is_taking = is_taking[:-1]
        if not is_taking.any():
            break
        rows = slice(0, len(rewards) - ahead)
        returns[rows] += np.where(is_taking, gamma**ahead * rewards[ahead:].astype(np.float64), 0.0)
        steps[rows] += is_taking
        is_taking = is_taking & goes_on[ahead:]
    last = np.arange(len(rewards))[:, None] + steps - 1
    discounts = np.where(np.take_along_axis(terminateds, last, axis=0), 0.0, float(gamma) ** steps)
    if valid is not None:
        returns[~valid] = 0.0
        discounts[~valid] = 0.0
    return NStep(returns.astype(np.float32), discounts.astype(np.float32), steps)


def check_n_steps(steps: Array, shape: tuple[int, ...]) -> None:
    """Raise BatchError unless each row [T, N] takes 1 to T - t steps, so that it ends within the fragment."""
    if steps.shape != shape or steps.dtype.kind not in "iu":
        raise BatchError(c.N_STEPS, f"integers {shape}", f"{steps.dtype} {steps.shape}")
    most = np.arange(shape[0], 0, -1)[:, None]
    if ((steps < 1) | (steps > most)).any():
        raise BatchError(c.N_STEPS, "steps that end within the fragment", f"{steps.min()} to {steps.max()} of {shape}")


def n_step_new_obs(arrays: Mapping[str, Array]) -> Array:
    """Observation behind the steps of each row of a fragment, [T, N, ...], however it is kept.

    Raises:
        BatchError: it is not there, or what there is does not fit together.
    """
    following = new_obs(arrays)
    steps = arrays.get(c.N_STEPS)
    if steps is None:
        return following
    check_n_steps(steps, following.shape[:2])
    return following[last_rows(steps), np.arange(following.shape[1])]


def last_rows(steps: Array) -> NDArray[np.int64]:
    """The row [T, N] in which the steps of each row end."""
    rows: NDArray[np.int64] = np.arange(len(steps))[:, None] + steps.astype(np.int64) - 1
    return rows
