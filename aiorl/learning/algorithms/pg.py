"""Policy gradient with rewards to go and without a baseline (docs/algorithms/pg.md)."""

from __future__ import annotations

from typing import ClassVar, Literal

from aiorl.config.key import changed, key
from aiorl.data import columns as c
from aiorl.learning.actor_critic import likelihood_loss, update_by_loss
from aiorl.learning.algorithm import Algorithm, Experience, Networks, Update
from aiorl.learning.compiled import adam
from aiorl.learning.experience import on_policy, returns
from aiorl.learning.keys.actor_critic import OnPolicyConfig
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses import masked_mean
from aiorl.learning.losses.policy_gradient import masked_normalise


class PGConfig(OnPolicyConfig):
    """PG's defaults of common keys."""

    is_one_minibatch: ClassVar[bool] = True
    needs_whole_episodes: ClassVar[bool] = True

    algo: str = changed(OnPolicyConfig, "algo", "pg")
    lr: float = changed(OnPolicyConfig, "lr", 1e-3)
    num_envs_per_worker: int = changed(OnPolicyConfig, "num_envs_per_worker", 8)
    rollout_fragment_length: int = changed(OnPolicyConfig, "rollout_fragment_length", 32)
    train_batch_size: int = changed(OnPolicyConfig, "train_batch_size", 1024)
    batch_mode: Literal["truncate_episodes", "complete_episodes"] = changed(
        OnPolicyConfig, "batch_mode", "complete_episodes"
    )
    lambda_: float = key(1.0, group="Learning", ge=1, le=1)
    """Always 1, because there are no value estimates to trust: each action is weighted by the
    return that followed it."""
    vf_loss_coeff: float = key(0.0, group="Learning", ge=0, le=0)
    """Always 0, because there are no values to learn."""


class PG(Algorithm[PGConfig]):
    """Policy gradient with rewards to go and without a baseline (Williams 1992)."""

    config_class = PGConfig

    @staticmethod
    def experience(config: PGConfig) -> Experience:
        """Return samples of the newest policy with discounted returns; see `Algorithm.experience`."""
        return on_policy(config, returns(config, (c.OBS, c.ACTIONS, c.ADVANTAGES)))

    @staticmethod
    def update(config: PGConfig, networks: Networks) -> Update:
        """Return the loss over rows, or over sequences for recurrent models: actions are weighted
        by their returns; see `Algorithm.update`.
        """

        def weigh(columns: Tensors, values: tf.Tensor, knobs: Tensors) -> tuple[tf.Tensor, Tensors]:
            weights = columns[c.ADVANTAGES]
            valid = columns[c.VALID]
            metrics = {"mean_return": masked_mean(weights, valid)}
            if config.normalize_advantages:
                weights = masked_normalise(weights, valid)
            return weights, metrics

        loss = likelihood_loss(config, networks.model, weigh)
        optimizer = adam(config, config.adam_epsilon)
        return update_by_loss(config, networks.model, loss, optimizer)
