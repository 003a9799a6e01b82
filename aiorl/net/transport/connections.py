"""The connections of a listening socket: who they are, how much they have brought, and how one is cut off.

libzmq has no call to disconnect one peer of a ROUTER, but it tells the descriptor of each connection. Cutting
means to shut the TCP connection down; libzmq then sees it end like any other. The remote address is compared first,
so that another connection that got the same number since is left alone.

The kernel says how much a connection has brought, whatever libzmq has made of it: that is what bounds a peer that
sends no whole messages, or more of them than are read (`BacklogGuard`), and tells that one is silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import zmq

from aiorl.net.transport.endpoint import EndpointLimits, EndpointStats, Event, EventKind
from aiorl.net.transport.security import reason_seen_by_learner
from aiorl.net.transport.sockets import SocketMonitor, SocketPump

logger = logging.getLogger(__name__)

# struct tcp_info: 8 bytes, 24 u32, then u64 pacing_rate, max_pacing_rate, bytes_acked, bytes_received
_BYTES_RECEIVED = struct.Struct("=Q")
_BYTES_RECEIVED_OFFSET = 8 + 24 * 4 + 3 * 8

LOCAL = "local"
"""Address of whoever comes over a Unix socket."""
CAN_TELL_BYTES = hasattr(socket, "TCP_INFO")
"""Whether `bytes_received` knows anything."""
_LOOK_S = 0.05
_UNSEEN_BYTES = 64 << 20
"""Bytes that a connection can bring between two looks."""
_STRANGER_BYTES = 1 << 20
_FRAME_COST = 32
"""An empty frame has 2 bytes on the wire, and takes 64 in libzmq."""
_LOOKS_WHILE_CALM = 5
_SHARE = 0.02


@dataclass(slots=True, eq=False)
class Connection:
    """One accepted connection.

    Attributes:
        fd: libzmq's descriptor; only to be used through `ConnectionTable`.
        address: "host:port" of the remote side, `LOCAL` for a Unix socket, "" if it was gone before we could ask.
        peer: routing id, b"" until its first message.
        user_id: public key it proved (Z85); "" until its first message, and without keys.
        reason: why it is to be reported as refused or dropped, "" if it is not.
        delivered: messages taken from it.
        taken_bytes: bytes on the wire of all messages taken from it.
        seen_delivered: ``delivered`` at the last survey.
        received: bytes received by the kernel at the last survey.
        silent_s: for how long surveys have found nothing new.
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
    is_served: bool = False


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
def _borrow(fd: int, address: str | None = None) -> Iterator[socket.socket | None]:
    """The socket of a descriptor that is libzmq's, for as long as the block lasts; None if there is none.

    It is no duplicate, since a connection must be cut also where this process is out of descriptors. So between a look
    at its address and a call libzmq could give its number to another connection; that one would be cut, and come again.

    ``address``: of its other side; None is given where that is another one, and so the connection another.
    """
    try:
        connection = socket.socket(fileno=fd)
    except OSError:
        yield None
        return
    try:
        yield connection if address in (None, _name(connection)) else None
    finally:
        connection.detach()


def _name(connection: socket.socket) -> str:
    """Host and port of the other side, `LOCAL` for a Unix socket, "" if there is none any more."""
    if connection.family == socket.AF_UNIX:
        return LOCAL
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
        with _borrow(fd) as borrowed:
            connection = Connection(fd, "" if borrowed is None else _name(borrowed))
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
        with _borrow(connection.fd, connection.address) as borrowed:
            if borrowed is None:
                return False
            try:
                if reset:
                    borrowed.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                borrowed.shutdown(socket.SHUT_RDWR)
            except OSError:
                return False
        return True

    def survey(self, elapsed_s: float) -> None:
        """Note what each connection has sent since the survey before, ``elapsed_s`` ago."""
        for connection in self:
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


def wire_overhead(*, curve: bool) -> tuple[int, int, int]:
    """Largest frame with a short head, and how many bytes more than its payload a short and a long frame take."""
    box = 33 if curve else 0  # name of the command, nonce, authentication and flags
    return 255 - box, 2 + box, 9 + box


class BacklogGuard:
    """Cuts connections off that have sent more than may wait, in a thread of its own.

    A receive high-water mark makes libzmq stop reading a connection and start again later. libzmq 4.3.5 aborts the
    process when it does so on a connection that was reset meanwhile and finds a heartbeat of the peer to answer. So the
    learner's sockets have no mark. The kernel knows what a connection brings, the endpoint what was taken of it; the
    difference lies in libzmq, and who exceeds a bound is cut off. A thread looks at that, since a flood on loopback
    brings gigabytes in a second, and the loop may be busy for some of it.

    A connection that the learner has not answered yet has nothing to send but a ``hello``, so it may have little
    unread. Its bytes count 32 times, since it may send a message of empty frames without end: each takes 64 bytes in
    libzmq for 2 on the wire.

    What a connection that has ended has left behind nobody can tell exactly: it may have brought much since the last
    look. So each counts with the most that it can have been, and new ones are not taken while too much of that is
    unread.

    Args:
        table: the connections; `Connection.taken_bytes` and ``delivered`` are kept by their user.
        limits: the bounds.
        on_cut: called on the loop with each connection that was cut, and why.
        max_bytes: bound of a connection that was answered, if it isn't twice the largest message.

    Should its thread die, that is raised on the loop, to be handled like the error of a callback.
    """

    def __init__(
        self,
        table: ConnectionTable,
        limits: EndpointLimits,
        on_cut: Callable[[Connection, str], None],
        *,
        max_bytes: int | None = None,
    ) -> None:
        self._emptied = False
        self._left_behind = 0
        self._table = table
        self._max_bytes = 2 * limits.max_message_bytes if max_bytes is None else max_bytes
        self._max_of_stranger = min(self._max_bytes, _STRANGER_BYTES)
        self._max_total_bytes = max(limits.max_unread_bytes, self._max_bytes)
        self._on_cut = on_cut
        self._loop = asyncio.get_running_loop()
        self._unread: dict[Connection, int] = {}
        self._cut: set[Connection] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aiorl-backlog", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """Return whether ended connections may have left too much unread for a new one to be taken."""
        return self._left_behind > self._max_total_bytes

    def emptied(self) -> None:
        """All that had come was taken."""
        self._emptied = True
        self._left_behind = 0

    def ended(self, connection: Connection) -> None:
        """A connection has ended, and what it has brought may not be taken yet."""
        self._left_behind += _UNSEEN_BYTES + self._unread.get(connection, 0)

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._watch()
        except BaseException as error:
            failure = error  # the name of the clause is gone when the loop comes to it

            def fail() -> None:
                raise failure

            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(fail)

    def _watch(self) -> None:
        pause_s = _LOOK_S
        num_calm = 0
        while not self._stop.wait(pause_s):
            # what waited was all taken since the last time: no hurry
            num_calm = num_calm + 1 if self._emptied else _LOOKS_WHILE_CALM
            self._emptied = False
            if num_calm < _LOOKS_WHILE_CALM:
                continue
            num_calm = 0
            before = time.thread_time()  # others may keep this thread waiting, on a busy machine for seconds
            self._look()
            pause_s = max(_LOOK_S, (time.thread_time() - before) / _SHARE)

    def _look(self) -> None:
        connections = list(self._table)
        self._cut.intersection_update(connections)
        unread: dict[Connection, int] = {}
        for connection in connections:
            if connection in self._cut:
                continue
            taken = connection.taken_bytes  # before what was received, which only grows
            num_bytes = self._table.look(connection) - taken
            if num_bytes > (self._max_bytes if connection.is_served else self._max_of_stranger):
                self._end(connection, f"{num_bytes} bytes")
            else:
                unread[connection] = num_bytes
        self._unread = unread
        costs = {each: num_bytes * (1 if each.is_served else _FRAME_COST) for each, num_bytes in unread.items()}
        total = sum(costs.values())
        if total > self._max_total_bytes:
            for connection in sorted(costs, key=lambda each: costs[each], reverse=True):
                self._end(connection, f"{unread[connection]} bytes, the most of all connections")
                total -= costs[connection]
                if total <= self._max_total_bytes:
                    return

    def _end(self, connection: Connection, what: str) -> None:
        if self._table.cut(connection, reset=True):
            self._cut.add(connection)
            reason = f"too much of what it sent is unread, a flood or a message without end: {what}"
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._on_cut, connection, reason)


class ListeningPort:
    """The connections of one listening socket.

    Args:
        socket: not bound yet.
        table: its connections.
        stats: refusals and drops are counted there.
        tell: told of each event.
        on_gone: told of each connection that has ended and of which that is to be told, once what it sent was read.
        max_connections: beyond this, new ones are cut off.

    Attributes:
        guard: what bounds unread bytes; None until it is set, and where the kernel can't tell.
        pump: what reads the socket, where that is to bound what ended connections have left behind.
        ended_fds: descriptors of connections that have ended, until their user empties it: they may be others' since.
        on_ended: called when one is added.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        table: ConnectionTable,
        stats: EndpointStats,
        tell: Callable[[Event], None],
        on_gone: Callable[[ListeningPort, Connection], None],
        max_connections: int,
    ) -> None:
        self.table = table
        self.stats = stats
        self.max_connections = max_connections
        self.guard: BacklogGuard | None = None
        self.pump: SocketPump | None = None
        self.ended_fds: set[int] = set()
        self.on_ended: Callable[[], object] = lambda: None
        self.monitor = SocketMonitor(socket, self._on_monitor)
        self._tell = tell
        self._on_gone = on_gone
        self._failure = ""

    def tell(self, kind: EventKind, connection: Connection, reason: str = "") -> None:
        """Tell of something that has happened to a connection."""
        self._tell(Event(kind, reason, connection.peer, connection.address))

    def refuse(self, address: str, reason: str) -> None:
        """Tell that a connection was refused."""
        self.stats.refused += 1
        logger.debug("%s refused: %s", address or "a peer", reason)
        self._tell(Event(EventKind.REFUSED, reason, address=address))

    def finish(self, connection: Connection) -> None:
        """Note that everything an ended connection has brought was read."""
        if not connection.delivered:
            self.refuse(connection.address, "it left without a word: is something else calling this port?")

    def overflow(self, connection: Connection, reason: str) -> None:
        """Cut off a connection that has brought too much."""
        if not connection.reason:
            self.stats.rejected += 1
            self.cut(connection, reason)

    def cut(self, connection: Connection, reason: str) -> None:
        """Cut a connection off at once; what is on its way either way is thrown away."""
        if not connection.reason:
            self.condemn(connection, reason)
            self.table.cut(connection, reset=True)
            self.tell(EventKind.DROPPED, connection, reason)

    def condemn(self, connection: Connection, reason: str) -> None:
        """From now on nothing is taken from this connection."""
        connection.reason = reason
        self.stats.dropped += 1
        logger.debug("%s cut off: %s", connection.address or "a peer", reason)

    def end_silent(self, connection: Connection) -> None:
        """Close a connection over which nothing has come for too long."""
        if connection.reason:
            return
        connection.reason = f"nothing was heard from it for {connection.silent_s:.1f} s"
        logger.debug("%s cut off: %s", connection.address or "a peer", connection.reason)
        self.table.cut(connection)

    def _on_monitor(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            connection = self.table.accept(value)
            if len(self.table) > self.max_connections:
                self.cut(connection, f"there are {self.max_connections} connections already")
            elif self._is_backlog_full():
                self.cut(connection, "others have left too much behind that is unread, and ended")
            else:
                self.tell(EventKind.CONNECTED, connection)
        elif event in (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
            self._failure = reason_seen_by_learner(event, value)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._failure = "-"  # told by the authenticator already
        elif event == zmq.EVENT_DISCONNECTED:
            self._on_disconnected(value)

    def _is_backlog_full(self) -> bool:
        if self.guard is None or self.pump is None or not self.guard.is_full:
            return False
        if self.pump.is_empty():  # no message has come to say so
            self.guard.emptied()
        return self.guard.is_full

    def _on_disconnected(self, fd: int) -> None:
        connection = self.table.end(fd)
        self.ended_fds.add(fd)
        self.on_ended()
        failure, self._failure = self._failure, ""
        if connection is None:
            return
        if self.guard is not None and self.pump is not None and not failure:
            self.guard.ended(connection)
        if not connection.peer and connection.reason:
            return  # we have cut it off, and told so
        if not connection.peer and failure:
            if failure != "-":
                self.refuse(connection.address, failure)
        elif connection.peer or not connection.delivered:
            self._on_gone(self, connection)
