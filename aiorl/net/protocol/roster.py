"""Who is registered: workers by slot, by incarnation and by the peer they speak over; and who is buried."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from aiorl.errors import InternalError
from aiorl.net.protocol.rates import Newest
from aiorl.net.wire.messages import Hello

__all__ = ["MAX_REMEMBERED", "Roster", "Strangers", "Worker"]

MAX_REMEMBERED = 4096
"""Of each thing that is remembered of peers or incarnations that are not registered, the newest so many."""


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
        source: where it comes from, its key or else its host.
        peer: what it speaks over; None while its connection is gone.
        last_heard: when anything was heard from it.
        last_seq: fragments received.
        open_calls: ids of the calls that it has not answered.
        gap_since: since when a fragment is missing before those that came; None if none is.
        asked_resend: when it was asked to send again.
        welcomed: when it was last welcomed.
        gave_snapshot: when it was last given a snapshot.
        state: what it said it does.
        in_env_s: how long its running environment call had lasted when it last said so, seconds.
        hung_up: it has ended its connection itself.
        claimant: another connection that says it is this worker's.
        claimed: since when it does.
    """

    slot: int
    incarnation: str
    worker_id: str
    host: str
    pid: int
    local: bool
    key: str | None
    source: str
    peer: bytes | None
    last_heard: float
    last_seq: int = 0
    open_calls: set[int] = field(default_factory=set)
    gap_since: float | None = None
    asked_resend: float = float("-inf")
    welcomed: float = float("-inf")
    gave_snapshot: float = float("-inf")
    state: str = "joining"
    in_env_s: float = 0.0
    hung_up: bool = False
    claimant: bytes | None = None
    claimed: float = 0.0


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
        """The live workers by slot."""
        return [self.by_slot[slot] for slot in sorted(self.by_slot)]

    def of_process(self, worker_id: str) -> list[Worker]:
        """The live incarnations of a worker process."""
        return [worker for worker in self.by_slot.values() if worker.worker_id == worker_id]

    def is_buried(self, incarnation: str) -> bool:
        """Whether this incarnation has ended."""
        return incarnation in self._buried

    def free_slot(self, hint: int, worker_id: str) -> int:
        """The slot kept for this process, else the one it would like, else the lowest; 0 if none is free."""
        for slot, owner in self.reserved.items():
            if owner == worker_id and slot not in self.by_slot:
                return slot
        if 1 <= hint <= self._max_workers and self._is_free(hint):
            return hint
        return next((slot for slot in range(1, self._max_workers + 1) if self._is_free(slot)), 0)

    def add(self, slot: int, hello: Hello, peer: bytes, key: str | None, now: float, source: str = "") -> Worker:
        """Register an incarnation; ``source`` is where it comes from, its key or else its host."""
        worker = Worker(
            slot,
            hello.incarnation,
            hello.worker_id,
            hello.host,
            hello.pid,
            self.reserved.get(slot) == hello.worker_id,
            key,
            source,
            peer,
            now,
        )
        self.by_slot[slot] = worker
        self.by_peer[peer] = worker
        self.by_incarnation[hello.incarnation] = worker
        return worker

    def bind(self, worker: Worker, peer: bytes) -> None:
        """From now on this worker speaks over this peer."""
        self.unbind(worker)
        worker.peer = peer
        worker.claimant = None
        worker.hung_up = False
        self.by_peer[peer] = worker

    def unbind(self, worker: Worker) -> None:
        """The worker's connection is gone."""
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

    def check_valid(self) -> None:
        """Raise InternalError if the three indices differ."""
        for slot, worker in self.by_slot.items():
            bound = worker.peer is None or self.by_peer.get(worker.peer) is worker
            if slot != worker.slot or self.by_incarnation.get(worker.incarnation) is not worker or not bound:
                raise InternalError(f"worker {worker.slot} is not found where it belongs")
        if len(self.by_incarnation) != len(self.by_slot) or len(self.by_peer) > len(self.by_slot):
            raise InternalError("the roster's indices differ in length")

    def _is_free(self, slot: int) -> bool:
        return slot not in self.by_slot and slot not in self.reserved


@dataclass(slots=True)
class _Stranger:
    messages: int = 0
    told: bool = False
    ended: str = ""


class Strangers:
    """Peers that speak for no live worker, the dropped ones, and what was done wrong how often.

    Bounded: the peers longest silent are forgotten first.

    Attributes:
        violations: what peers did wrong -> how often; the kinds are ours, a dozen.
    """

    def __init__(self) -> None:
        self.violations: Counter[str] = Counter()
        self._known: Newest[bytes, _Stranger] = Newest(MAX_REMEMBERED)
        self._dropped: Newest[bytes, None] = Newest(MAX_REMEMBERED)

    def is_dropped(self, peer: bytes) -> bool:
        """Whether nothing from this peer is read any more."""
        return peer in self._dropped

    def drop(self, peer: bytes) -> None:
        """Read nothing from this peer any more."""
        self._known.pop(peer, None)
        self._dropped[peer] = None

    def count(self, peer: bytes) -> int:
        """Count a message out of place; how many there were from this peer, this one included."""
        stranger = self._stranger(peer)
        stranger.messages += 1
        return stranger.messages

    def first_time(self, peer: bytes) -> bool:
        """Whether this peer has not been told of yet; it has then."""
        stranger = self._stranger(peer)
        told, stranger.told = stranger.told, True
        return not told

    def remember_ended(self, peer: bytes, incarnation: str) -> None:
        """This peer spoke for an incarnation that is buried now."""
        self._stranger(peer).ended = incarnation

    def ended(self, peer: bytes) -> str:
        """The buried incarnation this peer spoke for, or ""."""
        stranger = self._known.get(peer)
        return stranger.ended if stranger else ""

    def forget(self, peer: bytes) -> None:
        """The peer is registered, or gone for good."""
        self._known.pop(peer, None)
        self._dropped.pop(peer, None)

    def _stranger(self, peer: bytes) -> _Stranger:
        stranger = self._known[peer] = self._known.get(peer) or _Stranger()
        return stranger
