"""Asynchronous advantage actor-critic: workers compute gradients and don't wait
(docs/algorithms/a3c.md).
"""

from __future__ import annotations

from typing import Literal

from aiorl.config.key import changed
from aiorl.config.schema import CommonConfig
from aiorl.data.fragment import SamplePlan
from aiorl.learning.algorithms.a2c import A2C_COLUMNS, a2c_spec
from aiorl.learning.algorithms.compiled_update import UpdateSpec
from aiorl.learning.algorithms.on_policy import OnPolicyConfig, advantage_plan
from aiorl.learning.algorithms.streaming import Streaming, StreamingConfig


class A3CConfig(StreamingConfig):
    """A3C's defaults of common keys."""

    is_one_minibatch = True

    algo: str = changed(StreamingConfig, "algo", "a3c")
    gradients: Literal["learner", "workers"] = changed(StreamingConfig, "gradients", "workers")
    lr: float = changed(StreamingConfig, "lr", 7e-4)
    num_envs_per_worker: int = changed(StreamingConfig, "num_envs_per_worker", 8)
    rollout_fragment_length: int = changed(StreamingConfig, "rollout_fragment_length", 16)
    train_batch_size: int = changed(StreamingConfig, "train_batch_size", 128)
    entropy_coeff: float = changed(StreamingConfig, "entropy_coeff", 0.01)
    lambda_: float = changed(OnPolicyConfig, "lambda_", 1.0)
    """Lambda of generalised advantage estimation: 0 trusts the value estimates, 1 the returns."""
    max_policy_lag: int | None = changed(StreamingConfig, "max_policy_lag", 20)
    outstanding_fragments_per_worker: int = changed(
        StreamingConfig, "outstanding_fragments_per_worker", 2
    )


class A3C(Streaming[A3CConfig]):
    """Asynchronous advantage actor-critic (Mnih et al. 2016)."""

    config_class = A3CConfig

    @classmethod
    def sample_plan(cls, config: CommonConfig) -> SamplePlan:
        """Return a plan with the columns of A2C's loss; they never leave the workers."""
        own = cls.own_config(config)
        return advantage_plan(own, own.lambda_, A2C_COLUMNS)

    def update_spec(self) -> UpdateSpec:
        """Return A2C's update."""
        return a2c_spec(self)
