"""The connections accepted by one listening socket: who they are, and how to cut one off.

libzmq has no call to disconnect one peer of a ROUTER, but it tells the descriptor of each connection. Cutting
means to shut the TCP connection down; libzmq then sees it end like any other. The descriptor is duplicated and
its remote address compared first, so that never another connection is hit that got the same number since.

The kernel says how much a connection has brought, whatever libzmq has made of it: that is what bounds a peer that
sends no whole messages, or more of them than are read, and tells that one is silent.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["CAN_TELL_BYTES", "Connection", "ConnectionTable", "bytes_received", "remote_address"]

# struct tcp_info: 8 bytes, 24 u32, then u64 pacing_rate, max_pacing_rate, bytes_acked, bytes_received
_BYTES_RECEIVED = struct.Struct("=Q")
_BYTES_RECEIVED_OFFSET = 8 + 24 * 4 + 3 * 8

CAN_TELL_BYTES = hasattr(socket, "TCP_INFO")
"""Whether `bytes_received` knows anything."""


@dataclass(slots=True, eq=False)
class Connection:
    """One accepted connection.

    Attributes:
        fd: libzmq's descriptor; only to be used through `ConnectionTable`.
        address: "host:port" of the remote side, "" if it was gone before we could ask.
        peer: routing id, b"" until its first message.
        user_id: public key it proved (Z85); "" until its first message, and without keys.
        reason: why it is to be reported as refused or dropped, "" if it is not.
        delivered: messages taken from it.
        taken_bytes: bytes on the wire of all messages taken from it.
        seen_delivered: ``delivered`` at the last survey.
        received: bytes received by the kernel at the last survey.
        silent_s: for how long surveys have found nothing new.
        answered: whether its sign of life was answered since the last survey.
        is_served: whether the learner has sent it a message, or has taken its subscription.
    """

    fd: int
    address: str
    peer: bytes = b""
    user_id: str = ""
    reason: str = ""
    delivered: int = 0
    taken_bytes: int = 0
    seen_delivered: int = 0
    received: int = 0
    silent_s: float = 0.0
    answered: bool = False
    is_served: bool = False


def remote_address(fd: int) -> str:
    """Host and port of the other end of a TCP descriptor, "" if there is none any more."""
    with _borrow(fd) as connection:
        return "" if connection is None else _name(connection)


def bytes_received(fd: int) -> int | None:
    """What the kernel has received over a TCP descriptor so far; None where it can't be told."""
    if not CAN_TELL_BYTES or fd < 0:
        return None
    # asked of all connections again and again: no duplicate, since nothing is done to it; any family will do
    try:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)
    except OSError:
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:
        return None
    finally:
        connection.detach()
    if len(info) < _BYTES_RECEIVED_OFFSET + _BYTES_RECEIVED.size:
        return None
    received: int = _BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_OFFSET)[0]
    return received


@contextlib.contextmanager
def _borrow(fd: int) -> Iterator[socket.socket | None]:
    """The socket of a descriptor that is libzmq's, for as long as the block lasts; None if there is none."""
    try:
        duplicate = os.dup(fd)
    except OSError as error:
        if error.errno != errno.EMFILE:
            yield None
            return
        # Out of descriptors a connection must still be cut, or there would never be one again. Without a duplicate,
        # libzmq could give the number to another connection between our look at its address and our call; that one
        # would be cut, and connect again.
        duplicate = fd
    try:
        connection = socket.socket(fileno=duplicate)
    except OSError:
        if duplicate != fd:
            os.close(duplicate)
        yield None
        return
    try:
        yield connection
    finally:
        if duplicate == fd:
            connection.detach()
        else:
            connection.close()


def _name(connection: socket.socket) -> str:
    try:
        host, port, *_ = connection.getpeername()
    except (OSError, ValueError):
        return ""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class ConnectionTable:
    """Accepted connections by descriptor and by peer.

    There is one for each descriptor at most, so the process's limit of open files bounds the first table; the second
    also holds those that have ended since, until their user has told of that and calls `forget`.

    Attributes:
        by_fd: descriptor -> the connection on it.
        by_peer: routing id -> its connection, of those that have said who they are.
    """

    def __init__(self) -> None:
        self.by_fd: dict[int, Connection] = {}
        self.by_peer: dict[bytes, Connection] = {}

    def __len__(self) -> int:
        return len(self.by_fd)

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self.by_fd.values()))

    def accept(self, fd: int) -> Connection:
        """A new connection on this descriptor."""
        stale = self.by_fd.get(fd)
        if stale is not None:
            self.forget(stale)
        connection = Connection(fd, remote_address(fd))
        self.by_fd[fd] = connection
        return connection

    def attach(self, fd: int, peer: bytes, user_id: str) -> Connection | None:
        """The connection on this descriptor has said who it is; None if its end has been told already."""
        connection = self.by_fd.get(fd)
        if connection is None:
            return None
        if connection.peer not in (b"", peer):
            connection = self.accept(fd)
        connection.peer = peer
        connection.user_id = user_id
        if peer:
            self.by_peer[peer] = connection
        return connection

    def end(self, fd: int) -> Connection | None:
        """This descriptor's connection has ended; its peer stays known until `forget`."""
        return self.by_fd.pop(fd, None)

    def forget(self, connection: Connection) -> None:
        """Nothing more will come from this connection."""
        if self.by_fd.get(connection.fd) is connection:
            del self.by_fd[connection.fd]
        if self.by_peer.get(connection.peer) is connection:
            del self.by_peer[connection.peer]

    def cut(self, connection: Connection, *, reset: bool = False) -> bool:
        """Shut the TCP connection down; returns False if it was gone already.

        With ``reset`` what is still on its way to the other side is thrown away, and nothing of the connection stays
        in the kernel.
        """
        if self.by_fd.get(connection.fd) is not connection:
            return False
        with _borrow(connection.fd) as borrowed:
            if borrowed is None or _name(borrowed) != connection.address:
                return False
            try:
                if reset:
                    borrowed.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                borrowed.shutdown(socket.SHUT_RDWR)
            except OSError:
                return False
        return True

    def has_unsent(self, connection: Connection) -> bool:
        """Whether the kernel holds bytes for it that the other side has not confirmed."""
        with _borrow(connection.fd) as borrowed:
            if borrowed is None or _name(borrowed) != connection.address:
                return False
            unsent = array.array("i", [0])
            try:
                fcntl.ioctl(borrowed.fileno(), termios.TIOCOUTQ, unsent)
            except OSError:
                return False
            return unsent[0] > 0

    def survey(self, elapsed_s: float) -> None:
        """Note what each connection has sent since the survey before, ``elapsed_s`` ago."""
        for connection in self:
            connection.answered = False
            received = self.look(connection)
            if connection.delivered != connection.seen_delivered or received != connection.received:
                connection.silent_s = 0.0
            else:
                connection.silent_s += elapsed_s
            connection.received = received
            connection.seen_delivered = connection.delivered

    def look(self, connection: Connection) -> int:
        """Bytes that the kernel has received for this connection so far; as before where it can't be told.

        Should the descriptor have become another connection's just now, this one has ended, and is told of next.
        """
        received = bytes_received(connection.fd)
        return connection.received if received is None else received
