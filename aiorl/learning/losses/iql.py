"""Implicit Q-learning: values between the mean and the largest Q value of stored actions.

What weighs the actions that are imitated is in `aiorl.learning.losses.marwil`.

Source: Kostrikov et al. 2021, https://arxiv.org/abs/2110.06169.
"""

from __future__ import annotations

import tensorflow as tf

__all__ = ["expectile_losses"]


def expectile_losses(errors: tf.Tensor, expectile: float) -> tf.Tensor:
    """``|tau - 1(u < 0)| u^2``: squares of which those above count tau, those below 1 - tau.

    What has the least such loss is the tau-expectile: 0.5 gives the mean, near 1 almost the maximum.

    Args:
        errors: float of any shape, u = what was found less the value.
        expectile: tau, between 0 and 1.
    Source: Kostrikov et al. 2021, eq. 3.
    """
    counts = tf.where(errors < 0, tf.constant(1.0 - expectile, errors.dtype), tf.constant(expectile, errors.dtype))
    return counts * tf.square(errors)
