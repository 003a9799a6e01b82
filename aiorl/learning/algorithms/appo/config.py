"""Settings of APPO; loads no TensorFlow."""

from __future__ import annotations

from functools import partial

from aiorl.config.key import changed, key
from aiorl.learning.algorithms.surrogate_config import SurrogateConfig
from aiorl.learning.algorithms.vtrace_config import VTraceConfig

__all__ = ["APPOConfig"]

_appo = partial(key, group="APPO")


class APPOConfig(SurrogateConfig, VTraceConfig):
    """APPO's own settings, and its defaults of the common ones."""

    algo: str = changed(VTraceConfig, "algo", "appo")
    num_sgd_iter: int = changed(VTraceConfig, "num_sgd_iter", 4)
    entropy_coeff: float = changed(VTraceConfig, "entropy_coeff", 0.01)

    target_update_freq: int = _appo(
        1, "The target network becomes the network that learns after so many updates.", unit="updates", ge=1
    )
    target_worker_clipping: float = _appo(
        2.0, "An action counts as at least one in so many times as likely by the target policy as by the one that took "
        "it, where the ratio to the target policy is clipped.", gt=0,
    )  # fmt: skip
