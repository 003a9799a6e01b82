"""Registered workers, workers that wait for a slot, and a bounded memory of all other
connections.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from aiorl.net.protocol.rates import Allowance, Newest
from aiorl.net.wire.messages import WAITING_FOR, Hello

MAX_REMEMBERED = 4096
"""Number of connections without a worker, and of ended incarnations, to remember; the oldest are
forgotten."""
_HELLOS_AT_ONCE = 256
_HELLOS_PER_S = 4.0
_NEEDLESS_AT_ONCE = 1 << 16
_NEEDLESS_PER_S = 256.0
"""Limits for needless messages of a worker: duplicates, replies to no call, and failures that do
not end it.

A worker keeps at most 1,024 fragments and sends them all again after each welcome.
"""


@dataclass(slots=True, eq=False)
class Worker:
    """The learner's record of one incarnation.

    Attributes:
        slot: index of the worker.
        incarnation: name of its registration life.
        worker_id: name of its process.
        host: name of its host.
        pid: process id on that host.
        local: True if its slot was reserved for it.
        key: public key of its connection, None without keys.
        peer: its connection; None while it has none.
        last_heard: time of its last message.
        last_seq: number of fragments received.
        state: the activity it last reported.
        in_env_s: duration of its running environment call at the last report, in seconds.
        hung_up: True if it closed its connection itself.
        needless: allowance of messages that serve no purpose.
    """

    slot: int
    incarnation: str
    worker_id: str
    host: str
    pid: int
    local: bool
    key: str | None
    peer: bytes | None
    last_heard: float
    last_seq: int = 0
    state: str = "joining"
    in_env_s: float = 0.0
    hung_up: bool = False
    needless: Allowance = field(
        default_factory=lambda: Allowance(_NEEDLESS_AT_ONCE, _NEEDLESS_PER_S)
    )

    @property
    def host_elsewhere(self) -> str:
        """Name of its host, "" if we started it."""
        return "" if self.local else self.host

    @property
    def waits_for_others(self) -> bool:
        """True if its environment waits for others, such as clients who play."""
        return self.state.startswith(WAITING_FOR)


class Roster:
    """Live workers by slot, process, incarnation or peer; at most ``max_workers``, one for each
    slot and process.

    Attributes:
        by_slot: slot -> worker.
        by_process: name of a worker process -> worker.
        by_peer: peer -> the worker on that connection.
        by_incarnation: incarnation -> worker.
        ended: incarnations that have ended, as keys.
        lives: slot -> number of ended incarnations that sampled there.
        reserved: slot -> worker process it is reserved for; one for each worker that we start.
    """

    def __init__(self, max_workers: int) -> None:
        self.by_slot: dict[int, Worker] = {}
        self.by_process: dict[str, Worker] = {}
        self.by_peer: dict[bytes, Worker] = {}
        self.by_incarnation: dict[str, Worker] = {}
        self.lives: Counter[int] = Counter()
        self.reserved: dict[int, str] = {}
        self._max_workers = max_workers
        self._free = list(range(1, max_workers + 1))  # heap that contains every free slot
        self._taken: set[int] = set()  # slots that it does not contain
        self.ended: Newest[str, None] = Newest(MAX_REMEMBERED)

    def free_slot(self, hint: int, worker_id: str) -> int:
        """Return the hinted slot if it is free and not another process's, else the lowest free one;
        0 for none.
        """
        is_own = self.reserved.get(hint, worker_id) == worker_id
        if is_own and 0 < hint <= self._max_workers and hint not in self.by_slot:
            return hint
        while self._free and (self._free[0] in self.by_slot or self._free[0] in self.reserved):
            self._taken.add(heappop(self._free))
        return self._free[0] if self._free else 0

    def add(self, slot: int, hello: Hello, peer: bytes, key: str | None, now: float) -> Worker:
        """Register an incarnation."""
        worker = Worker(
            slot=slot,
            incarnation=hello.incarnation,
            worker_id=hello.worker_id,
            host=hello.host,
            pid=hello.pid,
            local=self.reserved.get(slot) == hello.worker_id,
            key=key,
            peer=peer,
            last_heard=now,
        )
        self.by_slot[slot] = self.by_process[hello.worker_id] = worker
        self.by_peer[peer] = self.by_incarnation[hello.incarnation] = worker
        return worker

    def bind(self, worker: Worker, peer: bytes) -> None:
        """Assign a peer to this worker."""
        self.unbind(worker)
        worker.peer = peer
        worker.hung_up = False
        self.by_peer[peer] = worker

    def unbind(self, worker: Worker) -> None:
        """Record that the worker's connection is gone."""
        if worker.peer is not None:
            self.by_peer.pop(worker.peer, None)
            worker.peer = None

    def end(self, worker: Worker) -> None:
        """End an incarnation for good."""
        self.unbind(worker)
        del self.by_slot[worker.slot]
        if worker.slot in self._taken:
            self._taken.remove(worker.slot)
            heappush(self._free, worker.slot)
        del self.by_process[worker.worker_id]
        del self.by_incarnation[worker.incarnation]
        self.lives[worker.slot] += worker.last_seq > 0
        self.ended[worker.incarnation] = None


@dataclass(slots=True, eq=False)
class Peer:
    """Memory of a connection, with or without a registered worker.

    Attributes:
        hellos: allowance of further Hello messages.
        num_strange: messages other than Hello received while no live worker used the connection.
        ended: the ended incarnation that used it, "" for none.
        gave_snapshot: time of the last snapshot sent to it, alone or in a welcome.
        is_dropped: True if further messages from it are ignored.
    """

    hellos: Allowance = field(default_factory=lambda: Allowance(_HELLOS_AT_ONCE, _HELLOS_PER_S))
    num_strange: int = 0
    ended: str = ""
    gave_snapshot: float = float("-inf")
    is_dropped: bool = False


@dataclass(slots=True, eq=False)
class Waiting:
    """A Hello that waits for a slot since time ``since``; ``source`` is its key, or else its host."""

    peer: bytes
    hello: Hello
    key: str | None
    source: str
    since: float


class WaitingLine:
    """Waiting Hellos, one for each connection; sources take turns, so that none can block the
    others.
    """

    def __init__(self) -> None:
        self._waiting: dict[bytes, Waiting] = {}
        # their peers by source, next one first
        self._turns: OrderedDict[str, OrderedDict[bytes, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._waiting.values())

    def get(self, peer: bytes) -> Waiting | None:
        """Return the waiting Hello of this connection, or None."""
        return self._waiting.get(peer)

    def put(self, waiting: Waiting) -> None:
        """Add a Hello; it replaces an earlier one of the same connection and keeps its place in
        line.
        """
        waiting.source = self._waiting.get(waiting.peer, waiting).source
        self._waiting[waiting.peer] = waiting
        self._turns.setdefault(waiting.source, OrderedDict()).setdefault(waiting.peer)

    def pop(self) -> Waiting:
        """Remove and return the next Hello in turn."""
        source, peers = next(iter(self._turns.items()))
        waiting = self._waiting[next(iter(peers))]
        self._turns.move_to_end(source)
        self.remove(waiting.peer)
        return waiting

    def remove(self, peer: bytes) -> None:
        """Remove the waiting Hello of this connection, if there is one."""
        waiting = self._waiting.pop(peer, None)
        if waiting is not None:
            del self._turns[waiting.source][peer]
            if not self._turns[waiting.source]:
                del self._turns[waiting.source]
