"""PPO's loss over one minibatch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from aiorl.algorithms.batch_buffers import BatchBuffers
from aiorl.algorithms.compiled_update import LossFunction, Tensors, UpdateSpec
from aiorl.algorithms.ppo.config import PPOConfig
from aiorl.algorithms.recurrent import rows_forward
from aiorl.data import columns as c
from aiorl.losses.actor_critic import actor_critic_loss
from aiorl.losses.masked import masked_mean, masked_normalise
from aiorl.losses.ppo import approximate_kl, clipped_surrogate, clipped_value_loss
from aiorl.models.distributions import to_tf_distribution

if TYPE_CHECKING:
    from aiorl.models.catalog import ActorCritic

__all__ = ["ppo_spec"]

_METRICS = ("policy_loss", "vf_loss", "entropy", "kl", "clip_fraction", "vf_explained_var")
_COEFFICIENTS = ("lr", "vf_loss_coeff", "entropy_coeff", "kl_coeff", "kl_stop")


def ppo_spec(config: PPOConfig, model: ActorCritic, buffers: BatchBuffers) -> UpdateSpec:
    """Return the update that PPO compiles: its loss over rows, or over sequences if the model is recurrent."""
    stop = None if config.kl_stop is None else ("kl", "kl_stop")
    coefficients = (*_COEFFICIENTS, *config.clip_schedules())
    return UpdateSpec(_loss(config, model, buffers), _METRICS, coefficients, stop)


def _loss(config: PPOConfig, model: ActorCritic, buffers: BatchBuffers) -> LossFunction:
    distribution = to_tf_distribution(model.distribution)

    def loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
        dist_inputs, values, columns = rows_forward(model, minibatch, buffers)
        valid = columns[c.VALID]
        logp = distribution.logp(dist_inputs, columns[c.ACTIONS])
        log_ratio = tf.where(valid > 0, logp - columns[c.ACTION_LOGP], 0.0)
        advantages = columns[c.ADVANTAGES]
        if config.normalize_advantages:
            advantages = masked_normalise(advantages, valid)

        objective = clipped_surrogate(log_ratio, advantages, clip_param=coefficients["clip_param"])
        policy_loss = -masked_mean(objective, valid)
        targets = columns[c.VALUE_TARGETS]
        errors = None
        if config.clips_values:
            limit = coefficients["vf_clip_param"]
            errors = clipped_value_loss(values, targets, columns[c.VF_PREDS], clip_param=limit)
        total, parts = actor_critic_loss(
            policy_loss, values, targets, distribution.entropy(dist_inputs), valid,
            vf_loss_coeff=coefficients["vf_loss_coeff"], entropy_coeff=coefficients["entropy_coeff"], errors=errors,
        )  # fmt: skip
        if config.kl_coeff > 0:
            kl = masked_mean(distribution.kl(columns[c.ACTION_DIST_INPUTS], dist_inputs), valid)
            total += coefficients["kl_coeff"] * kl
        else:
            kl = masked_mean(approximate_kl(log_ratio), valid)
        clipped = tf.cast(tf.abs(tf.exp(log_ratio) - 1.0) > coefficients["clip_param"], tf.float32)
        return total, {
            **parts,
            "kl": kl,
            "clip_fraction": masked_mean(clipped, valid),
        }

    return loss
