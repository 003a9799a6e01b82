"""Settings of algorithms that train an actor and a critic on whole fragments; loads no TensorFlow.

A train batch is made of whole fragments, each of `rollout_fragment_length` steps of `num_envs_per_worker` environments.
Where the sizes that a user sets do not fit the defaults, the defaults change, as little as possible.
"""

from __future__ import annotations

import math
from collections.abc import Set
from functools import partial
from typing import Any, ClassVar, Literal

from aiorl.acting.exploration import Schedule
from aiorl.config.key import changed, key
from aiorl.config.schema import CommonConfig, SDESettings
from aiorl.errors import ConfigError
from aiorl.learning.algorithms.sizes import BATCH, ENVS, LENGTH, MINIBATCH, Sizes, nearest_divisor, refuse_if

_exploration = partial(key, group="Exploration")


class SDEConfig(CommonConfig):
    """The settings of such noise.

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
        if self.sde_sample_freq == 0:
            raise ConfigError(
                "sde_sample_freq is 0, expected a number of steps.", key="sde_sample_freq", value=0,
                hint="Set 1 for noise of each step, or -1 for the same throughout a fragment.",
            )  # fmt: skip
        if not self.use_sde:
            return
        if self.why_no_exploration:
            raise ConfigError(
                f"use_sde is a way to explore, and {self.algo} can't have it: {self.why_no_exploration}.",
                key="use_sde", value=True, hint="Leave it out.",
            )  # fmt: skip
        for name in ("free_log_std", "custom_model"):
            if getattr(self.model, name):
                raise ConfigError(
                    f"use_sde makes deviations of a built-in network's features: model.{name} does not go with it.",
                    key=f"model.{name}", value=getattr(self.model, name), hint=f"Leave out use_sde or model.{name}.",
                )  # fmt: skip


_learning = partial(key, group="Learning")


class ActorCriticConfig(SDEConfig):
    """The settings of such algorithms, and their defaults of the common ones."""

    is_one_minibatch: ClassVar[bool] = False
    """A train batch is one minibatch, unless the size of these is set."""
    samples_in_turns: ClassVar[bool] = False
    """Workers sample one train batch and wait for the update, so each of them should have a part of it."""
    why_on_learner: ClassVar[str] = ""
    """Why workers can't compute the gradients, as the rest of "ALGO needs them on the learner: ..."; "" if they can."""

    lr: float = changed(CommonConfig, "lr", 5e-4)
    train_batch_size: int = changed(CommonConfig, "train_batch_size", 4096)
    num_envs_per_worker: int = changed(CommonConfig, "num_envs_per_worker", 32)
    rollout_fragment_length: int = changed(CommonConfig, "rollout_fragment_length", 64)

    lr_schedule: list[tuple[float, float]] | None = _learning(None)
    """lr over env steps, as [[env step, value], ...]."""
    vf_loss_coeff: float = _learning(0.5, ge=0)
    """Weight of the value loss."""
    entropy_coeff: float = _learning(0.0, ge=0)
    """Weight of the entropy bonus, per nat."""
    entropy_coeff_schedule: list[tuple[float, float]] | None = _learning(None)
    """entropy_coeff over env steps, as [[env step, value], ...]."""
    normalize_advantages: bool = _learning(False)
    """Scale the advantages of each minibatch to mean 0 and deviation 1."""
    normalize_rewards: bool = _learning(False)
    """Learn from rewards over the running standard deviation of the discounted return, clipped to [-10, 10]; the
    returns of episodes that are reported stay as they are."""
    grad_clip: float | None = _learning(0.5, gt=0)
    """Largest global norm of a gradient; null: not clipped."""
    gradients: Literal["learner", "workers"] = _learning("learner")
    """Who computes gradients: the learner, of train batches; or the workers, each of its own fragments, which they
    don't send then. The learner takes one step with the mean of a train batch's gradients, which is that of its rows,
    but for normalize_advantages, which is of each fragment then. Such workers need TensorFlow."""
    num_sgd_iter: int = _learning(1, unit="epochs", ge=1)
    """Passes over each train batch."""
    sgd_minibatch_size: int | None = _learning(None, unit="env steps", ge=1)
    """Env steps in one minibatch, in whole sequences where these are trained on; null takes a sixteenth of the train
    batch, at least 256."""

    def minibatch_steps(self) -> int:
        """Env steps in one minibatch."""
        if self.sgd_minibatch_size is not None:
            return self.sgd_minibatch_size
        if self.is_one_minibatch:
            return self.train_batch_size
        return min(max(256, self.train_batch_size // 16), self.train_batch_size)

    def fragments_per_batch(self) -> int:
        """Fragments that make up a train batch; with complete episodes, which may be longer, the most that it takes."""
        return -(-self.train_batch_size // (self.rollout_fragment_length * self.num_envs_per_worker))

    def derived_sizes(self, fixed: Set[str]) -> dict[str, int]:
        """See the base class: a batch is of whole fragments, and a minibatch no larger than that."""
        if fixed.isdisjoint({LENGTH, ENVS, BATCH, MINIBATCH, "num_workers"}):
            return {}
        sizes = Sizes(self.rollout_fragment_length, self.num_envs_per_worker, self.train_batch_size)
        minibatch, is_fixed = self.sgd_minibatch_size, MINIBATCH in fixed
        if minibatch is not None and is_fixed:
            if BATCH not in fixed:
                sizes = sizes._replace(batch=max(sizes.batch, minibatch))
            if self.has_whole_sequences and LENGTH not in fixed:
                common = math.gcd(minibatch, sizes.batch) if BATCH in fixed else minibatch
                sizes, fixed = sizes._replace(length=nearest_divisor(common, sizes.length)), {*fixed, LENGTH}
        if self.is_truncating:
            workers = max(1, self.num_workers) if self.samples_in_turns else 1
            sizes = sizes.fitted(fixed, workers, minibatch if minibatch is not None and is_fixed else 1)
        if minibatch is not None and not is_fixed:
            unit = sizes.length if self.has_whole_sequences else 1
            minibatch = max(1, min(minibatch, sizes.batch) // unit) * unit
        found = {LENGTH: sizes.length, ENVS: sizes.envs, BATCH: sizes.batch, MINIBATCH: minibatch}
        return {name: size for name, size in found.items() if size is not None and size != getattr(self, name)}

    @property
    def has_whole_sequences(self) -> bool:
        """Return whether a minibatch holds whole sequences of `rollout_fragment_length` steps."""
        return self.model.is_recurrent and self.is_truncating

    def check(self) -> None:
        """Refuse values that don't go together.

        Raises: ConfigError naming the key that should change.
        """
        super().check()
        self._check_batch_size()
        given = self.sgd_minibatch_size
        if self.has_whole_sequences and given is not None and given % self.rollout_fragment_length:
            raise ConfigError(
                f"sgd_minibatch_size {given} is no multiple of rollout_fragment_length "
                f"{self.rollout_fragment_length}: a minibatch holds whole sequences here.",
                key="sgd_minibatch_size", value=given, hint="Leave one of the two out to have it chosen.",
            )  # fmt: skip
        self._check_gradients()
        Schedule.of(self.lr, self.lr_schedule, key="lr_schedule")
        Schedule.of(self.entropy_coeff, self.entropy_coeff_schedule, key="entropy_coeff_schedule")
        if self.minibatch_steps() > self.train_batch_size:
            raise ConfigError(
                f"sgd_minibatch_size {self.minibatch_steps()} is more than train_batch_size {self.train_batch_size}.",
                key="sgd_minibatch_size", value=self.minibatch_steps(),
                hint=f"Set it to {self.train_batch_size} or less.",
            )  # fmt: skip

    def _check_gradients(self) -> None:
        """Refuse gradients of workers where the update is more than one step by the gradient of a train batch.

        Raises: ConfigError with what would do.
        """
        if self.gradients == "learner":
            return
        why, hint = "", "Set gradients: learner."
        if self.why_on_learner:
            why = f"{self.algo} needs them on the learner: {self.why_on_learner}"
        elif self.num_sgd_iter != 1 or self.minibatch_steps() != self.train_batch_size:
            why = (
                f"with them there is one step for each train batch, and here it is passed over {self.num_sgd_iter} "
                f"times in minibatches of {self.minibatch_steps()} of its {self.train_batch_size} env steps"
            )
            hint = f"Set num_sgd_iter: 1 and sgd_minibatch_size: {self.train_batch_size}, or gradients: learner."
        refuse_if(
            self, bool(why), "gradients",
            f"gradients can't be workers: {why}.",
            hint,
        )  # fmt: skip

    def _check_batch_size(self) -> None:
        """Refuse train batches that whole fragments can't make up.

        Raises: ConfigError with the nearest sizes that work.
        """
        fragment = self.rollout_fragment_length * self.num_envs_per_worker
        size = self.train_batch_size
        if self.batch_mode != "truncate_episodes" or size % fragment == 0:
            return
        own = [getattr(self, name) for name in (LENGTH, ENVS) if name in self._origins.users_keys()]
        unit = math.prod(own) if own else fragment
        below = size - size % unit
        fits = f"{below} or {below + unit}" if below else f"{unit}"
        raise ConfigError(
            f"train_batch_size {size} can't be made up of fragments of {fragment} env steps "
            f"(rollout_fragment_length {self.rollout_fragment_length} x num_envs_per_worker "
            f"{self.num_envs_per_worker}).",
            key="train_batch_size", value=size,
            hint=f"Set train_batch_size to {fits}, or leave it out to have it chosen.",
        )  # fmt: skip
