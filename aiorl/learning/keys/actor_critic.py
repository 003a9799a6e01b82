"""Keys of algorithms that train an actor and a critic on whole fragments. Loads no TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Set
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from aiorl.acting.exploration import Schedule
from aiorl.config.key import changed, key
from aiorl.config.schema import CommonConfig
from aiorl.config.shared_keys import BATCH, ENVS, LENGTH, KeyTable, SDEKeys
from aiorl.config.worker import MAX_ROWS
from aiorl.errors import ConfigError
from aiorl.learning.keys.batch_sizes import Sizes, nearest_divisor

MINIBATCH = "sgd_minibatch_size"

_learning = partial(key, group="Learning")


if TYPE_CHECKING:
    _WithNoise = SDEKeys
else:
    _WithNoise = KeyTable


class LossKeys(_WithNoise):
    """Keys of the loss of a policy and its values: coefficients, schedules, the scaling of rewards
    and advantages, and the clipping of gradients.
    """

    lr_schedule: list[tuple[float, float]] | None = _learning(None)
    """lr over env steps, as [[env step, value], ...]."""
    vf_loss_coeff: float = _learning(0.5, ge=0)
    """Weight of the value loss."""
    entropy_coeff: float = _learning(0.0, ge=0)
    """Weight of the entropy bonus, per nat."""
    entropy_coeff_schedule: list[tuple[float, float]] | None = _learning(None)
    """entropy_coeff over env steps, as [[env step, value], ...]."""
    normalize_advantages: bool = _learning(False)
    """Scale the advantages of each minibatch to mean 0 and standard deviation 1."""
    normalize_rewards: bool = _learning(False)
    """Divide the rewards to learn from by the running standard deviation of the discounted return,
    and clip them to [-10, 10]. Reported episode returns are not scaled."""
    grad_clip: float | None = _learning(0.5, gt=0)
    """Largest global norm of a gradient; null: not clipped."""


class ActorCriticKeys(LossKeys):
    """Keys of algorithms that train an actor and a critic on whole fragments.

    Besides those of the loss, they are about passes over a train batch and its minibatches, and
    about the place where gradients are computed.
    """

    is_one_minibatch: ClassVar[bool] = False
    """True if a train batch is one minibatch unless sgd_minibatch_size is set."""
    samples_in_turns: ClassVar[bool] = False
    """True if workers sample one train batch and then wait for the update, so that each should
    contribute to it."""
    why_on_learner: ClassVar[str] = ""
    """Reason why workers can't compute the gradients, as the end of "ALGO needs them on the
    learner: ..."; "" if they can."""

    lr: float = changed(CommonConfig, "lr", 5e-4)
    train_batch_size: int = changed(CommonConfig, "train_batch_size", 4096)
    num_envs_per_worker: int = changed(CommonConfig, "num_envs_per_worker", 32)
    rollout_fragment_length: int = changed(CommonConfig, "rollout_fragment_length", 64)

    gradients: Literal["learner", "workers"] = _learning("learner")
    """Place where gradients are computed: the learner, from train batches; or the workers, from
    their own fragments, which they then don't send. The learner takes one step with the mean
    gradient of a train batch, which equals the gradient of all its rows, except that
    normalize_advantages applies to each fragment. These workers need TensorFlow."""
    num_sgd_iter: int = _learning(1, unit="epochs", ge=1)
    """Passes over each train batch."""
    sgd_minibatch_size: int | None = _learning(None, unit="env steps", ge=1, le=MAX_ROWS)
    """Env steps in one minibatch, rounded to whole sequences if these are trained on; null: a
    sixteenth of the train batch, at least 256."""

    def minibatch_steps(self) -> int:
        """Return the env steps in one minibatch."""
        if self.sgd_minibatch_size is not None:
            return self.sgd_minibatch_size
        if self.is_one_minibatch:
            return self.train_batch_size
        return min(max(256, self.train_batch_size // 16), self.train_batch_size)

    def fragments_per_batch(self) -> int:
        """Return the number of fragments in a train batch; it is a maximum for whole episodes,
        which can be longer.
        """
        return -(
            -self.train_batch_size // (self.rollout_fragment_length * self.num_envs_per_worker)
        )

    @property
    def has_whole_sequences(self) -> bool:
        """True if a minibatch consists of whole sequences of `rollout_fragment_length` steps."""
        return self.model.is_recurrent and self.is_truncating

    def derived_sizes(self, fixed: Set[str]) -> dict[str, int]:
        """See `CommonConfig.derived_sizes`; a batch is made of whole fragments and no smaller than
        a minibatch.
        """
        if fixed.isdisjoint({LENGTH, ENVS, BATCH, MINIBATCH, "num_workers"}):
            return {}
        sizes = Sizes(self.rollout_fragment_length, self.num_envs_per_worker, self.train_batch_size)
        minibatch = self.sgd_minibatch_size
        least_batch = 1
        if minibatch is not None and MINIBATCH in fixed:
            least_batch = minibatch
            if BATCH not in fixed:
                sizes = sizes._replace(batch=max(sizes.batch, minibatch))
            if self.has_whole_sequences and LENGTH not in fixed:
                steps = math.gcd(minibatch, sizes.batch) if BATCH in fixed else minibatch
                sizes = sizes._replace(length=nearest_divisor(steps, sizes.length))
                fixed = {*fixed, LENGTH}
        if self.is_truncating:
            workers = max(1, self.num_workers) if self.samples_in_turns else 1
            sizes = sizes.fitted(fixed, workers, least=least_batch)
        derived = {LENGTH: sizes.length, ENVS: sizes.envs, BATCH: sizes.batch}
        if minibatch is not None and MINIBATCH not in fixed:
            unit = sizes.length if self.has_whole_sequences else 1
            derived[MINIBATCH] = max(1, min(minibatch, sizes.batch) // unit) * unit
        return {name: size for name, size in derived.items() if size != getattr(self, name)}

    def check(self) -> None:
        """Check that the values go together.

        Raises:
            ConfigError: a value must change; the error names its key.
        """
        super().check()
        Schedule.of(self.lr, self.lr_schedule, key="lr_schedule")
        Schedule.of(self.entropy_coeff, self.entropy_coeff_schedule, key="entropy_coeff_schedule")
        self._check_whole_fragments()
        self._check_whole_sequences()
        self._check_gradients()
        size = self.train_batch_size
        minibatch = self.minibatch_steps()
        if minibatch > size:
            raise ConfigError(
                f"sgd_minibatch_size {minibatch} is more than train_batch_size {size}.",
                key=MINIBATCH,
                value=self.sgd_minibatch_size,
                hint=f"Set it to {size} or less.",
            )

    def _check_whole_fragments(self) -> None:
        size = self.train_batch_size
        length = self.rollout_fragment_length
        fragment = length * self.num_envs_per_worker
        if not self.is_truncating or size % fragment == 0:
            return
        # only sizes that the user set must divide the one that the hint offers: others follow it
        users_keys = self._origins.users_keys()
        users_sizes = [getattr(self, name) for name in (LENGTH, ENVS) if name in users_keys]
        unit = math.prod(users_sizes) if users_sizes else fragment
        below = size - size % unit
        fitting = f"{below} or {below + unit}" if below else f"{unit}"
        raise ConfigError(
            f"train_batch_size {size} can't be made up of fragments of {fragment} env steps"
            f" (rollout_fragment_length {length} x num_envs_per_worker"
            f" {self.num_envs_per_worker}).",
            key=BATCH,
            value=size,
            hint=f"Set train_batch_size to {fitting}, or leave it out to let aiorl choose it.",
        )

    def _check_whole_sequences(self) -> None:
        minibatch = self.sgd_minibatch_size
        length = self.rollout_fragment_length
        if self.has_whole_sequences and minibatch is not None and minibatch % length:
            raise ConfigError(
                f"sgd_minibatch_size {minibatch} is not a multiple of rollout_fragment_length"
                f" {length}: a minibatch holds whole sequences here.",
                key=MINIBATCH,
                value=minibatch,
                hint="Leave one of the two out to let aiorl choose it.",
            )

    def _check_gradients(self) -> None:
        if self.gradients == "learner":
            return
        if self.why_on_learner:
            raise ConfigError(
                f"gradients can't be workers: {self.algo} needs them on the learner:"
                f" {self.why_on_learner}.",
                key="gradients",
                value=self.gradients,
                hint="Set gradients: learner.",
            )
        size = self.train_batch_size
        minibatch = self.minibatch_steps()
        if self.num_sgd_iter > 1 or minibatch != size:
            raise ConfigError(
                "gradients can't be workers: that allows only one step per train batch, but this"
                f" config makes {self.num_sgd_iter} passes in minibatches of {minibatch} out of"
                f" {size} env steps.",
                key="gradients",
                value=self.gradients,
                hint=f"Set gradients: learner; or num_sgd_iter: 1, sgd_minibatch_size: {size}.",
            )


class ActorCriticConfig(ActorCriticKeys, SDEKeys, CommonConfig):
    """Settings of algorithms that train an actor and a critic on whole fragments."""


class OnPolicyConfig(ActorCriticKeys, SDEKeys, CommonConfig):
    """Settings of algorithms that train on exactly one train batch of each policy version.

    Its own keys are lambda of the advantages and Adam's epsilon.
    """

    samples_in_turns: ClassVar[bool] = True

    lambda_: float = _learning(0.95, ge=0, le=1)
    """Lambda of generalised advantage estimation: 0 trusts the value estimates, 1 the returns."""
    adam_epsilon: float = _learning(1e-5, gt=0)
    """Adam's epsilon."""
