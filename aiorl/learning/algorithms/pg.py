"""Policy gradient with the rewards to go, without a baseline (docs/algorithms/pg.md)."""

from __future__ import annotations

from typing import Literal

from aiorl.config.key import changed, key
from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c
from aiorl.data.fragment import SamplePlan
from aiorl.learning.algorithms.compiled_algorithm import rows_forward
from aiorl.learning.algorithms.compiled_update import UpdateSpec
from aiorl.learning.algorithms.on_policy import OnPolicy, OnPolicyConfig
from aiorl.learning.algorithms.rows import sequence_columns
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses.policy_gradient import masked_mean, masked_normalise
from aiorl.learning.models.distributions import to_tf_distribution


class PGConfig(OnPolicyConfig):
    """PG's defaults of the common settings."""

    is_one_minibatch = True
    needs_whole_episodes = True

    algo: str = changed(OnPolicyConfig, "algo", "pg")
    lr: float = changed(OnPolicyConfig, "lr", 1e-3)
    num_envs_per_worker: int = changed(OnPolicyConfig, "num_envs_per_worker", 8)
    rollout_fragment_length: int = changed(OnPolicyConfig, "rollout_fragment_length", 32)
    train_batch_size: int = changed(OnPolicyConfig, "train_batch_size", 1024)
    batch_mode: Literal["truncate_episodes", "complete_episodes"] = changed(
        OnPolicyConfig, "batch_mode", "complete_episodes"
    )
    lambda_: float = key(1.0, group="Learning", ge=1, le=1)
    """Always 1, as there are no values to trust: each action counts by what followed it."""
    vf_loss_coeff: float = key(0.0, group="Learning", ge=0, le=0)
    """Always 0, as there are no values to learn."""


class PG(OnPolicy[PGConfig]):
    """Policy gradient with the rewards to go, without a baseline (Williams 1992)."""

    config_class = PGConfig

    @classmethod
    def sample_plan(cls, config: CommonConfig) -> SamplePlan:
        """Return a plan of rows with discounted returns; flags and states only for recurrent models."""
        own = cls.own_config(config)
        return SamplePlan("returns", {"gamma": own.gamma}, (*cls.columns(own), *sequence_columns(own)))

    @classmethod
    def columns(cls, config: PGConfig) -> tuple[str, ...]:
        """Return the columns of its loss."""
        return c.OBS, c.ACTIONS, c.ADVANTAGES

    def update_spec(self) -> UpdateSpec:
        """Return the loss over rows, or over sequences if the model is recurrent."""
        config, model, buffers = self.config, self.model, self.buffers
        distribution = to_tf_distribution(model.distribution)

        def loss(minibatch: Tensors, coefficients: Tensors) -> tuple[tf.Tensor, Tensors]:
            dist_inputs, _, columns = rows_forward(model, minibatch, buffers)
            valid = columns[c.VALID]
            returns = columns[c.ADVANTAGES]
            weights = masked_normalise(returns, valid) if config.normalize_advantages else returns
            logp = tf.where(valid > 0, distribution.logp(dist_inputs, columns[c.ACTIONS]), 0.0)
            policy_loss = -masked_mean(logp * weights, valid)
            entropy = masked_mean(distribution.entropy(dist_inputs), valid)
            total = policy_loss - coefficients["entropy_coeff"] * entropy
            return total, {"policy_loss": policy_loss, "entropy": entropy, "mean_return": masked_mean(returns, valid)}

        return UpdateSpec(loss, ("policy_loss", "entropy", "mean_return"), ("lr", "entropy_coeff"))
