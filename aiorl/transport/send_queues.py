"""Messages that wait until their peer's connection takes more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from aiorl.transport.endpoint import Buffer
from aiorl.transport.pump import total_bytes

__all__ = ["SendQueues"]


class SendQueues:
    """One bounded queue for each peer that is busy.

    Args:
        max_messages: most messages that wait for one peer.
        max_bytes: most bytes that wait for one peer; a single message is taken whatever its size.
    """

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._queues: dict[bytes, deque[Sequence[Buffer]]] = {}
        self._bytes: dict[bytes, int] = {}

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._queues

    def __len__(self) -> int:
        return len(self._queues)

    @property
    def num_messages(self) -> int:
        """Messages that wait, for all peers."""
        return sum(map(len, self._queues.values()))

    @property
    def num_bytes(self) -> int:
        """Bytes that wait, for all peers."""
        return sum(self._bytes.values())

    def waiting(self, peer: bytes) -> int:
        """Messages that wait for one peer."""
        return len(self._queues.get(peer, ()))

    def put(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        """Take a message; False if that peer's queue is full."""
        queue = self._queues.setdefault(peer, deque())
        num_bytes = self._bytes.get(peer, 0) + total_bytes(frames)
        if queue and (len(queue) >= self._max_messages or num_bytes > self._max_bytes):
            return False
        queue.append(frames)
        self._bytes[peer] = num_bytes
        return True

    def forget(self, peer: bytes) -> None:
        """Throw away what waits for a peer."""
        self._queues.pop(peer, None)
        self._bytes.pop(peer, None)

    def flush(self, send: Callable[[bytes, Sequence[Buffer]], bool | None]) -> None:
        """Hand over what ``send(peer, frames)`` takes: True sent, None busy still, False no such peer any more."""
        for peer, queue in list(self._queues.items()):
            sent: bool | None = True
            while queue and (sent := send(peer, queue[0])):
                self._bytes[peer] -= total_bytes(queue.popleft())
            if not queue or sent is False:
                self.forget(peer)
