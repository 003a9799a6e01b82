"""Q-learning: targets, errors and the parts of DQN that change them.

Sources: Mnih et al. 2015, Human-level control through deep reinforcement learning; van Hasselt et al. 2016,
https://arxiv.org/abs/1509.06461 (double); Wang et al. 2016, https://arxiv.org/abs/1511.06581 (dueling).
"""

from __future__ import annotations

import tensorflow as tf

from aiorl.policy.distributions import MASKED_LOGIT

__all__ = ["best_legal", "chosen", "dueling", "huber", "legal_q", "q_targets", "td_errors", "weighted_mean"]


def legal_q(q: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    """Q values with those of illegal actions so low that none is ever the largest, but finite: 0 times it is 0.

    Args:
        q: [..., A] float.
        mask: [..., A], 1 where the action is legal; None = all are.
    Returns: [..., A]. Where no action is legal, all are as low as each other.
    """
    return q if mask is None else tf.where(mask > 0, q, tf.constant(MASKED_LOGIT, q.dtype))


def best_legal(q: tf.Tensor, mask: tf.Tensor | None = None) -> tf.Tensor:
    """Index [...] int32 of the legal action with the largest of the Q values [..., A], the first of several."""
    return tf.argmax(legal_q(q, mask), axis=-1, output_type=tf.int32)


def chosen(values: tf.Tensor, actions: tf.Tensor) -> tf.Tensor:
    """The entries of actions, by a mask: XLA on a CPU is slow at gathering and scattering.

    Args:
        values: [B, A, ...], such as Q values, or logits of atoms.
        actions: [B] int32, 0 to A - 1.
    Returns: [B, ...].
    """
    is_chosen = tf.one_hot(actions, values.shape[1], on_value=True, off_value=False, dtype=tf.bool)
    is_chosen = tf.reshape(is_chosen, [-1, values.shape[1], *[1] * (len(values.shape) - 2)])
    return tf.reduce_sum(tf.where(is_chosen, values, tf.zeros((), values.dtype)), axis=1)


def dueling(values: tf.Tensor, advantages: tf.Tensor, mask: tf.Tensor | None = None, *, axis: int = -1) -> tf.Tensor:
    """Q values of a network with a stream for the value and one for the advantages: ``V + A - mean A``.

    Args:
        values: [..., 1], or [..., 1, Z] with atoms.
        advantages: [..., A], or [..., A, Z].
        mask: [..., A], 1 where the action is legal: the mean is taken over these; None = over all.
        axis: that of the actions; -2 with atoms.
    Returns: of the advantages' shape.
    Source: Wang et al. 2016, eq. 9.
    """
    if mask is None:
        return values + advantages - tf.reduce_mean(advantages, axis=axis, keepdims=True)
    legal = tf.cast(mask > 0, advantages.dtype)
    legal = legal if axis == -1 else legal[..., None]
    mean = tf.reduce_sum(advantages * legal, axis=axis, keepdims=True)
    return values + advantages - mean / tf.maximum(tf.reduce_sum(legal, axis=axis, keepdims=True), 1.0)


def q_targets(
    rewards: tf.Tensor,
    discounts: tf.Tensor,
    next_q: tf.Tensor,
    *,
    next_q_online: tf.Tensor | None = None,
    mask: tf.Tensor | None = None,
) -> tf.Tensor:
    """What the Q value of the action taken should be: ``r + discount max_a Q'(s', a)``.

    Args:
        rewards: [B] float32, of one step or the discounted sum of several.
        discounts: [B] float32, of the value of what followed; 0 after a terminal state, where `next_q` and `mask` may
            then be anything finite.
        next_q: [B, A] float32, by the target network.
        next_q_online: [B, A] float32, by the network that learns, which then chooses the action (double DQN).
        mask: [B, A], 1 where the action was legal after the step; None = all are.
    Returns: [B] float32; no gradient flows through it.
    Source: van Hasselt et al. 2016, eq. 4.
    """
    best = best_legal(next_q if next_q_online is None else next_q_online, mask)
    return tf.stop_gradient(rewards + discounts * chosen(next_q, best))


def td_errors(q: tf.Tensor, actions: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    """``target - Q(s, a)`` [B] of Q values [B, A], actions [B] int32 and targets [B]."""
    return targets - chosen(q, actions)


def huber(errors: tf.Tensor, *, delta: float = 1.0) -> tf.Tensor:
    """Half the square of an error, but linear where it is larger than `delta`: gradients of at most `delta`.

    Args:
        errors: float of any shape.
        delta: where it becomes linear; infinite = nowhere.
    Source: Huber 1964; Mnih et al. 2015 clip the error of DQN so.
    """
    if delta == float("inf"):
        return 0.5 * tf.square(errors)
    size = tf.abs(errors)
    within = tf.minimum(size, delta)
    return within * (size - 0.5 * within)


def weighted_mean(losses: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Mean over the rows of losses [...] times importance weights [...]: small weights make small steps.

    Source: Schaul et al. 2016, https://arxiv.org/abs/1511.05952, section 3.4.
    """
    return tf.reduce_mean(losses * tf.stop_gradient(weights))
