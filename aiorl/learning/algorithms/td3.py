"""TD3: a deterministic actor and critics, all with target networks (docs/algorithms/td3.md)."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar, Literal

from aiorl.config.key import changed, key
from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c
from aiorl.learning.algorithms.actor_replay import (
    ACTOR_LR,
    SEEDS,
    ActorReplayAlgorithm,
    critic_loss_of,
)
from aiorl.learning.algorithms.compiled_update import Phase, UpdateSpec
from aiorl.learning.algorithms.replay_config import ActorReplayConfig
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses.critics import smoothed_actions

_td3 = partial(key, group="TD3")


class TD3Config(ActorReplayConfig):
    """TD3's own keys, and its defaults of common keys."""

    action_spaces: ClassVar[tuple[str, ...] | None] = ("bounded Box",)

    algo: str = changed(ActorReplayConfig, "algo", "td3")
    lr: float = changed(ActorReplayConfig, "lr", 1e-3)
    target_update_freq: int = changed(ActorReplayConfig, "target_update_freq", 2)

    policy_delay: int = _td3(2, unit="minibatches", ge=1)
    """Minibatches between two steps of the actor; the critics learn from each minibatch."""
    smooth_target_policy: bool = _td3(True)
    """Add noise to the actions that the target critics value."""
    target_noise: float = _td3(0.2, ge=0, allow_inf_nan=False, needs="smooth_target_policy")
    """Standard deviation of the target noise, as a share of half the range of an action."""
    target_noise_clip: float = _td3(0.5, ge=0, needs="smooth_target_policy")
    """Maximum size of the target noise, as a share of half the range of an action."""
    exploration_noise: float = _td3(0.1, ge=0)
    """Standard deviation of the noise that workers add to actions, as a share of half the range of
    an action; for correlated noise, that of the part added in each step."""
    noise_type: Literal["gaussian", "ornstein_uhlenbeck"] = _td3("gaussian")
    """Kind of noise that workers add: independent at each step, or correlated in time."""

    def minibatch_cycle(self) -> int:
        """See `ReplayConfig.minibatch_cycle`."""
        return math.lcm(self.target_update_freq, self.policy_delay)


class TD3(ActorReplayAlgorithm[TD3Config]):
    """Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018); with other settings,
    DDPG.
    """

    config_class = TD3Config
    is_deterministic = True

    @classmethod
    def acting_settings(cls, config: CommonConfig) -> dict[str, Any]:
        """Return settings for noise on the actions, and uniform ones at the start."""
        own = cls.own_config(config)
        kind = "GaussianNoise"
        size = "stddev"
        if own.noise_type == "ornstein_uhlenbeck":
            kind = "OrnsteinUhlenbeckNoise"
            size = "sigma"
        return {
            "exploration": {
                "type": kind,
                size: own.exploration_noise,
                "random_timesteps": own.random_timesteps,
            }
        }

    def update_spec(self) -> UpdateSpec:
        """Return the critics' loss, followed by a phase for the actor."""
        config = self.config
        actor = self.actor
        critics = self.critics
        target_actor = self.targets["target/actor"]

        def critic_loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
            means, _ = actor.outputs(minibatch[c.NEW_OBS], weights=target_actor.tensors())
            next_actions = tf.tanh(means)
            if config.smooth_target_policy:
                noise = config.target_noise * tf.random.stateless_normal(
                    tf.shape(means), minibatch[SEEDS][0]
                )
                next_actions = smoothed_actions(
                    next_actions, noise, noise_clip=config.target_noise_clip
                )
            next_q = critics.q(
                minibatch[c.NEW_OBS], next_actions, weights=self.target_critics.tensors()
            )
            q = critics.q(minibatch[c.OBS], critics.unit(minibatch[c.ACTIONS]))
            return critic_loss_of(minibatch, q, tf.reduce_min(next_q, axis=0))

        def actor_loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
            means, _ = actor.outputs(minibatch[c.OBS])
            return -tf.reduce_mean(critics.q(minibatch[c.OBS], tf.tanh(means))[0]), {}

        adam = self.adam(config.adam_epsilon)
        every = config.policy_delay
        phase = Phase(
            "actor", actor_loss, (), actor.trainable_variables, adam, ACTOR_LR, every=every
        )
        return self.critics_spec(critic_loss, phase)
