"""The learner's side of the protocol: no socket, no clock; ``now`` is any monotonic time in seconds.

The shell feeds ``receive``, ``bad_frames``, ``peer_gone`` and, at least every 0.25 s, ``tick``; after each
batch of messages (not each message: acknowledgements are put together) it drains ``messages_to_send()`` and
``events()``. A peer is a connection, an incarnation is a worker's registration life; an incarnation may come
back over another peer, a peer may bring a new incarnation. Nothing a peer sends disturbs the others.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from aiorl.errors import LocalProtocolError, RemoteProtocolError
from aiorl.protocol import events as ev
from aiorl.protocol import messages as m
from aiorl.protocol.leases import Grant, LeaseBook, is_stale
from aiorl.protocol.ledger import Ledger
from aiorl.protocol.roster import Roster, Strangers, Worker, WorkerInfo

__all__ = ["BROADCAST", "LearnerSession", "LearnerSettings", "Target", "WorkerInfo"]

Target: TypeAlias = bytes | None
"""Whom a message is for: a peer, or BROADCAST."""
BROADCAST: Final = None

_WELCOME_AGAIN_S = 0.25


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """How patient and how large; times in seconds.

    Attributes:
        heartbeat_interval_s: a LearnerBeat this often, to each worker and to all.
        heartbeat_timeout_s: silence after which a worker is lost.
        max_workers: slots; more workers are asked to try again later.
        num_workers: told to workers: how many the run is configured for.
        max_lag: fragments whose first row is more policy versions behind are dropped on arrival, None: never.
        hello_grace: messages without a Hello after which a peer is dropped.
        resend_ask_s: how often at most a worker is asked to send again what is missing.
        snapshot_interval_s: how often at most a worker gets the newest snapshot on request.
        call_timeout_s: a call not answered for this long has failed.
    """

    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 10.0
    max_workers: int = 4096
    num_workers: int = 0
    max_lag: int | None = None
    hello_grace: int = 64
    resend_ask_s: float = 0.25
    snapshot_interval_s: float = 0.5
    call_timeout_s: float = 60.0


@dataclass(slots=True, eq=False)
class _Waiting:
    peer: bytes
    hello: m.Hello
    key: str | None
    since: float


@dataclass(slots=True, eq=False)
class _Call:
    worker: Worker
    message: m.Call
    deadline: float


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
        version: version of the newest snapshot, -1 for none.
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
        self.version = -1
        self._snapshot: m.Snapshot | None = None
        self._config: Mapping[str, Any] | None = None
        self._graphs: Mapping[str, m.PolicyGraph] = {}
        self._roster = Roster(self.settings.max_workers)
        self._strangers = Strangers()
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        self._ack_due: list[Worker] = []
        self._calls: dict[int, _Call] = {}
        self._next_call = 1
        self._out: list[tuple[Target, m.DownMessage]] = []
        self._events: list[ev.LearnerEvent] = []
        self._closing: m.Bye | None = None
        self._last_tick: float | None = None
        self._last_beat = float("-inf")

    # Commands ---------------------------------------------------------------------------------------------

    def set_registration(self, config: Mapping[str, Any], graphs: Mapping[str, m.PolicyGraph], now: float) -> None:
        """What joiners get besides the snapshot. Workers that came too early are admitted once both are there."""
        self._config = config
        self._graphs = graphs
        self._admit_waiting(now)

    def publish(self, snapshot: m.Snapshot, now: float) -> None:
        """Broadcast a snapshot; it is kept for joiners and for workers that missed it.

        Raises: LocalProtocolError if its version is not above the one before.
        """
        if snapshot.version <= self.version:
            raise LocalProtocolError(f"snapshot {snapshot.version} after {self.version}: versions must rise")
        snapshot = dataclasses.replace(snapshot, learner_incarnation=self.learner_incarnation)
        self._snapshot = snapshot
        self.version = snapshot.version
        if self._roster.by_slot:
            self._out.append((BROADCAST, snapshot))
        self._admit_waiting(now)

    def deal(self, version: int, fragments: int) -> None:
        """Lease exactly ``fragments`` at ``version`` or newer over the live workers (see `LeaseBook.deal`).

        A lost worker's share goes to the others, or is held until one joins.
        """
        self._send_grants(self.leases.deal(version, fragments, self._roster.by_slot))

    def deal_again(self, fragments: int) -> None:
        """Lease so many fragments of the current deal once more: what came for them could not be used."""
        self.leases.hold(fragments)
        self._redeal()

    def top_up(self, target: int, min_version: int, slots: Iterable[int] | None = None) -> None:
        """Raise the leases of workers (all by default) until ``target`` fragments of each are outstanding."""
        for slot in self.slots if slots is None else slots:
            if slot in self._roster.by_slot:
                grant = self.leases.top_up(slot, target, min_version)
                if grant is not None:
                    self._send_grants([grant])

    def grant(self, slot: int, fragments: int, min_version: int) -> int:
        """One lease apart from deals and top-ups; its id.

        Raises: LocalProtocolError if no worker has that slot.
        """
        self._worker(slot)
        grant = self.leases.grant(slot, fragments, min_version)
        self._send_grants([grant])
        return grant.lease.lease_id

    def call(
        self, slot: int, method: str, args: Mapping[str, m.Plain], now: float, timeout_s: float | None = None
    ) -> int:
        """Have a worker run a method; a CallReplied of the returned id follows in any case.

        Raises: LocalProtocolError if no worker has that slot.
        """
        worker = self._worker(slot)
        message = m.Call(self._next_call, method, args)
        self._next_call += 1
        wait = self.settings.call_timeout_s if timeout_s is None else timeout_s
        self._calls[message.call_id] = _Call(worker, message, now + wait)
        self._send(worker, message)
        return message.call_id

    def lose(self, slot: int, reason: str, now: float) -> None:
        """A worker is known to be gone, its process has ended: do not wait for the heartbeat to say so."""
        worker = self._roster.by_slot.get(slot)
        if worker is not None:
            self._bury(worker, reason, now)

    def lose_worker_id(self, worker_id: str, reason: str, now: float) -> None:
        """As `lose`, by the worker process's name."""
        for worker in self._roster.of_process(worker_id):
            self._bury(worker, reason, now)

    def reserve_slot(self, slot: int, worker_id: str) -> None:
        """Keep a slot for a worker that is being started here; others get the next free ones."""
        self._roster.reserved[slot] = worker_id

    def release_slot(self, slot: int) -> None:
        """Nobody is expected in this slot any more."""
        self._roster.reserved.pop(slot, None)

    def shutdown(self, reason: str, final: bool, now: float) -> None:
        """Say goodbye to all, now and to whoever still says Hello."""
        self._closing = m.Bye(reason, final)
        self._out.append((BROADCAST, self._closing))
        for worker in self._roster.workers():
            self._send(worker, self._closing)

    # Queries ----------------------------------------------------------------------------------------------

    @property
    def slots(self) -> list[int]:
        """Slots of the live workers, rising."""
        return sorted(self._roster.by_slot)

    @property
    def num_waiting(self) -> int:
        """Workers that have said Hello before we were ready for them."""
        return len(self._waiting)

    def workers(self, now: float) -> list[WorkerInfo]:
        """The live workers by slot."""
        return [worker.info(now, self.leases.outstanding(worker.slot)) for worker in self._roster.workers()]

    @property
    def violations(self) -> Counter[str]:
        """What peers did wrong -> how often."""
        return self._strangers.violations

    def messages_to_send(self) -> list[tuple[Target, m.DownMessage]]:
        """What to send, in order; drained by the call. Acknowledgements are made here, one for each worker."""
        out, self._out = self._out, []
        if self._ack_due:
            for worker in self._ack_due:
                worker.ack_due = False
                if worker.peer is not None:
                    out.append((worker.peer, m.Ack(worker.last_seq)))
            self._ack_due.clear()
        return out

    def events(self) -> list[ev.LearnerEvent]:
        """What has happened, in order; drained by the call."""
        events, self._events = self._events, []
        return events

    # Inputs -----------------------------------------------------------------------------------------------

    def receive(self, peer: bytes, message: m.Message, now: float, key: str | None = None) -> None:
        """A message has come from a peer; ``key`` is what its connection was authenticated with."""
        if self._strangers.is_dropped(peer):
            self._count("spoke after it was dropped")
            return
        if type(message) is m.Hello:
            self._hello(peer, message, now, key)
            return
        worker = self._roster.by_peer.get(peer)
        if worker is None:
            self._stranger(peer, message, now)
            return
        worker.last_heard = now
        worker.claimant = None
        if type(message) is m.Samples:
            self._samples(worker, message, now)
        else:
            self._other(worker, message, now)

    def bad_frames(self, peer: bytes, error: RemoteProtocolError, now: float) -> None:
        """What a peer sent does not decode: it is dropped, and the worker that spoke over it is lost."""
        if self._strangers.is_dropped(peer):
            self._count("spoke after it was dropped")
            return
        self._violated(peer, "sent frames that do not decode", f"sent frames that do not decode: {error}", now)

    def peer_gone(self, peer: bytes, now: float) -> None:
        """A connection has ended; its worker may come back over another one until it counts as silent."""
        worker = self._roster.by_peer.get(peer)
        if worker is None:
            self._strangers.forget(peer)
            for claimed in self._roster.workers():
                if claimed.claimant == peer:
                    claimed.claimant = None
            for incarnation, waiting in list(self._waiting.items()):
                if waiting.peer == peer:
                    del self._waiting[incarnation]
            return
        self._roster.unbind(worker)
        self._settle_claim(worker, now)

    def tick(self, now: float) -> None:
        """Time has passed: silent workers are lost, calls fail, heartbeats go out, as due."""
        settings = self.settings
        stood_still = 0.0 if self._last_tick is None else now - self._last_tick
        self._last_tick = now
        for worker in self._roster.workers():
            if self._roster.by_slot.get(worker.slot) is not worker:
                continue  # buried by what was done for another
            if stood_still > settings.heartbeat_timeout_s / 2:
                worker.last_heard += stood_still  # it was us; hear what has come in the meantime first
            self._watch(worker, now)
        for incarnation, waiting in list(self._waiting.items()):
            if now - waiting.since > settings.heartbeat_timeout_s:
                del self._waiting[incarnation]
        for call in [call for call in self._calls.values() if now >= call.deadline]:
            self._fail_call(call, "timed out")
        if now - self._last_beat >= settings.heartbeat_interval_s:
            self._last_beat = now
            beat = m.LearnerBeat(self.learner_incarnation, self.version)
            self._out.append((BROADCAST, beat))
            for worker in self._roster.workers():
                self._send(worker, beat)
                self._send_open(worker)
            for waiting in self._waiting.values():
                self._out.append((waiting.peer, beat))

    # Registration -----------------------------------------------------------------------------------------

    def _hello(self, peer: bytes, hello: m.Hello, now: float, key: str | None) -> None:
        if self._closing is not None:
            self._out.append((peer, self._closing))
            return
        wrong = self._refusal(hello)
        if wrong is not None:
            self._reject(peer, wrong, now)
            return
        worker = self._roster.by_incarnation.get(hello.incarnation)
        if worker is not None:
            self._hello_again(worker, peer, hello, now, key)
            return
        if self._roster.is_buried(hello.incarnation) or hello.learner_incarnation:
            self._refuse_ended(peer, hello.incarnation)
            return
        twins = self._roster.of_process(hello.worker_id)
        if any(twin.key != key for twin in twins):
            self._violated(peer, "used another worker's name", "used the name of a worker with another key", now)
            return
        over_peer = self._roster.by_peer.get(peer)
        if over_peer is not None and over_peer not in twins:
            twins.append(over_peer)
        for former in twins:
            self._bury(former, "its worker came back as a new incarnation", now, notify=False)
        for incarnation, waiting in list(self._waiting.items()):
            if incarnation != hello.incarnation and (
                waiting.hello.worker_id == hello.worker_id or waiting.peer == peer
            ):
                del self._waiting[incarnation]
        if self._is_ready():
            self._admit(_Waiting(peer, hello, key, now), now)
        elif hello.incarnation in self._waiting or len(self._waiting) < self.settings.max_workers:
            # an entry that is there keeps its place: slots are given in the order of the first Hellos
            self._waiting[hello.incarnation] = _Waiting(peer, hello, key, now)
            self._out.append((peer, m.LearnerBeat(self.learner_incarnation, self.version)))

    def _refusal(self, hello: m.Hello) -> m.Refused | None:
        """Why this Hello can never be taken, if so."""
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

    def _hello_again(self, worker: Worker, peer: bytes, hello: m.Hello, now: float, key: str | None) -> None:
        if worker.key != key or worker.worker_id != hello.worker_id:
            self._violated(peer, "used another worker's name", "used the name of a worker with another key", now)
        elif worker.peer == peer:
            worker.last_heard = now
            worker.claimant = None
            if now - worker.welcomed >= _WELCOME_AGAIN_S:
                self._welcome_again(worker, now)
        elif worker.peer is None:
            self._bind(worker, peer, now)
        elif self._strangers.count(peer) > self.settings.hello_grace:
            self._violated(peer, "used another worker's name", "used the name of a worker that speaks elsewhere", now)
        elif worker.claimant is None:
            # Its old connection may be dead, or somebody plays an old Hello back: see who speaks first.
            worker.claimant = peer
            worker.claimed = now

    def _settle_claim(self, worker: Worker, now: float) -> None:
        """Its old connection is gone or silent: it speaks over the new one, if one says so."""
        claimant, worker.claimant = worker.claimant, None
        if claimant is not None and claimant not in self._roster.by_peer:
            self._bind(worker, claimant, now)

    def _bind(self, worker: Worker, peer: bytes, now: float) -> None:
        former = self._roster.by_peer.get(peer)
        if former is not None and former is not worker:
            self._bury(former, "its worker came back as another incarnation", now, notify=False)
        self._roster.bind(worker, peer)
        self._strangers.forget(peer)
        worker.last_heard = now
        self._welcome_again(worker, now)

    def _admit_waiting(self, now: float) -> None:
        if self._is_ready():
            while self._waiting:
                self._admit(self._waiting.popitem(last=False)[1], now)

    def _is_ready(self) -> bool:
        return self._config is not None and self._snapshot is not None

    def _admit(self, waiting: _Waiting, now: float) -> None:
        hello, peer = waiting.hello, waiting.peer
        slot = self._roster.free_slot(hello.slot_hint, hello.worker_id)
        if not slot:
            reason = f"all {self.settings.max_workers} slots are taken"
            self._out.append((peer, m.Refused(reason, True, m.RefusalCode.FULL, hello.incarnation)))
            return
        worker = self._roster.add(slot, hello, peer, waiting.key, now)
        self._strangers.forget(peer)
        self.ledger.open(worker.incarnation, slot)
        self._events.append(
            ev.WorkerJoined(slot, worker.incarnation, worker.worker_id, worker.host, worker.pid, worker.local)
        )
        self._welcome(worker, now)
        self._redeal()

    def _welcome(self, worker: Worker, now: float) -> None:
        if self._config is None or self._snapshot is None:
            return
        worker.welcomed = worker.gave_snapshot = now
        self._send(
            worker,
            m.Welcome(
                worker.slot,
                self.settings.num_workers,
                self.run_id,
                self.learner_incarnation,
                self._config,
                self._graphs,
                self._snapshot,
                worker.incarnation,
                worker.last_seq,
            ),
        )

    def _welcome_again(self, worker: Worker, now: float) -> None:
        """All that may have been lost on the way: what has arrived, what is leased, what is called."""
        self._welcome(worker, now)
        worker.gap_since = None
        self._send_open(worker)

    def _send_open(self, worker: Worker) -> None:
        """Say again what the worker owes us; whatever it has heard before changes nothing."""
        for lease in self.leases.outstanding_leases(worker.slot):
            self._send(worker, lease)
        for call in self._calls.values():
            if call.worker is worker:
                self._send(worker, call.message)

    # Registered workers -----------------------------------------------------------------------------------

    def _samples(self, worker: Worker, samples: m.Samples, now: float) -> None:
        due = worker.last_seq + 1
        if samples.seq != due:
            self._out_of_order(worker, samples.seq, due, now)
            return
        wrong = self._accept(worker, samples)
        if wrong:
            self._worker_violated(worker, "broke its lease or its account", f"sent {wrong}", now)
            return
        worker.gap_since = None
        worker.last_seq = due
        if not worker.ack_due:
            worker.ack_due = True
            self._ack_due.append(worker)
        max_lag = self.settings.max_lag
        if max_lag is not None and is_stale(samples, self.version, max_lag):
            self.ledger.discard("stale on arrival", samples.env_steps)
            self._events.append(
                ev.SamplesDropped(worker.slot, worker.incarnation, "stale on arrival", samples.env_steps)
            )
            return
        self._events.append(ev.SamplesAccepted(worker.slot, worker.incarnation, samples))

    def _accept(self, worker: Worker, samples: m.Samples) -> str:
        """Enter a fragment into ledger and lease book; what is wrong with it in plain words, or ""."""
        if not samples.first_version <= samples.last_version <= self.version:
            return (
                f"a fragment of policy versions {samples.first_version} to {samples.last_version}, "
                f"the newest being {self.version}"
            )
        wrong = self.leases.use(worker.slot, samples.lease_id, samples.first_version)
        if wrong:
            return wrong
        try:
            self.ledger.report(worker.incarnation, samples.sampled_total, samples.abandoned_total)
            self.ledger.receive(worker.incarnation, samples.env_steps)
        except RemoteProtocolError as error:
            return f"counts that do not add up: {error}"
        return ""

    def _out_of_order(self, worker: Worker, seq: int, due: int, now: float) -> None:
        if seq < due:
            self._count("double fragments (sent again after a reconnect)")
            if not worker.ack_due:
                worker.ack_due = True
                self._ack_due.append(worker)
            return
        self._count("fragments ahead of a missing one")
        if worker.gap_since is None:
            worker.gap_since = now
        if now - worker.asked_resend >= self.settings.resend_ask_s:
            worker.asked_resend = now
            self._send(worker, m.Ack(worker.last_seq, resend=True))

    def _other(self, worker: Worker, message: m.Message, now: float) -> None:
        match message:
            case m.Beat():
                worker.state = message.state
                worker.in_env_s = message.in_env_s
                self._report(worker, message.sampled_total, message.abandoned_total, now)
            case m.SnapshotRequest():
                self._give_snapshot(worker, message.have_version, now)
            case m.Failure():
                self._events.append(
                    ev.WorkerFailed(
                        worker.slot,
                        worker.incarnation,
                        message.kind,
                        message.message,
                        message.traceback,
                        message.fatal,
                    )
                )
                if message.fatal:
                    self._bury(worker, f"failed: {message.message:.200}", now, notify=False)
            case m.Reply():
                call = self._calls.get(message.call_id)
                if call is not None and call.worker is worker:
                    del self._calls[message.call_id]
                    self._events.append(ev.CallReplied(worker.slot, message.call_id, message.ok, message.result))
            case m.Leaving():
                if self._report(worker, message.sampled_total, message.abandoned_total, now):
                    self._bury(worker, f"left: {message.reason:.200}", now, notify=False)
            case _:
                name = type(message).__name__
                self._worker_violated(worker, "sent what only a learner sends", f"sent a {name}", now)

    def _report(self, worker: Worker, sampled_total: int, abandoned_total: int, now: float) -> bool:
        try:
            self.ledger.report(worker.incarnation, sampled_total, abandoned_total)
        except RemoteProtocolError as error:
            self._worker_violated(
                worker, "broke its lease or its account", f"sent counts that do not add up: {error}", now
            )
            return False
        return True

    def _give_snapshot(self, worker: Worker, have_version: int, now: float) -> None:
        snapshot = self._snapshot
        if (
            snapshot is not None
            and have_version < snapshot.version
            and now - worker.gave_snapshot >= self.settings.snapshot_interval_s
        ):
            worker.gave_snapshot = now
            self._send(worker, snapshot)

    def _watch(self, worker: Worker, now: float) -> None:
        settings = self.settings
        silent_s = now - worker.last_heard
        if silent_s > settings.heartbeat_timeout_s:
            self._bury(worker, "heartbeats stopped", now)
        elif worker.gap_since is not None and now - worker.gap_since > settings.heartbeat_timeout_s:
            self._worker_violated(
                worker, "left a gap", f"never sent fragment {worker.last_seq + 1} but later ones", now
            )
        elif worker.claimant is not None and now - worker.claimed >= 2 * settings.heartbeat_interval_s:
            self._settle_claim(worker, now)

    def _bury(self, worker: Worker, reason: str, now: float, *, notify: bool = True) -> None:
        """End an incarnation: account closed, leases to the others, slot free."""
        peer = worker.peer
        if peer is not None:
            self._strangers.remember_ended(peer, worker.incarnation)
            if notify:
                self._refuse_ended(peer, worker.incarnation)
        self._roster.bury(worker)
        if worker.ack_due:
            worker.ack_due = False
            self._ack_due.remove(worker)
        for call in [call for call in self._calls.values() if call.worker is worker]:
            self._fail_call(call, f"the worker was lost: {reason}")
        lost = self.ledger.close(worker.incarnation, reason.partition(":")[0])
        self.leases.drop_slot(worker.slot)
        self._events.append(ev.WorkerLost(worker.slot, worker.incarnation, worker.worker_id, reason, lost))
        self._redeal()

    # Peers that are out of place --------------------------------------------------------------------------

    def _stranger(self, peer: bytes, message: m.Message, now: float) -> None:
        """A message over a connection that no live worker speaks over."""
        ended = self._strangers.ended(peer)
        if ended:  # it has not heard of its end yet, and may have much under way
            self._count("spoke after its incarnation ended")
            self._refuse_ended(peer, ended)
        elif self._strangers.count(peer) > self.settings.hello_grace:
            self._violated(peer, "spoke before saying hello", "went on without saying hello", now)
        else:
            self._count("spoke before saying hello")
            reason = f"sent a {type(message).__name__} before saying hello"
            if self._strangers.first_time(peer):
                self._events.append(ev.PeerRejected(peer, reason, dropped=False))
            self._out.append((peer, m.Refused(f"you {reason}", True, m.RefusalCode.HELLO_FIRST)))

    def _refuse_ended(self, peer: bytes, incarnation: str) -> None:
        reason = "this incarnation has ended and its samples are counted lost; come back as a new one"
        self._out.append((peer, m.Refused(reason, True, m.RefusalCode.ENDED, incarnation)))

    def _worker_violated(self, worker: Worker, kind: str, reason: str, now: float) -> None:
        if worker.peer is not None:
            self._violated(worker.peer, kind, reason, now)
        else:
            self._count(kind)
            self._bury(worker, f"broke the protocol: {reason}", now)

    def _violated(self, peer: bytes, kind: str, reason: str, now: float) -> None:
        """The peer is told why, dropped, and the worker that spoke over it lost."""
        worker = self._roster.by_peer.get(peer)
        incarnation = worker.incarnation if worker is not None else ""
        self._reject(peer, m.Refused(f"you {reason}", False, m.RefusalCode.VIOLATION, incarnation), now, kind)

    def _reject(self, peer: bytes, refusal: m.Refused, now: float, kind: str = "") -> None:
        self._count(kind or refusal.code)
        worker = self._roster.by_peer.get(peer)
        if worker is not None:
            self._bury(worker, f"broke the protocol: {refusal.reason}", now, notify=False)
        self._out.append((peer, refusal))
        self._strangers.drop(peer)
        self._events.append(ev.PeerRejected(peer, refusal.reason.removeprefix("you "), dropped=True))

    # Small things -----------------------------------------------------------------------------------------

    def _count(self, kind: str) -> None:
        self._strangers.violations[kind] += 1

    def _worker(self, slot: int) -> Worker:
        worker = self._roster.by_slot.get(slot)
        if worker is None:
            raise LocalProtocolError(f"no worker in slot {slot}; live slots: {self.slots}")
        return worker

    def _send(self, worker: Worker, message: m.DownMessage) -> None:
        """To a worker without connection nothing is sent: it hears all that matters when it comes back."""
        if worker.peer is not None:
            self._out.append((worker.peer, message))

    def _send_grants(self, grants: list[Grant]) -> None:
        for slot, lease in grants:
            self._send(self._roster.by_slot[slot], lease)

    def _redeal(self) -> None:
        self._send_grants(self.leases.redeal(self._roster.by_slot))

    def _fail_call(self, call: _Call, reason: str) -> None:
        del self._calls[call.message.call_id]
        self._events.append(ev.CallReplied(call.worker.slot, call.message.call_id, False, reason))
