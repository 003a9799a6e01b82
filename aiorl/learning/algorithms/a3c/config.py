"""Settings of A3C; loads no TensorFlow."""

from __future__ import annotations

from typing import Literal

from aiorl.config.key import changed
from aiorl.learning.algorithms.on_policy_config import OnPolicyConfig
from aiorl.learning.algorithms.streaming_config import StreamingConfig

__all__ = ["A3CConfig"]


class A3CConfig(StreamingConfig):
    """A3C's defaults of the common settings."""

    is_one_minibatch = True

    algo: str = changed(StreamingConfig, "algo", "a3c")
    gradients: Literal["learner", "workers"] = changed(StreamingConfig, "gradients", "workers")
    lr: float = changed(StreamingConfig, "lr", 7e-4)
    num_envs_per_worker: int = changed(StreamingConfig, "num_envs_per_worker", 8)
    rollout_fragment_length: int = changed(StreamingConfig, "rollout_fragment_length", 16)
    train_batch_size: int = changed(StreamingConfig, "train_batch_size", 128)
    entropy_coeff: float = changed(StreamingConfig, "entropy_coeff", 0.01)
    lambda_: float = changed(OnPolicyConfig, "lambda_", 1.0)
    max_policy_lag: int | None = changed(StreamingConfig, "max_policy_lag", 20)
    outstanding_fragments_per_worker: int = changed(StreamingConfig, "outstanding_fragments_per_worker", 2)
