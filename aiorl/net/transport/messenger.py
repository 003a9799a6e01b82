"""Addressed messages of a learner over its ROUTER."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import zmq

from aiorl.net.transport.connections import Connection, FrameOverhead, ListeningPort
from aiorl.net.transport.endpoint import Buffer, EndpointLimits, LearnerEndpoint, total_bytes
from aiorl.net.transport.sockets import (
    MORE,
    SendQueues,
    SocketPump,
    fd_of,
    keep,
    send_frames,
    user_id_of,
)
from aiorl.net.transport.timers import Timers

RETRY_S = 0.02
"""Pause before messages to busy connections are tried again, seconds."""
_STRANGER_QUEUE_BYTES = 1 << 20
"""Most bytes that wait for a peer without a registered worker; one message of any size may."""


class Messenger:
    """Sender and receiver of addressed messages.

    Args:
        socket: a ROUTER, bound.
        port: its connections.
        endpoint: its ``on_message`` is called with each message, its ``is_registered`` is asked.
        check_key: cuts a connection off if its key is no longer admitted.
        limits: the bounds.
        overhead: bytes of a frame on the wire.
        timers: timers of the endpoint.

    Attributes:
        port: its connections.
        pump: reads the socket.
        queues: messages that wait for busy connections.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        port: ListeningPort,
        endpoint: LearnerEndpoint,
        *,
        check_key: Callable[[ListeningPort, Connection], None],
        limits: EndpointLimits,
        overhead: FrameOverhead,
        timers: Timers,
    ) -> None:
        self.port = port
        self.queues = SendQueues(limits.peer_queue_messages, limits.queue_bytes)
        self._socket = socket
        self._endpoint = endpoint
        self._check_key = check_key
        self._limits = limits
        self._overhead = overhead
        self._timers = timers
        self._peers = port.table
        self._stats = port.stats
        self._leaving: dict[bytes, zmq.MessageTracker] = {}  # last large message to each peer
        self._discarding = False
        self.pump = SocketPump(
            socket,
            self._receive,
            per_turn=limits.messages_per_turn,
            on_empty=self._on_empty,
            after_turn=self.flush,
        )

    # Sending
    # ----------------------------------------------------------------------------------------------

    def send(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        """Send one message to a peer, or queue it; see `LearnerEndpoint.send`."""
        connection = self._peers.by_peer.get(peer)
        if connection is None or connection.reason:
            return False
        if not connection.is_admitted:
            connection.is_admitted = self._endpoint.is_registered(peer)
        queues = self.queues
        if peer not in queues:
            sent = self._try_send(peer, frames)
            if sent is not None:
                return sent
        if not queues.put(peer, frames) or not (
            connection.is_admitted or self._is_queue_small(peer)
        ):
            self._cut_unread(peer)
            return False
        while queues.num_bytes > self._limits.max_queued_bytes:
            self._cut_unread(queues.largest)
        self._retry_soon()
        return not connection.reason

    def has_unsent(self, peer: bytes) -> bool:
        """Return whether our memory still holds a large message to a peer, or a message that waits
        for it.
        """
        tracker = self._leaving.get(peer)
        if tracker is not None and tracker.done:
            del self._leaving[peer]
            tracker = None
        return tracker is not None or peer in self.queues

    def flush(self) -> None:
        """Send waiting messages to the connections that have room again."""
        self.queues.flush(self._try_send)
        if self.queues:
            self._retry_soon()

    def forget(self, peer: bytes) -> None:
        """Discard all messages to a peer that is gone."""
        self.queues.forget(peer)
        self._leaving.pop(peer, None)

    def _try_send(self, peer: bytes, frames: Sequence[Buffer]) -> bool | None:
        """Send now; return True if sent, False if there is no such peer, None if its connection is
        busy.
        """
        try:
            try:
                self._socket.send(peer, MORE)
            except zmq.Again:
                return None
            except zmq.ZMQError as error:
                if error.errno == zmq.EHOSTUNREACH:
                    return False
                raise
            tracker = send_frames(self._socket, frames, track=True)
        finally:
            self.pump.settle()
        if tracker is not None:
            self._leaving[peer] = tracker
        self._stats.bytes_out += total_bytes(frames)
        return True

    def _is_queue_small(self, peer: bytes) -> bool:
        """Return whether no more waits for a peer than for one that has no registered worker."""
        queues = self.queues
        return queues.waiting(peer) <= 1 or queues.waiting_bytes(peer) <= _STRANGER_QUEUE_BYTES

    def _cut_unread(self, peer: bytes) -> None:
        """Cut off a peer for which too many messages wait."""
        waiting = self.queues.waiting(peer)
        self.queues.forget(peer)
        connection = self._peers.by_peer.get(peer)
        if connection is not None:
            self.port.cut(connection, f"it does not read its messages: {waiting} are waiting")

    def _retry_soon(self) -> None:
        self._timers.start("retry", RETRY_S, self.flush)

    # Receiving
    # ----------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        if self._discarding:
            self._discard_some()
            return
        socket = self._socket
        id_frame = socket.recv(zmq.DONTWAIT, copy=False)
        peer = id_frame.bytes
        connection = self._peers.by_peer.get(peer)
        if connection is None:
            connection = self._attach(id_frame, peer)
        limits = self._limits
        max_short, overhead, long_overhead = self._overhead
        frames: list[memoryview] = []
        num_bytes = wire_bytes = 0
        has_more = id_frame.more
        while has_more:
            frame = socket.recv(zmq.DONTWAIT, copy=False)
            size = len(frame)
            num_bytes += size
            wire_bytes += size + (overhead if size <= max_short else long_overhead)
            frames.append(keep(frame))
            has_more = frame.more
            if len(frames) > limits.max_frames or num_bytes > limits.max_message_bytes:
                self._discarding = has_more
                self._stats.rejected += 1
                if connection is not None:
                    reason = (
                        f"its message exceeds the limit: {len(frames)} frames, {num_bytes} bytes"
                    )
                    self.port.cut(connection, reason)
                return
        if connection is None:
            self._stats.rejected += 1  # its end has been reported
            return
        connection.delivered += 1
        connection.taken_bytes += wire_bytes
        if connection.reason:
            self._stats.rejected += 1  # it was cut off while this message was on its way
            return
        if not num_bytes and len(frames) == 1:
            return  # the introduction of a worker's endpoint
        self._stats.bytes_in += num_bytes
        self._endpoint.on_message(peer, frames, connection.user_id)

    def _on_empty(self) -> None:
        guard = self.port.guard
        if guard is not None:
            guard.emptied()

    def _discard_some(self) -> None:
        for _ in range(self._limits.max_frames):
            if not self._socket.recv(zmq.DONTWAIT, copy=False).more:
                self._discarding = False
                return

    def _attach(self, frame: zmq.Frame, peer: bytes) -> Connection | None:
        self.port.monitor.pump.drain()  # events reported before this message come first
        connection = self._peers.attach(fd_of(frame), peer, user_id_of(frame))
        if connection is not None:
            self._check_key(self.port, connection)
        return connection
