"""`benchmarks.actor_work` by hand: a ROUTER of the program, and a DEALER of each actor.

This is the least that two actors take with asyncio, ZeroMQ and msgpack: no errors, no limits, no
keys, no lost actors. Run with an address and a name, it is an actor.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import numpy as np
import uvloop
import zmq
import zmq.asyncio

from benchmarks.actor_work import ACTORS, IN_FLIGHT, System, Worker, report

__all__ = ["started"]


def _pack(*values: Any) -> bytes:
    packed: bytes = msgpack.packb(values, default=_from_array)
    return packed


def _unpack(frame: bytes) -> Any:
    return msgpack.unpackb(frame, object_hook=_to_array)


def _from_array(array: Any) -> dict[str, Any]:
    return {"dtype": array.dtype.str, "shape": array.shape, "data": array.tobytes()}


def _to_array(fields: dict[str, Any]) -> Any:
    if "dtype" not in fields:
        return fields
    return np.frombuffer(fields["data"], fields["dtype"]).reshape(fields["shape"])


async def _act(address: str, name: str) -> None:
    """Be an actor."""
    dealer = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    dealer.routing_id = name.encode()
    dealer.connect(address)
    await dealer.send(b"")
    worker = Worker()
    while True:
        number, method, args = _unpack(await dealer.recv())
        await dealer.send(_pack(number, getattr(worker, method)(*args)))


class _Bare:
    def __init__(self, router: zmq.asyncio.Socket, peers: list[bytes]) -> None:
        self._router = router
        self._peers = peers
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def receive(self) -> None:
        while True:
            _, frame = await self._router.recv_multipart()
            number, result = _unpack(frame)
            self._waiting.pop(number).set_result(result)

    async def _call(self, index: int, method: str, *args: Any) -> Any:
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._router.send_multipart([self._peers[index], _pack(number, method, args)])
        return await answer

    async def nothing(self) -> None:
        await self._call(0, "nothing")

    async def sample(self) -> Mapping[str, Any]:
        batch: Mapping[str, Any] = await self._call(0, "sample")
        return batch

    async def stream(self, until: float) -> int:
        return sum(
            await asyncio.gather(
                *(self._repeat(number % ACTORS, until) for number in range(IN_FLIGHT))
            )
        )

    async def _repeat(self, index: int, until: float) -> int:
        count = 0
        while time.perf_counter() < until:
            await self._call(index, "sample")
            count += 1
        return count

    async def set_weights(self, weights: Mapping[str, Any]) -> None:
        await asyncio.gather(
            *(self._call(index, "set_weights", weights) for index in range(ACTORS))
        )


@asynccontextmanager
async def started(_: type[Worker]) -> AsyncIterator[System]:
    """Start two processes; they call plain methods on their event loops, whatever the kind."""
    with tempfile.TemporaryDirectory() as folder, zmq.asyncio.Context() as context:
        address = f"ipc://{folder}/socket"
        router = context.socket(zmq.ROUTER)
        router.bind(address)
        command = [sys.executable, "-m", "benchmarks.actors_bare", address]
        actors = [
            await asyncio.create_subprocess_exec(*command, str(number)) for number in range(ACTORS)
        ]
        bare = _Bare(router, [(await router.recv_multipart())[0] for _ in actors])
        receiver = asyncio.create_task(bare.receive())
        try:
            yield bare
        finally:
            receiver.cancel()
            for actor in actors:
                actor.kill()
                await actor.wait()
            context.destroy(0)


if __name__ == "__main__":
    uvloop.run(_act(*sys.argv[1:]) if sys.argv[2:] else report(started))
