"""Settings of behaviour cloning; loads no TensorFlow."""

from __future__ import annotations

from aiorl.config.key import changed
from aiorl.learning.algorithms.imitation_config import ImitationConfig

__all__ = ["BCConfig"]


class BCConfig(ImitationConfig):
    """The settings of behaviour cloning, and its defaults of the common ones."""

    algo: str = changed(ImitationConfig, "algo", "bc")

    def check(self) -> None:
        """Refuse values that don't go together.

        Raises: ConfigError naming the key that should change.
        """
        super().check()
        names = ("vf_loss_coeff", "normalize_advantages", "normalize_rewards")
        hint = "Leave it out: bc takes all stored actions as equally good. marwil learns a value."
        self.refuse_unless(False, names, "algorithms that learn a value", hint=hint)
