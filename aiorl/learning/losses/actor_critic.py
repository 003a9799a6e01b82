"""What losses of an actor and a critic are made of beside the policy's own part."""

from __future__ import annotations

import tensorflow as tf

from aiorl.learning.losses.masked import explained_variance, masked_mean

__all__ = ["actor_critic_loss"]


def actor_critic_loss(
    policy_loss: tf.Tensor,
    values: tf.Tensor,
    targets: tf.Tensor,
    entropies: tf.Tensor,
    valid: tf.Tensor,
    *,
    vf_loss_coeff: tf.Tensor | float,
    entropy_coeff: tf.Tensor | float,
    errors: tf.Tensor | None = None,
) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """``policy_loss + vf_loss_coeff E[errors] - entropy_coeff E[H]`` over the valid rows, and its parts.

    Args:
        policy_loss: scalar.
        values: float32 of any shape, as predicted now.
        targets: the same shape, what they should be.
        entropies: the same shape, of the policy.
        valid: the same shape, 1 where a row is a transition, else 0.
        vf_loss_coeff: weight of the values' errors.
        entropy_coeff: weight of the entropy, per nat.
        errors: the same shape, of the values; None = squared.
    Returns: scalars: the loss; and policy_loss, vf_loss, entropy and vf_explained_var.
    """
    vf_loss = masked_mean(tf.square(values - targets) if errors is None else errors, valid)
    entropy = masked_mean(entropies, valid)
    return policy_loss + vf_loss_coeff * vf_loss - entropy_coeff * entropy, {
        "policy_loss": policy_loss,
        "vf_loss": vf_loss,
        "entropy": entropy,
        "vf_explained_var": explained_variance(targets, values, valid),
    }
