"""TD3's losses over one minibatch: of the critics, then of the actor when it is due."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from aiorl.data import columns as c
from aiorl.learning.algorithms.actor_network import Actor
from aiorl.learning.algorithms.actor_replay import ACTOR_LR, COEFFICIENTS, CRITIC_METRICS, SEEDS, critic_loss_of
from aiorl.learning.algorithms.compiled_update import Phase, Tensors, UpdateSpec
from aiorl.learning.algorithms.critics import Critics
from aiorl.learning.algorithms.target_network import TargetNetwork, following
from aiorl.learning.algorithms.td3.config import TD3Config
from aiorl.learning.losses.td3 import clipped_double_q_targets, deterministic_actor_losses, smoothed_actions

__all__ = ["td3_spec"]


def td3_spec(
    config: TD3Config,
    actor: Actor,
    critics: Critics,
    target_actor: TargetNetwork,
    target_critics: TargetNetwork,
    actor_optimizer: Any,
) -> UpdateSpec:
    """Return the update that TD3 compiles.

    Args:
        config: what is switched on.
        actor: the network that acts, without chance.
        critics: that are trained by the loss itself.
        target_actor: target network of the one.
        target_critics: target network of the others.
        actor_optimizer: of the phase "actor".
    """

    def critic_loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
        means, _ = actor.outputs(minibatch[c.NEW_OBS], weights=target_actor.tensors())
        next_actions = tf.tanh(means)
        if config.smooth_target_policy:
            noise = config.target_noise * tf.random.stateless_normal(tf.shape(means), minibatch[SEEDS][0])
            next_actions = smoothed_actions(next_actions, noise, noise_clip=config.target_noise_clip)
        next_q = critics.q(minibatch[c.NEW_OBS], next_actions, weights=target_critics.tensors())
        wanted = clipped_double_q_targets(minibatch[c.N_STEP_RETURNS], minibatch[c.DISCOUNTS], next_q)
        q = critics.q(minibatch[c.OBS], critics.unit(minibatch[c.ACTIONS]))
        return critic_loss_of(minibatch, q, wanted)

    def actor_loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
        means, _ = actor.outputs(minibatch[c.OBS])
        q = critics.q(minibatch[c.OBS], tf.tanh(means))
        return tf.reduce_mean(deterministic_actor_losses(q[0])), {}

    return UpdateSpec(
        critic_loss,
        CRITIC_METRICS,
        COEFFICIENTS,
        is_stacked=True,
        gives_rows=True,
        **following(target_critics, target_actor, tau=config.tau, every=config.target_update_freq),
        phases=(
            Phase(
                "actor", actor_loss, (), actor.trainable_variables, actor_optimizer, ACTOR_LR, every=config.policy_delay
            ),
        ),
    )
