"""What losses over V-trace have in common: a network over a minibatch of sequences, and the returns by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from aiorl.algorithms.compiled_update import Tensors
from aiorl.algorithms.recurrent import flattened, sequence_forward_with_last
from aiorl.algorithms.vtrace_config import VTraceConfig
from aiorl.data import columns as c
from aiorl.losses.masked import masked_mean
from aiorl.losses.vtrace import VTraceReturns, vtrace
from aiorl.models.distributions import to_tf_distribution

if TYPE_CHECKING:
    from aiorl.models.catalog import ActorCritic

__all__ = ["VTRACE_COEFFICIENTS", "VTRACE_METRICS", "Judgement", "judge", "vtrace_returns"]

VTRACE_COEFFICIENTS = ("gamma", "rho_bar", "rho_bar_pg")
VTRACE_METRICS = ("mean_rho", "clipped_rhos")


class Judgement(NamedTuple):
    """What a network says of sequences, T steps of M.

    Attributes:
        dist_inputs: [T * M, P] float32, inputs of the action distribution.
        logp: [T, M] float32, of the actions that were taken.
        values: [T, M] float32.
        last_values: [M] float32, of the observations behind the last step.
    """

    dist_inputs: tf.Tensor
    logp: tf.Tensor
    values: tf.Tensor
    last_values: tf.Tensor


def judge(model: ActorCritic, columns: Tensors, weights: Mapping[str, Any] | None = None) -> Judgement:
    """Run a network over time-major columns.

    Args:
        model: the network.
        columns: [T, M, ...] by name; those of sequences [M, ...].
        weights: tensors by name to be used in place of its own.
    """
    dist_inputs, values, last_values = sequence_forward_with_last(model, columns, weights)
    flat_inputs = flattened(dist_inputs)
    logp = to_tf_distribution(model.distribution).logp(flat_inputs, flattened(columns[c.ACTIONS]))
    return Judgement(flat_inputs, tf.reshape(logp, columns[c.VALID].shape), values, last_values)


def vtrace_returns(
    config: VTraceConfig, columns: Tensors, judged: Judgement, coefficients: Tensors
) -> tuple[VTraceReturns, Tensors]:
    """Value targets and advantages [T, M] without a gradient, and VTRACE_METRICS.

    Args:
        config: says whether ratios count, and whether advantages are normalised.
        columns: time-major, of what another policy sampled.
        judged: by the policy and the values that are to be learned from.
        coefficients: VTRACE_COEFFICIENTS are among them.
    """
    valid, rho_bar = columns[c.VALID], coefficients["rho_bar"]
    log_rhos = tf.where(valid > 0, judged.logp - columns[c.ACTION_LOGP], 0.0)
    returns = vtrace(
        tf.stop_gradient(judged.values),
        tf.stop_gradient(judged.last_values),
        columns.get(c.SCALED_REWARDS, columns[c.REWARDS]),
        columns[c.TERMINATEDS],
        columns[c.TRUNCATEDS],
        columns[c.BOOTSTRAP_VALUES],
        tf.stop_gradient(log_rhos) if config.vtrace else tf.zeros_like(log_rhos),
        gamma=coefficients["gamma"],
        lam=config.lambda_,
        rho_bar=rho_bar,
        rho_bar_pg=coefficients["rho_bar_pg"],
        valid=valid,
        normalize_advantages=config.normalize_advantages,
    )
    rhos = tf.exp(log_rhos)
    return returns, {
        "mean_rho": masked_mean(tf.minimum(rhos, rho_bar), valid),
        "clipped_rhos": masked_mean(tf.cast(rhos > rho_bar, tf.float32), valid),
    }
