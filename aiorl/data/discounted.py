"""Discounted sums along time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["discounted_sums"]


def discounted_sums(deltas: NDArray[np.float64], decay: NDArray[np.float64]) -> NDArray[np.float64]:
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
