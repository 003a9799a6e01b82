"""Settings that algorithms share which correct for older policies by V-trace; loads no TensorFlow."""

from __future__ import annotations

from functools import partial

from aiorl.config.key import key
from aiorl.learning.algorithms.streaming_config import StreamingConfig

__all__ = ["VTraceConfig"]

_vtrace = partial(key, group="V-trace")


class VTraceConfig(StreamingConfig):
    """The settings of such algorithms."""

    vtrace: bool = _vtrace(True, "Correct for old policies by V-trace; false takes all importance ratios as 1.")
    vtrace_clip_rho_threshold: float = _vtrace(1.0, "Cut of the importance ratios in the value targets.", gt=0)
    vtrace_clip_pg_rho_threshold: float = _vtrace(1.0, "Cut of the importance ratios of the policy gradient.", gt=0)
    lambda_: float = _vtrace(
        1.0, "Decay of the trace; 1 is V-trace as published, less trusts the values more.", ge=0, le=1
    )

    def check(self) -> None:
        """Refuse values that don't go together.

        Raises: ConfigError naming the key that should change.
        """
        super().check()
        names = ("vtrace_clip_rho_threshold", "vtrace_clip_pg_rho_threshold")
        self.refuse_unless(self.vtrace, names, "vtrace", hint="Set vtrace: true, or leave it out.")
