"""Both endpoints in one process, for tests: without sockets, on the loop's clock, with faults on
demand (see `LearnerEndpoint` and `WorkerEndpoint`).

    network = MemoryNetwork()
    learner, worker = network.learner(), network.worker()
    learner.start(), worker.start()

Frames are copied and arrive read-only, as from a wire. ``network.fault`` decides the fate of each
message; ``network.cut()`` and ``network.mend()`` break and restore all connections.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from enum import StrEnum

from aiorl.errors import EndpointClosed
from aiorl.net.transport.endpoint import Buffer, EndpointStats, Event, EventKind, total_bytes


class Direction(StrEnum):
    """Direction of a message."""

    UP = "up"
    DOWN = "down"
    BROADCAST = "broadcast"


class MemoryNetwork:
    """Network of one learner and any number of workers.

    Args:
        fault: function of (direction, number of the message in that direction) that returns the
            delays in seconds after which the message is delivered: ``[0.0]`` is a good network,
            ``[]`` loses it, ``[0.0, 0.0]`` doubles it.
    """

    def __init__(self, fault: Callable[[Direction, int], Sequence[float]] | None = None) -> None:
        self.fault = fault or (lambda direction, number: (0.0,))
        self._up = True
        self._learner: MemoryLearnerEndpoint | None = None
        self._workers: list[MemoryWorkerEndpoint] = []
        self._numbers = dict.fromkeys(Direction, 0)
        self._due: dict[tuple[Direction, bytes], float] = {}
        self._lives = 0

    def learner(self) -> MemoryLearnerEndpoint:
        """Make the learner's endpoint, which replaces an earlier one."""
        return MemoryLearnerEndpoint(self)

    def worker(self, *, queue_messages: int = 64, user_id: str = "") -> MemoryWorkerEndpoint:
        """Make a worker's endpoint; ``send`` refuses when ``queue_messages`` are on their way."""
        name = f"memory-worker-{len(self._workers)}"
        worker = MemoryWorkerEndpoint(self, name, queue_messages, user_id)
        self._workers.append(worker)
        return worker

    def cut(self) -> None:
        """End every connection; messages on their way are lost."""
        self._up = False
        for worker in self._workers:
            worker.disconnect("the network was cut")

    def mend(self) -> None:
        """Allow connections again."""
        self._up = True
        self.connect_waiting()

    # For the endpoints
    # ----------------------------------------------------------------------------------------------

    def attach(self, learner: MemoryLearnerEndpoint | None) -> None:
        """Set the learner that workers connect to; None ends all connections."""
        self._learner = learner
        if learner is None:
            for worker in self._workers:
                worker.disconnect("the learner closed")
        self.connect_waiting()

    def detach(self, worker: MemoryWorkerEndpoint) -> None:
        """Forget a worker that has closed."""
        self._workers.remove(worker)

    def connect_waiting(self) -> None:
        """Connect all workers without a connection, if that is possible now."""
        if not self._up or self._learner is None:
            return
        for worker in self._workers:
            if worker.is_waiting:
                self._lives += 1
                worker.connect(self._learner, b"memory-%d" % self._lives)

    def carry(
        self,
        direction: Direction,
        peer: bytes,
        frames: Sequence[Buffer],
        deliver: Callable[[list[memoryview]], None],
    ) -> None:
        """Deliver copies; a connection keeps their order, regardless of the delays."""
        self._numbers[direction] += 1
        copies = [memoryview(bytes(frame)) for frame in frames]
        loop = asyncio.get_running_loop()
        for delay_s in self.fault(direction, self._numbers[direction]):
            now, last = loop.time(), self._due.get((direction, peer), 0.0)
            if delay_s > 0 or last > now:
                due = self._due[direction, peer] = max(now + delay_s, last + 1e-6)
                loop.call_at(due, deliver, copies)
            else:
                loop.call_soon(deliver, copies)

    async def deliver_all(self) -> None:
        """Wait until everything on its way has arrived."""
        late_s = max(self._due.values(), default=0.0) - asyncio.get_running_loop().time()
        await asyncio.sleep(late_s + 0.005 if late_s > 0 else 0)


class MemoryLearnerEndpoint:
    """The learner's endpoint in memory; made by `MemoryNetwork.learner`."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.on_message: Callable[[bytes, list[memoryview], str], None] = (
            lambda peer, frames, user_id: None
        )
        self.on_event: Callable[[Event], None] = lambda event: None
        self.is_registered: Callable[[bytes], bool] = lambda peer: True
        self._network = network
        self._peers: dict[bytes, MemoryWorkerEndpoint] = {}
        self._stats = EndpointStats()
        self._open = False

    @property
    def address(self) -> str:
        """Address for messages to users only."""
        return "tcp://memory:1"

    local_address = address

    def start(self) -> None:
        """Begin to receive; workers already started connect now."""
        self._open = True
        self._network.attach(self)

    def send(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        """See `LearnerEndpoint.send`."""
        self._check_open()
        worker = self._peers.get(peer)
        if worker is None:
            return False
        self._stats.bytes_out += total_bytes(frames)
        self._network.carry(
            Direction.DOWN, peer, frames, lambda copies: worker.deliver(peer, copies)
        )
        return True

    def broadcast(self, frames: Sequence[Buffer]) -> None:
        """See `LearnerEndpoint.broadcast`; each worker's copy has its own faults."""
        self._check_open()
        self._stats.bytes_out += total_bytes(frames)
        for peer, worker in list(self._peers.items()):
            self._network.carry(
                Direction.BROADCAST, peer, frames, self._to_subscriber(peer, worker)
            )

    def drop(self, peer: bytes, reason: str) -> None:
        """See `LearnerEndpoint.drop`; the worker connects again as a new peer."""
        worker = self._peers.get(peer)
        if worker is not None:
            self._stats.dropped += 1
            self.on_event(Event(EventKind.DROPPED, reason, peer, worker.name))
            worker.disconnect("the learner cut us off")
            asyncio.get_running_loop().call_soon(self._network.connect_waiting)

    def has_unsent(self, peer: bytes) -> bool:
        """See `LearnerEndpoint.has_unsent`; sending takes no memory here."""
        return False

    def host_of(self, peer: bytes) -> str:
        """See `LearnerEndpoint.host_of`; all are on one host."""
        return "memory"

    def stats(self) -> EndpointStats:
        """Return the counters."""
        return dataclasses.replace(self._stats)

    async def close(self, *, flush_s: float = 0.5) -> None:
        """Deliver due messages, then end every connection."""
        if self._open:
            await self._network.deliver_all()
            self._open = False
            self._network.attach(None)

    def _to_subscriber(
        self, peer: bytes, worker: MemoryWorkerEndpoint
    ) -> Callable[[list[memoryview]], None]:
        return lambda copies: worker.deliver_broadcast(peer, copies)

    def deliver(self, peer: bytes, frames: list[memoryview]) -> None:
        """Deliver a message of a worker, unless its connection has ended."""
        worker = self._peers.get(peer)
        if worker is not None and self._open:
            self._stats.bytes_in += total_bytes(frames)
            self.on_message(peer, frames, worker.user_id)

    def add(self, peer: bytes, worker: MemoryWorkerEndpoint) -> None:
        """Begin a connection."""
        self._peers[peer] = worker
        self.on_event(Event(EventKind.CONNECTED, peer=peer, address=worker.name))

    def remove(self, peer: bytes, reason: str) -> None:
        """End a connection."""
        worker = self._peers.pop(peer, None)
        if worker is not None and self._open:
            self.on_event(Event(EventKind.DISCONNECTED, reason, peer, worker.name))

    def _check_open(self) -> None:
        if not self._open:
            raise EndpointClosed("the endpoint is closed")


class MemoryWorkerEndpoint:
    """A worker's endpoint in memory; made by `MemoryNetwork.worker`."""

    is_local = False

    def __init__(
        self, network: MemoryNetwork, name: str, queue_messages: int, user_id: str
    ) -> None:
        self.on_message: Callable[[list[memoryview]], None] = lambda frames: None
        self.on_broadcast: Callable[[list[memoryview]], None] = lambda frames: None
        self.on_event: Callable[[Event], None] = lambda event: None
        self.user_id = user_id
        self.name = name
        self._network = network
        self._queue_messages = queue_messages
        self._queued = 0
        self._learner: MemoryLearnerEndpoint | None = None
        self._peer = b""
        self._writable = asyncio.Event()
        self._open = False
        self._closed = False

    @property
    def address(self) -> str:
        """Address for messages to users only."""
        return "tcp://memory:1"

    @property
    def connected(self) -> bool:
        """True while there is a learner."""
        return self._learner is not None

    def start(self) -> None:
        """Connect as soon as there is a learner."""
        self._open = True
        self._network.connect_waiting()

    def send(self, frames: Sequence[Buffer]) -> bool:
        """See `WorkerEndpoint.send`."""
        self._check_open()
        learner, peer = self._learner, self._peer
        if learner is None or self._queued >= self._queue_messages:
            return False
        self._queued += 1
        if self._queued >= self._queue_messages:
            self._writable.clear()
        asyncio.get_running_loop().call_soon(self._release, peer)
        self._network.carry(
            Direction.UP, peer, frames, lambda copies: learner.deliver(peer, copies)
        )
        return True

    async def wait_writable(self) -> None:
        """See `WorkerEndpoint.wait_writable`."""
        self._check_open()
        await self._writable.wait()
        self._check_open()

    async def close(self, *, flush_s: float = 0.5) -> None:
        """Deliver due messages, then end the connection."""
        if self._open and not self._closed:
            await self._network.deliver_all()
            self.disconnect("the worker closed")
            self._network.detach(self)
        self._open, self._closed = False, True
        self._writable.set()

    @property
    def is_waiting(self) -> bool:
        """True if it wants a connection and has none."""
        return self._open and self._learner is None

    def connect(self, learner: MemoryLearnerEndpoint, peer: bytes) -> None:
        """Begin a connection, under a new peer id."""
        self._learner, self._peer = learner, peer
        self._queued = 0
        self._writable.set()
        learner.add(peer, self)
        asyncio.get_running_loop().call_soon(
            self._tell, peer, Event(EventKind.CONNECTED, address=learner.address)
        )

    def disconnect(self, reason: str) -> None:
        """End the connection, if there is one."""
        learner, self._learner = self._learner, None
        if learner is None:
            return
        self._writable.clear()
        learner.remove(self._peer, reason)
        if self._open:
            self.on_event(Event(EventKind.DISCONNECTED, reason, address=learner.address))

    def _tell(self, peer: bytes, event: Event) -> None:
        if self._peer == peer and self._learner is not None:
            self.on_event(event)

    def _release(self, peer: bytes) -> None:
        if peer == self._peer and self._learner is not None:
            self._queued -= 1
            self._writable.set()

    def deliver(self, peer: bytes, frames: list[memoryview]) -> None:
        """Deliver a message of the learner, unless its connection has ended."""
        if peer == self._peer and self._learner is not None:
            self.on_message(frames)

    def deliver_broadcast(self, peer: bytes, frames: list[memoryview]) -> None:
        """Deliver a broadcast of the learner, unless its connection has ended."""
        if peer == self._peer and self._learner is not None:
            self.on_broadcast(frames)

    def _check_open(self) -> None:
        if self._closed or not self._open:
            raise EndpointClosed(
                "the endpoint is closed" if self._closed else "the endpoint was not started"
            )
