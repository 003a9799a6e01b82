"""Environment that leaves the cores idle: the subject is recovery, not speed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

__all__ = ["PacedCartPole"]

Obs = NDArray[np.float32]


class PacedCartPole(gymnasium.Wrapper[Obs, np.int64, Obs, np.int64]):
    """CartPole with a pause in each step."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Make one copy.

        Args:
            config: ``step_s``: pause per step in seconds.
        """
        super().__init__(gymnasium.make("CartPole-v1"))
        self._step_s = float(config["step_s"])

    def step(self, action: np.int64) -> tuple[Obs, Any, bool, bool, dict[str, Any]]:
        """Sleep, then step."""
        time.sleep(self._step_s)
        return self.env.step(action)
