"""How long ago this process was started."""

from __future__ import annotations

import math
import os
import time

__all__ = ["age_s"]

_START_TIME = 19
"""Place of the start time in /proc/PID/stat, counted from behind the program's name."""


def age_s() -> float:
    """Seconds since this process was started.

    On Linux both ends are told by one clock, that of the kernel. The hour at which the kernel was booted, which is what
    is left to add to a start time in order to compare it with the hour, is known in whole seconds only.

    Returns: NaN where it can't be told, for want of a descriptor to look with.
    """
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        started_s = int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, AttributeError):  # another system
        pass
    try:
        import psutil

        return float(time.time() - psutil.Process().create_time())
    except Exception:  # whatever an import or psutil makes of it
        return math.nan
