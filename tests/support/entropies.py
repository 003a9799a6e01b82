"""Entropies and divergences of action distributions in NumPy and float64, as a reference for the
losses.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.acting.distributions import (
    LOG_STD_MAX,
    LOG_STD_MIN,
    MASKED_LOGIT,
    ActionDistribution,
    Composite,
    DiagGaussian,
    Greedy,
    ScaledGaussian,
    SquashedGaussian,
)

F64 = NDArray[np.float64]


def entropy(kind: ActionDistribution, inputs: Any) -> F64:
    """Return the entropies [N] in nats of inputs [N, P]."""
    rows = np.asarray(inputs, np.float64)
    if isinstance(kind, Composite):
        return np.sum(
            [entropy(part.distribution, rows[:, part.inputs]) for part in kind.parts], axis=0
        )
    if isinstance(kind, DiagGaussian):
        mean, log_std = _gaussian(kind, rows)
        total = (log_std + 0.5 * np.log(2.0 * np.pi * np.e)).sum(axis=1)
        if isinstance(kind, SquashedGaussian):  # and the mean of log |da/du|, over a fine grid
            z = np.linspace(-10.0, 10.0, 20_001)
            density = np.exp(-0.5 * z * z) / np.sqrt(2.0 * np.pi) * (z[1] - z[0])
            u = np.abs(mean[..., None] + np.exp(log_std)[..., None] * z)
            slope = 2.0 * (np.log(2.0) - u - np.log1p(np.exp(-2.0 * u)))
            total += (slope @ density + np.log(0.5 * kind.span.astype(np.float64))).sum(axis=1)
        if isinstance(kind, ScaledGaussian):
            total += np.log(kind.scale.half_range.astype(np.float64)).sum()
        return total
    return -np.sum([(p * _log(p)).sum(axis=1) for p in _choices(kind, rows)], axis=0)


def kl(kind: ActionDistribution, inputs: Any, other: Any) -> F64:
    """Return the Kullback-Leibler divergences KL(inputs || other) [N] in nats."""
    rows, others = np.asarray(inputs, np.float64), np.asarray(other, np.float64)
    if isinstance(kind, Composite):
        return np.sum(
            [
                kl(own.distribution, rows[:, own.inputs], others[:, own.inputs])
                for own in kind.parts
            ],
            axis=0,
        )
    if isinstance(kind, DiagGaussian):
        (mean, log_std), (mean2, log_std2) = _gaussian(kind, rows), _gaussian(kind, others)
        spread = (np.exp(2.0 * log_std) + np.square(mean - mean2)) / (2.0 * np.exp(2.0 * log_std2))
        return (log_std2 - log_std + spread - 0.5).sum(axis=1)
    pairs = zip(_choices(kind, rows), _choices(kind, others), strict=True)
    return np.sum([(p * (_log(p) - _log(q))).sum(axis=1) for p, q in pairs], axis=0)


def _gaussian(kind: DiagGaussian, rows: F64) -> tuple[F64, F64]:
    return rows[:, : kind.size], np.clip(
        rows[:, kind.size : 2 * kind.size], LOG_STD_MIN, LOG_STD_MAX
    )


def _choices(kind: ActionDistribution, rows: F64) -> list[F64]:
    """Return the probabilities of the alternatives of each choice, [N, alternatives] each."""
    space = kind.action_space
    if isinstance(kind, Greedy):
        return [np.eye(kind.num_inputs)[rows.argmax(axis=1)]]
    if isinstance(space, spaces.MultiBinary):
        ones = 1.0 / (1.0 + np.exp(-np.maximum(rows, -700.0)))
        ones[rows <= 0.5 * MASKED_LOGIT] = 0.0
        return [np.stack([1.0 - one, one], axis=1) for one in ones.T]
    sizes = space.nvec.ravel() if isinstance(space, spaces.MultiDiscrete) else [kind.num_inputs]
    parts = np.split(rows, np.cumsum(sizes)[:-1], axis=1)
    weights = [np.exp(part - part.max(axis=1, keepdims=True)) for part in parts]
    return [weight / weight.sum(axis=1, keepdims=True) for weight in weights]


def _log(p: F64) -> F64:
    return np.log(np.where(p > 0.0, p, 1.0))
