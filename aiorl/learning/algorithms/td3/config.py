"""Settings of TD3; loads no TensorFlow."""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar, Literal

from aiorl.config.key import changed, key
from aiorl.learning.algorithms.actor_replay_config import ActorReplayConfig

__all__ = ["TD3Config"]

_td3 = partial(key, group="TD3")


class TD3Config(ActorReplayConfig):
    """TD3's own settings, and its defaults of the common ones."""

    action_spaces: ClassVar[tuple[str, ...] | None] = ("bounded Box",)

    algo: str = changed(ActorReplayConfig, "algo", "td3")
    lr: float = changed(ActorReplayConfig, "lr", 1e-3)
    target_update_freq: int = changed(ActorReplayConfig, "target_update_freq", 2)

    policy_delay: int = _td3(
        2, "Minibatches after which the network that acts learns; the critics learn from each.", unit="minibatches",
        ge=1,
    )  # fmt: skip
    smooth_target_policy: bool = _td3(True, "Noise on the actions that the target critics value.")
    target_noise: float = _td3(
        0.2, "Its standard deviation, as a share of half the range of an action.", ge=0, allow_inf_nan=False
    )
    target_noise_clip: float = _td3(0.5, "Most that it moves an action, likewise.", ge=0)
    exploration_noise: float = _td3(
        0.1, "Standard deviation of the noise that workers add to actions, likewise; of each step's part of it where "
        "it is correlated.", ge=0,
    )  # fmt: skip
    noise_type: Literal["gaussian", "ornstein_uhlenbeck"] = _td3(
        "gaussian", "Noise that workers add: of each step by itself, or correlated in time."
    )

    def check(self) -> None:
        """Refuse values that don't go together.

        Raises: ConfigError naming the key that should change.
        """
        super().check()
        names = ("target_noise", "target_noise_clip")
        hint = "Set smooth_target_policy, or leave it out."
        self.refuse_unless(self.smooth_target_policy, names, "smooth_target_policy", hint=hint)

    def minibatch_cycle(self) -> int:
        """See the base class."""
        return math.lcm(self.target_update_freq, self.policy_delay)
