"""DQN: a replay, action values with a target network, and mostly greedy actions
(docs/algorithms/dqn.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from aiorl.acting.distributions import Greedy
from aiorl.data import columns as c
from aiorl.data.fragment import SamplePlan
from aiorl.errors import ConfigError
from aiorl.learning.algorithm import Algorithm, Experience, Networks, Observations, Update
from aiorl.learning.compiled import adam
from aiorl.learning.keys.dqn import DQNConfig as DQNConfig, sequence_rows
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses import masked_mean, q_learning
from aiorl.learning.losses.q_learning import QHead
from aiorl.learning.replay.sequences import FOLLOWING, TRAINED
from aiorl.learning.replayed import Replayed, replay_knobs, replayed
from aiorl.learning.rows import (
    by_time,
    flattened,
    state_columns,
)
from aiorl.learning.steps import (
    SEEDS,
    WEIGHTS,
    Loss,
    TargetNetwork,
    chain,
    descend,
    drawn,
    every,
    follow,
    per_row,
)

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic
    from aiorl.learning.models.q_network import QNetwork


class DQN(Algorithm[DQNConfig]):
    """Deep Q-learning (Mnih et al. 2015), optionally double, dueling, n-step, prioritised and
    distributional.
    """

    config_class = DQNConfig

    @staticmethod
    def experience(config: DQNConfig) -> Experience:
        """Return rows of a replay by a `config`; with `worker_priorities`, with absolute TD errors.

        For a recurrent network, return raw transitions with the initial states of sequences.
        """
        shape = config.sequence_shape
        if shape is not None:
            columns = (*sequence_rows(config), *state_columns(config, cells=1))
            raw_obs = config.is_filtered
            plan = SamplePlan("none", {}, columns, state_every=shape.stride, raw_obs=raw_obs)
            return Replayed(config, plan)
        if not config.worker_priorities:
            return replayed(config)
        return replayed(config, columns=(c.PRIORITIES,), postprocess="n_step_priorities")

    @staticmethod
    def acting_settings(config: DQNConfig) -> dict[str, Any]:
        """Return the settings of epsilon-greedy actions with this `config`; a noisy network needs
        none.
        """
        if config.noisy:
            return {}
        if config.per_worker_epsilon:
            return {"exploration": {"type": "PerWorkerEpsilonGreedy"}}
        schedule = [list(point) for point in config.epsilon_schedule]
        return {"exploration": {"type": "EpsilonGreedy", "epsilon": schedule}}

    @staticmethod
    def build_model(
        config: DQNConfig,
        observations: Observations,
        action_space: spaces.Space[Any],
        seed: int | None,
    ) -> ActorCritic:
        """Build the network of action values; see `Algorithm.build_model`."""
        return build_q_network(config, observations, action_space, seed)

    @staticmethod
    def update(config: DQNConfig, networks: Networks) -> Update:
        """Return a step of `networks` against TD errors, as a `config` says: over rows, or over
        sequences for recurrent models.

        Raises:
            ConfigError: the network has a `QHead` of its own.
        """
        model = networks.model
        if model.head is not None and model.atoms is None:
            raise ConfigError(
                f"the network of {config.algo} has a head of its own, whose outputs DQN's loss would"
                " take for values.",
                key="algo",
                hint="Define update of the algorithm, with q_update and a loss of your own.",
            )
        target = TargetNetwork(model)
        errors = QErrors(config, model, target)
        loss = errors.loss_of_sequences if model.is_recurrent else errors.loss_of_rows()
        return q_update(config, model, loss, target)


def build_q_network(
    config: DQNConfig,
    observations: Observations,
    action_space: spaces.Space[Any],
    seed: int | None,
    *,
    head: QHead | None = None,
) -> QNetwork:
    """Build a network of action values; see `Algorithm.build_model`.

    Args:
        config: config of the algorithm.
        observations: layout and dtype of observations.
        action_space: Discrete.
        seed: seed of the initial weights; None = random.
        head: outputs for each action, and the values that they mean; None = values, or the atoms of
            the config.

    Raises:
        ConfigError: there are a head and atoms.
    """
    from aiorl.learning.models.q_network import QNetwork

    atoms = None
    if config.num_atoms > 1:
        atoms = (config.v_min, config.v_max, config.num_atoms)
    if atoms is not None and head is not None:
        raise ConfigError(
            f"num_atoms is {config.num_atoms}, but {config.algo} has a head of its own.",
            key="num_atoms",
            value=config.num_atoms,
            hint="Leave num_atoms out.",
        )
    return QNetwork(
        observations.layout,
        observations.dtype,
        Greedy(action_space),
        config.model,
        rng=np.random.default_rng(seed),
        is_dueling=config.dueling,
        dueling_hiddens=config.dueling_hiddens,
        atoms=atoms,
        head=head,
        sigma0=config.sigma0 if config.noisy else None,
    )


def q_update(config: DQNConfig, model: QNetwork, loss: Loss, target: TargetNetwork) -> Update:
    """Return the update of a network of action values and its target.

    Args:
        config: config of the algorithm.
        model: network of action values.
        loss: loss of a minibatch, which also gives PRIORITIES.
        target: target network, which follows.
    """
    optimizer = adam(config, config.adam_epsilon)
    step = descend(model.trainable_variables, loss, optimizer, clip=config.grad_clip)
    moves = every(config.target_update_freq, follow([target], tau=config.tau))
    return Update(
        loop=drawn(chain(step, moves), seeds=(3, 2) if config.noisy else None),
        knobs=replay_knobs(config),
        targets={"target": target},
    )


class QErrors:
    """Losses of a network of action values: TD errors of expected returns, or of atoms."""

    def __init__(self, config: DQNConfig, model: QNetwork, target: TargetNetwork) -> None:
        """Compare the network with the values of its target network."""
        self._config = config
        self._model = model
        self._target = target
        assert isinstance(model.distribution, Greedy)
        self._start = model.distribution.start

    def loss_of_rows(self) -> Loss:
        """Return the loss of rows [B, ...]."""

        def judge(columns: Tensors, knobs: Tensors) -> tuple[tf.Tensor, tf.Tensor, Tensors]:
            model = self._model
            next_obs = columns[c.NEW_OBS]
            values, _ = model.q(columns[c.OBS], noise=self._noise(columns, 0))
            next_values, mask = model.q(
                next_obs, weights=self._target.tensors(), noise=self._noise(columns, 1)
            )
            next_online = None
            if self._config.double_q:
                next_online, _ = model.q(next_obs, noise=self._noise(columns, 2))
            losses, errors, q = self._losses_and_errors(
                columns, values, next_values, next_online=next_online, mask=mask
            )
            return losses, errors, {"mean_q": tf.reduce_mean(q)}

        return per_row(judge)

    def loss_of_sequences(self, columns: Tensors, knobs: Tensors) -> tuple[tf.Tensor, Tensors]:
        """Return the loss of B sequences of L steps and one further observation, as rows [L * B].

        Both networks run through each sequence from its stored state. With noisy layers, the online
        pass that learns also chooses the target's actions.
        """
        config = self._config
        model = self._model
        trained = by_time(columns[TRAINED])
        obs = by_time(columns[c.OBS])
        steps = obs.shape[0] - 1
        rows = obs.shape[1]
        state = [columns[c.state_in(index)] for index in range(len(model.state_shapes))]
        previous = [
            by_time(columns[name])
            for name in (c.PREV_ACTIONS, c.PREV_REWARDS)
            if model.uses_previous_step
        ]
        online, mask = model.q_sequence(
            obs, state, previous, burn_in=config.burn_in, noise=self._noise(columns, 0)
        )
        target_values, _ = model.q_sequence(
            obs, state, previous, weights=self._target.tensors(), noise=self._noise(columns, 1)
        )
        next_rows = flattened(by_time(columns[FOLLOWING]) * rows + tf.range(rows))
        names = (c.ACTIONS, c.N_STEP_RETURNS, c.DISCOUNTS)
        flat_columns = {name: flattened(by_time(columns[name])) for name in names}
        values = online[: steps * rows]
        next_values = tf.gather(target_values, next_rows)
        next_online = None
        if config.double_q:
            next_online = tf.gather(tf.stop_gradient(online), next_rows)
        if mask is not None:
            mask = tf.gather(mask, next_rows)
        losses, errors, q = self._losses_and_errors(
            flat_columns, values, next_values, next_online=next_online, mask=mask
        )
        errors = tf.reshape(tf.stop_gradient(errors), trained.shape)
        weighted = tf.reshape(losses, trained.shape) * tf.stop_gradient(columns[WEIGHTS])
        eta = config.sequence_priority_eta
        return masked_mean(weighted, trained), {
            "mean_q": masked_mean(q, flattened(trained)),
            "mean_td_error": masked_mean(errors, trained),
            c.PRIORITIES: q_learning.sequence_priorities(errors, trained, eta),
        }

    def _noise(self, columns: Tensors, use: int) -> tf.Tensor | None:
        """Return noise [1, K] of a minibatch for one use: 0 online, 1 target, 2 choice of the next
        action.
        """
        if not self._config.noisy:
            return None
        return tf.random.stateless_normal([1, self._model.noise_size], columns[SEEDS][use])

    def _losses_and_errors(
        self,
        rows: Tensors,
        values: tf.Tensor,
        next_values: tf.Tensor,
        *,
        next_online: tf.Tensor | None,
        mask: tf.Tensor | None,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return losses, absolute TD errors, and values of the actions taken, [R] each.

        Args:
            rows: actions, n-step returns and discounts [R] of rows, or of steps of sequences.
            values: [R, A] of the online network, or logits [R, A, Z].
            next_values: likewise of the target network, for the observation after the rewards.
            next_online: likewise of the online network, for double Q-learning; None without.
            mask: [R, A], legal actions in that observation.
        """
        config = self._config
        atoms = self._model.atoms
        actions = rows[c.ACTIONS] - self._start
        returns = rows[c.N_STEP_RETURNS]
        discounts = rows[c.DISCOUNTS]
        if atoms is None:
            targets = q_learning.q_targets(
                returns,
                discounts,
                next_values,
                next_q_online=next_online,
                mask=mask,
                is_rescaled=config.value_rescaling,
            )
            errors = targets - q_learning.chosen(values, actions)
            losses = q_learning.huber(errors, delta=config.huber_delta)
            return losses, tf.abs(errors), targets - errors
        probabilities = q_learning.categorical_targets(
            returns, discounts, next_values, atoms, next_logits_online=next_online, mask=mask
        )
        logits = q_learning.chosen(values, actions)
        return (
            q_learning.cross_entropy(logits, probabilities),
            q_learning.relative_entropy(logits, probabilities),
            q_learning.expected_q(logits, atoms),
        )
