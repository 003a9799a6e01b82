"""Settings of SAC; loads no TensorFlow."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal

from aiorl.config.key import changed, key
from aiorl.learning.algorithms.actor_replay_config import ActorReplayConfig
from aiorl.learning.algorithms.sde_config import SDEConfig

__all__ = ["SACConfig"]

_sac = partial(key, group="SAC")


class SACConfig(ActorReplayConfig, SDEConfig):
    """SAC's own settings, and its defaults of the common ones."""

    action_spaces: ClassVar[tuple[str, ...] | None] = ("bounded Box", "Discrete")

    algo: str = changed(ActorReplayConfig, "algo", "sac")
    sde_initial_log_std: float = changed(SDEConfig, "sde_initial_log_std", -3.0)
    sde_learn_features: bool = changed(SDEConfig, "sde_learn_features", True)

    initial_alpha: float = _sac(
        1.0, "Temperature at first: what a nat of entropy is worth, in units of reward.", gt=0, allow_inf_nan=False
    )
    alpha_lr: float | None = _sac(
        None, "Learning rate of the logarithm of the temperature, without a schedule; null: lr with its lr_schedule; "
        "0: it stays as at first.", ge=0, allow_inf_nan=False,
    )  # fmt: skip
    entropy_backup: bool = _sac(True, "Targets of the critics count the entropy of what follows, too.")
    target_entropy: float | Literal["auto"] = _sac(
        "auto", "Entropy that the temperature aims at, over a Box of actions scaled to [-1, 1]; auto: minus the number "
        "of numbers in an action, or target_entropy_scale of the largest there can be.", unit="nats",
    )  # fmt: skip
    target_entropy_scale: float = _sac(
        0.98, "For choices, target_entropy auto: share of the entropy of uniform choices among the legal ones.",
        ge=0, le=1,
    )  # fmt: skip

    def check(self) -> None:
        """Refuse values that don't go together.

        Raises: ConfigError naming the key that should change.
        """
        super().check()
        self.refuse_unless(
            self.target_entropy == "auto", ("target_entropy_scale",), "target_entropy auto",
            hint="Leave it, or target_entropy, out.",
        )  # fmt: skip
        names = ("target_entropy", "target_entropy_scale")
        hint = "With alpha_lr 0 the temperature stays as at first. Leave alpha_lr, or this, out."
        self.refuse_unless(self.alpha_lr != 0, names, "a temperature that is learned", hint=hint)
