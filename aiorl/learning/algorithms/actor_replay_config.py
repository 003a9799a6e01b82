"""Settings that algorithms share which have a replay, an actor and critics; loads no TensorFlow."""

from __future__ import annotations

from functools import partial

from aiorl.config.key import changed, key
from aiorl.config.schema import Activation, ModelConfig
from aiorl.learning.algorithms.replay_config import ReplayConfig

__all__ = ["ActorReplayConfig", "CriticsModelConfig"]

_learning = partial(key, group="Learning")


class CriticsModelConfig(ModelConfig):
    """Shape of the networks, by default as in the papers of SAC and IQL and in the code of TD3's authors."""

    fcnet_hiddens: tuple[int, ...] = changed(ModelConfig, "fcnet_hiddens", (256, 256))
    fcnet_activation: Activation = changed(ModelConfig, "fcnet_activation", "relu")


class ActorReplayConfig(ReplayConfig):
    """The settings of such algorithms, and their defaults of the common ones."""

    model: CriticsModelConfig = changed(ReplayConfig, "model", CriticsModelConfig())
    lr: float = changed(ReplayConfig, "lr", 3e-4)
    num_envs_per_worker: int = changed(ReplayConfig, "num_envs_per_worker", 1)
    rollout_fragment_length: int = changed(ReplayConfig, "rollout_fragment_length", 8)
    train_batch_size: int = changed(ReplayConfig, "train_batch_size", 256)
    grad_clip: float | None = changed(ReplayConfig, "grad_clip", None)
    training_intensity: float = changed(ReplayConfig, "training_intensity", 256.0)
    target_update_freq: int = changed(ReplayConfig, "target_update_freq", 1)
    tau: float = changed(ReplayConfig, "tau", 0.005)
    max_env_steps_ahead: int = changed(ReplayConfig, "max_env_steps_ahead", 64)
    broadcast_updates: int = changed(ReplayConfig, "broadcast_updates", 1)
    replay_capacity: int = changed(ReplayConfig, "replay_capacity", 1_000_000)
    learning_starts: int | None = changed(ReplayConfig, "learning_starts", 100)

    actor_lr: float | None = _learning(
        None, "Learning rate of the network that acts, without a schedule; null: that of the critics, lr with its "
        "lr_schedule.", gt=0, allow_inf_nan=False,
    )  # fmt: skip
    twin_q: bool = _learning(True, "Two critics, of whose values the smaller one counts.")
    random_timesteps: int = _learning(
        100, "Env steps, of all workers together, of uniformly random actions at first.", unit="env steps", ge=0
    )
