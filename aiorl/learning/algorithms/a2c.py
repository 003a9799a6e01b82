"""Advantage actor-critic: one step on each train batch of the newest policy
(docs/algorithms/a2c.md).
"""

from __future__ import annotations

from typing import Any

from aiorl.config.key import changed
from aiorl.data import columns as c
from aiorl.learning.algorithms.compiled_algorithm import CompiledAlgorithm
from aiorl.learning.algorithms.compiled_update import UpdateSpec
from aiorl.learning.algorithms.on_policy import OnPolicy, OnPolicyConfig
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses.policy_gradient import masked_normalise

A2C_COLUMNS = (c.OBS, c.ACTIONS, c.ADVANTAGES, c.VALUE_TARGETS)
"""Columns that the loss needs."""


class A2CConfig(OnPolicyConfig):
    """A2C's own keys, and its defaults of common keys."""

    is_one_minibatch = True

    algo: str = changed(OnPolicyConfig, "algo", "a2c")
    lr: float = changed(OnPolicyConfig, "lr", 7e-4)
    num_envs_per_worker: int = changed(OnPolicyConfig, "num_envs_per_worker", 8)
    rollout_fragment_length: int = changed(OnPolicyConfig, "rollout_fragment_length", 16)
    train_batch_size: int = changed(OnPolicyConfig, "train_batch_size", 256)
    entropy_coeff: float = changed(OnPolicyConfig, "entropy_coeff", 0.01)
    lambda_: float = changed(OnPolicyConfig, "lambda_", 1.0)


class A2C(OnPolicy[A2CConfig]):
    """Synchronous advantage actor-critic (Mnih et al. 2016)."""

    config_class = A2CConfig

    @classmethod
    def columns(cls, config: A2CConfig) -> tuple[str, ...]:
        """Return the columns that the loss needs."""
        return A2C_COLUMNS

    def update_spec(self) -> UpdateSpec:
        """Return the loss over rows, or over sequences for recurrent models."""
        return a2c_spec(self)


def a2c_spec(algorithm: CompiledAlgorithm[Any]) -> UpdateSpec:
    """Return the update of A2C and A3C, in which actions are weighted by their advantages."""

    def advantages(
        columns: Tensors, values: tf.Tensor, coefficients: Tensors
    ) -> tuple[tf.Tensor, Tensors]:
        found = columns[c.ADVANTAGES]
        return masked_normalise(
            found, columns[c.VALID]
        ) if algorithm.config.normalize_advantages else found, {}

    return algorithm.likelihood_spec(advantages, targets=c.VALUE_TARGETS)
