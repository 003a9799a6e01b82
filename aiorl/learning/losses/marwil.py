"""Weights of imitation learning that prefers what turned out well.

Source: Wang et al. 2018, Exponentially Weighted Imitation Learning for Batched Historical Data, NeurIPS.
"""

from __future__ import annotations

import tensorflow as tf

__all__ = ["imitation_weights"]


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
