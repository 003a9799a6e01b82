"""Base class of algorithms that have a replay, an actor, and critics with targets of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import tensorflow as tf
from gymnasium import spaces

from aiorl.acting.distributions import make_distribution
from aiorl.config.schema import CommonConfig
from aiorl.errors import InternalError
from aiorl.learning.algorithms.actor_network import Actor
from aiorl.learning.algorithms.actor_replay_config import ActorReplayConfig
from aiorl.learning.algorithms.algorithm import Array, Observations
from aiorl.learning.algorithms.compiled_update import ROWS, STEPS_BEFORE, Tensors
from aiorl.learning.algorithms.critics import Critics
from aiorl.learning.algorithms.replay_algorithm import WEIGHTS, ReplayAlgorithm
from aiorl.learning.algorithms.target_network import TargetNetwork
from aiorl.learning.losses.q_learning import weighted_mean
from aiorl.learning.losses.td3 import critic_losses

if TYPE_CHECKING:
    from aiorl.learning.models.catalog import ActorCritic

__all__ = [
    "ACTOR_LR",
    "COEFFICIENTS",
    "CRITIC_METRICS",
    "OF_STORED",
    "SEEDS",
    "ActorReplayAlgorithm",
    "CriticReplayAlgorithm",
    "critic_loss_of",
]

ActorReplayT = TypeVar("ActorReplayT", bound=ActorReplayConfig)

SEEDS = "seeds"
"""Column of a minibatch: two seeds [2, 2] int32 of what is drawn within the update, behind the rows and in them."""
ACTOR_LR = "actor_lr"
COEFFICIENTS = ("lr", ACTOR_LR, STEPS_BEFORE)
"""Names of the coefficients that all of them have."""
CRITIC_METRICS = ("mean_q", "mean_td_error")
"""Names of what `critic_loss_of` reports."""
OF_STORED = "q_of_stored"
"""Name of what it gives beside: the Q values [C, B] of the stored actions, for phases behind it."""

_CRITICS_KEY = 0x63726974  # keeps the critics' first weights apart from other random numbers of the same seed


class CriticReplayAlgorithm(ReplayAlgorithm[ActorReplayT]):
    """The model is what workers get; the critics and all targets stay here.

    The critics are trained by the loss itself, the model by phases behind it with optimisers of their own: so it
    learns by critics that have just learnt, has its own learning rate, and its moments rest while it isn't due.

    Attributes:
        critics: networks of Q values.
    """

    def __init__(self, config: CommonConfig, model: ActorCritic) -> None:
        """Make room for the replay, critics and targets; nothing is compiled yet."""
        own = self._own(config)
        self.critics = Critics(
            model.layout,
            model.obs_dtype,
            model.distribution,
            own.model,
            np.random.default_rng(np.random.SeedSequence(config.seed, spawn_key=(_CRITICS_KEY,))),
            num_critics=2 if own.twin_q else 1,
        )
        self.targets = {"target/critics": TargetNetwork(self.critics), **self._more_targets(model)}
        super().__init__(config, model)

    def _more_targets(self, model: ActorCritic) -> dict[str, TargetNetwork]:
        """Target networks beside that of the critics."""
        return {}

    def _trained_variables(self) -> list[Any]:
        return self.critics.trainable_variables

    def coefficients(self, env_steps_total: int) -> dict[str, float]:
        """See the base class."""
        given = super().coefficients(env_steps_total)
        return {**given, ACTOR_LR: given["lr"] if self._config.actor_lr is None else self._config.actor_lr}

    def _other_variables(self) -> dict[str, Any]:
        return super()._other_variables() | {f"critics/{name}": item for name, item in self.critics.variables.items()}


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
        distribution = make_distribution(action_space, squash=True)
        return Actor(
            observations.layout,
            observations.dtype,
            distribution,
            cls._own(config).model,
            np.random.default_rng(seed),
            is_deterministic=cls.is_deterministic,
            noise=config.state_dependent_noise,
        )

    def __init__(self, config: CommonConfig, model: ActorCritic) -> None:
        """Make room for the replay, critics and targets; nothing is compiled yet."""
        if not isinstance(model, Actor):
            raise InternalError(f"{type(self).__name__} was given a {type(model).__name__}")
        self.actor = model
        super().__init__(config, model)

    def _more_targets(self, model: ActorCritic) -> dict[str, TargetNetwork]:
        return {"target/actor": TargetNetwork(model)} if self.is_deterministic else {}

    def _drawn(self, num: int) -> dict[str, Array]:
        return {SEEDS: self._rng.integers(np.iinfo(np.int32).max, size=(num, 2, 2), dtype=np.int32)}


def critic_loss_of(minibatch: Tensors, q: tf.Tensor, targets: tf.Tensor) -> tuple[tf.Tensor, Tensors]:
    """Half the squared errors of Q values [C, B] against targets [B], of all critics, and what is reported of them.

    Priorities of rows are the mean of their critics' errors.
    """
    errors = tf.reduce_mean(tf.abs(tf.stop_gradient(q) - targets), axis=0)
    return weighted_mean(0.5 * critic_losses(q, targets), minibatch[WEIGHTS]), {
        "mean_q": tf.reduce_mean(q),
        "mean_td_error": tf.reduce_mean(errors),
        ROWS: errors,
        OF_STORED: q,
    }
