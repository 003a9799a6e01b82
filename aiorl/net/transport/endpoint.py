"""Contract of both endpoints: frames in, frames out, and plain descriptions of the connection.

An endpoint runs on the asyncio loop and calls callbacks; it does not know the meaning of the
frames. `zmq_learner` and `zmq_worker` have those over ZeroMQ, `inherited` those of a process and its
children. Users set the callbacks before ``start``.

- A callback can keep its frames: they are memoryviews that stay valid as long as they are
  referenced. They can be read-only.
- Frames passed to ``send`` or ``broadcast`` belong to the endpoint. Large ones are not copied, so
  their memory must not change afterwards.
- Over ZeroMQ, a connection ends after ``times.dead_after_s`` of silence on both sides; a worker then
  connects again. Users must therefore send more often than that over both channels; sessions send heartbeats.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, TypeAlias

from aiorl.errors import EndpointClosed
from aiorl.process.tasks import Tasks

if TYPE_CHECKING:
    from aiorl.config.worker import TransportConfig

Buffer: TypeAlias = bytes | bytearray | memoryview


def frame_bytes(frame: Buffer) -> int:
    """Return the size of a frame."""
    return frame.nbytes if isinstance(frame, memoryview) else len(frame)


def total_bytes(frames: Sequence[Buffer]) -> int:
    """Return the payload bytes of a message."""
    return sum(map(frame_bytes, frames))


class EventKind(StrEnum):
    """Events of a connection, with the side that sees each in brackets."""

    CONNECTED = "connected"
    """Both channels are up: say hello [worker]. A peer has opened a connection, still without peer
    id [learner]."""
    DISCONNECTED = "disconnected"
    """The connection is gone; all messages that arrived over it have been delivered [both]."""
    SILENT = "silent"
    """Like DISCONNECTED, but we ended the connection because it was silent for too long
    [learner]."""
    REFUSED = "refused"
    """A handshake failed; ``reason`` gives the cause in plain words [both]."""
    WAITING = "waiting"
    """Not connected yet, still trying; ``reason`` gives the cause [worker]."""
    DROPPED = "dropped"
    """We cut the peer off: its queue overflowed, it broke a limit, or its key was withdrawn
    [learner]."""


class Event(NamedTuple):
    """An event of a connection.

    Attributes:
        kind: type of the event.
        reason: one plain sentence for a person.
        peer: routing id of the peer, b"" before its first message.
        address: "host:port" of the other side, "" if unknown.
    """

    kind: EventKind
    reason: str = ""
    peer: bytes = b""
    address: str = ""


class EndpointTimes(NamedTuple):
    """Times of an endpoint, in seconds.

    Attributes:
        dead_after_s: silence after which a connection counts as broken.
        handshake_s: longest handshake.
        retry_s: pause before a refused connection is tried again; it doubles each time.
        max_retry_s: longest of these pauses.
        tick_s: time between two safety checks of every socket.
    """

    dead_after_s: float = 10.0
    handshake_s: float = 10.0
    retry_s: float = 0.5
    max_retry_s: float = 10.0
    tick_s: float = 0.5


class EndpointLimits(NamedTuple):
    """Bounds of an endpoint.

    Attributes:
        max_frame_bytes: largest frame accepted; a peer that exceeds it is disconnected.
        max_frames: most frames in one message.
        max_message_bytes: largest message, all frames together.
        receive_messages: messages that wait inside a worker's ZeroMQ before it stops reading from
            the learner.
        max_unread_bytes: unread bytes of all the learner's connections together; those with the
            most are cut off. The bound for one connection is twice ``max_message_bytes``.
        send_messages: outgoing messages that wait inside ZeroMQ for each connection.
        broadcast_messages: broadcasts that wait for each subscriber before it misses some and
            notices it.
        queue_messages: messages that wait in a worker's own send queue before ``send`` refuses
            more.
        peer_queue_messages: messages that wait for one peer in the learner before that peer is cut
            off.
        queue_bytes: bytes that wait in either queue; one message of any size is always accepted.
        max_queued_bytes: bytes that wait in the learner for all peers; the peer with the largest
            queue is cut off.
        max_peers: connections at a time on each port, fewer if the limit of open files is lower.
        messages_per_turn: messages handled before other tasks of the loop get their turn.
        times: when connections are checked, ended and tried again.
    """

    max_frame_bytes: int = 256 << 20
    max_frames: int = 1024
    max_message_bytes: int = 256 << 20
    receive_messages: int = 16
    max_unread_bytes: int = 1 << 30
    send_messages: int = 64
    broadcast_messages: int = 16
    queue_messages: int = 64
    peer_queue_messages: int = 4096
    queue_bytes: int = 256 << 20
    max_queued_bytes: int = 1 << 30
    max_peers: int = 4096
    messages_per_turn: int = 64
    times: EndpointTimes = EndpointTimes()

    @classmethod
    def of(cls, transport: TransportConfig) -> Self:
        """Return the configured bounds, with defaults for all others."""
        dead_after_s = max(
            EndpointTimes().dead_after_s,
            transport.heartbeat_timeout_s,
            2 * transport.reconnect_max_s,
        )
        return cls(
            max_frame_bytes=transport.max_message_bytes,
            max_message_bytes=transport.max_message_bytes,
            send_messages=transport.send_queue_length,
            times=EndpointTimes(dead_after_s),
        )


@dataclass(slots=True, eq=False)
class EndpointStats:
    """A learner's counters since its start, and its current queue length.

    Attributes:
        bytes_in: payload bytes delivered to callbacks.
        bytes_out: payload bytes passed to the transport.
        queued_messages: messages that wait in the endpoint's own send queues.
        rejected: messages discarded because they exceeded a limit.
        refused: failed handshakes, and connections without one.
        dropped: peers that were cut off.
    """

    bytes_in: int = 0
    bytes_out: int = 0
    queued_messages: int = 0
    rejected: int = 0
    refused: int = 0
    dropped: int = 0


@dataclass(slots=True, eq=False)
class Lifetime:
    """State of an endpoint: not started, open or closed.

    Attributes:
        is_started: True from ``start`` on.
        is_closed: True from ``close`` on.
    """

    is_started: bool = False
    is_closed: bool = False

    @property
    def is_open(self) -> bool:
        """True between the two."""
        return self.is_started and not self.is_closed

    def check_open(self) -> None:
        """Check that the endpoint can be used.

        Raises:
            EndpointClosed: when it is closed, or was not started.
        """
        if self.is_closed:
            raise EndpointClosed("the endpoint is closed")
        if not self.is_started:
            raise EndpointClosed("the endpoint was not started")


class LearnerEndpoint(Protocol):
    """The learner's side: addressed messages in both directions, and broadcasts to all workers.

    Attributes:
        on_message: called with (peer, frames, user_id); ``user_id`` is the public key that the peer
            proved (Z85), "" without keys. Reply with ``send``, to this peer.
        on_event: called with each `Event`. After DISCONNECTED or SILENT, forget the peer: it never
            comes back; its worker connects again as a new peer.
        is_registered: peer -> True if it is a registered worker; asked when a message is sent to
            it. Until then it may send only small messages, and few of those sent to it wait if it
            does not read them.
    """

    on_message: Callable[[bytes, list[memoryview], str], None]
    on_event: Callable[[Event], None]
    is_registered: Callable[[bytes], bool]

    @property
    def address(self) -> str:
        """Address that workers connect to; valid after `start`."""

    @property
    def local_address(self) -> str:
        """Address for workers that the learner itself starts; valid after `start`."""

    def start(self) -> None:
        """Begin to listen and to receive; call this on the running loop.

        Raises:
            ConfigError: when it cannot listen at its address; make another endpoint to try another
                address.
            SecurityError: when there is no place for sockets that only this user's workers can
                reach.
        """

    def send(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        """Send one message to a peer, or queue it while its connection is busy; never waits.

        A message is never dropped silently: a peer that does not read its messages is cut off,
        which an event reports.

        Returns:
            False if that peer is not connected or no longer connected: do not try again.

        Raises:
            EndpointClosed: after `close`.
        """

    def broadcast(self, frames: Sequence[Buffer]) -> None:
        """Send one message to every worker with a subscription in force; never waits.

        A worker that is too slow misses it. Number your broadcasts, and answer a worker that asks
        for what it has missed with ``send``.

        Raises:
            EndpointClosed: after `close`.
        """

    def drop(self, peer: bytes, reason: str) -> None:
        """Cut a peer off: ignore all further messages, and give those already sent to it half a
        second to leave.

        Send it the reason first, if it should know. DROPPED and then the end of its connection are
        reported.
        """

    def has_unsent(self, peer: bytes) -> bool:
        """Return whether our memory still holds a large message to a peer, or a message that waits
        for it; if so, send it no other large one yet.
        """

    def host_of(self, peer: bytes) -> str:
        """Return the address of the host of a peer, without the port, or "" if unknown."""

    def stats(self) -> EndpointStats:
        """Return the current counters."""

    async def close(self, *, flush_s: float = 0.5) -> None:
        """Give goodbyes up to ``flush_s`` seconds to leave, then free everything, which takes at
        most 2 s more. Further calls do nothing.
        """


class WorkerEndpoint(Protocol):
    """A worker's side, which connects, and reconnects, by itself.

    Attributes:
        on_message: called with the frames of a message addressed to this worker.
        on_broadcast: called with the frames of a broadcast, in sending order.
        on_event: called with each `Event`. CONNECTED follows when both channels are up and the
            subscription is in force: say hello then. From the moment the learner reads the worker's
            next message, all broadcasts reach the worker, unless it is too slow for them. After
            DISCONNECTED, no message of the old connection is delivered: send all unacknowledged
            messages again after the next CONNECTED.
    """

    on_message: Callable[[list[memoryview]], None]
    on_broadcast: Callable[[list[memoryview]], None]
    on_event: Callable[[Event], None]

    @property
    def address(self) -> str:
        """Address of the learner that was tried last."""

    @property
    def connected(self) -> bool:
        """True if both channels are up."""

    @property
    def is_local(self) -> bool:
        """True if messages stay on this host, so that compressing them would take more time than it
        saves.
        """

    def start(self) -> None:
        """Begin to connect; call this on the running loop."""

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Send one message, or queue it while the connection is busy; never waits.

        Returns:
            False if it was not accepted: not connected, or the queue is full. Keep it, and try again
            after `wait_writable`.

        Raises:
            EndpointClosed: after `close`.
        """

    async def wait_writable(self) -> None:
        """Wait until the endpoint is connected and its queue is empty. A cancelled call leaves
        nothing behind.

        Raises:
            EndpointClosed: when the endpoint is closed meanwhile.
        """

    async def close(self, *, flush_s: float = 0.5) -> None:
        """Give goodbyes up to ``flush_s`` seconds to leave, then free everything, which takes at
        most 2 s more. Further calls do nothing.
        """


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
