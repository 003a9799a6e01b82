"""Settings of IMPALA; loads no TensorFlow."""

from __future__ import annotations

from aiorl.algorithms.streaming_config import StreamingConfig
from aiorl.config.key import changed

__all__ = ["IMPALAConfig"]


class IMPALAConfig(StreamingConfig):
    """IMPALA's defaults of the settings that streaming algorithms share."""

    algo: str = changed(StreamingConfig, "algo", "impala")
    entropy_coeff: float = changed(StreamingConfig, "entropy_coeff", 0.01)
    grad_clip: float | None = changed(StreamingConfig, "grad_clip", 1.0)
