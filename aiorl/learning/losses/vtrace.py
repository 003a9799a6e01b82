"""V-trace: value targets and advantages from fragments that an older policy sampled.

With ``V'_t`` the value of what followed step t (0 after a termination, the bootstrap value after a truncation, the
value of the observation behind the fragment's last step, else that of the next row), ``rho_t`` and ``c_t`` the
importance ratios cut at ``rho_bar`` and ``c_bar``, and ``g_t`` = 1 where the episode goes on in the next row, else 0:

    delta_t   = rho_t (r_t + gamma V'_t - V_t)
    vs_t      = V_t + delta_t + gamma lam c_t g_t (vs_{t+1} - V_{t+1})
    adv_t     = r_t + gamma q'_t - V_t,  q' as V', with lam vs_{t+1} + (1 - lam) V_{t+1} in place of V_{t+1}
    pg_adv_t  = rho_pg_t adv_t

Normalised, ``adv`` is shifted and scaled to mean 0 and deviation 1, each row counting ``rho_pg_t``, before it is
weighted: a mean that is taken off the products moves rows that the policy would not have sampled.

On-policy (all ratios 1), ``vs`` and ``adv`` are the targets and advantages of GAE; with lam = 1, n-step returns.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from aiorl.learning.lazy import tf
from aiorl.learning.losses.policy_gradient import masked_normalise


class VTraceReturns(NamedTuple):
    """Targets of V-trace, [T, B] float32 without a gradient.

    Attributes:
        vs: what the values should be.
        advantages: of the actions, not weighted; 0 where a row is no transition.
        weights: cut importance ratios of the policy gradient; 0 where a row is no transition.
    """

    vs: tf.Tensor
    advantages: tf.Tensor
    weights: tf.Tensor


def vtrace(
    values: tf.Tensor,
    last_values: tf.Tensor,
    rewards: tf.Tensor,
    terminateds: tf.Tensor,
    truncateds: tf.Tensor,
    bootstrap_values: tf.Tensor,
    log_rhos: tf.Tensor,
    *,
    gamma: float | tf.Tensor,
    lam: float = 1.0,
    rho_bar: float | tf.Tensor = 1.0,
    rho_bar_pg: float | tf.Tensor = 1.0,
    c_bar: float | tf.Tensor = 1.0,
    valid: tf.Tensor | None = None,
) -> VTraceReturns:
    """Off-policy corrected value targets, and advantages with their weights for the policy gradient.

    Args:
        values: [T, B] float32, V_t by the network that learns.
        last_values: [B] float32, its value of the observation after the last row; not read where that row ended
            an episode or is invalid.
        rewards: [T, B] float32.
        terminateds: [T, B] float32, 1 where the episode ended in a terminal state.
        truncateds: [T, B] float32, 1 where it was cut from outside; a row that is both is terminated.
        bootstrap_values: [T, B] float32, value of the true final observation at truncated rows, anything elsewhere.
        log_rhos: [T, B] float32, log of target over behaviour probability of the action taken.
        gamma: discount per step.
        lam: decay of the trace; 1 is V-trace as published.
        rho_bar: cut of the ratios in delta; the policy whose values are learned.
        rho_bar_pg: cut of the ratio of the policy gradient.
        c_bar: cut of the trace's ratios; how fast values spread back.
        valid: [T, B] float32, 0 where a row is no transition: vs = V and the advantage is 0 there, and nothing
            flows through it. None = all rows are transitions.
    Returns: targets; no gradient flows through them.
    Source: Espeholt et al. 2018, https://arxiv.org/abs/1802.01561, eq. 1 and section 4.2; with lam below 1, the
        advantages of rlax (`vtrace_td_error_and_advantage`).
    """
    rhos = tf.exp(log_rhos)
    following = _following(values, last_values, terminateds, truncateds, bootstrap_values)
    deltas = tf.minimum(rho_bar, rhos) * (rewards + gamma * following - values)
    goes_on = (1.0 - terminateds) * (1.0 - truncateds)
    decays = gamma * lam * tf.minimum(c_bar, rhos) * goes_on
    if valid is not None:
        deltas = tf.where(valid > 0, deltas, 0.0)
        decays *= valid
    vs = values + _discounted_sums(deltas, decays)
    mixed = lam * vs + (1.0 - lam) * values
    advantages = rewards + gamma * _following(mixed, last_values, terminateds, truncateds, bootstrap_values) - values
    weights = tf.minimum(rho_bar_pg, rhos)
    if valid is not None:
        weights, advantages = weights * valid, tf.where(valid > 0, advantages, 0.0)
    return VTraceReturns(*map(tf.stop_gradient, (vs, advantages, weights)))


def pg_advantages(advantages: tf.Tensor, weights: tf.Tensor, *, normalize: bool) -> tf.Tensor:
    """Advantages as the policy gradient takes them: weighted, and before that perhaps normalised as above.

    Args:
        advantages: float32 of any shape.
        weights: the same shape; see `VTraceReturns`.
        normalize: scale them by their own mean and deviation.
    """
    return masked_normalise(advantages, weights) if normalize else weights * advantages


def _following(
    values: tf.Tensor, last_values: tf.Tensor, terminateds: tf.Tensor, truncateds: tf.Tensor, bootstrap: tf.Tensor
) -> tf.Tensor:
    """Value of what followed each row, [T, B]."""
    shifted = tf.concat([values[1:], last_values[None]], axis=0)
    return tf.where(terminateds > 0, 0.0, tf.where(truncateds > 0, bootstrap, shifted))


def _discounted_sums(x: tf.Tensor, decays: tf.Tensor) -> tf.Tensor:
    """``y_t = x_t + decays_t y_{t+1}`` along the first axis, with y = 0 behind the end.

    Doubles the reach of every row's sum in each of log2(T) rounds over whole arrays, which XLA fuses; a loop over
    T costs several times as much.
    """
    length = int(x.shape[0])
    reach = 1
    while reach < length:
        tail = [[0, reach], *[[0, 0]] * (len(x.shape) - 1)]
        x = x + decays * tf.pad(x[reach:], tail)
        decays = decays * tf.pad(decays[reach:], tail)
        reach *= 2
    return x


def impact_log_ratio(
    logp: tf.Tensor, target_logp: tf.Tensor, behaviour_logp: tf.Tensor, *, max_ratio: float = 2.0
) -> tf.Tensor:
    """Logarithm of ``min(mu / pi_target, max_ratio) pi / mu``, which is ``pi / max(pi_target, mu / max_ratio)``.

    The ratio to the target policy, but where that has all but given up an action which was sampled: there a ratio
    to it would be huge, and its policy gradient with it.

    Args:
        logp: float32 of any shape, log-probability of the action taken, by the policy that learns (pi).
        target_logp: the same shape, by the target policy.
        behaviour_logp: the same shape, by the policy that sampled (mu).
        max_ratio: above 0; infinite = the plain ratio to the target policy.
    Returns: float32, the same shape. A gradient flows through `logp` alone.
    Source: Luo et al. 2020, section 3; with its beta = 1 / max_ratio.
    """
    return logp - tf.stop_gradient(tf.maximum(target_logp, behaviour_logp - math.log(max_ratio)))
