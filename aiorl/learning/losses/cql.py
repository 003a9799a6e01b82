"""Conservative Q-learning: how far Q values of any actions are above those of stored ones, and what that costs.

Source: Kumar et al. 2020, https://arxiv.org/abs/2006.04779.
"""

from __future__ import annotations

import math

import tensorflow as tf

from aiorl.learning.losses.q_learning import legal_q

__all__ = ["conservative_losses", "multiplier_losses", "sampled_soft_maximum", "soft_maximum"]


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
