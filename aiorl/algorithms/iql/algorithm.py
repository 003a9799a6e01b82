"""IQL: values and critics that ask for no action which is not stored, and a policy that imitates the better ones."""

from __future__ import annotations

from typing import Any

from aiorl.algorithms.actor_replay import CriticReplayAlgorithm
from aiorl.algorithms.compiled_update import UpdateSpec
from aiorl.algorithms.iql.config import IQLConfig
from aiorl.algorithms.iql.update import iql_spec
from aiorl.config.schema import CommonConfig

__all__ = ["IQL"]


class IQL(CriticReplayAlgorithm[IQLConfig]):
    """Implicit Q-learning (Kostrikov et al. 2021) over bounded Boxes and over choices.

    The model is a policy with values, as BC and PPO have it.
    """

    config_class = IQLConfig

    @classmethod
    def acting_settings(cls, config: CommonConfig) -> dict[str, Any]:
        """Actions drawn from the distribution, and uniform ones at first, where anything is sampled at all."""
        own = cls._own(config)
        return {"exploration": {"type": "StochasticSampling", "random_timesteps": own.random_timesteps}}

    def _update_spec(self) -> UpdateSpec:
        own, target = self._config, self.targets["target/critics"]
        optimizers = self._adam(own.adam_epsilon), self._adam(own.adam_epsilon)
        return iql_spec(own, self.model, self.critics, target, *optimizers)
