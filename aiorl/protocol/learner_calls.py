"""What a learner has asked workers to run: each call is answered or fails, once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aiorl.protocol import events as ev
from aiorl.protocol.learner_outbox import Outbox
from aiorl.protocol.roster import Worker
from aiorl.wire import messages as m

__all__ = ["Calls"]


@dataclass(slots=True, eq=False)
class _Call:
    worker: Worker
    message: m.Call
    deadline: float


class Calls:
    """The calls not yet answered: only those that we have made, each for ``call_timeout_s`` at most."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._calls: dict[int, _Call] = {}
        self._next_id = 1

    def start(self, worker: Worker, method: str, args: Mapping[str, m.Plain], deadline: float) -> int:
        """Ask a worker to run a method; the call's id."""
        message = m.Call(self._next_id, method, args)
        self._next_id += 1
        self._calls[message.call_id] = _Call(worker, message, deadline)
        self._outbox.to_worker(worker, message)
        return message.call_id

    def answer(self, worker: Worker, reply: m.Reply) -> None:
        """A worker has replied; to a call that is over, or another's, this means nothing."""
        call = self._calls.get(reply.call_id)
        if call is not None and call.worker is worker:
            del self._calls[reply.call_id]
            self._outbox.tell(ev.CallReplied(worker.slot, reply.call_id, reply.ok, reply.result))

    def say_again(self, worker: Worker) -> None:
        """Send a worker its open calls; those that it knows change nothing."""
        for call in self._calls.values():
            if call.worker is worker:
                self._outbox.to_worker(worker, call.message)

    def expire(self, now: float) -> None:
        """Calls that have waited long enough fail."""
        for call in [call for call in self._calls.values() if now >= call.deadline]:
            self._fail(call, "timed out")

    def lose(self, worker: Worker, reason: str) -> None:
        """A worker is gone, and its calls fail."""
        for call in [call for call in self._calls.values() if call.worker is worker]:
            self._fail(call, f"the worker was lost: {reason}")

    def _fail(self, call: _Call, reason: str) -> None:
        del self._calls[call.message.call_id]
        self._outbox.tell(ev.CallReplied(call.worker.slot, call.message.call_id, False, reason))
