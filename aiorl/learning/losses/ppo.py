"""Proximal policy optimisation: its terms, one number per row, and its loss.

Source: Schulman et al. 2017, https://arxiv.org/abs/1707.06347.
"""

from __future__ import annotations

import tensorflow as tf

from aiorl.learning.losses.actor_critic import actor_critic_loss
from aiorl.learning.losses.masked import masked_mean

__all__ = ["approximate_kl", "clipped_surrogate", "clipped_value_loss", "ppo_loss"]


def clipped_surrogate(log_ratio: tf.Tensor, advantages: tf.Tensor, *, clip_param: tf.Tensor | float) -> tf.Tensor:
    """PPO's objective, to be maximised: the smaller of the plain and the clipped importance-weighted advantage.

    Args:
        log_ratio: float32 of any shape, log of target over behaviour probability of the action taken.
        advantages: float32, the same shape.
        clip_param: the ratio counts only within 1 - clip_param to 1 + clip_param where it would gain.
    Returns: float32, the same shape. At ratio 1 it is the advantage, and its gradient that of plain policy gradient.
    Source: Schulman et al. 2017, eq. 7.
    """
    ratio = tf.exp(log_ratio)
    clipped = tf.clip_by_value(ratio, 1.0 - clip_param, 1.0 + clip_param)
    return tf.minimum(ratio * advantages, clipped * advantages)


def clipped_value_loss(
    values: tf.Tensor, value_targets: tf.Tensor, behaviour_values: tf.Tensor, *, clip_param: tf.Tensor | float
) -> tf.Tensor:
    """Squared error of the values, the larger of plain and clipped: no gain from moving further than `clip_param`.

    Args:
        values: float32 of any shape, values as predicted now.
        value_targets: float32, the same shape.
        behaviour_values: float32, the same shape: values when the batch was sampled.
        clip_param: how far, in units of return, a value may profitably move from its behaviour value.
    Returns: float32, the same shape; with an infinite `clip_param` just the squared error.
    """
    moved = tf.clip_by_value(values - behaviour_values, -clip_param, clip_param)
    return tf.maximum(tf.square(values - value_targets), tf.square(behaviour_values + moved - value_targets))


def approximate_kl(log_ratio: tf.Tensor) -> tf.Tensor:
    """Divergence of the target from the behaviour policy, estimated without bias from the actions taken.

    ``(ratio - 1) - log ratio``: never negative, and of less variance than ``-log ratio``.

    Args:
        log_ratio: float32 of any shape, log of target over behaviour probability.
    Returns: float32, the same shape, nats.
    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html (k3).
    """
    return tf.exp(log_ratio) - 1.0 - log_ratio


def ppo_loss(
    log_ratio: tf.Tensor,
    advantages: tf.Tensor,
    kls: tf.Tensor,
    values: tf.Tensor,
    targets: tf.Tensor,
    entropies: tf.Tensor,
    valid: tf.Tensor,
    *,
    clip_param: tf.Tensor | float,
    vf_loss_coeff: tf.Tensor | float,
    entropy_coeff: tf.Tensor | float,
    kl_coeff: tf.Tensor | float | None = None,
    errors: tf.Tensor | None = None,
) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """The clipped surrogate, negated, with the values' errors, the entropy and perhaps a penalty on the divergence.

    Args:
        log_ratio: float32 of any shape, log of new over old probability of the action taken; 0 in invalid rows.
        advantages: the same shape.
        kls: the same shape, divergence of the new from the old policy, nats.
        values: the same shape, as predicted now.
        targets: the same shape, what they should be.
        entropies: the same shape, of the new policy.
        valid: the same shape, 1 where a row is a transition, else 0.
        clip_param: see `clipped_surrogate`.
        vf_loss_coeff: weight of the values' errors.
        entropy_coeff: weight of the entropy, per nat.
        kl_coeff: weight of the divergence; None = it is reported only.
        errors: the same shape, of the values; None = squared.
    Returns: scalars: the loss; and what `actor_critic_loss` reports, kl and clip_fraction.
    Source: Schulman et al. 2017, eq. 8 and 9.
    """
    policy_loss = -masked_mean(clipped_surrogate(log_ratio, advantages, clip_param=clip_param), valid)
    total, parts = actor_critic_loss(
        policy_loss, values, targets, entropies, valid,
        vf_loss_coeff=vf_loss_coeff, entropy_coeff=entropy_coeff, errors=errors,
    )  # fmt: skip
    kl = masked_mean(kls, valid)
    if kl_coeff is not None:
        total += kl_coeff * kl
    clipped = tf.cast(tf.abs(tf.exp(log_ratio) - 1.0) > clip_param, tf.float32)
    return total, {**parts, "kl": kl, "clip_fraction": masked_mean(clipped, valid)}
