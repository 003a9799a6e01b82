"""Settings that several kinds of algorithms share: refusals, sizes that follow from others, noise of the state.

A train batch is made of whole fragments, each of `rollout_fragment_length` steps of `num_envs_per_worker` environments.
Where the sizes that a user sets do not fit the defaults, the defaults change, as little as possible.
"""

from __future__ import annotations

import math
from collections.abc import Set
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

from aiorl.config.key import key
from aiorl.config.schema import CommonConfig, SDESettings
from aiorl.errors import ConfigError

LENGTH, ENVS, BATCH = "rollout_fragment_length", "num_envs_per_worker", "train_batch_size"
MINIBATCH = "sgd_minibatch_size"
BROADCAST_INTERVAL = (
    "Weights go to workers after the first update so long after the last ones did, if that comes first. "
    "Within one process only broadcast_updates counts, so that runs can be repeated."
)

Rule = tuple[bool, str, str, str]
"""A fault, if True: the key at fault (dotted inside groups), what is wrong, and how to mend it."""


def refuse(config: CommonConfig, *rules: Rule) -> None:
    """Raise ConfigError with the key and its value for the first rule that finds something wrong."""
    for is_wrong, name, message, hint in rules:
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


_exploration = partial(key, group="Exploration")


class SDEConfig(CommonConfig):
    """The settings of noise that is a function of the state.

    Source: Raffin et al. 2021, https://arxiv.org/abs/2005.05719.
    """

    why_no_exploration: ClassVar[str] = ""
    """Why there is none, as the rest of "ALGO can't have it: ..."; "" if there is."""

    use_sde: bool = _exploration(False)
    """Explore a Box by noise that is a function of the state and the same function for some steps (gSDE), rather than
    by noise of each step. Deviations are then made of the policy's last features."""
    sde_sample_freq: int = _exploration(-1, unit="steps", ge=-1)
    """With use_sde: steps of an environment after which that function is drawn anew; -1: rollout_fragment_length, once
    a fragment. Where environments are polled, an agent's episode begins with a new one, too."""
    sde_initial_log_std: float = _exploration(0.0, ge=-20, le=2)
    """With use_sde: logarithm of the standard deviation that each feature's weights begin with."""
    sde_learn_features: bool = _exploration(False)
    """With use_sde: the policy's features learn from the deviations, too, and not from the means alone."""

    @property
    def state_dependent_noise(self) -> SDESettings | None:
        """See the base class."""
        if not self.use_sde:
            return None
        return SDESettings(self.sde_initial_log_std, self.sde_learn_features)

    def sampling(self, **settings: Any) -> dict[str, Any]:
        """The exploration of a policy that draws its actions (see `aiorl.acting.exploration`).

        Args:
            **settings: of any kind of exploration.
        """
        if not self.use_sde:
            return {"type": "StochasticSampling", **settings}
        steps = self.rollout_fragment_length if self.sde_sample_freq < 0 else self.sde_sample_freq
        return {"type": "StateDependentNoise", "sample_freq": steps, **settings}

    def check(self) -> None:
        """Refuse values that don't go together.

        Raises: ConfigError naming the key that should change.
        """
        super().check()
        names = ("sde_sample_freq", "sde_initial_log_std", "sde_learn_features")
        self.refuse_unless(self.use_sde, names, "use_sde", hint="Set use_sde: true.")
        refuse(
            self,
            (self.sde_sample_freq == 0, "sde_sample_freq", "sde_sample_freq is 0, expected a number of steps.",
             "Set 1 for noise of each step, or -1 for the same throughout a fragment."),
            (self.use_sde and bool(self.why_no_exploration), "use_sde",
             f"use_sde is for exploring, and {self.algo} doesn't: {self.why_no_exploration}.", "Leave it out."),
            *((self.use_sde and bool(getattr(self.model, name)), f"model.{name}",
               f"use_sde makes deviations of a built-in network's features: model.{name} does not go with it.",
               f"Leave out use_sde or model.{name}.") for name in ("free_log_std", "custom_model")),
        )  # fmt: skip
