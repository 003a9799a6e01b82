"""Calls of a learner to its workers, on both sides: each is run at most once, and ends with an
answer or a loss.

Messages can be lost with a connection. After each welcome, the learner therefore repeats the calls
that it has sent and that have no answer; the worker runs only those that it does not know.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from aiorl.net.protocol.rates import Newest
from aiorl.net.protocol.roster import Worker
from aiorl.net.wire import messages as m

STACKS: Final = "stacks"
"""Method that every worker process answers at once: the stack of each of its threads."""
_MAX_IN_FLIGHT: Final = 64
_MAX_BYTES: Final = 64 << 20
"""Limits of the calls that a worker has not answered; one of any size is let through."""
_MAX_RUNNING: Final = 256
"""Calls that a worker accepts before it has answered; a learner of ours sends fewer."""
_REMEMBERED: Final = 256
"""Newest answered calls that a worker remembers; a learner of ours repeats fewer."""


@dataclass(slots=True, eq=False)
class _Call:
    message: m.Call
    num_bytes: int


@dataclass(slots=True)
class _OfWorker:
    """Calls of one worker.

    Attributes:
        sent: calls without an answer, by number.
        waiting: calls that have not been sent, in order.
        bytes_sent: size of the arguments of those sent.
    """

    sent: dict[int, _Call] = field(default_factory=dict)
    waiting: deque[_Call] = field(default_factory=deque)
    bytes_sent: int = 0

    def has_room(self) -> bool:
        """Return whether the next waiting call can be sent."""
        if not self.sent:
            return True
        is_small = self.bytes_sent + self.waiting[0].num_bytes <= _MAX_BYTES
        return is_small and len(self.sent) < _MAX_IN_FLIGHT

    def send(self, call: _Call) -> m.Call:
        """Take note that a call is sent, and return its message."""
        self.sent[call.message.call_id] = call
        self.bytes_sent += call.num_bytes
        return call.message


class OpenCalls:
    """The learner's end: its calls to workers that have not ended."""

    def __init__(self) -> None:
        self._next_id = 1
        self._by_worker: dict[Worker, _OfWorker] = {}

    def open(self, worker: Worker, method: str, args: Mapping[str, m.Plain], num_bytes: int) -> int:
        """Add a call, which `to_send` returns once the worker has room for it; return its
        number.
        """
        call_id = self._next_id
        self._next_id += 1
        call = _Call(m.Call(call_id, method, args), num_bytes)
        calls = self._by_worker.setdefault(worker, _OfWorker())
        # a worker that answers nothing else still answers this
        if method == STACKS:
            calls.waiting.appendleft(call)
        else:
            calls.waiting.append(call)
        return call_id

    def to_send(self, worker: Worker) -> list[m.Call]:
        """Return the calls that can be sent to a worker now, in order."""
        calls = self._by_worker.get(worker)
        messages: list[m.Call] = []
        while calls is not None and calls.waiting:
            is_urgent = calls.waiting[0].message.method == STACKS
            if not (is_urgent or calls.has_room()):
                break
            messages.append(calls.send(calls.waiting.popleft()))
        return messages

    def unanswered(self, worker: Worker) -> list[m.Call]:
        """Return the calls that were sent to a worker and have no answer."""
        calls = self._by_worker.get(worker)
        return [] if calls is None else [call.message for call in calls.sent.values()]

    def answer(self, call_id: int, worker: Worker) -> m.Call | None:
        """End a call, and return it; None if that worker has no such call."""
        calls = self._by_worker.get(worker)
        call = None if calls is None else calls.sent.pop(call_id, None)
        if calls is None or call is None:
            return None
        calls.bytes_sent -= call.num_bytes
        return call.message

    def forget(self, worker: Worker) -> list[m.Call]:
        """Remove the calls of a lost worker, and return them, sent or not."""
        calls = self._by_worker.pop(worker, _OfWorker())
        return [call.message for call in (*calls.sent.values(), *calls.waiting)]


class ReceivedCalls:
    """The worker's end: the calls that it has received in one registration life.

    Attributes:
        unsent: answers that can't be sent before the next welcome.
    """

    def __init__(self) -> None:
        self.unsent: list[m.Reply] = []
        self._running: set[int] = set()
        self._answered: Newest[int, None] = Newest(_REMEMBERED)

    def is_running(self, call_id: int) -> bool:
        """Return whether a call was begun and has no answer."""
        return call_id in self._running

    def refusal(self, call_id: int, slot: int) -> m.Reply | None:
        """Return the answer to a call that is not run; None if it can be begun.

        Args:
            call_id: number of the call.
            slot: index of this worker.
        """
        if call_id in self._answered:
            reason = "the connection ended before it arrived"
            return m.Reply(call_id, False, m.lost(f"the answer of worker {slot}", reason))
        if len(self._running) >= _MAX_RUNNING:
            return m.Reply(call_id, False, m.failed("RuntimeError", "too many calls"))
        return None

    def begin(self, call_id: int) -> None:
        """Take note that a call is run."""
        self._running.add(call_id)

    def end(self, call_id: int) -> None:
        """Take note that a call is answered."""
        self._running.remove(call_id)
        self._answered[call_id] = None
