"""News about workers for the user: joined, lost, failed, stuck; no more often than anyone can read."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from aiorl.net.protocol import calls, events as ev
from aiorl.net.protocol.learner_session import LearnerSession
from aiorl.net.protocol.roster import Worker
from aiorl.net.wire.messages import WAITING_FOR
from aiorl.process.log_once import EventRates
from aiorl.run.core import DeltaLeftOut, FragmentRefused, News, UpdateSkipped
from aiorl.run.ports import Tell
from aiorl.text import indented, many_lines, without_numbers

logger = logging.getLogger(__name__)

_HUNG_S = 60.0
_LOGGED_PER_KIND = 1000
_MAX_STACKS = 16_000
_MAX_LOGGED = 24_000
_MAX_NAMED = 8


class PeerNews:
    """Reports news about workers and connections.

    Attributes:
        session: knows the registered workers.
    """

    def __init__(self, tell: Tell, session: LearnerSession) -> None:
        """Report nothing yet.

        Args:
            tell: called with (text, logging level) of news for the user.
            session: knows the registered workers; is asked for the stacks of stuck ones.
        """
        self.session = session
        self._tell = tell
        self._rates = EventRates()
        self._rates_of_hosts = EventRates(per_kind=_LOGGED_PER_KIND)
        self._hung: set[str] = set()  # incarnations of live workers only
        self._slow: set[int] = set()  # slots of live workers only

    def report(
        self,
        kind: str,
        source: object,
        text: str,
        level: int,
        *,
        at_most: int | None = None,
        what: str | None = None,
        host: str = "",
    ) -> bool:
        """Report news about a peer to the user, but not more often than anyone can read.

        ``at_most`` and ``what`` are the arguments of `EventRates.allow`. With a ``host``, the log
        also gets what other hosts' news leave no room for.

        Returns:
            False if the news was only counted or logged.
        """
        now = time.monotonic()
        is_reported = self._rates.allow(kind, source, now, at_most=at_most, what=what)
        if is_reported:
            self._tell(text, level)
        elif host and self._rates_of_hosts.allow(kind, host, now, what=what and f"{host}: {what}"):
            logger.log(level, "%s", indented(many_lines(text, _MAX_LOGGED)), extra={"shown": True})
        return is_reported

    def report_connection(self, fate: str, address: str, reason: str) -> None:
        """Report the end of a connection: at most one line a minute for each host, since every
        attempt comes from another port.
        """
        text = f"the connection from {address or 'a peer'} was {fate}: {reason}"
        host = address.rpartition(":")[0] or address
        self.report(f"connections {fate}", host, text, logging.WARNING, at_most=1)

    def report_left_out(self) -> None:
        """Report how much was left out, once a minute."""
        left_out = self._rates.take_left_out(time.monotonic())
        if left_out:
            counts = ", ".join(f"{kind}: {count:,}" for kind, count in left_out.items())
            self._tell(f"not shown in the last minute: {counts}", logging.WARNING)

    # What the core reports
    # ----------------------------------------------------------------------------------------------

    def report_event(self, event: News) -> None:
        """Report what has happened to a worker or an update, if it is of interest to the user."""
        match event:
            case ev.WorkerJoined(slot, _, host, pid, local):
                kind = "local worker" if local else "worker"
                text = f"{kind} {slot} joined ({host}, pid {pid})"
                self.report("workers that joined", slot, text, logging.INFO)
            case ev.WorkerLost():
                self._report_lost(event)
            case ev.WorkerFailed(slot, _, message, trace, host):
                text = f"{_named(slot, host)} failed: {message}\n{trace}".rstrip()
                what = without_numbers(message)
                self.report("failures of workers", slot, text, logging.ERROR, what=what, host=host)
            case ev.LeaseOverdue(slot, fragments, waited_s):
                name = _named(slot, self.session.host_of(slot))
                state = self.session.state_of(slot)
                text = (
                    f"{name} is alive, but has sent nothing for {waited_s:.0f} s: the {fragments}"
                    " fragments that it owes are leased to others"
                )
                level = logging.WARNING
                if state.startswith(WAITING_FOR):
                    text = (
                        f"{name} is {state}. The {fragments} fragments that it owes are leased to"
                        " others meanwhile"
                    )
                    level = logging.INFO
                self.report("workers that bring nothing", slot, text, level)
            case ev.CallReplied(slot, _, method=calls.STACKS, ok=True, result=result):
                answer = result if isinstance(result, str) else "(no answer)"
                stacks = many_lines(answer, _MAX_STACKS)
                text = f"stacks of worker {slot}:\n{stacks}"
                self.report("stacks of workers", slot, text, logging.WARNING)
            case FragmentRefused(slot, reason):
                text = f"worker {slot} sent a malformed fragment: {reason}"
                self.report("malformed fragments", slot, text, logging.ERROR)
            case DeltaLeftOut(slot, reason):
                text = f"worker {slot} sent a filter delta that was left out: {reason}"
                self.report("filter deltas left out", slot, text, logging.WARNING)
            case UpdateSkipped():
                self._tell(skipped_text(event), logging.WARNING)

    def _report_lost(self, event: ev.WorkerLost) -> None:
        slot = event.slot
        reason = event.reason
        text = f"{_named(slot, event.host)} lost: {reason}"
        if event.lost_env_steps:
            text += f"; {event.lost_env_steps:,} env steps in transit are lost"
        # a failure was reported before, and many fail alike
        what = without_numbers(reason) if reason.startswith("failed: ") else None
        self.report("workers lost", slot, text, logging.WARNING, what=what, host=event.host)

    # What has to be looked for
    # ----------------------------------------------------------------------------------------------

    def look_for_hung_workers(self) -> None:
        """Report workers whose environment does not return, and ask them for their stacks."""
        hung = [worker for worker in self.session.workers if worker.in_env_s >= _HUNG_S]
        for worker in hung:
            if worker.incarnation in self._hung:
                continue
            text = (
                f"{_named(worker.slot, worker.host_elsewhere)}: its environment has not returned"
                f" for {worker.in_env_s:.0f} s; its stacks follow in the log"
            )
            if self.report("environments that hang", worker.slot, text, logging.WARNING):
                self.session.call(worker.slot, calls.STACKS, {}, num_bytes=0)
        self._hung = {worker.incarnation for worker in hung}

    def look_for_slow_workers(self) -> None:
        """Report workers that get no leases because the policy outruns them, once for each
        registration.
        """
        pacing = self.session.leases.pacing
        if pacing is None:
            return
        self._slow &= set(self.session.slots)
        for slow in pacing.slow_workers(time.monotonic()):
            if slow.slot in self._slow:
                continue
            self._slow.add(slow.slot)
            text = (
                f"worker {slow.slot} is left out because the policy outruns it: it needs"
                f" {slow.fragment_s:.1f} s for a fragment, about {slow.updates:.0f} updates,"
                " which is more than max_policy_lag allows. Set a shorter"
                " rollout_fragment_length or a larger train_batch_size"
            )
            self.report("workers left out", slow.slot, text, logging.INFO)


def skipped_text(event: UpdateSkipped) -> str:
    """Return the news of a skipped update."""
    text = "an update was skipped because its loss or gradients were not finite"
    if event.bad_column:
        text += f": column {event.bad_column!r} is not finite"
    return text


def states_of(workers: Sequence[Worker]) -> str:
    """Return what the first workers do, in plain words."""
    states = []
    for worker in workers[:_MAX_NAMED]:
        state = f"worker {worker.slot}: {worker.state}"
        if worker.in_env_s > 1:
            state += f" ({worker.in_env_s:.0f} s in one step)"
        states.append(state)
    text = "; ".join(states)
    num_left_out = len(workers) - _MAX_NAMED
    if num_left_out > 0:
        text += f"; and {num_left_out} more"
    return text


def _named(slot: int, host: str) -> str:
    """Return a worker's name for people, with its host if that is another one."""
    return f"worker {slot} on {host}" if host else f"worker {slot}"
