"""Settings of PPO; loads no TensorFlow."""

from __future__ import annotations

from aiorl.algorithms.on_policy_config import OnPolicyConfig
from aiorl.config.key import changed, key
from aiorl.errors import ConfigError
from aiorl.policy.schedules import Schedule

__all__ = ["PPOConfig"]

_GROUP = "PPO"


class PPOConfig(OnPolicyConfig):
    """PPO's own settings, and its defaults of the common ones."""

    why_on_learner = "it takes several steps on each batch, and a single one would be A2C's"

    algo: str = changed(OnPolicyConfig, "algo", "ppo")
    num_sgd_iter: int = changed(OnPolicyConfig, "num_sgd_iter", 10)
    normalize_advantages: bool = changed(OnPolicyConfig, "normalize_advantages", True)

    clip_param: float = key(
        0.2, "The ratio of new to old action probability counts up to 1 +- this.", group=_GROUP, gt=0
    )
    clip_param_schedule: list[tuple[float, float]] | None = key(
        None, "clip_param over env steps, as [[env step, value], ...].", group=_GROUP
    )
    vf_clip_param: float | None = key(
        None, "How far a value may profitably move in one update, in units of return (of scaled rewards with "
        "normalize_rewards); null: any far.", group=_GROUP, gt=0,
    )  # fmt: skip
    vf_clip_param_schedule: list[tuple[float, float]] | None = key(
        None, "vf_clip_param over env steps, as [[env step, value], ...].", group=_GROUP
    )
    kl_coeff: float = key(
        0.0, "First weight of the divergence from the old policy; it adapts towards kl_target. 0: no penalty.",
        group=_GROUP, ge=0,
    )  # fmt: skip
    kl_target: float = key(0.01, "Divergence that kl_coeff aims at.", group=_GROUP, unit="nats", gt=0)
    kl_stop: float | None = key(
        None, "An update ends after a minibatch whose divergence is above this; null: never.", group=_GROUP,
        unit="nats", gt=0,
    )  # fmt: skip
    shuffle_sequences: bool = key(True, "Visit rows in a new random order each epoch.", group=_GROUP)

    @property
    def clips_values(self) -> bool:
        """Whether values may profitably move only so far in one update."""
        return self.vf_clip_param is not None or self.vf_clip_param_schedule is not None

    def clip_schedules(self) -> dict[str, Schedule]:
        """Return how far action probabilities, and values if these are clipped, may move, by the coefficients' names.

        Raises: ConfigError if one is no schedule, or not of numbers above 0.
        """
        given = {"clip_param": (self.clip_param, self.clip_param_schedule)}
        if self.clips_values:
            given["vf_clip_param"] = (self.vf_clip_param or 0.0, self.vf_clip_param_schedule)
        for name, (_, points) in given.items():
            if any(value <= 0 for _, value in points or ()):
                key_name = f"{name}_schedule"
                raise ConfigError(f"{key_name} has a value that is not above 0.", key=key_name, value=points)
        return {name: Schedule.of(*pair, key=f"{name}_schedule") for name, pair in given.items()}

    def check(self) -> None:
        """Refuses values that don't go together.

        Raises: ConfigError naming the key that should change.
        """
        super().check()
        self.clip_schedules()
        minibatch = self.minibatch_steps()
        is_cut = self.model.is_recurrent and self.batch_mode == "truncate_episodes"
        if is_cut and minibatch % self.rollout_fragment_length:
            raise ConfigError(
                f"A recurrent model trains on whole sequences of rollout_fragment_length "
                f"{self.rollout_fragment_length} steps, so minibatches of {minibatch} steps don't work out.",
                key="sgd_minibatch_size", value=minibatch,
                hint=f"Set it to a multiple of {self.rollout_fragment_length}.",
            )  # fmt: skip
