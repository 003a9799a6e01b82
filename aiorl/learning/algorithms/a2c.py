"""Advantage actor-critic: one step on each train batch of the newest policy
(docs/algorithms/a2c.md).
"""

from __future__ import annotations

from typing import ClassVar

from aiorl.config.key import changed
from aiorl.data import columns as c
from aiorl.learning.actor_critic import likelihood_loss, update_by_loss
from aiorl.learning.algorithm import Algorithm, Experience, Networks, Update
from aiorl.learning.compiled import adam
from aiorl.learning.experience import advantages, on_policy
from aiorl.learning.keys.actor_critic import ActorCriticKeys, OnPolicyConfig
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses.policy_gradient import masked_normalise
from aiorl.learning.steps import Loss

A2C_COLUMNS = (c.OBS, c.ACTIONS, c.ADVANTAGES, c.VALUE_TARGETS)
"""Columns that the loss needs."""


class A2CConfig(OnPolicyConfig):
    """A2C's own keys, and its defaults of common keys."""

    is_one_minibatch: ClassVar[bool] = True

    algo: str = changed(OnPolicyConfig, "algo", "a2c")
    lr: float = changed(OnPolicyConfig, "lr", 7e-4)
    num_envs_per_worker: int = changed(OnPolicyConfig, "num_envs_per_worker", 8)
    rollout_fragment_length: int = changed(OnPolicyConfig, "rollout_fragment_length", 16)
    train_batch_size: int = changed(OnPolicyConfig, "train_batch_size", 256)
    entropy_coeff: float = changed(OnPolicyConfig, "entropy_coeff", 0.01)
    lambda_: float = changed(OnPolicyConfig, "lambda_", 1.0)


class A2C(Algorithm[A2CConfig]):
    """Synchronous advantage actor-critic (Mnih et al. 2016)."""

    config_class = A2CConfig

    @staticmethod
    def experience(config: A2CConfig) -> Experience:
        """Return samples of the newest policy with advantages; see `Algorithm.experience`."""
        return on_policy(config, advantages(config, config.lambda_, A2C_COLUMNS))

    @staticmethod
    def update(config: A2CConfig, networks: Networks) -> Update:
        """Return the loss over rows, or over sequences for recurrent models;
        see `Algorithm.update`.
        """
        loss = a2c_loss(config, networks)
        optimizer = adam(config, config.adam_epsilon)
        return update_by_loss(config, networks.model, loss, optimizer)


def a2c_loss(config: ActorCriticKeys, networks: Networks) -> Loss:
    """Return the loss of A2C and A3C, in which actions are weighted by their advantages."""

    def weigh(columns: Tensors, values: tf.Tensor, knobs: Tensors) -> tuple[tf.Tensor, Tensors]:
        weights = columns[c.ADVANTAGES]
        if config.normalize_advantages:
            weights = masked_normalise(weights, columns[c.VALID])
        return weights, {}

    return likelihood_loss(config, networks.model, weigh, targets=c.VALUE_TARGETS)
