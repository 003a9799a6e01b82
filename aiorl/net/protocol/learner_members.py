"""The workers of a run with all that hangs on them, and how one of them, or a peer that misbehaves, is got rid of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from aiorl.config.worker import TransportConfig
from aiorl.errors import LocalProtocolError
from aiorl.net.protocol import events as ev
from aiorl.net.protocol.leases import Grant, LeaseBook
from aiorl.net.protocol.ledger import Ledger
from aiorl.net.protocol.roster import Roster, Strangers, Worker
from aiorl.net.wire import messages as m
from aiorl.net.wire.limits import MAX_WORKERS

__all__ = ["BROADCAST", "LearnerSettings", "Members", "Target"]

Target: TypeAlias = bytes | None
"""Whom a message is for: a peer, or BROADCAST."""
BROADCAST: Final = None


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


@dataclass(slots=True, eq=False)
class _Call:
    worker: Worker
    message: m.Call
    deadline: float


class Members:
    """Who is registered, what each of them owes and is asked, what is to be said and told, and what a loss leads to.

    Messages and events wait in order until the shell takes them after each turn: a few for each message that came.

    Attributes:
        settings: how patient the learner is.
        roster: the registered workers.
        strangers: peers that speak for none of them.
        ledger: the account of env steps.
        leases: what each may sample.
        now: the time of the newest input.
        has_unsent: whether what was said to a peer has yet to leave us.
    """

    def __init__(self, settings: LearnerSettings, ledger: Ledger, leases: LeaseBook) -> None:
        self.settings = settings
        self.now = 0.0
        self.has_unsent: Callable[[bytes], bool] = lambda peer: False
        self.roster = Roster(settings.max_workers)
        self.strangers = Strangers()
        self.ledger = ledger
        self.leases = leases
        self._calls: dict[int, _Call] = {}  # those not answered yet; only we make any
        self._next_call = 1
        self._snapshots_due: set[bytes] = set()  # peers that one of the messages below is for
        self._messages: list[tuple[Target, m.DownMessage]] = []
        self._events: list[ev.LearnerEvent] = []
        self._ack_due: dict[Worker, None] = {}  # in the order in which they brought something

    def worker(self, slot: int) -> Worker:
        """The worker in a slot.

        Raises: LocalProtocolError if there is none.
        """
        worker = self.roster.by_slot.get(slot)
        if worker is None:
            raise LocalProtocolError(f"no worker in slot {slot}; live slots: {sorted(self.roster.by_slot)}")
        return worker

    # What is to be said and told --------------------------------------------------------------------------

    def say(self, target: Target, message: m.DownMessage) -> None:
        """Say something over a connection, whoever is there, or to all that listen."""
        self._messages.append((target, message))

    def to_worker(self, worker: Worker, message: m.DownMessage) -> None:
        """To a worker without connection nothing is sent: it hears all that matters when it comes back."""
        if worker.peer is not None:
            self._messages.append((worker.peer, message))

    def give_snapshot(self, worker: Worker, message: m.Snapshot | m.Welcome) -> None:
        """To a worker that `may_get_snapshot`."""
        if worker.peer is not None:
            self._snapshots_due.add(worker.peer)
        self.to_worker(worker, message)

    def may_get_snapshot(self, peer: bytes) -> bool:
        """Whether all that was said over a connection has left us, so that nobody who does not read holds many."""
        return peer not in self._snapshots_due and not self.has_unsent(peer)

    def ack(self, worker: Worker) -> None:
        """The worker will hear how far its fragments have come."""
        self._ack_due.setdefault(worker)

    def tell(self, event: ev.LearnerEvent) -> None:
        """Something has happened."""
        self._events.append(event)

    def take_messages(self) -> list[tuple[Target, m.DownMessage]]:
        """All messages, acknowledgements last; they are gone from here."""
        messages, self._messages = self._messages, []
        messages += [(worker.peer, m.Ack(worker.last_seq)) for worker in self._ack_due if worker.peer is not None]
        self._ack_due.clear()
        self._snapshots_due.clear()
        return messages

    def take_events(self) -> list[ev.LearnerEvent]:
        """All events; they are gone from here."""
        events, self._events = self._events, []
        return events

    # Calls ------------------------------------------------------------------------------------------------

    def call(self, worker: Worker, method: str, args: Mapping[str, m.Plain], deadline: float) -> int:
        """Ask a worker to run a method; the call's id. It is answered or fails, once."""
        message = m.Call(self._next_call, method, args)
        self._next_call += 1
        self._calls[message.call_id] = _Call(worker, message, deadline)
        worker.open_calls.add(message.call_id)
        self.to_worker(worker, message)
        return message.call_id

    def answer_call(self, worker: Worker, reply: m.Reply) -> None:
        """A worker has replied to a call that is open."""
        self._end_call(self._calls[reply.call_id])
        self.tell(ev.CallReplied(worker.slot, reply.call_id, reply.ok, reply.result))

    def expire_calls(self, now: float) -> None:
        """Calls that have waited long enough fail."""
        for call in [call for call in self._calls.values() if now >= call.deadline]:
            self._fail_call(call, "timed out")

    def _calls_of(self, worker: Worker) -> list[_Call]:
        return [call for call in self._calls.values() if call.worker is worker]

    def _end_call(self, call: _Call) -> None:
        del self._calls[call.message.call_id]
        call.worker.open_calls.remove(call.message.call_id)

    def _fail_call(self, call: _Call, reason: str) -> None:
        self._end_call(call)
        self.tell(ev.CallReplied(call.worker.slot, call.message.call_id, False, reason))

    # Leases -----------------------------------------------------------------------------------------------

    def send_grants(self, grants: Iterable[Grant]) -> None:
        """Tell workers of leases they were given."""
        for slot, lease in grants:
            self.to_worker(self.roster.by_slot[slot], lease)

    def redeal(self) -> None:
        """Lease what is held to those that are there."""
        self.send_grants(self.leases.redeal(self.now))

    def say_open_again(self, worker: Worker) -> None:
        """Say again what the worker owes us; whatever it has heard before changes nothing."""
        for lease in self.leases.outstanding_leases(worker.slot):
            self.to_worker(worker, lease)
        for call in self._calls_of(worker):
            self.to_worker(worker, call.message)

    # Ends -------------------------------------------------------------------------------------------------

    def bury(self, worker: Worker, reason: str, *, notify: bool = True) -> None:
        """End an incarnation: account closed, leases to the others, slot free.

        Args:
            worker: the incarnation.
            reason: in plain words; what stands before a colon is the kind, under which it is accounted.
            notify: it is told, since it may not know.
        """
        peer = worker.peer
        if peer is not None:
            self.strangers.remember_ended(peer, worker.incarnation)
            if notify:
                self.refuse_ended(peer, worker.incarnation)
        self.roster.bury(worker)
        self._ack_due.pop(worker, None)
        for call in self._calls_of(worker):
            self._fail_call(call, f"the worker was lost: {reason}")
        lost = self.ledger.close(worker.incarnation, reason.partition(":")[0])
        self.leases.drop_slot(worker.slot, self.now)
        self.tell(ev.WorkerLost(worker.slot, worker.incarnation, worker.worker_id, reason, lost))
        self.redeal()

    def refuse_ended(self, peer: bytes, incarnation: str) -> None:
        """Tell a peer that its incarnation has ended."""
        reason = "this incarnation has ended and its samples are counted lost; come back as a new one"
        self.say(peer, m.Refused(reason, True, m.RefusalCode.ENDED, incarnation))

    # Violations -------------------------------------------------------------------------------------------

    def count(self, kind: str) -> None:
        """Count something that a peer did wrong."""
        self.strangers.violations[kind] += 1

    def worker_violated(self, worker: Worker, kind: str, reason: str) -> None:
        """A worker broke the protocol: it is told why and lost, and its connection dropped."""
        if worker.peer is not None:
            self.violated(worker.peer, kind, reason)
        else:
            self.count(kind)
            self.bury(worker, f"broke the protocol: {reason}")

    def violated(self, peer: bytes, kind: str, reason: str) -> None:
        """The peer is told why, dropped, and the worker that spoke over it lost."""
        worker = self.roster.by_peer.get(peer)
        incarnation = worker.incarnation if worker is not None else ""
        self.reject(peer, m.Refused(f"you {reason}", False, m.RefusalCode.VIOLATION, incarnation), kind)

    def reject(self, peer: bytes, refusal: m.Refused, kind: str = "") -> None:
        """Drop a peer for good; counted as ``kind``, by default the refusal's code."""
        self.count(kind or refusal.code)
        worker = self.roster.by_peer.get(peer)
        if worker is not None:
            self.bury(worker, f"broke the protocol: {refusal.reason}", notify=False)
        self.say(peer, refusal)
        self.strangers.drop(peer)
        self.tell(ev.PeerRejected(peer, refusal.reason.removeprefix("you "), dropped=True))

    def is_dropped(self, peer: bytes) -> bool:
        """Whether a peer is not listened to any more; that it speaks nevertheless is counted."""
        if self.strangers.is_dropped(peer):
            self.count("spoke after it was dropped")
            return True
        return False
