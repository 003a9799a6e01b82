"""The learner's side of the protocol: no socket, no clock; ``now`` is any monotonic time in
seconds.

The shell calls ``receive``, ``unread``, ``bad_frames``, ``peer_gone`` and, at least every 0.25 s,
``tick``. After each batch of messages it drains ``messages_to_send()`` and ``events()``; draining
once per batch, not per message, combines acknowledgements. A peer is a connection; an incarnation
is a worker's registration life. An incarnation can come back over another peer, and a peer can
bring a new incarnation. No message of a peer affects the others.

From a peer without a registered worker (see ``knows``), only a Hello or a StatusRequest is decoded.
A registered worker is trusted not to be malicious, but it may be broken: then it loses its own
place and affects no other worker.

Every structure that peers can fill is bounded where it is declared: by the number of workers
(``max_workers``), by the number of connections remembered (`roster.MAX_REMEMBERED`), or by a set of
kinds that we define.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from aiorl.config.worker import TransportConfig
from aiorl.data.fragment import PolicyGraph
from aiorl.errors import LocalProtocolError, RemoteProtocolError
from aiorl.net.protocol import events as ev
from aiorl.net.protocol.calls import OpenCalls
from aiorl.net.protocol.leases import Grant, LeaseBook
from aiorl.net.protocol.ledger import MAX_FRAGMENT_STEPS, Ledger
from aiorl.net.protocol.missed import MissedSnapshots
from aiorl.net.protocol.rates import Allowance, Newest
from aiorl.net.protocol.roster import MAX_REMEMBERED, Peer, Roster, Waiting, WaitingLine, Worker
from aiorl.net.wire import messages as m
from aiorl.net.wire.format import MAX_STRANGER_BYTES, MAX_WORKERS
from aiorl.text import one_line

Target: TypeAlias = bytes | None
"""Recipient of a message: a peer, or BROADCAST."""
BROADCAST: Final = None

_MAX_REASON = 300
_SNAPSHOT_AGAIN_S = 0.25
"""Seconds before a connection gets another snapshot, unless a new incarnation registers over it."""
_NEW_COST = 5.0
"""Cost of a registration in Hellos, because it costs us a whole snapshot."""
_REGISTRATIONS_AT_FIRST = 1024
_REGISTRATIONS_AT_ONCE = 64
_REGISTRATIONS_PER_S = 64.0
"""Limits over all connections, so that more connections gain nothing; the first lets a whole run
join together."""
_ACCOUNTS_AT_ONCE = 16
_ACCOUNTS_PER_S = 4.0
"""Limit of the accounts of the run that are sent, over all connections."""
_SNAPSHOT_UNIT = 4 << 20
"""Bytes of a snapshot that count as one more registration, or one more snapshot."""
_FAILURE_COST = 1024.0
"""Cost of a failure in needless messages, because failures are reported to people."""
_ENDED_GRACE = 4096
"""Messages that a worker may have in flight when it is counted as lost: its unacknowledged ones,
with ample room."""


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """Timeouts and bounds of the session.

    Attributes:
        transport: configured times.
        max_workers: slots; further workers are asked to try again later. At most `max_workers_of`
            the message limits.
        num_workers: number of workers the run is configured for, as reported to workers.
        hello_grace: messages without a Hello after which a peer is dropped.
        data_ends: True if workers read stored experience that ends, so that their OUT_OF_DATA
            reports count.
    """

    transport: TransportConfig = field(default_factory=TransportConfig)
    max_workers: int = MAX_WORKERS
    num_workers: int = 0
    hello_grace: int = 64
    data_ends: bool = False


class LearnerSession:
    """Messages of the learner to its workers, and the effects of theirs.

    Args:
        run_id: id of the run, kept over a resume.
        learner_incarnation: random name of this process's life.
        settings: timeouts and bounds.
        ledger: the account to continue after a resume.

    Attributes:
        ledger: account of env steps; the service reports trained and discarded steps to it.
        leases: the leases, granted only through this session.
        start_data: what a worker needs to sample, read-only.
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
        # a worker can outlive a learner, so two learner lives must not use the same lease ids
        self.leases = LeaseBook(first_id=(zlib.crc32(learner_incarnation.encode()) << 20) + 1)
        self._roster = Roster(self.settings.max_workers)
        self._peers: Newest[bytes, Peer] = Newest(MAX_REMEMBERED)
        self._waiting = WaitingLine()
        self._rates = _Rates()
        self._missed = MissedSnapshots()
        self._calls = OpenCalls()
        self.start_data = StartData()
        self._goodbye: m.Bye | None = None
        self._outbox = _Outbox()
        self._events: list[ev.LearnerEvent] = []
        self._clock = _Clock()

    # Commands
    # ----------------------------------------------------------------------------------------------

    def begin(
        self, config: Mapping[str, Any], graphs: Mapping[str, PolicyGraph], now: float
    ) -> None:
        """Admit workers, including waiting ones, and send them this data once there is a snapshot
        as well.
        """
        self._clock.now = now
        self.start_data.config = config
        self.start_data.graphs = graphs
        self._admit_waiting()

    def publish(self, snapshot: m.Snapshot, now: float) -> None:
        """Broadcast a snapshot, and keep the whole one for workers that join later or missed it.

        Args:
            snapshot: a whole snapshot, or a partial one that builds on the newest version.
            now: the time in seconds.

        Raises:
            LocalProtocolError: when its version is not above the previous one, or it builds on a
                later one.
        """
        self._clock.now = now
        data = self.start_data
        if snapshot.version <= self.version:
            raise LocalProtocolError(
                f"snapshot {snapshot.version} after {self.version}: versions must increase"
            )
        if snapshot.since > self.version:
            raise LocalProtocolError(
                f"snapshot {snapshot.version} builds on {snapshot.since}, but the newest is"
                f" {self.version}"
            )
        snapshot = snapshot._replace(learner_incarnation=self.learner_incarnation)
        former = data.snapshot
        whole = snapshot
        if former is not None and snapshot.since >= 0:
            whole = snapshot.after(former)
        data.snapshot = whole
        if self._missed.line and self._missed.by_many:
            snapshot = whole
            self._missed.broadcast(whole.version, now)
        if self._roster.by_slot:
            self._say(BROADCAST, snapshot)
        if former is None:
            self._admit_waiting()

    def deal(self, version: int, fragments: int) -> None:
        """Lease exactly ``fragments`` at ``version`` or newer to the live workers (see
        `LeaseBook.deal`).

        The share of a lost worker goes to the others, or is held until one joins.
        """
        self._send_grants(self.leases.deal(version, fragments, self._clock.now))

    def deal_again(self, fragments: int) -> None:
        """Lease ``fragments`` of the current deal again, because those received could not be
        used.
        """
        self.leases.unassigned += fragments
        self._redeal()

    def stream(self, waiting: int, min_version: int) -> None:
        """Lease as much as the run's budget allows (see `Pacing`); ``waiting`` fragments are queued
        or in use.
        """
        self._send_grants(self.leases.stream(waiting, min_version, self._clock.now))

    def call(self, slot: int, method: str, args: Mapping[str, m.Plain], *, num_bytes: int) -> int:
        """Ask a worker to run a method; return the number of the call, which ends with CallReplied
        or CallLost.

        Args:
            slot: the worker's slot.
            method: name of the method.
            args: its arguments.
            num_bytes: size of the arguments; a worker gets a limited number of calls and of their
                bytes at a time, and further ones wait.

        Raises:
            LocalProtocolError: when no worker has that slot.
        """
        worker = self._roster.by_slot.get(slot)
        if worker is None:
            raise LocalProtocolError(f"no worker in slot {slot}; live slots: {self.slots}")
        call_id = self._calls.open(worker, method, args, num_bytes)
        self._send_calls(worker)
        return call_id

    def mark_lost(self, slot: int, reason: str, now: float) -> None:
        """Count a worker as lost that is known to be gone, without waiting for its heartbeats to
        stop.
        """
        self._clock.now = now
        worker = self._roster.by_slot.get(slot)
        if worker is not None:
            self._end_worker(worker, reason)

    def mark_process_lost(self, worker_id: str, reason: str, now: float) -> None:
        """Count the worker of a worker process as lost; see `mark_lost`."""
        if worker_id in self._roster.by_process:
            self.mark_lost(self._roster.by_process[worker_id].slot, reason, now)

    def reserve_slot(self, slot: int, worker_id: str) -> None:
        """Reserve a slot for a worker that we are starting; others get the next free slots."""
        self._roster.reserved[slot] = worker_id

    def shutdown(self, reason: str, final: bool) -> None:
        """Say goodbye to all workers now, and to every later Hello; for workers that we started it
        is always final.
        """
        self._goodbye = goodbye = m.Bye(reason, final)
        self._say(BROADCAST, goodbye)
        for worker in self._roster.by_slot.values():
            self._say_to(worker, m.Bye(reason, final=final or worker.local))

    # Queries
    # ----------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Version of the newest snapshot, -1 for none."""
        snapshot = self.start_data.snapshot
        return -1 if snapshot is None else snapshot.version

    @property
    def slots(self) -> list[int]:
        """Slots of the live workers, in ascending order."""
        return sorted(self._roster.by_slot)

    @property
    def workers(self) -> list[Worker]:
        """Live workers in slot order, read-only."""
        return [self._roster.by_slot[slot] for slot in self.slots]

    @property
    def num_waiting(self) -> int:
        """Number of workers that have said Hello and are not registered yet."""
        return len(self._waiting)

    def has_sent(self, slot: int) -> bool:
        """Return whether the live worker in a slot has sent a fragment."""
        worker = self._roster.by_slot.get(slot)
        return worker is not None and worker.last_seq > 0

    def slot_of(self, incarnation: str) -> int:
        """Return the slot of a live incarnation, 0 for any other."""
        worker = self._roster.by_incarnation.get(incarnation)
        return 0 if worker is None else worker.slot

    def free_slot(self) -> int:
        """Return the lowest slot that no worker has or is reserved for, 0 for none."""
        return self._roster.free_slot(0, "")

    def host_of(self, slot: int) -> str:
        """Return the host of the live worker in a slot, "" for none and if we started it."""
        worker = self._roster.by_slot.get(slot)
        return "" if worker is None else worker.host_elsewhere

    def state_of(self, slot: int) -> str:
        """Return what the live worker in a slot does, "" if there is none."""
        worker = self._roster.by_slot.get(slot)
        return "" if worker is None else worker.state

    def knows(self, peer: bytes) -> bool:
        """Return whether a registered worker uses this peer; for other peers, decode only a
        Hello.
        """
        return peer in self._roster.by_peer

    def messages_to_send(self) -> list[tuple[Target, m.DownMessage]]:
        """Return the messages to send, in order, with one acknowledgement per worker, and clear the
        list.
        """
        return self._outbox.drain()

    def events(self) -> list[ev.LearnerEvent]:
        """Return the events so far, in order, and clear the list."""
        events = self._events
        self._events = []
        return events

    # Inputs
    # ----------------------------------------------------------------------------------------------

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
        """Process a message from a peer.

        Args:
            peer: the connection.
            message: the decoded message.
            now: the time in seconds.
            key: public key of the connection, None without keys.
            host: address of its host; used only with a Hello and without keys.
            has_unsent: True if a large message to the peer has yet to leave us, so that it gets no
                other snapshot; used only with a Hello and a SnapshotRequest.
        """
        self._note_time(now)
        worker = self._roster.by_peer.get(peer)
        if worker is None and self._is_dropped(peer):
            return
        if worker is not None:
            worker.last_heard = now
            if type(message) is m.Samples:  # the most frequent message
                self._samples(worker, message)
                return
        match message:
            case m.Hello():
                self._hello(
                    Waiting(peer, message, key=key, source=key or host, since=now), has_unsent
                )
            case m.StatusRequest(max_bytes):
                if not self._peer(peer).hellos.take(self._clock.now):
                    self._violated(peer, "asked for the status too often")
                elif self._rates.accounts.take(self._clock.now):  # otherwise it asks again
                    self._events.append(ev.StatusRequested(peer, max_bytes))
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
                self._snapshot_requested(worker, have_version, has_unsent)
            case m.Failure(kind, text, fatal=fatal, traceback=traceback):
                if not fatal and not self._needless(worker, "failures", _FAILURE_COST):
                    return
                self._events.append(
                    ev.WorkerFailed(
                        slot=worker.slot,
                        kind=kind,
                        message=text,
                        traceback=traceback,
                        host=worker.host_elsewhere,
                    )
                )
                if fatal:
                    self._end_worker(worker, f"failed: {one_line(text, _MAX_REASON)}", notify=False)
            case m.Reply(call_id, ok, result):
                call = self._calls.answer(call_id, worker)
                if call is None:
                    self._needless(worker, "unsolicited replies")
                    return
                self._events.append(
                    ev.CallReplied(worker.slot, call_id, call.method, ok=ok, result=result)
                )
                self._send_calls(worker)
            case m.Leaving(reason):
                if self._report(worker, message):
                    self._end_worker(worker, f"left: {one_line(reason, _MAX_REASON)}", notify=False)
            case _:
                self._violated(peer, f"sent a {type(message).__name__}")

    def unread(self, peer: bytes, num_bytes: int) -> None:
        """Record a message of an unregistered peer that is no Hello and was not decoded."""
        if not self._is_dropped(peer):
            self._stranger(peer, num_bytes)

    def bad_frames(self, peer: bytes, error: RemoteProtocolError, now: float) -> None:
        """Drop a peer that sent frames that do not decode; its worker is lost."""
        self._note_time(now)
        if not self._is_dropped(peer):
            what = one_line(str(error), _MAX_REASON)
            self._violated(peer, f"sent frames that do not decode: {what}")

    def peer_gone(self, peer: bytes, now: float, *, was_silent: bool = False) -> None:
        """Record the end of a connection; its worker can come back over another one until it counts
        as silent.

        ``was_silent`` is True if we ended the connection because it was silent.
        """
        self._note_time(now)
        self._peers.pop(peer, None)
        self._waiting.remove(peer)
        worker = self._roster.by_peer.get(peer)
        if worker is not None:
            worker.hung_up = not was_silent
            self._roster.unbind(worker)
            self._missed.leave(worker)

    def tick(self, now: float) -> None:
        """Let time pass: count silent workers as lost, and send heartbeats if due."""
        transport = self.settings.transport
        self._note_time(now)
        self._clock.last_tick = now
        for worker in list(self._roster.by_slot.values()):
            patience_s = transport.heartbeat_timeout_s
            # building can block the whole worker process
            if worker.state == m.BUILDING and not worker.hung_up:
                patience_s = max(patience_s, transport.build_timeout_s)
            if now - worker.last_heard > patience_s:
                self._end_worker(worker, "heartbeats stopped")
        for waiting in list(self._waiting):
            if now - waiting.since > transport.heartbeat_timeout_s:
                self._waiting.remove(waiting.peer)
        self._admit_waiting()
        self._give_missed()
        self._events += self.leases.take_overdue(transport.lease_timeout_s, now)
        self._redeal()
        if now - self._clock.last_beat >= transport.heartbeat_interval_s:
            self._clock.last_beat = now
            beat = m.LearnerBeat(self.learner_incarnation, self.version)
            self._say(BROADCAST, beat)
            for worker in self._roster.by_slot.values():
                self._say_to(worker, beat)
            for waiting in self._waiting:
                self._say(waiting.peer, beat)

    def _note_time(self, now: float) -> None:
        """Update the clock, and extend all deadlines by any time in which we stood still
        ourselves.
        """
        clock = self._clock
        clock.now = now
        stood_still = 0.0 if clock.last_tick is None else now - clock.last_tick
        if stood_still <= self.settings.transport.heartbeat_timeout_s / 2:
            return
        clock.last_tick = now
        self.leases.forgive(stood_still)
        # first process the messages that arrived meanwhile
        for worker in self._roster.by_slot.values():
            worker.last_heard += stood_still

    # Registration
    # ----------------------------------------------------------------------------------------------

    def _hello(self, waiting: Waiting, has_unsent: bool) -> None:
        """Answer a Hello: a first one, or one after the worker or its connection broke."""
        peer = waiting.peer
        hello = waiting.hello
        if self._goodbye is not None:
            self._say(peer, self._goodbye)
            return
        before = self._waiting.get(peer)
        # the Hellos of several minutes of an ended one may arrive together, and cost no snapshot
        is_new = not (
            hello.incarnation in self._roster.by_incarnation
            or self._has_ended(hello)
            or (before is not None and before.hello.incarnation == hello.incarnation)
        )
        if not self._peer(peer).hellos.take(self._clock.now, _NEW_COST if is_new else 1.0):
            self._violated(peer, "said hello too often")
            return
        refusal = self._refusal(hello)
        if refusal is not None:
            self._reject(peer, refusal)
            return
        is_settled = self._is_settled(waiting, has_unsent)
        if is_settled or has_unsent or peer in self._outbox.given_snapshot:
            return  # if a snapshot is still unsent, the worker says Hello again
        self._admit_waiting()
        if before is not None or len(self._waiting) < self.settings.max_workers:
            self._waiting.put(waiting)
            self._admit_waiting()
            if self._waiting.get(peer) is not None:
                self._say(peer, m.LearnerBeat(self.learner_incarnation, self.version))

    def _refusal(self, hello: m.Hello) -> m.Refused | None:
        """Return the refusal if this Hello can never be accepted, else None."""
        if hello.protocol != m.PROTOCOL_VERSION:
            reason = (
                f"you speak protocol version {hello.protocol}, the learner speaks"
                f" {m.PROTOCOL_VERSION}; install the same aiorl version on both sides"
            )
            return m.Refused(reason, False, m.RefusalCode.VERSION, hello.incarnation)
        if hello.run_id not in ("", self.run_id):
            reason = f"you belong to run {hello.run_id!r:.80}, this is run {self.run_id!r}"
            return m.Refused(reason, False, m.RefusalCode.RUN, hello.incarnation)
        if not hello.worker_id or not hello.incarnation:
            return m.Refused(
                "a hello without worker id or incarnation", False, m.RefusalCode.VIOLATION
            )
        return None

    def _has_ended(self, hello: m.Hello) -> bool:
        """Return whether an incarnation that is not registered was so before, here or with an
        earlier learner.
        """
        return hello.incarnation in self._roster.ended or bool(hello.learner_incarnation)

    def _is_settled(self, waiting: Waiting, has_unsent: bool = False) -> bool:
        """Return whether this Hello needs no registration because its incarnation has or had one;
        answer it if so.
        """
        hello = waiting.hello
        peer = waiting.peer
        worker = self._roster.by_incarnation.get(hello.incarnation)
        if worker is None and not self._has_ended(hello):
            return False
        self._waiting.remove(peer)
        if worker is None:
            self._refuse_ended(peer, hello.incarnation)
        elif worker.key != waiting.key or worker.worker_id != hello.worker_id:
            self._violated(peer, "used the name of a worker with another key")
        else:
            if worker.peer != peer:
                former = self._roster.by_peer.get(peer)
                if former is not None:
                    self._end_worker(
                        former, "its worker came back as another incarnation", notify=False
                    )
                self._roster.bind(worker, peer)
                self._settled_in(peer)
            worker.last_heard = self._clock.now
            if self._may_give(peer, has_unsent):  # otherwise it says Hello again
                self._welcome(worker)
                for lease in self.leases.outstanding_leases(worker.slot):
                    self._say_to(worker, lease)
                for call in self._calls.unanswered(worker):
                    self._say_to(worker, call)
        return True

    def _admit_waiting(self) -> None:
        """Register waiting workers once configuration and snapshot exist, as fast as the rate limit
        allows.
        """
        data = self.start_data
        if not self._waiting or data.config is None or data.snapshot is None:
            return
        cost = min(_REGISTRATIONS_AT_ONCE, 1.0 + _num_bytes(data.snapshot) / _SNAPSHOT_UNIT)
        while self._waiting and self._rates.registrations.take(self._clock.now, cost):
            waiting = self._waiting.pop()
            if not self._peer(waiting.peer).is_dropped and not self._is_settled(waiting):
                self._admit(waiting)

    def _admit(self, waiting: Waiting) -> None:
        hello = waiting.hello
        peer = waiting.peer
        twin = self._roster.by_process.get(hello.worker_id)
        over_peer = self._roster.by_peer.get(peer)
        if twin is not None and twin.key != waiting.key:
            self._violated(peer, "used the name of a worker with another key")
            return
        for former in filter(None, dict.fromkeys((twin, over_peer))):
            self._end_worker(former, "its worker came back as a new incarnation", notify=False)
        slot = self._roster.free_slot(hello.slot_hint, hello.worker_id)
        if not slot:
            reason = f"all {self.settings.max_workers} slots are taken"
            self._say(peer, m.Refused(reason, True, m.RefusalCode.FULL, hello.incarnation))
            return
        worker = self._roster.add(slot, hello, peer=peer, key=waiting.key, now=self._clock.now)
        self._settled_in(peer)
        self.ledger.open(worker.incarnation)
        self.leases.join(slot)
        self._events.append(
            ev.WorkerJoined(
                slot=slot,
                incarnation=worker.incarnation,
                host=worker.host,
                pid=worker.pid,
                local=worker.local,
            )
        )
        self._welcome(worker)
        self._redeal()

    def _welcome(self, worker: Worker) -> None:
        """Send a worker all data it needs to sample."""
        config = self.start_data.config
        snapshot = self.start_data.snapshot
        if config is None or snapshot is None:
            return
        life = config.get("life", 0) + self._roster.lives[worker.slot]
        welcome = m.Welcome(
            slot=worker.slot,
            num_workers=self.settings.num_workers,
            run_id=self.run_id,
            learner_incarnation=self.learner_incarnation,
            config={**config, "life": life} if life else config,
            graphs=self.start_data.graphs,
            snapshot=snapshot,
            incarnation=worker.incarnation,
            acked_seq=worker.last_seq,
        )
        self._give(worker, welcome)

    def _may_give(self, peer: bytes, has_unsent: bool) -> bool:
        """Return whether a peer can get a snapshot now: not too often, nor before the last one has
        left us.
        """
        is_soon = self._clock.now - self._peer(peer).gave_snapshot < _SNAPSHOT_AGAIN_S
        return not (is_soon or has_unsent or peer in self._outbox.given_snapshot)

    def _snapshot_requested(self, worker: Worker, have_version: int, has_unsent: bool) -> None:
        """Put a worker that has missed a snapshot in line for the whole one."""
        assert worker.peer is not None  # it has just spoken
        if (
            have_version < self.version
            and self._may_give(worker.peer, has_unsent)
            and self._missed.ask(worker, have_version, self._clock.now)
        ):
            self._give_missed()
        else:
            self._needless(worker, "requests for a snapshot")

    def _give_missed(self) -> None:
        """Send the whole snapshot to workers in line, as fast as the rate limit allows."""
        snapshot = self.start_data.snapshot
        if snapshot is None or not self._missed.line:
            return
        cost = 1.0 + _num_bytes(snapshot) / _SNAPSHOT_UNIT
        for worker in self._missed.take(snapshot.version, cost, self._clock.now):
            self._give(worker, snapshot)

    def _give(self, worker: Worker, message: m.Welcome | m.Snapshot) -> None:
        self._missed.leave(worker)
        if worker.peer is not None:
            self._peer(worker.peer).gave_snapshot = self._clock.now
            self._outbox.given_snapshot.add(worker.peer)
            self._say_to(worker, message)

    # Registered workers
    # ----------------------------------------------------------------------------------------------

    def _samples(self, worker: Worker, samples: m.Samples) -> None:
        """Accept a fragment: each one once, in order, covered by a lease, and entered in the
        ledger.
        """
        if samples.seq <= worker.last_seq:
            self._needless(worker, "duplicate fragments (after a reconnect)")
            return
        if samples.seq > worker.last_seq + 1:
            self._worker_violated(
                worker, f"sent fragment {samples.seq} instead of {worker.last_seq + 1}"
            )
            return
        if not samples.first_version <= samples.last_version <= self.version:
            fault = (
                f"a fragment of policy versions {samples.first_version} to {samples.last_version}, "
                f"but the newest is {self.version}"
            )
        else:
            fault = self.leases.use(
                worker.slot, samples.lease_id, samples.first_version, self._clock.now
            )
        if fault:
            self._worker_violated(worker, f"sent {fault}")
        elif self._report(worker, samples):
            worker.last_seq = samples.seq
            self._outbox.ack_due.setdefault(worker)
            self._events.append(ev.SamplesAccepted(worker.slot, worker.incarnation, samples))

    def _report(self, worker: Worker, message: m.Samples | m.Beat | m.Leaving) -> bool:
        """Enter the worker's count of sampled steps, within its leases plus the one fragment that
        has just arrived.

        Returns:
            False if the count is impossible, for which the worker is lost.
        """
        most = (self.leases.outstanding(worker.slot) + 1) * MAX_FRAGMENT_STEPS
        try:
            self.ledger.report(
                worker.incarnation,
                message.sampled_total - message.abandoned_total,
                max_in_flight=most,
            )
            if isinstance(message, m.Samples):
                self.ledger.receive(worker.incarnation, message.env_steps)
        except RemoteProtocolError as error:
            self._worker_violated(worker, f"sent counts that do not add up: {error}")
            return False
        return True

    def _needless(self, worker: Worker, kind: str, cost: float = 1.0) -> bool:
        """Count a needless message; return False if there were too many, for which the worker is
        lost.
        """
        if worker.needless.take(self._clock.now, cost):
            return True
        self._worker_violated(worker, f"sent too many {kind}")
        return False

    # Sending
    # ----------------------------------------------------------------------------------------------

    def _say(self, target: Target, message: m.DownMessage) -> None:
        self._outbox.messages.append((target, message))

    def _say_to(self, worker: Worker, message: m.DownMessage) -> None:
        """Queue a message for a worker; a worker without a connection gets all that matters when it
        comes back.
        """
        if worker.peer is not None:
            self._outbox.messages.append((worker.peer, message))

    def _send_grants(self, grants: Iterable[Grant]) -> None:
        for slot, lease in grants:
            self._say_to(self._roster.by_slot[slot], lease)

    def _send_calls(self, worker: Worker) -> None:
        """Send the calls that a worker has room for."""
        for call in self._calls.to_send(worker):
            self._say_to(worker, call)

    def _redeal(self) -> None:
        """Lease the held fragments to the live workers."""
        self._send_grants(self.leases.redeal(self._clock.now))

    def _refuse_ended(self, peer: bytes, incarnation: str, why: str = "") -> None:
        reason = "this incarnation has ended and its samples count as lost; come back as a new one"
        if why:
            reason += f" (it ended because {one_line(why, _MAX_REASON)})"
        self._say(peer, m.Refused(reason, True, m.RefusalCode.ENDED, incarnation))

    # Ends and violations
    # ----------------------------------------------------------------------------------------------

    def _end_worker(self, worker: Worker, reason: str, *, notify: bool = True) -> None:
        """End an incarnation: close its account, pass its leases to the others, and free its slot.

        Args:
            worker: the incarnation.
            reason: in plain words; the part before a colon is the kind, under which the ledger
                counts it.
            notify: True to inform the worker, which may not know.
        """
        peer = worker.peer
        if peer is not None:
            self._peer(peer).ended = worker.incarnation
            if notify:
                self._refuse_ended(peer, worker.incarnation, reason)
        self._roster.end(worker)
        self._outbox.ack_due.pop(worker, None)
        self._missed.forget(worker)
        for call in self._calls.forget(worker):
            self._events.append(ev.CallLost(worker.slot, call.call_id, call.method, reason))
        lost = self.ledger.close(worker.incarnation, reason.partition(":")[0])
        self.leases.drop_slot(worker.slot)
        self._events.append(
            ev.WorkerLost(
                slot=worker.slot,
                incarnation=worker.incarnation,
                reason=reason,
                lost_env_steps=lost,
                host=worker.host_elsewhere,
            )
        )
        self._redeal()

    def _worker_violated(self, worker: Worker, reason: str) -> None:
        """Drop a worker that broke the protocol, and its connection, after sending it the
        reason.
        """
        assert worker.peer is not None  # it has just spoken
        self._violated(worker.peer, reason)

    def _violated(self, peer: bytes, reason: str) -> None:
        """Drop a peer after sending it the reason; its worker is lost."""
        worker = self._roster.by_peer.get(peer)
        incarnation = worker.incarnation if worker is not None else ""
        self._reject(peer, m.Refused(f"you {reason}", False, m.RefusalCode.VIOLATION, incarnation))

    def _reject(self, peer: bytes, refusal: m.Refused) -> None:
        """Drop a peer for good."""
        worker = self._roster.by_peer.get(peer)
        if worker is not None:
            self._end_worker(worker, f"broke the protocol: {refusal.reason}", notify=False)
        self._say(peer, refusal)
        self._waiting.remove(peer)
        self._peer(peer).is_dropped = True
        self._events.append(ev.PeerRejected(peer, refusal.reason.removeprefix("you ")))

    # Other peers
    # ----------------------------------------------------------------------------------------------

    def _peer(self, peer: bytes) -> Peer:
        memory = self._peers.get(peer) or Peer()
        self._peers[peer] = memory
        return memory

    def _settled_in(self, peer: bytes) -> None:
        """Forget earlier messages of a peer that a worker uses now."""
        memory = self._peer(peer)
        memory.num_strange = 0
        memory.ended = ""

    def _is_dropped(self, peer: bytes) -> bool:
        """Return whether messages of a peer are ignored; a peer that keeps sending is remembered
        for longer.
        """
        return peer in self._peers and self._peer(peer).is_dropped

    def _stranger(self, peer: bytes, num_bytes: int) -> None:
        """Answer a message that is no Hello and came over a connection without a live worker."""
        memory = self._peer(peer)
        memory.num_strange += 1
        if memory.ended and memory.num_strange <= _ENDED_GRACE:
            # it may not know of its end yet, and have many messages in flight
            self._refuse_ended(peer, memory.ended)
        elif num_bytes > MAX_STRANGER_BYTES:
            self._violated(peer, f"sent {num_bytes} bytes before saying hello")
        elif memory.num_strange > self.settings.hello_grace:
            self._violated(peer, "kept sending without saying hello")
        else:
            self._say(
                peer, m.Refused("you spoke before saying hello", True, m.RefusalCode.HELLO_FIRST)
            )


class _Outbox:
    """Messages to send.

    Attributes:
        messages: recipients and messages, in order.
        ack_due: workers that get an acknowledgement, as keys in order of their fragments.
        given_snapshot: peers that get a snapshot with one of the messages.
    """

    def __init__(self) -> None:
        self.messages: list[tuple[Target, m.DownMessage]] = []
        self.ack_due: dict[Worker, None] = {}
        self.given_snapshot: set[bytes] = set()

    def drain(self) -> list[tuple[Target, m.DownMessage]]:
        """Return the messages with one acknowledgement per worker, and clear everything."""
        messages = self.messages
        self.messages = []
        messages += [
            (worker.peer, m.Ack(worker.last_seq))
            for worker in self.ack_due
            if worker.peer is not None
        ]
        self.ack_due.clear()
        self.given_snapshot.clear()
        return messages


@dataclass(slots=True)
class StartData:
    """All that a worker needs to sample; it comes bit by bit.

    Attributes:
        config: the workers' part of the configuration.
        graphs: policy id -> acting graph, of the policies in the configuration.
        snapshot: the newest snapshot, whole.
    """

    config: Mapping[str, Any] | None = None
    graphs: Mapping[str, PolicyGraph] = field(default_factory=dict)
    snapshot: m.Snapshot | None = None


@dataclass(slots=True)
class _Clock:
    """Times of the session: of its newest input, tick and heartbeat."""

    now: float = 0.0
    last_tick: float | None = None
    last_beat: float = float("-inf")


class _Rates:
    """Limits of costly answers, over all connections."""

    def __init__(self) -> None:
        self.registrations = Allowance(
            _REGISTRATIONS_AT_ONCE, _REGISTRATIONS_PER_S, at_first=_REGISTRATIONS_AT_FIRST
        )
        self.accounts = Allowance(_ACCOUNTS_AT_ONCE, _ACCOUNTS_PER_S)


def _num_bytes(snapshot: m.Snapshot) -> int:
    trees = (snapshot.weights, snapshot.filters)
    return sum(
        array.nbytes for tree in trees for arrays in tree.values() for array in arrays.values()
    )
