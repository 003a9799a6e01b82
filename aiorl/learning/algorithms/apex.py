"""Ape-X: DQN with many workers, each with its own share of random actions
(docs/algorithms/apex.md).
"""

from __future__ import annotations

from aiorl.config.key import changed
from aiorl.learning.algorithms.dqn import DQN, DQNConfig
from aiorl.learning.keys.replay import ReplayConfig


class ApexConfig(DQNConfig):
    """Ape-X's defaults of DQN's keys."""

    algo: str = changed(DQNConfig, "algo", "apex")
    per_worker_epsilon: bool = changed(DQNConfig, "per_worker_epsilon", True)
    worker_priorities: bool = changed(DQNConfig, "worker_priorities", True)
    lr: float = changed(ReplayConfig, "lr", 1e-4)
    rollout_fragment_length: int = changed(ReplayConfig, "rollout_fragment_length", 50)
    train_batch_size: int = changed(ReplayConfig, "train_batch_size", 512)
    grad_clip: float | None = changed(ReplayConfig, "grad_clip", 40.0)
    n_step: int = changed(ReplayConfig, "n_step", 3)
    training_intensity: float = changed(ReplayConfig, "training_intensity", 4.0)
    target_update_freq: int = changed(ReplayConfig, "target_update_freq", 2500)
    replay_capacity: int = changed(ReplayConfig, "replay_capacity", 1_000_000)
    learning_starts: int | None = changed(ReplayConfig, "learning_starts", 50_000)
    prioritized_replay: bool = changed(ReplayConfig, "prioritized_replay", True)
    final_prioritized_replay_beta: float = changed(
        ReplayConfig, "final_prioritized_replay_beta", 0.4
    )


class Apex(DQN):
    """Distributed prioritised experience replay (Horgan et al. 2018): DQN with these settings."""

    config_class = ApexConfig
