"""Losses of a policy and its values: policy gradient, PPO, and imitation of successful actions.

Every mean is over the rows that are transitions; the contents of other rows have no effect.

Sources: Schulman et al. 2017, https://arxiv.org/abs/1707.06347; Wang et al. 2018, Exponentially
Weighted Imitation Learning for Batched Historical Data, NeurIPS.
"""

from __future__ import annotations

from aiorl.learning.lazy import tf
from aiorl.learning.losses import masked_mean


def masked_normalise(x: tf.Tensor, valid: tf.Tensor, *, epsilon: float = 1e-8) -> tf.Tensor:
    """Shift and scale `x` to mean 0 and standard deviation 1 over the valid rows; other rows become
    0.

    Args:
        x: float32, any shape.
        valid: float32 of the same shape, 1 or 0; or weights of the rows in the mean and the
            deviation, by which the result is also multiplied.
        epsilon: added to the standard deviation, so that equal numbers give 0 and not NaN.

    Returns:
        float32, the same shape.
    """
    centred = x - masked_mean(x, valid)
    deviation = tf.sqrt(masked_mean(tf.square(centred), valid))
    return centred * valid / (deviation + epsilon)


def explained_variance(targets: tf.Tensor, predictions: tf.Tensor, valid: tf.Tensor) -> tf.Tensor:
    """Return the share of the variance of `targets` that `predictions` explain: 1 perfect, 0 as
    good as the mean.

    Values below -1 become -1, so that one early batch doesn't spoil a plot. Shapes as in
    `masked_mean`.
    """
    residual = (targets - predictions) * valid
    residual_variance = masked_mean(tf.square(residual - masked_mean(residual, valid)), valid)
    centred = (targets - masked_mean(targets, valid)) * valid
    variance = masked_mean(tf.square(centred), valid)
    return tf.maximum(1.0 - residual_variance / tf.maximum(variance, 1e-8), -1.0)


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
    """Return ``policy_loss + vf_loss_coeff E[errors] - entropy_coeff E[H]`` over the valid rows,
    and its parts.

    Args:
        policy_loss: scalar.
        values: float32 of any shape, current predictions.
        targets: the same shape, value targets.
        entropies: the same shape, entropies of the policy.
        valid: the same shape, 1 where a row is a transition, else 0.
        vf_loss_coeff: scalar, weight of the values' errors.
        entropy_coeff: scalar, weight of the entropy, per nat.
        errors: the same shape, errors of the values; None = squared errors.

    Returns:
        The loss, and its parts policy_loss, vf_loss, entropy and vf_explained_var; all are scalars.
    """
    if errors is None:
        errors = tf.square(values - targets)
    vf_loss = masked_mean(errors, valid)
    entropy = masked_mean(entropies, valid)
    total = policy_loss + vf_loss_coeff * vf_loss - entropy_coeff * entropy
    return total, {
        "policy_loss": policy_loss,
        "vf_loss": vf_loss,
        "entropy": entropy,
        "vf_explained_var": explained_variance(targets, values, valid),
    }


def clipped_surrogate(
    log_ratio: tf.Tensor, advantages: tf.Tensor, *, clip_param: tf.Tensor | float
) -> tf.Tensor:
    """Return PPO's objective, to maximise: the smaller of the plain and the clipped
    importance-weighted advantage.

    Args:
        log_ratio: float32 of any shape, log of target over behaviour probability of the action
            taken.
        advantages: float32, the same shape.
        clip_param: the ratio counts only within 1 - clip_param to 1 + clip_param where going
            further would gain.

    Returns:
        float32, the same shape. At ratio 1 it is the advantage, and its gradient is the plain
        policy gradient.

    Source: Schulman et al. 2017, eq. 7.
    """
    ratio = tf.exp(log_ratio)
    clipped = tf.clip_by_value(ratio, 1.0 - clip_param, 1.0 + clip_param)
    return tf.minimum(ratio * advantages, clipped * advantages)


def clipped_value_loss(
    values: tf.Tensor,
    value_targets: tf.Tensor,
    behaviour_values: tf.Tensor,
    *,
    clip_param: tf.Tensor | float,
) -> tf.Tensor:
    """Return the larger of the plain and the clipped squared error: no gain from moving further
    than `clip_param`.

    Args:
        values: float32 of any shape, current predictions.
        value_targets: float32, the same shape.
        behaviour_values: float32, the same shape: values when the batch was sampled.
        clip_param: largest move from the behaviour value that still lowers the loss, in units of
            return.

    Returns:
        float32, the same shape; the squared error if `clip_param` is infinite.
    """
    moved = tf.clip_by_value(values - behaviour_values, -clip_param, clip_param)
    return tf.maximum(
        tf.square(values - value_targets), tf.square(behaviour_values + moved - value_targets)
    )


def approximate_kl(log_ratio: tf.Tensor) -> tf.Tensor:
    """Return an unbiased estimate of the divergence of the target from the behaviour policy, from
    the actions taken.

    It is ``(ratio - 1) - log ratio``: never negative, and with less variance than ``-log ratio``.

    Args:
        log_ratio: float32 of any shape, log of target over behaviour probability.

    Returns:
        float32, the same shape, nats.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html (k3).
    """
    return tf.exp(log_ratio) - 1.0 - log_ratio


def ppo_loss(
    log_ratio: tf.Tensor,
    advantages: tf.Tensor,
    kls: tf.Tensor,
    values: tf.Tensor,
    targets: tf.Tensor,
    entropies: tf.Tensor,
    valid: tf.Tensor,
    *,
    clip_param: tf.Tensor | float,
    vf_loss_coeff: tf.Tensor | float,
    entropy_coeff: tf.Tensor | float,
    kl_coeff: tf.Tensor | float | None = None,
    errors: tf.Tensor | None = None,
) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """Return PPO's loss: the negated clipped surrogate, the values' errors, the entropy and
    optionally a KL penalty.

    Args:
        log_ratio: float32 of any shape, log of new over old probability of the action taken; 0 in
            invalid rows.
        advantages: the same shape.
        kls: the same shape, divergence of the new from the old policy, nats.
        values: the same shape, current predictions.
        targets: the same shape, value targets.
        entropies: the same shape, entropies of the new policy.
        valid: the same shape, 1 where a row is a transition, else 0.
        clip_param: see `clipped_surrogate`.
        vf_loss_coeff: weight of the values' errors.
        entropy_coeff: weight of the entropy, per nat.
        kl_coeff: weight of the divergence; None = it is only reported.
        errors: the same shape, errors of the values; None = squared errors.

    Returns:
        The loss, the parts from `actor_critic_loss`, kl and clip_fraction; all are scalars.

    Source: Schulman et al. 2017, eq. 8 and 9.
    """
    policy_loss = -masked_mean(
        clipped_surrogate(log_ratio, advantages, clip_param=clip_param), valid
    )
    total, parts = actor_critic_loss(
        policy_loss,
        values,
        targets,
        entropies=entropies,
        valid=valid,
        vf_loss_coeff=vf_loss_coeff,
        entropy_coeff=entropy_coeff,
        errors=errors,
    )
    kl = masked_mean(kls, valid)
    if kl_coeff is not None:
        total += kl_coeff * kl
    clipped = tf.cast(tf.abs(tf.exp(log_ratio) - 1.0) > clip_param, tf.float32)
    return total, {**parts, "kl": kl, "clip_fraction": masked_mean(clipped, valid)}


def imitation_weights(
    advantages: tf.Tensor, *, scale: tf.Tensor | float, beta: tf.Tensor | float, max_weight: float
) -> tf.Tensor:
    """Return the weight of each stored action: ``min(exp(beta A / scale), max_weight)``.

    Args:
        advantages: float32 of any shape, return minus the value of the observation.
        scale: typical size of an advantage, such as the root of its mean square.
        beta: strength of the preference for better actions; 0 gives 1 everywhere, as in behaviour
            cloning.
        max_weight: maximum weight.

    Returns:
        float32, the same shape; no gradient flows through it.

    Source: Wang et al. 2018, algorithm 1, with the upper bound of common implementations.
    """
    exponent = tf.minimum(beta * advantages / tf.maximum(scale, 1e-8), tf.math.log(max_weight))
    return tf.stop_gradient(tf.exp(exponent))
