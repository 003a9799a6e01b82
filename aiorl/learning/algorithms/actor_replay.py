"""Base classes of algorithms that have a replay, an actor, and critics with targets of their own."""

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
"""Column of a minibatch: two seeds [2, 2] int32 of what is drawn within the update, behind the rows and in them."""
ACTOR_LR = "actor_lr"
OF_STORED = "q_of_stored"
"""Name of what `critic_loss_of` gives beside metrics: the Q values [C, B] of the stored actions, for later phases."""

_CRITICS_KEY = 0x63726974  # keeps the critics' first weights apart from other random numbers of the same seed


class CriticReplayAlgorithm(ReplayAlgorithm[ActorReplayT]):
    """The model is what workers get; the critics and all targets stay here.

    The critics are trained by the loss itself, the model by phases behind it with optimisers of their own: so it
    learns by critics that have just learnt, has its own learning rate, and its moments rest while it isn't due.

    Attributes:
        distribution: of the model's actions, for losses.
        critics: networks of Q values.
        target_critics: their target network.
    """

    def __init__(self, config: CommonConfig, model: ActorCritic) -> None:
        """Make room for the replay, critics and targets; nothing is compiled yet."""
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
        """Return target networks beside that of the critics."""
        return {}

    def trained_variables(self) -> list[Any]:
        """See the base class: the critics'."""
        return self.critics.trainable_variables

    def coefficients(self, env_steps_total: int) -> dict[str, float]:
        """See the base class."""
        given = super().coefficients(env_steps_total)
        return {**given, ACTOR_LR: given["lr"] if self.config.actor_lr is None else self.config.actor_lr}

    def other_variables(self) -> dict[str, Any]:
        """See the base class; with the critics'."""
        return super().other_variables() | {f"critics/{name}": item for name, item in self.critics.variables.items()}

    def critics_spec(self, critic_loss: LossFunction, *phases: Phase, coefficients: tuple[str, ...] = ()) -> UpdateSpec:
        """Return an update that trains the critics, then runs phases, then lets all targets follow.

        Args:
            critic_loss: of one minibatch, made by `critic_loss_of`.
            phases: further steps, of the model first.
            coefficients: names of coefficients beside lr and actor_lr.
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

    def q_of_stored_choices(self, minibatch: Tensors, weights: Tensors | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the Q values [C, B] of stored actions, and [C, B, A] of all actions, which are choices."""
        actions = minibatch[c.ACTIONS] - cast(Categorical, self.model.distribution).start
        values = self.critics.q(minibatch[c.OBS], weights=weights)
        return tf.stack([chosen(own, actions) for own in tf.unstack(values)]), values


class ActorReplayAlgorithm(CriticReplayAlgorithm[ActorReplayT]):
    """The model is an actor alone.

    Attributes:
        actor: the model.
        is_deterministic: the actor is without chance, and has a target network, too.
    """

    is_deterministic: ClassVar[bool] = False

    @classmethod
    def build_model(
        cls, config: CommonConfig, observations: Observations, action_space: spaces.Space[Any], seed: int | None
    ) -> ActorCritic:
        """Build the actor.

        Raises: UnsupportedSpaceError for a Box without bounds; ConfigError for noise of the state over choices.
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
        """Make room for the replay, critics and targets; nothing is compiled yet."""
        self.actor = cast("Actor", model)
        super().__init__(config, model)

    def more_targets(self, model: ActorCritic) -> dict[str, TargetNetwork]:
        """See the base class: that of an actor without chance."""
        return {"target/actor": TargetNetwork(model)} if self.is_deterministic else {}

    def drawn_columns(self, num: int) -> dict[str, Array]:
        """See the base class: SEEDS."""
        return {SEEDS: self.rng.integers(np.iinfo(np.int32).max, size=(num, 2, 2), dtype=np.int32)}


def critic_loss_of(minibatch: Tensors, q: tf.Tensor, next_values: tf.Tensor) -> tuple[tf.Tensor, Tensors]:
    """Half the squared errors of the critics' Q values of stored actions, and what is reported of them.

    Priorities of rows are the mean of their critics' errors.

    Args:
        minibatch: columns by name.
        q: [C, B] float32.
        next_values: [B], of what followed the rewards; no gradient flows through the targets made of it.
    """
    targets = tf.stop_gradient(minibatch[c.N_STEP_RETURNS] + minibatch[c.DISCOUNTS] * next_values)
    errors = tf.reduce_mean(tf.abs(tf.stop_gradient(q) - targets), axis=0)
    return weighted_mean(0.5 * tf.reduce_sum(tf.square(q - targets), axis=0), minibatch[WEIGHTS]), {
        "mean_q": tf.reduce_mean(q),
        "mean_td_error": tf.reduce_mean(errors),
        ROWS: errors,
        OF_STORED: q,
    }
