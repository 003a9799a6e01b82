"""PPO: leases for exactly one train batch at one policy version, then several epochs over it."""

from __future__ import annotations

from aiorl.data import columns as c
from aiorl.learning.algorithms.compiled_update import UpdateSpec
from aiorl.learning.algorithms.on_policy import OnPolicy
from aiorl.learning.algorithms.ppo.config import PPOConfig
from aiorl.learning.algorithms.ppo.update import ppo_spec
from aiorl.learning.algorithms.surrogate import Surrogate

__all__ = ["PPO"]


class PPO(Surrogate[PPOConfig], OnPolicy[PPOConfig]):
    """Proximal policy optimisation with clipping (Schulman et al. 2017)."""

    config_class = PPOConfig

    @classmethod
    def _columns(cls, config: PPOConfig) -> tuple[str, ...]:
        """Values only where they are clipped, old logits only for a penalty on them."""
        names = [c.OBS, c.ACTIONS, c.ACTION_LOGP, c.ADVANTAGES, c.VALUE_TARGETS]
        if config.clips_values:
            names.append(c.VF_PREDS)
        if config.kl_coeff > 0:
            names.append(c.ACTION_DIST_INPUTS)
        return tuple(names)

    def _update_spec(self) -> UpdateSpec:
        return ppo_spec(self._config, self.model, self.buffers)

    @property
    def shuffles(self) -> bool:
        """Whether rows are visited in a random order."""
        return self._config.shuffle_sequences
