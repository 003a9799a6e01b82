"""`benchmarks.actor_work` with Ray, in its own virtual environment."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.actor_work import ACTORS, IN_FLIGHT, System, Worker, report

__all__ = ["started"]


class _Ray:
    def __init__(self, ray: Any, kind: type[Worker]) -> None:
        self._ray = ray
        self._workers = [ray.remote(kind).remote() for _ in range(ACTORS)]

    async def nothing(self) -> None:
        self._ray.get(self._workers[0].nothing.remote())

    async def sample(self) -> Mapping[str, Any]:
        batch: Mapping[str, Any] = self._ray.get(self._workers[0].sample.remote())
        return batch

    async def stream(self, until: float) -> int:
        count = 0
        pending = {
            worker.sample.remote(): worker
            for worker in self._workers
            for _ in range(IN_FLIGHT // ACTORS)
        }
        while time.perf_counter() < until:
            (ready, *_), _ = self._ray.wait(list(pending))
            self._ray.get(ready)
            count += 1
            worker = pending.pop(ready)
            pending[worker.sample.remote()] = worker
        self._ray.get(list(pending))
        return count

    async def set_weights(self, weights: Mapping[str, Any]) -> None:
        shared = self._ray.put(weights)
        self._ray.get([worker.set_weights.remote(shared) for worker in self._workers])


@asynccontextmanager
async def started(kind: type[Worker]) -> AsyncIterator[System]:
    """Start Ray as light as it can be."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        ray.init(
            num_cpus=ACTORS,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=folder,
        )
        try:
            yield _Ray(ray, kind)
        finally:
            ray.shutdown()


if __name__ == "__main__":
    asyncio.run(report(started))
