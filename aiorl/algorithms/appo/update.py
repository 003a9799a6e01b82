"""APPO's loss over one minibatch of sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from aiorl.algorithms.appo.config import APPOConfig
from aiorl.algorithms.batch_buffers import BatchBuffers
from aiorl.algorithms.compiled_update import LossFunction, Tensors, UpdateSpec, unpacked
from aiorl.algorithms.surrogate import surrogate_spec
from aiorl.algorithms.target_network import TargetNetwork
from aiorl.algorithms.vtrace_loss import VTRACE_COEFFICIENTS, VTRACE_METRICS, judge, vtrace_returns
from aiorl.data import columns as c
from aiorl.losses.impact import impact_log_ratio
from aiorl.losses.ppo import ppo_loss
from aiorl.models.distributions import to_tf_distribution

if TYPE_CHECKING:
    from aiorl.models.catalog import ActorCritic

__all__ = ["appo_spec"]


def appo_spec(config: APPOConfig, model: ActorCritic, buffers: BatchBuffers, target: TargetNetwork) -> UpdateSpec:
    """Return the update that APPO compiles."""
    loss = _loss(config, model, buffers, target)
    return surrogate_spec(config, loss, metrics=VTRACE_METRICS, coefficients=VTRACE_COEFFICIENTS)


def _loss(config: APPOConfig, model: ActorCritic, buffers: BatchBuffers, target: TargetNetwork) -> LossFunction:
    distribution = to_tf_distribution(model.distribution)

    def loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
        columns = unpacked(minibatch, buffers, time_major=True)
        valid = columns[c.VALID]
        now, old = judge(model, columns), judge(model, columns, target.tensors())
        returns, figures = vtrace_returns(config, columns, old, coefficients)
        log_ratio = impact_log_ratio(
            now.logp, old.logp, columns[c.ACTION_LOGP], max_ratio=config.target_worker_clipping
        )
        total, parts = ppo_loss(
            tf.where(valid > 0, log_ratio, 0.0),
            returns.pg_advantages,
            tf.reshape(distribution.kl(old.dist_inputs, now.dist_inputs), valid.shape),
            now.values,
            returns.vs,
            tf.reshape(distribution.entropy(now.dist_inputs), valid.shape),
            valid,
            clip_param=coefficients["clip_param"],
            vf_loss_coeff=coefficients["vf_loss_coeff"],
            entropy_coeff=coefficients["entropy_coeff"],
            kl_coeff=coefficients["kl_coeff"] if config.kl_coeff > 0 else None,
        )
        return total, {**parts, **figures}

    return loss
