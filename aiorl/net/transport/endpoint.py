"""Contract of the endpoints of both sides: frames in, frames out, and plain words about the connection.

Both (`zmq_learner`, `zmq_worker`) are driven by callbacks on the running asyncio loop; neither knows what the frames
mean. Their users set the callbacks before ``start``.

- A callback gets frames it may keep: memoryviews that stay valid as long as they are referenced. They may
  be read-only.
- Frames handed to ``send`` or ``broadcast`` belong to the endpoint: large ones are not copied, so the
  memory below them must not change afterwards.
- ``send`` never blocks and never drops in silence: it returns False (worker: not taken, try again after
  ``wait_writable``) or reports the peer's end as an event (learner).
- A worker's ``CONNECTED`` comes when both channels are up and the subscription is in force. A broadcast made after the
  learner has read what the worker sends from then on reaches it, unless the worker is too slow for broadcasts.
- A connection over which nothing is heard for ``dead_after_s`` has ended, on both sides; a worker then connects
  again. So their users have to say something, over both channels, more often than that: sessions have heartbeats.
- After ``DISCONNECTED`` nothing of the old connection is delivered; whatever was not acknowledged must be
  sent again after the next ``CONNECTED``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self, TypeAlias

from aiorl.config.worker import TransportConfig

Buffer: TypeAlias = bytes | bytearray | memoryview

_DEAD_AFTER_S = 10.0


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


@dataclass(frozen=True, slots=True)
class Event:
    """Something about a connection.

    Attributes:
        kind: what happened.
        reason: one plain sentence for a person.
        peer: routing id of the peer, b"" while unknown (a peer is known from its first message on).
        address: "host:port" of the other side, "" where it can't be told.
    """

    kind: EventKind
    reason: str = ""
    peer: bytes = b""
    address: str = ""


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
        send_messages: messages that wait per connection inside ZeroMQ on the way out.
        broadcast_messages: broadcasts that wait per subscriber before it misses some (and is told so).
        queue_messages: messages that wait in a worker's own send queue before ``send`` takes no more.
        peer_queue_messages: messages that wait for one peer in the learner's before that peer is cut off.
        queue_bytes: bytes that wait in either queue; one message is taken whatever its size.
        max_queued_bytes: bytes that wait in the learner's for all peers together; whose queue is largest is cut off.
        max_peers: connections accepted at a time, per port; fewer where the limit of open files allows no more.
        messages_per_turn: messages handled before other tasks of the loop get their turn.
        dead_after_s: silence after which a connection counts as broken, seconds.
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
    send_messages: int = 64
    broadcast_messages: int = 16
    queue_messages: int = 64
    peer_queue_messages: int = 4096
    queue_bytes: int = 256 << 20
    max_queued_bytes: int = 1 << 30
    max_peers: int = 4096
    messages_per_turn: int = 64
    dead_after_s: float = _DEAD_AFTER_S
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
            dead_after_s=max(_DEAD_AFTER_S, transport.heartbeat_timeout_s, 2 * transport.reconnect_max_s),
        )


@dataclass(slots=True)
class EndpointStats:
    """A learner's counters since the start, and queue depth now.

    Attributes:
        bytes_in: payload bytes delivered to callbacks.
        bytes_out: payload bytes handed to the transport.
        queued_messages: messages waiting in the endpoint's own send queues.
        rejected: messages thrown away because they broke a limit.
        refused: handshakes that failed, and connections that never made one.
        dropped: peers that were cut off.
    """

    bytes_in: int = 0
    bytes_out: int = 0
    queued_messages: int = 0
    rejected: int = 0
    refused: int = 0
    dropped: int = 0
