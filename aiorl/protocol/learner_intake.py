"""How fragments come in: each once, in order, within a lease, and accounted for."""

from __future__ import annotations

from aiorl.errors import RemoteProtocolError
from aiorl.protocol import events as ev
from aiorl.protocol.learner_members import Members
from aiorl.protocol.learner_settings import LearnerSettings
from aiorl.protocol.roster import Worker
from aiorl.wire import messages as m

__all__ = ["Intake"]

_BROKE_ACCOUNT = "broke its lease or its account"


class Intake:
    """Takes what workers have sampled, and what they report of it."""

    def __init__(self, settings: LearnerSettings, members: Members) -> None:
        self._settings = settings
        self._members = members
        self._outbox = members.outbox

    def samples(self, worker: Worker, samples: m.Samples, version: int, now: float) -> None:
        """A fragment has come; ``version`` is the newest there is."""
        due = worker.last_seq + 1
        if samples.seq != due:
            self._out_of_order(worker, samples.seq, due, now)
            return
        wrong = self._accept(worker, samples, version, now)
        if wrong:
            self._members.worker_violated(worker, _BROKE_ACCOUNT, f"sent {wrong}")
            return
        worker.gap_since = None
        worker.last_seq = due
        self._outbox.ack(worker)
        self._outbox.tell(ev.SamplesAccepted(worker.slot, worker.incarnation, samples))

    def report(self, worker: Worker, sampled_total: int, abandoned_total: int) -> bool:
        """What a worker says it has sampled so far; False if that cannot be, and the worker is lost for it."""
        try:
            self._members.ledger.report(worker.incarnation, sampled_total, abandoned_total)
        except RemoteProtocolError as error:
            self._members.worker_violated(worker, _BROKE_ACCOUNT, f"sent counts that do not add up: {error}")
            return False
        return True

    def _accept(self, worker: Worker, samples: m.Samples, version: int, now: float) -> str:
        """Enter a fragment into ledger and lease book; what is wrong with it in plain words, or ""."""
        if not samples.first_version <= samples.last_version <= version:
            return (
                f"a fragment of policy versions {samples.first_version} to {samples.last_version}, "
                f"the newest being {version}"
            )
        wrong = self._members.leases.use(worker.slot, samples.lease_id, samples.first_version, now)
        if wrong:
            return wrong
        ledger = self._members.ledger
        try:
            ledger.report(worker.incarnation, samples.sampled_total, samples.abandoned_total)
            ledger.receive(worker.incarnation, samples.env_steps)
        except RemoteProtocolError as error:
            return f"counts that do not add up: {error}"
        return ""

    def _out_of_order(self, worker: Worker, seq: int, due: int, now: float) -> None:
        if seq < due:
            self._members.count("double fragments (sent again after a reconnect)")
            self._outbox.ack(worker)
            return
        self._members.count("fragments ahead of a missing one")
        if worker.gap_since is None:
            worker.gap_since = now
        if now - worker.asked_resend >= self._settings.resend_ask_s:
            worker.asked_resend = now
            self._outbox.to_worker(worker, m.Ack(worker.last_seq, resend=True))
