"""SAC: a replay, an actor that is paid for its entropy, critics with target networks, and a temperature that learns."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeVar

import tensorflow as tf

from aiorl.config.schema import CommonConfig
from aiorl.learning.algorithms.actor_replay import ActorReplayAlgorithm
from aiorl.learning.algorithms.compiled_update import UpdateSpec
from aiorl.learning.algorithms.sac.config import SACConfig
from aiorl.learning.algorithms.sac.update import ALPHA_LR, sac_spec

if TYPE_CHECKING:
    from aiorl.learning.models.catalog import ActorCritic

__all__ = ["SAC"]

SACConfigT = TypeVar("SACConfigT", bound=SACConfig)


class SAC(ActorReplayAlgorithm[SACConfigT]):
    """Soft actor-critic (Haarnoja et al. 2018) over bounded Boxes and over choices."""

    config_class = SACConfig

    @classmethod
    def acting_settings(cls, config: CommonConfig) -> dict[str, Any]:
        """Actions drawn from the distribution, step by step or by noise of the state, and uniform ones at first."""
        own = cls._own(config)
        return {"exploration": own.sampling(random_timesteps=own.random_timesteps)}

    def __init__(self, config: CommonConfig, model: ActorCritic) -> None:
        """Make room for the replay, critics and temperature; nothing is compiled yet."""
        own = self._own(config)
        self._log_alpha = tf.Variable(math.log(own.initial_alpha), dtype=tf.float32)
        super().__init__(config, model)

    def _update_spec(self) -> UpdateSpec:
        own, target = self._config, self.targets["target/critics"]
        optimizers = self._adam(own.adam_epsilon), self._adam_of_multiplier(own.adam_epsilon)
        return sac_spec(own, self.actor, self.critics, target, self._log_alpha, *optimizers)

    def coefficients(self, env_steps_total: int) -> dict[str, float]:
        """See the base class."""
        given = super().coefficients(env_steps_total)
        return {**given, ALPHA_LR: given["lr"] if self._config.alpha_lr is None else self._config.alpha_lr}

    def _other_variables(self) -> dict[str, Any]:
        return super()._other_variables() | {"log_alpha": self._log_alpha}
