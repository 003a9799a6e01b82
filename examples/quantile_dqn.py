r"""QR-DQN: an algorithm with a replay whose network has a head of its own.

    aiorl train --env CartPole-v1 --algo examples.quantile_dqn:QuantileDQN --num-workers 0 \
        --num-envs-per-worker 8 --training-intensity 32 --lr 1e-3 --learning-starts 500 \
        --target-update-freq 100 --epsilon-schedule "[[0, 1.0], [4000, 0.05]]" --stop-return 150

Quantile regression DQN (Dabney et al. 2018, https://arxiv.org/abs/1710.10044) learns the quantiles
of the return of each action, and acts by their mean. `QHead` says so once, to everything that acts:
workers, evaluation, `aiorl serve` and exports. Replay, exploration, dueling streams and checkpoints
are DQN's.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from gymnasium import spaces

from aiorl.algorithms import (
    DQN,
    DQNConfig,
    Networks,
    Observations,
    QHead,
    QNetwork,
    TargetNetwork,
    Update,
    best_legal,
    build_q_network,
    changed,
    chosen,
    columns as c,
    key,
    per_row,
    q_update,
)


class QuantileConfig(DQNConfig):
    """Keys of QR-DQN."""

    algo: str = changed(DQNConfig, "algo", "examples.quantile_dqn:QuantileDQN")
    num_quantiles: int = key(32, "Quantiles of each action's return.", group="Quantiles", ge=1)


def quantile_losses(taken: tf.Tensor, wanted: tf.Tensor) -> tf.Tensor:
    """Return the quantile Huber losses [B] of quantiles [B, Z] towards samples [B, Y] (eq. 10)."""
    errors = wanted[:, None, :] - taken[:, :, None]
    size = tf.abs(errors)
    huber = tf.where(size < 1.0, 0.5 * size**2, size - 0.5)
    levels = (tf.range(taken.shape[1], dtype=tf.float32) + 0.5) / taken.shape[1]
    weights = tf.abs(levels[None, :, None] - tf.cast(errors < 0.0, tf.float32))
    return tf.reduce_sum(tf.reduce_mean(weights * huber, axis=2), axis=1)


class QuantileDQN(DQN):
    """QR-DQN over single rows."""

    config_class = QuantileConfig

    @staticmethod
    def build_model(
        config: QuantileConfig,
        observations: Observations,
        action_space: spaces.Space[Any],
        seed: int | None,
    ) -> QNetwork:
        """Build a network with quantiles of each action, whose mean is the action's value."""
        head = QHead(config.num_quantiles, lambda quantiles: tf.reduce_mean(quantiles, axis=-1))
        return build_q_network(config, observations, action_space, seed, head=head)

    @staticmethod
    def update(config: QuantileConfig, networks: Networks) -> Update:
        """Return a step against the quantile losses."""
        model = networks.model
        target = TargetNetwork(model)

        def judge(minibatch: dict[str, tf.Tensor], knobs: dict[str, tf.Tensor]) -> tuple:
            actions = minibatch[c.ACTIONS] - model.distribution.start
            quantiles, _ = model.q(minibatch[c.OBS])
            taken = chosen(quantiles, actions)
            following, mask = model.q(minibatch[c.NEW_OBS], weights=target.tensors())
            best = best_legal(tf.reduce_mean(following, axis=-1), mask)
            discounts = minibatch[c.DISCOUNTS][:, None]
            wanted = minibatch[c.N_STEP_RETURNS][:, None] + discounts * chosen(following, best)
            wanted = tf.stop_gradient(wanted)
            errors = tf.abs(tf.reduce_mean(wanted, axis=1) - tf.reduce_mean(taken, axis=1))
            return quantile_losses(taken, wanted), errors, {"mean_q": tf.reduce_mean(taken)}

        return q_update(config, model, per_row(judge), target)
