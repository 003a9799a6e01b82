"""The learner's side of the protocol: no socket, no clock; ``now`` is any monotonic time in seconds.

The shell feeds ``receive``, ``unread``, ``bad_frames``, ``peer_gone`` and, at least every 0.25 s, ``tick``; after each
batch of messages (not each message: acknowledgements are put together) it drains ``messages_to_send()`` and
``events()``. A peer is a connection, an incarnation is a worker's registration life; an incarnation may come
back over another peer, a peer may bring a new incarnation. Nothing a peer sends disturbs the others.

Of a peer that speaks for no registered worker (see ``knows``) nothing but a Hello is decoded. A registered worker is
trusted not to be malicious, but it may be broken: it costs itself its place, and nobody else anything.

Whatever peers can fill is bounded where it is declared: by the workers (``max_workers``), by the connections remembered
(`roster.MAX_REMEMBERED`), or by kinds that are ours.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from aiorl.config.worker import TransportConfig
from aiorl.data.fragment import PolicyGraph
from aiorl.errors import LocalProtocolError, RemoteProtocolError
from aiorl.net.protocol import events as ev
from aiorl.net.protocol.leases import Grant, LeaseBook
from aiorl.net.protocol.ledger import MAX_FRAGMENT_STEPS, Ledger
from aiorl.net.protocol.rates import Allowance, Newest
from aiorl.net.protocol.roster import MAX_REMEMBERED, Line, Peer, Roster, Waiting, Worker
from aiorl.net.wire import messages as m
from aiorl.net.wire.format import MAX_STRANGER_BYTES, MAX_WORKERS
from aiorl.text import one_line

Target: TypeAlias = bytes | None
"""Whom a message is for: a peer, or BROADCAST."""
BROADCAST: Final = None

_MAX_REASON = 300
_SNAPSHOT_AGAIN_S = 0.25
"""A connection gets no other snapshot for so long, unless a new incarnation registers over it."""
_NEW_COST = 5.0
"""A registration costs us a whole snapshot, so it counts as so many Hellos."""
_REGISTRATIONS_AT_FIRST, _REGISTRATIONS_AT_ONCE, _REGISTRATIONS_PER_S = 1024, 64, 64.0
"""Over all connections, so that new ones buy nothing; at first so many that a whole run can join at once."""
_SNAPSHOT_UNIT = 4 << 20
"""So many bytes of a snapshot count as one registration more."""
_FAILURE_COST = 1024.0
"""A failure is told to people, so it counts as so much that nobody needs."""
_ENDED_GRACE = 4096
"""Messages that a worker may have under way when it is counted lost: what it keeps unacknowledged, with ample room."""


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """How patient and how large.

    Attributes:
        transport: the times that a configuration sets.
        max_workers: slots; more workers are asked to try again later. At most `max_workers_of` the limits of messages.
        num_workers: told to workers: how many the run is configured for.
        hello_grace: messages without a Hello after which a peer is dropped.
        data_ends: workers read stored experience that comes to an end, so it counts if they say so.
    """

    transport: TransportConfig = field(default_factory=TransportConfig)
    max_workers: int = MAX_WORKERS
    num_workers: int = 0
    hello_grace: int = 64
    data_ends: bool = False


class LearnerSession:
    """What the learner says to its workers, and what follows from what they say.

    Args:
        run_id: the run, kept over a resume.
        learner_incarnation: random name of this process's life.
        settings: times and bounds.
        ledger: the account to go on with after a resume.

    Attributes:
        ledger: the account of env steps; the service tells it what was trained and discarded.
        leases: the leases; granted through this session only.
    """

    def __init__(
        self,
        run_id: str,
        learner_incarnation: str,
        settings: LearnerSettings | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.run_id = run_id
        self.learner_incarnation = learner_incarnation
        self.settings = settings or LearnerSettings()
        self.ledger = ledger or Ledger()
        # ids of two learner lives must not be mistaken for each other by a worker that outlives one
        self.leases = LeaseBook(first_id=(zlib.crc32(learner_incarnation.encode()) << 20) + 1)
        self._roster = Roster(self.settings.max_workers)
        self._peers: Newest[bytes, Peer] = Newest(MAX_REMEMBERED)
        self._line = Line()
        self._registrations = Allowance(_REGISTRATIONS_AT_ONCE, _REGISTRATIONS_PER_S, at_first=_REGISTRATIONS_AT_FIRST)
        self._calls: dict[int, Worker] = {}  # those not answered yet; only we make any
        self._next_call = 1
        self._config: Mapping[str, Any] | None = None
        self._graphs: Mapping[str, PolicyGraph] = {}
        self._snapshot: m.Snapshot | None = None
        self._goodbye: m.Bye | None = None
        self._messages: list[tuple[Target, m.DownMessage]] = []
        self._events: list[ev.LearnerEvent] = []
        self._ack_due: dict[Worker, None] = {}  # in the order in which they brought something
        self._given: set[bytes] = set()  # peers that one of the messages above gives a snapshot
        self._now = 0.0
        self._last_tick: float | None = None
        self._last_beat = float("-inf")

    # Commands ---------------------------------------------------------------------------------------------

    def begin(self, config: Mapping[str, Any], graphs: Mapping[str, PolicyGraph], now: float) -> None:
        """Admit workers, to whom this is given, as soon as there is a snapshot as well; some may wait already."""
        self._now = now
        self._config = config
        self._graphs = graphs
        self._admit_waiting()

    def publish(self, snapshot: m.Snapshot, now: float) -> None:
        """Broadcast a snapshot; it is kept for joiners and for workers that missed it.

        Raises: LocalProtocolError if its version is not above the one before.
        """
        self._now = now
        if snapshot.version <= self.version:
            raise LocalProtocolError(f"snapshot {snapshot.version} after {self.version}: versions must rise")
        self._snapshot = dataclasses.replace(snapshot, learner_incarnation=self.learner_incarnation)
        if self._roster.by_slot:
            self._say(BROADCAST, self._snapshot)
        self._admit_waiting()

    def deal(self, version: int, fragments: int) -> None:
        """Lease exactly ``fragments`` at ``version`` or newer over the live workers (see `LeaseBook.deal`).

        A lost worker's share goes to the others, or is held until one joins.
        """
        self._send_grants(self.leases.deal(version, fragments, self._now))

    def deal_again(self, fragments: int) -> None:
        """Lease so many fragments of the current deal once more: what came for them could not be used."""
        self.leases.held += fragments
        self._redeal()

    def stream(self, waiting: int, min_version: int) -> None:
        """Lease what the budget of the run allows (see `Pacing`), ``waiting`` fragments being queued or in use."""
        self._send_grants(self.leases.stream(waiting, min_version, self._now))

    def call(self, slot: int, method: str, args: Mapping[str, m.Plain]) -> int:
        """Have a worker run a method; a CallReplied of the returned id follows, unless it or its connection is lost.

        Raises: LocalProtocolError if no worker has that slot.
        """
        worker = self._roster.by_slot.get(slot)
        if worker is None:
            raise LocalProtocolError(f"no worker in slot {slot}; live slots: {self.slots}")
        call_id = self._next_call
        self._next_call += 1
        self._calls[call_id] = worker
        self._say_to(worker, m.Call(call_id, method, args))
        return call_id

    def lose(self, slot: int, reason: str, now: float) -> None:
        """Count a worker lost that is known to be gone; its heartbeat need not say so."""
        self._now = now
        worker = self._roster.by_slot.get(slot)
        if worker is not None:
            self._bury(worker, reason)

    def lose_worker_id(self, worker_id: str, reason: str, now: float) -> None:
        """Do as `lose`, by the worker process's name."""
        self._now = now
        for worker in self._roster.of_process(worker_id):
            self._bury(worker, reason)

    def reserve_slot(self, slot: int, worker_id: str) -> None:
        """Keep a slot for a worker that is being started here; others get the next free ones."""
        self._roster.reserved[slot] = worker_id

    def shutdown(self, reason: str, final: bool, now: float) -> None:
        """Say goodbye to all, now and to whoever still says Hello."""
        self._goodbye = goodbye = m.Bye(reason, final)
        self._say(BROADCAST, goodbye)
        for worker in self._roster.workers():
            self._say_to(worker, goodbye)

    # Queries ----------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Version of the newest snapshot, -1 for none."""
        return -1 if self._snapshot is None else self._snapshot.version

    @property
    def slots(self) -> list[int]:
        """Slots of the live workers, rising."""
        return sorted(self._roster.by_slot)

    @property
    def workers(self) -> list[Worker]:
        """The live workers by slot, to be looked at only."""
        return self._roster.workers()

    @property
    def num_waiting(self) -> int:
        """Workers that have said Hello and are not registered yet."""
        return len(self._line)

    def has_brought(self, slot: int) -> bool:
        """Return whether the live worker in a slot has brought a fragment."""
        worker = self._roster.by_slot.get(slot)
        return worker is not None and worker.last_seq > 0

    def knows(self, peer: bytes) -> bool:
        """Return whether a registered worker speaks over this peer; of others nothing but a Hello is to be decoded."""
        return peer in self._roster.by_peer

    def messages_to_send(self) -> list[tuple[Target, m.DownMessage]]:
        """Return what to send, in order; drained by the call. Acknowledgements are made here, one for each worker."""
        messages, self._messages = self._messages, []
        messages += [(worker.peer, m.Ack(worker.last_seq)) for worker in self._ack_due if worker.peer is not None]
        self._ack_due.clear()
        self._given.clear()
        return messages

    def events(self) -> list[ev.LearnerEvent]:
        """Return what has happened, in order; drained by the call."""
        events, self._events = self._events, []
        return events

    # Inputs -----------------------------------------------------------------------------------------------

    def receive(
        self,
        peer: bytes,
        message: m.Message,
        now: float,
        key: str | None = None,
        host: str = "",
        *,
        has_unsent: bool = False,
    ) -> None:
        """Take a message that has come from a peer.

        Args:
            peer: the connection.
            message: what it said.
            now: the time.
            key: what its connection was authenticated with.
            host: where it comes from; asked for with a Hello only, and of use where there are no keys.
            has_unsent: something large that was said to it has yet to leave us, so it gets no other snapshot; asked for
                with a Hello and a SnapshotRequest only.
        """
        self._note_time(now)
        worker = self._roster.by_peer.get(peer)
        if worker is None and self._is_dropped(peer):
            return
        if worker is not None:
            worker.last_heard = now
            if type(message) is m.Samples:  # most are
                self._samples(worker, message)
                return
        match message:
            case m.Hello():
                self._hello(Waiting(peer, message, key, key or host, now), has_unsent)
            case _ if worker is None:
                self._stranger(peer, 0)
            case m.Beat():
                is_through = message.state == m.OUT_OF_DATA and self.settings.data_ends
                worker.state = message.state
                worker.in_env_s = message.in_env_s
                is_sound = self._report(worker, message)
                if is_sound and is_through and self.leases.retire(worker.slot):
                    self._redeal()
            case m.SnapshotRequest(have_version):
                snapshot = self._snapshot
                if snapshot is not None and have_version < snapshot.version and self._may_give(peer, has_unsent):
                    self._give(worker, snapshot)
            case m.Failure(kind, text, fatal=fatal, traceback=traceback):
                if not fatal and not self._needless(worker, "failures", _FAILURE_COST):
                    return
                self._events.append(ev.WorkerFailed(worker.slot, kind, text, traceback))
                if fatal:
                    self._bury(worker, f"failed: {one_line(text, _MAX_REASON)}", notify=False)
            case m.Reply(call_id, ok, result):
                if self._calls.get(call_id) is worker:
                    del self._calls[call_id]
                    self._events.append(ev.CallReplied(worker.slot, call_id, ok, result))
                else:
                    self._needless(worker, "replies that nobody asked for")
            case m.Leaving(reason):
                if self._report(worker, message):
                    self._bury(worker, f"left: {one_line(reason, _MAX_REASON)}", notify=False)
            case _:
                self._violated(peer, f"sent a {type(message).__name__}")

    def unread(self, peer: bytes, num_bytes: int) -> None:
        """Take note of so much from a peer that is not registered; it is no Hello and was not decoded."""
        if not self._is_dropped(peer):
            self._stranger(peer, num_bytes)

    def bad_frames(self, peer: bytes, error: RemoteProtocolError, now: float) -> None:
        """Drop a peer that sent what does not decode; the worker that spoke over it is lost."""
        self._note_time(now)
        if not self._is_dropped(peer):
            what = one_line(str(error), _MAX_REASON)
            self._violated(peer, f"sent frames that do not decode: {what}")

    def peer_gone(self, peer: bytes, now: float, *, was_silent: bool = False) -> None:
        """Note that a connection has ended; its worker may come back over another one until it counts as silent.

        ``was_silent``: we ended it, since nothing was heard over it.
        """
        self._note_time(now)
        self._peers.pop(peer, None)
        self._line.remove(peer)
        worker = self._roster.by_peer.get(peer)
        if worker is not None:
            worker.hung_up = not was_silent
            self._roster.unbind(worker)

    def tick(self, now: float) -> None:
        """Let time pass: silent workers are lost, heartbeats go out, as due."""
        transport = self.settings.transport
        self._note_time(now)
        self._last_tick = now
        for worker in self._roster.workers():
            patience_s = transport.heartbeat_timeout_s
            if worker.state == m.BUILDING and not worker.hung_up:  # some of it keeps a process from doing anything else
                patience_s = max(patience_s, transport.build_timeout_s)
            if now - worker.last_heard > patience_s:
                self._bury(worker, "heartbeats stopped")
        for waiting in list(self._line):
            if now - waiting.since > transport.heartbeat_timeout_s:
                self._line.remove(waiting.peer)
        self._admit_waiting()
        for overdue in self.leases.take_overdue(transport.lease_timeout_s, now):
            self._events.append(overdue)
            self._redeal()
        if now - self._last_beat >= transport.heartbeat_interval_s:
            self._last_beat = now
            beat = m.LearnerBeat(self.learner_incarnation, self.version)
            self._say(BROADCAST, beat)
            for worker in self._roster.workers():
                self._say_to(worker, beat)
            for waiting in self._line:
                self._say(waiting.peer, beat)

    def _note_time(self, now: float) -> None:
        """Make nobody late for time in which we stood still ourselves, as the first input after it shows."""
        self._now = now
        stood_still = 0.0 if self._last_tick is None else now - self._last_tick
        if stood_still <= self.settings.transport.heartbeat_timeout_s / 2:
            return
        self._last_tick = now
        self.leases.forgive(stood_still)
        for worker in self._roster.workers():  # hear what has come in the meantime first
            worker.last_heard += stood_still

    # Registration -----------------------------------------------------------------------------------------

    def _hello(self, waiting: Waiting, has_unsent: bool) -> None:
        """Answer a worker that introduces itself: for the first time, or again after it or its connection broke."""
        peer, hello = waiting.peer, waiting.hello
        if self._goodbye is not None:
            self._say(peer, self._goodbye)
            return
        before = self._line.get(peer)
        is_new = not (
            hello.incarnation in self._roster.by_incarnation
            or self._has_ended(hello)  # its Hellos of minutes may come at once, and cost no snapshot
            or (before is not None and before.hello.incarnation == hello.incarnation)
        )
        if not self._peer(peer).hellos.take(self._now, _NEW_COST if is_new else 1.0):
            self._violated(peer, "said hello too often")
            return
        wrong = self._refusal(hello)
        if wrong is not None:
            self._reject(peer, wrong)
            return
        if self._is_settled(waiting, has_unsent) or has_unsent or peer in self._given:
            return  # in the latter cases it says Hello once more
        self._admit_waiting()
        if before is not None or len(self._line) < self.settings.max_workers:
            self._line.put(waiting)
            self._admit_waiting()
            if self._line.get(peer) is not None:
                self._say(peer, m.LearnerBeat(self.learner_incarnation, self.version))

    def _refusal(self, hello: m.Hello) -> m.Refused | None:
        """Return why this Hello can never be taken, if so."""
        if hello.protocol != m.PROTOCOL_VERSION:
            reason = (
                f"you speak protocol version {hello.protocol}, the learner speaks {m.PROTOCOL_VERSION}; "
                "install the same aiorl version on both sides"
            )
            return m.Refused(reason, False, m.RefusalCode.VERSION, hello.incarnation)
        if hello.run_id not in ("", self.run_id):
            reason = f"you belong to run {hello.run_id!r:.80}, this is run {self.run_id!r}"
            return m.Refused(reason, False, m.RefusalCode.RUN, hello.incarnation)
        if not hello.worker_id or not hello.incarnation:
            return m.Refused("a hello without worker id or incarnation", False, m.RefusalCode.VIOLATION)
        return None

    def _has_ended(self, hello: m.Hello) -> bool:
        """Return whether an incarnation that is not registered was so before, here or with an earlier learner."""
        return self._roster.is_buried(hello.incarnation) or bool(hello.learner_incarnation)

    def _is_settled(self, waiting: Waiting, has_unsent: bool = False) -> bool:
        """Return whether this Hello asks for no registration, since its incarnation has one, or had one."""
        hello, peer = waiting.hello, waiting.peer
        worker = self._roster.by_incarnation.get(hello.incarnation)
        if worker is None and not self._has_ended(hello):
            return False
        self._line.remove(peer)
        if worker is None:
            self._refuse_ended(peer, hello.incarnation)
        elif worker.key != waiting.key or worker.worker_id != hello.worker_id:
            self._violated(peer, "used the name of a worker with another key")
        else:
            if worker.peer != peer:
                former = self._roster.by_peer.get(peer)
                if former is not None:
                    self._bury(former, "its worker came back as another incarnation", notify=False)
                self._roster.bind(worker, peer)
                self._settled_in(peer)
            worker.last_heard = self._now
            if self._may_give(peer, has_unsent):  # else it says Hello once more
                self._welcome(worker)
                for lease in self.leases.outstanding_leases(worker.slot):
                    self._say_to(worker, lease)
        return True

    def _admit_waiting(self) -> None:
        """Register those that wait, once we are ready for them and as often as may be."""
        if not self._line or self._config is None or self._snapshot is None:
            return
        trees = (self._snapshot.weights, self._snapshot.filters)
        num_bytes = sum(array.nbytes for tree in trees for arrays in tree.values() for array in arrays.values())
        cost = min(_REGISTRATIONS_AT_ONCE, 1.0 + num_bytes / _SNAPSHOT_UNIT)
        while self._line and self._registrations.take(self._now, cost):
            waiting = self._line.pop()
            if not self._peer(waiting.peer).is_dropped and not self._is_settled(waiting):
                self._admit(waiting)

    def _admit(self, waiting: Waiting) -> None:
        hello, peer = waiting.hello, waiting.peer
        twins = self._roster.of_process(hello.worker_id)
        if any(twin.key != waiting.key for twin in twins):
            self._violated(peer, "used the name of a worker with another key")
            return
        over_peer = self._roster.by_peer.get(peer)
        if over_peer is not None and over_peer not in twins:
            twins.append(over_peer)
        for former in twins:
            self._bury(former, "its worker came back as a new incarnation", notify=False)
        slot = self._roster.free_slot(hello.slot_hint, hello.worker_id)
        if not slot:
            reason = f"all {self.settings.max_workers} slots are taken"
            self._say(peer, m.Refused(reason, True, m.RefusalCode.FULL, hello.incarnation))
            return
        worker = self._roster.add(slot, hello, peer, waiting.key, self._now)
        self._settled_in(peer)
        self.ledger.open(worker.incarnation)
        self.leases.join(slot)
        self._events.append(ev.WorkerJoined(slot, worker.incarnation, worker.host, worker.pid, worker.local))
        self._welcome(worker)
        self._redeal()

    def _welcome(self, worker: Worker) -> None:
        """Give a worker all it needs to sample."""
        config, snapshot = self._config, self._snapshot
        if config is None or snapshot is None:
            return
        life = config.get("life", 0) + self._roster.lives[worker.slot]
        welcome = m.Welcome(
            worker.slot,
            self.settings.num_workers,
            self.run_id,
            self.learner_incarnation,
            {**config, "life": life} if life else config,
            self._graphs,
            snapshot,
            worker.incarnation,
            worker.last_seq,
        )
        self._give(worker, welcome)

    def _may_give(self, peer: bytes, has_unsent: bool) -> bool:
        """Return whether a snapshot may be said to a peer now: not too often, nor before the last one has left us."""
        is_soon = self._now - self._peer(peer).gave_snapshot < _SNAPSHOT_AGAIN_S
        return not (is_soon or has_unsent or peer in self._given)

    def _give(self, worker: Worker, message: m.Welcome | m.Snapshot) -> None:
        if worker.peer is not None:
            self._peer(worker.peer).gave_snapshot = self._now
            self._given.add(worker.peer)
            self._say_to(worker, message)

    # Registered workers -----------------------------------------------------------------------------------

    def _samples(self, worker: Worker, samples: m.Samples) -> None:
        """Take a fragment: each once, in order, within a lease, and accounted for."""
        if samples.seq <= worker.last_seq:
            self._needless(worker, "double fragments (sent again after a reconnect)")
            return
        if samples.seq > worker.last_seq + 1:
            self._worker_violated(worker, f"sent fragment {samples.seq} where {worker.last_seq + 1} was due")
            return
        if not samples.first_version <= samples.last_version <= self.version:
            wrong = (
                f"a fragment of policy versions {samples.first_version} to {samples.last_version}, "
                f"the newest being {self.version}"
            )
        else:
            wrong = self.leases.use(worker.slot, samples.lease_id, samples.first_version, self._now)
        if wrong:
            self._worker_violated(worker, f"sent {wrong}")
        elif self._report(worker, samples):
            worker.last_seq = samples.seq
            self._ack_due.setdefault(worker)
            self._events.append(ev.SamplesAccepted(worker.slot, worker.incarnation, samples))

    def _report(self, worker: Worker, said: m.Samples | m.Beat | m.Leaving) -> bool:
        """Enter what a worker has sampled, as far as its leases allow, and one fragment more: that which has just come.

        Returns: False if that cannot be, and the worker is lost for it.
        """
        most = (self.leases.outstanding(worker.slot) + 1) * MAX_FRAGMENT_STEPS
        try:
            self.ledger.report(worker.incarnation, said.sampled_total - said.abandoned_total, max_in_flight=most)
            if isinstance(said, m.Samples):
                self.ledger.receive(worker.incarnation, said.env_steps)
        except RemoteProtocolError as error:
            self._worker_violated(worker, f"sent counts that do not add up: {error}")
            return False
        return True

    def _needless(self, worker: Worker, kind: str, cost: float = 1.0) -> bool:
        """Count what a worker need not have sent; False if that was too much of it, and the worker is lost for it."""
        if worker.needless.take(self._now, cost):
            return True
        self._worker_violated(worker, f"sent {kind} without end")
        return False

    # What is said -----------------------------------------------------------------------------------------

    def _say(self, target: Target, message: m.DownMessage) -> None:
        self._messages.append((target, message))

    def _say_to(self, worker: Worker, message: m.DownMessage) -> None:
        """Say something to a worker; without a connection it hears all that matters when it comes back."""
        if worker.peer is not None:
            self._messages.append((worker.peer, message))

    def _send_grants(self, grants: Iterable[Grant]) -> None:
        for slot, lease in grants:
            self._say_to(self._roster.by_slot[slot], lease)

    def _redeal(self) -> None:
        """Lease what is held to those that are there."""
        self._send_grants(self.leases.redeal(self._now))

    def _refuse_ended(self, peer: bytes, incarnation: str) -> None:
        reason = "this incarnation has ended and its samples are counted lost; come back as a new one"
        self._say(peer, m.Refused(reason, True, m.RefusalCode.ENDED, incarnation))

    # Ends and violations ----------------------------------------------------------------------------------

    def _bury(self, worker: Worker, reason: str, *, notify: bool = True) -> None:
        """End an incarnation: account closed, leases to the others, slot free.

        Args:
            worker: the incarnation.
            reason: in plain words; what stands before a colon is the kind, under which it is accounted.
            notify: it is told, since it may not know.
        """
        peer = worker.peer
        if peer is not None:
            self._peer(peer).ended = worker.incarnation
            if notify:
                self._refuse_ended(peer, worker.incarnation)
        self._roster.bury(worker)
        self._ack_due.pop(worker, None)
        self._calls = {call_id: asked for call_id, asked in self._calls.items() if asked is not worker}
        lost = self.ledger.close(worker.incarnation, reason.partition(":")[0])
        self.leases.drop_slot(worker.slot)
        self._events.append(ev.WorkerLost(worker.slot, worker.incarnation, reason, lost))
        self._redeal()

    def _worker_violated(self, worker: Worker, reason: str) -> None:
        """Lose a worker that broke the protocol; it is told why, and its connection dropped."""
        assert worker.peer is not None  # it has just spoken
        self._violated(worker.peer, reason)

    def _violated(self, peer: bytes, reason: str) -> None:
        """Drop a peer, which is told why; the worker that spoke over it is lost."""
        worker = self._roster.by_peer.get(peer)
        incarnation = worker.incarnation if worker is not None else ""
        self._reject(peer, m.Refused(f"you {reason}", False, m.RefusalCode.VIOLATION, incarnation))

    def _reject(self, peer: bytes, refusal: m.Refused) -> None:
        """Drop a peer for good."""
        worker = self._roster.by_peer.get(peer)
        if worker is not None:
            self._bury(worker, f"broke the protocol: {refusal.reason}", notify=False)
        self._say(peer, refusal)
        self._line.remove(peer)
        self._peer(peer).is_dropped = True
        self._events.append(ev.PeerRejected(peer, refusal.reason.removeprefix("you ")))

    # Other peers ------------------------------------------------------------------------------------------

    def _peer(self, peer: bytes) -> Peer:
        known = self._peers[peer] = self._peers.get(peer) or Peer()
        return known

    def _settled_in(self, peer: bytes) -> None:
        """A worker speaks over this peer now: forget what it said before."""
        known = self._peer(peer)
        known.num_strange, known.ended = 0, ""

    def _is_dropped(self, peer: bytes) -> bool:
        """Return whether a peer is not listened to any more; who goes on speaking is remembered for longer."""
        return peer in self._peers and self._peer(peer).is_dropped

    def _stranger(self, peer: bytes, num_bytes: int) -> None:
        """Answer so much that is no Hello and came over a connection that no live worker speaks over."""
        known = self._peer(peer)
        known.num_strange += 1
        if known.ended and known.num_strange <= _ENDED_GRACE:
            # it has not heard of its end yet, and may have much under way
            self._refuse_ended(peer, known.ended)
        elif num_bytes > MAX_STRANGER_BYTES:
            self._violated(peer, f"sent {num_bytes} bytes before saying hello")
        elif known.num_strange > self.settings.hello_grace:
            self._violated(peer, "went on without saying hello")
        else:
            self._say(peer, m.Refused("you spoke before saying hello", True, m.RefusalCode.HELLO_FIRST))
