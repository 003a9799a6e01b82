"""Q-learning with distributions of returns over fixed atoms (C51).

Source: Bellemare et al. 2017, https://arxiv.org/abs/1707.06887.
"""

from __future__ import annotations

import tensorflow as tf

from aiorl.learning.losses.q_learning import best_legal, chosen, has_legal

__all__ = ["categorical_targets", "cross_entropy", "expected_q", "project", "relative_entropy", "support"]


def support(v_min: float, v_max: float, num_atoms: int) -> tf.Tensor:
    """Returns [Z] float32 that the atoms stand for, from `v_min` to `v_max` at even distances."""
    return tf.linspace(tf.constant(v_min, tf.float32), tf.constant(v_max, tf.float32), num_atoms)


def expected_q(logits: tf.Tensor, atoms: tf.Tensor) -> tf.Tensor:
    """Q values [..., A]: the means of distributions with logits [..., A, Z] over atoms [Z]."""
    return tf.reduce_sum(tf.nn.softmax(logits) * atoms, axis=-1)


def project(rewards: tf.Tensor, discounts: tf.Tensor, probabilities: tf.Tensor, atoms: tf.Tensor) -> tf.Tensor:
    """Distribution of ``r + discount G`` put back onto the atoms.

    Each atom's probability goes to the two atoms that its return has come to lie between, to the nearer one the more;
    what lies beyond the ends goes to these. A dense product with the hat function of each atom, without a scatter.

    Args:
        rewards: [B] float32.
        discounts: [B] float32; 0 after a terminal state, which leaves the reward alone.
        probabilities: [B, Z] float32, of G.
        atoms: [Z] float32, at even distances.
    Returns: [B, Z] float32, rows of sum 1 as those given.
    Source: Bellemare et al. 2017, eq. 7 and algorithm 1.
    """
    step = atoms[1] - atoms[0]
    moved = tf.clip_by_value(rewards[:, None] + discounts[:, None] * atoms, atoms[0], atoms[-1])
    share = 1.0 - tf.abs(moved[:, None, :] - atoms[:, None]) / step
    return tf.reduce_sum(tf.maximum(share, 0.0) * probabilities[:, None, :], axis=-1)


def categorical_targets(
    rewards: tf.Tensor,
    discounts: tf.Tensor,
    next_logits: tf.Tensor,
    atoms: tf.Tensor,
    *,
    next_logits_online: tf.Tensor | None = None,
    mask: tf.Tensor | None = None,
) -> tf.Tensor:
    """What the distribution of the action taken should be.

    Args:
        rewards: [B] float32.
        discounts: [B] float32; 0 after a terminal state.
        next_logits: [B, A, Z] float32, by the target network, of the observation that followed.
        atoms: [Z] float32.
        next_logits_online: [B, A, Z], by the network that learns, which then chooses the action (double DQN).
        mask: [B, A], 1 where the action was legal after the step; None = all are. Where none was, as behind a
            truncation, what followed has the return 0.
    Returns: probabilities [B, Z]; no gradient flows through them.
    """
    by = next_logits if next_logits_online is None else next_logits_online
    if mask is not None:
        discounts *= has_legal(mask, discounts.dtype)
    best = chosen(next_logits, best_legal(expected_q(by, atoms), mask))
    return tf.stop_gradient(project(rewards, discounts, tf.nn.softmax(best), atoms))


def cross_entropy(logits: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    """Loss of each row, nats.

    Args:
        logits: [B, Z], of the action taken, see `aiorl.learning.losses.q_learning.chosen`.
        targets: [B, Z], of `categorical_targets`.
    Returns: [B].
    """
    return -tf.reduce_sum(targets * tf.nn.log_softmax(logits), axis=-1)


def relative_entropy(logits: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    """Divergence KL(targets || prediction) [B], nats: the priority of a row, 0 where nothing is left to learn.

    It differs from `cross_entropy`, whose gradient it has, by the entropy of the targets.

    Source: Hessel et al. 2018, https://arxiv.org/abs/1710.02298.
    """
    entropy = -tf.reduce_sum(tf.math.xlogy(targets, targets), axis=-1)
    return tf.maximum(cross_entropy(logits, targets) - entropy, 0.0)
