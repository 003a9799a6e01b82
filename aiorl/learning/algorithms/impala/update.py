"""IMPALA's loss over one minibatch of sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from aiorl.data import columns as c
from aiorl.learning.algorithms.batch_buffers import BatchBuffers
from aiorl.learning.algorithms.compiled_update import LossFunction, Tensors, UpdateSpec, unpacked
from aiorl.learning.algorithms.impala.config import IMPALAConfig
from aiorl.learning.algorithms.vtrace_loss import (
    VTRACE_COEFFICIENTS,
    VTRACE_METRICS,
    judge,
    ratio_metrics,
    vtrace_returns,
)
from aiorl.learning.losses.actor_critic import actor_critic_loss
from aiorl.learning.losses.masked import masked_mean
from aiorl.learning.losses.ppo import approximate_kl
from aiorl.learning.losses.vtrace import pg_advantages
from aiorl.learning.models.distributions import to_tf_distribution

if TYPE_CHECKING:
    from aiorl.learning.models.catalog import ActorCritic

__all__ = ["impala_spec"]

_METRICS = ("policy_loss", "vf_loss", "entropy", "kl", *VTRACE_METRICS, "vf_explained_var")
_COEFFICIENTS = ("lr", *VTRACE_COEFFICIENTS, "vf_loss_coeff", "entropy_coeff", "kl_stop")
_MAX_LOG_RHO = 20.0  # a larger ratio would overflow the estimate of the divergence


def impala_spec(config: IMPALAConfig, model: ActorCritic, buffers: BatchBuffers) -> UpdateSpec:
    """Return the update that IMPALA compiles."""
    stop_when = None if config.kl_stop is None else ("kl", "kl_stop")
    return UpdateSpec(_loss(config, model, buffers), _METRICS, _COEFFICIENTS, stop_when)


def _loss(config: IMPALAConfig, model: ActorCritic, buffers: BatchBuffers) -> LossFunction:
    distribution = to_tf_distribution(model.distribution)

    def loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
        columns = unpacked(minibatch, buffers, time_major=True)
        valid = columns[c.VALID]
        now = judge(model, columns)
        returns, log_rhos = vtrace_returns(config, columns, now, coefficients)
        advantages = pg_advantages(returns.advantages, returns.weights, normalize=config.normalize_advantages)
        policy_loss = -masked_mean(now.logp * advantages, valid)
        entropies = tf.reshape(distribution.entropy(now.dist_inputs), valid.shape)
        total, parts = actor_critic_loss(
            policy_loss, now.values, returns.vs, entropies, valid,
            vf_loss_coeff=coefficients["vf_loss_coeff"], entropy_coeff=coefficients["entropy_coeff"],
        )  # fmt: skip
        kl = masked_mean(approximate_kl(tf.minimum(log_rhos, _MAX_LOG_RHO)), valid)
        return total, {**parts, "kl": kl, **ratio_metrics(log_rhos, coefficients["rho_bar"], valid)}

    return loss
