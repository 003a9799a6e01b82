"""Sizes of fragments, batches and minibatches that follow from those which a user sets, and what all checks share.

A train batch is made of whole fragments, each of `rollout_fragment_length` steps of `num_envs_per_worker` environments.
Where the sizes that a user sets do not fit the defaults, the defaults change, as little as possible.
"""

from __future__ import annotations

import math
from collections.abc import Set
from operator import attrgetter
from typing import NamedTuple

from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError

LENGTH, ENVS, BATCH = "rollout_fragment_length", "num_envs_per_worker", "train_batch_size"


MINIBATCH = "sgd_minibatch_size"


BROADCAST_INTERVAL = (
    "Weights go to workers after the first update so long after the last ones did, if that comes first. "
    "Within one process only broadcast_updates counts, so that runs can be repeated."
)


def refuse_if(config: CommonConfig, is_wrong: bool, name: str, message: str, hint: str = "") -> None:
    """Raise ConfigError with a key, dotted inside groups, and its value, where something is wrong with it."""
    if is_wrong:
        raise ConfigError(message, key=name, value=attrgetter(name)(config), hint=hint)


class Sizes(NamedTuple):
    """Sizes that have to fit each other.

    Attributes:
        length: steps of one environment in a fragment.
        envs: environments of a worker.
        batch: env steps in a train batch.
    """

    length: int
    envs: int
    batch: int

    def gives_each(self, workers: int) -> bool:
        """Return whether whole fragments make up a batch, and each worker has one."""
        fragments, rest = divmod(self.batch, self.length * self.envs)
        return not rest and fragments >= workers

    def fitted(self, fixed: Set[str], workers: int, least: int) -> Sizes:
        """Return sizes with which whole fragments make up a batch, and each worker has one.

        Args:
            fixed: keys that must not change.
            workers: how many should have a fragment of each batch.
            least: env steps that a batch must hold.

        Returns:
            The sizes as they are if they fit, or if nothing that may change makes them fit.
        """
        if self.gives_each(workers):
            return self
        return self._of_batch(fixed, workers) if BATCH in fixed else self._of_fragments(fixed, workers, least)

    def _of_fragments(self, fixed: Set[str], workers: int, least: int) -> Sizes:
        """Return sizes where the batch follows from the fragments, after these are shortened to leave one for each."""
        length, envs = self.length, self.envs
        share = max(1, self.batch // workers)
        if ENVS not in fixed:
            envs = min(envs, max(1, share // length))
        if LENGTH not in fixed:
            length = min(length, max(1, share // envs))
        unit = length * envs * workers
        if unit > 2 * self.batch:  # rather than a batch that is far too large, let some workers wait
            unit = length * envs
        return Sizes(length, envs, unit * max(1, (2 * self.batch + unit) // (2 * unit), -(-least // unit)))

    def _of_batch(self, fixed: Set[str], workers: int) -> Sizes:
        """Return sizes whose fragments divide the batch."""
        fitting = [
            Sizes(length, envs, self.batch)
            for length in ([self.length] if LENGTH in fixed else divisors(self.batch))
            if self.batch % length == 0
            for envs in ([self.envs] if ENVS in fixed else divisors(self.batch // length))
            if self.batch // length % envs == 0 and (envs <= self.envs or ENVS in fixed)
        ]
        even = [sizes for sizes in fitting if self.batch // (sizes.length * sizes.envs) % workers == 0]
        return min(even or fitting, key=self._distance, default=self)

    def _distance(self, other: Sizes) -> tuple[float, int]:
        apart = math.log(other.length / self.length) ** 2 + math.log(other.envs / self.envs) ** 2
        return round(apart, 9), -other.length


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, the smallest first."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor of `number` whose ratio to `wanted` is nearest to 1."""
    return min(divisors(number), key=lambda divisor: abs(math.log(divisor / wanted)))
