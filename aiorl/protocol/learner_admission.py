"""How workers come to be registered with a learner: their Hellos, new or again, and those that must wait."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiorl.protocol import events as ev
from aiorl.protocol import messages as m
from aiorl.protocol.learner_members import Members
from aiorl.protocol.learner_settings import LearnerSettings
from aiorl.protocol.limits import MAX_STRANGER_BYTES
from aiorl.protocol.rates import Allowance
from aiorl.protocol.roster import MAX_REMEMBERED, Worker

__all__ = ["Admission"]

_WELCOME_AGAIN_S = 0.25
_HELLOS_AT_ONCE, _HELLOS_PER_S = 256, 4.0
_NEW_COST = 5.0
"""A registration costs us a whole snapshot, so it counts as so many Hellos."""
_SPOKE_BEFORE = "spoke before saying hello"
_ENDED_GRACE = 4096
"""Messages that a worker may have under way when it is counted lost: what it keeps unacknowledged, with ample room."""


@dataclass(slots=True, eq=False)
class _Waiting:
    peer: bytes
    hello: m.Hello
    key: str | None
    since: float


class Admission:
    """Answers Hellos.

    Attributes:
        config: what joiners get, None before it is known.
        graphs: the same.
        snapshot: the newest one, None before there is any.
        closing: the goodbye that whoever says Hello hears, once we have said it.
    """

    def __init__(self, run_id: str, learner_incarnation: str, settings: LearnerSettings, members: Members) -> None:
        self.config: Mapping[str, Any] | None = None
        self.graphs: Mapping[str, m.PolicyGraph] = {}
        self.snapshot: m.Snapshot | None = None
        self.closing: m.Bye | None = None
        self._run_id = run_id
        self._learner_incarnation = learner_incarnation
        self._settings = settings
        self._members = members
        self._roster = members.roster
        self._strangers = members.strangers
        self._outbox = members.outbox
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()  # at most max_workers, one for each connection
        self._hellos: OrderedDict[bytes, Allowance] = OrderedDict()  # of the MAX_REMEMBERED that spoke last

    @property
    def num_waiting(self) -> int:
        """Workers that have said Hello before we were ready for them."""
        return len(self._waiting)

    @property
    def version(self) -> int:
        """Version of the newest snapshot, -1 for none."""
        return -1 if self.snapshot is None else self.snapshot.version

    def hello(self, peer: bytes, hello: m.Hello, now: float, key: str | None) -> None:
        """A worker introduces itself: for the first time, or again after it or its connection broke."""
        if self.closing is not None:
            self._outbox.to_peer(peer, self.closing)
            return
        is_new = hello.incarnation not in self._roster.by_incarnation and hello.incarnation not in self._waiting
        if not self._allowance(peer).take(now, _NEW_COST if is_new else 1.0):
            self._members.violated(peer, "said hello too often", "said hello too often")
            return
        wrong = self._refusal(hello)
        if wrong is not None:
            self._members.reject(peer, wrong)
            return
        worker = self._roster.by_incarnation.get(hello.incarnation)
        if worker is not None:
            self._hello_again(worker, peer, hello, now, key)
            return
        if self._roster.is_buried(hello.incarnation) or hello.learner_incarnation:
            self._members.refuse_ended(peer, hello.incarnation)
            return
        twins = self._roster.of_process(hello.worker_id)
        if any(twin.key != key for twin in twins):
            self._members.violated(peer, "used another worker's name", "used the name of a worker with another key")
            return
        over_peer = self._roster.by_peer.get(peer)
        if over_peer is not None and over_peer not in twins:
            twins.append(over_peer)
        for former in twins:
            self._members.bury(former, "its worker came back as a new incarnation", notify=False)
        for incarnation, waiting in list(self._waiting.items()):
            if incarnation != hello.incarnation and (
                waiting.hello.worker_id == hello.worker_id or waiting.peer == peer
            ):
                del self._waiting[incarnation]
        if self._is_ready():
            self._admit(_Waiting(peer, hello, key, now), now)
        elif hello.incarnation in self._waiting or len(self._waiting) < self._settings.max_workers:
            # an entry that is there keeps its place: slots are given in the order of the first Hellos
            self._waiting[hello.incarnation] = _Waiting(peer, hello, key, now)
            self._outbox.to_peer(peer, m.LearnerBeat(self._learner_incarnation, self.version))

    def stranger(self, peer: bytes, num_bytes: int) -> None:
        """So much that is no Hello has come over a connection that no live worker speaks over."""
        spoken = self._strangers.count(peer)
        ended = self._strangers.ended(peer)
        if ended and spoken <= _ENDED_GRACE:  # it has not heard of its end yet, and may have much under way
            self._members.count("spoke after its incarnation ended")
            self._members.refuse_ended(peer, ended)
        elif num_bytes > MAX_STRANGER_BYTES:
            self._members.violated(peer, _SPOKE_BEFORE, f"sent {num_bytes} bytes before saying hello")
        elif spoken > self._settings.hello_grace:
            self._members.violated(peer, _SPOKE_BEFORE, "went on without saying hello")
        else:
            self._members.count(_SPOKE_BEFORE)
            if self._strangers.first_time(peer):
                self._outbox.tell(ev.PeerRejected(peer, _SPOKE_BEFORE, dropped=False))
            self._outbox.to_peer(peer, m.Refused(f"you {_SPOKE_BEFORE}", True, m.RefusalCode.HELLO_FIRST))

    def peer_gone(self, peer: bytes) -> None:
        """A connection has ended."""
        self._strangers.forget(peer)
        self._hellos.pop(peer, None)
        for claimed in self._roster.workers():
            if claimed.claimant == peer:
                claimed.claimant = None
        for incarnation, waiting in list(self._waiting.items()):
            if waiting.peer == peer:
                del self._waiting[incarnation]

    def settle_claim(self, worker: Worker, now: float) -> None:
        """Its old connection is gone or silent: it speaks over the new one, if one says so."""
        claimant, worker.claimant = worker.claimant, None
        if claimant is not None and claimant not in self._roster.by_peer:
            self._bind(worker, claimant, now)

    def admit_waiting(self, now: float) -> None:
        """Register those that came too early, once we are ready for them."""
        if self._is_ready():
            while self._waiting:
                self._admit(self._waiting.popitem(last=False)[1], now)

    def forget_silent(self, now: float) -> None:
        """Those that wait and have not spoken for long are gone."""
        for incarnation, waiting in list(self._waiting.items()):
            if now - waiting.since > self._settings.heartbeat_timeout_s:
                del self._waiting[incarnation]

    def beat(self, beat: m.LearnerBeat) -> None:
        """Let those that wait know that we are there."""
        for waiting in self._waiting.values():
            self._outbox.to_peer(waiting.peer, beat)

    def give_snapshot(self, worker: Worker, have_version: int, now: float) -> None:
        """The newest snapshot for a worker that asks for it, but not too often."""
        snapshot = self.snapshot
        if (
            snapshot is not None
            and have_version < snapshot.version
            and now - worker.gave_snapshot >= self._settings.snapshot_interval_s
        ):
            worker.gave_snapshot = now
            self._outbox.to_worker(worker, snapshot)

    def _allowance(self, peer: bytes) -> Allowance:
        allowance = self._hellos.pop(peer, None) or Allowance(_HELLOS_AT_ONCE, _HELLOS_PER_S)
        self._hellos[peer] = allowance
        while len(self._hellos) > MAX_REMEMBERED:
            self._hellos.popitem(last=False)
        return allowance

    def _refusal(self, hello: m.Hello) -> m.Refused | None:
        """Why this Hello can never be taken, if so."""
        if hello.protocol != m.PROTOCOL_VERSION:
            reason = (
                f"you speak protocol version {hello.protocol}, the learner speaks {m.PROTOCOL_VERSION}; "
                "install the same aiorl version on both sides"
            )
            return m.Refused(reason, False, m.RefusalCode.VERSION, hello.incarnation)
        if hello.run_id not in ("", self._run_id):
            reason = f"you belong to run {hello.run_id!r:.80}, this is run {self._run_id!r}"
            return m.Refused(reason, False, m.RefusalCode.RUN, hello.incarnation)
        if not hello.worker_id or not hello.incarnation:
            return m.Refused("a hello without worker id or incarnation", False, m.RefusalCode.VIOLATION)
        return None

    def _hello_again(self, worker: Worker, peer: bytes, hello: m.Hello, now: float, key: str | None) -> None:
        kind = "used another worker's name"
        if worker.key != key or worker.worker_id != hello.worker_id:
            self._members.violated(peer, kind, "used the name of a worker with another key")
        elif worker.peer == peer:
            worker.last_heard = now
            worker.claimant = None
            if now - worker.welcomed >= _WELCOME_AGAIN_S:
                self._welcome_again(worker, now)
        elif worker.peer is None:
            self._bind(worker, peer, now)
        elif self._strangers.count(peer) > self._settings.hello_grace:
            self._members.violated(peer, kind, "used the name of a worker that speaks elsewhere")
        elif worker.claimant is None:
            # Its old connection may be dead, or somebody plays an old Hello back: see who speaks first.
            worker.claimant = peer
            worker.claimed = now

    def _bind(self, worker: Worker, peer: bytes, now: float) -> None:
        former = self._roster.by_peer.get(peer)
        if former is not None and former is not worker:
            self._members.bury(former, "its worker came back as another incarnation", notify=False)
        self._roster.bind(worker, peer)
        self._strangers.forget(peer)
        worker.last_heard = now
        self._welcome_again(worker, now)

    def _is_ready(self) -> bool:
        return self.config is not None and self.snapshot is not None

    def _admit(self, waiting: _Waiting, now: float) -> None:
        hello, peer = waiting.hello, waiting.peer
        slot = self._roster.free_slot(hello.slot_hint, hello.worker_id)
        if not slot:
            reason = f"all {self._settings.max_workers} slots are taken"
            self._outbox.to_peer(peer, m.Refused(reason, True, m.RefusalCode.FULL, hello.incarnation))
            return
        worker = self._roster.add(slot, hello, peer, waiting.key, now)
        self._strangers.forget(peer)
        self._members.ledger.open(worker.incarnation, slot)
        self._members.leases.join(slot)
        self._outbox.tell(
            ev.WorkerJoined(slot, worker.incarnation, worker.worker_id, worker.host, worker.pid, worker.local)
        )
        self._welcome(worker, now)
        self._members.redeal()

    def _welcome(self, worker: Worker, now: float) -> None:
        if self.config is None or self.snapshot is None:
            return
        worker.welcomed = worker.gave_snapshot = now
        life = self._roster.lives[worker.slot]
        self._outbox.to_worker(
            worker,
            m.Welcome(
                worker.slot,
                self._settings.num_workers,
                self._run_id,
                self._learner_incarnation,
                {**self.config, "life": life} if life else self.config,
                self.graphs,
                self.snapshot,
                worker.incarnation,
                worker.last_seq,
            ),
        )

    def _welcome_again(self, worker: Worker, now: float) -> None:
        """All that may have been lost on the way: what has arrived, what is leased, what is called."""
        self._welcome(worker, now)
        worker.gap_since = None
        self._members.say_open_again(worker)
