"""What an endpoint is: frames in, frames out, and plain words about the connection.

A learner has one `LearnerEndpoint`; a worker has one `WorkerEndpoint`. Both are driven by callbacks on the
running asyncio loop; neither knows what the frames mean. Rules that hold for every implementation:

- A callback gets frames it may keep: memoryviews that stay valid as long as they are referenced. They may
  be read-only.
- Frames handed to ``send`` or ``broadcast`` belong to the endpoint: large ones are not copied, so the
  memory below them must not change afterwards.
- ``send`` never blocks and never drops in silence: it returns False (worker: not taken, try again after
  ``wait_writable``) or reports the peer's end as an event (learner).
- A worker's ``CONNECTED`` comes when both channels are up and the subscription is in force: every broadcast
  made after the learner has read what the worker sends from then on reaches it, or is reported as a ``GAP``.
- A connection over which nothing is heard for ``dead_after_s`` has ended, on both sides; a worker then connects
  again. Endpoints show each other that they live where their users say nothing for longer than ``heartbeat_s``.
- After ``DISCONNECTED`` nothing of the old connection is delivered; whatever was not acknowledged must be
  sent again after the next ``CONNECTED``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, Self, TypeAlias

from aiorl.config.worker import TransportConfig

Buffer: TypeAlias = bytes | bytearray | memoryview


class EventKind(StrEnum):
    """What happened to a connection; which side sees it is told in brackets."""

    CONNECTED = "connected"
    """Both channels are up: say hello [worker]. A peer has opened a connection [learner; no peer id yet]."""
    DISCONNECTED = "disconnected"
    """The connection is gone; all that came over it has been delivered [both]."""
    SILENT = "silent"
    """As DISCONNECTED: we have ended the connection, since nothing was heard over it for too long [learner]."""
    REFUSED = "refused"
    """A handshake failed; ``reason`` says why in plain words [both]."""
    WAITING = "waiting"
    """Not connected yet, still trying; ``reason`` says what for [worker]."""
    DROPPED = "dropped"
    """We cut the peer off: its queue overflowed, it broke a limit, or its key was withdrawn [learner]."""
    GAP = "gap"
    """Broadcasts were missed (``count`` of them, 0 if unknown): ask for a snapshot [worker]."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something about a connection.

    Attributes:
        kind: what happened.
        reason: one plain sentence for a person.
        peer: routing id of the peer, b"" while unknown (a peer is known from its first message on).
        address: "host:port" of the other side, "" where it can't be told.
        count: how many, for kinds that count.
    """

    kind: EventKind
    reason: str = ""
    peer: bytes = b""
    address: str = ""
    count: int = 0


@dataclass(frozen=True, slots=True)
class EndpointLimits:
    """Every bound an endpoint keeps.

    Attributes:
        max_frame_bytes: largest single frame taken in; a peer that exceeds it is disconnected.
        max_frames: most frames in one message.
        max_message_bytes: largest message, all frames together.
        receive_messages: messages that wait inside a worker's ZeroMQ before the learner's is held back.
        max_unread_bytes: what peers have sent and the learner has not read, of all connections together; those with the
            most of it are cut off. Of one it is twice ``max_message_bytes``.
        max_unread_messages: the same in messages of one connection, about; each takes memory beside its bytes.
        send_messages: messages that wait per connection inside ZeroMQ on the way out.
        broadcast_messages: broadcasts that wait per subscriber before it misses some (and is told so).
        queue_messages: messages that wait in a worker's own send queue before ``send`` takes no more.
        peer_queue_messages: messages that wait for one peer in the learner's before that peer is cut off.
        queue_bytes: bytes that wait in either queue; one message is taken whatever its size.
        max_queued_bytes: bytes that wait in the learner's for all peers together; whose queue is largest is cut off.
        max_peers: connections accepted at a time, per port; fewer where the limit of open files allows no more.
        messages_per_turn: messages handled before other tasks of the loop get their turn.
        heartbeat_s: an endpoint that has nothing else to say shows this often that it lives, seconds.
        dead_after_s: silence after which a connection counts as broken, seconds; see `silence_s`.
        handshake_s: longest handshake, seconds.
        retry_s: first pause before a refused connection is tried again, seconds; it doubles each time.
        max_retry_s: longest such pause, seconds.
        tick_s: time between two safety looks at every socket, seconds.
    """

    max_frame_bytes: int = 256 << 20
    max_frames: int = 1024
    max_message_bytes: int = 256 << 20
    receive_messages: int = 16
    max_unread_bytes: int = 1 << 30
    max_unread_messages: int = 1 << 14
    send_messages: int = 64
    broadcast_messages: int = 16
    queue_messages: int = 64
    peer_queue_messages: int = 4096
    queue_bytes: int = 256 << 20
    max_queued_bytes: int = 1 << 30
    max_peers: int = 4096
    messages_per_turn: int = 64
    heartbeat_s: float = 2.0
    dead_after_s: float = 10.0
    handshake_s: float = 10.0
    retry_s: float = 0.5
    max_retry_s: float = 10.0
    tick_s: float = 0.5

    @classmethod
    def of(cls, transport: TransportConfig) -> Self:
        """The bounds that a configuration sets; the others are the default ones."""
        return cls(
            max_frame_bytes=transport.max_message_bytes,
            max_message_bytes=transport.max_message_bytes,
            send_messages=transport.send_queue_length,
            dead_after_s=transport.heartbeat_timeout_s,
        )

    @property
    def silence_s(self) -> float:
        """Silence after which a connection is given up: ``dead_after_s``, but never fewer than 5 signs of life."""
        return max(self.dead_after_s, 5 * self.heartbeat_s)


@dataclass(slots=True)
class EndpointStats:
    """Counters since the start, and queue depths now.

    Attributes:
        bytes_in: payload bytes delivered to callbacks, broadcasts included.
        bytes_out: payload bytes handed to the transport.
        queued_messages: messages waiting in the endpoint's own send queues.
        peers: connections with a known peer (learner); 1 while connected (worker).
        rejected: messages thrown away because they broke a limit.
        refused: handshakes that failed, and connections that never made one.
        dropped: peers that were cut off.
        reconnects: connections made after the first one (worker).
        missed_broadcasts: broadcasts found missing (worker).
    """

    bytes_in: int = 0
    bytes_out: int = 0
    queued_messages: int = 0
    peers: int = 0
    rejected: int = 0
    refused: int = 0
    dropped: int = 0
    reconnects: int = 0
    missed_broadcasts: int = 0


class LearnerEndpoint(Protocol):
    """The learner's side: addressed messages both ways, and one broadcast to all.

    Set the callbacks before ``start``.

    Attributes:
        on_message: called with (peer, frames, user_id); ``user_id`` is the public key that the peer proved
            (Z85), "" where no keys are in use.
        on_event: called with each `Event`.
    """

    on_message: Callable[[bytes, list[memoryview], str], None]
    on_event: Callable[[Event], None]

    @property
    def address(self) -> str:
        """Where workers connect to, "tcp://HOST:PORT"; valid after ``start``."""
        ...

    def start(self) -> None:
        """Bind and begin to receive; call it on the running loop. Raises ConfigError."""
        ...

    def send(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        """Send or queue one message for a peer; False if that peer is not connected (any more)."""
        ...

    def broadcast(self, frames: Sequence[Buffer]) -> None:
        """Send one message to every worker whose subscription is in force."""
        ...

    def drop(self, peer: bytes, reason: str) -> None:
        """Cut a peer off; it may connect again, as a new peer."""
        ...

    def has_unsent(self, peer: bytes) -> bool:
        """Whether a large message to a peer, or anything that waits for its connection, is still in our memory."""
        ...

    def host_of(self, peer: bytes) -> str:
        """Address of the host that a peer calls from, without its port; "" where that can't be told."""
        ...

    def stats(self) -> EndpointStats:
        """Counters now."""
        ...

    async def close(self, *, flush_s: float = 0.5) -> None:
        """Give goodbyes up to ``flush_s`` seconds to leave, then free everything, in bounded time.

        To be called by one task, once; a cancelled close leaves sockets closed but may still be freeing them.
        """
        ...


class WorkerEndpoint(Protocol):
    """The worker's side; it connects, and connects again, by itself.

    Set the callbacks before ``start``.

    Attributes:
        on_message: called with the frames of a message addressed to this worker.
        on_broadcast: called with the frames of a broadcast, in the order they were made.
        on_event: called with each `Event`.
    """

    on_message: Callable[[list[memoryview]], None]
    on_broadcast: Callable[[list[memoryview]], None]
    on_event: Callable[[Event], None]

    @property
    def connected(self) -> bool:
        """Whether both channels are up."""
        ...

    def start(self) -> None:
        """Begin to connect; call it on the running loop. Raises ConfigError."""
        ...

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Send or queue one message; False if it was not taken (not connected, or the queue is full)."""
        ...

    async def wait_writable(self) -> None:
        """Wait until ``send`` would take a message. Cancelling it leaves nothing behind.

        Raises:
            EndpointClosed: the endpoint was closed meanwhile.
        """
        ...

    def stats(self) -> EndpointStats:
        """Counters now."""
        ...

    async def close(self, *, flush_s: float = 0.5) -> None:
        """As `LearnerEndpoint.close`."""
        ...
