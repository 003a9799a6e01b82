"""The workers of a run with all that hangs on them, and how one of them, or a peer that misbehaves, is got rid of."""

from __future__ import annotations

from collections.abc import Iterable

from aiorl.errors import LocalProtocolError
from aiorl.protocol import events as ev
from aiorl.protocol.learner_calls import Calls
from aiorl.protocol.learner_outbox import Outbox
from aiorl.protocol.leases import Grant, LeaseBook
from aiorl.protocol.ledger import Ledger
from aiorl.protocol.roster import Roster, Strangers, Worker
from aiorl.wire import messages as m

__all__ = ["Members"]


class Members:
    """Who is registered, what each of them owes, and what follows when one is lost.

    Attributes:
        roster: the registered workers.
        strangers: peers that speak for none of them.
        ledger: the account of env steps.
        leases: what each may sample.
        calls: what each is asked to run.
        outbox: what is to be said and told.
        now: the time of the newest input.
    """

    def __init__(self, max_workers: int, ledger: Ledger, leases: LeaseBook) -> None:
        self.outbox = Outbox()
        self.now = 0.0
        self.roster = Roster(max_workers)
        self.strangers = Strangers()
        self.ledger = ledger
        self.leases = leases
        self.calls = Calls(self.outbox)

    def worker(self, slot: int) -> Worker:
        """The worker in a slot.

        Raises: LocalProtocolError if there is none.
        """
        worker = self.roster.by_slot.get(slot)
        if worker is None:
            raise LocalProtocolError(f"no worker in slot {slot}; live slots: {sorted(self.roster.by_slot)}")
        return worker

    # Leases -----------------------------------------------------------------------------------------------

    def send_grants(self, grants: Iterable[Grant]) -> None:
        """Tell workers of leases they were given."""
        for slot, lease in grants:
            self.outbox.to_worker(self.roster.by_slot[slot], lease)

    def redeal(self) -> None:
        """Lease what is held to those that are there."""
        self.send_grants(self.leases.redeal(self.now))

    def say_open_again(self, worker: Worker) -> None:
        """Say again what the worker owes us; whatever it has heard before changes nothing."""
        for lease in self.leases.outstanding_leases(worker.slot):
            self.outbox.to_worker(worker, lease)
        self.calls.say_again(worker)

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
        self.outbox.forget_ack(worker)
        self.calls.lose(worker, reason)
        lost = self.ledger.close(worker.incarnation, reason.partition(":")[0])
        self.leases.drop_slot(worker.slot)
        self.outbox.tell(ev.WorkerLost(worker.slot, worker.incarnation, worker.worker_id, reason, lost))
        self.redeal()

    def refuse_ended(self, peer: bytes, incarnation: str) -> None:
        """Tell a peer that its incarnation has ended."""
        reason = "this incarnation has ended and its samples are counted lost; come back as a new one"
        self.outbox.to_peer(peer, m.Refused(reason, True, m.RefusalCode.ENDED, incarnation))

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
        self.outbox.to_peer(peer, refusal)
        self.strangers.drop(peer)
        self.outbox.tell(ev.PeerRejected(peer, refusal.reason.removeprefix("you "), dropped=True))

    def is_dropped(self, peer: bytes) -> bool:
        """Whether a peer is not listened to any more; that it speaks nevertheless is counted."""
        if self.strangers.is_dropped(peer):
            self.count("spoke after it was dropped")
            return True
        return False
