"""Both endpoints in one process, for tests: without sockets, on the loop's clock, with faults on
demand.

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
from aiorl.net.transport.endpoint import Buffer, EndpointStats, Event, EventKind
from aiorl.net.transport.sockets import total_bytes


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
        """Make a worker's endpoint; ``send`` blocks when ``queue_messages`` are on their way."""
        worker = MemoryWorkerEndpoint(self, queue_messages, user_id)
        self._workers.append(worker)
        return worker

    def cut(self) -> None:
        """End every connection; messages on their way are lost."""
        self._up = False
        for worker in self._workers:
            worker._disconnect("the network was cut")

    def mend(self) -> None:
        """Allow connections again."""
        self._up = True
        self._join()

    def _attach(self, learner: MemoryLearnerEndpoint | None) -> None:
        self._learner = learner
        if learner is None:
            for worker in self._workers:
                worker._disconnect("the learner closed")
        self._join()

    def _join(self) -> None:
        if not self._up or self._learner is None:
            return
        for worker in self._workers:
            if worker._is_waiting():
                self._lives += 1
                worker._connect(self._learner, b"memory-%d" % self._lives)

    def _carry(
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

    async def _deliver_all(self) -> None:
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
        self._network._attach(self)

    def send(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        """See `ZmqLearnerEndpoint.send`."""
        self._check_open()
        worker = self._peers.get(peer)
        if worker is None:
            return False
        self._stats.bytes_out += total_bytes(frames)
        self._network._carry(
            Direction.DOWN, peer, frames, lambda copies: worker._deliver(peer, copies)
        )
        return True

    def broadcast(self, frames: Sequence[Buffer]) -> None:
        """See `ZmqLearnerEndpoint.broadcast`; each worker's copy has its own faults."""
        self._check_open()
        self._stats.bytes_out += total_bytes(frames)
        for peer, worker in list(self._peers.items()):
            self._network._carry(
                Direction.BROADCAST, peer, frames, self._to_subscriber(peer, worker)
            )

    def drop(self, peer: bytes, reason: str) -> None:
        """See `ZmqLearnerEndpoint.drop`; the worker connects again as a new peer."""
        worker = self._peers.get(peer)
        if worker is not None:
            self._stats.dropped += 1
            self.on_event(Event(EventKind.DROPPED, reason, peer, worker.name))
            worker._disconnect("the learner cut us off")
            asyncio.get_running_loop().call_soon(self._network._join)

    def has_unsent(self, peer: bytes) -> bool:
        return False

    def host_of(self, peer: bytes) -> str:
        """See `ZmqLearnerEndpoint.host_of`; all are on one host."""
        return "memory"

    def stats(self) -> EndpointStats:
        """Return the counters."""
        return dataclasses.replace(self._stats)

    async def close(self, *, flush_s: float = 0.5) -> None:
        """Deliver due messages, then end every connection."""
        if self._open:
            await self._network._deliver_all()
            self._open = False
            self._network._attach(None)

    def _to_subscriber(
        self, peer: bytes, worker: MemoryWorkerEndpoint
    ) -> Callable[[list[memoryview]], None]:
        return lambda copies: worker._deliver_broadcast(peer, copies)

    def _deliver(self, peer: bytes, frames: list[memoryview]) -> None:
        worker = self._peers.get(peer)
        if worker is not None and self._open:
            self._stats.bytes_in += total_bytes(frames)
            self.on_message(peer, frames, worker.user_id)

    def _add(self, peer: bytes, worker: MemoryWorkerEndpoint) -> None:
        self._peers[peer] = worker
        self.on_event(Event(EventKind.CONNECTED, peer=peer, address=worker.name))

    def _remove(self, peer: bytes, reason: str) -> None:
        worker = self._peers.pop(peer, None)
        if worker is not None and self._open:
            self.on_event(Event(EventKind.DISCONNECTED, reason, peer, worker.name))

    def _check_open(self) -> None:
        if not self._open:
            raise EndpointClosed("the endpoint is closed")


class MemoryWorkerEndpoint:
    """A worker's endpoint in memory; made by `MemoryNetwork.worker`."""

    is_local = False

    def __init__(self, network: MemoryNetwork, queue_messages: int, user_id: str) -> None:
        self.on_message: Callable[[list[memoryview]], None] = lambda frames: None
        self.on_broadcast: Callable[[list[memoryview]], None] = lambda frames: None
        self.on_event: Callable[[Event], None] = lambda event: None
        self.user_id = user_id
        self.name = f"memory-worker-{len(network._workers)}"
        self._network = network
        self._queue_messages = queue_messages
        self._queued = 0
        self._learner: MemoryLearnerEndpoint | None = None
        self._peer = b""
        self._writable = asyncio.Event()
        self._open = False
        self._closed = False

    @property
    def connected(self) -> bool:
        """True while there is a learner."""
        return self._learner is not None

    def start(self) -> None:
        """Connect as soon as there is a learner."""
        self._open = True
        self._network._join()

    def send(self, frames: Sequence[Buffer]) -> bool:
        """See `ZmqWorkerEndpoint.send`."""
        self._check_open()
        learner, peer = self._learner, self._peer
        if learner is None or self._queued >= self._queue_messages:
            return False
        self._queued += 1
        if self._queued >= self._queue_messages:
            self._writable.clear()
        asyncio.get_running_loop().call_soon(self._release, peer)
        self._network._carry(
            Direction.UP, peer, frames, lambda copies: learner._deliver(peer, copies)
        )
        return True

    async def wait_writable(self) -> None:
        """See `ZmqWorkerEndpoint.wait_writable`."""
        self._check_open()
        await self._writable.wait()
        self._check_open()

    async def close(self, *, flush_s: float = 0.5) -> None:
        """Deliver due messages, then end the connection."""
        if self._open and not self._closed:
            await self._network._deliver_all()
            self._disconnect("the worker closed")
            self._network._workers.remove(self)
        self._open, self._closed = False, True
        self._writable.set()

    def _is_waiting(self) -> bool:
        return self._open and self._learner is None

    def _connect(self, learner: MemoryLearnerEndpoint, peer: bytes) -> None:
        self._learner, self._peer = learner, peer
        self._queued = 0
        self._writable.set()
        learner._add(peer, self)
        asyncio.get_running_loop().call_soon(
            self._tell, peer, Event(EventKind.CONNECTED, address=learner.address)
        )

    def _disconnect(self, reason: str) -> None:
        learner, self._learner = self._learner, None
        if learner is None:
            return
        self._writable.clear()
        learner._remove(self._peer, reason)
        if self._open:
            self.on_event(Event(EventKind.DISCONNECTED, reason, address=learner.address))

    def _tell(self, peer: bytes, event: Event) -> None:
        if self._peer == peer and self._learner is not None:
            self.on_event(event)

    def _release(self, peer: bytes) -> None:
        if peer == self._peer and self._learner is not None:
            self._queued -= 1
            self._writable.set()

    def _deliver(self, peer: bytes, frames: list[memoryview]) -> None:
        if peer == self._peer and self._learner is not None:
            self.on_message(frames)

    def _deliver_broadcast(self, peer: bytes, frames: list[memoryview]) -> None:
        if peer == self._peer and self._learner is not None:
            self.on_broadcast(frames)

    def _check_open(self) -> None:
        if self._closed or not self._open:
            raise EndpointClosed(
                "the endpoint is closed" if self._closed else "the endpoint was not started"
            )
