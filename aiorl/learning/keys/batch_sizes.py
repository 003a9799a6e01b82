"""Sizes of fragments and train batches that fit each other.

A train batch consists of whole fragments, each with `rollout_fragment_length` steps of
`num_envs_per_worker` environments. If the sizes that a user sets don't fit the defaults, the
defaults change as little as possible.
"""

from __future__ import annotations

import math
from collections.abc import Set
from typing import NamedTuple

from aiorl.config.shared_keys import BATCH, ENVS, LENGTH


class Sizes(NamedTuple):
    """Sizes that must fit each other.

    Attributes:
        length: steps of one environment in a fragment.
        envs: environments of a worker.
        batch: env steps in a train batch.
    """

    length: int
    envs: int
    batch: int

    def gives_each(self, workers: int) -> bool:
        """Return True if whole fragments make up a batch and each worker contributes at least
        one.
        """
        fragments, rest = divmod(self.batch, self.length * self.envs)
        return not rest and fragments >= workers

    def fitted(self, fixed: Set[str], workers: int, *, least: int) -> Sizes:
        """Return sizes with which whole fragments make up a batch and each worker contributes at
        least one.

        Args:
            fixed: keys that must not change.
            workers: number of workers that should contribute a fragment to each batch.
            least: minimum number of env steps in a batch.

        Returns:
            Sizes that fit; unchanged if they fit already or if no allowed change makes them fit.
        """
        if self.gives_each(workers):
            return self
        if BATCH in fixed:
            return self._of_batch(fixed, workers)
        return self._of_fragments(fixed, workers, least)

    def _of_fragments(self, fixed: Set[str], workers: int, least: int) -> Sizes:
        """Return sizes whose batch follows from the fragments, shortened first so that each worker
        contributes one.
        """
        length = self.length
        envs = self.envs
        share = max(1, self.batch // workers)
        if ENVS not in fixed:
            envs = min(envs, max(1, share // length))
        if LENGTH not in fixed:
            length = min(length, max(1, share // envs))
        unit = length * envs * workers
        if unit > 2 * self.batch:  # let some workers wait rather than make a batch far too large
            unit = length * envs
        nearest = (2 * self.batch + unit) // (2 * unit)
        enough = -(-least // unit)
        return Sizes(length, envs, batch=unit * max(1, nearest, enough))

    def _of_batch(self, fixed: Set[str], workers: int) -> Sizes:
        """Return sizes whose fragments divide the batch."""
        lengths = divisors(self.batch)
        counts = [count for count in lengths if count <= self.envs]
        if LENGTH in fixed:
            lengths = [self.length]
        if ENVS in fixed:
            counts = [self.envs]
        fitting = [
            Sizes(length, envs, self.batch)
            for length in lengths
            for envs in counts
            if self.batch % (length * envs) == 0
        ]
        even = [
            sizes for sizes in fitting if self.batch // (sizes.length * sizes.envs) % workers == 0
        ]
        return min(even or fitting, key=self._distance, default=self)

    def _distance(self, other: Sizes) -> tuple[float, int]:
        """Return how far other sizes are from these, as ratios; of equals, the longest is least."""
        apart = math.log(other.length / self.length) ** 2 + math.log(other.envs / self.envs) ** 2
        return round(apart, 9), -other.length


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, the smallest first."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def nearest_divisor(number: int, size: int) -> int:
    """Return the divisor of a number whose ratio to a size is nearest to 1."""
    return min(divisors(number), key=lambda divisor: abs(math.log(divisor / size)))
