"""Settings of PPO; loads no TensorFlow."""

from __future__ import annotations

from typing import ClassVar

from aiorl.config.key import changed
from aiorl.config.schema import CommonConfig, key
from aiorl.errors import ConfigError
from aiorl.policy.schedules import Schedule

__all__ = ["PPOConfig"]

_GROUP = "PPO"


class PPOConfig(CommonConfig):
    """PPO's own settings, and its defaults of the common ones."""

    on_policy: ClassVar[bool] = True

    algo: str = changed(CommonConfig, "algo", "ppo")
    lr: float = changed(CommonConfig, "lr", 5e-4)
    train_batch_size: int = changed(CommonConfig, "train_batch_size", 4096)
    num_envs_per_worker: int = changed(CommonConfig, "num_envs_per_worker", 32)
    rollout_fragment_length: int = changed(CommonConfig, "rollout_fragment_length", 64)

    lambda_: float = key(
        0.95, "Lambda of generalised advantage estimation: 0 trusts the values, 1 the returns.", group=_GROUP,
        ge=0, le=1,
    )  # fmt: skip
    clip_param: float = key(
        0.2, "The ratio of new to old action probability counts up to 1 +- this.", group=_GROUP, gt=0
    )
    vf_clip_param: float | None = key(
        None, "How far a value may profitably move in one update, in units of return; null: any far.", group=_GROUP,
        gt=0,
    )  # fmt: skip
    vf_loss_coeff: float = key(0.5, "Weight of the value loss.", group=_GROUP, ge=0)
    entropy_coeff: float = key(0.0, "Weight of the entropy bonus, per nat.", group=_GROUP, ge=0)
    entropy_coeff_schedule: list[tuple[float, float]] | None = key(
        None, "entropy_coeff over env steps, as [[env step, value], ...].", group=_GROUP
    )
    lr_schedule: list[tuple[float, float]] | None = key(
        None, "lr over env steps, as [[env step, value], ...].", group=_GROUP
    )
    kl_coeff: float = key(
        0.0, "First weight of the divergence from the old policy; it adapts towards kl_target. 0: no penalty.",
        group=_GROUP, ge=0,
    )  # fmt: skip
    kl_target: float = key(0.01, "Divergence that kl_coeff aims at.", group=_GROUP, unit="nats", gt=0)
    kl_stop: float | None = key(
        None, "An update ends after a minibatch whose divergence is above this; null: never.", group=_GROUP,
        unit="nats", gt=0,
    )  # fmt: skip
    num_sgd_iter: int = key(10, "Epochs: passes over each train batch.", group=_GROUP, unit="epochs", ge=1)
    sgd_minibatch_size: int | None = key(
        None, "Env steps in one minibatch; null takes a sixteenth of the train batch, at least 256.", group=_GROUP,
        unit="env steps", ge=1,
    )  # fmt: skip
    shuffle_sequences: bool = key(True, "Visit rows in a new random order each epoch.", group=_GROUP)
    normalize_advantages: bool = key(
        True, "Scale the advantages of each minibatch to mean 0 and deviation 1.", group=_GROUP
    )
    grad_clip: float | None = key(0.5, "Largest global norm of a gradient; null: not clipped.", group=_GROUP, gt=0)
    adam_epsilon: float = key(1e-5, "Adam's epsilon.", group=_GROUP, gt=0)

    def minibatch_steps(self) -> int:
        """Env steps in one minibatch."""
        if self.sgd_minibatch_size is not None:
            return self.sgd_minibatch_size
        return min(max(256, self.train_batch_size // 16), self.train_batch_size)

    def fragments_per_batch(self) -> int:
        """Fragments that make up a train batch; with complete episodes, the least number that can."""
        return -(-self.train_batch_size // (self.rollout_fragment_length * self.num_envs_per_worker))

    def check(self) -> None:
        """Refuses values that don't go together.

        Raises: ConfigError naming the key that should change.
        """
        super().check()
        Schedule.of(self.lr, self.lr_schedule, key="lr_schedule")
        Schedule.of(self.entropy_coeff, self.entropy_coeff_schedule, key="entropy_coeff_schedule")
        minibatch = self.minibatch_steps()
        if minibatch > self.train_batch_size:
            raise ConfigError(
                f"sgd_minibatch_size {minibatch} is more than train_batch_size {self.train_batch_size}.",
                key="sgd_minibatch_size", value=minibatch,
                hint=f"Set it to {self.train_batch_size} or less.",
            )  # fmt: skip
        recurrent = self.model.use_lstm or self.model.use_gru
        if recurrent and self.batch_mode == "truncate_episodes" and minibatch % self.rollout_fragment_length:
            raise ConfigError(
                f"A recurrent model trains on whole sequences of rollout_fragment_length "
                f"{self.rollout_fragment_length} steps, so minibatches of {minibatch} steps don't work out.",
                key="sgd_minibatch_size", value=minibatch,
                hint=f"Set it to a multiple of {self.rollout_fragment_length}.",
            )  # fmt: skip
