"""Policy gradient with rewards to go and without a baseline (docs/algorithms/pg.md)."""

from __future__ import annotations

from typing import Literal

from aiorl.config.key import changed, key
from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c
from aiorl.data.fragment import SamplePlan
from aiorl.learning.algorithms.compiled_update import UpdateSpec
from aiorl.learning.algorithms.on_policy import OnPolicy, OnPolicyConfig
from aiorl.learning.algorithms.rows import sequence_columns
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses import masked_mean
from aiorl.learning.losses.policy_gradient import masked_normalise


class PGConfig(OnPolicyConfig):
    """PG's defaults of common keys."""

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
    """Always 1, because there are no value estimates to trust: each action is weighted by the
    return that followed it."""
    vf_loss_coeff: float = key(0.0, group="Learning", ge=0, le=0)
    """Always 0, because there are no values to learn."""


class PG(OnPolicy[PGConfig]):
    """Policy gradient with rewards to go and without a baseline (Williams 1992)."""

    config_class = PGConfig

    @classmethod
    def sample_plan(cls, config: CommonConfig) -> SamplePlan:
        """Return a plan of rows with discounted returns; recurrent models also get flags and
        states.
        """
        own = cls.own_config(config)
        return SamplePlan(
            "returns", {"gamma": own.gamma}, (*cls.columns(own), *sequence_columns(own))
        )

    @classmethod
    def columns(cls, config: PGConfig) -> tuple[str, ...]:
        """Return the columns that the loss needs."""
        return c.OBS, c.ACTIONS, c.ADVANTAGES

    def update_spec(self) -> UpdateSpec:
        """Return the loss over rows, or over sequences for recurrent models: actions are weighted
        by their returns.
        """

        def returns(
            columns: Tensors, values: tf.Tensor, coefficients: Tensors
        ) -> tuple[tf.Tensor, Tensors]:
            found = columns[c.ADVANTAGES]
            valid = columns[c.VALID]
            metrics = {"mean_return": masked_mean(found, valid)}
            return masked_normalise(
                found, valid
            ) if self.config.normalize_advantages else found, metrics

        return self.likelihood_spec(returns, ("mean_return",))
