"""Asynchronous advantage actor-critic: workers compute gradients and don't wait
(docs/algorithms/a3c.md).
"""

from __future__ import annotations

from typing import ClassVar, Literal

from aiorl.config.key import changed
from aiorl.learning.actor_critic import update_by_loss
from aiorl.learning.algorithm import Algorithm, Experience, Networks, Update
from aiorl.learning.algorithms.a2c import A2C_COLUMNS, a2c_loss
from aiorl.learning.algorithms.streaming import StreamingConfig, adam_or_rmsprop, streamed
from aiorl.learning.experience import advantages
from aiorl.learning.keys.actor_critic import OnPolicyConfig


class A3CConfig(StreamingConfig):
    """A3C's defaults of common keys."""

    is_one_minibatch: ClassVar[bool] = True

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


class A3C(Algorithm[A3CConfig]):
    """Asynchronous advantage actor-critic (Mnih et al. 2016)."""

    config_class = A3CConfig

    @staticmethod
    def experience(config: A3CConfig) -> Experience:
        """Return samples of slightly older policies with the columns of A2C's loss; these never
        leave the workers if the workers compute gradients; see `Algorithm.experience`.
        """
        return streamed(config, advantages(config, config.lambda_, A2C_COLUMNS))

    @staticmethod
    def update(config: A3CConfig, networks: Networks) -> Update:
        """Return A2C's update; see `Algorithm.update`."""
        loss = a2c_loss(config, networks)
        return update_by_loss(config, networks.model, loss, adam_or_rmsprop(config))
