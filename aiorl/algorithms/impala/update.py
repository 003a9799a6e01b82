"""IMPALA's loss over one minibatch of sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from aiorl.algorithms.batch_buffers import BatchBuffers
from aiorl.algorithms.compiled_update import LossFunction, Tensors, UpdateSpec, unpacked
from aiorl.algorithms.impala.config import IMPALAConfig
from aiorl.algorithms.vtrace_loss import VTRACE_COEFFICIENTS, VTRACE_METRICS, judge, vtrace_returns
from aiorl.data import columns as c
from aiorl.losses.actor_critic import actor_critic_loss
from aiorl.losses.masked import masked_mean
from aiorl.models.distributions import to_tf_distribution

if TYPE_CHECKING:
    from aiorl.models.catalog import ActorCritic

__all__ = ["impala_spec"]

_METRICS = ("policy_loss", "vf_loss", "entropy", *VTRACE_METRICS, "vf_explained_var")
_COEFFICIENTS = ("lr", *VTRACE_COEFFICIENTS, "vf_loss_coeff", "entropy_coeff")


def impala_spec(config: IMPALAConfig, model: ActorCritic, buffers: BatchBuffers) -> UpdateSpec:
    """Return the update that IMPALA compiles."""
    return UpdateSpec(_loss(config, model, buffers), _METRICS, _COEFFICIENTS)


def _loss(config: IMPALAConfig, model: ActorCritic, buffers: BatchBuffers) -> LossFunction:
    distribution = to_tf_distribution(model.distribution)

    def loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
        columns = unpacked(minibatch, buffers, time_major=True)
        valid = columns[c.VALID]
        now = judge(model, columns)
        returns, figures = vtrace_returns(config, columns, now, coefficients)
        policy_loss = -masked_mean(now.logp * returns.pg_advantages, valid)
        entropies = tf.reshape(distribution.entropy(now.dist_inputs), valid.shape)
        total, parts = actor_critic_loss(
            policy_loss, now.values, returns.vs, entropies, valid,
            vf_loss_coeff=coefficients["vf_loss_coeff"], entropy_coeff=coefficients["entropy_coeff"],
        )  # fmt: skip
        return total, {**parts, **figures}

    return loss
