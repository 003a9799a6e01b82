"""The terms of proximal policy optimisation, one number per row.

Source: Schulman et al. 2017, https://arxiv.org/abs/1707.06347.
"""

from __future__ import annotations

import tensorflow as tf

__all__ = ["approximate_kl", "clipped_surrogate", "clipped_value_loss"]


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
