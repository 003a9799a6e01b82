"""Iterations of a training: when the current one may end, and what it has cost."""

from __future__ import annotations

import logging
import time

from aiorl.config.schema import CommonConfig
from aiorl.run.counters import Counters
from aiorl.run.report.results import SystemUsage

logger = logging.getLogger(__name__)

_MANY_STEPS = 3000
"""Env steps per environment after which a quarter of the environments should have finished an
episode."""
_PACE_S = 1.0
_PACE_SHARE = 0.02


class Iteration:
    """Current iteration of a training."""

    def __init__(self, config: CommonConfig, counters: Counters, *, is_paced: bool = False) -> None:
        """Begin the first iteration.

        Args:
            config: the effective configuration.
            counters: totals of the run.
            is_paced: end the first iteration after one update, and later ones at intervals that
                grow with the age of the run, up to a second.
        """
        self._config = config
        self._counters = counters
        self._is_paced = self._is_first = is_paced
        self._first_began = time.monotonic()
        self._steps_before = counters.env_steps_trained
        self._asks_for_horizon = config.horizon is None and config.input == "sampler"
        self._usage = SystemUsage() if config.log_sys_usage else None
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
        config = self._config
        num_workers = max(1, config.num_workers)
        num_envs = num_workers * config.samplers_per_worker * config.num_envs_per_worker
        env_steps = self._counters.env_steps_sampled
        if not self._asks_for_horizon or env_steps < _MANY_STEPS * num_envs:
            return
        self._asks_for_horizon = False
        if 4 * count < num_envs:
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
        pace_s = min(_PACE_S, _PACE_SHARE * (now - self._first_began)) if self._is_paced else 0.0
        took_s = now - self._began
        env_steps = self._counters.env_steps_trained - self._steps_before
        is_long_enough = took_s >= (self._config.min_iter_time_s or pace_s)
        return is_long_enough and env_steps >= self._config.timesteps_per_iteration
