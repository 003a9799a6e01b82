"""Means over the rows that are transitions; the others count nothing, whatever they hold."""

from __future__ import annotations

import tensorflow as tf

__all__ = ["explained_variance", "masked_mean", "masked_normalise"]


def masked_mean(x: tf.Tensor, valid: tf.Tensor) -> tf.Tensor:
    """Mean of `x` over the rows where `valid` is 1; 0 if there are none.

    Args:
        x: float32, any shape.
        valid: float32 of the same shape, 1 where the row is a transition, else 0.
    Returns: float32 scalar.
    """
    return tf.reduce_sum(x * valid) / tf.maximum(tf.reduce_sum(valid), 1.0)


def masked_normalise(x: tf.Tensor, valid: tf.Tensor, *, epsilon: float = 1e-8) -> tf.Tensor:
    """`x` shifted and scaled to mean 0 and standard deviation 1 over the valid rows; 0 at the others.

    Args:
        x: float32, any shape.
        valid: float32 of the same shape, 1 or 0; or weights, by which rows count in mean and deviation, and by which
            what is returned is multiplied.
        epsilon: added to the standard deviation, so that equal numbers give 0 and not NaN.
    """
    centred = x - masked_mean(x, valid)
    deviation = tf.sqrt(masked_mean(tf.square(centred), valid))
    return centred * valid / (deviation + epsilon)


def explained_variance(targets: tf.Tensor, predictions: tf.Tensor, valid: tf.Tensor) -> tf.Tensor:
    """Share of the variance of `targets` that `predictions` explain: 1 perfect, 0 as good as the mean, or less.

    Never below -1, so that one early batch doesn't spoil a plot. Shapes as in `masked_mean`.
    """
    residual = (targets - predictions) * valid
    residual_variance = masked_mean(tf.square(residual - masked_mean(residual, valid)), valid)
    centred = (targets - masked_mean(targets, valid)) * valid
    variance = masked_mean(tf.square(centred), valid)
    return tf.maximum(1.0 - residual_variance / tf.maximum(variance, 1e-8), -1.0)
