"""TCP relay between one worker's host and the learner that can misbehave as networks do.

It listens on two consecutive ports, as the learner does, and relays each connection to the
learner's corresponding port. Buffers are small, so that a side soon stalls if the other does not
read.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import time
from dataclasses import dataclass, field

__all__ = ["Link", "Slow", "free_pair"]

_BUFFER_BYTES = 32 << 10
_CHUNK_BYTES = 64 << 10
_LINE_CHUNKS = 64
_HOST = "127.0.0.1"
_PORTS = range(20_000, 32_000, 2)
"""Ports below those that the system gives to outgoing connections, which could otherwise take a
port of a closed link. """


@dataclass(frozen=True, slots=True)
class Slow:
    """Delay of a link.

    Attributes:
        delay_s: delay of each chunk.
        bytes_per_s: limit for each direction of each connection.
    """

    delay_s: float
    bytes_per_s: float


@dataclass(eq=False, slots=True)
class _Pipe:
    """One connection: a socket to the worker, one to the learner, and the tasks that relay."""

    near: socket.socket
    far: socket.socket | None = None
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class Link:
    """Relay that runs until closed; its faults can be set at any time.

    Attributes:
        port: the first of the two ports it listens on.
        slow: delay and throttle; None for neither.
        corrupt_share: share of chunks in which a byte is changed.
        bytes_up: bytes carried towards the learner.
    """

    def __init__(self, port: int) -> None:
        """Prepare a relay to the learner's first port; ``start`` listens."""
        self.port = 0
        self.slow: Slow | None = None
        self.corrupt_share = 0.0
        self.bytes_up = 0
        self._learner_port = port
        self._random = random.Random(port)
        self._flows = asyncio.Event()
        self._flows.set()
        self._pipes: set[_Pipe] = set()
        self._listeners: list[socket.socket] = []
        self._acceptors: list[asyncio.Task[None]] = []

    @property
    def connections(self) -> frozenset[object]:
        """Connections that reach the learner now."""
        return frozenset(pipe for pipe in self._pipes if pipe.far is not None)

    def start(self) -> None:
        """Listen on a free pair of ports."""
        self._listeners = free_pair()
        self.port = int(self._listeners[0].getsockname()[1])
        for offset, listener in enumerate(self._listeners):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
            listener.listen(64)
            listener.setblocking(False)
            self._acceptors.append(
                asyncio.create_task(self._accept(listener, self._learner_port + offset))
            )

    def hold(self) -> None:
        """Read, carry and close nothing until ``release``."""
        self._flows.clear()

    def release(self) -> None:
        """Continue to carry."""
        self._flows.set()

    def reset(self) -> int:
        """Reset every connection on both sides; return their number."""
        pipes = list(self._pipes)
        for pipe in pipes:
            self._end(pipe, reset=True)
        return len(pipes)

    async def close(self) -> None:
        """Close all connections and stop listening."""
        for task in self._acceptors:
            task.cancel()
        tasks = [*self._acceptors, *(task for pipe in self._pipes for task in pipe.tasks)]
        for pipe in list(self._pipes):
            self._end(pipe, reset=False)
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()

    async def _accept(self, listener: socket.socket, port: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                near, _ = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(0.05)
                continue
            near.setblocking(False)
            pipe = _Pipe(near)
            self._pipes.add(pipe)
            pipe.tasks.append(asyncio.create_task(self._join(pipe, port)))

    async def _join(self, pipe: _Pipe, port: int) -> None:
        """Connect to the learner, then carry both ways."""
        loop = asyncio.get_running_loop()
        far = socket.socket()
        far.setblocking(False)
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        try:
            await self._flows.wait()
            await loop.sock_connect(far, (_HOST, port))
        except BaseException as error:
            far.close()
            if isinstance(error, OSError):  # the learner does not listen
                self._end(pipe, reset=True)
                return
            raise
        pipe.far = far
        for source, sink, is_up in ((pipe.near, far, True), (far, pipe.near, False)):
            line: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_LINE_CHUNKS)
            pipe.tasks.append(asyncio.create_task(self._read(pipe, source, line, is_up=is_up)))
            pipe.tasks.append(asyncio.create_task(self._write(pipe, sink, line)))

    async def _read(
        self,
        pipe: _Pipe,
        source: socket.socket,
        line: asyncio.Queue[tuple[float, bytes]],
        *,
        is_up: bool,
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._flows.wait()
                data = await loop.sock_recv(source, _CHUNK_BYTES)
                if is_up:
                    self.bytes_up += len(data)
                await line.put(
                    (
                        time.monotonic() + (self.slow.delay_s if self.slow else 0.0),
                        self._changed(data),
                    )
                )
                if not data:
                    return
        except OSError:
            self._end(pipe, reset=True)

    async def _write(
        self, pipe: _Pipe, sink: socket.socket, line: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                due, data = await line.get()
                if due > time.monotonic():
                    await asyncio.sleep(due - time.monotonic())
                await self._flows.wait()
                if not data:
                    break
                await loop.sock_sendall(sink, data)
                if self.slow is not None:
                    await asyncio.sleep(len(data) / self.slow.bytes_per_s)
        except OSError:
            self._end(pipe, reset=True)
        else:
            self._end(pipe, reset=False)

    def _changed(self, data: bytes) -> bytes:
        if not data or self._random.random() >= self.corrupt_share:
            return data
        spoilt = bytearray(data)
        spoilt[self._random.randrange(len(spoilt))] ^= 1 << self._random.randrange(8)
        return bytes(spoilt)

    def _end(self, pipe: _Pipe, *, reset: bool) -> None:
        if pipe not in self._pipes:
            return
        self._pipes.discard(pipe)
        current = asyncio.current_task()
        for task in pipe.tasks:
            if task is not current:
                task.cancel()
        sockets = [each for each in (pipe.near, pipe.far) if each is not None]
        # A socket can be closed once no task of the loop waits for it any more.
        asyncio.get_running_loop().call_soon(_close, sockets, reset)


def _close(sockets: list[socket.socket], reset: bool) -> None:
    for each in sockets:
        if reset:
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        each.close()


def free_pair() -> list[socket.socket]:
    """Return two sockets bound to consecutive free loopback ports; they do not listen yet.

    Raises:
        OSError: there are no such ports.
    """
    for port in random.sample(_PORTS, 200):
        pair = [socket.socket(), socket.socket()]
        try:
            for offset, each in enumerate(pair):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                each.bind((_HOST, port + offset))
        except OSError:
            for each in pair:
                each.close()
        else:
            return pair
    raise OSError("no two consecutive free ports were found")
