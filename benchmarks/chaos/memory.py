"""Memory of a run's processes, measured in quiet phases."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import asdict, dataclass

import psutil

from benchmarks.chaos.cluster import Cluster
from benchmarks.chaos.processes import memory_of

__all__ = ["TRIM_S", "MemoryUse", "measure_memory"]

TRIM_S = 62.0
"""Period in which each process returns idle memory once
(`aiorl.net.transport.system.give_back_regularly`)."""

_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Private memory in MB.

    Attributes:
        learner: memory of the learner.
        lasting_worker: memory of the outside worker that no fault ends.
        other_workers: median of all other workers.
    """

    learner: float
    lasting_worker: float
    other_workers: float

    def to_dict(self) -> dict[str, float]:
        """Return the fields by name, for JSON."""
        return asdict(self)


async def measure_memory(cluster: Cluster, seconds: float) -> MemoryUse:
    """Measure the least memory of each process over a time: its need, without memory it could
    return.

    Args:
        cluster: running cluster, free of faults.
        seconds: duration; ``TRIM_S`` covers one return of idle memory by each process.
    """
    until = time.monotonic() + seconds
    least: dict[psutil.Process, int] = {}
    while True:
        roles = _roles(cluster)
        for process in roles:
            used = memory_of(process)
            if used is not None:
                least[process] = min(used, least.get(process, used))
        if time.monotonic() >= until:
            break
        await asyncio.sleep(_LOOK_S)
    # Only processes that still run count: one that was replaced in the meantime is meaningless.
    used_by = {
        role: statistics.median(
            [least[process] / 1e6 for process, r in roles.items() if r == role] or [0.0]
        )
        for role in ("learner", "lasting_worker", "other_workers")
    }
    return MemoryUse(**used_by)


def _roles(cluster: Cluster) -> dict[psutil.Process, str]:
    roles = {psutil.Process(cluster.learner.pid): "learner"}
    roles |= dict.fromkeys(cluster.locals(), "other_workers")
    for outsider in cluster.outsiders:
        roles |= dict.fromkeys(
            outsider.samplers(), "lasting_worker" if outsider.spared else "other_workers"
        )
    return roles
