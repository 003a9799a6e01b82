"""The learner's endpoint over ZeroMQ: one ROUTER for all that is addressed, one XPUB for all that goes to everyone."""

from __future__ import annotations

import asyncio
import logging
import secrets
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import zmq

from aiorl.config.address import split_address
from aiorl.errors import EndpointClosed
from aiorl.transport.backlog import BacklogGuard, wire_overhead
from aiorl.transport.buffers import keep_message_buffers
from aiorl.transport.connections import CAN_TELL_BYTES, Connection, ConnectionTable
from aiorl.transport.descriptors import open_file_limit, peers_per_port
from aiorl.transport.endpoint import Buffer, EndpointLimits, EndpointStats, Event, EventKind
from aiorl.transport.monitor import SocketMonitor, reason_seen_by_learner
from aiorl.transport.pump import SocketPump, keep, send_frames, total_bytes
from aiorl.transport.run_keys import RunKeyFile, forget_run_keys, make_learner_keys, make_worker_keys
from aiorl.transport.security import AdmittedKeys, LearnerKeys, WorkerKeys, check_bind
from aiorl.transport.send_queues import SendQueues
from aiorl.transport.zap import Authenticator
from aiorl.transport.zmq_sockets import bind_pair, make_socket, serve, term, url

__all__ = ["BROADCAST_HEAD", "ZmqLearnerEndpoint"]

logger = logging.getLogger(__name__)

BROADCAST_HEAD = struct.Struct("<8sQ")
"""First frame of a broadcast: the learner endpoint's random epoch, and how many broadcasts it has made.
A message with this frame alone only announces that number."""

_SETTLE_S = 0.05
_GONE_WITHIN_S = 1.0
_RETRY_S = 0.02
_PART_AFTER_S = 0.25
_PART_WITHIN_S = 1.0
_MAX_SUBSCRIPTION_BYTES = 4096
_MAX_SUBSCRIBER_BYTES = 16 << 10
_SUBSCRIPTIONS_PER_LOOK = 64
_NOT_A_SUBSCRIPTION = "it sent more than a subscription to the broadcast port"
_ANNOUNCE_S = 0.002
_KEEP_FILE_S = 60.0


class ZmqLearnerEndpoint:
    """`LearnerEndpoint` over ZeroMQ.

    Args:
        bind: "tcp://HOST:PORT"; the broadcast port is PORT + 1. PORT 0 takes a free pair.
        keys: the learner's keys; None makes some for the run, by which only its own user's workers on this host
            join.
        insecure: do without keys if none are given: everyone who can reach the address may connect.
        limits: every bound.
        io_threads: ZeroMQ's threads; two help where many workers use keys.
    """

    def __init__(
        self,
        bind: str,
        *,
        keys: LearnerKeys | None = None,
        insecure: bool = False,
        limits: EndpointLimits | None = None,
        io_threads: int = 1,
    ) -> None:
        check_bind(bind, keys, insecure=insecure)
        self.on_message: Callable[[bytes, list[memoryview], str], None] = lambda peer, frames, user_id: None
        self.on_event: Callable[[Event], None] = lambda event: None
        self._host, self._port = split_address(bind, key="bind")
        self._keys = make_learner_keys() if keys is None and not insecure else keys
        self._own = None if self._keys is None else make_worker_keys(self._keys)
        self._key_file: RunKeyFile | None = None
        self._key_file_due = 0.0
        self._limits = limits or EndpointLimits()
        self._io_threads = io_threads
        self._queues = SendQueues(self._limits.peer_queue_messages, self._limits.queue_bytes)
        self._peers = ConnectionTable()
        self._subscribers = ConnectionTable()
        self._epoch = secrets.token_bytes(8)
        self._broadcasts = 0
        self._announced = True
        self._head_sent = 0.0
        self._surveyed = 0.0
        self._taken = self._taken_at_survey = 0
        self._num_silent = {"samples": 0, "broadcast": 0}
        self._failure = {"samples": "", "broadcast": ""}
        self._gone: deque[tuple[float, str, Connection]] = deque()  # ended in the last _GONE_WITHIN_S
        self._parting: dict[bytes, tuple[float, Connection]] = {}  # each still in self._peers, or ended just now
        # descriptors of subscribers that have ended, until all that came is read: it may be theirs or their successors'
        self._reused: set[int] = set()
        self._discarding = False
        self._max_peers = self._limits.max_peers
        self._max_short, self._overhead, self._long_overhead = wire_overhead(curve=self._keys is not None)
        self._guard: BacklogGuard | None = None
        self._subscriber_guard: BacklogGuard | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._started = False
        self._closed = False
        self._messages_in = self._messages_out = self._bytes_in = self._bytes_out = 0
        self._rejected = self._refused = self._dropped = self._stalls = 0

    @property
    def address(self) -> str:
        """Where workers connect to; valid after `start`."""
        return url(self._host, self._port)

    @property
    def worker_keys(self) -> WorkerKeys | None:
        """What workers that the learner itself starts prove, made for the run; None if it does without keys."""
        return self._own

    def start(self) -> None:
        """Bind both ports and begin to receive.

        Raises:
            ConfigError: a port is in use, or the address is not one of this machine.
        """
        self._loop = asyncio.get_running_loop()
        keep_message_buffers()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(self._io_threads)
        self._admitted = None
        if self._keys is not None and self._own is not None:
            own = {self._own.public_key: "the run's own"}
            self._admitted = AdmittedKeys(self._keys.admitted, own)
        self._acted_on: Mapping[bytes, str] = {} if self._admitted is None else self._admitted.refresh()
        self._router = self._make(zmq.ROUTER)
        self._router.router_mandatory = True
        self._xpub = self._make(zmq.XPUB)
        self._xpub.sndhwm = self._limits.broadcast_messages
        self._xpub.maxmsgsize = _MAX_SUBSCRIPTION_BYTES
        self._xpub.setsockopt(zmq.XPUB_VERBOSER, 1)
        self._authenticator = Authenticator(self._context, self._admitted, self._on_unauthenticated)
        self._monitors = [
            SocketMonitor(self._router, lambda event, value: self._on_monitor("samples", self._peers, event, value)),
            SocketMonitor(
                self._xpub, lambda event, value: self._on_monitor("broadcast", self._subscribers, event, value)
            ),
        ]
        try:
            self._port = bind_pair(self._router, self._xpub, self._host, self._port)
        except BaseException:
            self._release()
            self._router.close(0)
            self._xpub.close(0)
            self._context.term()
            raise
        self._pump = SocketPump(
            self._router, self._receive, per_turn=self._limits.messages_per_turn, after_turn=self._flush
        )
        self._subscription_pump = SocketPump(self._xpub, self._receive_subscription)
        if self._keys is not None and self._own is not None and self._keys.admitted is None:
            self._key_file = RunKeyFile(self._port, self._own)
            self._keep_key_file()
        else:
            forget_run_keys(self._port)
        if CAN_TELL_BYTES:
            self._guard = BacklogGuard(self._peers, self._limits, self._on_backlog)
            self._subscriber_guard = BacklogGuard(
                self._subscribers, self._limits, self._on_talkative, max_bytes=_MAX_SUBSCRIBER_BYTES
            )
        self._started = True
        self._surveyed = self._head_sent = self._loop.time()
        self._later("tick", self._limits.tick_s, self._tick)
        logger.info("listening on %s and on port %d", self.address, self._port + 1)
        self._max_peers = peers_per_port(self._limits.max_peers)
        if self._max_peers < self._limits.max_peers:
            logger.warning(
                "at most %d connections are taken on each port instead of %d: this process may have %d files open; "
                "raise the limit (ulimit -n) where there are more workers",
                self._max_peers,
                self._limits.max_peers,
                open_file_limit(),
            )

    def send(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        """Send one message to a peer, or queue it while its connection is busy.

        A peer whose queue is full is cut off (an event says so).

        Returns: False if that peer is not connected (any more).

        Raises:
            EndpointClosed: after `close`.
        """
        self._check_open()
        connection = self._peers.by_peer(peer)
        if connection is None or connection.reason:
            return False
        if peer not in self._queues:
            sent = self._try_send(peer, frames)
            if sent is not None:
                return sent
        if not self._queues.put(peer, frames):
            waiting = self._queues.waiting(peer)
            self._queues.forget(peer)
            self._cut(self._peers, connection, f"it does not read what we send it: {waiting} messages wait")
            return False
        self._retry_soon()
        return True

    def broadcast(self, frames: Sequence[Buffer]) -> None:
        """Send one message to every worker whose subscription is in force; never waits.

        A subscriber that is too slow misses it, and learns so from the numbering of the next one.

        Raises:
            EndpointClosed: after `close`.
        """
        self._check_open()
        self._broadcasts += 1
        self._xpub.send(self._head(), zmq.SNDMORE | zmq.DONTWAIT)
        send_frames(self._xpub, frames)
        self._announced = False
        self._head_sent = self._loop.time()
        self._messages_out += 1
        self._bytes_out += total_bytes(frames)
        self._subscription_pump.settle()

    def drop(self, peer: bytes, reason: str) -> None:
        """Cut a peer off: nothing more is taken from it, what was sent to it before may take up to a second to leave.

        What it sent and we have not read is thrown away.
        """
        connection = self._peers.by_peer(peer)
        if connection is None or connection.reason or self._closed:
            return
        self._condemn(connection, reason)
        self._parting[peer] = (self._loop.time(), connection)
        self._later("part", _RETRY_S, self._part)
        self.on_event(Event(EventKind.DROPPED, reason, connection.peer, connection.address))

    def host_of(self, peer: bytes) -> str:
        """Address of the host that a peer calls from, without its port; "" where that can't be told."""
        connection = self._peers.by_peer(peer)
        return "" if connection is None else connection.address.rpartition(":")[0]

    def stats(self) -> EndpointStats:
        """Counters now."""
        return EndpointStats(
            messages_in=self._messages_in,
            messages_out=self._messages_out,
            bytes_in=self._bytes_in,
            bytes_out=self._bytes_out,
            queued_messages=self._queues.num_messages,
            queued_bytes=self._queues.num_bytes,
            peers=self._peers.num_peers,
            rejected=self._rejected,
            refused=self._refused,
            dropped=self._dropped,
            stalls=self._stalls,
        )

    async def close(self, *, flush_s: float = 0.5) -> None:
        """Let goodbyes leave for up to ``flush_s`` seconds, then free everything; takes at most 2 s more."""
        if self._closed or not self._started:
            self._closed = True
            return
        until = self._loop.time() + flush_s
        while self._queues and self._loop.time() < until:
            self._flush()
            await asyncio.sleep(_RETRY_S)
        self._closed = True
        if self._key_file is not None:
            self._key_file.remove()
        for timer in self._timers.values():
            timer.cancel()
        for guard in (self._guard, self._subscriber_guard):
            if guard is not None:
                guard.close()
        self._pump.close()
        self._subscription_pump.close()
        self._release()
        await term(self._context, [self._router, self._xpub], max(0.0, until - self._loop.time()))

    # --- sending

    def _try_send(self, peer: bytes, frames: Sequence[Buffer]) -> bool | None:
        """Send now: True if sent, False if there is no such peer, None if its connection is busy."""
        try:
            try:
                self._router.send(peer, zmq.SNDMORE | zmq.DONTWAIT)
            except zmq.Again:
                return None
            except zmq.ZMQError as error:
                if error.errno == zmq.EHOSTUNREACH:
                    return False
                raise
            send_frames(self._router, frames)
        finally:
            self._pump.settle()
        self._messages_out += 1
        self._bytes_out += total_bytes(frames)
        return True

    def _flush(self) -> None:
        self._queues.flush(self._try_send)
        if self._queues:
            self._retry_soon()

    def _retry_soon(self) -> None:
        self._later("retry", _RETRY_S, self._flush)

    def _later(self, name: str, after_s: float, call: Callable[[], None]) -> None:
        """Call ``call`` after a while; once, however often it is asked for until then."""

        def run() -> None:
            del self._timers[name]
            call()

        if name not in self._timers and not self._closed:
            self._timers[name] = self._loop.call_later(after_s, run)

    def _announce(self) -> None:
        """Tell all subscribers how many broadcasts there have been, without one.

        A new subscriber learns so that its subscription is in force; one that has missed the last broadcast
        learns that; all learn that we live.
        """
        self._xpub.send(self._head(), zmq.DONTWAIT)
        self._announced = True
        self._head_sent = self._loop.time()
        self._subscription_pump.schedule()

    def _head(self) -> bytes:
        return BROADCAST_HEAD.pack(self._epoch, self._broadcasts)

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
        connection = self._peers.by_peer(peer)
        if connection is None:
            connection = self._attach(id_frame, peer)
        frames: list[memoryview] = []
        num_bytes = wire_bytes = 0
        more = id_frame.more
        while more:
            frame = self._router.recv(zmq.DONTWAIT, copy=False)
            size = len(frame)
            num_bytes += size
            wire_bytes += size + (self._overhead if size <= self._max_short else self._long_overhead)
            frames.append(keep(frame))
            more = frame.more
            if len(frames) > self._limits.max_frames or num_bytes > self._limits.max_message_bytes:
                self._discarding = more
                self._rejected += 1
                if connection is not None:
                    reason = f"its message is beyond the limit: {len(frames)} frames, {num_bytes} bytes"
                    self._cut(self._peers, connection, reason)
                return
        self._taken += 1
        if connection is None:
            self._rejected += 1  # its end has been told
            return
        connection.delivered += 1
        connection.taken_bytes += wire_bytes
        if connection.reason:
            self._rejected += 1  # it was cut off; this was on its way before
            return
        if not num_bytes and len(frames) == 1:
            self._answer(connection)
            return
        self._messages_in += 1
        self._bytes_in += num_bytes
        self.on_message(peer, frames, connection.user_id)

    def _discard_some(self) -> None:
        for _ in range(self._limits.max_frames):
            if not self._router.recv(zmq.DONTWAIT, copy=False).more:
                self._discarding = False
                return

    def _answer(self, connection: Connection) -> None:
        """A worker's endpoint makes itself known; when it does so again, it wants to hear whether we live."""
        if connection.delivered > 1 and not connection.answered and connection.peer not in self._queues:
            connection.answered = True
            self._try_send(connection.peer, [b""])

    def _attach(self, frame: zmq.Frame, peer: bytes) -> Connection | None:
        self._monitors[0].drain()  # what was reported before this message comes first
        known = self._peers.by_fd(_fd_of(frame))
        if known is not None and not known.peer:
            self._num_silent["samples"] -= 1
        connection = self._peers.attach(_fd_of(frame), peer, _user_id_of(frame))
        if connection is not None:
            self._check_key(self._peers, connection)
        return connection

    def _receive_subscription(self) -> None:
        try:
            frame = self._xpub.recv(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            self._reused.clear()
            raise
        while frame.more:
            frame = self._xpub.recv(zmq.DONTWAIT, copy=False)
        fd = _fd_of(frame)
        if fd < 0:
            return  # made by libzmq itself when a subscriber is gone
        self._monitors[1].drain()
        connection = self._subscribers.attach(fd, b"", _user_id_of(frame))
        if connection is None:
            return
        self._check_key(self._subscribers, connection)
        if connection.reason:
            return
        if not connection.delivered:
            self._num_silent["broadcast"] -= 1
        connection.delivered += 1
        if fd in self._reused:
            self._later("announce", _ANNOUNCE_S, self._announce)
        elif frame.bytes not in (b"\x01", b"\x00"):
            self._rejected += 1
            self._cut(self._subscribers, connection, _NOT_A_SUBSCRIPTION)
        elif connection.delivered == 1:
            self._later("announce", _ANNOUNCE_S, self._announce)
        elif connection.delivered % _SUBSCRIPTIONS_PER_LOOK == 0:
            self._bound_subscriber(connection, self._subscribers.look(connection))

    def _bound_subscriber(self, connection: Connection, received: int) -> None:
        if received > _MAX_SUBSCRIBER_BYTES and not connection.reason:
            self._rejected += 1
            self._cut(self._subscribers, connection, _NOT_A_SUBSCRIPTION)

    # --- connections

    def _on_monitor(self, port: str, table: ConnectionTable, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            connection = table.accept(value)
            if len(table) > self._max_peers:
                self._cut(table, connection, f"there are {self._max_peers} connections already")
            elif table is self._peers and self._is_backlog_full():
                self._cut(table, connection, "others have left too much behind that is unread, and ended")
            else:
                self.on_event(Event(EventKind.CONNECTED, address=connection.address))
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._num_silent[port] = min(self._num_silent[port] + 1, len(table) + len(self._gone))
        elif event in (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
            self._failure[port] = reason_seen_by_learner(event, value, self._keys)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._failure[port] = "-"  # told by the authenticator already
        elif event == zmq.EVENT_DISCONNECTED:
            self._on_disconnected(port, table, value)

    def _is_backlog_full(self) -> bool:
        if self._guard is None or not self._guard.is_full:
            return False
        if self._pump.is_empty():  # no message has come to say so
            self._guard.emptied()
        return self._guard.is_full

    def _on_disconnected(self, port: str, table: ConnectionTable, fd: int) -> None:
        connection = table.end(fd)
        if table is self._subscribers:
            self._reused.add(fd)
        failure, self._failure[port] = self._failure[port], ""
        if connection is None:
            return
        if table is self._peers and self._guard is not None and not failure:
            self._guard.ended(connection)
        if not connection.peer and connection.reason:
            return  # we have cut it off, and told so
        if not connection.peer and failure:
            if failure != "-":
                self._on_refused(connection.address, failure)
        elif connection.peer or not connection.delivered:
            self._gone.append((self._loop.time(), port, connection))
            self._later("gone", _SETTLE_S, self._tell_gone)

    def _tell_gone(self) -> None:
        """Tell of connections that have ended, after all that came over them has been delivered.

        While others send so much that there is no end of it, that is taken for granted after a second: by then each
        peer has had its turn many times.
        """
        if self._closed:
            return
        is_empty = self._pump.drain(at_most=self._limits.messages_per_turn)
        now = self._loop.time()
        after_s = _SETTLE_S if is_empty else _GONE_WITHIN_S
        while self._gone and now - self._gone[0][0] >= 0.9 * after_s and not self._closed:
            _, port, connection = self._gone.popleft()
            if connection.peer:
                self._report_gone(connection)
            else:
                self._judge_silent(port, connection)
        if self._gone:
            self._later("gone", _RETRY_S, self._tell_gone)

    def _judge_silent(self, port: str, connection: Connection) -> None:
        """A connection ended without a word: refused, unless a handshake was made that nobody else lays claim to."""
        if self._num_silent[port] > 0:
            self._num_silent[port] -= 1
        else:
            reason = "it made no ZeroMQ handshake: is something else calling this port?"
            self._on_refused(connection.address, reason)

    def _report_gone(self, connection: Connection) -> None:
        if self._peers.by_peer(connection.peer) is not connection:
            return
        self._peers.forget(connection)
        self._queues.forget(connection.peer)
        self._parting.pop(connection.peer, None)
        reason = connection.reason or "its connection ended"
        kind = EventKind.SILENT if connection.silent_s > self._limits.silence_s else EventKind.DISCONNECTED
        self.on_event(Event(kind, reason, connection.peer, connection.address))

    def _cut(self, table: ConnectionTable, connection: Connection, reason: str) -> None:
        if connection.reason:
            return
        self._condemn(connection, reason)
        table.cut(connection, reset=True)
        self.on_event(Event(EventKind.DROPPED, reason, connection.peer, connection.address))

    def _on_backlog(self, connection: Connection, reason: str) -> None:
        if not self._closed:
            self._rejected += 1
            self._cut(self._peers, connection, reason)

    def _on_talkative(self, connection: Connection, reason: str) -> None:
        if not self._closed and not connection.reason:
            self._rejected += 1
            self._cut(self._subscribers, connection, _NOT_A_SUBSCRIPTION)

    def _condemn(self, connection: Connection, reason: str) -> None:
        """From now on nothing is taken from this connection."""
        connection.reason = reason
        self._dropped += 1
        logger.debug("%s cut off: %s", connection.address or "a peer", reason)

    def _part(self) -> None:
        """Cut off those that were dropped once what was sent to them has left; they can't hold it up for long.

        Nothing tells when ZeroMQ has handed all of it to the kernel, so that gets some time in any case.
        """
        now = self._loop.time()
        for peer, (since, connection) in list(self._parting.items()):
            waits = peer in self._queues or self._peers.has_unsent(connection)
            if now - since < (_PART_WITHIN_S if waits else _PART_AFTER_S):
                continue
            del self._parting[peer]
            self._queues.forget(peer)
            self._peers.cut(connection)
        if self._parting:
            self._later("part", _RETRY_S, self._part)

    def _end_silent(self, port: str, table: ConnectionTable, connection: Connection) -> None:
        if connection.reason:
            return
        if not connection.delivered:
            self._num_silent[port] = max(0, self._num_silent[port] - 1)
        connection.reason = f"nothing was heard from it for {connection.silent_s:.1f} s"
        logger.debug("%s cut off: %s", connection.address or "a peer", connection.reason)
        table.cut(connection)

    def _on_unauthenticated(self, ip: str, reason: str) -> None:
        self._on_refused(ip, reason)

    def _on_refused(self, address: str, reason: str) -> None:
        self._refused += 1
        logger.debug("%s refused: %s", address or "a peer", reason)
        self.on_event(Event(EventKind.REFUSED, reason, address=address))

    # --- upkeep

    def _tick(self) -> None:
        self._later("tick", self._limits.tick_s, self._tick)
        self._stalls += self._pump.look() + self._subscription_pump.look() + self._authenticator.look()
        for monitor in self._monitors:
            self._stalls += monitor.look()
        self._flush()
        if not self._announced or self._loop.time() - self._head_sent >= self._limits.heartbeat_s:
            self._announce()
        self._cut_withdrawn()
        if self._key_file is not None and self._loop.time() >= self._key_file_due:
            self._keep_key_file()
        self._survey(is_empty=self._pump.drain(at_most=self._limits.messages_per_turn))

    def _survey(self, *, is_empty: bool) -> None:
        """Find connections that are silent, or that say what they have no need to say.

        Time in which we did not run ourselves does not count as silence.
        """
        limits, now = self._limits, self._loop.time()
        elapsed_s = min(now - self._surveyed, 2 * limits.tick_s)
        self._surveyed = now
        # Peers take turns: once as many messages were taken as there are peers, whoever had one was served.
        all_served = is_empty or self._taken - self._taken_at_survey > len(self._peers)
        self._taken_at_survey = self._taken
        self._peers.survey(elapsed_s if all_served else 0.0)
        for connection in self._peers:
            if connection.silent_s > limits.silence_s + (0 if connection.delivered else limits.handshake_s):
                self._end_silent("samples", self._peers, connection)
        self._subscribers.survey(elapsed_s)
        for connection in self._subscribers:
            self._bound_subscriber(connection, connection.received)
            if not connection.delivered and connection.silent_s > limits.silence_s + limits.handshake_s:
                self._end_silent("broadcast", self._subscribers, connection)

    def _keep_key_file(self) -> None:
        if self._key_file is not None:
            self._key_file.keep()
            self._key_file_due = self._loop.time() + _KEEP_FILE_S

    def _check_key(self, table: ConnectionTable, connection: Connection) -> None:
        """Judge a connection by the key it proved: that may have been withdrawn since the handshake."""
        if self._admitted is not None and self._admitted.name_of(connection.user_id.encode()) is None:
            self._cut(table, connection, "its key is not admitted any more")

    def _cut_withdrawn(self) -> None:
        """Cut off those whose key is no longer among the admitted ones.

        Which key a connection has proved is known from its first message on. So all that are silent are cut too
        when a key is withdrawn; those with another key connect again.
        """
        if self._admitted is None:
            return
        before, self._acted_on = self._acted_on, self._admitted.refresh()
        if before.keys() <= self._acted_on.keys():
            return
        for monitor in self._monitors:
            monitor.drain()
        for table in (self._peers, self._subscribers):
            for connection in table:
                public_key = connection.user_id.encode()
                if not public_key:
                    self._cut(table, connection, "a key was withdrawn while it had not said which one it has")
                elif public_key not in self._acted_on:
                    name = before.get(public_key, connection.user_id)
                    self._cut(table, connection, f"its key {name!r} is not admitted any more")

    def _make(self, kind: int) -> zmq.Socket[bytes]:
        socket = make_socket(self._context, kind, self._limits, ipv6=":" in self._host)
        if CAN_TELL_BYTES:
            socket.rcvhwm = 0  # see `BacklogGuard`
        serve(socket, self._keys)
        return socket

    def _release(self) -> None:
        for monitor in self._monitors:
            monitor.close()
        self._authenticator.close()

    def _check_open(self) -> None:
        if self._closed or not self._started:
            raise EndpointClosed("the endpoint is closed" if self._closed else "the endpoint was not started")


def _fd_of(frame: zmq.Frame) -> int:
    """Descriptor of the connection a frame came over, -1 if it came over none."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def _user_id_of(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
