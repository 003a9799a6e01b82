"""Losses and returns as pure functions of tensors: no state, no config, no model.

Shapes: B rows; sequences are time-major ``[T, B, ...]``. Every mean is over valid rows only. Each
function works within one ``tf.function(jit_compile=True)`` with static shapes, and eagerly.
"""

from __future__ import annotations

from aiorl.learning.lazy import tf


def masked_mean(x: tf.Tensor, valid: tf.Tensor) -> tf.Tensor:
    """Return the mean of `x` over the rows where `valid` is 1; 0 if there are none.

    Args:
        x: float32, any shape.
        valid: float32 of the same shape, 1 where the row is a transition, else 0.

    Returns:
        float32 scalar.
    """
    return tf.reduce_sum(x * valid) / tf.maximum(tf.reduce_sum(valid), 1.0)
