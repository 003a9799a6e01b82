"""One listening socket's connections: who they are, whom it cuts off, and what is told of them."""

from __future__ import annotations

import logging
from collections.abc import Callable

import zmq

from aiorl.net.transport.backlog import BacklogGuard
from aiorl.net.transport.connections import Connection, ConnectionTable
from aiorl.net.transport.endpoint import EndpointStats, Event, EventKind
from aiorl.net.transport.monitor import SocketMonitor, reason_seen_by_learner
from aiorl.net.transport.pump import SocketPump
from aiorl.net.transport.security import LearnerKeys

__all__ = ["ListeningPort"]

logger = logging.getLogger(__name__)


class ListeningPort:
    """The connections of one listening socket.

    Args:
        socket: not bound yet.
        table: its connections.
        keys: the learner's, None if it does without.
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
        keys: LearnerKeys | None,
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
        self._keys = keys
        self._tell = tell
        self._on_gone = on_gone
        self._num_silent = 0  # connections that made a handshake and have not said a word
        self._num_ended = 0  # connections that have ended and are still to be judged
        self._failure = ""

    def tell(self, kind: EventKind, connection: Connection, reason: str = "") -> None:
        """Tell of something that has happened to a connection."""
        self._tell(Event(kind, reason, connection.peer, connection.address))

    def refuse(self, address: str, reason: str) -> None:
        """Tell that a connection was refused."""
        self.stats.refused += 1
        logger.debug("%s refused: %s", address or "a peer", reason)
        self._tell(Event(EventKind.REFUSED, reason, address=address))

    def spoke(self) -> None:
        """One of those that had not said a word has said the first one."""
        self._num_silent -= 1

    def finish(self, connection: Connection) -> None:
        """All that an ended connection has brought was read.

        If that is not a word, it was refused, unless a handshake was made that nobody else lays claim to.
        """
        self._num_ended -= 1
        if connection.peer:
            return
        if self._num_silent > 0:
            self._num_silent -= 1
        else:
            self.refuse(connection.address, "it made no ZeroMQ handshake: is something else calling this port?")

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
        if not connection.delivered:
            self._num_silent = max(0, self._num_silent - 1)
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
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._num_silent = min(self._num_silent + 1, len(self.table) + self._num_ended)
        elif event in (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
            self._failure = reason_seen_by_learner(event, value, self._keys)
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
            self._num_ended += 1
            self._on_gone(self, connection)
