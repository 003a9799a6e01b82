"""The connections accepted by one listening socket: who they are, and how to cut one off.

libzmq has no call to disconnect one peer of a ROUTER, but it tells the descriptor of each connection. Cutting
means to shut the TCP connection down; libzmq then sees it end like any other. The descriptor is duplicated and
its remote address compared first, so that never another connection is hit that got the same number since.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Connection", "ConnectionTable", "remote_address"]

# struct tcp_info: 8 bytes, 24 u32, then u64 pacing_rate, max_pacing_rate, bytes_acked, bytes_received
_BYTES_RECEIVED = struct.Struct("=Q")
_BYTES_RECEIVED_OFFSET = 8 + 24 * 4 + 3 * 8


@dataclass(slots=True)
class Connection:
    """One accepted connection.

    Attributes:
        fd: libzmq's descriptor; only to be used through `ConnectionTable`.
        address: "host:port" of the remote side, "" if it was gone before we could ask.
        peer: routing id, b"" until its first message.
        user_id: public key it proved (Z85); "" until its first message, and without keys.
        reason: why it is to be reported as refused or dropped, "" if it is not.
        delivered: messages taken from it.
        seen_delivered: ``delivered`` at the last flood check that found progress.
        seen_bytes: bytes received by the kernel at that check.
    """

    fd: int
    address: str
    peer: bytes = b""
    user_id: str = ""
    reason: str = ""
    delivered: int = 0
    seen_delivered: int = 0
    seen_bytes: int = 0


def remote_address(fd: int) -> str:
    """Host and port of the other end of a TCP descriptor, "" if there is none any more."""
    connection = _duplicate(fd)
    if connection is None:
        return ""
    with connection:
        return _name(connection)


def _duplicate(fd: int) -> socket.socket | None:
    try:
        return socket.socket(fileno=os.dup(fd))
    except OSError:
        return None


def _name(connection: socket.socket) -> str:
    try:
        host, port, *_ = connection.getpeername()
    except (OSError, ValueError):
        return ""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class ConnectionTable:
    """Accepted connections by descriptor and by peer."""

    def __init__(self) -> None:
        self._by_fd: dict[int, Connection] = {}
        self._by_peer: dict[bytes, Connection] = {}

    def __len__(self) -> int:
        return len(self._by_fd)

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._by_fd.values()))

    @property
    def num_peers(self) -> int:
        """Connections that have said who they are."""
        return len(self._by_peer)

    def accept(self, fd: int) -> Connection:
        """A new connection on this descriptor."""
        stale = self._by_fd.get(fd)
        if stale is not None:
            self.forget(stale)
        connection = Connection(fd, remote_address(fd))
        self._by_fd[fd] = connection
        return connection

    def attach(self, fd: int, peer: bytes, user_id: str) -> Connection:
        """The connection on this descriptor has said who it is."""
        connection = self._by_fd.get(fd)
        if connection is None or connection.peer not in (b"", peer):
            connection = self.accept(fd)
        connection.peer = peer
        connection.user_id = user_id
        if peer:
            self._by_peer[peer] = connection
        return connection

    def by_fd(self, fd: int) -> Connection | None:
        """The connection on this descriptor."""
        return self._by_fd.get(fd)

    def by_peer(self, peer: bytes) -> Connection | None:
        """The connection of this routing id."""
        return self._by_peer.get(peer)

    def end(self, fd: int) -> Connection | None:
        """This descriptor's connection has ended; its peer stays known until `forget`."""
        return self._by_fd.pop(fd, None)

    def forget(self, connection: Connection) -> None:
        """Nothing more will come from this connection."""
        if self._by_fd.get(connection.fd) is connection:
            del self._by_fd[connection.fd]
        if self._by_peer.get(connection.peer) is connection:
            del self._by_peer[connection.peer]

    def cut(self, connection: Connection) -> bool:
        """Shut the TCP connection down; returns False if it was gone already."""
        if self._by_fd.get(connection.fd) is not connection:
            return False
        duplicate = _duplicate(connection.fd)
        if duplicate is None:
            return False
        with duplicate:
            if _name(duplicate) != connection.address:
                return False
            try:
                duplicate.shutdown(socket.SHUT_RDWR)
            except OSError:
                return False
        return True

    def find_floods(self, max_bytes: int) -> list[Connection]:
        """Connections that sent more than ``max_bytes`` since their last whole message.

        libzmq bounds the size of a frame and the number of whole messages that wait, but not the frames of a
        message that never ends. Call it only when the socket has just been emptied.
        """
        return [connection for connection in self if self._is_flooding(connection, max_bytes)]

    def _is_flooding(self, connection: Connection, max_bytes: int) -> bool:
        received = self._bytes_received(connection)
        if received is None:
            return False
        if connection.delivered != connection.seen_delivered:
            connection.seen_delivered = connection.delivered
            connection.seen_bytes = received
        return received - connection.seen_bytes > max_bytes

    def _bytes_received(self, connection: Connection) -> int | None:
        if not hasattr(socket, "TCP_INFO"):
            return None
        duplicate = _duplicate(connection.fd)
        if duplicate is None:
            return None
        with duplicate:
            try:
                info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            except OSError:
                return None
            if len(info) < _BYTES_RECEIVED_OFFSET + _BYTES_RECEIVED.size or _name(duplicate) != connection.address:
                return None
        received: int = _BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_OFFSET)[0]
        return received
