"""Endpoints of a process and of those that it starts, each with a Unix socket that it inherits.

A message passes through the kernel alone. ZeroMQ has a thread on each side, and waking those takes
ten times as long as the rest of a small message.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from aiorl.net.transport.endpoint import (
    Buffer,
    EndpointLimits,
    EndpointStats,
    Event,
    EventKind,
    Lifetime,
    total_bytes,
)
from aiorl.net.transport.message_stream import MessageStream, StreamMessage
from aiorl.net.transport.system import keep_message_buffers

_ADDRESS: Final = "a socket between parent and child"
_PEER_BYTES: Final = 16
_LAST_READS: Final = 64
_PART_AFTER_S: Final = 0.5
_KEPT_BYTES: Final = 16 << 20
"""Freed memory that a child keeps: it has few messages at a time."""


class ChildrenEndpoint:
    """Endpoint of a process for those that it starts (see `LearnerEndpoint`).

    These are trusted: they count as registered.

    Args:
        limits: the bounds.

    Attributes:
        on_message: called with (peer, frames, ""); reply with ``send``, to this peer.
        on_event: called with each `Event`.
        is_registered: not asked.
    """

    def __init__(self, limits: EndpointLimits) -> None:
        self.on_message: Callable[[bytes, list[memoryview], str], None] = (
            lambda peer, frames, user_id: None
        )
        self.on_event: Callable[[Event], None] = lambda event: None
        self.is_registered: Callable[[bytes], bool] = lambda peer: True
        self._limits = limits
        self._streams: dict[bytes, MessageStream] = {}
        self._parting: dict[bytes, MessageStream] = {}  # of peers that were cut off
        self._stats = EndpointStats()
        self._lifetime = Lifetime()

    @property
    def address(self) -> str:
        """Text for people: no one connects to it."""
        return _ADDRESS

    @property
    def local_address(self) -> str:
        """See `address`."""
        return _ADDRESS

    def start(self) -> None:
        """Allow connections."""
        keep_message_buffers()
        self._lifetime.is_started = True

    def connect(self) -> tuple[bytes, socket.socket]:
        """Make a connection, as a new peer; CONNECTED is reported before this returns.

        Returns:
            The peer, and the child's end, for one process to inherit; close it here once that has
            started.

        Raises:
            EndpointClosed: after `close`.
            OSError: there are too many open files.
        """
        self._lifetime.check_open()
        ours, theirs = socket.socketpair()
        # peers of other endpoints choose their names themselves, and must not hit on this one
        peer = secrets.token_bytes(_PEER_BYTES)
        self._streams[peer] = MessageStream(
            ours,
            self._limits,
            on_message=functools.partial(self._receive, peer),
            on_end=functools.partial(self._ended, peer),
        )
        self.on_event(Event(EventKind.CONNECTED, address=_ADDRESS))
        return peer, theirs

    def forget(self, peer: bytes) -> None:
        """Take the last messages of a process that has ended, and close its connection, which forks
        of the process may hold open; this is not reported.
        """
        stream = self._streams.pop(peer, None)
        if stream is None:
            return
        for _ in range(_LAST_READS):
            if not stream.read():
                break
        stream.close()

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._streams

    def send(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        """Send one message to a peer, or keep it until the peer reads.

        A peer for which too much waits is cut off, which an event reports.

        Returns:
            False if that peer is not connected.

        Raises:
            EndpointClosed: after `close`.
        """
        self._lifetime.check_open()
        stream = self._streams.get(peer)
        if stream is None:
            return False
        self._stats.bytes_out += total_bytes(frames)
        stream.send(frames)
        if stream.num_unsent > 1 and not self._is_within_bounds(stream):
            self.drop(peer, "it does not read its messages")
        return True

    def broadcast(self, frames: Sequence[Buffer]) -> None:
        """Send one message to every peer; a peer misses it while too much waits for it.

        Raises:
            EndpointClosed: after `close`.
        """
        self._lifetime.check_open()
        self._stats.bytes_out += total_bytes(frames)
        for stream in self._streams.values():
            has_room = stream.num_unsent_broadcasts < self._limits.broadcast_messages
            if has_room and stream.num_unsent_bytes <= self._limits.queue_bytes:
                stream.send(frames, is_broadcast=True)

    def drop(self, peer: bytes, reason: str) -> None:
        """Cut a peer off: ignore all further messages, and give those already sent to it half a
        second to leave.
        """
        stream = self._streams.pop(peer, None)
        if stream is None or not self._lifetime.is_open:
            return
        stream.stop_reading()
        self._stats.dropped += 1
        self._tell(EventKind.DROPPED, peer, reason)
        self._parting[peer] = stream
        asyncio.get_running_loop().call_later(_PART_AFTER_S, self._part, peer, reason)

    def has_unsent(self, peer: bytes) -> bool:
        """Return whether a message waits for a peer."""
        return peer in self._streams and self._streams[peer].num_unsent > 0

    def host_of(self, peer: bytes) -> str:
        """Return "": all peers are on this host."""
        return ""

    def stats(self) -> EndpointStats:
        """Return the current counters."""
        queued = sum(stream.num_unsent for stream in self._streams.values())
        return dataclasses.replace(self._stats, queued_messages=queued)

    async def close(self, *, flush_s: float = 0.5) -> None:
        """Give goodbyes up to ``flush_s`` seconds to leave, then end all connections."""
        if self._lifetime.is_open:
            await _until_sent([*self._streams.values(), *self._parting.values()], flush_s)
        self._lifetime.is_closed = True
        for streams in (self._streams, self._parting):
            for stream in streams.values():
                stream.close()
            streams.clear()

    def _is_within_bounds(self, stream: MessageStream) -> bool:
        """Return whether no more waits for a peer than may.

        A child of ours is no stranger: it may read slowly, and many may call it at once.
        """
        limits = self._limits
        return (
            stream.num_unsent <= limits.peer_queue_messages
            and stream.num_unsent_bytes <= limits.max_queued_bytes
        )

    def _receive(self, peer: bytes, message: StreamMessage) -> None:
        self._stats.bytes_in += sum(map(len, message.frames))
        self.on_message(peer, message.frames, "")

    def _ended(self, peer: bytes, reason: str) -> None:
        stream = self._streams.pop(peer, None)
        if stream is not None:  # `forget` reports nothing
            stream.close()
            self._tell(EventKind.DISCONNECTED, peer, reason)

    def _part(self, peer: bytes, reason: str) -> None:
        if peer in self._parting:
            self._parting.pop(peer).close()
            self._tell(EventKind.DISCONNECTED, peer, reason)

    def _tell(self, kind: EventKind, peer: bytes, reason: str) -> None:
        self.on_event(Event(kind, reason, peer, _ADDRESS))


class InheritedEndpoint:
    """Endpoint of a process that was started by another one (see `WorkerEndpoint`).

    It has one connection in its life.

    Args:
        connection: its end, from `ChildrenEndpoint.connect`.
        limits: the bounds.

    Attributes:
        on_message: called with the frames of a message addressed to this process.
        on_broadcast: called with the frames of a broadcast.
        on_event: called with each `Event`.
    """

    is_local = True

    def __init__(self, connection: socket.socket, limits: EndpointLimits) -> None:
        self.on_message: Callable[[list[memoryview]], None] = lambda frames: None
        self.on_broadcast: Callable[[list[memoryview]], None] = lambda frames: None
        self.on_event: Callable[[Event], None] = lambda event: None
        self._connection = connection
        self._limits = limits
        self._stream: MessageStream | None = None
        self._is_closed = asyncio.Event()
        self._lifetime = Lifetime()

    @property
    def address(self) -> str:
        """Text for people."""
        return _ADDRESS

    @property
    def connected(self) -> bool:
        """True until the other side ends."""
        return self._stream is not None

    def start(self) -> None:
        """Begin to receive; call this on the running loop."""
        keep_message_buffers(max_kept_bytes=_KEPT_BYTES)
        self._lifetime.is_started = True
        self._stream = MessageStream(
            self._connection,
            self._limits,
            on_message=self._receive,
            on_end=self._ended,
        )
        asyncio.get_running_loop().call_soon(self._begin)

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Send one message, or keep it until the other side reads.

        Returns:
            False if it was not accepted: not connected, or too much waits. See `wait_writable`.

        Raises:
            EndpointClosed: after `close`.
        """
        self._lifetime.check_open()
        stream = self._stream
        if stream is None:
            return False
        if stream.num_unsent and not self._has_room(stream, total_bytes(frames)):
            return False
        stream.send(frames)
        return True

    def _has_room(self, stream: MessageStream, num_more: int) -> bool:
        limits = self._limits
        is_short = stream.num_unsent < limits.queue_messages
        return is_short and stream.num_unsent_bytes + num_more <= limits.queue_bytes

    async def wait_writable(self) -> None:
        """Wait until all messages are sent; after the end of the connection, until `close`.

        Raises:
            EndpointClosed: when the endpoint is closed meanwhile.
        """
        self._lifetime.check_open()
        while self._stream is None or self._stream.num_unsent:
            if self._stream is None:
                await self._is_closed.wait()
            else:
                await self._stream.wait_sent()
            self._lifetime.check_open()

    async def close(self, *, flush_s: float = 0.5) -> None:
        """Give goodbyes up to ``flush_s`` seconds to leave, then end the connection."""
        if self._stream is not None:
            await _until_sent([self._stream], flush_s)
        self._lifetime.is_closed = True
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._connection.close()
        self._is_closed.set()

    def _receive(self, message: StreamMessage) -> None:
        if message.is_broadcast:
            self.on_broadcast(message.frames)
        else:
            self.on_message(message.frames)

    def _begin(self) -> None:
        if self._stream is not None:
            self.on_event(Event(EventKind.CONNECTED, address=_ADDRESS))

    def _ended(self, reason: str) -> None:
        assert self._stream is not None
        self._stream.close()
        self._stream = None
        self.on_event(Event(EventKind.DISCONNECTED, reason, address=_ADDRESS))


async def _until_sent(streams: Iterable[MessageStream], within_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            for stream in streams:
                await stream.wait_sent()
