"""Iterations of a training: when the current one may end, and what it has cost."""

from __future__ import annotations

import logging
import time

from aiorl.config.parts import ReportPart, SamplePart
from aiorl.run.counters import Counters
from aiorl.run.report.results import SystemUsage

logger = logging.getLogger(__name__)

_MANY_STEPS = 3000
"""Env steps per environment after which a quarter of the environments should have finished an
episode."""
_PACE_S = 1.0
_PACE_SHARE = 0.02
_LATE_SHARE = 1 / 3600
"""Shares of the age of a run: an iteration takes the first up to `_PACE_S`, and at least the second,
which is more after an hour. So a week has 22,000 results, not 600,000."""


class Iteration:
    """Current iteration of a training."""

    def __init__(
        self,
        report: ReportPart,
        sample: SamplePart,
        counters: Counters,
        *,
        is_paced: bool = False,
        age_s: float = 0.0,
    ) -> None:
        """Begin the first iteration.

        Args:
            report: least length of an iteration, and whether it reports the use of the system.
            sample: number of environments.
            counters: totals of the run.
            is_paced: end the first iteration after one update, and later ones at intervals that
                grow with the age of the run: up to a second, and after an hour beyond that.
            age_s: seconds that the run has been trained before this session.
        """
        self._report = report
        self._num_envs = sample.num_envs
        self._counters = counters
        self._is_paced = self._is_first = is_paced
        self._first_began = time.monotonic() - age_s
        self._steps_before = counters.env_steps_trained
        self._may_ask_for_horizon = not sample.has_horizon
        self._usage = SystemUsage() if report.log_sys_usage else None
        self.begin()

    def begin(self) -> None:
        """Begin the next iteration."""
        self._is_first = self._is_first and not self.has_trained
        self._began = time.monotonic()
        self._steps_before = self._counters.env_steps_trained

    def usage(self) -> dict[str, float] | None:
        """Return the CPU and memory use since the last call; None if the run does not report it."""
        return None if self._usage is None else self._usage.measure()

    def look_at_episodes(self, count: int) -> None:
        """Warn once if hardly any episode ends and no horizon is set.

        Args:
            count: episodes that have finished so far.
        """
        env_steps = self._counters.env_steps_sampled
        if not self._may_ask_for_horizon or env_steps < _MANY_STEPS * self._num_envs:
            return
        self._may_ask_for_horizon = False
        if 4 * count < self._num_envs:
            logger.warning(
                "only %d episodes ended in %s env steps. If episodes may never end, set horizon,"
                " the number of steps after which they are cut: --horizon 1000",
                count,
                f"{env_steps:,}",
            )

    @property
    def has_trained(self) -> bool:
        """True once this iteration has trained on any env steps."""
        return self._counters.env_steps_trained > self._steps_before

    def is_due(self) -> bool:
        """Return True if it can end: after ``min_iter_time_s`` (or its own pace) and
        ``timesteps_per_iteration``.
        """
        if self._is_first:
            return self.has_trained
        now = time.monotonic()
        min_time_s = self._report.min_iter_time_s
        if self._is_paced and not min_time_s:
            age_s = now - self._first_began
            min_time_s = max(min(_PACE_S, _PACE_SHARE * age_s), _LATE_SHARE * age_s)
        is_long_enough = now - self._began >= min_time_s
        env_steps = self._counters.env_steps_trained - self._steps_before
        return is_long_enough and env_steps >= self._report.timesteps_per_iteration
