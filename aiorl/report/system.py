"""CPU and memory use of this host and process, for results (R195)."""

from __future__ import annotations

import psutil

__all__ = ["SystemUsage"]


class SystemUsage:
    """Figures since the last look; one look takes about 0.1 ms and never waits."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        # The first call of each only starts the interval.
        psutil.cpu_percent(None)
        self._process.cpu_percent(None)

    def look(self) -> dict[str, float]:
        """Figures now.

        Returns: cpu_util_percent (all cores of the host, 0 to 100, since the last look), ram_util_percent,
            learner_cpu_percent (this process; 100 is one core), learner_rss_bytes.
        """
        return {
            "cpu_util_percent": float(psutil.cpu_percent(None)),
            "ram_util_percent": float(psutil.virtual_memory().percent),
            "learner_cpu_percent": float(self._process.cpu_percent(None)),
            "learner_rss_bytes": float(self._process.memory_info().rss),
        }
