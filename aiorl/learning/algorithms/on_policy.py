"""Base class of algorithms that train on what the newest policy sampled, with advantages that workers estimate."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, TypeVar

from aiorl.config.schema import CommonConfig
from aiorl.learning.algorithms.algorithm import LeasePlan, SamplePlan
from aiorl.learning.algorithms.compiled_algorithm import CompiledAlgorithm, sequence_columns
from aiorl.learning.algorithms.on_policy_config import OnPolicyConfig

__all__ = ["OnPolicy", "advantage_plan"]

OnPolicyT = TypeVar("OnPolicyT", bound=OnPolicyConfig)


class OnPolicy(CompiledAlgorithm[OnPolicyT]):
    """Trains on exactly one train batch of each policy version."""

    @classmethod
    def lease_plan(cls, config: CommonConfig) -> LeasePlan:
        """Exactly one train batch of each version."""
        own = cls._own(config)
        env_steps = None if own.is_truncating else own.train_batch_size
        return LeasePlan("on_policy", own.fragments_per_batch(), max_policy_lag=0, env_steps_per_batch=env_steps)

    @classmethod
    def sample_plan(cls, config: CommonConfig) -> SamplePlan:
        """Rows with advantages; flags and states only for recurrent models."""
        own = cls._own(config)
        return advantage_plan(own, own.lambda_, cls._columns(own))

    @classmethod
    @abstractmethod
    def _columns(cls, config: OnPolicyT) -> tuple[str, ...]:
        """Return the columns that its loss is made of."""

    def _optimizer(self) -> Any:  # Any: a Keras optimiser
        return self._adam(self._config.adam_epsilon)


def advantage_plan(config: CommonConfig, lambda_: float, columns: tuple[str, ...]) -> SamplePlan:
    """Rows of such columns, with advantages by GAE; flags and states only for recurrent models."""
    return SamplePlan("gae", {"gamma": config.gamma, "lam": lambda_}, (*columns, *sequence_columns(config)))
