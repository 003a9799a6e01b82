"""Connections of a listening socket: their identity, their received bytes, and how to cut them off.

libzmq has no call to disconnect one peer of a ROUTER, but it reports the descriptor of each
connection. Cutting a connection means shutting down its TCP connection; libzmq then handles it like
any other end. The remote address is compared first, so that another connection that now has the
same descriptor is left alone.

The kernel reports how many bytes a connection has received, whatever libzmq did with them. These
counts limit peers that send incomplete messages, or more messages than are read (`BacklogGuard`),
and reveal silent ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import zmq

from aiorl.config.addresses import url
from aiorl.net.transport.endpoint import EndpointLimits, EndpointStats, Event, EventKind
from aiorl.net.transport.security import reason_seen_by_learner
from aiorl.net.transport.sockets import SocketMonitor, SocketPump

logger = logging.getLogger(__name__)

# struct tcp_info: 8 bytes, 24 u32, then u64 pacing_rate, max_pacing_rate, bytes_acked,
# bytes_received
_BYTES_RECEIVED = struct.Struct("=Q")
_BYTES_RECEIVED_OFFSET = 8 + 24 * 4 + 3 * 8

LOCAL = "local"
"""Address of all peers on a Unix socket."""
CAN_TELL_BYTES = hasattr(socket, "TCP_INFO")
"""True if `bytes_received` works on this system."""
_LOOK_S = 0.05
_UNSEEN_BYTES = 64 << 20
"""Most bytes that all connections together can receive between two checks."""
_STRANGER_BYTES = 2 << 20
"""Most unread bytes of a peer that is not admitted: many times the Hellos that it may send."""
_FRAME_COST = 32
"""Cost factor per byte: an empty frame has 2 bytes on the wire, and takes 64 in libzmq."""
_MAX_COST_OF_STRANGERS = 256 << 20
"""Most memory for unread data of all peers together that are not admitted."""
_FEW_BYTES = 1 << 20
"""Unread bytes of an admitted peer that need no look at this process's memory."""
_EXPENSIVE = 8
"""Growth of this process for each unread byte above which the data must be a flood of tiny
frames."""
_MOST_PER_BYTE = 64
"""Most memory that a byte of unread data takes here, in frames without content."""
MAX_GROWTH_BYTES = 256 << 20
"""Growth of this process up to which it does not matter how much memory an admitted peer's unread
data takes."""
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")
_LOOKS_WHILE_CALM = 5
_UNREAD = "too much of its data is unread (a flood, or an endless message): {}"
_SHARE = 0.02


@dataclass(slots=True, eq=False)
class Connection:
    """One accepted connection.

    Attributes:
        fd: libzmq's descriptor; use it only through `ConnectionTable`.
        address: "host:port" of the remote side, `LOCAL` for a Unix socket, "" if it was gone before
            we could ask.
        peer: routing id, b"" before its first message.
        user_id: public key it proved (Z85); "" before its first message, and without keys.
        reason: cause to report for its refusal or drop, "" if there is none.
        delivered: messages read from it.
        taken_bytes: wire bytes of all messages read from it.
        seen_delivered: ``delivered`` at the last survey.
        received: bytes received by the kernel at the last survey.
        silent_s: seconds in which surveys have found nothing new.
        is_admitted: True once it belongs to a registered worker, or the learner has accepted its
            subscription.
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
    is_admitted: bool = False


def bytes_received(fd: int) -> int | None:
    """Return the bytes that the kernel has received over a TCP descriptor so far, or None if
    unknown.
    """
    if not CAN_TELL_BYTES or fd < 0:
        return None
    # called often for all connections: no duplicate of the descriptor, since we only read; any
    # family will do
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


def resident_bytes() -> int | None:
    """Return the memory that this process has in use, or None if the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except OSError:
        return None


@contextlib.contextmanager
def _borrow(fd: int, address: str | None = None) -> Iterator[socket.socket | None]:
    """Yield the socket of a descriptor that libzmq owns, or None if there is none; valid within the
    block.

    ``address`` is the expected address of the other side; None is yielded if it differs.
    """
    try:
        duplicate = os.dup(fd)
    except OSError as error:
        if error.errno != errno.EMFILE:
            yield None
            return
        # a connection must be cut even if this process is out of descriptors. Without a duplicate,
        # libzmq could give the number to another connection between the check and the call; that
        # one would be cut, and connect again
        duplicate = fd
    try:
        connection = socket.socket(fileno=duplicate)
    except OSError:
        if duplicate != fd:
            os.close(duplicate)
        yield None
        return
    try:
        yield connection if address in (None, _name(connection)) else None
    finally:
        if duplicate == fd:
            connection.detach()
        else:
            connection.close()


def _name(connection: socket.socket) -> str:
    """Return host and port of the other side, `LOCAL` for a Unix socket, "" if it is gone."""
    if connection.family == socket.AF_UNIX:
        return LOCAL
    try:
        host, port, *_ = connection.getpeername()
    except (OSError, ValueError):
        return ""
    return url(host, port).removeprefix("tcp://")


def _open_sockets() -> set[int]:
    """Return the descriptors of this process's sockets; none if the system does not list them."""
    sockets: set[int] = set()
    with contextlib.suppress(OSError):  # there is no /proc, or no descriptor left to read it with
        for fd in map(int, os.listdir("/proc/self/fd")):
            # no duplicate of a file: closing one would release this process's locks on it
            with contextlib.suppress(OSError):  # closed meanwhile
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    sockets.add(fd)
    return sockets


def _local_port(connection: socket.socket) -> int:
    """Return the port on our side, 0 for a socket without one."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return 0
    port: int = connection.getsockname()[1]
    return port


def _shut_down(connection: socket.socket, *, reset: bool) -> bool:
    """End a TCP connection; return False if it was already gone."""
    try:
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True


class ConnectionTable:
    """Accepted connections by descriptor and by peer.

    There is at most one for each descriptor, so the process's limit of open files bounds the first
    table. The second one also contains ended connections, until the user of the table has reported
    their end and calls `forget`.

    Attributes:
        by_fd: descriptor -> its connection.
        by_peer: routing id -> its connection, for connections that have sent a message.
    """

    def __init__(self) -> None:
        self.by_fd: dict[int, Connection] = {}
        self.by_peer: dict[bytes, Connection] = {}

    def __len__(self) -> int:
        return len(self.by_fd)

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self.by_fd.values()))

    def accept(self, fd: int) -> Connection:
        """Add and return a new connection on this descriptor."""
        stale = self.by_fd.get(fd)
        if stale is not None:
            self.forget(stale)
        with _borrow(fd) as borrowed:
            connection = Connection(fd, "" if borrowed is None else _name(borrowed))
        self.by_fd[fd] = connection
        return connection

    def attach(self, fd: int, peer: bytes, user_id: str) -> Connection | None:
        """Record peer and key of the connection on this descriptor; return None if its end was
        already reported.
        """
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
        """Remove and return this descriptor's ended connection; its peer stays known until
        `forget`.
        """
        return self.by_fd.pop(fd, None)

    def forget(self, connection: Connection) -> None:
        """Remove a connection from which no further message will come."""
        if self.by_fd.get(connection.fd) is connection:
            del self.by_fd[connection.fd]
        if self.by_peer.get(connection.peer) is connection:
            del self.by_peer[connection.peer]

    def cut(self, connection: Connection, *, reset: bool = False) -> bool:
        """Shut down the TCP connection; return False if it was already gone.

        With ``reset``, data on its way to the other side is discarded, and the kernel keeps nothing
        of the connection.
        """
        if self.by_fd.get(connection.fd) is not connection:
            return False
        with _borrow(connection.fd, connection.address) as borrowed:
            return borrowed is not None and _shut_down(borrowed, reset=reset)

    def survey(self, elapsed_s: float) -> None:
        """Update each connection's counters; the previous survey was ``elapsed_s`` seconds ago."""
        for connection in self:
            received = self.num_received(connection)
            if connection.delivered != connection.seen_delivered or received != connection.received:
                connection.silent_s = 0.0
            else:
                connection.silent_s += elapsed_s
            connection.received = received
            connection.seen_delivered = connection.delivered

    def num_received(self, connection: Connection) -> int:
        """Return the bytes that the kernel has received for this connection so far; the last count
        if unknown.

        If the descriptor now belongs to another connection, this one has ended, and its end is
        reported next.
        """
        received = bytes_received(connection.fd)
        return connection.received if received is None else received


class FrameOverhead(NamedTuple):
    """Bytes of a frame on the wire in addition to its content.

    Attributes:
        max_short: content of the largest frame with a short header.
        short: overhead of such a frame.
        long: overhead of a larger frame.
    """

    max_short: int
    short: int
    long: int

    @classmethod
    def of(cls, *, curve: bool) -> FrameOverhead:
        """Return the overhead with or without encryption."""
        box = 33 if curve else 0  # name of the command, nonce, authentication and flags
        return cls(max_short=255 - box, short=2 + box, long=9 + box)


class _Bounds(NamedTuple):
    """Most unread bytes of one admitted connection, of one stranger, and of all connections."""

    admitted: int
    stranger: int
    total: int


class _Growth:
    """Growth of this process that unread data explains.

    Args:
        max_bytes: growth that needs no reason.

    Attributes:
        max_bytes: growth that needs no reason.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._resident: int | None = None  # at the last look
        self._grown: dict[Connection, int] = {}

    def look(self, arrived: dict[Connection, int]) -> int:
        """Return the growth by the data of all connections whose unread bytes pile up, 0 if
        unknown.

        Args:
            arrived: bytes that have arrived since the last look, of each of these connections; all
                others are forgotten.
        """
        before = self._resident
        self._resident = resident_bytes()
        if before is None or self._resident is None:
            return 0
        # other parts of this process grow, too: only as much counts as the new data can have taken
        all_arrived = sum(arrived.values())
        growth = min(max(0, self._resident - before), _MOST_PER_BYTE * all_arrived)
        self._grown = {
            connection: self._grown.get(connection, 0)
            + (growth * num_bytes // all_arrived if all_arrived else 0)
            for connection, num_bytes in arrived.items()
        }
        return sum(self._grown.values())


class BacklogGuard:
    """Thread that cuts off connections with too many unread bytes.

    A receive high-water mark makes libzmq stop reading a connection and start again later. If the
    connection was reset meanwhile and a heartbeat of the peer waits for an answer, libzmq 4.3.5
    then aborts the process. The learner's sockets therefore have no mark. The kernel knows how much
    a connection has received, and the endpoint how much was read; the difference waits in libzmq. A
    connection that exceeds a bound is cut off. A thread checks this, because a flood on loopback
    brings gigabytes in a second, and the loop may be busy for part of it.

    A peer without a registered worker needs to send only a ``hello`` or a question, so it may have
    few bytes unread, whatever the learner has answered. Its bytes count 32 times, because it could
    send an endless message of empty frames: each takes 64 bytes in libzmq for 2 on the wire.

    A registered worker's message may be large, and libzmq does not report the number of its frames
    before it is whole. The memory of this process does: if it has grown by many times the unread
    bytes since they began to pile up, they are no fragments. The connection with the most is cut
    off then. Data of encrypted connections takes about the memory of its bytes, so their user
    leaves this out.

    The unread data of an ended connection is not known exactly, because much may have arrived since
    the last check. All that end between two checks therefore count with the maximum, but only once,
    since a single thread receives for all: a whole host of workers can leave. New connections are
    refused while the sum is too large.

    The loop adds connections to the table, and a flood can keep it busy before it does: libzmq
    reads subscriptions in a loop of its own that lasts as long as more of them arrive. While the
    loop is busy, the thread therefore looks for connections of the port that the table does not
    contain yet. The bound of a stranger applies to them, too.

    If the thread dies, its error is raised on the loop and handled like the error of a callback.

    Args:
        table: the connections; the user of the table updates `Connection.taken_bytes` and
            ``delivered``.
        limits: the bounds.
        on_cut: called on the loop with each connection that was cut, and the reason.
        port: the port that they are connected to; None if we have made them.
        max_bytes: bound for an admitted connection; default: twice the largest message.
        max_growth_bytes: growth of this process above which admitted connections with expensive
            data are cut off; None if there is no such data.

    Attributes:
        cut_unseen: descriptors of connections that were cut before the loop had seen them, with the
            reasons.
    """

    def __init__(
        self,
        table: ConnectionTable,
        limits: EndpointLimits,
        on_cut: Callable[[Connection, str], None],
        *,
        port: int | None,
        max_bytes: int | None = None,
        max_growth_bytes: int | None = None,
    ) -> None:
        if max_bytes is None:
            max_bytes = 2 * limits.max_message_bytes
        self.cut_unseen: dict[int, str] = {}
        self._table = table
        self._bounds = _Bounds(
            admitted=max_bytes,
            stranger=min(max_bytes, _STRANGER_BYTES),
            total=max(limits.max_unread_bytes, max_bytes),
        )
        self._on_cut = on_cut
        self._port = port
        self._growth = None if max_growth_bytes is None else _Growth(max_growth_bytes)
        self._loop = asyncio.get_running_loop()
        self._is_loop_busy = False
        self._emptied = False
        self._left_behind = 0
        self._has_ended = False  # a connection, since the last check
        self._unread: dict[Connection, int] = {}
        self._cut: set[Connection] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aiorl-backlog", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """True if ended connections may have left too much unread data for a new one to be
        accepted.
        """
        return self._left_behind > self._bounds.total

    def emptied(self) -> None:
        """Record that everything received so far has been read."""
        self._emptied = True
        self._has_ended = False
        self._left_behind = 0

    def ended(self, connection: Connection) -> None:
        """Record the end of a connection of which some data may not be read yet."""
        self._left_behind += self._cost(connection, self._unread.get(connection, 0))
        if not self._has_ended:
            self._left_behind += _UNSEEN_BYTES
        self._has_ended = True

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._watch()
        except BaseException as error:
            failure = error  # Python deletes the except clause's name before the loop calls this

            def fail() -> None:
                raise failure

            self._call(fail)

    def _watch(self) -> None:
        pause_s = _LOOK_S
        num_calm = 0
        while not self._stop.wait(pause_s):
            # no hurry if a check is expensive, and everything that waited was read since the last
            # one
            is_calm = self._emptied and pause_s > _LOOK_S
            num_calm = num_calm + 1 if is_calm else _LOOKS_WHILE_CALM
            self._emptied = False
            if num_calm < _LOOKS_WHILE_CALM:
                continue
            num_calm = 0
            # CPU time: on a busy machine, other threads can delay this one for seconds
            before = time.thread_time()
            self._look()
            pause_s = max(_LOOK_S, (time.thread_time() - before) / _SHARE)

    def _look(self) -> None:
        connections = list(self._table)
        self._has_ended = False
        if self._is_loop_busy:
            if self._port is not None:
                self._cut_unknown(self._port)
        else:
            self._is_loop_busy = True
            self._call(self._loop_turned)
        self._cut.intersection_update(connections)
        bounds = self._bounds
        unread: dict[Connection, int] = {}
        for connection in connections:
            if connection in self._cut:
                continue
            taken_bytes = connection.taken_bytes  # read before the received bytes, which only grow
            num_bytes = self._table.num_received(connection) - taken_bytes
            if num_bytes > (bounds.admitted if connection.is_admitted else bounds.stranger):
                self._end(connection, f"{num_bytes} bytes")
            else:
                unread[connection] = num_bytes
        before = self._unread
        self._unread = unread
        strangers = [connection for connection in unread if not connection.is_admitted]
        self._keep_within(strangers, min(_MAX_COST_OF_STRANGERS, bounds.total))
        self._keep_within(list(unread), bounds.total)
        if self._growth is not None:
            self._keep_from_growing(before, self._growth)

    def _cost(self, connection: Connection, num_bytes: int) -> int:
        """Return the memory that a connection's unread bytes may take here."""
        return num_bytes if connection.is_admitted else num_bytes * _FRAME_COST

    def _keep_within(self, connections: list[Connection], max_cost: int) -> None:
        """Cut off the most expensive of these connections until the others together are within a
        bound.
        """
        costs = {
            connection: self._cost(connection, self._unread[connection])
            for connection in connections
            if connection not in self._cut
        }
        total = sum(costs.values())
        if total <= max_cost:
            return
        for connection in sorted(costs, key=costs.__getitem__, reverse=True):
            self._end(connection, f"{self._unread[connection]} bytes, the most of all connections")
            total -= costs[connection]
            if total <= max_cost:
                return

    def _keep_from_growing(self, before: dict[Connection, int], growth: _Growth) -> None:
        """Cut off the admitted connection with the most unread bytes if they take many times their
        size.

        Args:
            before: unread bytes at the last check.
            growth: growth of this process so far.
        """
        piled_up = {
            connection: num_bytes
            for connection, num_bytes in self._unread.items()
            if connection.is_admitted
            and connection not in self._cut
            and num_bytes > _FEW_BYTES
            and num_bytes >= before.get(connection, 0)  # otherwise a message was read
        }
        arrived = {
            connection: num_bytes - before.get(connection, 0)
            for connection, num_bytes in piled_up.items()
        }
        grown = growth.look(arrived)
        if grown > max(growth.max_bytes, _EXPENSIVE * sum(piled_up.values())):
            largest = max(piled_up, key=piled_up.__getitem__)
            self._end(
                largest, f"{piled_up[largest]} bytes, for which this process has grown by {grown}"
            )

    def _end(self, connection: Connection, what: str) -> None:
        if self._table.cut(connection, reset=True):
            self._cut.add(connection)
            self._call(self._on_cut, connection, _UNREAD.format(what))

    def _cut_unknown(self, port: int) -> None:
        """Cut connections that the loop has not seen yet and that exceed the bound of a stranger.

        The table may still have an ended connection on the same descriptor.
        """
        for fd in _open_sockets():
            with _borrow(fd) as borrowed:
                if borrowed is None or _local_port(borrowed) != port:
                    continue
                num_bytes = bytes_received(borrowed.fileno()) or 0
                if num_bytes <= self._bounds.stranger:
                    continue
                name = _name(borrowed)
                seen = self._table.by_fd.get(fd)
                if name and (seen is None or seen.address != name):
                    self.cut_unseen[fd] = _UNREAD.format(f"{num_bytes} bytes")
                    _shut_down(borrowed, reset=True)

    def _loop_turned(self) -> None:
        self._is_loop_busy = False

    def _call(self, callback: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(callback, *args)


class ListeningPort:
    """Connections of one listening socket.

    Args:
        socket: the socket, not bound yet.
        table: its connections.
        stats: counters of refusals and drops.
        tell: called with each event.
        on_gone: called with each ended connection of which the end must be reported once all its
            data was read.
        max_connections: limit above which new connections are cut off.

    Attributes:
        guard: bounds unread bytes; None until it is set, and if the kernel reports no counts.
        pump: reads the socket; set only if the data left by ended connections is bounded.
        ended_fds: descriptors of ended connections, until the user clears them; other connections
            may have them now.
        on_ended: called when a descriptor is added.
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
        """Report an event of a connection."""
        self._tell(Event(kind, reason, connection.peer, connection.address))

    def refuse(self, address: str, reason: str) -> None:
        """Report a refused connection."""
        self.stats.refused += 1
        logger.debug("%s refused: %s", address or "a peer", reason)
        self._tell(Event(EventKind.REFUSED, reason, address=address))

    def finish(self, connection: Connection) -> None:
        """Record that all data of an ended connection was read."""
        if not connection.delivered:
            self.refuse(
                connection.address,
                "it left without sending anything: is something else calling this port?",
            )

    def overflow(self, connection: Connection, reason: str) -> None:
        """Cut off a connection that has sent too much."""
        if not connection.reason:
            self.stats.rejected += 1
            self.cut(connection, reason)

    def cut(self, connection: Connection, reason: str) -> None:
        """Cut off a connection immediately; data on its way in either direction is discarded."""
        if not connection.reason:
            self.condemn(connection, reason)
            self.table.cut(connection, reset=True)
            self.tell(EventKind.DROPPED, connection, reason)

    def condemn(self, connection: Connection, reason: str) -> None:
        """Ignore this connection's messages from now on."""
        connection.reason = reason
        self.stats.dropped += 1
        logger.debug("%s cut off: %s", connection.address or "a peer", reason)

    def end_silent(self, connection: Connection) -> None:
        """Close a connection that has been silent for too long."""
        if connection.reason:
            return
        connection.reason = f"nothing was heard from it for {connection.silent_s:.1f} s"
        logger.debug("%s cut off: %s", connection.address or "a peer", connection.reason)
        self.table.cut(connection)

    def _on_monitor(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            connection = self.table.accept(value)
            reason = "" if self.guard is None else self.guard.cut_unseen.pop(value, "")
            if reason:
                self.overflow(connection, reason)
            elif len(self.table) > self.max_connections:
                self.cut(connection, f"there are {self.max_connections} connections already")
            elif self._is_backlog_full():
                self.cut(connection, "connections that have ended left too much unread data behind")
            else:
                self.tell(EventKind.CONNECTED, connection)
        elif event in (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
            self._failure = reason_seen_by_learner(event, value)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._failure = "-"  # the authenticator has reported it
        elif event == zmq.EVENT_DISCONNECTED:
            self._on_disconnected(value)

    def _is_backlog_full(self) -> bool:
        if self.guard is None or self.pump is None or not self.guard.is_full:
            return False
        if self.pump.is_empty():  # no message will arrive that would reset the guard
            self.guard.emptied()
        return self.guard.is_full

    def _on_disconnected(self, fd: int) -> None:
        connection = self.table.end(fd)
        self.ended_fds.add(fd)
        self.on_ended()
        failure = self._failure
        self._failure = ""
        if connection is None:
            return
        if self.guard is not None and self.pump is not None and not failure:
            self.guard.ended(connection)
        if not connection.peer and connection.reason:
            return  # we cut it off, and reported that
        if not connection.peer and failure:
            if failure != "-":
                self.refuse(connection.address, failure)
        elif connection.peer or not connection.delivered:
            self._on_gone(self, connection)
