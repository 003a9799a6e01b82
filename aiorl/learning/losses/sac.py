"""Soft actor-critic: targets and losses of critics, policy and temperature, for continuous and discrete actions.

With alpha the temperature, a policy is worth its return and alpha times its entropy. For continuous actions, a and
log pi are drawn by the policy, reparametrised (`aiorl.learning.models.distributions.SquashedGaussian`); for discrete
ones, expectations are taken over all actions, those that are masked out left out.

Sources: Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905; Christodoulou 2019,
https://arxiv.org/abs/1910.07207 (discrete).
"""

from __future__ import annotations

import tensorflow as tf

from aiorl.acting.distributions import MASKED_LOGIT

__all__ = [
    "actor_losses",
    "discrete_actor_losses",
    "discrete_entropy",
    "discrete_soft_values",
    "discrete_temperature_losses",
    "soft_targets",
    "soft_values",
    "temperature_losses",
]


def soft_values(q: tf.Tensor, logp: tf.Tensor, alpha: tf.Tensor | float) -> tf.Tensor:
    """Value [B] of the policy: ``min_i Q_i(s, a) - alpha log pi(a | s)``.

    Args:
        q: [C, B] float32, by C critics, of actions that the policy draws now.
        logp: [B] float32, their log-probabilities.
        alpha: temperature.
    Source: Haarnoja et al. 2018, eq. 3.
    """
    return tf.reduce_min(q, axis=0) - alpha * logp


def soft_targets(rewards: tf.Tensor, discounts: tf.Tensor, next_values: tf.Tensor) -> tf.Tensor:
    """What the Q values of all critics should be: ``r + discount V(s')``.

    Args:
        rewards: [B] float32.
        discounts: [B] float32; 0 after a terminal state.
        next_values: [B] float32, `soft_values` or `discrete_soft_values` by the target networks.
    Returns: [B] float32; no gradient flows through it. For `aiorl.learning.losses.td3.critic_losses`.
    """
    return tf.stop_gradient(rewards + discounts * next_values)


def actor_losses(q: tf.Tensor, logp: tf.Tensor, alpha: tf.Tensor | float) -> tf.Tensor:
    """Losses [B] of the policy: what it is worth, negated; the gradient flows through actions and log-probabilities.

    Args:
        q: [C, B] float32, by the critics, of reparametrised actions.
        logp: [B] float32, their log-probabilities.
        alpha: temperature; no gradient flows to it.
    Source: Haarnoja et al. 2018, eq. 7.
    """
    return -soft_values(q, logp, tf.stop_gradient(alpha))


def temperature_losses(log_alpha: tf.Tensor, logp: tf.Tensor, target_entropy: float) -> tf.Tensor:
    """Losses [B] that raise the temperature where the policy's entropy is below its target, and else lower it.

    ``-log alpha (log pi + target)``, of the logarithm, as implementations have it: of the same sign as the gradient of
    the paper's ``-alpha (log pi + target)``, and it doesn't fade as alpha becomes small.

    Args:
        log_alpha: scalar, trained by this.
        logp: [B] float32, log-probabilities of actions that the policy draws; no gradient flows to them.
        target_entropy: nats, usually minus the number of action dimensions.
    Source: Haarnoja et al. 2018, eq. 18.
    """
    return -log_alpha * tf.stop_gradient(logp + target_entropy)


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


def discrete_actor_losses(
    q: tf.Tensor, logits: tf.Tensor, alpha: tf.Tensor | float, mask: tf.Tensor | None = None
) -> tf.Tensor:
    """Losses [B] of a policy over discrete actions; the gradient flows to the logits alone.

    Args:
        q: [C, B, A] float32, by the critics.
        logits: [B, A] float32.
        alpha: temperature.
        mask: see `discrete_soft_values`.
    Source: Christodoulou 2019, eq. 12.
    """
    return -discrete_soft_values(tf.stop_gradient(q), logits, tf.stop_gradient(alpha), mask)


def discrete_entropy(logits: tf.Tensor, mask: tf.Tensor | None = None) -> tf.Tensor:
    """Entropy [B] of a policy with logits [B, A] over its legal actions, nats."""
    log_p = tf.nn.log_softmax(_masked(logits, mask))
    return -tf.reduce_sum(_expected(tf.exp(log_p), log_p, mask), axis=-1)


def discrete_temperature_losses(
    log_alpha: tf.Tensor, logits: tf.Tensor, target_entropy: tf.Tensor | float, mask: tf.Tensor | None = None
) -> tf.Tensor:
    """As `temperature_losses`, with the expectation over all actions: ``log alpha (entropy - target)``, [B].

    Args:
        log_alpha: scalar, trained by this.
        logits: [B, A] float32, of the policy; no gradient flows to them.
        target_entropy: nats, a number or [B]; usually a share of the logarithm of how many actions are legal.
        mask: see `discrete_soft_values`.
    Source: Christodoulou 2019, eq. 11.
    """
    return log_alpha * tf.stop_gradient(discrete_entropy(logits, mask) - target_entropy)


def _masked(logits: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    return logits if mask is None else tf.where(mask > 0, logits, tf.constant(MASKED_LOGIT, logits.dtype))


def _expected(probabilities: tf.Tensor, gains: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    """Terms of an expectation; 0 for actions that are masked out, whose gains are anything."""
    if mask is None:
        return probabilities * gains
    return probabilities * tf.where(mask > 0, gains, tf.zeros((), gains.dtype))
