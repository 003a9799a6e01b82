"""A2C's loss over one minibatch, which is also A3C's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from aiorl.data import columns as c
from aiorl.learning.algorithms.actor_critic_config import ActorCriticConfig
from aiorl.learning.algorithms.batch_buffers import BatchBuffers
from aiorl.learning.algorithms.compiled_update import LossFunction, Tensors, UpdateSpec
from aiorl.learning.algorithms.recurrent import rows_forward
from aiorl.learning.losses.actor_critic import actor_critic_loss
from aiorl.learning.losses.masked import masked_mean, masked_normalise
from aiorl.learning.models.distributions import to_tf_distribution

if TYPE_CHECKING:
    from aiorl.learning.models.catalog import ActorCritic

__all__ = ["a2c_spec"]

_METRICS = ("policy_loss", "vf_loss", "entropy", "vf_explained_var")
_COEFFICIENTS = ("lr", "vf_loss_coeff", "entropy_coeff")


def a2c_spec(config: ActorCriticConfig, model: ActorCritic, buffers: BatchBuffers) -> UpdateSpec:
    """Return the update that A2C compiles: its loss over rows, or over sequences if the model is recurrent."""
    return UpdateSpec(_loss(config, model, buffers), _METRICS, _COEFFICIENTS)


def _loss(config: ActorCriticConfig, model: ActorCritic, buffers: BatchBuffers) -> LossFunction:
    distribution = to_tf_distribution(model.distribution)

    def loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
        dist_inputs, values, columns = rows_forward(model, minibatch, buffers)
        valid = columns[c.VALID]
        advantages = columns[c.ADVANTAGES]
        if config.normalize_advantages:
            advantages = masked_normalise(advantages, valid)
        logp = tf.where(valid > 0, distribution.logp(dist_inputs, columns[c.ACTIONS]), 0.0)
        policy_loss = -masked_mean(logp * advantages, valid)
        return actor_critic_loss(
            policy_loss, values, columns[c.VALUE_TARGETS], distribution.entropy(dist_inputs), valid,
            vf_loss_coeff=coefficients["vf_loss_coeff"], entropy_coeff=coefficients["entropy_coeff"],
        )  # fmt: skip

    return loss
