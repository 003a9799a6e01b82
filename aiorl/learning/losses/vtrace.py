"""V-trace: value targets and advantages from fragments that an older policy sampled.

``V'_t`` is the value after step t: 0 after a termination, the bootstrap value after a truncation,
the value of the final observation after the fragment's last step, and otherwise the value of the
next row. ``rho_t`` and ``c_t`` are the importance ratios clipped at ``rho_bar`` and ``c_bar``;
``g_t`` is 1 if the episode continues in the next row, else 0. Then:

    delta_t  = rho_t (r_t + gamma V'_t - V_t)
    vs_t     = V_t + delta_t + gamma lam c_t g_t (vs_{t+1} - V_{t+1})
    adv_t    = r_t + gamma q'_t - V_t
    pg_adv_t = rho_pg_t adv_t

where ``q'_t`` is ``V'_t`` with ``lam vs_{t+1} + (1 - lam) V_{t+1}`` in place of ``V_{t+1}``.

To normalise, ``adv`` is shifted and scaled to mean 0 and standard deviation 1 before it is
weighted, with ``rho_pg_t`` as the weight of a row: subtracting a mean from the products would move
rows that the policy would not have sampled.

On-policy (all ratios 1), ``vs`` and ``adv`` are the targets and advantages of GAE; with lam = 1,
those of n-step returns.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from aiorl.learning.lazy import tf
from aiorl.learning.losses.policy_gradient import masked_normalise


class VTraceReturns(NamedTuple):
    """V-trace targets, [T, B] float32, without gradients.

    Attributes:
        vs: targets of the values.
        advantages: advantages of the actions, unweighted; 0 where a row is not a transition.
        weights: clipped importance ratios of the policy gradient; 0 where a row is not a
            transition.
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
    """Return off-policy corrected value targets, and advantages with their weights for the policy
    gradient.

    Args:
        values: [T, B] float32, V_t by the online network.
        last_values: [B] float32, its value of the observation after the last row; not read if that
            row ended an episode or is invalid.
        rewards: [T, B] float32.
        terminateds: [T, B] float32, 1 where the episode ended in a terminal state.
        truncateds: [T, B] float32, 1 where the episode was truncated; a row that is both is
            terminated.
        bootstrap_values: [T, B] float32, value of the true final observation in truncated rows,
            anything elsewhere.
        log_rhos: [T, B] float32, log of target over behaviour probability of the action taken.
        gamma: discount per step, a scalar.
        lam: decay of the trace; 1 is V-trace as published.
        rho_bar: upper limit of the ratios in delta, a scalar; it determines the policy whose values are
            learned.
        rho_bar_pg: upper limit of the ratio in the policy gradient, a scalar.
        c_bar: upper limit of the trace's ratios, a scalar; it determines how fast values propagate back.
        valid: [T, B] float32, 0 where a row is not a transition: there, vs = V, the advantage is 0,
            and nothing passes through. None = all rows are transitions.

    Returns:
        Targets; no gradient flows through them.

    Source: Espeholt et al. 2018, https://arxiv.org/abs/1802.01561, eq. 1 and section 4.2; with lam
        below 1, the advantages of rlax (`vtrace_td_error_and_advantage`).
    """
    rhos = tf.exp(log_rhos)
    following = _following(
        values, last_values, terminateds, truncateds=truncateds, bootstrap=bootstrap_values
    )
    deltas = tf.minimum(rho_bar, rhos) * (rewards + gamma * following - values)
    continues = (1.0 - terminateds) * (1.0 - truncateds)
    decays = gamma * lam * tf.minimum(c_bar, rhos) * continues
    if valid is not None:
        deltas = tf.where(valid > 0, deltas, 0.0)
        decays *= valid
    vs = values + _discounted_sums(deltas, decays)
    mixed = lam * vs + (1.0 - lam) * values
    next_mixed = _following(
        mixed, last_values, terminateds, truncateds=truncateds, bootstrap=bootstrap_values
    )
    advantages = rewards + gamma * next_mixed - values
    weights = tf.minimum(rho_bar_pg, rhos)
    if valid is not None:
        weights *= valid
        advantages = tf.where(valid > 0, advantages, 0.0)
    return VTraceReturns(
        vs=tf.stop_gradient(vs),
        advantages=tf.stop_gradient(advantages),
        weights=tf.stop_gradient(weights),
    )


def pg_advantages(advantages: tf.Tensor, weights: tf.Tensor, *, normalize: bool) -> tf.Tensor:
    """Return the weighted advantages for the policy gradient, normalised first on request, as
    described above.

    Args:
        advantages: float32 of any shape.
        weights: the same shape; see `VTraceReturns`.
        normalize: True to scale them by their own mean and standard deviation.
    """
    if normalize:
        return masked_normalise(advantages, weights)
    return weights * advantages


def _following(
    values: tf.Tensor,
    last_values: tf.Tensor,
    terminateds: tf.Tensor,
    truncateds: tf.Tensor,
    bootstrap: tf.Tensor,
) -> tf.Tensor:
    """Return the value after each row, [T, B]."""
    shifted = tf.concat([values[1:], last_values[None]], axis=0)
    return tf.where(terminateds > 0, 0.0, tf.where(truncateds > 0, bootstrap, shifted))


def _discounted_sums(x: tf.Tensor, decays: tf.Tensor) -> tf.Tensor:
    """Return ``y_t = x_t + decays_t y_{t+1}`` along the first axis, with y = 0 after the end.

    Each of log2(T) rounds over whole arrays, which XLA fuses, doubles the reach of every row's sum;
    a loop over T would take several times as long.
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
    """Return log of ``min(mu / pi_target, max_ratio) pi / mu``, which is ``pi / max(pi_target, mu /
    max_ratio)``.

    It is the ratio to the target policy, except where the target policy has almost given up an
    action that was sampled. There the plain ratio would be huge, and so would its policy gradient.

    Args:
        logp: float32 of any shape, log-probability of the action taken, by the online policy (pi).
        target_logp: the same shape, by the target policy.
        behaviour_logp: the same shape, by the policy that sampled (mu).
        max_ratio: above 0; infinite = the plain ratio to the target policy.

    Returns:
        float32, the same shape. A gradient flows only through `logp`.

    Source: Luo et al. 2020, section 3; with its beta = 1 / max_ratio.
    """
    return logp - tf.stop_gradient(tf.maximum(target_logp, behaviour_logp - math.log(max_ratio)))
