"""APPO's update: the target network judges the batch once, then minibatches of it are learned from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import tensorflow as tf

from aiorl.data import columns as c
from aiorl.learning.algorithms.appo.config import APPOConfig
from aiorl.learning.algorithms.batch_buffers import PACKED, BatchBuffers, ColumnSpec
from aiorl.learning.algorithms.compiled_update import LossFunction, Tensors, UpdateSpec, by_time, unpacked
from aiorl.learning.algorithms.recurrent import rows_forward
from aiorl.learning.algorithms.sizes import divisors
from aiorl.learning.algorithms.surrogate import surrogate_spec
from aiorl.learning.algorithms.target_network import TargetNetwork
from aiorl.learning.algorithms.vtrace_loss import (
    VTRACE_COEFFICIENTS,
    VTRACE_METRICS,
    judge,
    ratio_metrics,
    vtrace_returns,
)
from aiorl.learning.losses.impact import impact_log_ratio
from aiorl.learning.losses.ppo import ppo_loss
from aiorl.learning.losses.vtrace import pg_advantages
from aiorl.learning.models.distributions import to_tf_distribution

if TYPE_CHECKING:
    from aiorl.learning.models.catalog import ActorCritic

__all__ = ["appo_spec"]

_TARGET_LOGP, _LOG_RHOS, _WEIGHTS = "target_logp", "log_rhos", "weights"


def appo_spec(config: APPOConfig, model: ActorCritic, buffers: BatchBuffers, target: TargetNetwork) -> UpdateSpec:
    """Return the update that APPO compiles: over rows, or over sequences if the model is recurrent."""
    judged = (
        *(ColumnSpec(name) for name in (_TARGET_LOGP, _LOG_RHOS, _WEIGHTS, c.ADVANTAGES, c.VALUE_TARGETS)),
        ColumnSpec(c.ACTION_DIST_INPUTS, (model.distribution.num_inputs,)),
    )
    layout = BatchBuffers((*buffers.columns, *judged, *(buffers.of_sequences if model.is_recurrent else ())))
    loss = _loss(config, model, layout)
    spec = surrogate_spec(config, loss, metrics=VTRACE_METRICS, coefficients=VTRACE_COEFFICIENTS)
    return dataclasses.replace(spec, begin=_judging(config, model, buffers, layout, target))


def _judging(
    config: APPOConfig, model: ActorCritic, buffers: BatchBuffers, layout: BatchBuffers, target: TargetNetwork
) -> Callable[[Tensors, Tensors], Tensors]:
    """Judgement of a batch by the target network; it stands still during an update, so once is enough.

    Returns: makes a batch in `layout` of a batch of sequences in `buffers`: rows [S * T, ...], or sequences.
    """

    def judged(minibatch: Tensors, coefficients: Tensors, weights: Tensors) -> tf.Tensor:
        columns = unpacked(minibatch, buffers, time_major=True)
        old = judge(model, columns, weights)
        returns, log_rhos = vtrace_returns(config, columns, old, coefficients)
        scalars = tf.stack([old.logp, log_rhos, returns.weights, returns.advantages, returns.vs], axis=-1)
        inputs = tf.reshape(old.dist_inputs, [*old.logp.shape, -1])
        return by_time(tf.concat([scalars, inputs], axis=-1))

    def begin(batch: Tensors, coefficients: Tensors) -> Tensors:
        num_sequences, length = batch[PACKED].shape[:2]
        weights = target.tensors()
        # as many at a time as a minibatch has room for, however long they are: so it takes no more memory than that
        most = max(1, config.minibatch_steps() // length)
        size = max(divisor for divisor in divisors(num_sequences) if divisor <= most)
        parts = {name: tf.reshape(x, [-1, size, *x.shape[1:]]) for name, x in batch.items()}
        of_part = tf.autograph.experimental.do_not_convert(lambda part: judged(part, coefficients, weights))
        more = tf.map_fn(of_part, parts, fn_output_signature=tf.float32, parallel_iterations=1)
        packed = tf.concat([batch[PACKED], tf.reshape(more, [num_sequences, length, -1])], axis=-1)
        judged_batch = {**batch, PACKED: packed}
        if model.is_recurrent:
            return judged_batch
        names = [PACKED, *(spec.name for spec in layout.columns if not spec.is_packed)]
        return {name: tf.reshape(judged_batch[name], [-1, *judged_batch[name].shape[2:]]) for name in names}

    return begin


def _loss(config: APPOConfig, model: ActorCritic, layout: BatchBuffers) -> LossFunction:
    distribution = to_tf_distribution(model.distribution)

    def loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
        dist_inputs, values, columns = rows_forward(model, minibatch, layout)
        valid = columns[c.VALID]
        log_ratio = impact_log_ratio(
            distribution.logp(dist_inputs, columns[c.ACTIONS]), columns[_TARGET_LOGP], columns[c.ACTION_LOGP],
            max_ratio=config.target_worker_clipping,
        )  # fmt: skip
        total, parts = ppo_loss(
            tf.where(valid > 0, log_ratio, 0.0),
            pg_advantages(columns[c.ADVANTAGES], columns[_WEIGHTS], normalize=config.normalize_advantages),
            distribution.kl(columns[c.ACTION_DIST_INPUTS], dist_inputs),
            values,
            columns[c.VALUE_TARGETS],
            distribution.entropy(dist_inputs),
            valid,
            clip_param=coefficients["clip_param"],
            vf_loss_coeff=coefficients["vf_loss_coeff"],
            entropy_coeff=coefficients["entropy_coeff"],
            kl_coeff=coefficients["kl_coeff"] if config.kl_coeff > 0 else None,
        )
        return total, {**parts, **ratio_metrics(columns[_LOG_RHOS], coefficients["rho_bar"], valid)}

    return loss
