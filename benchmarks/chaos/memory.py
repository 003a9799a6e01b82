"""Memory of a run's processes, looked at while nothing is done to them."""

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
"""Within so long each process gives idle memory back once (`aiorl.net.transport.system.give_back_regularly`)."""

_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Private memory in MB.

    Attributes:
        learner: of the learner.
        lasting_worker: of the outside worker that no fault ends.
        other_workers: median of all others.
    """

    learner: float
    lasting_worker: float
    other_workers: float

    def to_dict(self) -> dict[str, float]:
        """By name, for JSON."""
        return asdict(self)


async def measure_memory(cluster: Cluster, seconds: float) -> MemoryUse:
    """The least that each process has used within so many seconds: what it needs, without what it could give back.

    Args:
        cluster: running, with nothing being done to it.
        seconds: how long to look; ``TRIM_S`` to see each process after it has given memory back.
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
    # processes that are there now: one that was replaced meanwhile says nothing
    used_by = {
        role: statistics.median([least[process] / 1e6 for process, r in roles.items() if r == role] or [0.0])
        for role in ("learner", "lasting_worker", "other_workers")
    }
    return MemoryUse(**used_by)


def _roles(cluster: Cluster) -> dict[psutil.Process, str]:
    roles = {psutil.Process(cluster.learner.pid): "learner"}
    roles |= dict.fromkeys(cluster.locals(), "other_workers")
    for outsider in cluster.outsiders:
        roles |= dict.fromkeys(outsider.samplers(), "lasting_worker" if outsider.spared else "other_workers")
    return roles
