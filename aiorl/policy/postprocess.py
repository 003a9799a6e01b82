"""Advantages and value targets from the columns of a fragment, computed on the worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.errors import BatchError

__all__ = ["POSTPROCESSORS", "gae", "no_postprocessing"]

F32 = NDArray[np.float32]

_BLOCK = 256  # environments done at once: so many that temporaries of usual lengths stay in the cache


def gae(
    rewards: F32,
    vf_preds: F32,
    bootstrap: F32,
    terminateds: NDArray[np.bool_],
    truncateds: NDArray[np.bool_],
    truncation_values: F32 | None = None,
    *,
    gamma: float,
    lam: float,
    valid: NDArray[np.bool_] | None = None,
) -> tuple[F32, F32]:
    """Generalised advantage estimates and the value targets that go with them.

    With V' the value of what followed the step (0 after a termination, the value of the true final
    observation after a truncation, else that of the next row):
    ``delta_t = r_t + gamma V'_t - V_t`` and ``A_t = delta_t + gamma lam A_{t+1}``, the second term only where
    the episode goes on. ``value_targets = A + V``. `lam` = 0 gives one-step targets, `lam` = 1 discounted
    returns. A row that is both terminated and truncated is terminated.

    Args:
        rewards: [T, N] float32.
        vf_preds: [T, N] float32, V_t.
        bootstrap: [N] float32, value of the observation after the last row; not read where that row ended
            an episode.
        terminateds: [T, N] bool.
        truncateds: [T, N] bool.
        truncation_values: [T, N] float32, value of the true final observation at truncated rows, anything
            elsewhere; None = no row is truncated, or none has a value.
        gamma: discount per step.
        lam: decay of the estimator.
        valid: [T, N] bool, False where a row is no transition: its advantage is 0 and its target V_t.
    Returns: advantages and value_targets, both float32 [T, N]. Computed in float64; the numbers of one
        environment don't depend on how many others stand beside it.
    Raises: BatchError if the shapes don't fit.
    Source: Schulman et al. 2016, https://arxiv.org/abs/1506.02438, eq. 16.
    """
    shape = rewards.shape
    for name, column in (("vf_preds", vf_preds), ("terminateds", terminateds), ("truncateds", truncateds)):
        if column.shape != shape:
            raise BatchError(name, f"shape {shape}, that of rewards", column.shape)
    if len(shape) != 2 or bootstrap.shape != shape[1:]:
        raise BatchError("bootstrap", f"shape {shape[1:]} beside [T, N] rewards", bootstrap.shape)

    if truncation_values is not None and truncation_values.shape != shape:
        raise BatchError("truncation_values", f"shape {shape}, that of rewards", truncation_values.shape)
    if valid is not None and valid.shape != shape:
        raise BatchError("valid", f"shape {shape}, that of rewards", valid.shape)

    advantages, targets = np.empty(shape, np.float32), np.empty(shape, np.float32)
    for first in range(0, shape[1], _BLOCK):
        envs = slice(first, first + _BLOCK)
        values = vf_preds[:, envs].astype(np.float64)
        following = _following_values(
            values,
            bootstrap[envs],
            terminateds[:, envs],
            truncateds[:, envs],
            None if truncation_values is None else truncation_values[:, envs],
        )
        following *= gamma
        following += rewards[:, envs]
        deltas = np.subtract(following, values, out=following)
        decay = np.where(terminateds[:, envs] | truncateds[:, envs], 0.0, gamma * lam)
        if valid is not None:
            no_transition = ~valid[:, envs]
            deltas[no_transition] = 0.0
            decay[no_transition] = 0.0
        sums = _discounted_sum(deltas, decay)
        advantages[:, envs] = sums
        values += sums
        targets[:, envs] = values
    return advantages, targets


def _following_values(
    values: NDArray[np.float64],
    bootstrap: F32,
    terminateds: NDArray[np.bool_],
    truncateds: NDArray[np.bool_],
    truncation_values: F32 | None,
) -> NDArray[np.float64]:
    """V' of each row: the value of what followed the step."""
    following = np.empty_like(values)
    following[:-1] = values[1:]
    following[-1:] = bootstrap
    if truncation_values is None:
        following[truncateds] = 0.0
    else:
        np.copyto(following, truncation_values, where=truncateds)
    following[terminateds] = 0.0
    return following


def _discounted_sum(deltas: NDArray[np.float64], decay: NDArray[np.float64]) -> NDArray[np.float64]:
    """A_t = deltas_t + decay_t A_{t+1} down the columns of [T, N]; may work in place."""
    steps, width = deltas.shape
    if width == 1:
        # Python's own floats: a loop over them is several times faster than one over arrays of length 1
        running = 0.0
        sums = []
        for delta, factor in zip(deltas[::-1, 0].tolist(), decay[::-1, 0].tolist(), strict=True):
            running = delta + factor * running
            sums.append(running)
        return np.array(sums[::-1]).reshape(steps, 1)
    rows, factors = list(deltas), list(decay)
    scratch = np.empty(width)
    for step in range(steps - 2, -1, -1):
        np.multiply(factors[step], rows[step + 1], out=scratch)
        np.add(rows[step], scratch, out=rows[step])
    return deltas


def no_postprocessing(*columns: Any, **settings: Any) -> None:
    """For algorithms whose targets are made by the learner, such as V-trace: adds no column."""


POSTPROCESSORS: dict[str, Callable[..., tuple[F32, F32] | None]] = {"gae": gae, "none": no_postprocessing}
"""Postprocessors by the name an algorithm asks for."""
