"""Base class of algorithms that train on what the newest policy sampled, with advantages that workers estimate."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Any, TypeVar

from aiorl.config.key import key
from aiorl.config.schema import CommonConfig
from aiorl.learning.algorithms.actor_critic_config import ActorCriticConfig
from aiorl.learning.algorithms.algorithm import LeasePlan, SamplePlan
from aiorl.learning.algorithms.compiled_algorithm import CompiledAlgorithm, sequence_columns

_learning = partial(key, group="Learning")


class OnPolicyConfig(ActorCriticConfig):
    """The settings of such algorithms."""

    samples_in_turns = True

    lambda_: float = _learning(
        0.95, "Lambda of generalised advantage estimation: 0 trusts the values, 1 the returns.", ge=0, le=1
    )
    adam_epsilon: float = _learning(1e-5, "Adam's epsilon.", gt=0)


OnPolicyT = TypeVar("OnPolicyT", bound=OnPolicyConfig)


class OnPolicy(CompiledAlgorithm[OnPolicyT]):
    """Trains on exactly one train batch of each policy version."""

    @classmethod
    def lease_plan(cls, config: CommonConfig) -> LeasePlan:
        """Exactly one train batch of each version."""
        own = cls.own_config(config)
        env_steps = None if own.is_truncating else own.train_batch_size
        return LeasePlan("on_policy", own.fragments_per_batch(), max_policy_lag=0, env_steps_per_batch=env_steps)

    @classmethod
    def sample_plan(cls, config: CommonConfig) -> SamplePlan:
        """Rows with advantages; flags and states only for recurrent models."""
        own = cls.own_config(config)
        return advantage_plan(own, own.lambda_, cls.columns(own))

    @classmethod
    @abstractmethod
    def columns(cls, config: OnPolicyT) -> tuple[str, ...]:
        """Return the columns that its loss is made of."""

    def make_optimizer(self) -> Any:  # Any: a Keras optimiser
        """Make an Adam."""
        return self.adam(self.config.adam_epsilon)


def advantage_plan(config: CommonConfig, lambda_: float, columns: tuple[str, ...]) -> SamplePlan:
    """Rows of such columns, with advantages by GAE; flags and states only for recurrent models."""
    return SamplePlan("gae", {"gamma": config.gamma, "lam": lambda_}, (*columns, *sequence_columns(config)))
