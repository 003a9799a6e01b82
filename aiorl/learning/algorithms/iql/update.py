"""IQL's losses over one minibatch: of the critics, then of the values, then of the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from aiorl.acting.distributions import Categorical
from aiorl.data import columns as c
from aiorl.learning.algorithms.actor_replay import ACTOR_LR, COEFFICIENTS, CRITIC_METRICS, critic_loss_of
from aiorl.learning.algorithms.compiled_update import Phase, Tensors, UpdateSpec
from aiorl.learning.algorithms.critics import Critics
from aiorl.learning.algorithms.iql.config import IQLConfig
from aiorl.learning.algorithms.replay_algorithm import WEIGHTS
from aiorl.learning.algorithms.target_network import TargetNetwork, following
from aiorl.learning.losses.iql import expectile_losses
from aiorl.learning.losses.marwil import imitation_weights
from aiorl.learning.losses.q_learning import chosen, weighted_mean
from aiorl.learning.losses.sac import soft_targets
from aiorl.learning.models.distributions import to_tf_distribution

if TYPE_CHECKING:
    from aiorl.learning.models.catalog import ActorCritic

__all__ = ["iql_spec"]

_LEAST_Q = "least_q"
_VALUE_METRICS = ("mean_value",)
_POLICY_METRICS = ("entropy", "mean_weight")


def iql_spec(
    config: IQLConfig,
    model: ActorCritic,
    critics: Critics,
    target: TargetNetwork,
    value_optimizer: Any,
    policy_optimizer: Any,
) -> UpdateSpec:
    """Return the update that IQL compiles.

    Args:
        config: what is switched on.
        model: policy and values, in branches of their own.
        critics: that are trained by the loss itself.
        target: the target critics.
        value_optimizer: of the phase "value".
        policy_optimizer: of the phase "policy".
    """
    distribution = to_tf_distribution(model.distribution)
    start = model.distribution.start if isinstance(model.distribution, Categorical) else None

    def q_of_stored(minibatch: Tensors, weights: Tensors | None = None) -> tf.Tensor:
        if start is None:
            return critics.q(minibatch[c.OBS], critics.unit(minibatch[c.ACTIONS]), weights=weights)
        actions = minibatch[c.ACTIONS] - start
        return tf.stack([chosen(own, actions) for own in tf.unstack(critics.q(minibatch[c.OBS], weights=weights))])

    def critic_loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
        _, next_values = model.forward(minibatch[c.NEW_OBS])
        targets = soft_targets(minibatch[c.N_STEP_RETURNS], minibatch[c.DISCOUNTS], next_values)
        return critic_loss_of(minibatch, q_of_stored(minibatch), targets)

    def value_loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
        least_q = tf.stop_gradient(tf.reduce_min(q_of_stored(minibatch, target.tensors()), axis=0))
        _, values = model.forward(minibatch[c.OBS])
        loss = weighted_mean(expectile_losses(least_q - values, config.expectile), minibatch[WEIGHTS])
        return loss, {"mean_value": tf.reduce_mean(values), _LEAST_Q: least_q}

    def policy_loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
        inputs, values = model.forward(minibatch[c.OBS])
        weights = imitation_weights(
            minibatch[_LEAST_Q] - values, scale=1.0, beta=config.beta, max_weight=config.max_weight
        )
        loss = -weighted_mean(weights * distribution.logp(inputs, minibatch[c.ACTIONS]), minibatch[WEIGHTS])
        entropy = tf.reduce_mean(distribution.entropy(inputs))
        return loss, {"entropy": entropy, "mean_weight": tf.reduce_mean(weights)}

    value, policy = (
        [variable for name, variable in model.trainable.items() if name.startswith(branch)]
        for branch in ("value/", "policy/")
    )
    return UpdateSpec(
        critic_loss,
        CRITIC_METRICS,
        COEFFICIENTS,
        is_stacked=True,
        gives_rows=True,
        **following(target, tau=config.tau, every=config.target_update_freq),
        phases=(
            Phase("value", value_loss, _VALUE_METRICS, value, value_optimizer),
            Phase("policy", policy_loss, _POLICY_METRICS, policy, policy_optimizer, ACTOR_LR),
        ),
    )
