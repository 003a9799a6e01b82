"""The learner's endpoint over ZeroMQ: a ROUTER for addressed messages and an XPUB for
broadcasts.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from aiorl.net.transport.admission import Admission
from aiorl.net.transport.connections import (
    MAX_GROWTH_BYTES,
    BacklogGuard,
    Connection,
    ConnectionTable,
    FrameOverhead,
    ListeningPort,
)
from aiorl.net.transport.endpoint import (
    Buffer,
    EndpointLimits,
    EndpointStats,
    Event,
    EventKind,
    Lifetime,
    total_bytes,
)
from aiorl.net.transport.learner_sockets import MAX_SUBSCRIBER_BYTES, LearnerSockets
from aiorl.net.transport.messenger import RETRY_S, Messenger
from aiorl.net.transport.security import LearnerKeys
from aiorl.net.transport.sockets import (
    BROADCAST_HEAD,
    MORE,
    SubscriptionPump,
    fd_of,
    send_frames,
    user_id_of,
)
from aiorl.net.transport.system import keep_message_buffers, open_file_limit, peers_per_port
from aiorl.net.transport.timers import Timers

logger = logging.getLogger(__name__)

_SETTLE_S = 0.05
_GONE_WITHIN_S = 1.0
_PART_AFTER_S = 0.5
_ANNOUNCE_S = 0.002
LOOK_FOR_FILES_S = 10.0
"""Seconds between two looks at whether the socket files are still there."""
_NOT_A_SUBSCRIPTION = "it sent more than a subscription to the broadcast port"


class ZmqLearnerEndpoint:
    """Endpoint of the learner (see `LearnerEndpoint`).

    Args:
        bind: "tcp://HOST:PORT"; the broadcast port is PORT + 1. PORT 0 takes a free pair.
        keys: the learner's keys. Without keys, only workers of the same user on this host can join
            (see `aiorl.net.transport.local`), and the two ports are reserved without listening.
        insecure: True to let everyone who can reach the address connect if there are no keys.
        limits: the bounds.

    Attributes:
        on_message: called with (peer, frames, user_id); ``user_id`` is the public key that the peer
            proved (Z85), "" without keys.
        on_event: called with each `Event`.
        is_registered: peer -> True if it is a registered worker; asked when a message is sent to
            it. Until then it may send only small messages, and few of those sent to it wait if it
            does not read them.
    """

    def __init__(
        self,
        bind: str,
        *,
        keys: LearnerKeys | None = None,
        insecure: bool = False,
        limits: EndpointLimits | None = None,
    ) -> None:
        self.on_message: Callable[[bytes, list[memoryview], str], None] = (
            lambda peer, frames, user_id: None
        )
        self.on_event: Callable[[Event], None] = lambda event: None
        self.is_registered: Callable[[bytes], bool] = lambda peer: True
        self._limits = limits or EndpointLimits()
        self._sockets = LearnerSockets(bind, keys, insecure=insecure, limits=self._limits)
        self._stats = EndpointStats()
        self._lifetime = Lifetime()
        # connections that have ended, with the time, until their end is reported
        self._gone: deque[tuple[float, ListeningPort, Connection]] = deque()
        self._surveyed = 0.0

    @property
    def address(self) -> str:
        """Address that workers connect to; valid after `start`."""
        return self._sockets.address

    @property
    def local_address(self) -> str:
        """Address for workers that the learner itself starts; valid after `start`."""
        return self._sockets.local_address

    def start(self) -> None:
        """Bind both sockets and begin to receive.

        Raises:
            ConfigError: when a port is in use, or the address does not belong to this machine.
            SecurityError: when there is no place for sockets that only this user's workers can
                reach.
        """
        limits = self._limits
        sockets = self._sockets
        self._loop = asyncio.get_running_loop()
        self._timers = Timers()
        keep_message_buffers()
        sockets.open()
        max_peers = peers_per_port(limits.max_peers)
        if max_peers < limits.max_peers:
            text = (
                "at most %d connections are taken on each port instead of %d: this process may have"
                " %d files open; raise the limit (ulimit -n) for more workers"
            )
            logger.warning(text, max_peers, limits.max_peers, open_file_limit())
        self._ports = tuple(
            ListeningPort(
                socket,
                ConnectionTable(),
                self._stats,
                tell=self.on_event,
                on_gone=self._on_gone,
                max_connections=max_peers,
            )
            for socket in (sockets.router, sockets.xpub)
        )
        samples_port, broadcast_port = self._ports
        self._admission = Admission(sockets.context, sockets.keys, self._ports)
        try:
            sockets.bind()
        except BaseException:
            self._release()
            sockets.discard()
            raise
        self._messenger = Messenger(
            sockets.router,
            samples_port,
            self,
            check_key=self._admission.check,
            limits=limits,
            overhead=FrameOverhead.of(curve=sockets.keys is not None),
            timers=self._timers,
        )
        self._broadcaster = Broadcaster(
            sockets.xpub,
            broadcast_port,
            self._admission.check,
            lambda: self._timers.start("announce", _ANNOUNCE_S, self._broadcaster.announce),
        )
        if sockets.needs_guard:
            self._start_guards()
        self._lifetime.is_started = True
        self._surveyed = self._loop.time()
        self._timers.start("tick", limits.times.tick_s, self._tick)
        if sockets.path is not None:
            self._timers.start("files", LOOK_FOR_FILES_S, self._bind_deleted)
        if sockets.is_listening_on_ports:
            logger.info("listening on %s and on port %d", self.address, sockets.port + 1)

    def send(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        """Send one message to a peer, or queue it while its connection is busy.

        A peer with a full queue is cut off, which an event reports.

        Returns:
            False if that peer is not connected or no longer connected.

        Raises:
            EndpointClosed: after `close`.
        """
        self._lifetime.check_open()
        return self._messenger.send(peer, frames)

    def broadcast(self, frames: Sequence[Buffer]) -> None:
        """Send one message to every worker with a subscription in force; never waits.

        A subscriber that is too slow misses it, and notices that from the number of the next one.

        Raises:
            EndpointClosed: after `close`.
        """
        self._lifetime.check_open()
        self._broadcaster.send(frames)
        self._stats.bytes_out += total_bytes(frames)

    def drop(self, peer: bytes, reason: str) -> None:
        """Cut a peer off: ignore all further messages, and give those already sent to it half a
        second to leave.

        Its unread messages are discarded.
        """
        if not self._lifetime.is_open:
            return
        port = self._messenger.port
        connection = port.table.by_peer.get(peer)
        if connection is None or connection.reason:
            return
        port.condemn(connection, reason)
        self._loop.call_later(_PART_AFTER_S, self._part, connection)
        port.tell(EventKind.DROPPED, connection, reason)

    def has_unsent(self, peer: bytes) -> bool:
        """Return whether our memory still holds a large message to a peer, or a message that waits
        for it.
        """
        return self._messenger.has_unsent(peer)

    def host_of(self, peer: bytes) -> str:
        """Return the address of the host of a peer, without the port, or "" if unknown."""
        connection = self._messenger.port.table.by_peer.get(peer)
        return "" if connection is None else connection.address.rpartition(":")[0]

    def stats(self) -> EndpointStats:
        """Return the current counters."""
        queued = self._messenger.queues.num_messages if self._lifetime.is_started else 0
        return dataclasses.replace(self._stats, queued_messages=queued)

    async def close(self, *, flush_s: float = 0.5) -> None:
        """Give goodbyes up to ``flush_s`` seconds to leave, then free everything, which takes at
        most 2 s more.
        """
        if not self._lifetime.is_open:
            self._lifetime.is_closed = True
            return
        messenger = self._messenger
        until = self._loop.time() + flush_s
        while messenger.queues and self._loop.time() < until:
            messenger.flush()
            await asyncio.sleep(RETRY_S)
        self._lifetime.is_closed = True
        self._timers.close()
        for port in self._ports:
            if port.guard is not None:
                port.guard.close()
        messenger.pump.close()
        self._broadcaster.pump.close()
        self._release()
        await self._sockets.term(max(0.0, until - self._loop.time()))

    # Connections
    # ----------------------------------------------------------------------------------------------

    def _on_gone(self, port: ListeningPort, connection: Connection) -> None:
        self._gone.append((self._loop.time(), port, connection))
        self._timers.start("gone", _SETTLE_S, self._tell_gone)

    def _tell_gone(self) -> None:
        """Report ended connections, after all messages that came over them have been delivered.

        If others send so much that the socket never becomes empty, report them after a second: by
        then each peer has had its turn many times.
        """
        if self._lifetime.is_closed:
            return
        is_empty = self._messenger.pump.drain(at_most=self._limits.messages_per_turn)
        now = self._loop.time()
        after_s = _SETTLE_S if is_empty else _GONE_WITHIN_S
        while self._gone and now - self._gone[0][0] >= 0.9 * after_s and self._lifetime.is_open:
            _, port, connection = self._gone.popleft()
            port.finish(connection)
            if connection.peer:
                self._report_gone(connection)
        if self._gone:
            self._timers.start("gone", RETRY_S, self._tell_gone)

    def _report_gone(self, connection: Connection) -> None:
        port = self._messenger.port
        if port.table.by_peer.get(connection.peer) is not connection:
            return
        port.table.forget(connection)
        self._messenger.forget(connection.peer)
        was_silent = connection.silent_s > self._limits.times.dead_after_s
        kind = EventKind.SILENT if was_silent else EventKind.DISCONNECTED
        port.tell(kind, connection, connection.reason or "its connection ended")

    def _part(self, connection: Connection) -> None:
        """Cut off a dropped peer, even if it has left messages unread."""
        if not self._lifetime.is_closed:
            self._messenger.queues.forget(connection.peer)
            self._messenger.port.table.cut(connection)

    # Upkeep
    # ----------------------------------------------------------------------------------------------

    def _start_guards(self) -> None:
        """Bound the unread data of each port's peers."""
        sockets = self._sockets
        samples_port = self._messenger.port
        broadcast_port = self._broadcaster.port
        samples_port.guard = BacklogGuard(
            samples_port.table,
            self._limits,
            samples_port.overflow,
            port=sockets.port,
            max_growth_bytes=MAX_GROWTH_BYTES if sockets.keys is None else None,
        )
        samples_port.pump = self._messenger.pump
        broadcast_port.guard = BacklogGuard(
            broadcast_port.table,
            self._limits,
            broadcast_port.overflow,
            port=sockets.port + 1,
            max_bytes=MAX_SUBSCRIBER_BYTES,
        )

    def _tick(self) -> None:
        self._timers.start("tick", self._limits.times.tick_s, self._tick)
        messenger = self._messenger
        for pump in (messenger.pump, self._broadcaster.pump, self._admission.pump):
            pump.poll()
        for port in self._ports:
            port.monitor.pump.poll()
        messenger.flush()
        self._admission.cut_withdrawn()
        self._survey(is_empty=messenger.pump.drain(at_most=self._limits.messages_per_turn))

    def _survey(self, *, is_empty: bool) -> None:
        """Find connections that are silent, or that send more than they need to.

        Time in which we stood still ourselves does not count as silence.
        """
        times = self._limits.times
        samples_port = self._messenger.port
        broadcast_port = self._broadcaster.port
        now = self._loop.time()
        elapsed_s = min(now - self._surveyed, 2 * times.tick_s)
        self._surveyed = now
        # if the socket is not empty, other peers' messages may still be unread
        samples_port.table.survey(elapsed_s if is_empty else 0.0)
        first_within_s = times.dead_after_s + times.handshake_s
        for connection in samples_port.table:
            patience_s = times.dead_after_s if connection.delivered else first_within_s
            if connection.silent_s > patience_s:
                samples_port.end_silent(connection)
        broadcast_port.table.survey(elapsed_s)
        for connection in broadcast_port.table:
            if not connection.delivered and connection.silent_s > first_within_s:
                broadcast_port.end_silent(connection)

    def _bind_deleted(self) -> None:
        self._timers.start("files", LOOK_FOR_FILES_S, self._bind_deleted)
        if not self._sockets.is_deleted:
            return
        with contextlib.ExitStack() as stack:
            if all(stack.enter_context(port.monitor.make_room()) for port in self._ports):
                self._sockets.bind_deleted()

    def _release(self) -> None:
        self._sockets.release()
        for port in self._ports:
            port.monitor.close()
        self._admission.close()


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
