from __future__ import annotations

import os
import time

from aiorl.report.system import SystemUsage


def test_cpu_and_memory_use_are_percentages_and_this_process_is_there() -> None:
    """R195."""
    usage = SystemUsage()
    busy_until = time.process_time() + 0.1
    while time.process_time() < busy_until:
        pass
    figures = usage.look()
    assert 0.0 <= figures["cpu_util_percent"] <= 100.0
    assert 0.0 < figures["ram_util_percent"] <= 100.0
    assert figures["learner_cpu_percent"] > 0.0
    with open(f"/proc/{os.getpid()}/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert abs(figures["learner_rss_bytes"] - resident) < 0.2 * resident
