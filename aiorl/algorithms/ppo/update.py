"""PPO's loss over one minibatch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from aiorl.algorithms.batch_buffers import BatchBuffers
from aiorl.algorithms.compiled_update import LossFunction, Tensors, UpdateSpec, unpacked
from aiorl.algorithms.ppo.config import PPOConfig
from aiorl.algorithms.recurrent import flattened, sequence_forward
from aiorl.data import columns as c
from aiorl.losses.masked import explained_variance, masked_mean, masked_normalise
from aiorl.losses.ppo import approximate_kl, clipped_surrogate, clipped_value_loss
from aiorl.models.distributions import to_tf_distribution

if TYPE_CHECKING:
    from aiorl.models.catalog import ActorCritic

__all__ = ["ppo_spec"]

_METRICS = ("policy_loss", "vf_loss", "entropy", "kl", "clip_fraction", "vf_explained_var")
_COEFFICIENTS = ("lr", "clip_param", "vf_loss_coeff", "entropy_coeff", "kl_coeff", "kl_stop")


def ppo_spec(config: PPOConfig, model: ActorCritic, buffers: BatchBuffers) -> UpdateSpec:
    """Return the update that PPO compiles: its loss over rows, or over sequences if the model is recurrent."""
    stop = None if config.kl_stop is None else ("kl", "kl_stop")
    return UpdateSpec(_loss(config, model, buffers), _METRICS, _COEFFICIENTS, stop)


def _loss(config: PPOConfig, model: ActorCritic, buffers: BatchBuffers) -> LossFunction:
    recurrent = model.is_recurrent
    distribution = to_tf_distribution(model.distribution)

    def loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
        columns = unpacked(minibatch, buffers, time_major=recurrent)
        if recurrent:
            dist_inputs, values = sequence_forward(model, columns)
            dist_inputs, values = flattened(dist_inputs), flattened(values)
            columns = {spec.name: flattened(columns[spec.name]) for spec in buffers.columns}
        else:
            dist_inputs, values = model.forward(columns[c.OBS])
        valid = columns[c.VALID]
        logp = distribution.logp(dist_inputs, columns[c.ACTIONS])
        log_ratio = tf.where(valid > 0, logp - columns[c.ACTION_LOGP], 0.0)
        advantages = columns[c.ADVANTAGES]
        if config.normalize_advantages:
            advantages = masked_normalise(advantages, valid)

        objective = clipped_surrogate(log_ratio, advantages, clip_param=coefficients["clip_param"])
        policy_loss = -masked_mean(objective, valid)
        targets = columns[c.VALUE_TARGETS]
        if config.vf_clip_param is None:
            errors = tf.square(values - targets)
        else:
            errors = clipped_value_loss(values, targets, columns[c.VF_PREDS], clip_param=config.vf_clip_param)
        vf_loss = masked_mean(errors, valid)
        entropy = masked_mean(distribution.entropy(dist_inputs), valid)
        total = policy_loss + coefficients["vf_loss_coeff"] * vf_loss - coefficients["entropy_coeff"] * entropy
        if config.kl_coeff > 0:
            kl = masked_mean(distribution.kl(columns[c.ACTION_DIST_INPUTS], dist_inputs), valid)
            total += coefficients["kl_coeff"] * kl
        else:
            kl = masked_mean(approximate_kl(log_ratio), valid)
        clipped = tf.cast(tf.abs(tf.exp(log_ratio) - 1.0) > coefficients["clip_param"], tf.float32)
        return total, {
            "policy_loss": policy_loss,
            "vf_loss": vf_loss,
            "entropy": entropy,
            "kl": kl,
            "clip_fraction": masked_mean(clipped, valid),
            "vf_explained_var": explained_variance(targets, values, valid),
        }

    return loss
