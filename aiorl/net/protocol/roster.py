"""Who is registered, who waits to be, and what is remembered of every other connection, all within bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from aiorl.net.protocol.rates import Allowance, Newest
from aiorl.net.wire.messages import Hello

MAX_REMEMBERED = 4096
"""Connections that speak for no worker, and incarnations that have ended: the newest so many are remembered."""
_HELLOS_AT_ONCE, _HELLOS_PER_S = 256, 4.0
_NEEDLESS_AT_ONCE, _NEEDLESS_PER_S = 1 << 16, 256.0
"""Limits of needless messages of a worker: doubles, replies that nobody asked for, failures that do not end it.

A worker keeps 1,024 fragments at most and sends them all again after each welcome.
"""


@dataclass(slots=True, eq=False)
class Worker:
    """What the learner knows of one incarnation.

    Attributes:
        slot: its index.
        incarnation: its registration life.
        worker_id: its process's name.
        host: its host's name.
        pid: its process id there.
        local: whether its slot was reserved for it.
        key: what its connection was authenticated with.
        peer: the connection it speaks over; None while that is gone.
        last_heard: when anything was heard from it.
        last_seq: fragments received.
        state: what it said it does.
        in_env_s: how long its running environment call had lasted when it last said so, seconds.
        hung_up: it has ended its connection itself.
        needless: how much more it may send that nobody needs.
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
    needless: Allowance = field(default_factory=lambda: Allowance(_NEEDLESS_AT_ONCE, _NEEDLESS_PER_S))


class Roster:
    """The live workers, found by slot, incarnation or peer; at most ``max_workers``, one for each slot.

    Attributes:
        by_slot: slot -> worker.
        by_peer: peer -> the worker that speaks over it now.
        by_incarnation: incarnation -> worker.
        lives: slot -> incarnations that sampled there and have ended.
        reserved: slot -> the worker process it is kept for; as many as we start.
    """

    def __init__(self, max_workers: int) -> None:
        self.by_slot: dict[int, Worker] = {}
        self.by_peer: dict[bytes, Worker] = {}
        self.by_incarnation: dict[str, Worker] = {}
        self.lives: Counter[int] = Counter()
        self.reserved: dict[int, str] = {}
        self._max_workers = max_workers
        self._buried: Newest[str, None] = Newest(MAX_REMEMBERED)

    def workers(self) -> list[Worker]:
        """Return the live workers by slot."""
        return [self.by_slot[slot] for slot in sorted(self.by_slot)]

    def of_process(self, worker_id: str) -> list[Worker]:
        """Return the live incarnations of a worker process."""
        return [worker for worker in self.by_slot.values() if worker.worker_id == worker_id]

    def is_buried(self, incarnation: str) -> bool:
        """Return whether this incarnation has ended."""
        return incarnation in self._buried

    def free_slot(self, hint: int, worker_id: str) -> int:
        """Return the slot kept for this process, else the one it would like, else the lowest; 0 if none is free."""
        for slot, owner in self.reserved.items():
            if owner == worker_id and slot not in self.by_slot:
                return slot
        slots = (
            (hint, *range(1, self._max_workers + 1)) if hint <= self._max_workers else range(1, self._max_workers + 1)
        )
        return next((slot for slot in slots if slot and slot not in self.by_slot and slot not in self.reserved), 0)

    def add(self, slot: int, hello: Hello, peer: bytes, key: str | None, now: float) -> Worker:
        """Register an incarnation."""
        is_local = self.reserved.get(slot) == hello.worker_id
        names = (hello.incarnation, hello.worker_id, hello.host, hello.pid)
        worker = Worker(slot, *names, is_local, key, peer, now)
        self.by_slot[slot] = self.by_peer[peer] = self.by_incarnation[hello.incarnation] = worker
        return worker

    def bind(self, worker: Worker, peer: bytes) -> None:
        """Have this worker speak over this peer from now on."""
        self.unbind(worker)
        worker.peer = peer
        worker.hung_up = False
        self.by_peer[peer] = worker

    def unbind(self, worker: Worker) -> None:
        """Note that the worker's connection is gone."""
        if worker.peer is not None:
            self.by_peer.pop(worker.peer, None)
            worker.peer = None

    def bury(self, worker: Worker) -> None:
        """End an incarnation; it is not taken back."""
        self.unbind(worker)
        del self.by_slot[worker.slot]
        del self.by_incarnation[worker.incarnation]
        self.lives[worker.slot] += worker.last_seq > 0
        self._buried[worker.incarnation] = None


@dataclass(slots=True, eq=False)
class Peer:
    """What is remembered of a connection, whoever speaks over it.

    Attributes:
        hellos: how many more it may say.
        num_strange: messages that were no Hello while it spoke for no live worker.
        ended: the buried incarnation it spoke for, "" if there is none.
        gave_snapshot: when it was last given a snapshot, with a welcome or by itself.
        is_dropped: nothing it sends is read any more.
    """

    hellos: Allowance = field(default_factory=lambda: Allowance(_HELLOS_AT_ONCE, _HELLOS_PER_S))
    num_strange: int = 0
    ended: str = ""
    gave_snapshot: float = float("-inf")
    is_dropped: bool = False


@dataclass(slots=True, eq=False)
class Waiting:
    """A Hello that waits for a place: who said it, and when; ``source`` is its key or else its host."""

    peer: bytes
    hello: Hello
    key: str | None
    source: str
    since: float


class Line:
    """Hellos that wait, one for each connection; sources take turns, so that none can keep the others waiting."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, Waiting] = {}
        self._turns: dict[str, None] = {}  # the sources of those, the next one first

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._waiting.values())

    def get(self, peer: bytes) -> Waiting | None:
        """Return what waits from this connection."""
        return self._waiting.get(peer)

    def put(self, waiting: Waiting) -> None:
        """Let a Hello wait; a later one of its connection takes its place in line."""
        self._waiting[waiting.peer] = waiting
        self._turns.setdefault(waiting.source)

    def pop(self) -> Waiting:
        """Take the one whose turn it is."""
        source = next(iter(self._turns))
        waiting = next(each for each in self if each.source == source)
        del self._turns[source]
        self._turns[source] = None
        self.remove(waiting.peer)
        return waiting

    def remove(self, peer: bytes) -> None:
        """Let this connection's wait no more, if one did."""
        waiting = self._waiting.pop(peer, None)
        if waiting is not None and not any(each.source == waiting.source for each in self):
            del self._turns[waiting.source]
