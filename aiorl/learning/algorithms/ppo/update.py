"""PPO's loss over one minibatch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from aiorl.data import columns as c
from aiorl.learning.algorithms.batch_buffers import BatchBuffers
from aiorl.learning.algorithms.compiled_update import LossFunction, Tensors, UpdateSpec
from aiorl.learning.algorithms.ppo.config import PPOConfig
from aiorl.learning.algorithms.recurrent import rows_forward
from aiorl.learning.algorithms.surrogate import surrogate_spec
from aiorl.learning.losses.masked import masked_normalise
from aiorl.learning.losses.ppo import approximate_kl, clipped_value_loss, ppo_loss
from aiorl.learning.models.distributions import to_tf_distribution

if TYPE_CHECKING:
    from aiorl.learning.models.catalog import ActorCritic

__all__ = ["ppo_spec"]


def ppo_spec(config: PPOConfig, model: ActorCritic, buffers: BatchBuffers) -> UpdateSpec:
    """Return the update that PPO compiles: its loss over rows, or over sequences if the model is recurrent."""
    return surrogate_spec(config, _loss(config, model, buffers))


def _loss(config: PPOConfig, model: ActorCritic, buffers: BatchBuffers) -> LossFunction:
    distribution = to_tf_distribution(model.distribution)
    has_penalty = config.kl_coeff > 0

    def loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
        dist_inputs, values, columns = rows_forward(model, minibatch, buffers)
        valid = columns[c.VALID]
        logp = distribution.logp(dist_inputs, columns[c.ACTIONS])
        log_ratio = tf.where(valid > 0, logp - columns[c.ACTION_LOGP], 0.0)
        advantages = columns[c.ADVANTAGES]
        if config.normalize_advantages:
            advantages = masked_normalise(advantages, valid)
        targets = columns[c.VALUE_TARGETS]
        errors = None
        if config.clips_values:
            limit = coefficients["vf_clip_param"]
            errors = clipped_value_loss(values, targets, columns[c.VF_PREDS], clip_param=limit)
        kls = distribution.kl(columns[c.ACTION_DIST_INPUTS], dist_inputs) if has_penalty else approximate_kl(log_ratio)
        return ppo_loss(
            log_ratio, advantages, kls, values, targets, distribution.entropy(dist_inputs), valid,
            clip_param=coefficients["clip_param"],
            vf_loss_coeff=coefficients["vf_loss_coeff"],
            entropy_coeff=coefficients["entropy_coeff"],
            kl_coeff=coefficients["kl_coeff"] if has_penalty else None,
            errors=errors,
        )  # fmt: skip

    return loss
