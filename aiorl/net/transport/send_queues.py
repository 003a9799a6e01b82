"""Messages that wait until their connection takes more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from aiorl.net.transport.endpoint import Buffer
from aiorl.net.transport.pump import total_bytes

__all__ = ["SendQueue", "SendQueues"]


class SendQueue:
    """The bounded queue of one connection.

    Args:
        max_messages: most messages that wait.
        max_bytes: most bytes that wait; a single message is taken whatever its size.
    """

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._messages: deque[Sequence[Buffer]] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def num_bytes(self) -> int:
        """Bytes that wait."""
        return self._bytes

    def put(self, frames: Sequence[Buffer]) -> bool:
        """Take a message; False if the queue is full."""
        num_bytes = self._bytes + total_bytes(frames)
        if self._messages and (len(self) >= self._max_messages or num_bytes > self._max_bytes):
            return False
        self._messages.append(frames)
        self._bytes = num_bytes
        return True

    def flush(self, send: Callable[[Sequence[Buffer]], bool | None]) -> bool | None:
        """Hand over messages as long as ``send`` takes them; returns what it said last, True for an empty queue."""
        sent: bool | None = True
        while self._messages and (sent := send(self._messages[0])):
            self._bytes -= total_bytes(self._messages.popleft())
        return sent

    def clear(self) -> None:
        """Throw away what waits."""
        self._messages.clear()
        self._bytes = 0


class SendQueues:
    """One `SendQueue` for each peer that is busy.

    Attributes:
        num_bytes: bytes that wait, for all peers.
    """

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self.num_bytes = 0
        self._bounds = (max_messages, max_bytes)
        self._queues: dict[bytes, SendQueue] = {}

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._queues

    def __len__(self) -> int:
        return len(self._queues)

    @property
    def num_messages(self) -> int:
        """Messages that wait, for all peers."""
        return sum(map(len, self._queues.values()))

    def waiting(self, peer: bytes) -> int:
        """Messages that wait for one peer."""
        return len(self._queues.get(peer, ()))

    @property
    def largest(self) -> bytes:
        """The peer that most bytes wait for; there must be one that is busy."""
        return max(self._queues, key=lambda peer: self._queues[peer].num_bytes)

    def put(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        """Take a message; False if that peer's queue is full."""
        if peer not in self._queues:
            self._queues[peer] = SendQueue(*self._bounds)
        queue = self._queues[peer]
        before = queue.num_bytes
        is_taken = queue.put(frames)
        self.num_bytes += queue.num_bytes - before
        return is_taken

    def forget(self, peer: bytes) -> None:
        """Throw away what waits for a peer."""
        queue = self._queues.pop(peer, None)
        if queue is not None:
            self.num_bytes -= queue.num_bytes

    def flush(self, send: Callable[[bytes, Sequence[Buffer]], bool | None]) -> None:
        """Hand over what ``send(peer, frames)`` takes: True sent, None busy still, False no such peer any more."""
        for peer, queue in list(self._queues.items()):
            before = queue.num_bytes
            sent = queue.flush(partial(send, peer))
            self.num_bytes += queue.num_bytes - before
            if sent is not None:
                self.forget(peer)
