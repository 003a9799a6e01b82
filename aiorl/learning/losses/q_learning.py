"""Q-learning: targets, errors and the components of DQN, with expected returns or return
distributions.

Sources: Mnih et al. 2015, Human-level control through deep reinforcement learning; van Hasselt et
al. 2016, https://arxiv.org/abs/1509.06461 (double); Wang et al. 2016,
https://arxiv.org/abs/1511.06581 (dueling); Bellemare et al. 2017, https://arxiv.org/abs/1707.06887
(distributions over fixed atoms, C51); Kapturowski et al. 2019,
https://openreview.net/forum?id=r1lyTjAqYX (rescaled returns, priorities of sequences).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aiorl.acting.distributions import MASKED_LOGIT
from aiorl.learning.lazy import tf

_SLOPE = 1e-3
"""Slope of the linear term of rescaled returns, which makes the function invertible."""


@dataclass(frozen=True)
class QHead:
    """Outputs of a network for each action, and the action value that they mean::

        QHead(num_quantiles, lambda quantiles: tf.reduce_mean(quantiles, axis=-1))

    Attributes:
        num_outputs: Z, outputs for each action.
        values: outputs [B, A, Z] -> action values [B, A], float32. It is part of the acting graph,
            so it must consist of operations that ONNX has.
    """

    num_outputs: int
    values: Callable[[tf.Tensor], tf.Tensor]


def legal_q(q: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    """Make the Q values of illegal actions so low that none is ever the largest, but finite, so
    that 0 times one is 0.

    Args:
        q: [..., A] float.
        mask: [..., A], 1 where the action is legal; None = all are.

    Returns:
        [..., A]. If no action is legal, all have the same value.
    """
    if mask is None:
        return q
    return tf.where(mask > 0, q, tf.constant(MASKED_LOGIT, q.dtype))


def best_legal(q: tf.Tensor, mask: tf.Tensor | None = None) -> tf.Tensor:
    """Return the index [...] int32 of the legal action with the largest Q value; the first of
    equals.

    Args:
        q: [..., A] float.
        mask: [..., A], 1 where the action is legal; None = all are.
    """
    return tf.argmax(legal_q(q, mask), axis=-1, output_type=tf.int32)


def has_legal(mask: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Return numbers [...] of a dtype: 1 where any action of a mask [..., A] is legal, else 0."""
    return tf.cast(tf.reduce_any(mask > 0, axis=-1), dtype)


def chosen(values: tf.Tensor, actions: tf.Tensor) -> tf.Tensor:
    """Return the entries of actions, selected with a mask because XLA on a CPU is slow at
    gathering.

    Args:
        values: [B, A, ...], such as Q values, or logits of atoms.
        actions: [B] int32, 0 to A - 1.

    Returns:
        [B, ...].
    """
    num_actions = values.shape[1]
    is_chosen = tf.one_hot(actions, num_actions, on_value=True, off_value=False, dtype=tf.bool)
    further_axes = [1] * (len(values.shape) - 2)
    is_chosen = tf.reshape(is_chosen, [-1, num_actions, *further_axes])
    return tf.reduce_sum(tf.where(is_chosen, values, tf.zeros((), values.dtype)), axis=1)


def dueling(
    values: tf.Tensor, advantages: tf.Tensor, mask: tf.Tensor | None = None, *, axis: int = -1
) -> tf.Tensor:
    """Return the Q values of a network with separate streams for the value and the advantages: ``V
    + A - mean A``.

    Args:
        values: [..., 1], or [..., 1, Z] with atoms.
        advantages: [..., A], or [..., A, Z].
        mask: [..., A], 1 where the action is legal; the mean is over legal actions. None = all are
            legal.
        axis: axis of the actions; -2 with atoms.

    Returns:
        Q values in the shape of the advantages.

    Source: Wang et al. 2016, eq. 9.
    """
    if mask is None:
        return values + advantages - tf.reduce_mean(advantages, axis=axis, keepdims=True)
    legal = tf.cast(mask > 0, advantages.dtype)
    if axis != -1:
        legal = legal[..., None]
    total = tf.reduce_sum(advantages * legal, axis=axis, keepdims=True)
    num_legal = tf.maximum(tf.reduce_sum(legal, axis=axis, keepdims=True), 1.0)
    return values + advantages - total / num_legal


def q_targets(
    rewards: tf.Tensor,
    discounts: tf.Tensor,
    next_q: tf.Tensor,
    *,
    next_q_online: tf.Tensor | None = None,
    mask: tf.Tensor | None = None,
    is_rescaled: bool = False,
) -> tf.Tensor:
    """Return the target of the Q value of the action taken: ``r + discount max_a Q'(s', a)``.

    Args:
        rewards: [B] float32, of one step, or the discounted sum of several.
        discounts: [B] float32, factor of the next value; 0 after a terminal state, where `next_q`
            and `mask` can then be anything finite.
        next_q: [B, A] float32, values by the target network.
        next_q_online: [B, A] float32, values by the online network, which then chooses the action
            (double DQN).
        mask: [B, A], 1 where the action was legal after the step; None = all are. If none was, as
            after a truncation, the next value is 0.
        is_rescaled: True if Q values are rescaled returns: ``h(r + discount h^-1(max_a Q'(s',
            a)))``, see `rescaled`.

    Returns:
        [B] float32; no gradient flows through it.

    Source: van Hasselt et al. 2016, eq. 4; Kapturowski et al. 2019, section 2.3.
    """
    online = next_q if next_q_online is None else next_q_online
    following = chosen(next_q, best_legal(online, mask))
    if mask is not None:
        following *= has_legal(mask, following.dtype)
    if is_rescaled:
        return tf.stop_gradient(rescaled(rewards + discounts * unrescaled(following)))
    return tf.stop_gradient(rewards + discounts * following)


def rescaled(returns: tf.Tensor) -> tf.Tensor:
    """Return ``h(x) = sign(x) (sqrt(|x| + 1) - 1) + x / 1000``, which compresses returns and keeps
    their order.

    Source: Pohlen et al. 2018, https://arxiv.org/abs/1805.11593, proposition A.2.
    """
    return tf.sign(returns) * (tf.sqrt(tf.abs(returns) + 1.0) - 1.0) + _SLOPE * returns


def unrescaled(values: tf.Tensor) -> tf.Tensor:
    """Return ``h^-1``, the inverse of `rescaled`, in a form that doesn't subtract almost equal
    numbers.
    """
    size = tf.abs(values) + (1.0 + _SLOPE)
    root = 2.0 * size / (tf.sqrt(1.0 + 4.0 * _SLOPE * size) + 1.0)
    return tf.sign(values) * (tf.square(root) - 1.0)


def sequence_priorities(errors: tf.Tensor, trained: tf.Tensor, eta: float) -> tf.Tensor:
    """Return the priorities of sequences: ``eta max |TD| + (1 - eta) mean |TD|`` over their trained
    steps.

    Args:
        errors: [T, B] float32, at least 0.
        trained: [T, B] float32, 1 where the step is trained on, else 0.
        eta: weight of the largest error.

    Returns:
        [B] float32; 0 for a sequence without trained steps.

    Source: Kapturowski et al. 2019, section 2.3.
    """
    counted = errors * trained
    means = tf.reduce_sum(counted, axis=0) / tf.maximum(tf.reduce_sum(trained, axis=0), 1.0)
    return eta * tf.reduce_max(counted, axis=0) + (1.0 - eta) * means


def huber(errors: tf.Tensor, *, delta: float = 1.0) -> tf.Tensor:
    """Return half the square of an error, continued linearly beyond `delta`: gradients are at most
    `delta`.

    Args:
        errors: float of any shape.
        delta: absolute error where the loss becomes linear; infinite = nowhere.

    Source: Huber 1964; Mnih et al. 2015 clip DQN's error in this way.
    """
    if delta == float("inf"):
        return 0.5 * tf.square(errors)
    size = tf.abs(errors)
    within = tf.minimum(size, delta)
    return within * (size - 0.5 * within)


def support(v_min: float, v_max: float, num_atoms: int) -> tf.Tensor:
    """Return the returns [Z] float32 of the atoms, evenly spaced from `v_min` to `v_max`."""
    return tf.linspace(tf.constant(v_min, tf.float32), tf.constant(v_max, tf.float32), num_atoms)


def expected_q(logits: tf.Tensor, atoms: tf.Tensor) -> tf.Tensor:
    """Return the Q values [..., A]: the means of distributions with logits [..., A, Z] over atoms
    [Z].
    """
    return tf.reduce_sum(tf.nn.softmax(logits) * atoms, axis=-1)


def project(
    rewards: tf.Tensor, discounts: tf.Tensor, probabilities: tf.Tensor, atoms: tf.Tensor
) -> tf.Tensor:
    """Project the distribution of ``r + discount G`` onto the atoms.

    Each atom's probability is divided between the two atoms on either side of its new return, in
    proportion to how near they are; returns beyond the ends go to the end atoms. It is a dense
    product with the hat function of each atom, without a scatter.

    Args:
        rewards: [B] float32.
        discounts: [B] float32; 0 after a terminal state, which leaves only the reward.
        probabilities: [B, Z] float32, distribution of G.
        atoms: [Z] float32, evenly spaced.

    Returns:
        [B, Z] float32, with the same row sums as `probabilities`.

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
    """Return the target distribution of the action taken.

    Args:
        rewards: [B] float32.
        discounts: [B] float32; 0 after a terminal state.
        next_logits: [B, A, Z] float32, by the target network, for the next observation.
        atoms: [Z] float32.
        next_logits_online: [B, A, Z], by the online network, which then chooses the action (double
            DQN).
        mask: [B, A], 1 where the action was legal after the step; None = all are. If none was, as
            after a truncation, the return after the step is 0.

    Returns:
        Probabilities [B, Z]; no gradient flows through them.
    """
    online = next_logits if next_logits_online is None else next_logits_online
    if mask is not None:
        discounts *= has_legal(mask, discounts.dtype)
    best = best_legal(expected_q(online, atoms), mask)
    probabilities = tf.nn.softmax(chosen(next_logits, best))
    return tf.stop_gradient(project(rewards, discounts, probabilities, atoms))


def cross_entropy(logits: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    """Return the loss of each row, nats.

    Args:
        logits: [B, Z], of the action taken, see `aiorl.learning.losses.q_learning.chosen`.
        targets: [B, Z], from `categorical_targets`.

    Returns:
        [B].
    """
    return -tf.reduce_sum(targets * tf.nn.log_softmax(logits), axis=-1)


def relative_entropy(logits: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    """Return the divergence KL(targets || prediction) [B], nats: the priority of a row, 0 if
    nothing is left to learn.

    It differs from `cross_entropy` by the entropy of the targets and has the same gradient.

    Source: Hessel et al. 2018, https://arxiv.org/abs/1710.02298.
    """
    entropy = -tf.reduce_sum(tf.math.xlogy(targets, targets), axis=-1)
    return tf.maximum(cross_entropy(logits, targets) - entropy, 0.0)
