"""The learner's endpoint over ZeroMQ: a ROUTER for addressed messages and an XPUB for
broadcasts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import zmq

from aiorl.config.addresses import is_loopback, reachable_from_here, split_address, url
from aiorl.errors import EndpointClosed, SecurityError
from aiorl.net.transport.connections import (
    CAN_TELL_BYTES,
    LOCAL,
    MAX_GROWTH_BYTES,
    BacklogGuard,
    Connection,
    ConnectionTable,
    ListeningPort,
    wire_overhead,
)
from aiorl.net.transport.endpoint import Buffer, EndpointLimits, EndpointStats, Event, EventKind
from aiorl.net.transport.local import bind_local, clear_local, forget_local, urls_of
from aiorl.net.transport.security import (
    AdmittedKeys,
    Authenticator,
    LearnerKeys,
    serve,
    serve_local,
)
from aiorl.net.transport.sockets import (
    BROADCAST_HEAD,
    MORE,
    SendQueues,
    SocketPump,
    bind_pair,
    fd_of,
    keep,
    make_context,
    make_socket,
    reserve_pair,
    send_frames,
    term,
    total_bytes,
    user_id_of,
)
from aiorl.net.transport.system import keep_message_buffers, open_file_limit, peers_per_port

logger = logging.getLogger(__name__)

_SETTLE_S = 0.05
_GONE_WITHIN_S = 1.0
_RETRY_S = 0.02
_PART_AFTER_S = 0.5
_ANNOUNCE_S = 0.002
_LOOK_FOR_FILES_S = 10.0
MAX_SUBSCRIBER_BYTES = 4096
"""Limit of one message and of all messages of a subscriber; handshake and subscription take some
hundred bytes."""
_STRANGER_QUEUE_BYTES = 1 << 20
"""Most bytes that wait for a peer without a registered worker; one message of any size may."""
_NOT_A_SUBSCRIPTION = "it sent more than a subscription to the broadcast port"


class ZmqLearnerEndpoint:
    """Endpoint of the learner: addressed messages in both directions, and broadcasts to all
    workers.

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
        self._host, self._port = split_address(bind, key="bind")
        self._keys = keys
        self._is_insecure = insecure and keys is None
        if self._is_insecure and not is_loopback(self._host):
            logger.warning(
                "%s is open to everyone who can reach it: --insecure was given, without keys", bind
            )
        self._path: Path | None = None
        self._reserved: list[socket.socket] = []
        self._limits = limits or EndpointLimits()
        self._queues = SendQueues(self._limits.peer_queue_messages, self._limits.queue_bytes)
        self._leaving: dict[bytes, zmq.MessageTracker] = {}  # last large message to each peer
        self._peers = ConnectionTable()
        self._subscribers = ConnectionTable()
        self._surveyed = 0.0
        self._ports: tuple[ListeningPort, ...] = ()
        self._gone: deque[tuple[float, ListeningPort, Connection]] = (
            deque()
        )  # ended in the last _GONE_WITHIN_S
        self._discarding = False
        self._max_short, self._overhead, self._long_overhead = wire_overhead(
            curve=self._keys is not None
        )
        self._guard: BacklogGuard | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._started = False
        self._closed = False
        self._stats = EndpointStats()

    @property
    def address(self) -> str:
        """Address that workers connect to; valid after `start`."""
        return url(self._host, self._port)

    @property
    def local_address(self) -> str:
        """Address for workers that the learner itself starts; valid after `start`."""
        return reachable_from_here(self.address) if self._path is None else urls_of(self._path)[0]

    def start(self) -> None:
        """Bind both sockets and begin to receive.

        Raises:
            ConfigError: when a port is in use, or the address does not belong to this machine.
            SecurityError: when there is no place for sockets that only this user's workers can
                reach.
        """
        self._loop = asyncio.get_running_loop()
        keep_message_buffers()
        self._context = make_context()
        self._admitted = None if self._keys is None else AdmittedKeys(self._keys.admitted)
        self._acted_on: Mapping[bytes, str] = (
            {} if self._admitted is None else self._admitted.refresh()
        )
        is_ipv6 = ":" in self._host
        self._router = make_socket(self._context, zmq.ROUTER, self._limits, ipv6=is_ipv6)
        self._router.router_mandatory = True
        self._xpub = make_socket(self._context, zmq.XPUB, self._limits, ipv6=is_ipv6)
        self._xpub.sndhwm = self._limits.broadcast_messages
        self._xpub.maxmsgsize = MAX_SUBSCRIBER_BYTES
        self._xpub.setsockopt(zmq.XPUB_VERBOSER, 1)
        most = self._max_peers = peers_per_port(self._limits.max_peers)
        if most < self._limits.max_peers:
            text = (
                "at most %d connections are taken on each port instead of %d: this process may have"
                " %d files open; raise the limit (ulimit -n) for more workers"
            )
            logger.warning(text, most, self._limits.max_peers, open_file_limit())
        self._ports = tuple(
            ListeningPort(socket, table, self._stats, self.on_event, self._on_gone, most)
            for socket, table in ((self._router, self._peers), (self._xpub, self._subscribers))
        )
        self._samples_port, self._broadcast_port = self._ports
        self._authenticator = Authenticator(
            self._context, self._admitted, self._samples_port.refuse
        )
        try:
            self._bind()
        except BaseException:
            self._release()
            self._router.close(0)
            self._xpub.close(0)
            self._context.term()
            raise
        self._pump = SocketPump(
            self._router,
            self._receive,
            per_turn=self._limits.messages_per_turn,
            after_turn=self._flush,
        )
        self._broadcaster = Broadcaster(
            self._xpub,
            self._broadcast_port,
            self._check_key,
            lambda: self._later("announce", _ANNOUNCE_S, self._broadcaster.announce),
        )
        if CAN_TELL_BYTES and not self._reserved:
            self._guard = self._samples_port.guard = BacklogGuard(
                self._peers,
                self._limits,
                self._samples_port.overflow,
                port=self._port,
                max_growth_bytes=MAX_GROWTH_BYTES if self._keys is None else None,
            )
            self._samples_port.pump = self._pump
            self._broadcast_port.guard = BacklogGuard(
                self._subscribers,
                self._limits,
                self._broadcast_port.overflow,
                port=self._port + 1,
                max_bytes=MAX_SUBSCRIBER_BYTES,
            )
        self._started = True
        self._surveyed = self._loop.time()
        self._later("tick", self._limits.tick_s, self._tick)
        if self._path is not None:
            self._later("files", _LOOK_FOR_FILES_S, self._keep_files)
            logger.info("workers of this user on this host find the learner at %s", self._path)
        if not self._reserved:
            logger.info("listening on %s and on port %d", self.address, self._port + 1)

    def send(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        """Send one message to a peer, or queue it while its connection is busy.

        A peer with a full queue is cut off, which an event reports.

        Returns:
            False if that peer is not connected or no longer connected.

        Raises:
            EndpointClosed: after `close`.
        """
        self._check_open()
        connection = self._peers.by_peer.get(peer)
        if connection is None or connection.reason:
            return False
        if not connection.is_admitted:
            connection.is_admitted = self.is_registered(peer)
        if peer not in self._queues:
            sent = self._try_send(peer, frames)
            if sent is not None:
                return sent
        if not self._queues.put(peer, frames) or not (
            connection.is_admitted or self._is_queue_small(peer)
        ):
            self._cut_unread(peer)
            return False
        while self._queues.num_bytes > self._limits.max_queued_bytes:
            self._cut_unread(self._queues.largest)
        self._retry_soon()
        return not connection.reason

    def broadcast(self, frames: Sequence[Buffer]) -> None:
        """Send one message to every worker with a subscription in force; never waits.

        A subscriber that is too slow misses it, and notices that from the number of the next one.

        Raises:
            EndpointClosed: after `close`.
        """
        self._check_open()
        self._broadcaster.send(frames)
        self._stats.bytes_out += total_bytes(frames)

    def drop(self, peer: bytes, reason: str) -> None:
        """Cut a peer off: ignore all further messages, and give those already sent to it half a
        second to leave.

        Its unread messages are discarded.
        """
        connection = self._peers.by_peer.get(peer)
        if connection is None or connection.reason or self._closed:
            return
        self._samples_port.condemn(connection, reason)
        self._loop.call_later(_PART_AFTER_S, self._part, connection)
        self._samples_port.tell(EventKind.DROPPED, connection, reason)

    def has_unsent(self, peer: bytes) -> bool:
        """Return whether our memory still holds a large message to a peer, or a message that waits
        for it.
        """
        tracker = self._leaving.get(peer)
        if tracker is not None and tracker.done:
            del self._leaving[peer]
            tracker = None
        return tracker is not None or peer in self._queues

    def host_of(self, peer: bytes) -> str:
        """Return the address of the host of a peer, without the port, or "" if unknown."""
        connection = self._peers.by_peer.get(peer)
        return "" if connection is None else connection.address.rpartition(":")[0]

    def stats(self) -> EndpointStats:
        """Return the current counters."""
        return dataclasses.replace(self._stats, queued_messages=self._queues.num_messages)

    async def close(self, *, flush_s: float = 0.5) -> None:
        """Give goodbyes up to ``flush_s`` seconds to leave, then free everything, which takes at
        most 2 s more.
        """
        if self._closed or not self._started:
            self._closed = True
            return
        until = self._loop.time() + flush_s
        while self._queues and self._loop.time() < until:
            self._flush()
            await asyncio.sleep(_RETRY_S)
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        for port in self._ports:
            if port.guard is not None:
                port.guard.close()
        self._pump.close()
        self._broadcaster.pump.close()
        self._release()
        await term(self._context, [self._router, self._xpub], max(0.0, until - self._loop.time()))

    # --- sending

    def _try_send(self, peer: bytes, frames: Sequence[Buffer]) -> bool | None:
        """Send now; return True if sent, False if there is no such peer, None if its connection is
        busy.
        """
        try:
            try:
                self._router.send(peer, MORE)
            except zmq.Again:
                return None
            except zmq.ZMQError as error:
                if error.errno == zmq.EHOSTUNREACH:
                    return False
                raise
            tracker = send_frames(self._router, frames, track=True)
        finally:
            self._pump.settle()
        if tracker is not None:
            self._leaving[peer] = tracker
        self._stats.bytes_out += total_bytes(frames)
        return True

    def _is_queue_small(self, peer: bytes) -> bool:
        """Return whether no more waits for a peer than for one that has no registered worker."""
        return (
            self._queues.waiting(peer) <= 1
            or self._queues.waiting_bytes(peer) <= _STRANGER_QUEUE_BYTES
        )

    def _cut_unread(self, peer: bytes) -> None:
        """Cut off a peer for which too many messages wait."""
        waiting = self._queues.waiting(peer)
        self._queues.forget(peer)
        connection = self._peers.by_peer.get(peer)
        if connection is not None:
            self._samples_port.cut(
                connection, f"it does not read its messages: {waiting} are waiting"
            )

    def _flush(self) -> None:
        self._queues.flush(self._try_send)
        if self._queues:
            self._retry_soon()

    def _retry_soon(self) -> None:
        self._later("retry", _RETRY_S, self._flush)

    def _later(self, name: str, after_s: float, call: Callable[[], None]) -> None:
        """Schedule ``call``; further requests until then are merged with it."""

        def run() -> None:
            del self._timers[name]
            call()

        if name not in self._timers and not self._closed:
            self._timers[name] = self._loop.call_later(after_s, run)

    # --- receiving

    def _receive(self) -> None:
        if self._discarding:
            self._discard_some()
            return
        try:
            id_frame = self._router.recv(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            if self._guard is not None:
                self._guard.emptied()
            raise
        peer = id_frame.bytes
        connection = self._peers.by_peer.get(peer)
        if connection is None:
            connection = self._attach(id_frame, peer)
        frames: list[memoryview] = []
        num_bytes = wire_bytes = 0
        more = id_frame.more
        while more:
            frame = self._router.recv(zmq.DONTWAIT, copy=False)
            size = len(frame)
            num_bytes += size
            wire_bytes += size + (
                self._overhead if size <= self._max_short else self._long_overhead
            )
            frames.append(keep(frame))
            more = frame.more
            if len(frames) > self._limits.max_frames or num_bytes > self._limits.max_message_bytes:
                self._discarding = more
                self._stats.rejected += 1
                if connection is not None:
                    reason = (
                        f"its message exceeds the limit: {len(frames)} frames, {num_bytes} bytes"
                    )
                    self._samples_port.cut(connection, reason)
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
        self.on_message(peer, frames, connection.user_id)

    def _discard_some(self) -> None:
        for _ in range(self._limits.max_frames):
            if not self._router.recv(zmq.DONTWAIT, copy=False).more:
                self._discarding = False
                return

    def _attach(self, frame: zmq.Frame, peer: bytes) -> Connection | None:
        port = self._samples_port
        port.monitor.pump.drain()  # events reported before this message come first
        connection = self._peers.attach(fd_of(frame), peer, user_id_of(frame))
        if connection is not None:
            self._check_key(port, connection)
        return connection

    # --- connections

    def _on_gone(self, port: ListeningPort, connection: Connection) -> None:
        self._gone.append((self._loop.time(), port, connection))
        self._later("gone", _SETTLE_S, self._tell_gone)

    def _tell_gone(self) -> None:
        """Report ended connections, after all messages that came over them have been delivered.

        If others send so much that the socket never becomes empty, report them after a second: by
        then each peer has had its turn many times.
        """
        if self._closed:
            return
        is_empty = self._pump.drain(at_most=self._limits.messages_per_turn)
        now = self._loop.time()
        after_s = _SETTLE_S if is_empty else _GONE_WITHIN_S
        while self._gone and now - self._gone[0][0] >= 0.9 * after_s and not self._closed:
            _, port, connection = self._gone.popleft()
            port.finish(connection)
            if connection.peer:
                self._report_gone(connection)
        if self._gone:
            self._later("gone", _RETRY_S, self._tell_gone)

    def _report_gone(self, connection: Connection) -> None:
        if self._peers.by_peer.get(connection.peer) is not connection:
            return
        self._peers.forget(connection)
        self._queues.forget(connection.peer)
        self._leaving.pop(connection.peer, None)
        reason = connection.reason or "its connection ended"
        kind = (
            EventKind.SILENT
            if connection.silent_s > self._limits.dead_after_s
            else EventKind.DISCONNECTED
        )
        self._samples_port.tell(kind, connection, reason)

    def _part(self, connection: Connection) -> None:
        """Cut off a dropped peer, even if it has left messages unread."""
        if not self._closed:
            self._queues.forget(connection.peer)
            self._peers.cut(connection)

    # --- upkeep

    def _tick(self) -> None:
        self._later("tick", self._limits.tick_s, self._tick)
        pumps = [self._pump, self._broadcaster.pump, self._authenticator.pump]
        for pump in (*pumps, *(port.monitor.pump for port in self._ports)):
            pump.look()
        self._flush()
        self._cut_withdrawn()
        self._survey(is_empty=self._pump.drain(at_most=self._limits.messages_per_turn))

    def _survey(self, *, is_empty: bool) -> None:
        """Find connections that are silent, or that send more than they need to.

        Time in which we stood still ourselves does not count as silence.
        """
        limits = self._limits
        now = self._loop.time()
        elapsed_s = min(now - self._surveyed, 2 * limits.tick_s)
        self._surveyed = now
        self._peers.survey(
            elapsed_s if is_empty else 0.0
        )  # other peers' messages may still be unread
        for connection in self._peers:
            if connection.silent_s > limits.dead_after_s + (
                0 if connection.delivered else limits.handshake_s
            ):
                self._samples_port.end_silent(connection)
        self._subscribers.survey(elapsed_s)
        for connection in self._subscribers:
            if (
                not connection.delivered
                and connection.silent_s > limits.dead_after_s + limits.handshake_s
            ):
                self._broadcast_port.end_silent(connection)

    def _keep_files(self) -> None:
        """Bind again if the socket files were deleted, for example because their user has logged
        out.
        """
        self._later("files", _LOOK_FOR_FILES_S, self._keep_files)
        if self._path is not None and not self._path.is_socket():
            try:
                self._path = bind_local((self._router, self._xpub), self._port)
            except SecurityError as error:
                logger.warning("%s; new workers cannot find the learner", error)
            else:
                logger.warning(
                    "workers of this user on this host now find the learner at %s", self._path
                )

    def _check_key(self, port: ListeningPort, connection: Connection) -> None:
        """Cut off a connection if its key was withdrawn since the handshake."""
        if self._admitted is None or connection.address == LOCAL:
            return
        if self._admitted.name_of(connection.user_id.encode()) is None:
            port.cut(connection, "its key is no longer admitted")

    def _cut_withdrawn(self) -> None:
        """Cut off connections with a key that is no longer admitted.

        The key of a connection is known from its first message on. When a key is withdrawn, all
        connections without a message are therefore cut, too; those with another key connect again.
        """
        if self._admitted is None:
            return
        before = self._acted_on
        self._acted_on = self._admitted.refresh()
        if before.keys() <= self._acted_on.keys():
            return
        for port in self._ports:
            port.monitor.pump.drain()
        for port in self._ports:
            for connection in port.table:
                public_key = connection.user_id.encode()
                if connection.address == LOCAL:
                    continue
                if not public_key:
                    port.cut(
                        connection,
                        "a key was withdrawn, and this connection had not shown its own yet",
                    )
                elif public_key not in self._acted_on:
                    name = before.get(public_key, connection.user_id)
                    port.cut(connection, f"its key {name!r} is no longer admitted")

    def _bind(self) -> None:
        """Bind both sockets: to ports if other users may join, and to files that only this user can
        reach.

        Each listener keeps the options that its socket has at the time of the bind.
        """
        pair = self._router, self._xpub
        if self._keys is None and not self._is_insecure:
            self._port, self._reserved = reserve_pair(
                "127.0.0.1", self._port
            )  # stands for every loopback address
        else:
            for each in pair:
                serve(each, self._keys)
                if CAN_TELL_BYTES:
                    each.rcvhwm = 0  # see `BacklogGuard`
            self._port = bind_pair(*pair, self._host, self._port)
        clear_local(self._port)
        if self._is_insecure:
            return
        for each in pair:
            serve_local(each)
            each.rcvhwm = self._limits.receive_messages
        self._path = bind_local(pair, self._port)

    def _release(self) -> None:
        for each in self._reserved:
            each.close()
        if self._path is not None:
            forget_local(self._port)
        for port in self._ports:
            port.monitor.close()
        self._authenticator.close()

    def _check_open(self) -> None:
        if self._closed or not self._started:
            raise EndpointClosed(
                "the endpoint is closed" if self._closed else "the endpoint was not started"
            )


class Broadcaster:
    """Sender of broadcasts, which also accepts subscriptions.

    Args:
        socket: an XPUB.
        port: its connections.
        check_key: cuts a connection off if its key is no longer admitted.
        announce_soon: schedules a call of `announce`.

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
        port.on_ended = self.pump.schedule  # clears `ended_fds` soon
        self._socket = socket
        self._port = port
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
            port.monitor.pump.drain()  # events reported before this message come first
        connection = port.table.attach(fd, b"", user_id_of(frame))
        if connection is None:
            return
        self._check_key(port, connection)
        if connection.reason:
            return
        connection.delivered += 1
        if (
            fd in port.ended_fds
        ):  # the message may be another connection's; the kernel's count is this one's
            is_sound = port.table.look(connection) <= MAX_SUBSCRIBER_BYTES
        else:
            is_sound = frame.bytes == b"\x01" and not frame.more and not connection.is_admitted
            connection.is_admitted = True
        if is_sound:
            self._announce_soon()
        else:
            port.overflow(connection, _NOT_A_SUBSCRIPTION)
