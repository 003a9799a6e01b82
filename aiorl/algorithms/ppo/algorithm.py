"""PPO: leases for exactly one train batch at one policy version, then several epochs over it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aiorl.algorithms.compiled_update import UpdateSpec
from aiorl.algorithms.on_policy import OnPolicy
from aiorl.algorithms.ppo.config import PPOConfig
from aiorl.algorithms.ppo.update import ppo_spec
from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c
from aiorl.errors import CheckpointError

if TYPE_CHECKING:
    from aiorl.models.catalog import ActorCritic

__all__ = ["PPO"]


class PPO(OnPolicy[PPOConfig]):
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

    def __init__(self, config: CommonConfig, model: ActorCritic) -> None:
        """Lay out the train batch; nothing is compiled yet."""
        super().__init__(config, model)
        self._kl_coeff = self._config.kl_coeff
        self._clips = self._config.clip_schedules()

    def _update_spec(self) -> UpdateSpec:
        return ppo_spec(self._config, self.model, self.buffers)

    @property
    def shuffles(self) -> bool:
        """Whether rows are visited in a random order."""
        return self._config.shuffle_sequences

    def coefficients(self, env_steps_total: int) -> dict[str, float]:
        """Return the coefficients of the update after so many env steps."""
        own = self._config
        return super().coefficients(env_steps_total) | {
            **{name: schedule.value(env_steps_total) for name, schedule in self._clips.items()},
            "kl_coeff": self._kl_coeff,
            "kl_stop": float("inf") if own.kl_stop is None else own.kl_stop,
        }

    def after_update(self, metrics: dict[str, float]) -> None:
        """Adapt the penalty's weight: more where the policy moved more than twice as far as wanted, and back."""
        metrics["cur_kl_coeff"] = self._kl_coeff
        if metrics["kl"] > 2.0 * self._config.kl_target:
            self._kl_coeff *= 1.5
        elif metrics["kl"] < 0.5 * self._config.kl_target:
            self._kl_coeff *= 0.5

    def extra_state(self) -> dict[str, Any]:
        """The adaptive penalty."""
        return {"kl_coeff": self._kl_coeff}

    def set_extra_state(self, values: Mapping[str, Any]) -> None:
        """Take the adaptive penalty up again.

        Raises: CheckpointError if it is missing.
        """
        if "kl_coeff" not in values:
            raise CheckpointError("values", "kl_coeff is missing")
        self._kl_coeff = float(values["kl_coeff"])
