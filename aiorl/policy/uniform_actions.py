"""Actions that nobody has thought about: uniform over the action space."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.data.actions import ActionLayout
from aiorl.errors import UnsupportedSpaceError

__all__ = ["UniformActions"]

F32 = NDArray[np.float32]


class UniformActions:
    """Uniform over an action space; unbounded components are standard normal.

    Attributes:
        noise_size: K, numbers of noise an action takes.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        """Take the action space.

        Raises:
            UnsupportedSpaceError: a space, or one inside it, that has no uniform distribution here.
        """
        layout = ActionLayout(space)
        lows, ends, wholes = zip(*(_ranges(leaf) for leaf in layout.leaves), strict=True)
        self._low, self._end = np.concatenate(lows), np.concatenate(ends)
        self._is_whole = np.concatenate(wholes)
        self._is_bounded = np.isfinite(self._low) & np.isfinite(self._end)
        self.noise_size = len(self._low)
        self._span = np.where(self._is_bounded, self._end - self._low, 1.0)
        self._start = np.where(self._is_bounded, self._low, 0.0)
        self._logp = -float(np.log(self._span[self._is_bounded]).sum())

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> F32:
        """Noise for `leading` choices: float32 [*leading, K], in [0, 1) or, for unbounded components, normal."""
        noise = rng.random((*leading, self.noise_size), dtype=np.float32)
        if not self._is_bounded.all():
            free = ~self._is_bounded
            noise[..., free] = rng.standard_normal((*leading, int(free.sum())), dtype=np.float32)
        return noise

    def choose_into(self, noise: F32, actions: NDArray[Any], logp: F32) -> None:
        """Write what noise [N, K] gives.

        Args:
            noise: of `draw_noise`.
            actions: [N, *action_shape] in column form, to be written.
            logp: [N], to be written.
        """
        values = self._start + self._span * noise
        whole = self._is_whole
        if whole.any():
            values[:, whole] = np.minimum(np.floor(values[:, whole]), self._end[whole] - 1)
        actions[...] = values.reshape(actions.shape)
        logp[...] = self._logp
        if not self._is_bounded.all():
            free = noise[:, ~self._is_bounded]
            logp += (-0.5 * free * free - 0.5 * math.log(2.0 * math.pi)).sum(axis=1)


def _ranges(leaf: spaces.Space[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Lower bound, upper end (exclusive for whole numbers) and whether whole, of each number of an action."""
    match leaf:
        case spaces.Discrete():
            low, end = np.array([leaf.start]), np.array([leaf.start + leaf.n])
        case spaces.MultiDiscrete():
            low, end = leaf.start.ravel(), (leaf.start + leaf.nvec).ravel()
        case spaces.MultiBinary():
            low, end = np.zeros(math.prod(leaf.shape)), np.full(math.prod(leaf.shape), 2)
        case spaces.Box():
            is_whole = leaf.dtype.kind != "f"
            low, end = leaf.low.ravel(), leaf.high.ravel().astype(np.float64) + is_whole
        case _:
            raise UnsupportedSpaceError("uniform exploration over", leaf, ["Discrete", "MultiDiscrete", "Box"])
    whole = np.full(len(low), not (isinstance(leaf, spaces.Box) and leaf.dtype.kind == "f"))
    return low.astype(np.float64), end.astype(np.float64), whole
