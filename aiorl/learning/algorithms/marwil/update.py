"""MARWIL's loss over one minibatch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from aiorl.data import columns as c
from aiorl.learning.algorithms.batch_buffers import BatchBuffers
from aiorl.learning.algorithms.compiled_update import LossFunction, Tensors, UpdateSpec
from aiorl.learning.algorithms.marwil.config import MARWILConfig
from aiorl.learning.algorithms.recurrent import rows_forward
from aiorl.learning.losses.actor_critic import actor_critic_loss
from aiorl.learning.losses.marwil import imitation_weights
from aiorl.learning.losses.masked import masked_mean
from aiorl.learning.models.distributions import to_tf_distribution

if TYPE_CHECKING:
    from aiorl.learning.models.catalog import ActorCritic

__all__ = ["marwil_spec"]

_METRICS = ("policy_loss", "vf_loss", "entropy", "mean_weight", "vf_explained_var")
_COEFFICIENTS = ("lr", "beta", "advantage_scale", "vf_loss_coeff", "entropy_coeff")


def marwil_spec(config: MARWILConfig, model: ActorCritic, buffers: BatchBuffers) -> UpdateSpec:
    """Return the update that MARWIL compiles: its loss over rows, or over sequences if the model is recurrent."""
    return UpdateSpec(_loss(config, model, buffers), _METRICS, _COEFFICIENTS)


def _loss(config: MARWILConfig, model: ActorCritic, buffers: BatchBuffers) -> LossFunction:
    distribution = to_tf_distribution(model.distribution)

    def loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
        dist_inputs, values, columns = rows_forward(model, minibatch, buffers)
        valid = columns[c.VALID]
        targets = columns[c.VALUE_TARGETS]
        weights = imitation_weights(
            targets - tf.stop_gradient(values),
            scale=coefficients["advantage_scale"],
            beta=coefficients["beta"],
            max_weight=config.max_weight,
        )
        logp = tf.where(valid > 0, distribution.logp(dist_inputs, columns[c.ACTIONS]), 0.0)
        policy_loss = -masked_mean(weights * logp, valid)
        total, parts = actor_critic_loss(
            policy_loss, values, targets, distribution.entropy(dist_inputs), valid,
            vf_loss_coeff=coefficients["vf_loss_coeff"], entropy_coeff=coefficients["entropy_coeff"],
        )  # fmt: skip
        return total, {**parts, "mean_weight": masked_mean(weights, valid)}

    return loss
