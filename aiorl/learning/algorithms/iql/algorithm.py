"""IQL: values and critics that ask for no action which is not stored, and a policy that imitates the better ones."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces

from aiorl.acting.distributions import make_distribution
from aiorl.config.schema import CommonConfig
from aiorl.learning.algorithms.actor_replay import CriticReplayAlgorithm
from aiorl.learning.algorithms.algorithm import Observations
from aiorl.learning.algorithms.compiled_update import UpdateSpec
from aiorl.learning.algorithms.iql.config import IQLConfig
from aiorl.learning.algorithms.iql.update import iql_spec
from aiorl.learning.models.catalog import ActorCritic, build_model

__all__ = ["IQL"]


class IQL(CriticReplayAlgorithm[IQLConfig]):
    """Implicit Q-learning (Kostrikov et al. 2021) over bounded Boxes and over choices.

    The model is a policy with values, as BC and PPO have it.
    """

    config_class = IQLConfig

    @classmethod
    def build_model(
        cls, config: CommonConfig, observations: Observations, action_space: spaces.Space[Any], seed: int | None
    ) -> ActorCritic:
        """Build policy and values, in branches of their own also where a custom model gives their features."""
        shape, dtype, layout = observations.shape, observations.dtype, observations.layout
        settings = config.model.model_dump()
        return build_model(
            shape, dtype, make_distribution(action_space), settings, seed=seed, layout=layout, custom_features=True
        )

    @classmethod
    def acting_settings(cls, config: CommonConfig) -> dict[str, Any]:
        """Actions drawn from the distribution, and uniform ones at first, where anything is sampled at all."""
        own = cls._own(config)
        return {"exploration": {"type": "StochasticSampling", "random_timesteps": own.random_timesteps}}

    def _update_spec(self) -> UpdateSpec:
        own, target = self._config, self.targets["target/critics"]
        optimizers = self._adam(own.adam_epsilon), self._adam(own.adam_epsilon)
        return iql_spec(own, self.model, self.critics, target, *optimizers)
