"""Advantage actor-critic: one step on each train batch of the newest policy (docs/algorithms/a2c.md)."""

from __future__ import annotations

from typing import Any

from aiorl.config.key import changed
from aiorl.data import columns as c
from aiorl.learning.algorithms.compiled_algorithm import CompiledAlgorithm, rows_forward
from aiorl.learning.algorithms.compiled_update import UpdateSpec
from aiorl.learning.algorithms.on_policy import OnPolicy, OnPolicyConfig
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses.policy_gradient import actor_critic_loss, masked_mean, masked_normalise
from aiorl.learning.models.distributions import to_tf_distribution

A2C_COLUMNS = (c.OBS, c.ACTIONS, c.ADVANTAGES, c.VALUE_TARGETS)
"""Columns of its loss."""


class A2CConfig(OnPolicyConfig):
    """A2C's own settings, and its defaults of the common ones."""

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
        """Return the columns of its loss."""
        return A2C_COLUMNS

    def update_spec(self) -> UpdateSpec:
        """Return the loss over rows, or over sequences if the model is recurrent."""
        return a2c_spec(self)


def a2c_spec(algorithm: CompiledAlgorithm[Any]) -> UpdateSpec:
    """Return the update of A2C, which is also that of A3C."""
    config, model, buffers = algorithm.config, algorithm.model, algorithm.buffers
    distribution = to_tf_distribution(model.distribution)

    def loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
        dist_inputs, values, columns = rows_forward(model, minibatch, buffers)
        valid = columns[c.VALID]
        advantages = columns[c.ADVANTAGES]
        if config.normalize_advantages:
            advantages = masked_normalise(advantages, valid)
        logp = tf.where(valid > 0, distribution.logp(dist_inputs, columns[c.ACTIONS]), 0.0)
        return actor_critic_loss(
            -masked_mean(logp * advantages, valid), values, columns[c.VALUE_TARGETS],
            distribution.entropy(dist_inputs), valid,
            vf_loss_coeff=coefficients["vf_loss_coeff"], entropy_coeff=coefficients["entropy_coeff"],
        )  # fmt: skip

    metrics = ("policy_loss", "vf_loss", "entropy", "vf_explained_var")
    return UpdateSpec(loss, metrics, ("lr", "vf_loss_coeff", "entropy_coeff"))
