"""What a learner has to say and to tell until its shell takes it."""

from __future__ import annotations

from typing import Final, TypeAlias

from aiorl.protocol import events as ev
from aiorl.protocol.roster import Worker
from aiorl.wire import messages as m

__all__ = ["BROADCAST", "Outbox", "Target"]

Target: TypeAlias = bytes | None
"""Whom a message is for: a peer, or BROADCAST."""
BROADCAST: Final = None


class Outbox:
    """Messages and events, in order. Acknowledgements are put together, one for each worker.

    What waits here is what a turn's messages have led to, a few for each: the shell takes it after each turn.
    """

    def __init__(self) -> None:
        self._messages: list[tuple[Target, m.DownMessage]] = []
        self._events: list[ev.LearnerEvent] = []
        self._ack_due: list[Worker] = []

    def to_peer(self, peer: bytes, message: m.DownMessage) -> None:
        """Say something over a connection, whoever is there."""
        self._messages.append((peer, message))

    def to_all(self, message: m.DownMessage) -> None:
        """Say something to all that listen."""
        self._messages.append((BROADCAST, message))

    def to_worker(self, worker: Worker, message: m.DownMessage) -> None:
        """To a worker without connection nothing is sent: it hears all that matters when it comes back."""
        if worker.peer is not None:
            self._messages.append((worker.peer, message))

    def ack(self, worker: Worker) -> None:
        """The worker will hear how far its fragments have come."""
        if not worker.ack_due:
            worker.ack_due = True
            self._ack_due.append(worker)

    def forget_ack(self, worker: Worker) -> None:
        """The worker is gone."""
        if worker.ack_due:
            worker.ack_due = False
            self._ack_due.remove(worker)

    def tell(self, event: ev.LearnerEvent) -> None:
        """Something has happened."""
        self._events.append(event)

    def take_messages(self) -> list[tuple[Target, m.DownMessage]]:
        """All messages, acknowledgements last; they are gone from here."""
        messages, self._messages = self._messages, []
        for worker in self._ack_due:
            worker.ack_due = False
            if worker.peer is not None:
                messages.append((worker.peer, m.Ack(worker.last_seq)))
        self._ack_due.clear()
        return messages

    def take_events(self) -> list[ev.LearnerEvent]:
        """All events; they are gone from here."""
        events, self._events = self._events, []
        return events
