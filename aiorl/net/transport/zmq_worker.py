"""The worker's endpoint over ZeroMQ: a DEALER for addressed messages and a SUB for broadcasts.

A pair of sockets lives as long as its connection. When either connection ends or is refused, both
sockets are given up, and a new pair with a new routing id connects. As a result, the learner never
meets an old routing id again, no message is delivered twice, and a refused worker gets another
chance (libzmq itself would not try again).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from socket import getaddrinfo

import zmq

from aiorl.config.addresses import Addresses, is_loopback, split_address, url
from aiorl.errors import SecurityError
from aiorl.net.transport.connections import (
    CAN_TELL_BYTES,
    MAX_GROWTH_BYTES,
    BacklogGuard,
    Connection,
    ConnectionTable,
    FrameOverhead,
    bytes_received,
)
from aiorl.net.transport.endpoint import Buffer, EndpointLimits, Event, EventKind, Lifetime
from aiorl.net.transport.local import find_local, urls_of
from aiorl.net.transport.security import NO_HANDSHAKE, WorkerKeys, present, reason_seen_by_worker
from aiorl.net.transport.sockets import (
    BROADCAST_HEAD,
    SendQueue,
    SocketMonitor,
    SocketPump,
    keep,
    make_context,
    make_socket,
    send_frames,
    term,
)
from aiorl.net.transport.system import keep_message_buffers
from aiorl.net.transport.timers import Timers

logger = logging.getLogger(__name__)

_TRIES = 3
_LATE = 0.8
"""Share of the time for a handshake after which its end counts as a timeout, of either side."""
_KEPT_BYTES = 16 << 20

_SETTLE_S = 0.1
_RETRY_S = 0.02
_PATIENCE_S = 2.0
_ROUTING_ID_BYTES = 16
_MAX_SHORT, _OVERHEAD, _LONG_OVERHEAD = FrameOverhead.of(curve=False)


class ZmqWorkerEndpoint:
    """Endpoint of a worker (see `WorkerEndpoint`).

    Args:
        connect: "tcp://HOST:PORT" of the learner, with broadcasts on PORT + 1; or "ipc://PATH",
            which a learner gives to workers that it starts; or several places in which to look for
            it (`Addresses`).
        keys: the worker's keys. Without keys, the endpoint uses the Unix sockets of this user's
            learner on this host if there are any, and searches for them before each connection (see
            `aiorl.net.transport.local`).
        limits: the bounds.

    Attributes:
        on_message: called with the frames of a message addressed to this worker.
        on_broadcast: called with the frames of a broadcast, in sending order.
        on_event: called with each `Event`.
    """

    def __init__(
        self,
        connect: str | Sequence[str],
        *,
        keys: WorkerKeys | None = None,
        limits: EndpointLimits | None = None,
    ) -> None:
        self.on_message: Callable[[list[memoryview]], None] = lambda frames: None
        self.on_broadcast: Callable[[list[memoryview]], None] = lambda frames: None
        self.on_event: Callable[[Event], None] = lambda event: None
        self._limits = limits or EndpointLimits()
        self._reasons = _Reasons()
        self._search = _Search(connect, keys, self._limits, self._reasons)
        self._link = _Link()
        self._unproven = _UnprovenConnections(self._limits, self._reasons)
        self._queue = SendQueue(self._limits.queue_messages, self._limits.queue_bytes)
        self._writable = asyncio.Event()
        self._lookup: asyncio.Future[object] | None = None
        self._lifetime = Lifetime()

    @property
    def address(self) -> str:
        """Address of the learner that was tried last."""
        return self._search.address

    @property
    def connected(self) -> bool:
        """True if both channels are up."""
        return self._link.is_connected

    @property
    def is_local(self) -> bool:
        """True if messages pass through Unix sockets, which takes less time than compressing
        them.
        """
        return self._link.urls[0].startswith("ipc:")

    def start(self) -> None:
        """Begin to connect; call this on the running loop."""
        keep_message_buffers(max_kept_bytes=_KEPT_BYTES)
        self._loop = asyncio.get_running_loop()
        self._timers = Timers()
        self._context = make_context()
        self._lifetime.is_started = True
        self._connect()
        self._timers.restart("tick", self._limits.times.tick_s, self._tick)

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Send one message, or queue it while the connection is busy.

        Returns:
            False if it was not accepted: not connected, or the queue is full. See `wait_writable`.

        Raises:
            EndpointClosed: after `close`.
        """
        self._lifetime.check_open()
        if not self._link.is_usable:
            return False
        if not self._queue and self._try_send(frames):
            return True
        return self._queue.put(frames)

    async def wait_writable(self) -> None:
        """Wait until the endpoint is connected and its queue is empty. A cancelled call leaves
        nothing behind.

        Raises:
            EndpointClosed: when the endpoint is closed meanwhile.
        """
        self._lifetime.check_open()
        while self._queue or not self._link.is_usable:
            self._writable.clear()
            await self._writable.wait()
            self._lifetime.check_open()

    async def close(self, *, flush_s: float = 0.5) -> None:
        """Give goodbyes up to ``flush_s`` seconds to leave, then free everything, which takes at
        most 2 s more.
        """
        if not self._lifetime.is_open:
            self._lifetime.is_closed = True
            return
        until = self._loop.time() + flush_s
        while self._queue and self._link.is_connected and self._loop.time() < until:
            self._flush()
            await asyncio.sleep(_RETRY_S)
        self._lifetime.is_closed = True
        self._timers.close()
        if self._lookup is not None:
            self._lookup.cancel()
        linger_s = max(0.0, until - self._loop.time()) if self._link.is_connected else 0.0
        sockets = self._give_up_channels()
        self._unproven.close()
        self._writable.set()
        await term(self._context, sockets, linger_s)

    # Sending
    # ----------------------------------------------------------------------------------------------

    def _try_send(self, frames: Sequence[Buffer]) -> bool:
        channel = self._link.channels[0]
        for _ in range(_TRIES):
            try:
                send_frames(channel.socket, frames)
            except zmq.Again:
                # half a message is left behind only if the connection broke: its end will be
                # reported
                if not channel.pump.settle():
                    return False
            else:
                channel.pump.settle()
                return True
        # each time, the room vanished after we looked: try again in the next turn
        channel.pump.schedule()
        return False

    def _flush(self) -> None:
        if not self._link.is_usable:
            return
        self._queue.flush(self._try_send)
        if not self._queue:
            self._writable.set()

    # Receiving
    # ----------------------------------------------------------------------------------------------

    def _receive_message(self, channel: Channel) -> None:
        frames = channel.receive()
        is_sign_of_life = len(frames) == 1 and not frames[0].nbytes
        if frames and self._link.is_connected and not is_sign_of_life:
            self.on_message(frames)

    def _receive_broadcast(self, channel: Channel) -> None:
        head, *frames = channel.receive() or [memoryview(b"")]
        if head.nbytes != len(channel.topic) + BROADCAST_HEAD.size:
            return
        if not channel.ready:  # our subscription is in force
            channel.ready = True
            self._on_progress()
        if frames and self._link.is_connected:
            self.on_broadcast(frames)

    # Connections
    # ----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        link = self._link
        link.is_ending = False
        link.since = self._loop.time()
        if not self._search.move_on():
            problem = self._search.problem or f"{self.address} names no address yet"
            self._wait_for(f"{problem}.", kind="no address")
            self._again(self._limits.times.retry_s)
            return
        link.urls = self._find()
        try:
            with contextlib.ExitStack() as undo:
                link.channels = self._open_channels(undo)
                undo.pop_all()
        except (zmq.ZMQError, OSError) as error:
            self._wait_for(
                f"cannot open a connection to {self.address}: {error.strerror}.", kind="cannot open"
            )
            self._again(self._search.next_pause())

    def _find(self) -> tuple[str, str]:
        """Return the addresses of the learner's sockets; "" for one that is not needed."""
        return self._search.find()

    def _open_channels(self, undo: contextlib.ExitStack) -> tuple[Channel, ...]:
        """Open a socket for each address, which begins to connect; ``undo`` closes them if one
        cannot be opened.
        """
        kinds = ((zmq.DEALER, self._receive_message), (zmq.SUB, self._receive_broadcast))
        return tuple(
            self._open(undo, url, kind, receive)
            for url, (kind, receive) in zip(self._link.urls, kinds, strict=True)
            if url
        )

    def _open(
        self,
        undo: contextlib.ExitStack,
        url: str,
        kind: int,
        receive: Callable[[Channel], None],
        topic: bytes = b"",
    ) -> Channel:
        socket = make_socket(self._context, kind, self._limits, ipv6=":" in self._search.host)
        undo.callback(socket.close, 0)
        if kind == zmq.SUB:
            socket.rcvhwm = self._limits.broadcast_messages
            socket.subscribe(topic)
        else:
            # Not IMMEDIATE: with it, libzmq discards received, unread messages such as a goodbye
            # when a connection ends. No messages queue up without a connection all the same,
            # because we send only while connected.
            socket.routing_id = b"w" + secrets.token_bytes(_ROUTING_ID_BYTES)
        channel = Channel(url, socket, self._limits, topic)
        present(socket, None if url.startswith("ipc:") else self._search.keys)
        channel.monitor = SocketMonitor(socket, partial(self._on_monitor, channel))
        undo.callback(channel.monitor.close)
        per_turn = self._limits.messages_per_turn
        channel.pump = SocketPump(
            socket, partial(receive, channel), per_turn=per_turn, after_turn=self._flush
        )
        undo.callback(channel.pump.close)
        socket.connect(url)
        return channel

    def _on_monitor(self, channel: Channel, event: int, value: int) -> None:
        link = self._link
        if link.is_ending or channel not in link.channels:
            return
        if event == zmq.EVENT_CONNECTED:
            channel.tcp_since = self._loop.time()
            channel.fd = value
            if self._search.keys is None and channel.url.startswith("tcp:"):
                self._unproven.add(channel)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            channel.shook_hands = True
            if channel.url == link.urls[0]:
                channel.ready = True
                channel.introduce()
                self._on_progress()
        elif event in (
            zmq.EVENT_HANDSHAKE_FAILED_AUTH,
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
        ):
            is_late = self._loop.time() - channel.tcp_since > _LATE * self._limits.times.handshake_s
            self._on_refused(
                channel, reason_seen_by_worker(event, value, self._search.keys, is_late=is_late)
            )
        elif event == zmq.EVENT_DISCONNECTED:
            self._on_ended(channel)
        elif event == zmq.EVENT_CLOSED and not link.is_connected:
            kind = f"nothing answers at {self.address}"
            self._wait_for(
                f"nothing answers at {channel.url}: is the learner running there?", kind=kind
            )
            if self._find() != link.urls:  # a learner has appeared, or a different one
                self._move_on(_RETRY_S)
            elif self._search.has_others:
                self._move_on(self._limits.times.retry_s)

    def _move_on(self, pause_s: float) -> None:
        """Give up a connection that is not made yet, and try the next address."""
        self._link.is_ending = True
        self._loop.call_soon(self._close_refused)
        self._again(pause_s)

    def _on_progress(self) -> None:
        link = self._link
        if link.is_connected or not all(channel.ready for channel in link.channels):
            return
        link.is_connected = True
        self._search.confirm()
        self._reasons.clear()
        logger.info("connected to %s", self.address)
        self.on_event(
            Event(EventKind.CONNECTED, f"connected to {self.address}", address=self.address)
        )
        if not self._queue:
            self._writable.set()

    def _on_ended(self, channel: Channel) -> None:
        """Deliver all messages that arrived before an accepted connection ended, then report its
        end.
        """
        self._link.is_ending = True
        self._timers.restart("ended", _SETTLE_S, lambda: self._report_ended(channel))

    def _report_ended(self, channel: Channel) -> None:
        link = self._link
        for open_channel in link.channels:
            open_channel.pump.drain()
        if not link.channels:  # a callback closed us
            return
        was_connected = link.is_connected
        link.is_connected = False
        for socket in self._give_up_channels():
            socket.close(0)
        if was_connected:
            address = channel.url
            if channel.silent_s > self._limits.times.dead_after_s:
                reason = f"nothing was heard from {address} for {channel.silent_s:.1f} s"
            else:
                reason = f"the connection to {address} ended"
            logger.info("%s; connecting again", reason)
            self.on_event(Event(EventKind.DISCONNECTED, reason, address=self.address))
            self._again(_RETRY_S)
        else:
            self._again(self._search.next_pause())

    def _on_refused(self, channel: Channel, reason: str) -> None:
        self._move_on(self._search.next_pause())
        self._reasons.log_once(f"{channel.url}: {reason}; trying again")
        self.on_event(Event(EventKind.REFUSED, reason, address=channel.url))

    def _close_refused(self) -> None:
        if self._link.is_ending and not self._lifetime.is_closed:
            for socket in self._give_up_channels():
                socket.close(0)

    def _again(self, pause_s: float) -> None:
        self._timers.restart("again", pause_s, self._connect)

    def _give_up_channels(self) -> list[zmq.Socket[bytes]]:
        """Stop using all sockets, and return them to be closed."""
        channels = self._link.channels
        self._link.channels = ()
        self._link.is_connected = False
        self._queue.clear()
        for channel in channels:
            self._give_up(channel)
        return [channel.socket for channel in channels]

    def _give_up(self, channel: Channel) -> None:
        channel.close()
        self._unproven.remove(channel)

    # Upkeep
    # ----------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._timers.restart("tick", self._limits.times.tick_s, self._tick)
        link = self._link
        for channel in link.channels:
            channel.pump.poll()
            channel.monitor.pump.poll()
        self._flush()
        if link.is_ending or not link.channels:
            return
        self._end_silent()
        if not (link.is_ending or link.is_connected):
            self._look_at_attempt(self._loop.time())

    def _end_silent(self) -> None:
        """End the connection if a channel has been silent for too long.

        Time in which we stood still ourselves does not count as silence.
        """
        limits = self._limits
        link = self._link
        now = self._loop.time()
        elapsed_s = min(now - link.listened, 2 * limits.times.tick_s)
        link.listened = now
        for channel in link.channels:
            if channel.shook_hands:
                channel.listen(elapsed_s)
            if channel.silent_s > limits.times.dead_after_s:
                self._on_ended(channel)
                return

    def _look_at_attempt(self, now: float) -> None:
        """Give up a connection that takes too long, or report why nothing happens."""
        link = self._link
        for channel in link.channels:
            # libzmq itself waits forever if the other side speaks another protocol
            if not channel.shook_hands and now - channel.tcp_since > self._limits.times.handshake_s:
                self._on_refused(channel, NO_HANDSHAKE)
                return
        is_quiet = any(channel.tcp_since == math.inf for channel in link.channels)
        patience_s = max(_PATIENCE_S, min(self._search.pause_s, 2 * _PATIENCE_S))
        if is_quiet and now - link.since > patience_s and self._search.has_others:
            reason = f"no answer from {self.address}."
            self._wait_for(reason, kind=reason)
            self._search.next_pause()  # over a slow link, each round takes longer
            self._move_on(_RETRY_S)
            return
        is_unexplained = not self._reasons.newest and self._lookup is None
        if now - link.since > _PATIENCE_S and is_unexplained:
            self._lookup = self._loop.run_in_executor(
                None, getaddrinfo, self._search.host, self._search.port
            )
            self._lookup.add_done_callback(self._explain_wait)

    def _explain_wait(self, lookup: asyncio.Future[object]) -> None:
        """Report why nothing happens; libzmq doesn't say that it can't find a host name."""
        self._lookup = None
        error = None if lookup.cancelled() else lookup.exception()
        if error is not None:
            self._wait_for(f"the host name {self._search.host!r} can't be found ({error}).")
            return
        names = " and ".join(channel.url for channel in self._link.channels if not channel.ready)
        self._wait_for(
            f"no answer from {names} yet: is the learner running there, are both ports open to us?"
        )

    def _wait_for(self, reason: str, kind: str = "") -> None:
        """Report why there is no connection; reasons of one kind, for example for both ports, are
        logged once.
        """
        is_over = self._lifetime.is_closed or self._link.is_connected
        if is_over or reason == self._reasons.newest:
            return
        self._reasons.log_once(f"{reason} Still trying.", kind)
        self._reasons.newest = reason
        self.on_event(Event(EventKind.WAITING, reason, address=self.address))


class _Reasons:
    """Reasons why there is no connection, or not yet, or a worse one; logged once each.

    Attributes:
        newest: the newest one reported to the endpoint's user, "" for none.
    """

    def __init__(self) -> None:
        self.newest = ""
        self._logged: set[str] = set()

    def log_once(self, reason: str, kind: str = "") -> None:
        """Log a reason, unless one of its kind was logged since the last connection."""
        if (kind or reason) not in self._logged:
            self._logged.add(kind or reason)
            logger.warning("%s", reason)

    def clear(self) -> None:
        """Forget all reasons, because there is a connection."""
        self.newest = ""
        self._logged.clear()


class _Search:
    """Search for the learner: the place to try, and the pause before the next attempt.

    Args:
        connect: its places, as for `ZmqWorkerEndpoint`.
        keys: the worker's keys; without keys, Unix sockets are used if there are any.
        limits: bounds of the pauses.
        reasons: reasons to log.

    Attributes:
        keys: the worker's keys.
        host: host of the current place.
        port: port of the current place, 0 for a file.
        pause_s: pause before the next attempt, seconds.
    """

    def __init__(
        self,
        connect: str | Sequence[str],
        keys: WorkerKeys | None,
        limits: EndpointLimits,
        reasons: _Reasons,
    ) -> None:
        self.keys = keys
        self.host = ""
        self.port = 0
        self.pause_s = limits.times.retry_s
        self._addresses = Addresses([connect] if isinstance(connect, str) else connect)
        self._path = ""
        self._limits = limits
        self._reasons = reasons

    @property
    def address(self) -> str:
        """Address of the current place."""
        return self._addresses.current

    @property
    def problem(self) -> str:
        """Reason why there is no place to try, "" if unknown."""
        return self._addresses.problem

    @property
    def has_others(self) -> bool:
        """True if there are other places to try."""
        return self._addresses.has_others()

    def confirm(self) -> None:
        """Record that the learner is at the current place."""
        self._addresses.confirm()
        self.pause_s = self._limits.times.retry_s

    def move_on(self) -> bool:
        """Move on to the place to try next; return False if there is none."""
        address = self._addresses.next()
        if address.startswith("ipc://"):
            self._path = address.removeprefix("ipc://")
            self.host = "localhost"
            self.port = 0
        elif address:
            self._path = ""
            self.host, self.port = split_address(address, key="connect")
        return bool(address)

    def find(self) -> tuple[str, str]:
        """Return the addresses of the learner: this user's Unix sockets for its port if there are
        any, else TCP.
        """
        if self._path:
            return urls_of(self._path)
        if self.keys is None and is_loopback(self.host):
            try:
                path = find_local(self.port)
            except SecurityError as error:
                self._reasons.log_once(str(error))
            else:
                if path is not None:
                    return urls_of(path)
        return url(self.host, self.port), url(self.host, self.port + 1)

    def next_pause(self) -> float:
        """Return the pause before the next attempt, and double the one after it."""
        pause_s = self.pause_s
        self.pause_s = min(2 * pause_s, self._limits.times.max_retry_s)
        return pause_s * random.uniform(0.75, 1.25)


@dataclass(slots=True, eq=False)
class _Link:
    """The current pair of sockets.

    Attributes:
        urls: addresses that they connect to.
        channels: the sockets; none between two attempts.
        is_connected: True once both are usable.
        is_ending: True if they are about to be given up.
        since: time at which the attempt to connect began.
        listened: time of the last check for silence.
    """

    urls: tuple[str, str] = ("", "")
    channels: tuple[Channel, ...] = ()
    is_connected: bool = False
    is_ending: bool = False
    since: float = 0.0
    listened: float = 0.0

    @property
    def is_usable(self) -> bool:
        """True if messages can be sent."""
        return self.is_connected and not self.is_ending


class _UnprovenConnections:
    """Connections to a learner that has proved nothing, and the bound of what it can make us hold.

    libzmq bounds the number of whole messages that wait, but not the frames of an unfinished one.
    """

    def __init__(self, limits: EndpointLimits, reasons: _Reasons) -> None:
        self._limits = limits
        self._reasons = reasons
        self._table = ConnectionTable()
        self._guard: BacklogGuard | None = None

    def add(self, channel: Channel) -> None:
        """Bound the unread data of a channel's new connection."""
        if not CAN_TELL_BYTES:
            return
        channel.connection = self._table.accept(channel.fd)
        channel.connection.is_admitted = True  # weights may be large
        if self._guard is None:
            self._guard = BacklogGuard(
                self._table,
                self._limits,
                self._on_flood,
                port=None,
                max_bytes=self._limits.max_unread_bytes,
                max_growth_bytes=MAX_GROWTH_BYTES,
            )

    def remove(self, channel: Channel) -> None:
        """Forget the connection of a channel that is given up."""
        if channel.connection is not None:
            self._table.forget(channel.connection)

    def close(self) -> None:
        """End the check."""
        if self._guard is not None:
            self._guard.close()

    def _on_flood(self, connection: Connection, reason: str) -> None:
        """Log that a connection was cut off; its end is reported next."""
        self._reasons.log_once(
            f"the connection to {connection.address} was cut off: {reason}", kind="flood"
        )


@dataclass(slots=True, eq=False)
class Channel:
    """Socket that connects to one of the learner's; given up when its connection ends.

    Attributes:
        url: address that it connects to.
        socket: a DEALER or a SUB.
        limits: bounds of a message.
        topic: what broadcasts begin with.
        fd: descriptor of its connection, -1 before there is one.
        tcp_since: time since which there is a connection, infinity if there is none.
        shook_hands: True after the handshake.
        ready: True once the channel is usable.
        heard: True if a message has arrived since the last check.
        received: bytes received at the last check.
        silent_s: seconds of silence.
        connection: account of its unread bytes; None if the other side has proved who it is, or is
            of this user.
        pump: reads the socket.
        monitor: watches its connection.
    """

    url: str
    socket: zmq.Socket[bytes]
    limits: EndpointLimits
    topic: bytes = b""
    fd: int = -1
    tcp_since: float = math.inf
    shook_hands: bool = False
    ready: bool = False
    heard: bool = True
    received: int = 0
    silent_s: float = 0.0
    connection: Connection | None = None
    pump: SocketPump = field(init=False)
    monitor: SocketMonitor = field(init=False)

    def close(self) -> None:
        """Stop reading and watching, but leave the socket open."""
        self.pump.close()
        self.monitor.close()

    def introduce(self) -> None:
        """Send the empty message that gives the learner's endpoint our routing id, so that it can
        report our end.
        """
        with contextlib.suppress(zmq.Again):
            self.socket.send(b"", zmq.DONTWAIT)
        self.pump.schedule()

    def receive(self) -> list[memoryview]:
        """Return one whole message, or [] if it exceeds the limits.

        Raises:
            zmq.Again: when no message waits.
        """
        frames: list[memoryview] = []
        num_bytes = 0
        has_more = True
        limits = self.limits
        while has_more:
            frame = self.socket.recv(zmq.DONTWAIT, copy=False)
            has_more = frame.more
            size = len(frame)
            num_bytes += size
            if self.connection is not None:
                self.connection.taken_bytes += size + (
                    _OVERHEAD if size <= _MAX_SHORT else _LONG_OVERHEAD
                )
            if len(frames) <= limits.max_frames and num_bytes <= limits.max_message_bytes:
                frames.append(keep(frame))
        self.heard = True
        if len(frames) > limits.max_frames or num_bytes > limits.max_message_bytes:
            return []
        return frames

    def listen(self, elapsed_s: float) -> None:
        """Update the seconds of silence; even a part of a message since the last check ends the
        silence.
        """
        received = self.received if self.heard else bytes_received(self.fd) or 0
        self.silent_s = (
            0.0 if self.heard or received != self.received else self.silent_s + elapsed_s
        )
        self.heard = False
        self.received = received
