"""An algorithm of a user's own that updates several policies together, by import path
"joint_algorithm:CentralCritic".
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from aiorl.algorithms import (
    DQN,
    Algorithm,
    DQNConfig,
    OnPolicyConfig,
    Update,
    adam,
    chain,
    changed,
    descend,
    epochs,
    masked_mean,
    minibatches,
    of_policy,
    on_policy,
    returns,
    rows_forward,
    schedules,
    to_tf_distribution,
)
from aiorl.data import columns as c


class CentralCriticConfig(OnPolicyConfig):
    """Settings of policies with a common critic."""

    algo: str = changed(OnPolicyConfig, "algo", "joint_algorithm:CentralCritic")
    lr: float = changed(OnPolicyConfig, "lr", 0.01)
    batch_mode: Any = changed(OnPolicyConfig, "batch_mode", "complete_episodes")


class CentralCritic(Algorithm[CentralCriticConfig]):
    """PPO without its value function: the critic of all policies sees what all observe.

    It is MAPPO (Yu et al. 2022, https://arxiv.org/abs/2103.01955) with returns of whole episodes.
    """

    config_class = CentralCriticConfig
    is_joint = True

    @staticmethod
    def experience(config: CentralCriticConfig) -> Any:
        columns = (c.OBS, c.ACTIONS, c.ACTION_LOGP, c.ADVANTAGES)
        return on_policy(config, returns(config, columns))

    @staticmethod
    def update(config: CentralCriticConfig, networks: Any) -> Update:
        models = networks.by_policy
        critic = keras.Sequential([keras.layers.Dense(32, "tanh"), keras.layers.Dense(len(models))])
        critic.build((None, sum(model.obs_shape[0] for model in models.values())))

        def critic_loss(minibatch: Any, knobs: Any) -> Any:
            parts = [minibatch[policy_id] for policy_id in models]
            valid = tf.stack([part[c.VALID] for part in parts], axis=1)
            targets = tf.stack([part[c.ADVANTAGES] for part in parts], axis=1)
            errors = targets - critic(tf.concat([part[c.OBS] for part in parts], axis=1))
            shares = {
                f"valid_{name}": tf.reduce_mean(part[c.VALID]) for name, part in minibatch.items()
            }
            loss = masked_mean(tf.square(errors), valid)
            return loss, {"errors": tf.stop_gradient(errors), **shares}

        def actor_step(number: int, policy_id: str) -> Any:
            model = models[policy_id]
            distribution = to_tf_distribution(model.distribution)

            def loss(minibatch: Any, knobs: Any) -> Any:
                dist_inputs, _, columns = rows_forward(model, minibatch)
                valid = columns[c.VALID]
                logp = distribution.logp(dist_inputs, columns[c.ACTIONS])
                ratio = tf.exp(tf.where(valid > 0, logp - columns[c.ACTION_LOGP], 0.0))
                errors = columns["errors"][:, number]
                gain = tf.minimum(ratio * errors, tf.clip_by_value(ratio, 0.8, 1.2) * errors)
                return -masked_mean(gain, valid), {"ratio": masked_mean(ratio, valid)}

            optimizer = adam(config, config.adam_epsilon)
            step = descend(model.trainable_variables, loss, optimizer, clip=config.grad_clip)
            return of_policy(policy_id, step)

        shared = descend(critic.trainable_variables, critic_loss, adam(config, config.adam_epsilon))
        actors = [actor_step(number, policy_id) for number, policy_id in enumerate(models)]
        parts = minibatches(config.minibatch_steps(), chain(shared, *actors))
        return Update(
            loop=epochs(config.num_sgd_iter, parts),
            knobs=schedules(config),
            saved={f"critic/{number}": item.value for number, item in enumerate(critic.variables)},
        )


class OtherCriticConfig(CentralCriticConfig):
    """The same settings, of another algorithm."""

    algo: str = changed(CentralCriticConfig, "algo", "joint_algorithm:OtherCritic")


class OtherCritic(CentralCritic):
    """The same algorithm by another name."""

    config_class = OtherCriticConfig


class JointDQNConfig(DQNConfig):
    """Settings of an algorithm that has no joint experience."""

    algo: str = changed(DQNConfig, "algo", "joint_algorithm:JointDQN")


class JointDQN(DQN):
    """DQN that claims to update several policies together."""

    config_class = JointDQNConfig
    is_joint = True
