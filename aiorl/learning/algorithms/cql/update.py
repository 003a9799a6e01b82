"""CQL's losses over one minibatch: SAC's, with a penalty on the critics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from aiorl.acting.distributions import Categorical, DiagGaussian
from aiorl.data import columns as c
from aiorl.learning.algorithms.actor_network import Actor
from aiorl.learning.algorithms.actor_replay import OF_STORED, SEEDS
from aiorl.learning.algorithms.compiled_update import LossFunction, Phase, Tensors, UpdateSpec
from aiorl.learning.algorithms.cql.config import CQLConfig
from aiorl.learning.algorithms.critics import Critics
from aiorl.learning.algorithms.replay_algorithm import WEIGHTS
from aiorl.learning.algorithms.sac.update import OF_CHOICES
from aiorl.learning.losses.cql import conservative_losses, multiplier_losses, sampled_soft_maximum, soft_maximum
from aiorl.learning.losses.q_learning import weighted_mean
from aiorl.learning.models.distributions import to_tf_distribution

__all__ = ["WEIGHT_LR", "cql_spec"]

WEIGHT_LR = "cql_weight_lr"

_GAPS = "gaps"
_LOG_MAX_WEIGHT = math.log(1e6)

SoftMaximum = Callable[[Tensors], tf.Tensor]
"""Of a minibatch with what SAC's loss of the critics gave beside: [C, B]."""


def cql_spec(
    config: CQLConfig, sac: UpdateSpec, actor: Actor, critics: Critics, log_weight: Any, optimizer: Any
) -> UpdateSpec:
    """Return the update that CQL compiles.

    Args:
        config: what is switched on.
        sac: SAC's update, of the same networks.
        actor: the network that acts.
        critics: that are trained by the loss itself.
        log_weight: variable, logarithm of what the penalty counts.
        optimizer: of the phase "cql_weight".
    """
    is_discrete = isinstance(actor.distribution, Categorical)
    find = _over_choices(actor) if is_discrete else _over_box(config, actor, critics)
    critic_loss = _conservative(config, sac.loss, find, log_weight)
    more = dataclasses.replace(sac, loss=critic_loss, metric_names=(*sac.metric_names, "cql_loss", "cql_gap"))
    target_gap = config.target_gap
    if target_gap is None:
        return more

    def weight_loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
        free = tf.convert_to_tensor(log_weight)
        # at its bound it has a gradient still, or it would never come down again
        log_weight_now = free + tf.stop_gradient(tf.minimum(free, _LOG_MAX_WEIGHT) - free)
        losses = multiplier_losses(log_weight_now, minibatch[_GAPS], target_gap)
        return tf.reduce_mean(losses), {"cql_weight": tf.exp(log_weight_now)}

    phase = Phase("cql_weight", weight_loss, ("cql_weight",), [log_weight], optimizer, WEIGHT_LR)
    return dataclasses.replace(more, coefficient_names=(*sac.coefficient_names, WEIGHT_LR), phases=(*sac.phases, phase))


def _conservative(config: CQLConfig, critic_loss: LossFunction, find: SoftMaximum, log_weight: Any) -> LossFunction:
    def loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
        td_loss, given = critic_loss(minibatch, coefficients)
        gaps = find(minibatch | given) - given[OF_STORED]
        weight = tf.exp(tf.minimum(tf.convert_to_tensor(log_weight), _LOG_MAX_WEIGHT))
        losses = conservative_losses(gaps, weight, config.target_gap or 0.0)
        penalty = weighted_mean(losses, minibatch[WEIGHTS])
        return td_loss + penalty, {**given, "cql_loss": penalty, "cql_gap": tf.reduce_mean(gaps), _GAPS: gaps}

    return loss


def _over_choices(actor: Actor) -> SoftMaximum:
    def find(minibatch: Tensors) -> tf.Tensor:
        _, mask = actor.outputs(minibatch[c.OBS])
        return soft_maximum(minibatch[OF_CHOICES], mask)

    return find


def _over_box(config: CQLConfig, actor: Actor, critics: Critics) -> SoftMaximum:
    distribution, num = to_tf_distribution(actor.distribution), config.cql_actions
    assert isinstance(actor.distribution, DiagGaussian)
    size = actor.distribution.size

    def find(minibatch: Tensors) -> tf.Tensor:
        obs = minibatch[c.OBS]
        seeds = [tf.random.experimental.stateless_fold_in(minibatch[SEEDS][0], way) for way in range(3)]
        drawn = [tf.random.stateless_uniform([obs.shape[0], num, size], seeds[0], -1.0, 1.0)]
        log_densities = [tf.fill([obs.shape[0], num], -size * math.log(2.0))]
        for seen, seed in ((obs, seeds[1]), (minibatch[c.NEW_OBS], seeds[2])):
            inputs = tf.repeat(actor.outputs(seen)[0], num, axis=0)
            actions, logp = distribution.sample_with_logp(inputs, seed)
            drawn.append(tf.reshape(critics.unit(actions), [-1, num, size]))
            log_densities.append(tf.reshape(logp + critics.log_unit, [-1, num]))
        actions = tf.stop_gradient(tf.reshape(tf.concat(drawn, axis=1), [-1, size]))
        q = critics.q(tf.repeat(obs, 3 * num, axis=0), actions)
        return sampled_soft_maximum(tf.reshape(q, [q.shape[0], -1, 3 * num]), tf.concat(log_densities, axis=1))

    return find
