"""`benchmarks.actor_work` with actors of aiorl, as a user's program has them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import uvloop

import aiorl
from benchmarks.actor_work import ACTORS, IN_FLIGHT, System, Worker, report

__all__ = ["started"]


class _Aiorl:
    def __init__(self, actors: aiorl.Actors, workers: list[aiorl.ActorHandle]) -> None:
        self._actors = actors
        self._workers = workers

    async def nothing(self) -> None:
        await self._workers[0].nothing()

    async def sample(self) -> Mapping[str, Any]:
        batch: Mapping[str, Any] = await self._workers[0].sample()
        return batch

    async def stream(self, until: float) -> int:
        count = 0
        ready = self._actors.as_ready(self._workers, "sample", in_flight=IN_FLIGHT // ACTORS)
        async with contextlib.aclosing(ready):
            async for _ in ready:
                count += 1
                if time.perf_counter() > until:
                    break
        return count

    async def set_weights(self, weights: Mapping[str, Any]) -> None:
        await self._actors.broadcast(self._workers, "set_weights", weights)


@asynccontextmanager
async def started(kind: type[Worker]) -> AsyncIterator[System]:
    """Start two actors."""
    async with aiorl.Actors() as actors:
        yield _Aiorl(actors, await actors.start(kind, count=ACTORS))


if __name__ == "__main__":
    uvloop.run(report(started))
