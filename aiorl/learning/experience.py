"""Experience that is trained on as it arrives, such as samples of the newest policy.

Experience of older policies is in `aiorl.learning.algorithms.streaming`, stored experience in
`aiorl.learning.algorithms.imitation`, and experience that is kept and drawn many times in
`aiorl.learning.replayed`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aiorl.config.schema import CommonConfig
from aiorl.data.fragment import SamplePlan
from aiorl.errors import ConfigError
from aiorl.learning.algorithm import Feed, LeasePlan, Update, want_stored_experience
from aiorl.learning.compiled import Mode
from aiorl.learning.gradients import Gradients
from aiorl.learning.keys.actor_critic import ActorCriticKeys
from aiorl.learning.rows import sequence_columns
from aiorl.learning.steps import Descent
from aiorl.learning.train_batches import GradientBatches, TrainBatches
from aiorl.process.machine import available_bytes

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic

_COPIES = 2
"""A train batch is in memory as fragments, and laid out."""

_NUMBERS_OF_A_ROW = 5
"""Numbers that each row has at least besides observation and action: its likelihood, value, return
and so on."""


@dataclasses.dataclass(frozen=True)
class Fragments:
    """Fragments that make up train batches; see `aiorl.learning.algorithm.Experience`.

    Attributes:
        config: sizes, and the place where gradients are computed.
        sample_plan: columns of a fragment.
        leases: leases that the algorithm wants.
        is_stored: True if the fragments come from stored experience alone.
    """

    config: ActorCriticKeys
    sample_plan: SamplePlan
    leases: LeasePlan
    is_stored: bool = False

    @property
    def sends_gradients(self) -> bool:
        """See `Experience`."""
        return self.config.gradients == "workers"

    def lease_plan(self) -> LeasePlan:
        """See `Experience`."""
        if self.is_stored:
            want_stored_experience(self.config)
        return self.leases

    def feed(self, model: ActorCritic, update: Update, rng: np.random.Generator) -> Feed:
        """See `Experience`."""
        if not self.sends_gradients:
            return TrainBatches(self.config, self.sample_plan, model, loop=update.loop, rng=rng)
        if not isinstance(update.loop.step, Descent):
            raise ConfigError(
                f"workers can't compute the gradients of {self.config.algo}: its update is more than"
                " a step against the gradient of one loss.",
                key="gradients",
                value=self.config.gradients,
                hint="Set gradients: learner, or let the loop have one bare descend.",
            )
        gradients = self.gradients(model, update, xla="eager")
        gradients.trace()
        return GradientBatches(
            {name: tuple(variable.shape) for name, variable in model.trainable.items()},
            metric_names=gradients.metric_names[:-1],
            columns=self.sample_plan.columns,
            num_fragments=self.config.fragments_per_batch(),
        )

    def gradients(self, model: ActorCritic, update: Update, *, xla: Mode) -> Gradients:
        """Return what computes the gradients of an update's loss over fragments.

        Args:
            model: network of the policy.
            update: update with one loss.
            xla: mode of compilation.

        Raises:
            NotImplementedError: the update does more than a step against the gradient of one loss.
        """
        rng = np.random.default_rng(0)  # not used: a gradient has one minibatch
        batches = TrainBatches(self.config, self.sample_plan, model, loop=update.loop, rng=rng)
        return Gradients(update, batches, model, xla=xla)

    @staticmethod
    def check_room(policies: Sequence[tuple[Any, ActorCritic]]) -> None:
        """Check that there is room for the train batch of each policy; see `Experience`."""
        for experience, model in policies:
            if not isinstance(experience, Fragments) or experience.sends_gradients:
                continue
            size = experience.config.train_batch_size
            needed = _COPIES * size * _least_row_bytes(model)
            available = available_bytes()
            if needed > available:
                raise ConfigError(
                    f"train batches of {size:,} env steps need at least {needed / 1e9:.3g} GB of "
                    f"memory, and {available / 1e9:.3g} GB are free.",
                    key="train_batch_size",
                    value=size,
                    hint="Set a smaller train_batch_size.",
                )


def _least_row_bytes(model: ActorCritic) -> int:
    """Return the bytes of a row in a train batch that every algorithm needs: observation, action,
    some numbers.
    """
    obs_bytes = math.prod(model.obs_shape) * np.dtype(model.obs_dtype).itemsize
    action_size = math.prod(model.distribution.action_shape)
    return obs_bytes + 4 * (action_size + _NUMBERS_OF_A_ROW)


def on_policy(config: ActorCriticKeys, plan: SamplePlan) -> Fragments:
    """Return experience of the newest policy: exactly one train batch of each policy version::

        columns = ("obs", "actions", "advantages", "value_targets")
        on_policy(config, advantages(config, config.lambda_, columns))

    Args:
        config: config of the algorithm.
        plan: columns that workers send, for example those of `advantages`.
    """
    leases = LeasePlan(
        "on_policy",
        config.fragments_per_batch(),
        max_policy_lag=0,
        env_steps_per_batch=None if config.is_truncating else config.train_batch_size,
    )
    return Fragments(config, with_scaled_rewards(config, plan), leases)


def with_scaled_rewards(config: ActorCriticKeys, plan: SamplePlan) -> SamplePlan:
    """Return a plan in which rewards are scaled if the config says so."""
    discount = config.gamma if config.normalize_rewards else None
    return dataclasses.replace(plan, return_discount=discount)


def advantages(config: CommonConfig, lambda_: float, columns: Sequence[str]) -> SamplePlan:
    """Return a plan of these `columns` with GAE advantages, by gamma of the `config` and this
    `lambda_`; recurrent models also get flags and states.
    """
    parameters = {"gamma": config.gamma, "lam": lambda_}
    return SamplePlan("gae", parameters, (*columns, *sequence_columns(config)))


def returns(config: CommonConfig, columns: Sequence[str]) -> SamplePlan:
    """Return a plan of these `columns` with returns, discounted by gamma of the `config`, as
    advantages; recurrent models also get flags and states.
    """
    return SamplePlan("returns", {"gamma": config.gamma}, (*columns, *sequence_columns(config)))
