"""Settings of A2C; loads no TensorFlow."""

from __future__ import annotations

from aiorl.config.key import changed
from aiorl.learning.algorithms.on_policy_config import OnPolicyConfig

__all__ = ["A2CConfig"]


class A2CConfig(OnPolicyConfig):
    """A2C's own settings, and its defaults of the common ones."""

    is_one_minibatch = True

    algo: str = changed(OnPolicyConfig, "algo", "a2c")
    lr: float = changed(OnPolicyConfig, "lr", 7e-4)
    num_envs_per_worker: int = changed(OnPolicyConfig, "num_envs_per_worker", 8)
    rollout_fragment_length: int = changed(OnPolicyConfig, "rollout_fragment_length", 16)
    train_batch_size: int = changed(OnPolicyConfig, "train_batch_size", 256)
    entropy_coeff: float = changed(OnPolicyConfig, "entropy_coeff", 0.01)
    lambda_: float = changed(OnPolicyConfig, "lambda_", 1.0)
