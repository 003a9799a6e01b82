"""Settings of PPO; loads no TensorFlow."""

from __future__ import annotations

from aiorl.config.key import changed, key
from aiorl.learning.algorithms.on_policy_config import OnPolicyConfig
from aiorl.learning.algorithms.surrogate_config import SurrogateConfig

__all__ = ["PPOConfig"]

_GROUP = "PPO"
_LEAST_STEPS = 64  # of a minibatch
_LEAST_SEQUENCES = 4  # of a minibatch, where the network is recurrent


class PPOConfig(SurrogateConfig, OnPolicyConfig):
    """PPO's own settings, and its defaults of the common ones."""

    algo: str = changed(OnPolicyConfig, "algo", "ppo")
    train_batch_size: int = changed(OnPolicyConfig, "train_batch_size", 2048)
    num_envs_per_worker: int = changed(OnPolicyConfig, "num_envs_per_worker", 4)
    lr: float = changed(OnPolicyConfig, "lr", 3e-4)
    num_sgd_iter: int = changed(OnPolicyConfig, "num_sgd_iter", 10)
    sgd_minibatch_size: int | None = key(
        None, "Env steps in one minibatch; null takes a 32nd of the train batch, at least 64, and at least four "
        "fragments of one environment for a recurrent network.", group="Learning", unit="env steps", ge=1,
    )  # fmt: skip
    normalize_advantages: bool = changed(OnPolicyConfig, "normalize_advantages", True)

    vf_clip_param: float | None = key(
        None, "How far a value may profitably move in one update, in units of return (of scaled rewards with "
        "normalize_rewards); null: any far.", group=_GROUP, gt=0,
    )  # fmt: skip
    vf_clip_param_schedule: list[tuple[float, float]] | None = key(
        None, "vf_clip_param over env steps, as [[env step, value], ...].", group=_GROUP
    )
    shuffle_sequences: bool = key(True, "Visit rows in a new random order each epoch.", group=_GROUP)

    @property
    def clips_values(self) -> bool:
        """Whether values may profitably move only so far in one update."""
        return self.vf_clip_param is not None or self.vf_clip_param_schedule is not None

    def minibatch_steps(self) -> int:
        """Return the env steps in one minibatch."""
        if self.sgd_minibatch_size is not None:
            return self.sgd_minibatch_size
        least = _LEAST_SEQUENCES * self.rollout_fragment_length if self.model.is_recurrent else _LEAST_STEPS
        return min(max(least, self.train_batch_size // 32), self.train_batch_size)

    def clips(self) -> dict[str, tuple[float, list[tuple[float, float]] | None]]:
        """See the base class; values too, if these are clipped."""
        if not self.clips_values:
            return super().clips()
        return super().clips() | {"vf_clip_param": (self.vf_clip_param or 0.0, self.vf_clip_param_schedule)}
