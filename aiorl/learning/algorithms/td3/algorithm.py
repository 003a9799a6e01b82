"""TD3: a replay, an actor without chance, and critics, all with target networks."""

from __future__ import annotations

from typing import Any

from aiorl.config.schema import CommonConfig
from aiorl.learning.algorithms.actor_replay import ActorReplayAlgorithm
from aiorl.learning.algorithms.compiled_update import UpdateSpec
from aiorl.learning.algorithms.td3.config import TD3Config
from aiorl.learning.algorithms.td3.update import td3_spec

__all__ = ["TD3"]


class TD3(ActorReplayAlgorithm[TD3Config]):
    """Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018); as set, DDPG."""

    config_class = TD3Config
    is_deterministic = True

    @classmethod
    def acting_settings(cls, config: CommonConfig) -> dict[str, Any]:
        """Noise on the actions, and uniform ones at first."""
        own = cls._own(config)
        kind, size = ("GaussianNoise", "stddev")
        if own.noise_type == "ornstein_uhlenbeck":
            kind, size = ("OrnsteinUhlenbeckNoise", "sigma")
        return {"exploration": {"type": kind, size: own.exploration_noise, "random_timesteps": own.random_timesteps}}

    def _update_spec(self) -> UpdateSpec:
        own, targets = self._config, (self.targets["target/actor"], self.targets["target/critics"])
        return td3_spec(own, self.actor, self.critics, *targets, self._adam(own.adam_epsilon))
