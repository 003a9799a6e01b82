"""Losses of critics and of the policies that they judge: TD3, SAC, CQL and IQL.

For TD3 with one critic and noise 0, read DDPG (Lillicrap et al. 2016, https://arxiv.org/abs/1509.02971).

In SAC, with alpha the temperature, a policy is worth its return and alpha times its entropy. For continuous actions, a
and log pi are drawn by the policy, reparametrised (`aiorl.learning.models.distributions.SquashedGaussian`); for
discrete ones, expectations are taken over all actions, those that are masked out left out.

Sources: Fujimoto et al. 2018, https://arxiv.org/abs/1802.09477 (TD3); Haarnoja et al. 2018,
https://arxiv.org/abs/1812.05905, and Christodoulou 2019, https://arxiv.org/abs/1910.07207 (SAC); Kumar et al. 2020,
https://arxiv.org/abs/2006.04779 (CQL); Kostrikov et al. 2021, https://arxiv.org/abs/2110.06169 (IQL).
"""

from __future__ import annotations

import math

from aiorl.acting.distributions import MASKED_LOGIT
from aiorl.learning.lazy import tf
from aiorl.learning.losses.q_learning import legal_q


def smoothed_actions(actions: tf.Tensor, noise: tf.Tensor, *, noise_clip: float) -> tf.Tensor:
    """Actions of the target policy with clipped noise, so that narrow peaks of a critic can't be exploited.

    Args:
        actions: [B, D] float32 from -1 to 1, by the target policy.
        noise: [B, D] float32, usually normal with a deviation of 0.2.
        noise_clip: most that the noise may be either way.
    Returns: [B, D] from -1 to 1; no gradient flows through them.
    Source: Fujimoto et al. 2018, eq. 14.
    """
    moved = actions + tf.clip_by_value(noise, -noise_clip, noise_clip)
    return tf.stop_gradient(tf.clip_by_value(moved, -1.0, 1.0))


def soft_values(q: tf.Tensor, logp: tf.Tensor, alpha: tf.Tensor | float) -> tf.Tensor:
    """Value [B] of the policy: ``min_i Q_i(s, a) - alpha log pi(a | s)``.

    Args:
        q: [C, B] float32, by C critics, of actions that the policy draws now.
        logp: [B] float32, their log-probabilities.
        alpha: temperature.
    Source: Haarnoja et al. 2018, eq. 3.
    """
    return tf.reduce_min(q, axis=0) - alpha * logp


def temperature_losses(log_alpha: tf.Tensor, entropy: tf.Tensor, target_entropy: tf.Tensor | float) -> tf.Tensor:
    """Losses [B] that raise the temperature where the policy's entropy is below its target, and else lower it.

    ``log alpha (entropy - target)``, of the logarithm, as implementations have it: of the same sign as the gradient of
    the papers' loss, which has alpha there, and it doesn't fade as alpha becomes small.

    Args:
        log_alpha: scalar, trained by this.
        entropy: [B] float32, of the policy, or of single actions that it draws; no gradient flows to it.
        target_entropy: nats, a number or [B]; usually minus the number of action dimensions, or a share of the
            logarithm of how many actions are legal.
    Source: Haarnoja et al. 2018, eq. 18; Christodoulou 2019, eq. 11.
    """
    return log_alpha * tf.stop_gradient(entropy - target_entropy)


def discrete_soft_values(
    q: tf.Tensor, logits: tf.Tensor, alpha: tf.Tensor | float, mask: tf.Tensor | None = None
) -> tf.Tensor:
    """Value [B] of a policy over discrete actions: ``sum_a pi(a) (min_i Q_i(a) - alpha log pi(a))``.

    Args:
        q: [C, B, A] float32, by C critics.
        logits: [B, A] float32, of the policy.
        alpha: temperature.
        mask: [B, A], 1 where the action is legal; None = all are.
    Source: Christodoulou 2019, eq. 10.
    """
    log_p = tf.nn.log_softmax(_masked(logits, mask))
    gains = tf.reduce_min(q, axis=0) - alpha * log_p
    return tf.reduce_sum(_expected(tf.exp(log_p), gains, mask), axis=-1)


def discrete_entropy(logits: tf.Tensor, mask: tf.Tensor | None = None) -> tf.Tensor:
    """Entropy [B] of a policy with logits [B, A] over its legal actions, nats."""
    log_p = tf.nn.log_softmax(_masked(logits, mask))
    return -tf.reduce_sum(_expected(tf.exp(log_p), log_p, mask), axis=-1)


def _masked(logits: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    return logits if mask is None else tf.where(mask > 0, logits, tf.constant(MASKED_LOGIT, logits.dtype))


def _expected(probabilities: tf.Tensor, gains: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    """Terms of an expectation; 0 for actions that are masked out, whose gains are anything."""
    if mask is None:
        return probabilities * gains
    return probabilities * tf.where(mask > 0, gains, tf.zeros((), gains.dtype))


def soft_maximum(q: tf.Tensor, mask: tf.Tensor | None = None) -> tf.Tensor:
    """``log sum_a exp Q(s, a)`` over all legal actions, [C, B].

    Args:
        q: [C, B, A] float, by C critics.
        mask: [B, A], 1 where the action is legal; None = all are.
    Source: Kumar et al. 2020, eq. 4.
    """
    return tf.reduce_logsumexp(legal_q(q, mask), axis=-1)


def sampled_soft_maximum(q: tf.Tensor, log_densities: tf.Tensor) -> tf.Tensor:
    """An estimate [C, B] of ``log of the integral of exp Q(s, a) over all a``, by importance sampling.

    ``log (1/N sum_n exp Q(s, a_n) / density(a_n))``: each action stands for those that are drawn as seldom as it is.

    Args:
        q: [C, B, N] float, by C critics, of N actions for each observation, drawn by any distributions.
        log_densities: [B, N], logarithm of the density with which each of them was drawn; no gradient flows to it.
    Source: Kumar et al. 2020, appendix F, with a third of the actions drawn in each of three ways.
    """
    return tf.reduce_logsumexp(q - tf.stop_gradient(log_densities), axis=-1) - math.log(q.shape[-1])


def conservative_losses(gaps: tf.Tensor, weight: tf.Tensor | float, target_gap: float = 0.0) -> tf.Tensor:
    """Losses [B] that push Q values of any actions down and those of stored ones up, summed over the critics.

    Args:
        gaps: [C, B] float, soft maximum less the Q value of the stored action.
        weight: how much it counts beside half the squared TD errors; no gradient flows to it.
        target_gap: size of a gap that is right, where the weight is learned.
    Source: Kumar et al. 2020, eq. 4; eq. 30 with a target.
    """
    return tf.reduce_sum(tf.stop_gradient(weight) * (gaps - target_gap), axis=0)


def multiplier_losses(log_weight: tf.Tensor, gaps: tf.Tensor, target_gap: float) -> tf.Tensor:
    """Losses [B] that raise the weight where gaps are above their target, and else lower it.

    Args:
        log_weight: scalar, trained by this.
        gaps: [C, B] float; no gradient flows to them.
        target_gap: their target.
    Source: Kumar et al. 2020, eq. 30: dual gradient descent, of the mean over the critics.
    """
    return -tf.exp(log_weight) * tf.stop_gradient(tf.reduce_mean(gaps, axis=0) - target_gap)


def expectile_losses(errors: tf.Tensor, expectile: float) -> tf.Tensor:
    """``|tau - 1(u < 0)| u^2``: squares of which those above count tau, those below 1 - tau.

    What has the least such loss is the tau-expectile: 0.5 gives the mean, near 1 almost the maximum.

    Args:
        errors: float of any shape, u = what was found less the value.
        expectile: tau, between 0 and 1.
    Source: Kostrikov et al. 2021, eq. 3.
    """
    counts = tf.where(errors < 0, tf.constant(1.0 - expectile, errors.dtype), tf.constant(expectile, errors.dtype))
    return counts * tf.square(errors)


def imitation_weights(
    advantages: tf.Tensor, *, scale: tf.Tensor | float, beta: tf.Tensor | float, max_weight: float
) -> tf.Tensor:
    """How much each stored action counts: ``min(exp(beta A / scale), max_weight)``.

    Args:
        advantages: float32 of any shape, return less the value of the observation.
        scale: usual size of an advantage, such as the root of its mean square.
        beta: 0 gives 1 everywhere, as in behaviour cloning.
        max_weight: most that an action can count.
    Returns: float32, the same shape; no gradient flows through it.
    Source: Wang et al. 2018, algorithm 1, with the bound of common implementations.
    """
    exponent = tf.minimum(beta * advantages / tf.maximum(scale, 1e-8), tf.math.log(max_weight))
    return tf.stop_gradient(tf.exp(exponent))
