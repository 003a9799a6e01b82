"""Settings of IMPALA; loads no TensorFlow."""

from __future__ import annotations

from typing import ClassVar, Literal

from aiorl.config.key import changed
from aiorl.config.schema import CommonConfig, key
from aiorl.errors import ConfigError
from aiorl.policy.schedules import Schedule

__all__ = ["IMPALAConfig"]

_GROUP = "IMPALA"


class IMPALAConfig(CommonConfig):
    """IMPALA's own settings, and its defaults of the common ones."""

    on_policy: ClassVar[bool] = False

    algo: str = changed(CommonConfig, "algo", "impala")
    lr: float = changed(CommonConfig, "lr", 5e-4)
    train_batch_size: int = changed(CommonConfig, "train_batch_size", 4096)
    num_envs_per_worker: int = changed(CommonConfig, "num_envs_per_worker", 32)
    rollout_fragment_length: int = changed(CommonConfig, "rollout_fragment_length", 64)

    vtrace: bool = key(
        True, "Correct for old policies by V-trace; false takes all importance ratios as 1.", group=_GROUP
    )
    vtrace_clip_rho_threshold: float = key(
        1.0, "Cut of the importance ratios in the value targets.", group=_GROUP, gt=0
    )
    vtrace_clip_pg_rho_threshold: float = key(
        1.0, "Cut of the importance ratios of the policy gradient.", group=_GROUP, gt=0
    )
    lambda_: float = key(
        1.0, "Decay of the trace; 1 is V-trace as published, less trusts the values more.", group=_GROUP, ge=0, le=1
    )
    vf_loss_coeff: float = key(0.5, "Weight of the value loss.", group=_GROUP, ge=0)
    entropy_coeff: float = key(0.01, "Weight of the entropy bonus, per nat.", group=_GROUP, ge=0)
    entropy_coeff_schedule: list[tuple[float, float]] | None = key(
        None, "entropy_coeff over env steps, as [[env step, value], ...].", group=_GROUP
    )
    lr_schedule: list[tuple[float, float]] | None = key(
        None, "lr over env steps, as [[env step, value], ...].", group=_GROUP
    )
    normalize_advantages: bool = key(
        False, "Scale the advantages of each minibatch to mean 0 and deviation 1.", group=_GROUP
    )
    grad_clip: float | None = key(1.0, "Largest global norm of a gradient; null: not clipped.", group=_GROUP, gt=0)
    opt_type: Literal["adam", "rmsprop"] = key("adam", "Optimizer.", group=_GROUP)
    epsilon: float = key(1e-5, "The optimizer's epsilon; with rmsprop the paper takes 0.1.", group=_GROUP, gt=0)
    decay: float = key(0.99, "rmsprop: decay of the mean square.", group=_GROUP, ge=0, lt=1)
    momentum: float = key(0.0, "rmsprop: momentum.", group=_GROUP, ge=0, lt=1)
    num_sgd_iter: int = key(1, "Passes over each train batch.", group=_GROUP, unit="epochs", ge=1)
    sgd_minibatch_size: int | None = key(
        None, "Env steps in one minibatch, whole sequences; null takes a sixteenth of the train batch, at least 256.",
        group=_GROUP, unit="env steps", ge=1,
    )  # fmt: skip
    max_policy_lag: int | None = key(
        10, "A fragment sampled more policy versions ago than this is discarded; null: never.", group=_GROUP,
        unit="versions", ge=0,
    )  # fmt: skip
    outstanding_fragments_per_worker: int = key(
        3, "Fragments that a worker may owe or have under way at a time, within the budget of the whole run.",
        group=_GROUP, unit="fragments", ge=1,
    )  # fmt: skip

    def fragments_per_batch(self) -> int:
        """Fragments that make up a train batch."""
        return -(-self.train_batch_size // (self.rollout_fragment_length * self.num_envs_per_worker))

    def sequences_per_minibatch(self) -> int:
        """Sequences in one minibatch."""
        steps = self.sgd_minibatch_size or max(self.train_batch_size // 16, 256)
        return max(1, steps // self.sequence_length())

    def check(self) -> None:
        """Refuses values that don't go together.

        Raises: ConfigError naming the key that should change.
        """
        super().check()
        Schedule.of(self.lr, self.lr_schedule, key="lr_schedule")
        Schedule.of(self.entropy_coeff, self.entropy_coeff_schedule, key="entropy_coeff_schedule")
        fragment = self.rollout_fragment_length * self.num_envs_per_worker
        if self.batch_mode == "truncate_episodes" and self.train_batch_size % fragment:
            below = self.train_batch_size - self.train_batch_size % fragment
            raise ConfigError(
                f"train_batch_size {self.train_batch_size} can't be made up of fragments of {fragment} env steps "
                f"(rollout_fragment_length {self.rollout_fragment_length} x num_envs_per_worker "
                f"{self.num_envs_per_worker}).",
                key="train_batch_size", value=self.train_batch_size,
                hint=f"Set train_batch_size to {f'{below} or ' if below else ''}{below + fragment}.",
            )  # fmt: skip
        given = self.sgd_minibatch_size
        if given is not None and (given % self.rollout_fragment_length or given > self.train_batch_size):
            raise ConfigError(
                f"sgd_minibatch_size {given} is no multiple of rollout_fragment_length "
                f"{self.rollout_fragment_length} up to train_batch_size {self.train_batch_size}: a minibatch of "
                "V-trace holds whole sequences.",
                key="sgd_minibatch_size", value=given, hint="Leave it out to have it chosen.",
            )  # fmt: skip
