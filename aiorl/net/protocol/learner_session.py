"""The learner's side of the protocol: no socket, no clock; ``now`` is any monotonic time in seconds.

The shell feeds ``receive``, ``bad_frames``, ``peer_gone`` and, at least every 0.25 s, ``tick``; after each
batch of messages (not each message: acknowledgements are put together) it drains ``messages_to_send()`` and
``events()``. A peer is a connection, an incarnation is a worker's registration life; an incarnation may come
back over another peer, a peer may bring a new incarnation. Nothing a peer sends disturbs the others.

Of a peer that speaks for no registered worker (``speaker``) nothing but a Hello is decoded; of all else it sends
``unread`` is told. Of a worker's messages with arrays the due fragment and answers to its open calls are decoded; of
others ``unwanted`` is told.

Whatever peers can fill is bounded where it is declared: by the workers (``max_workers``), by the connections remembered
(`roster.MAX_REMEMBERED`), or by kinds that are ours.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from aiorl.data.sample_plan import PolicyGraph
from aiorl.errors import LocalProtocolError, RemoteProtocolError
from aiorl.net.protocol import events as ev
from aiorl.net.protocol.learner_admission import Admission
from aiorl.net.protocol.learner_members import BROADCAST, LearnerSettings, Members, Target
from aiorl.net.protocol.leases import LeaseBook
from aiorl.net.protocol.ledger import MAX_FRAGMENT_STEPS, Ledger
from aiorl.net.protocol.rates import Allowances
from aiorl.net.protocol.roster import MAX_REMEMBERED, Worker
from aiorl.net.wire import messages as m
from aiorl.text import MAX_NAME, is_name, one_line

__all__ = ["BROADCAST", "LearnerSession", "LearnerSettings", "Target"]

_MAX_REASON = 300
_RESEND_ASK_S = 0.25
"""How often at most a worker is asked to send again what is missing."""
_CALL_TIMEOUT_S = 60.0
_NOT_A_WORKERS = "sent what only a learner sends"
_BROKE_ACCOUNT = "broke its lease or its account"
_UNWANTED_AT_ONCE, _UNWANTED_PER_S = 1 << 16, 256.0
"""Of one incarnation: doubles, fragments ahead of a missing one, replies that nobody asked for.

A worker keeps 1,024 fragments at most and sends them all again after each welcome, when asked to, and every 16 s while
it is not answered; those of ten minutes may come at once, after a standstill.
"""
_FAILURES_AT_ONCE, _FAILURES_PER_S = 60, 1.0
"""Of one source, whatever it registers as. One that ends its worker is none of them: it costs a registration."""


class LearnerSession:
    """What the learner says to its workers, and what follows from what they say.

    Args:
        run_id: the run, kept over a resume.
        learner_incarnation: random name of this process's life.
        settings: times and bounds.
        ledger: the account to go on with after a resume.

    Raises: LocalProtocolError if a name is none that may be said.

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
        for name in (run_id, learner_incarnation):
            if not is_name(name):
                raise LocalProtocolError(f"{name[:80]!r} is no name: at most {MAX_NAME} visible ASCII characters")
        self.run_id = run_id
        self.learner_incarnation = learner_incarnation
        self.settings = settings or LearnerSettings()
        self.ledger = ledger or Ledger()
        # ids of two learner lives must not be mistaken for each other by a worker that outlives one
        self.leases = LeaseBook(first_id=(zlib.crc32(learner_incarnation.encode()) << 20) + 1)
        self._members = Members(self.settings, self.ledger, self.leases)
        self._admission = Admission(run_id, learner_incarnation, self._members)
        self._roster = self._members.roster
        self._strangers = self._members.strangers
        self._failures = Allowances(_FAILURES_AT_ONCE, _FAILURES_PER_S, MAX_REMEMBERED)
        self._unwanted = Allowances(_UNWANTED_AT_ONCE, _UNWANTED_PER_S, MAX_REMEMBERED)
        self._last_tick: float | None = None
        self._last_beat = float("-inf")

    # Commands ---------------------------------------------------------------------------------------------

    def set_registration(self, config: Mapping[str, Any], graphs: Mapping[str, PolicyGraph], now: float) -> None:
        """What joiners get besides the snapshot. Workers that came too early are admitted once both are there."""
        self._members.now = now
        self._admission.config = config
        self._admission.graphs = graphs
        self._admission.admit_waiting(now)

    def set_has_unsent(self, has_unsent: Callable[[bytes], bool]) -> None:
        """Who gets no other snapshot yet: asked with a peer, tells whether what was said to it has yet to leave us."""
        self._members.has_unsent = has_unsent

    def publish(self, snapshot: m.Snapshot, now: float) -> None:
        """Broadcast a snapshot; it is kept for joiners and for workers that missed it.

        Raises: LocalProtocolError if its version is not above the one before.
        """
        self._members.now = now
        if snapshot.version <= self.version:
            raise LocalProtocolError(f"snapshot {snapshot.version} after {self.version}: versions must rise")
        snapshot = dataclasses.replace(snapshot, learner_incarnation=self.learner_incarnation)
        self._admission.snapshot = snapshot
        if self._roster.by_slot:
            self._members.say(BROADCAST, snapshot)
        self._admission.admit_waiting(now)

    def deal(self, version: int, fragments: int) -> None:
        """Lease exactly ``fragments`` at ``version`` or newer over the live workers (see `LeaseBook.deal`).

        A lost worker's share goes to the others, or is held until one joins.
        """
        self._members.send_grants(self.leases.deal(version, fragments, self._members.now))

    def deal_again(self, fragments: int) -> None:
        """Lease so many fragments of the current deal once more: what came for them could not be used."""
        self.leases.hold(fragments)
        self._members.redeal()

    def stream(self, waiting: int, min_version: int) -> None:
        """Lease what the budget of the run allows (see `Pacing`), ``waiting`` fragments being queued or in use."""
        self._members.send_grants(self.leases.stream(waiting, min_version, self._members.now))

    def grant(self, slot: int, fragments: int, min_version: int) -> int:
        """One lease apart from deals and top-ups; its id.

        Raises: LocalProtocolError if no worker has that slot.
        """
        self._members.worker(slot)
        grant = self.leases.grant(slot, fragments, min_version, self._members.now)
        self._members.send_grants([grant])
        return grant.lease.lease_id

    def call(self, slot: int, method: str, args: Mapping[str, m.Plain], now: float) -> int:
        """Have a worker run a method; a CallReplied of the returned id follows in any case.

        Raises: LocalProtocolError if no worker has that slot.
        """
        return self._members.call(self._members.worker(slot), method, args, now + _CALL_TIMEOUT_S)

    def lose(self, slot: int, reason: str, now: float) -> None:
        """A worker is known to be gone, its process has ended: do not wait for the heartbeat to say so."""
        self._members.now = now
        worker = self._roster.by_slot.get(slot)
        if worker is not None:
            self._members.bury(worker, reason)

    def lose_worker_id(self, worker_id: str, reason: str, now: float) -> None:
        """As `lose`, by the worker process's name."""
        self._members.now = now
        for worker in self._roster.of_process(worker_id):
            self._members.bury(worker, reason)

    def reserve_slot(self, slot: int, worker_id: str) -> None:
        """Keep a slot for a worker that is being started here; others get the next free ones."""
        self._roster.reserved[slot] = worker_id

    def shutdown(self, reason: str, final: bool, now: float) -> None:
        """Say goodbye to all, now and to whoever still says Hello."""
        goodbye = m.Bye(reason, final)
        self._admission.closing = goodbye
        self._members.say(BROADCAST, goodbye)
        for worker in self._roster.workers():
            self._members.to_worker(worker, goodbye)

    # Queries ----------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Version of the newest snapshot, -1 for none."""
        return self._admission.version

    @property
    def slots(self) -> list[int]:
        """Slots of the live workers, rising."""
        return sorted(self._roster.by_slot)

    def has_brought(self, slot: int) -> bool:
        """Whether the live worker in a slot has brought a fragment."""
        worker = self._roster.by_slot.get(slot)
        return worker is not None and worker.last_seq > 0

    @property
    def num_waiting(self) -> int:
        """Workers that have said Hello and are not registered yet."""
        return self._admission.num_waiting

    @property
    def workers(self) -> list[Worker]:
        """The live workers by slot, to be looked at only."""
        return self._roster.workers()

    @property
    def violations(self) -> Counter[str]:
        """What peers did wrong -> how often."""
        return self._strangers.violations

    def messages_to_send(self) -> list[tuple[Target, m.DownMessage]]:
        """What to send, in order; drained by the call. Acknowledgements are made here, one for each worker."""
        return self._members.take_messages()

    def events(self) -> list[ev.LearnerEvent]:
        """What has happened, in order; drained by the call."""
        return self._members.take_events()

    # Inputs -----------------------------------------------------------------------------------------------

    def receive(self, peer: bytes, message: m.Message, now: float, key: str | None = None, host: str = "") -> None:
        """A message has come from a peer.

        Args:
            peer: the connection.
            message: what it said.
            now: the time.
            key: what its connection was authenticated with.
            host: where it comes from; asked for with a Hello only, and of use where there are no keys.
        """
        self._note_time(now)
        worker = self._roster.by_peer.get(peer)
        if worker is None and self._members.is_dropped(peer):
            return
        if type(message) is m.Hello:
            self._admission.hello(peer, message, now, key, host)
            return
        if worker is None:
            self._admission.stranger(peer, 0)
            return
        worker.last_heard = now
        worker.claimant = None
        if type(message) is m.Samples:
            self._samples(worker, message, now)
        else:
            self._other(worker, message, now)

    def speaker(self, peer: bytes) -> Worker | None:
        """The registered worker that speaks over this peer, to be looked at only: it says what is wanted of it.

        None: nothing but a Hello is to be decoded.
        """
        return self._roster.by_peer.get(peer)

    def unwanted(self, peer: bytes, kind: type[m.Message], number: int, now: float) -> None:
        """A registered worker has sent a message with arrays that is not wanted, and it was not decoded.

        Args:
            peer: the connection.
            kind: the message's type.
            number: ``seq`` of a fragment, ``call_id`` of a reply.
            now: the time.
        """
        self._note_time(now)
        worker = self._roster.by_peer.get(peer)
        if worker is None:
            return
        worker.last_heard = now
        worker.claimant = None
        if kind is m.Samples:
            self._out_of_order(worker, number, now)
        elif kind is m.Reply:
            self._may_send_unwanted(worker, "replies that nobody asked for", now)
        else:
            self._members.worker_violated(worker, _NOT_A_WORKERS, f"sent a {kind.__name__}")

    def unread(self, peer: bytes, num_bytes: int) -> None:
        """A peer that is not registered has sent so much that is no Hello, and it was not decoded."""
        if not self._members.is_dropped(peer):
            self._admission.stranger(peer, num_bytes)

    def bad_frames(self, peer: bytes, error: RemoteProtocolError, now: float) -> None:
        """What a peer sent does not decode: it is dropped, and the worker that spoke over it is lost."""
        self._note_time(now)
        if self._members.is_dropped(peer):
            return
        what = one_line(str(error), _MAX_REASON)
        self._members.violated(peer, "sent frames that do not decode", f"sent frames that do not decode: {what}")

    def peer_gone(self, peer: bytes, now: float, *, was_silent: bool = False) -> None:
        """A connection has ended; its worker may come back over another one until it counts as silent.

        ``was_silent``: we ended it, since nothing was heard over it.
        """
        self._note_time(now)
        worker = self._roster.by_peer.get(peer)
        if worker is not None:
            worker.hung_up = not was_silent
        self._admission.peer_gone(peer)
        if worker is not None:
            self._roster.unbind(worker)
            self._admission.settle_claim(worker, now)

    def tick(self, now: float) -> None:
        """Time has passed: silent workers are lost, calls fail, heartbeats go out, as due."""
        transport = self.settings.transport
        self._note_time(now)
        self._last_tick = now
        for worker in self._roster.workers():
            if self._roster.by_slot.get(worker.slot) is not worker:
                continue  # buried by what was done for another
            self._watch(worker, now)
        self._admission.forget_silent(now)
        self._admission.admit_waiting(now)
        self._members.expire_calls(now)
        for overdue in self.leases.take_overdue(transport.lease_timeout_s, now):
            self._members.tell(overdue)
            self._members.redeal()
        if now - self._last_beat >= transport.heartbeat_interval_s:
            self._last_beat = now
            beat = m.LearnerBeat(self.learner_incarnation, self.version)
            self._members.say(BROADCAST, beat)
            for worker in self._roster.workers():
                self._members.to_worker(worker, beat)
                self._members.say_open_again(worker)
            self._admission.beat(beat)

    def _note_time(self, now: float) -> None:
        """Time in which we stood still ourselves, as the first input after it shows, makes nobody late."""
        self._members.now = now
        stood_still = 0.0 if self._last_tick is None else now - self._last_tick
        if stood_still <= self.settings.transport.heartbeat_timeout_s / 2:
            return
        self._last_tick = now
        self.leases.forgive(stood_still)
        for worker in self._roster.workers():  # hear what has come in the meantime first
            worker.last_heard += stood_still
            if worker.gap_since is not None:
                worker.gap_since += stood_still

    # Registered workers -----------------------------------------------------------------------------------

    def _samples(self, worker: Worker, samples: m.Samples, now: float) -> None:
        """Take a fragment: each once, in order, within a lease, and accounted for."""
        due = worker.last_seq + 1
        if samples.seq != due:
            self._out_of_order(worker, samples.seq, now)
            return
        wrong = self._accept(worker, samples, now)
        if wrong:
            self._members.worker_violated(worker, _BROKE_ACCOUNT, f"sent {wrong}")
            return
        worker.gap_since = None
        worker.last_seq = due
        self._members.ack(worker)
        self._members.tell(ev.SamplesAccepted(worker.slot, worker.incarnation, samples))

    def _report(self, worker: Worker, sampled_total: int, abandoned_total: int) -> bool:
        """What a worker says it has sampled so far; False if that cannot be, and the worker is lost for it."""
        try:
            self._enter(worker, sampled_total, abandoned_total)
        except RemoteProtocolError as error:
            self._members.worker_violated(worker, _BROKE_ACCOUNT, f"sent counts that do not add up: {error}")
            return False
        return True

    def _enter(self, worker: Worker, sampled_total: int, abandoned_total: int) -> None:
        """Enter a worker's totals, as far as its leases allow, and one fragment more: that which has just come."""
        fragments = self.leases.outstanding(worker.slot) + 1
        self.ledger.report(
            worker.incarnation, sampled_total, abandoned_total, max_in_flight=fragments * MAX_FRAGMENT_STEPS
        )

    def _accept(self, worker: Worker, samples: m.Samples, now: float) -> str:
        """Enter a fragment into ledger and lease book; what is wrong with it in plain words, or ""."""
        if not samples.first_version <= samples.last_version <= self.version:
            return (
                f"a fragment of policy versions {samples.first_version} to {samples.last_version}, "
                f"the newest being {self.version}"
            )
        wrong = self.leases.use(worker.slot, samples.lease_id, samples.first_version, now)
        if wrong:
            return wrong
        try:
            self._enter(worker, samples.sampled_total, samples.abandoned_total)
            self.ledger.receive(worker.incarnation, samples.env_steps)
        except RemoteProtocolError as error:
            return f"counts that do not add up: {error}"
        return ""

    def _may_send_unwanted(self, worker: Worker, kind: str, now: float) -> bool:
        """Count what a worker need not have sent; False if that was too much of it, and the worker is lost for it."""
        self._members.count(kind)
        if self._unwanted.take(worker.incarnation, now):
            return True
        self._members.worker_violated(worker, "sent without end what nobody asked for", f"sent {kind} without end")
        return False

    def _out_of_order(self, worker: Worker, seq: int, now: float) -> None:
        is_double = seq <= worker.last_seq
        kind = "double fragments (sent again after a reconnect)" if is_double else "fragments ahead of a missing one"
        if not self._may_send_unwanted(worker, kind, now):
            return
        if is_double:
            self._members.ack(worker)
            return
        if worker.gap_since is None:
            worker.gap_since = now
        if now - worker.asked_resend >= _RESEND_ASK_S:
            worker.asked_resend = now
            self._members.to_worker(worker, m.Ack(worker.last_seq, resend=True))

    def _other(self, worker: Worker, message: m.Message, now: float) -> None:
        match message:
            case m.Beat():
                is_through = message.state == m.OUT_OF_DATA and self.settings.data_ends
                worker.state = message.state
                worker.in_env_s = message.in_env_s
                is_sound = self._report(worker, message.sampled_total, message.abandoned_total)
                if is_sound and is_through and self.leases.retire(worker.slot):
                    self._members.redeal()
            case m.SnapshotRequest():
                self._admission.give_snapshot(worker, message.have_version, now)
            case m.Failure():
                if not message.fatal and not self._failures.take(worker.source, now):
                    self._members.worker_violated(
                        worker, "reported failures without end", "reported more failures than anybody can read"
                    )
                    return
                self._members.tell(
                    ev.WorkerFailed(
                        worker.slot, worker.incarnation, message.kind, message.message, message.traceback, message.fatal
                    )
                )
                if message.fatal:
                    self._members.bury(worker, f"failed: {one_line(message.message, _MAX_REASON)}", notify=False)
            case m.Reply():
                if message.call_id in worker.open_calls:
                    self._members.answer_call(worker, message)
                else:
                    self._may_send_unwanted(worker, "replies that nobody asked for", now)
            case m.Leaving():
                if self._report(worker, message.sampled_total, message.abandoned_total):
                    self._members.bury(worker, f"left: {one_line(message.reason, _MAX_REASON)}", notify=False)
            case _:
                name = type(message).__name__
                self._members.worker_violated(worker, _NOT_A_WORKERS, f"sent a {name}")

    def _watch(self, worker: Worker, now: float) -> None:
        transport = self.settings.transport
        silent_s, patience_s = now - worker.last_heard, transport.heartbeat_timeout_s
        if worker.state == m.BUILDING and not worker.hung_up:  # some of it keeps a process from doing anything else
            patience_s = max(patience_s, transport.build_timeout_s)
        if silent_s > patience_s:
            self._members.bury(worker, "heartbeats stopped")
        elif worker.gap_since is not None and now - worker.gap_since > transport.heartbeat_timeout_s:
            self._members.worker_violated(
                worker, "left a gap", f"never sent fragment {worker.last_seq + 1} but later ones"
            )
        elif worker.claimant is not None and now - worker.claimed >= 2 * transport.heartbeat_interval_s:
            self._admission.settle_claim(worker, now)
