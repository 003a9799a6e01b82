"""Settings of IMPALA; loads no TensorFlow."""

from __future__ import annotations

from aiorl.config.key import changed, key
from aiorl.learning.algorithms.vtrace_config import VTraceConfig

__all__ = ["IMPALAConfig"]


class IMPALAConfig(VTraceConfig):
    """IMPALA's defaults of the settings that streaming algorithms share."""

    algo: str = changed(VTraceConfig, "algo", "impala")
    entropy_coeff: float = changed(VTraceConfig, "entropy_coeff", 0.01)
    grad_clip: float | None = changed(VTraceConfig, "grad_clip", 1.0)

    kl_stop: float | None = key(
        None, "An update ends after a minibatch whose divergence from the policies that sampled is above this; null: "
        "never.", group="V-trace", unit="nats", gt=0,
    )  # fmt: skip

    @property
    def has_whole_sequences(self) -> bool:
        """See the base class: V-trace is computed in each minibatch."""
        return True
