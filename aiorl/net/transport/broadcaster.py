"""The learner's broadcasts: one message to every subscriber, numbered, and announcements where there are none."""

from __future__ import annotations

import asyncio
import secrets
import struct
from collections.abc import Callable, Sequence

import zmq

from aiorl.net.transport.connections import Connection
from aiorl.net.transport.endpoint import Buffer
from aiorl.net.transport.listening_port import ListeningPort
from aiorl.net.transport.pump import MORE, SocketPump, send_frames
from aiorl.net.transport.zmq_sockets import fd_of, user_id_of

__all__ = ["BROADCAST_HEAD", "MAX_SUBSCRIBER_BYTES", "MAX_SUBSCRIPTION_BYTES", "Broadcaster"]

BROADCAST_HEAD = struct.Struct("<8sQ")
"""First frame of a broadcast: the learner endpoint's random epoch, and how many broadcasts it has made.
A message with this frame alone only announces that number."""
MAX_SUBSCRIPTION_BYTES = 4096
MAX_SUBSCRIBER_BYTES = 4096
"""Handshake and subscription take some hundred."""

_SUBSCRIPTIONS_PER_LOOK = 16
_NOT_A_SUBSCRIPTION = "it sent more than a subscription to the broadcast port"


class Broadcaster:
    """Sends to all, and takes subscriptions.

    Args:
        socket: an XPUB.
        port: its connections.
        check_key: cuts a connection off whose key is not admitted any more.
        announce_soon: has `announce` called in a moment.

    Attributes:
        pump: reads the socket.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        port: ListeningPort,
        check_key: Callable[[ListeningPort, Connection], None],
        announce_soon: Callable[[], None],
    ) -> None:
        self.pump = SocketPump(socket, self._receive)
        port.on_ended = self.pump.schedule  # so that `ended_fds` are emptied soon
        self._socket = socket
        self._port = port
        self._check_key = check_key
        self._announce_soon = announce_soon
        self._epoch = secrets.token_bytes(8)
        self._count = 0
        self._announced = True
        self._loop = asyncio.get_running_loop()
        self._head_sent = self._loop.time()

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send one message to every subscription in force; never waits."""
        self._count += 1
        self._socket.send(self._head(), MORE)
        send_frames(self._socket, frames)
        self._announced = False
        self._head_sent = self._loop.time()
        self.pump.settle()

    def announce(self) -> None:
        """Tell all subscribers how many broadcasts there have been, without one.

        A new subscriber learns so that its subscription is in force; one that has missed the last broadcast
        learns that; all learn that we live.
        """
        self._socket.send(self._head(), zmq.DONTWAIT)
        self._announced = True
        self._head_sent = self._loop.time()
        self.pump.schedule()

    def announce_if_due(self, every_s: float) -> None:
        """Announce the last broadcast, if that was not done, or that we live."""
        if not self._announced or self._loop.time() - self._head_sent >= every_s:
            self.announce()

    def bound(self, connection: Connection, received: int) -> None:
        """Cut a subscriber off that has sent more than subscriptions take."""
        if received > MAX_SUBSCRIBER_BYTES:
            self.cut_talkative(connection)

    def cut_talkative(self, connection: Connection) -> None:
        """Cut a subscriber off that says what it has no need to say."""
        if not connection.reason:
            self._port.stats.rejected += 1
            self._port.cut(connection, _NOT_A_SUBSCRIPTION)

    def _head(self) -> bytes:
        return BROADCAST_HEAD.pack(self._epoch, self._count)

    def _receive(self) -> None:
        port = self._port
        try:
            frame = self._socket.recv(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            port.ended_fds.clear()
            raise
        fd = fd_of(frame)
        if fd < 0:
            return  # made by libzmq itself when a subscriber is gone
        if not port.monitor.pump.is_empty():
            port.monitor.pump.drain()  # what was reported before this message comes first
        connection = port.table.by_fd.get(fd)
        if connection is None:
            return
        is_anothers = fd in port.ended_fds  # or may be: of the connection that had this descriptor before
        user_id = user_id_of(frame)
        if is_anothers or not connection.delivered or connection.user_id != user_id:
            port.table.attach(fd, b"", user_id)
            self._check_key(port, connection)
        if connection.reason:
            return
        if not connection.delivered:
            port.spoke()
        connection.delivered += 1
        if not is_anothers:
            if connection.is_served or frame.more or frame.bytes != b"\x01":
                self.cut_talkative(connection)
                return
            connection.is_served = True
        if is_anothers or connection.delivered == 1:
            self._announce_soon()
        if connection.delivered % _SUBSCRIPTIONS_PER_LOOK == 0:  # what the kernel says is of this one in any case
            self.bound(connection, port.table.look(connection))
