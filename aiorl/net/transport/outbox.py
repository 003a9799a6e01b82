"""Messages of a worker's process that its endpoint has not taken yet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from aiorl.net.transport.endpoint import Buffer, WorkerEndpoint
from aiorl.process.tasks import Tasks


class Outbox:
    """Line of messages that are sent in order, as the endpoint has room for them.

    Args:
        endpoint: sends them.
        tasks: owner of the task that waits for room.
        on_empty: called when all messages that had to wait are sent.
    """

    def __init__(
        self, endpoint: WorkerEndpoint, tasks: Tasks, on_empty: Callable[[], None] = lambda: None
    ) -> None:
        self._endpoint = endpoint
        self._tasks = tasks
        self._on_empty = on_empty
        self._waiting: deque[Sequence[Buffer]] = deque()
        self._sender: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Return the number of messages that wait."""
        return len(self._waiting)

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send a message now or, behind those that wait, later; not at all without a connection."""
        if not self._waiting and self._endpoint.send(frames):
            return
        if not self._endpoint.connected:
            return
        self._waiting.append(frames)
        if self._sender is None or self._sender.done():
            self._sender = self._tasks.start(self._send_waiting(), "send")

    def clear(self) -> None:
        """Drop the messages that wait."""
        self._waiting.clear()

    async def _send_waiting(self) -> None:
        while self._waiting:
            await self._endpoint.wait_writable()
            while self._waiting and self._endpoint.send(self._waiting[0]):
                self._waiting.popleft()
        self._on_empty()
