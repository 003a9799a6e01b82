"""What is reported of finished episodes and of the sampler's own time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["EpisodeColumns", "PerfStats", "RolloutMetrics"]


class RolloutMetrics(NamedTuple):
    """One finished episode; rewards are raw (unclipped)."""

    episode_length: int
    episode_reward: float
    agent_rewards: dict[tuple[str, str], float] = {}  # noqa: RUF012 - never written to by us
    custom_metrics: dict[str, float] = {}  # noqa: RUF012
    perf_stats: dict[str, float] = {}  # noqa: RUF012
    hist_data: dict[str, list[Any]] = {}  # noqa: RUF012


@dataclass(frozen=True, slots=True)
class EpisodeColumns:
    """Finished episodes as columns, in the order they ended; what travels to the learner.

    Attributes:
        lengths: int32 [E], transitions per episode.
        rewards: float64 [E], undiscounted return per episode, raw.
    """

    lengths: NDArray[np.int32]
    rewards: NDArray[np.float64]

    @classmethod
    def empty(cls) -> EpisodeColumns:
        """No episodes."""
        return cls(np.zeros(0, np.int32), np.zeros(0, np.float64))

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """As a mapping of arrays, for the wire."""
        return {"lengths": self.lengths, "rewards": self.rewards}


@dataclass(slots=True)
class PerfStats:
    """Where a sampler's time goes; totals in seconds over ``iters`` iterations."""

    iters: int = 0
    env_wait_time: float = 0.0
    processing_time: float = 0.0
    inference_time: float = 0.0

    def get(self) -> dict[str, float]:
        """Means per iteration in milliseconds; 0.0 before the first iteration."""
        factor = 1000.0 / self.iters if self.iters else 0.0
        return {
            "mean_env_wait_ms": self.env_wait_time * factor,
            "mean_processing_ms": self.processing_time * factor,
            "mean_inference_ms": self.inference_time * factor,
        }
