"""CPU and memory use of this host and process, for results (R195)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import psutil

logger = logging.getLogger(__name__)

_SETTLED_S = 0.1
"""The kernel counts CPU time in ticks of 10 ms."""


class SystemUsage:
    """Figures since the last look; one look takes some 0.3 ms and never waits.

    A figure that can't be had, for want of a descriptor or a right, is left out; that is said once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin the first interval.

        Args:
            clock: seconds, since whenever.
        """
        self._clock = clock
        self._process: psutil.Process | None = None
        self._figures: dict[str, Callable[[], float]] = {
            "cpu_util_percent": lambda: psutil.cpu_percent(None),
            "ram_util_percent": lambda: psutil.virtual_memory().percent,
            "learner_cpu_percent": lambda: self._own_process().cpu_percent(None),
            "learner_rss_bytes": lambda: self._own_process().memory_info().rss,
        }
        self._said: set[str] = set()
        self._measure()  # the first one only starts the interval
        self._found: dict[str, float] = {}
        self._found_at = float("-inf")

    def look(self) -> dict[str, float]:
        """Figures now; within `_SETTLED_S` of the last look those of that, since shares of so short a time say nothing.

        Returns: cpu_util_percent (all cores of the host, 0 to 100, since the last look), ram_util_percent,
            learner_cpu_percent (this process; 100 is one core), learner_rss_bytes; each only if it can be had.
        """
        now = self._clock()
        if now - self._found_at >= _SETTLED_S:
            self._found, self._found_at = self._measure(), now
        return dict(self._found)

    def _measure(self) -> dict[str, float]:
        found = {}
        for name, measure in self._figures.items():
            try:
                found[name] = float(measure())
            except Exception as error:  # whatever psutil makes of what it finds in /proc: no figure is worth a run
                if name not in self._said:
                    self._said.add(name)
                    logger.warning("%s can't be measured, results lack it: %s", name, error or type(error).__name__)
        return found

    def _own_process(self) -> psutil.Process:
        if self._process is None:
            self._process = psutil.Process()
        return self._process
