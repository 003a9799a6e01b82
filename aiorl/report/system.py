"""CPU and memory use of this host and process, for results (R195)."""

from __future__ import annotations

import logging
from collections.abc import Callable

import psutil

__all__ = ["SystemUsage"]

logger = logging.getLogger(__name__)


class SystemUsage:
    """Figures since the last look; one look takes about 0.1 ms and never waits.

    A figure that can't be had, for want of a descriptor or a right, is left out; that is said once.
    """

    def __init__(self) -> None:
        self._process: psutil.Process | None = None
        self._figures: dict[str, Callable[[], float]] = {
            "cpu_util_percent": lambda: psutil.cpu_percent(None),
            "ram_util_percent": lambda: psutil.virtual_memory().percent,
            "learner_cpu_percent": lambda: self._own_process().cpu_percent(None),
            "learner_rss_bytes": lambda: self._own_process().memory_info().rss,
        }
        self._said: set[str] = set()
        self.look()  # the first one only starts the interval

    def look(self) -> dict[str, float]:
        """Figures now.

        Returns: cpu_util_percent (all cores of the host, 0 to 100, since the last look), ram_util_percent,
            learner_cpu_percent (this process; 100 is one core), learner_rss_bytes; each only if it can be had.
        """
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
