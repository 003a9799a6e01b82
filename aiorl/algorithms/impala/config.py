"""Settings of IMPALA; loads no TensorFlow."""

from __future__ import annotations

from aiorl.algorithms.streaming_config import StreamingConfig
from aiorl.config.key import changed, key
from aiorl.errors import ConfigError

__all__ = ["IMPALAConfig"]

_GROUP = "IMPALA"


class IMPALAConfig(StreamingConfig):
    """IMPALA's own settings, and its defaults of the common ones."""

    algo: str = changed(StreamingConfig, "algo", "impala")
    entropy_coeff: float = changed(StreamingConfig, "entropy_coeff", 0.01)
    grad_clip: float | None = changed(StreamingConfig, "grad_clip", 1.0)

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

    def check(self) -> None:
        """Refuses values that don't go together.

        Raises: ConfigError naming the key that should change.
        """
        super().check()
        given = self.sgd_minibatch_size
        if given is not None and given % self.rollout_fragment_length:
            raise ConfigError(
                f"sgd_minibatch_size {given} is no multiple of rollout_fragment_length "
                f"{self.rollout_fragment_length}: a minibatch of V-trace holds whole sequences.",
                key="sgd_minibatch_size", value=given, hint="Leave it out to have it chosen.",
            )  # fmt: skip
