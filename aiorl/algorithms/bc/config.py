"""Settings of behaviour cloning; loads no TensorFlow."""

from __future__ import annotations

from aiorl.algorithms.imitation_config import ImitationConfig
from aiorl.config.key import changed

__all__ = ["BCConfig"]


class BCConfig(ImitationConfig):
    """The settings of behaviour cloning, and its defaults of the common ones."""

    algo: str = changed(ImitationConfig, "algo", "bc")
