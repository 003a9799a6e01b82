"""How workers come to be registered with a learner: their Hellos, new or again, and those that must wait."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aiorl.data.sample_plan import PolicyGraph
from aiorl.net.protocol import events as ev
from aiorl.net.protocol.learner_members import Members
from aiorl.net.protocol.rates import Allowance, Allowances
from aiorl.net.protocol.roster import MAX_REMEMBERED, Worker
from aiorl.net.wire import messages as m
from aiorl.net.wire.limits import MAX_STRANGER_BYTES

__all__ = ["Admission"]

_WELCOME_AGAIN_S = 0.25
_SNAPSHOT_AGAIN_S = 0.5
_HELLOS_AT_ONCE, _HELLOS_PER_S = 256, 4.0
_NEW_COST = 5.0
"""A registration costs us a whole snapshot, so it counts as so many Hellos."""
_REGISTRATIONS_AT_FIRST, _REGISTRATIONS_AT_ONCE, _REGISTRATIONS_PER_S = 1024, 64, 64.0
"""Over all connections, so that new ones buy nothing; at first so many that a whole run can join at once."""
_ANSWERS_AT_ONCE, _ANSWERS_PER_S = 1024, 256.0
"""Snapshots for those who are registered: for a worker that comes back, and for one that asks."""
_SNAPSHOT_UNIT = 4 << 20
"""So many bytes of a snapshot count as one registration more."""
_SPOKE_BEFORE = "spoke before saying hello"
_ENDED_GRACE = 4096
"""Messages that a worker may have under way when it is counted lost: what it keeps unacknowledged, with ample room."""


@dataclass(slots=True, eq=False)
class _Waiting:
    peer: bytes
    hello: m.Hello
    key: str | None
    source: str
    since: float


class _Queue:
    """Hellos that wait, one for each connection; sources take turns, so that none can keep the others waiting."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._by_source: OrderedDict[str, OrderedDict[bytes, _Waiting]] = OrderedDict()
        self._source: dict[bytes, str] = {}

    def __len__(self) -> int:
        return len(self._source)

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._source

    def __iter__(self) -> Iterator[_Waiting]:
        return (waiting for line in self._by_source.values() for waiting in line.values())

    def get(self, peer: bytes) -> _Waiting | None:
        """What waits from this connection."""
        source = self._source.get(peer)
        return None if source is None else self._by_source[source][peer]

    def put(self, waiting: _Waiting) -> bool:
        """Let a Hello wait; a later one of its connection takes its place in line. False if there is no room."""
        if waiting.peer not in self._source and len(self) >= self._max_waiting:
            return False
        self._source.setdefault(waiting.peer, waiting.source)
        self._by_source.setdefault(self._source[waiting.peer], OrderedDict())[waiting.peer] = waiting
        return True

    def pop(self) -> _Waiting:
        """The one whose turn it is."""
        source, line = next(iter(self._by_source.items()))
        waiting = next(iter(line.values()))
        self._by_source.move_to_end(source)
        self.remove(waiting.peer)
        return waiting

    def remove(self, peer: bytes) -> None:
        """This connection's does not wait any more, if one did."""
        source = self._source.pop(peer, None)
        if source is not None:
            line = self._by_source[source]
            del line[peer]
            if not line:
                del self._by_source[source]


class Admission:
    """Answers Hellos.

    Attributes:
        config: what joiners get, None before it is known.
        graphs: the same.
        snapshot: the newest one, None before there is any.
        closing: the goodbye that whoever says Hello hears, once we have said it.
    """

    def __init__(self, run_id: str, learner_incarnation: str, members: Members) -> None:
        self.config: Mapping[str, Any] | None = None
        self.graphs: Mapping[str, PolicyGraph] = {}
        self.snapshot: m.Snapshot | None = None
        self.closing: m.Bye | None = None
        self._run_id = run_id
        self._learner_incarnation = learner_incarnation
        self._settings = members.settings
        self._members = members
        self._roster = members.roster
        self._strangers = members.strangers
        self._waiting = _Queue(members.settings.max_workers)
        self._hellos = Allowances(_HELLOS_AT_ONCE, _HELLOS_PER_S, MAX_REMEMBERED)
        self._registrations = Allowance(_REGISTRATIONS_AT_ONCE, _REGISTRATIONS_PER_S, at_first=_REGISTRATIONS_AT_FIRST)
        self._answers = Allowance(_ANSWERS_AT_ONCE, _ANSWERS_PER_S)

    @property
    def num_waiting(self) -> int:
        """Workers that have said Hello and are not registered yet."""
        return len(self._waiting)

    @property
    def version(self) -> int:
        """Version of the newest snapshot, -1 for none."""
        return -1 if self.snapshot is None else self.snapshot.version

    def hello(self, peer: bytes, hello: m.Hello, now: float, key: str | None, host: str) -> None:
        """A worker introduces itself: for the first time, or again after it or its connection broke."""
        if self.closing is not None:
            self._members.say(peer, self.closing)
            return
        before = self._waiting.get(peer)
        is_new = not (
            hello.incarnation in self._roster.by_incarnation
            or self._has_ended(hello)  # its Hellos of minutes may come at once, and cost no snapshot
            or (before is not None and before.hello.incarnation == hello.incarnation)
        )
        if not self._hellos.take(peer, now, _NEW_COST if is_new else 1.0):
            self._members.violated(peer, "said hello too often", "said hello too often")
            return
        wrong = self._refusal(hello)
        if wrong is not None:
            self._members.reject(peer, wrong)
            return
        waiting = _Waiting(peer, hello, key, key or host, now)
        if self._is_settled(waiting, now):
            return
        if not self._members.may_get_snapshot(peer):
            return  # it says Hello once more
        self.admit_waiting(now)
        if self._waiting.put(waiting):
            self.admit_waiting(now)
            if peer in self._waiting:
                self._members.say(peer, m.LearnerBeat(self._learner_incarnation, self.version))

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
                self._members.tell(ev.PeerRejected(peer, _SPOKE_BEFORE, dropped=False))
            self._members.say(peer, m.Refused(f"you {_SPOKE_BEFORE}", True, m.RefusalCode.HELLO_FIRST))

    def peer_gone(self, peer: bytes) -> None:
        """A connection has ended."""
        self._strangers.forget(peer)
        self._hellos.forget(peer)
        self._waiting.remove(peer)
        for claimed in self._roster.by_slot.values():
            if claimed.claimant == peer:
                claimed.claimant = None

    def settle_claim(self, worker: Worker, now: float) -> None:
        """Its old connection is gone or silent: it speaks over the new one, if one says so."""
        claimant, worker.claimant = worker.claimant, None
        if claimant is not None and claimant not in self._roster.by_peer:
            self._bind(worker, claimant, now)

    def admit_waiting(self, now: float) -> None:
        """Register those that wait, once we are ready for them and as often as may be."""
        while self._waiting and self._is_ready() and self._registrations.take(now, self._snapshot_cost()):
            waiting = self._waiting.pop()
            if not self._strangers.is_dropped(waiting.peer) and not self._is_settled(waiting, now):
                self._admit(waiting, now)

    def forget_silent(self, now: float) -> None:
        """Those that wait and have not spoken for long are gone."""
        for waiting in list(self._waiting):
            if now - waiting.since > self._settings.transport.heartbeat_timeout_s:
                self._waiting.remove(waiting.peer)

    def beat(self, beat: m.LearnerBeat) -> None:
        """Let those that wait know that we are there."""
        for waiting in self._waiting:
            self._members.say(waiting.peer, beat)

    def give_snapshot(self, worker: Worker, have_version: int, now: float) -> None:
        """The newest snapshot for a worker that asks for it, but not too often, nor before the last one has left us."""
        snapshot = self.snapshot
        if (
            snapshot is not None
            and have_version < snapshot.version
            and now - worker.gave_snapshot >= _SNAPSHOT_AGAIN_S
            and worker.peer is not None
            and self._members.may_get_snapshot(worker.peer)
            and self._answers.take(now, self._snapshot_cost())
        ):
            worker.gave_snapshot = now
            self._members.give_snapshot(worker, snapshot)

    def _snapshot_cost(self) -> float:
        """What one more worker that gets the newest snapshot costs us, in registrations."""
        if self.snapshot is None:
            return 1.0
        trees = (self.snapshot.weights, self.snapshot.filters)
        num_bytes = sum(array.nbytes for tree in trees for arrays in tree.values() for array in arrays.values())
        return min(_REGISTRATIONS_AT_ONCE, 1.0 + num_bytes / _SNAPSHOT_UNIT)

    def _is_settled(self, waiting: _Waiting, now: float) -> bool:
        """Whether this Hello asks for no registration, since its incarnation has one, or had one."""
        hello, peer = waiting.hello, waiting.peer
        worker = self._roster.by_incarnation.get(hello.incarnation)
        if worker is not None:
            self._hello_again(worker, waiting, now)
        elif self._has_ended(hello):
            self._members.refuse_ended(peer, hello.incarnation)
        else:
            return False
        self._waiting.remove(peer)
        return True

    def _has_ended(self, hello: m.Hello) -> bool:
        """Whether an incarnation that is not registered was so before, here or with a learner before this one."""
        return self._roster.is_buried(hello.incarnation) or bool(hello.learner_incarnation)

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

    def _hello_again(self, worker: Worker, waiting: _Waiting, now: float) -> None:
        kind, peer = "used another worker's name", waiting.peer
        if worker.key != waiting.key or worker.worker_id != waiting.hello.worker_id:
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
        twins = self._roster.of_process(hello.worker_id)
        if any(twin.key != waiting.key for twin in twins):
            self._members.violated(peer, "used another worker's name", "used the name of a worker with another key")
            return
        over_peer = self._roster.by_peer.get(peer)
        if over_peer is not None and over_peer not in twins:
            twins.append(over_peer)
        for former in twins:
            self._members.bury(former, "its worker came back as a new incarnation", notify=False)
        slot = self._roster.free_slot(hello.slot_hint, hello.worker_id)
        if not slot:
            reason = f"all {self._settings.max_workers} slots are taken"
            self._members.say(peer, m.Refused(reason, True, m.RefusalCode.FULL, hello.incarnation))
            return
        worker = self._roster.add(slot, hello, peer, waiting.key, now, waiting.source)
        self._strangers.forget(peer)
        self._members.ledger.open(worker.incarnation)
        self._members.leases.join(slot, waiting.source)
        self._members.tell(
            ev.WorkerJoined(slot, worker.incarnation, worker.worker_id, worker.host, worker.pid, worker.local)
        )
        self._welcome(worker, now)
        self._members.redeal()

    def _welcome(self, worker: Worker, now: float) -> None:
        if self.config is None or self.snapshot is None:
            return
        worker.welcomed = worker.gave_snapshot = now
        life = self.config.get("life", 0) + self._roster.lives[worker.slot]
        self._members.give_snapshot(
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
        """All that may have been lost on the way: what has arrived, what is leased, what is called.

        Too many at once, and those to whom the last one is still under way, are left to say Hello once more.
        """
        if worker.peer is not None and not self._members.may_get_snapshot(worker.peer):
            return
        if not self._answers.take(now, self._snapshot_cost()):
            return
        self._welcome(worker, now)
        worker.gap_since = None
        self._members.say_open_again(worker)
