"""Settings of PG; loads no TensorFlow."""

from __future__ import annotations

from typing import Literal

from aiorl.config.key import changed, key
from aiorl.learning.algorithms.on_policy_config import OnPolicyConfig

__all__ = ["PGConfig"]

_NO_VALUES = "there are no values to learn or to trust"


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
    lambda_: float = key(
        1.0, "Always 1: each action counts by what followed it.", group="Learning", unsupported=_NO_VALUES
    )
    vf_loss_coeff: float = key(0.0, "Always 0.", group="Learning", unsupported=_NO_VALUES)
