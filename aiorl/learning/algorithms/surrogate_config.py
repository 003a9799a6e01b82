"""Settings that algorithms share which move a policy by PPO's clipped surrogate; loads no TensorFlow."""

from __future__ import annotations

from functools import partial

from aiorl.acting.schedules import Schedule
from aiorl.config.key import key
from aiorl.errors import ConfigError
from aiorl.learning.algorithms.actor_critic_config import ActorCriticConfig

__all__ = ["SurrogateConfig"]

_ppo = partial(key, group="PPO")


class SurrogateConfig(ActorCriticConfig):
    """The settings of such algorithms."""

    why_on_learner = "it takes several steps on each batch, and a single one would be A2C's"

    clip_param: float = _ppo(0.2, "The ratio of new to old action probability counts up to 1 +- this.", gt=0)
    clip_param_schedule: list[tuple[float, float]] | None = _ppo(
        None, "clip_param over env steps, as [[env step, value], ...]."
    )
    kl_coeff: float = _ppo(
        0.0, "First weight of the divergence from the old policy; it adapts towards kl_target. 0: no penalty.", ge=0
    )
    kl_target: float = _ppo(
        0.01, "Divergence that kl_coeff aims at, in the last epoch of an update.", unit="nats", gt=0
    )
    kl_stop: float | None = _ppo(
        None, "An update ends after a minibatch whose divergence is above this; null: never.", unit="nats", gt=0
    )

    def clips(self) -> dict[str, tuple[float, list[tuple[float, float]] | None]]:
        """How far what is clipped may move, and the schedule of that, by names of coefficients."""
        return {"clip_param": (self.clip_param, self.clip_param_schedule)}

    def clip_schedules(self) -> dict[str, Schedule]:
        """Return how far what is clipped may move over env steps, by the coefficients' names.

        Raises: ConfigError if one is no schedule, or not of numbers above 0.
        """
        for name, (_, points) in self.clips().items():
            if any(value <= 0 for _, value in points or ()):
                key_name = f"{name}_schedule"
                raise ConfigError(f"{key_name} has a value that is not above 0.", key=key_name, value=points)
        return {name: Schedule.of(*pair, key=f"{name}_schedule") for name, pair in self.clips().items()}

    def check(self) -> None:
        """Refuse values that don't go together.

        Raises: ConfigError naming the key that should change.
        """
        super().check()
        self.clip_schedules()
        hint = "Set kl_coeff above 0, or leave it out."
        self.refuse_unless(self.kl_coeff > 0, ("kl_target",), "the penalty that kl_coeff weighs", hint=hint)
