"""DQN's loss over one minibatch, of rows or of sequences."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from aiorl.acting.distributions import Greedy
from aiorl.data import columns as c
from aiorl.learning.algorithms.compiled_update import ROWS, STEPS_BEFORE, LossFunction, Tensors, UpdateSpec, by_time
from aiorl.learning.algorithms.dqn.config import DQNConfig
from aiorl.learning.algorithms.q_network import QNetwork
from aiorl.learning.algorithms.recurrent import flattened
from aiorl.learning.algorithms.replay_algorithm import WEIGHTS
from aiorl.learning.algorithms.target_network import TargetNetwork, following
from aiorl.learning.losses.categorical_q import categorical_targets, cross_entropy, expected_q, relative_entropy
from aiorl.learning.losses.masked import masked_mean
from aiorl.learning.losses.q_learning import chosen, huber, q_targets, sequence_priorities, td_errors, weighted_mean
from aiorl.learning.replay.sequences import FOLLOWING, TRAINED

__all__ = ["dqn_spec"]

_METRICS = ("mean_q", "mean_td_error")
_COEFFICIENTS = ("lr", STEPS_BEFORE)


class _Turns(NamedTuple):
    """R rows, or steps of sequences, as networks value them.

    Attributes:
        values: [R, A] of the network that learns, or logits [R, A, Z].
        next_values: likewise of the target network, of the observation behind the rewards.
        next_online: of the network that learns, with double Q-learning.
        mask: [R, A] of that observation.
        actions: [R] int32, from 0.
        returns: [R].
        discounts: [R].
    """

    values: tf.Tensor
    next_values: tf.Tensor
    next_online: tf.Tensor | None
    mask: tf.Tensor | None
    actions: tf.Tensor
    returns: tf.Tensor
    discounts: tf.Tensor


def dqn_spec(config: DQNConfig, model: QNetwork, target: TargetNetwork) -> UpdateSpec:
    """Return the update that DQN compiles.

    Args:
        config: what is switched on.
        model: the network that learns; a recurrent one does so on sequences.
        target: its target network.
    """
    return UpdateSpec(
        (_loss_of_sequences if model.is_recurrent else _loss_of_rows)(config, model, target),
        _METRICS,
        _COEFFICIENTS,
        is_stacked=True,
        gives_rows=True,
        **following(target, tau=config.tau, every=config.target_update_freq),
    )


def _loss_of_rows(config: DQNConfig, model: QNetwork, target: TargetNetwork) -> LossFunction:
    def loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
        values, _ = model.q(minibatch[c.OBS])
        next_values, mask = model.q(minibatch[c.NEW_OBS], weights=target.tensors())
        turns = _Turns(
            values,
            next_values,
            model.q(minibatch[c.NEW_OBS])[0] if config.double_q else None,
            mask,
            minibatch[c.ACTIONS] - _start(model),
            minibatch[c.N_STEP_RETURNS],
            minibatch[c.DISCOUNTS],
        )
        losses, priorities, taken = _judged(config, model, turns)
        return weighted_mean(losses, minibatch[WEIGHTS]), {
            "mean_q": tf.reduce_mean(taken),
            "mean_td_error": tf.reduce_mean(priorities),
            ROWS: tf.stop_gradient(priorities),
        }

    return loss


def _loss_of_sequences(config: DQNConfig, model: QNetwork, target: TargetNetwork) -> LossFunction:
    def loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
        trained = by_time(minibatch[TRAINED])
        losses, priorities, taken = _judged(config, model, _turns_of_sequences(config, model, target, minibatch))
        errors = tf.reshape(tf.stop_gradient(priorities), trained.shape)
        weighted = tf.reshape(losses, trained.shape) * tf.stop_gradient(minibatch[WEIGHTS])
        return masked_mean(weighted, trained), {
            "mean_q": masked_mean(taken, flattened(trained)),
            "mean_td_error": masked_mean(errors, trained),
            ROWS: sequence_priorities(errors, trained, config.sequence_priority_eta),
        }

    return loss


def _turns_of_sequences(config: DQNConfig, model: QNetwork, target: TargetNetwork, minibatch: Tensors) -> _Turns:
    """The steps of B sequences of L steps and one observation more, as rows [L * B].

    Both networks run through each sequence from its stored state on.
    """
    obs = by_time(minibatch[c.OBS])
    steps, rows = obs.shape[0] - 1, obs.shape[1]
    state = [minibatch[c.state_in(index)] for index in range(len(model.state_shapes))]
    previous = [by_time(minibatch[name]) for name in (c.PREV_ACTIONS, c.PREV_REWARDS) if model.looks_back]
    online, mask = model.q_sequence(obs, state, previous, burn_in=config.burn_in)
    others, _ = model.q_sequence(obs, state, previous, weights=target.tensors())
    behind = flattened(by_time(minibatch[FOLLOWING]) * rows + tf.range(rows))
    return _Turns(
        online[: steps * rows],
        tf.gather(others, behind),
        tf.gather(tf.stop_gradient(online), behind) if config.double_q else None,
        None if mask is None else tf.gather(mask, behind),
        flattened(by_time(minibatch[c.ACTIONS])) - _start(model),
        flattened(by_time(minibatch[c.N_STEP_RETURNS])),
        flattened(by_time(minibatch[c.DISCOUNTS])),
    )


def _judged(config: DQNConfig, model: QNetwork, turns: _Turns) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Losses, sizes of TD errors, and values of the actions taken, [R] each."""
    returns, discounts = turns.returns, turns.discounts
    if model.atoms is None:
        wanted = q_targets(
            returns, discounts, turns.next_values, next_q_online=turns.next_online, mask=turns.mask,
            is_rescaled=config.value_rescaling,
        )  # fmt: skip
        errors = td_errors(turns.values, turns.actions, wanted)
        return huber(errors, delta=config.huber_delta), tf.abs(errors), wanted - errors
    probabilities = categorical_targets(
        returns, discounts, turns.next_values, model.atoms, next_logits_online=turns.next_online, mask=turns.mask
    )
    logits = chosen(turns.values, turns.actions)
    return (
        cross_entropy(logits, probabilities),
        relative_entropy(logits, probabilities),
        expected_q(logits, model.atoms),
    )


def _start(model: QNetwork) -> int:
    assert isinstance(model.distribution, Greedy)
    return model.distribution.start
