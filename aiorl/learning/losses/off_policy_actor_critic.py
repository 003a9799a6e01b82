"""Losses of critics and of the policies that they judge: TD3, SAC, CQL and IQL.

DDPG (Lillicrap et al. 2016, https://arxiv.org/abs/1509.02971) is TD3 with one critic and noise 0.

In SAC, with temperature alpha, the value of a policy is its return plus alpha times its entropy.
For continuous actions, a and log pi are sampled from the policy, reparametrised
(`aiorl.learning.models.distributions.SquashedGaussian`); for discrete actions, expectations are
over all actions that are not masked out.

Sources: Fujimoto et al. 2018, https://arxiv.org/abs/1802.09477 (TD3); Haarnoja et al. 2018,
https://arxiv.org/abs/1812.05905, and Christodoulou 2019, https://arxiv.org/abs/1910.07207 (SAC);
Kumar et al. 2020, https://arxiv.org/abs/2006.04779 (CQL); Kostrikov et al. 2021,
https://arxiv.org/abs/2110.06169 (IQL).
"""

from __future__ import annotations

import math

from aiorl.acting.distributions import MASKED_LOGIT
from aiorl.learning.lazy import tf
from aiorl.learning.losses.q_learning import legal_q


def smoothed_actions(actions: tf.Tensor, noise: tf.Tensor, *, noise_clip: float) -> tf.Tensor:
    """Add clipped noise to the target policy's actions, so that the policy can't exploit narrow
    peaks of a critic.

    Args:
        actions: [B, D] float32 from -1 to 1, actions of the target policy.
        noise: [B, D] float32, usually normal with a standard deviation of 0.2.
        noise_clip: largest absolute value of the noise.

    Returns:
        [B, D] from -1 to 1; no gradient flows through them.

    Source: Fujimoto et al. 2018, eq. 14.
    """
    moved = actions + tf.clip_by_value(noise, -noise_clip, noise_clip)
    return tf.stop_gradient(tf.clip_by_value(moved, -1.0, 1.0))


def soft_values(q: tf.Tensor, logp: tf.Tensor, alpha: tf.Tensor | float) -> tf.Tensor:
    """Return the value [B] of the policy: ``min_i Q_i(s, a) - alpha log pi(a | s)``.

    Args:
        q: [C, B] float32, values by C critics of actions sampled from the current policy.
        logp: [B] float32, log-probabilities of these actions.
        alpha: temperature.

    Source: Haarnoja et al. 2018, eq. 3.
    """
    return tf.reduce_min(q, axis=0) - alpha * logp


def temperature_losses(
    log_alpha: tf.Tensor, entropy: tf.Tensor, target_entropy: tf.Tensor | float
) -> tf.Tensor:
    """Return losses [B] that raise the temperature where the policy's entropy is below its target,
    else lower it.

    The loss is ``log alpha (entropy - target)``, with the logarithm as in common implementations.
    Its gradient has the same sign as that of the papers' loss, which has alpha instead, and doesn't
    vanish as alpha becomes small.

    Args:
        log_alpha: scalar, trained by this loss.
        entropy: [B] float32, of the policy, or of single sampled actions; no gradient flows to it.
        target_entropy: nats, a number or [B]; usually minus the number of action dimensions, or a
            share of the logarithm of the number of legal actions.

    Source: Haarnoja et al. 2018, eq. 18; Christodoulou 2019, eq. 11.
    """
    return log_alpha * tf.stop_gradient(entropy - target_entropy)


def discrete_soft_values(
    q: tf.Tensor, logits: tf.Tensor, alpha: tf.Tensor | float, mask: tf.Tensor | None = None
) -> tf.Tensor:
    """Return the value [B] of a policy over discrete actions: ``sum_a pi(a) (min_i Q_i(a) - alpha
    log pi(a))``.

    Args:
        q: [C, B, A] float32, values by C critics.
        logits: [B, A] float32, logits of the policy.
        alpha: temperature.
        mask: [B, A], 1 where the action is legal; None = all are.

    Source: Christodoulou 2019, eq. 10.
    """
    log_p = tf.nn.log_softmax(_masked(logits, mask))
    gains = tf.reduce_min(q, axis=0) - alpha * log_p
    return tf.reduce_sum(_expected(tf.exp(log_p), gains, mask), axis=-1)


def discrete_entropy(logits: tf.Tensor, mask: tf.Tensor | None = None) -> tf.Tensor:
    """Return the entropy [B] in nats of a policy with logits [B, A] over its legal actions."""
    log_p = tf.nn.log_softmax(_masked(logits, mask))
    return -tf.reduce_sum(_expected(tf.exp(log_p), log_p, mask), axis=-1)


def _masked(logits: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    if mask is None:
        return logits
    return tf.where(mask > 0, logits, tf.constant(MASKED_LOGIT, logits.dtype))


def _expected(probabilities: tf.Tensor, gains: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    """Return the terms of an expectation; 0 for masked actions, whose gains can have any value."""
    if mask is None:
        return probabilities * gains
    return probabilities * tf.where(mask > 0, gains, tf.zeros((), gains.dtype))


def soft_maximum(q: tf.Tensor, mask: tf.Tensor | None = None) -> tf.Tensor:
    """Return ``log sum_a exp Q(s, a)`` over all legal actions, [C, B].

    Args:
        q: [C, B, A] float, values by C critics.
        mask: [B, A], 1 where the action is legal; None = all are.

    Source: Kumar et al. 2020, eq. 4.
    """
    return tf.reduce_logsumexp(legal_q(q, mask), axis=-1)


def sampled_soft_maximum(q: tf.Tensor, log_densities: tf.Tensor) -> tf.Tensor:
    """Estimate the logarithm of the integral of ``exp Q(s, a)`` over all actions, [C, B], by
    importance sampling.

    It is ``log (1/N sum_n exp Q(s, a_n) / density(a_n))``: an action counts more the less likely it
    was to be sampled.

    Args:
        q: [C, B, N] float, values by C critics of N actions for each observation, sampled from any
            distributions.
        log_densities: [B, N], log density with which each action was sampled; no gradient flows to
            it.

    Source: Kumar et al. 2020, appendix F, with a third of the actions sampled in each of three
        ways.
    """
    return tf.reduce_logsumexp(q - tf.stop_gradient(log_densities), axis=-1) - math.log(q.shape[-1])


def conservative_losses(
    gaps: tf.Tensor, weight: tf.Tensor | float, target_gap: float = 0.0
) -> tf.Tensor:
    """Return losses [B], summed over the critics, that lower Q values of other actions and raise
    those of stored ones.

    Args:
        gaps: [C, B] float, soft maximum minus the Q value of the stored action.
        weight: weight relative to half the squared TD errors; no gradient flows to it.
        target_gap: target of the gap, if the weight is learned.

    Source: Kumar et al. 2020, eq. 4; eq. 30 with a target.
    """
    return tf.reduce_sum(tf.stop_gradient(weight) * (gaps - target_gap), axis=0)


def multiplier_losses(log_weight: tf.Tensor, gaps: tf.Tensor, target_gap: float) -> tf.Tensor:
    """Return losses [B] that raise the weight where gaps are above their target, else lower it.

    Args:
        log_weight: scalar, trained by this loss.
        gaps: [C, B] float; no gradient flows to them.
        target_gap: target of the gaps.

    Source: Kumar et al. 2020, eq. 30: dual gradient descent, on the mean over the critics.
    """
    return -tf.exp(log_weight) * tf.stop_gradient(tf.reduce_mean(gaps, axis=0) - target_gap)


def expectile_losses(errors: tf.Tensor, expectile: float) -> tf.Tensor:
    """Return ``|tau - 1(u < 0)| u^2``: squares with weight tau for positive errors and 1 - tau for
    negative ones.

    The tau-expectile minimises this loss: tau = 0.5 gives the mean, tau near 1 almost the maximum.

    Args:
        errors: float of any shape, u = observed value minus predicted value.
        expectile: tau, between 0 and 1.

    Source: Kostrikov et al. 2021, eq. 3.
    """
    below = tf.constant(1.0 - expectile, errors.dtype)
    above = tf.constant(expectile, errors.dtype)
    return tf.where(errors < 0, below, above) * tf.square(errors)
