"""Uniformly random actions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.acting.distributions import MASKED_LOGIT
from aiorl.data.actions import ActionLayout
from aiorl.data.spaces import SIMPLE_KINDS
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
        self._choices = list(_choices(layout.leaves))

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> F32:
        """Noise for `leading` choices: float32 [*leading, K], in [0, 1) or, for unbounded components, normal."""
        noise = rng.random((*leading, self.noise_size), dtype=np.float32)
        if not self._is_bounded.all():
            free = ~self._is_bounded
            noise[..., free] = rng.standard_normal((*leading, int(free.sum())), dtype=np.float32)
        return noise

    def choose_into(self, noise: F32, actions: NDArray[Any], logp: F32, inputs: F32 | None = None) -> None:
        """Write the actions that noise [N, K] selects, and their log-probabilities.

        Args:
            noise: of `draw_noise`.
            actions: [N, *action_shape] in column form, to be written.
            logp: [N], to be written.
            inputs: [N, P] inputs of the policy's distribution; actions that they forbid are not chosen. None = all are
                allowed.
        """
        values = self._start + self._span * noise
        whole = self._is_whole
        if whole.any():
            values[:, whole] = np.minimum(np.floor(values[:, whole]), self._end[whole] - 1)
        logp[...] = self._logp
        if inputs is not None:
            allowed = inputs > 0.5 * MASKED_LOGIT
            if not allowed.all():
                self._choose_allowed(allowed, noise, values, logp)
        actions[...] = values.reshape(actions.shape)
        if not self._is_bounded.all():
            free = noise[:, ~self._is_bounded]
            logp += (-0.5 * free * free - 0.5 * math.log(2.0 * math.pi)).sum(axis=1)

    def _choose_allowed(self, allowed: NDArray[np.bool_], noise: F32, values: NDArray[Any], logp: F32) -> None:
        """Write choices among those allowed in place of the others."""
        for position, part, is_bit in self._choices:
            own = allowed[:, part]
            if is_bit:  # it may always be 0
                own = np.concatenate([np.ones_like(own), own], axis=1)
            counts = np.maximum(np.count_nonzero(own, axis=1), 1)
            # the number-th of the allowed ones, counted from 0
            number = np.minimum((noise[:, position] * counts).astype(np.int64), counts - 1)
            index = (np.add.accumulate(own, axis=1) > number[:, None]).argmax(axis=1)
            values[:, position] = self._low[position] + index
            logp += np.log(own.shape[1] / counts).astype(np.float32)


def _choices(leaves: Sequence[spaces.Space[Any]]) -> Iterator[tuple[int, slice, bool]]:
    """For each choice its place among the numbers of an action, its inputs of the distribution, and whether a bit."""
    position = first = 0
    for leaf in leaves:
        is_bit = isinstance(leaf, spaces.MultiBinary)
        match leaf:
            case spaces.Discrete():
                sizes = [int(leaf.n)]
            case spaces.MultiDiscrete():
                sizes = [int(size) for size in leaf.nvec.ravel()]
            case spaces.MultiBinary():
                sizes = [1] * math.prod(leaf.shape)
            case _:
                numbers = math.prod(leaf.shape or ())
                position, first = position + numbers, first + 2 * numbers  # means and deviations
                continue
        for size in sizes:
            yield position, slice(first, first + size), is_bit
            position, first = position + 1, first + size


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
            raise UnsupportedSpaceError("uniform exploration over", leaf, SIMPLE_KINDS)
    whole = np.full(len(low), not (isinstance(leaf, spaces.Box) and leaf.dtype.kind == "f"))
    return low.astype(np.float64), end.astype(np.float64), whole
