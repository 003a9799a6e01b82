"""Base classes of algorithms with a replay, an actor, and critics with their own target
networks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import numpy as np
from gymnasium import spaces

from aiorl.acting.distributions import Categorical, make_distribution
from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c
from aiorl.learning.algorithms.algorithm import Array, Observations
from aiorl.learning.algorithms.compiled_update import (
    ROWS,
    STEPS_BEFORE,
    LossFunction,
    Phase,
    TargetNetwork,
    UpdateSpec,
)
from aiorl.learning.algorithms.replay_algorithm import WEIGHTS, ReplayAlgorithm
from aiorl.learning.algorithms.replay_config import ActorReplayConfig
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses.q_learning import chosen, weighted_mean
from aiorl.learning.models.distributions import to_tf_distribution

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic
    from aiorl.learning.models.critics import Actor

ActorReplayT = TypeVar("ActorReplayT", bound=ActorReplayConfig)

SEEDS = "seeds"
"""Column of a minibatch: two seeds [2, 2] int32 for the random numbers of an update, for next
actions and current ones."""
ACTOR_LR = "actor_lr"
OF_STORED = "q_of_stored"
"""Name of an extra tensor that `critic_loss_of` returns for later phases: the Q values [C, B] of
the stored actions."""

# separates the critics' initial weights from other random numbers with the same seed
_CRITICS_KEY = 0x63726974


class CriticReplayAlgorithm(ReplayAlgorithm[ActorReplayT]):
    """Replay algorithm whose model goes to the workers, while the critics and all targets stay on
    the learner.

    The loss itself trains the critics; later phases, each with its own optimiser, train the model.
    So the model learns from updated critics, has its own learning rate, and its optimiser rests
    while it is not due.

    Attributes:
        distribution: distribution of the model's actions, for losses.
        critics: networks of Q values.
        target_critics: target network of the critics.
    """

    def __init__(self, config: CommonConfig, model: ActorCritic) -> None:
        """Allocate the replay, the critics and the targets; nothing is compiled yet.

        Args:
            config: config of the run, or of the policy if it has its own settings.
            model: network to train, which goes to the workers.
        """
        from aiorl.learning.models.critics import Critics

        own = self.own_config(config)
        self.distribution = to_tf_distribution(model.distribution)
        self.critics = Critics(
            model.layout,
            model.obs_dtype,
            model.distribution,
            own.model,
            np.random.default_rng(np.random.SeedSequence(config.seed, spawn_key=(_CRITICS_KEY,))),
            num_critics=2 if own.twin_q else 1,
        )
        self.target_critics = TargetNetwork(self.critics)
        self.targets = {"target/critics": self.target_critics, **self.more_targets(model)}
        super().__init__(config, model)

    def more_targets(self, model: ActorCritic) -> dict[str, TargetNetwork]:
        """Return further target networks besides that of the critics, for example of `model`, by
        prefix.
        """
        return {}

    def trained_variables(self) -> list[Any]:
        """See `ReplayAlgorithm.trained_variables`; these are the critics' variables."""
        return self.critics.trainable_variables

    def coefficients(self, env_steps_total: int) -> dict[str, float]:
        """See `ReplayAlgorithm.coefficients`; includes the actor's learning rate."""
        given = super().coefficients(env_steps_total)
        return {
            **given,
            ACTOR_LR: given["lr"] if self.config.actor_lr is None else self.config.actor_lr,
        }

    def other_variables(self) -> dict[str, Any]:
        """Return the variables to save along with the weights, by name; includes the critics'
        variables.
        """
        return super().other_variables() | {
            f"critics/{name}": item for name, item in self.critics.variables.items()
        }

    def critics_spec(
        self, critic_loss: LossFunction, *phases: Phase, coefficients: tuple[str, ...] = ()
    ) -> UpdateSpec:
        """Return an update that trains the critics, then runs the phases, then moves all targets.

        Args:
            critic_loss: loss of one minibatch, built on `critic_loss_of`.
            phases: further optimiser steps, the model's first.
            coefficients: names of coefficients in addition to lr and actor_lr.
        """
        own = self.config
        return UpdateSpec(
            critic_loss,
            ("mean_q", "mean_td_error"),
            ("lr", ACTOR_LR, STEPS_BEFORE, *coefficients),
            is_stacked=True,
            gives_rows=True,
            targets=tuple(self.targets.values()),
            tau=own.tau,
            target_every=own.target_update_freq,
            phases=phases,
        )

    def q_of_stored_choices(
        self, minibatch: Tensors, weights: Tensors | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the Q values [C, B] of stored actions, and [C, B, A] of all actions, for discrete
        actions.

        Args:
            minibatch: columns [B, ...] by name.
            weights: weights of the critics by name, of their shapes; None takes the current ones.
        """
        actions = minibatch[c.ACTIONS] - cast(Categorical, self.model.distribution).start
        values = self.critics.q(minibatch[c.OBS], weights=weights)
        return tf.stack([chosen(own, actions) for own in tf.unstack(values)]), values


class ActorReplayAlgorithm(CriticReplayAlgorithm[ActorReplayT]):
    """Replay algorithm whose model is only an actor.

    Attributes:
        actor: model of the run.
        is_deterministic: True if the actor is deterministic; it then has a target network too.
    """

    is_deterministic: ClassVar[bool] = False

    @classmethod
    def build_model(
        cls,
        config: CommonConfig,
        observations: Observations,
        action_space: spaces.Space[Any],
        seed: int | None,
    ) -> ActorCritic:
        """Build the actor.

        Raises:
            UnsupportedSpaceError: a Box has no bounds.
            ConfigError: noise is state-dependent but actions are discrete.
        """
        from aiorl.learning.models.critics import Actor

        return Actor(
            observations.layout,
            observations.dtype,
            make_distribution(action_space, squash=True),
            cls.own_config(config).model,
            np.random.default_rng(seed),
            is_deterministic=cls.is_deterministic,
            noise=config.state_dependent_noise,
        )

    def __init__(self, config: CommonConfig, model: ActorCritic) -> None:
        """Allocate the replay, the critics and the targets; nothing is compiled yet."""
        self.actor = cast("Actor", model)
        super().__init__(config, model)

    def more_targets(self, model: ActorCritic) -> dict[str, TargetNetwork]:
        """See `CriticReplayAlgorithm.more_targets`; a deterministic actor has a target network."""
        return {"target/actor": TargetNetwork(model)} if self.is_deterministic else {}

    def drawn_columns(self, num: int) -> dict[str, Array]:
        """See `ReplayAlgorithm.drawn_columns`; returns SEEDS."""
        return {SEEDS: self.rng.integers(np.iinfo(np.int32).max, size=(num, 2, 2), dtype=np.int32)}


def critic_loss_of(
    minibatch: Tensors, q: tf.Tensor, next_values: tf.Tensor
) -> tuple[tf.Tensor, Tensors]:
    """Return half the squared errors of the critics' Q values of stored actions, and the metrics.

    The priority of a row is the mean error of its critics.

    Args:
        minibatch: columns by name.
        q: [C, B] float32, Q values of the stored actions.
        next_values: [B], values of the observations after the rewards; no gradient flows through
            the targets.
    """
    targets = tf.stop_gradient(minibatch[c.N_STEP_RETURNS] + minibatch[c.DISCOUNTS] * next_values)
    errors = tf.reduce_mean(tf.abs(tf.stop_gradient(q) - targets), axis=0)
    return weighted_mean(0.5 * tf.reduce_sum(tf.square(q - targets), axis=0), minibatch[WEIGHTS]), {
        "mean_q": tf.reduce_mean(q),
        "mean_td_error": tf.reduce_mean(errors),
        ROWS: errors,
        OF_STORED: q,
    }
