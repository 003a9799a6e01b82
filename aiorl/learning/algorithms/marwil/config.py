"""Settings of MARWIL; loads no TensorFlow."""

from __future__ import annotations

from aiorl.config.key import changed, key
from aiorl.learning.algorithms.imitation_config import ImitationConfig

__all__ = ["MARWILConfig"]

_GROUP = "MARWIL"


class MARWILConfig(ImitationConfig):
    """MARWIL's own settings, and its defaults of the common ones."""

    why_on_learner = "each update moves the scale of the advantages that the next one's loss is made of"

    algo: str = changed(ImitationConfig, "algo", "marwil")
    vf_loss_coeff: float = changed(ImitationConfig, "vf_loss_coeff", 1.0)
    postprocess_inputs: bool = changed(ImitationConfig, "postprocess_inputs", True)

    beta: float = key(
        1.0, "How much more an action counts the better it turned out; 0: all alike, as in behaviour cloning.",
        group=_GROUP, ge=0,
    )  # fmt: skip
    max_weight: float = key(20.0, "Most that an action can count.", group=_GROUP, gt=0)
    moving_average_sqd_adv_norm_start: float = key(
        100.0, "Mean square of the advantages to begin with, by whose root they are divided.", group=_GROUP, gt=0
    )
    moving_average_sqd_adv_norm_update_rate: float = key(
        0.01, "Share of a new train batch in that mean.", group=_GROUP, gt=0, le=1
    )

    def check(self) -> None:
        """Refuse values that don't go together.

        Raises: ConfigError naming the key that should change.
        """
        super().check()
        hint = "Leave it out: marwil divides advantages by the root of their moving mean square."
        self.refuse_unless(False, ("normalize_advantages",), "algorithms that sample", hint=hint)
