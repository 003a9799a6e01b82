"""Twin delayed deep deterministic policy gradient: targets of two critics, and the losses of critics and actor.

With one critic and noise 0 it is DDPG (Lillicrap et al. 2016, https://arxiv.org/abs/1509.02971).

Source: Fujimoto et al. 2018, https://arxiv.org/abs/1802.09477.
"""

from __future__ import annotations

import tensorflow as tf

__all__ = ["clipped_double_q_targets", "critic_losses", "deterministic_actor_losses", "smoothed_actions"]


def smoothed_actions(
    actions: tf.Tensor,
    noise: tf.Tensor,
    *,
    noise_clip: float,
    low: tf.Tensor | float = -1.0,
    high: tf.Tensor | float = 1.0,
) -> tf.Tensor:
    """Actions of the target policy with clipped noise, so that narrow peaks of a critic can't be exploited.

    Args:
        actions: [B, D] float32, by the target policy.
        noise: [B, D] float32, usually normal with a deviation of 0.2 of half the range.
        noise_clip: most that the noise may be either way.
        low: least action, a number or [D].
        high: largest action.
    Returns: [B, D] within the bounds; no gradient flows through them.
    Source: Fujimoto et al. 2018, eq. 14.
    """
    moved = actions + tf.clip_by_value(noise, -noise_clip, noise_clip)
    return tf.stop_gradient(tf.clip_by_value(moved, low, high))


def clipped_double_q_targets(rewards: tf.Tensor, discounts: tf.Tensor, next_q: tf.Tensor) -> tf.Tensor:
    """What the Q values of all critics should be: ``r + discount min_i Q'_i(s', a')``.

    Args:
        rewards: [B] float32.
        discounts: [B] float32; 0 after a terminal state.
        next_q: [C, B] float32, by the target networks of C critics.
    Returns: [B] float32; no gradient flows through it.
    Source: Fujimoto et al. 2018, eq. 10.
    """
    return tf.stop_gradient(rewards + discounts * tf.reduce_min(next_q, axis=0))


def critic_losses(q: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    """Squared errors [B] of Q values [C, B] against targets [B], summed over the critics."""
    return tf.reduce_sum(tf.square(q - targets), axis=0)


def deterministic_actor_losses(q: tf.Tensor) -> tf.Tensor:
    """Losses [B] of a policy whose actions the first critic values at q [B]: the gradient flows through the critic."""
    return -q
