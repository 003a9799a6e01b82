"""Broadcasts of a learner over its XPUB."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import zmq

from aiorl.net.transport.connections import Connection, ListeningPort
from aiorl.net.transport.endpoint import Buffer
from aiorl.net.transport.learner_sockets import MAX_SUBSCRIBER_BYTES
from aiorl.net.transport.sockets import (
    BROADCAST_HEAD,
    MORE,
    SubscriptionPump,
    fd_of,
    send_frames,
    user_id_of,
)

_NOT_A_SUBSCRIPTION = "it sent more than a subscription to the broadcast port"


class Broadcaster:
    """Sender of broadcasts, which also accepts subscriptions.

    Args:
        socket: an XPUB, bound.
        port: its connections.
        check_key: cuts a connection off if its key is no longer admitted.
        announce_soon: schedules a call of `announce`.

    Attributes:
        port: its connections.
        pump: reads the socket.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        port: ListeningPort,
        check_key: Callable[[ListeningPort, Connection], None],
        announce_soon: Callable[[], None],
    ) -> None:
        self.pump = SubscriptionPump(socket, self._receive, on_empty=port.ended_fds.clear)
        port.on_ended = self.pump.schedule  # clears `ended_fds` soon
        self._socket = socket
        self.port = port
        self._check_key = check_key
        self._announce_soon = announce_soon
        self._epoch = secrets.token_bytes(8)
        self._count = 0

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send one message to every subscription in force; never waits."""
        self._count += 1
        self._socket.send(self._head(), MORE)
        send_frames(self._socket, frames)
        self.pump.settle()

    def announce(self) -> None:
        """Send all subscribers the number of broadcasts so far, so that a new one knows that it is
        subscribed.
        """
        self._socket.send(self._head(), zmq.DONTWAIT)
        self.pump.schedule()

    def _head(self) -> bytes:
        return BROADCAST_HEAD.pack(self._epoch, self._count)

    def _receive(self) -> None:
        port = self.port
        frame = self._socket.recv(zmq.DONTWAIT, copy=False)
        fd = fd_of(frame)
        if fd < 0:
            return  # made by libzmq itself when a subscriber is gone
        if not port.monitor.pump.is_empty():
            port.monitor.pump.drain()  # events reported before this message come first
        connection = port.table.attach(fd, b"", user_id_of(frame))
        if connection is None:
            return
        self._check_key(port, connection)
        if connection.reason:
            return
        connection.delivered += 1
        if fd in port.ended_fds:
            # the message may be another connection's; the kernel's count is this one's
            is_sound = port.table.num_received(connection) <= MAX_SUBSCRIBER_BYTES
        else:
            is_sound = frame.bytes == b"\x01" and not frame.more and not connection.is_admitted
            connection.is_admitted = True
        if is_sound:
            self._announce_soon()
        else:
            port.overflow(connection, _NOT_A_SUBSCRIPTION)
