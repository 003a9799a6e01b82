"""TD3: a deterministic actor and critics, all with target networks (docs/algorithms/td3.md)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from gymnasium import spaces

from aiorl.config.key import changed, key
from aiorl.data import columns as c
from aiorl.learning.algorithm import Algorithm, Experience, Networks, Observations, Update
from aiorl.learning.algorithms.critic_update import (
    ACTOR_LR,
    SEEDS_SHAPE,
    build_actor,
    critic_step,
    descend_with_adam,
    make_critics,
    update_with_critics,
)
from aiorl.learning.keys.replay import ActorReplayConfig
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses.off_policy_actor_critic import smoothed_actions
from aiorl.learning.replayed import replayed
from aiorl.learning.steps import SEEDS, TargetNetwork, every

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic

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


class TD3(Algorithm[TD3Config]):
    """Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018); with other settings,
    DDPG.
    """

    config_class = TD3Config

    @staticmethod
    def experience(config: TD3Config) -> Experience:
        """Return rows of a replay; see `Algorithm.experience`."""
        return replayed(config)

    @staticmethod
    def acting_settings(config: TD3Config) -> dict[str, Any]:
        """Return settings for noise on the actions, and uniform ones at the start;
        see `Algorithm.acting_settings`.
        """
        kind = "GaussianNoise"
        size = "stddev"
        if config.noise_type == "ornstein_uhlenbeck":
            kind = "OrnsteinUhlenbeckNoise"
            size = "sigma"
        return {
            "exploration": {
                "type": kind,
                size: config.exploration_noise,
                "random_timesteps": config.random_timesteps,
            }
        }

    @staticmethod
    def build_model(
        config: TD3Config,
        observations: Observations,
        action_space: spaces.Space[Any],
        seed: int | None,
    ) -> ActorCritic:
        """Build the actor; see `Algorithm.build_model`."""
        return build_actor(config, observations, action_space, seed, is_deterministic=True)

    @staticmethod
    def update(config: TD3Config, networks: Networks) -> Update:
        """Return a step of the critics, followed by one of the actor when it is due;
        see `Algorithm.update`.
        """
        actor = networks.model
        critics = make_critics(config, actor)
        targets = {"target/critics": TargetNetwork(critics), "target/actor": TargetNetwork(actor)}

        def judge(columns: Tensors) -> tuple[tf.Tensor, tf.Tensor, Tensors]:
            next_obs = columns[c.NEW_OBS]
            means, _ = actor.outputs(next_obs, weights=targets["target/actor"].tensors())
            next_actions = tf.tanh(means)
            if config.smooth_target_policy:
                noise = tf.random.stateless_normal(tf.shape(means), columns[SEEDS][0])
                next_actions = smoothed_actions(
                    next_actions,
                    config.target_noise * noise,
                    noise_clip=config.target_noise_clip,
                )
            weights = targets["target/critics"].tensors()
            next_q = critics.q(next_obs, next_actions, weights=weights)
            q = critics.q(columns[c.OBS], critics.unit(columns[c.ACTIONS]))
            return q, tf.reduce_min(next_q, axis=0), {}

        def actor_loss(columns: Tensors, knobs: Tensors) -> tuple[tf.Tensor, Tensors]:
            means, _ = actor.outputs(columns[c.OBS])
            return -tf.reduce_mean(critics.q(columns[c.OBS], tf.tanh(means))[0]), {}

        actor_step = descend_with_adam(
            config, actor.trainable_variables, actor_loss, lr=ACTOR_LR, name="actor"
        )
        steps = [critic_step(config, critics, judge), every(config.policy_delay, actor_step)]
        return update_with_critics(config, critics, *steps, targets=targets, seeds=SEEDS_SHAPE)
