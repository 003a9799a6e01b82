"""Metrics of finished episodes, and of the time that a sampler spends."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiorl.data.columns import DEFAULT_POLICY_ID, F64, Array, Columns
from aiorl.process.log_once import log_once
from aiorl.text import one_line

logger = logging.getLogger(__name__)

MAX_NAME = 200
"""Largest number of characters in a name on the wire."""
MAX_NAMES = 1000
"""Largest number of names in one fragment besides lengths and rewards; a run has its own limit."""
MAX_HIST = 1000
"""Largest number of values of one history that are sent and shown: the newest ones."""

_KINDS = ("policy_reward", "custom", "hist", "estimate")

FloatsByName = Mapping[str, F64]


class RolloutMetrics(NamedTuple):
    """Metrics of a finished episode; rewards are raw (unclipped)."""

    episode_length: int
    episode_reward: float
    agent_rewards: dict[tuple[str, str], float] = {}  # noqa: RUF012 - aiorl never changes it
    custom_metrics: dict[str, float] = {}  # noqa: RUF012
    perf_stats: dict[str, float] = {}  # noqa: RUF012
    hist_data: dict[str, list[Any]] = {}  # noqa: RUF012


@dataclass(frozen=True, slots=True)
class EpisodeColumns:
    """Finished episodes as columns, in the order in which they ended; sent to the learner.

    Attributes:
        lengths: int32 [E], transitions in each episode.
        rewards: float64 [E], undiscounted raw return of each episode.
        policy_rewards: policy id -> float64 [E'], returns of its agents, one for each agent and
            episode; without the default policy, with which a single agent acts.
        custom: name -> float64 [E'], custom metrics of the episodes that have them.
        hist: name -> float64 [K], values of episodes' histories.
        estimates: estimator and metric, such as "is/V_prev" -> float64 [E'], off-policy estimates
            for episodes that were read; these are not among the E episodes.
    """

    lengths: NDArray[np.int32]
    rewards: F64
    policy_rewards: FloatsByName = field(default_factory=dict)
    custom: FloatsByName = field(default_factory=dict)
    hist: FloatsByName = field(default_factory=dict)
    estimates: FloatsByName = field(default_factory=dict)

    @classmethod
    def empty(cls) -> EpisodeColumns:
        """Return columns without episodes."""
        return cls(np.zeros(0, np.int32), np.zeros(0, np.float64))

    @classmethod
    def of(
        cls,
        metrics: Sequence[RolloutMetrics],
        estimates: Iterable[tuple[str, Mapping[str, float]]] = (),
    ) -> EpisodeColumns:
        """Return finished episodes in the order given, and estimates as pairs of an estimator's
        name and its metrics.

        Values of custom metrics and histories that are not finite numbers are left out; if they are
        not numbers, a warning is logged once for each name. Names are cut to `MAX_NAME` characters,
        names beyond `MAX_NAMES` are left out, and each history keeps its newest `MAX_HIST` values.
        """
        series = _Series()
        for episode in metrics:
            for (_, policy_id), reward in episode.agent_rewards.items():
                if policy_id != DEFAULT_POLICY_ID:
                    series.add(f"policy_reward/{policy_id}", [reward])
            for name, value in episode.custom_metrics.items():
                series.add(f"custom/{name}", [value])
            for name, values in episode.hist_data.items():
                series.add(f"hist/{name}", values, newest=MAX_HIST)
        for estimator, estimates_by_name in estimates:
            for name, value in estimates_by_name.items():
                series.add(f"estimate/{estimator}/{name}", [value])
        lengths = np.array([episode.episode_length for episode in metrics], np.int32)
        rewards = np.array([episode.episode_reward for episode in metrics], np.float64)
        return cls.from_arrays({"lengths": lengths, "rewards": rewards, **series.to_arrays()})

    def to_arrays(self) -> dict[str, Array]:
        """Return a flat mapping of arrays for the wire; names in a mapping begin with its kind and
        "/".
        """
        arrays: dict[str, Array] = {"lengths": self.lengths, "rewards": self.rewards}
        all_series = (self.policy_rewards, self.custom, self.hist, self.estimates)
        for kind, series in zip(_KINDS, all_series, strict=True):
            for name, values in series.items():
                arrays[f"{kind}/{name}"] = values
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Columns) -> EpisodeColumns:
        """Read the result of ``to_arrays``; unknown entries are ignored.

        Raises:
            KeyError: there are no lengths or rewards.
        """
        by_kind: dict[str, dict[str, Array]] = {kind: {} for kind in _KINDS}
        for name, values in arrays.items():
            kind, _, rest = name.partition("/")
            if rest and kind in by_kind:
                by_kind[kind][rest] = values
        return cls(
            lengths=arrays["lengths"],
            rewards=arrays["rewards"],
            policy_rewards=by_kind["policy_reward"],
            custom=by_kind["custom"],
            hist=by_kind["hist"],
            estimates=by_kind["estimate"],
        )


class _Series:
    """Finite numbers by name."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(
        self,
        name: str,
        values: Iterable[Any],
        *,
        newest: int = 0,
    ) -> None:
        """Add values to a name, and keep only the ``newest`` of all its values, 0 for all."""
        name = one_line(name[:MAX_NAME], MAX_NAME)
        if not isinstance(values, Iterable) or getattr(values, "ndim", 1) == 0:
            values = [values]  # a single number instead of several
        if name not in self._values and len(self._values) >= MAX_NAMES:
            return
        numbers = self._values.setdefault(name, [])
        numbers.extend(filter(math.isfinite, (_number(name, value) for value in values)))
        if newest:
            del numbers[:-newest]

    def to_arrays(self) -> dict[str, F64]:
        return {
            name: np.array(values, np.float64) for name, values in self._values.items() if values
        }


def _number(name: str, value: Any) -> float:
    """Convert a user's value to a float; NaN if it is not a number."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        if log_once(f"no number: {name}"):
            kind, _, name_of_metric = name.partition("/")
            logger.warning(
                "%s %r is left out: it is %s (%s), expected a number",
                "custom metric" if kind == "custom" else "entry of hist_data",
                name_of_metric,
                repr(value)[:100],
                type(value).__name__,
            )
        return math.nan


@dataclass(slots=True)
class PerfStats:
    """Time that a sampler spends in each stage; totals in seconds over ``iters`` iterations."""

    iters: int = 0
    env_wait_time: float = 0.0
    processing_time: float = 0.0
    inference_time: float = 0.0

    def add(self, totals: Mapping[str, float]) -> None:
        """Add totals by the names of the attributes; missing ones are 0."""
        for name in self.__slots__:
            total = getattr(self, name) + totals.get(name, 0.0)
            setattr(self, name, total)

    def get(self) -> dict[str, float]:
        """Return means per iteration in milliseconds; 0.0 before the first iteration."""
        factor = 1000.0 / self.iters if self.iters else 0.0
        return {
            "mean_env_wait_ms": self.env_wait_time * factor,
            "mean_processing_ms": self.processing_time * factor,
            "mean_inference_ms": self.inference_time * factor,
        }
