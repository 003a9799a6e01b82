"""The parts that losses over V-trace share: a network over sequences, the returns by it, and metrics of ratios."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from aiorl.data import columns as c
from aiorl.learning.algorithms.compiled_update import Tensors
from aiorl.learning.algorithms.recurrent import flattened, sequence_forward_with_last
from aiorl.learning.algorithms.vtrace_config import VTraceConfig
from aiorl.learning.losses.masked import masked_mean
from aiorl.learning.losses.vtrace import VTraceReturns, vtrace
from aiorl.learning.models.distributions import to_tf_distribution

if TYPE_CHECKING:
    from aiorl.learning.models.catalog import ActorCritic

__all__ = ["VTRACE_COEFFICIENTS", "VTRACE_METRICS", "Judgement", "judge", "ratio_metrics", "vtrace_returns"]

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
) -> tuple[VTraceReturns, tf.Tensor]:
    """Targets without a gradient, and log importance ratios, 0 in rows that are no transitions; all [T, M].

    Args:
        config: says whether ratios count.
        columns: time-major, of what another policy sampled.
        judged: by the policy and the values that are to be learned from.
        coefficients: VTRACE_COEFFICIENTS are among them.
    """
    valid = columns[c.VALID]
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
        rho_bar=coefficients["rho_bar"],
        rho_bar_pg=coefficients["rho_bar_pg"],
        valid=valid,
    )
    return returns, log_rhos


def ratio_metrics(log_rhos: tf.Tensor, rho_bar: tf.Tensor, valid: tf.Tensor) -> Tensors:
    """VTRACE_METRICS of log importance ratios of any shape."""
    rhos = tf.exp(log_rhos)
    return {
        "mean_rho": masked_mean(tf.minimum(rhos, rho_bar), valid),
        "clipped_rhos": masked_mean(tf.cast(rhos > rho_bar, tf.float32), valid),
    }
