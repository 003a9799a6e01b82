"""The ratio of IMPACT: how far a policy has moved from a target policy, on samples of a third one.

Source: Luo et al. 2020, https://arxiv.org/abs/1912.00167.
"""

from __future__ import annotations

import math

import tensorflow as tf

__all__ = ["impact_log_ratio"]


def impact_log_ratio(
    logp: tf.Tensor, target_logp: tf.Tensor, behaviour_logp: tf.Tensor, *, max_ratio: float = 2.0
) -> tf.Tensor:
    """Logarithm of ``min(mu / pi_target, max_ratio) pi / mu``, which is ``pi / max(pi_target, mu / max_ratio)``.

    The ratio to the target policy, but where that has all but given up an action which was sampled: there a ratio
    to it would be huge, and its policy gradient with it.

    Args:
        logp: float32 of any shape, log-probability of the action taken, by the policy that learns (pi).
        target_logp: the same shape, by the target policy.
        behaviour_logp: the same shape, by the policy that sampled (mu).
        max_ratio: above 0; infinite = the plain ratio to the target policy.
    Returns: float32, the same shape. A gradient flows through `logp` alone.
    Source: Luo et al. 2020, section 3; with its beta = 1 / max_ratio.
    """
    return logp - tf.stop_gradient(tf.maximum(target_logp, behaviour_logp - math.log(max_ratio)))
