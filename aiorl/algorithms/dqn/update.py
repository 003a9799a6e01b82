"""DQN's loss over one minibatch."""

from __future__ import annotations

import tensorflow as tf

from aiorl.algorithms.compiled_update import ROWS, STEPS_BEFORE, LossFunction, Tensors, UpdateSpec
from aiorl.algorithms.dqn.config import DQNConfig
from aiorl.algorithms.q_network import QNetwork
from aiorl.algorithms.replay_algorithm import WEIGHTS
from aiorl.algorithms.target_network import TargetNetwork, following
from aiorl.data import columns as c
from aiorl.losses.categorical_q import categorical_targets, cross_entropy, expected_q, relative_entropy
from aiorl.losses.q_learning import chosen, huber, q_targets, td_errors, weighted_mean
from aiorl.policy.distributions import Greedy

__all__ = ["dqn_spec"]

_METRICS = ("mean_q", "mean_td_error")
_COEFFICIENTS = ("lr", STEPS_BEFORE)


def dqn_spec(config: DQNConfig, model: QNetwork, target: TargetNetwork) -> UpdateSpec:
    """Return the update that DQN compiles.

    Args:
        config: what is switched on.
        model: the network that learns.
        target: its target network.
    """
    return UpdateSpec(
        _loss(config, model, target),
        _METRICS,
        _COEFFICIENTS,
        is_stacked=True,
        gives_rows=True,
        **following(target, tau=config.tau, every=config.target_update_freq),
    )


def _loss(config: DQNConfig, model: QNetwork, target: TargetNetwork) -> LossFunction:
    assert isinstance(model.distribution, Greedy)
    start = model.distribution.start

    def loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
        actions = minibatch[c.ACTIONS] - start
        values, _ = model.q(minibatch[c.OBS])
        next_values, mask = model.q(minibatch[c.NEW_OBS], weights=target.tensors())
        online = model.q(minibatch[c.NEW_OBS])[0] if config.double_q else None
        returns, discounts = minibatch[c.N_STEP_RETURNS], minibatch[c.DISCOUNTS]
        if model.atoms is None:
            wanted = q_targets(returns, discounts, next_values, next_q_online=online, mask=mask)
            errors = td_errors(values, actions, wanted)
            losses, priorities = huber(errors, delta=config.huber_delta), tf.abs(errors)
            taken = wanted - errors
        else:
            probabilities = categorical_targets(
                returns, discounts, next_values, model.atoms, next_logits_online=online, mask=mask
            )
            logits = chosen(values, actions)
            losses, priorities = cross_entropy(logits, probabilities), relative_entropy(logits, probabilities)
            taken = expected_q(logits, model.atoms)
        return weighted_mean(losses, minibatch[WEIGHTS]), {
            "mean_q": tf.reduce_mean(taken),
            "mean_td_error": tf.reduce_mean(priorities),
            ROWS: tf.stop_gradient(priorities),
        }

    return loss
