"""SAC's losses over one minibatch: of the critics, then of the actor, then of the temperature."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from aiorl.acting.distributions import Categorical, DiagGaussian
from aiorl.data import columns as c
from aiorl.learning.algorithms.actor_network import Actor
from aiorl.learning.algorithms.actor_replay import ACTOR_LR, COEFFICIENTS, CRITIC_METRICS, SEEDS, critic_loss_of
from aiorl.learning.algorithms.compiled_update import LossFunction, Phase, Tensors, UpdateSpec
from aiorl.learning.algorithms.critics import Critics
from aiorl.learning.algorithms.sac.config import SACConfig
from aiorl.learning.algorithms.target_network import TargetNetwork, following
from aiorl.learning.losses.q_learning import chosen
from aiorl.learning.losses.sac import (
    actor_losses,
    discrete_actor_losses,
    discrete_entropy,
    discrete_soft_values,
    discrete_temperature_losses,
    soft_targets,
    soft_values,
    temperature_losses,
)
from aiorl.learning.models.distributions import to_tf_distribution

__all__ = ["ALPHA_LR", "OF_CHOICES", "sac_spec"]

ALPHA_LR = "alpha_lr"
OF_CHOICES = "q_of_choices"
"""Over choices, name of what the critics' loss gives beside: the Q values [C, B, A] of all."""

_LOGP = "logp"
_LOGITS = "logits"
_MASK = "mask"


def sac_spec(
    config: SACConfig,
    actor: Actor,
    critics: Critics,
    target: TargetNetwork,
    log_alpha: Any,
    actor_optimizer: Any,
    alpha_optimizer: Any,
) -> UpdateSpec:
    """Return the update that SAC compiles.

    Args:
        config: what is switched on.
        actor: the network that acts.
        critics: that are trained by the loss itself.
        target: the target critics.
        log_alpha: variable, logarithm of the temperature.
        actor_optimizer: of the phase "actor".
        alpha_optimizer: of the phase "alpha".
    """
    choose = _discrete if isinstance(actor.distribution, Categorical) else _continuous
    critic_loss, actor_loss, alpha_loss = choose(config, actor, critics, target, log_alpha)
    return UpdateSpec(
        critic_loss,
        CRITIC_METRICS,
        (*COEFFICIENTS, ALPHA_LR),
        is_stacked=True,
        gives_rows=True,
        **following(target, tau=config.tau, every=config.target_update_freq),
        phases=(
            Phase("actor", actor_loss, ("entropy",), actor.trainable_variables, actor_optimizer, ACTOR_LR),
            Phase("alpha", alpha_loss, ("alpha",), [log_alpha], alpha_optimizer, ALPHA_LR),
        ),
    )


def _continuous(
    config: SACConfig, actor: Actor, critics: Critics, target: TargetNetwork, log_alpha: Any
) -> tuple[LossFunction, LossFunction, LossFunction]:
    distribution = to_tf_distribution(actor.distribution)
    assert isinstance(actor.distribution, DiagGaussian)
    target_entropy = -float(actor.distribution.size) if config.target_entropy == "auto" else config.target_entropy

    def drawn(obs: tf.Tensor, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        inputs, _ = actor.outputs(obs)
        actions, logp = distribution.sample_with_logp(inputs, seed)
        return critics.unit(actions), logp + critics.log_unit

    def critic_loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
        next_actions, next_logp = drawn(minibatch[c.NEW_OBS], minibatch[SEEDS][0])
        next_q = critics.q(minibatch[c.NEW_OBS], next_actions, weights=target.tensors())
        next_values = soft_values(next_q, next_logp, tf.exp(log_alpha) if config.entropy_backup else 0.0)
        q = critics.q(minibatch[c.OBS], critics.unit(minibatch[c.ACTIONS]))
        targets = soft_targets(minibatch[c.N_STEP_RETURNS], minibatch[c.DISCOUNTS], next_values)
        return critic_loss_of(minibatch, q, targets)

    def actor_loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
        actions, logp = drawn(minibatch[c.OBS], minibatch[SEEDS][1])
        losses = actor_losses(critics.q(minibatch[c.OBS], actions), logp, tf.exp(log_alpha))
        return tf.reduce_mean(losses), {"entropy": -tf.reduce_mean(logp), _LOGP: logp}

    def alpha_loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
        log_alpha_now = tf.convert_to_tensor(log_alpha)
        losses = temperature_losses(log_alpha_now, minibatch[_LOGP], target_entropy)
        return tf.reduce_mean(losses), {"alpha": tf.exp(log_alpha_now)}

    return critic_loss, actor_loss, alpha_loss


def _discrete(
    config: SACConfig, actor: Actor, critics: Critics, target: TargetNetwork, log_alpha: Any
) -> tuple[LossFunction, LossFunction, LossFunction]:
    assert isinstance(actor.distribution, Categorical)
    start, num_actions = actor.distribution.start, actor.distribution.num_inputs

    def critic_loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
        next_logits, mask = actor.outputs(minibatch[c.NEW_OBS])
        next_q = critics.q(minibatch[c.NEW_OBS], weights=target.tensors())
        alpha = tf.exp(log_alpha) if config.entropy_backup else 0.0
        next_values = discrete_soft_values(next_q, next_logits, alpha, mask)
        actions = minibatch[c.ACTIONS] - start
        values = critics.q(minibatch[c.OBS])
        q = tf.stack([chosen(own, actions) for own in tf.unstack(values)])
        targets = soft_targets(minibatch[c.N_STEP_RETURNS], minibatch[c.DISCOUNTS], next_values)
        loss, given = critic_loss_of(minibatch, q, targets)
        return loss, {**given, OF_CHOICES: values}

    def actor_loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
        logits, mask = actor.outputs(minibatch[c.OBS])
        losses = discrete_actor_losses(critics.q(minibatch[c.OBS]), logits, tf.exp(log_alpha), mask)
        given = {"entropy": tf.reduce_mean(discrete_entropy(logits, mask)), _LOGITS: logits}
        return tf.reduce_mean(losses), given if mask is None else {**given, _MASK: mask}

    def alpha_loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
        logits, mask = minibatch[_LOGITS], minibatch.get(_MASK)
        target_entropy: Any = config.target_entropy
        if target_entropy == "auto":
            legal = tf.fill(tf.shape(logits)[:1], float(num_actions))
            if mask is not None:
                legal = tf.maximum(tf.reduce_sum(tf.cast(mask > 0, tf.float32), axis=-1), 1.0)
            target_entropy = config.target_entropy_scale * tf.math.log(legal)
        log_alpha_now = tf.convert_to_tensor(log_alpha)
        losses = discrete_temperature_losses(log_alpha_now, logits, target_entropy, mask)
        return tf.reduce_mean(losses), {"alpha": tf.exp(log_alpha_now)}

    return critic_loss, actor_loss, alpha_loss
