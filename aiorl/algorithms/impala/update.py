"""IMPALA's loss over one minibatch of sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from aiorl.algorithms.batch_buffers import BatchBuffers
from aiorl.algorithms.compiled_update import LossFunction, Tensors, UpdateSpec, unpacked
from aiorl.algorithms.impala.config import IMPALAConfig
from aiorl.algorithms.recurrent import flattened, sequence_forward_with_last
from aiorl.data import columns as c
from aiorl.losses.actor_critic import actor_critic_loss
from aiorl.losses.masked import masked_mean, masked_normalise
from aiorl.losses.vtrace import vtrace
from aiorl.models.distributions import to_tf_distribution

if TYPE_CHECKING:
    from aiorl.models.catalog import ActorCritic

__all__ = ["impala_spec"]

_METRICS = ("policy_loss", "vf_loss", "entropy", "mean_rho", "clipped_rhos", "vf_explained_var")
_COEFFICIENTS = ("lr", "gamma", "rho_bar", "rho_bar_pg", "vf_loss_coeff", "entropy_coeff")


def impala_spec(config: IMPALAConfig, model: ActorCritic, buffers: BatchBuffers) -> UpdateSpec:
    """Return the update that IMPALA compiles."""
    return UpdateSpec(_loss(config, model, buffers), _METRICS, _COEFFICIENTS)


def _loss(config: IMPALAConfig, model: ActorCritic, buffers: BatchBuffers) -> LossFunction:
    distribution = to_tf_distribution(model.distribution)

    def loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
        columns = unpacked(minibatch, buffers, time_major=True)
        valid = columns[c.VALID]
        dist_inputs, values, last_values = sequence_forward_with_last(model, columns)
        flat_inputs = flattened(dist_inputs)
        logp = tf.reshape(distribution.logp(flat_inputs, flattened(columns[c.ACTIONS])), valid.shape)
        log_rhos = tf.where(valid > 0, logp - columns[c.ACTION_LOGP], 0.0)
        rho_bar = coefficients["rho_bar"]
        returns = vtrace(
            tf.stop_gradient(values),
            tf.stop_gradient(last_values),
            columns[c.REWARDS],
            columns[c.TERMINATEDS],
            columns[c.TRUNCATEDS],
            columns[c.BOOTSTRAP_VALUES],
            tf.stop_gradient(log_rhos) if config.vtrace else tf.zeros_like(log_rhos),
            gamma=coefficients["gamma"],
            lam=config.lambda_,
            rho_bar=rho_bar,
            rho_bar_pg=coefficients["rho_bar_pg"],
            valid=valid,
        )
        advantages = returns.pg_advantages
        if config.normalize_advantages:
            advantages = masked_normalise(advantages, valid)
        policy_loss = -masked_mean(logp * advantages, valid)
        entropies = tf.reshape(distribution.entropy(flat_inputs), valid.shape)
        total, parts = actor_critic_loss(
            policy_loss, values, returns.vs, entropies, valid,
            vf_loss_coeff=coefficients["vf_loss_coeff"], entropy_coeff=coefficients["entropy_coeff"],
        )  # fmt: skip
        rhos = tf.exp(log_rhos)
        return total, {
            **parts,
            "mean_rho": masked_mean(tf.minimum(rhos, rho_bar), valid),
            "clipped_rhos": masked_mean(tf.cast(rhos > rho_bar, tf.float32), valid),
        }

    return loss
