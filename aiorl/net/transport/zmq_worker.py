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
from aiorl.errors import EndpointClosed, SecurityError
from aiorl.net.transport.connections import (
    CAN_TELL_BYTES,
    MAX_GROWTH_BYTES,
    BacklogGuard,
    Connection,
    ConnectionTable,
    bytes_received,
    wire_overhead,
)
from aiorl.net.transport.endpoint import Buffer, EndpointLimits, Event, EventKind
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

logger = logging.getLogger(__name__)

_TRIES = 3
_LATE = 0.8
"""Share of the time for a handshake after which its end counts as a timeout, of either side."""
_KEPT_BYTES = 16 << 20

_SETTLE_S = 0.1
_RETRY_S = 0.02
_PATIENCE_S = 2.0
_ROUTING_ID_BYTES = 16
_MAX_SHORT, _OVERHEAD, _LONG_OVERHEAD = wire_overhead(curve=False)


class ZmqWorkerEndpoint:
    """Endpoint of a worker, which connects, and reconnects, by itself.

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
        self._addresses = Addresses([connect] if isinstance(connect, str) else connect)
        self._path = ""
        self._host = ""
        self._port = 0
        self._keys = keys
        self._urls = ("", "")
        self._limits = limits or EndpointLimits()
        self._channels: tuple[Channel, ...] = ()
        self._open_connections = (
            ConnectionTable()
        )  # those over TCP without keys, which anyone may have answered
        self._guard: BacklogGuard | None = None
        self._connected = False
        self._ending = False
        self._since = 0.0
        self._listened = 0.0
        self._pause_s = self._limits.retry_s
        self._last_reason = ""
        self._said: set[str] = set()  # warnings since the last connection
        self._queue = SendQueue(self._limits.queue_messages, self._limits.queue_bytes)
        self._writable = asyncio.Event()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._lookup: asyncio.Future[object] | None = None
        self._started = False
        self._closed = False

    @property
    def address(self) -> str:
        """Address of the learner that was tried last."""
        return self._addresses.current

    @property
    def connected(self) -> bool:
        """True if both channels are up."""
        return self._connected

    @property
    def is_local(self) -> bool:
        """True if messages pass through Unix sockets, which takes less time than compressing
        them.
        """
        return self._urls[0].startswith("ipc:")

    def start(self) -> None:
        """Begin to connect; call this on the running loop."""
        keep_message_buffers(max_kept_bytes=_KEPT_BYTES)
        self._loop = asyncio.get_running_loop()
        self._context = make_context()
        self._started = True
        self._connect()
        self._set_timer("tick", self._limits.tick_s, self._tick)

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Send one message, or queue it while the connection is busy.

        Returns:
            False if it was not accepted: not connected, or the queue is full. See `wait_writable`.

        Raises:
            EndpointClosed: after `close`.
        """
        self._check_open()
        if not self._connected or self._ending:
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
        self._check_open()
        while not (self._connected and not self._ending and not self._queue):
            self._writable.clear()
            await self._writable.wait()
            self._check_open()

    async def close(self, *, flush_s: float = 0.5) -> None:
        """Give goodbyes up to ``flush_s`` seconds to leave, then free everything, which takes at
        most 2 s more.
        """
        if self._closed or not self._started:
            self._closed = True
            return
        until = self._loop.time() + flush_s
        while self._queue and self._connected and self._loop.time() < until:
            self._flush()
            await asyncio.sleep(_RETRY_S)
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        if self._lookup is not None:
            self._lookup.cancel()
        was_connected = self._connected
        sockets = self._give_up_channels()
        if self._guard is not None:
            self._guard.close()
        self._writable.set()
        await term(
            self._context, sockets, max(0.0, until - self._loop.time()) if was_connected else 0.0
        )

    # --- sending

    def _try_send(self, frames: Sequence[Buffer]) -> bool:
        channel = self._channels[0]
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
        if not self._connected or self._ending:
            return
        self._queue.flush(self._try_send)
        if not self._queue:
            self._writable.set()

    # --- receiving

    def _receive_message(self, channel: Channel) -> None:
        frames = channel.receive()
        if (
            frames and self._connected and (len(frames) > 1 or frames[0].nbytes)
        ):  # else only a sign of life
            self.on_message(frames)

    def _receive_broadcast(self, channel: Channel) -> None:
        head, *frames = channel.receive() or [memoryview(b"")]
        if head.nbytes != len(channel.topic) + BROADCAST_HEAD.size:
            return
        if not channel.ready:  # our subscription is in force
            channel.ready = True
            self._on_progress()
        if frames and self._connected:
            self.on_broadcast(frames)

    # --- connections

    def _connect(self) -> None:
        self._ending = False
        self._since = self._loop.time()
        address = self._addresses.next()
        if not address:
            self._wait_for(
                f"{self._addresses.problem or f'{self.address} names no address yet'}.",
                kind="no address",
            )
            self._again(self._limits.retry_s)
            return
        self._path = address.removeprefix("ipc://") if address.startswith("ipc://") else ""
        self._host, self._port = (
            ("localhost", 0) if self._path else split_address(address, key="connect")
        )
        self._urls = self._find()
        try:
            with contextlib.ExitStack() as undo:
                self._channels = self._open_channels(undo)
                undo.pop_all()
        except (zmq.ZMQError, OSError) as error:
            self._wait_for(
                f"cannot open a connection to {self.address}: {error.strerror}.", kind="cannot open"
            )
            self._again(self._next_pause())

    def _open_channels(self, undo: contextlib.ExitStack) -> tuple[Channel, ...]:
        """Open a socket for each address, which begins to connect;

        ``undo`` closes them if one cannot be opened.
        """
        kinds = ((zmq.DEALER, self._receive_message), (zmq.SUB, self._receive_broadcast))
        return tuple(
            self._open(undo, url, *kind) for url, kind in zip(self._urls, kinds, strict=True) if url
        )

    def _open(
        self,
        undo: contextlib.ExitStack,
        url: str,
        kind: int,
        receive: Callable[[Channel], None],
        topic: bytes = b"",
    ) -> Channel:
        socket = make_socket(self._context, kind, self._limits, ipv6=":" in self._host)
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
        present(socket, None if url.startswith("ipc:") else self._keys)
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
        if self._ending or channel not in self._channels:
            return
        if event == zmq.EVENT_CONNECTED:
            channel.tcp_since = self._loop.time()
            channel.fd = value
            self._bound_unread(channel)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            channel.shook_hands = True
            if channel.url == self._urls[0]:
                channel.ready = True
                channel.introduce()
                self._on_progress()
        elif event in (
            zmq.EVENT_HANDSHAKE_FAILED_AUTH,
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
        ):
            is_late = self._loop.time() - channel.tcp_since > _LATE * self._limits.handshake_s
            self._on_refused(
                channel, reason_seen_by_worker(event, value, self._keys, is_late=is_late)
            )
        elif event == zmq.EVENT_DISCONNECTED:
            self._on_ended(channel)
        elif event == zmq.EVENT_CLOSED and not self._connected:
            kind = f"nothing answers at {self.address}"
            self._wait_for(
                f"nothing answers at {channel.url}: is the learner running there?", kind=kind
            )
            if self._find() != self._urls:  # a learner has appeared, or a different one
                self._move_on(_RETRY_S)
            elif self._addresses.has_others():
                self._move_on(self._limits.retry_s)

    def _bound_unread(self, channel: Channel) -> None:
        """Bound what a connection can make us hold if the other side has proved nothing.

        libzmq bounds the number of whole messages that wait, but not the frames of an unfinished
        one.
        """
        if self._keys is not None or not channel.url.startswith("tcp:") or not CAN_TELL_BYTES:
            return
        channel.connection = self._open_connections.accept(channel.fd)
        channel.connection.is_admitted = True  # weights may be large
        if self._guard is None:
            self._guard = BacklogGuard(
                self._open_connections,
                self._limits,
                self._on_flood,
                port=None,
                max_bytes=self._limits.max_unread_bytes,
                max_growth_bytes=MAX_GROWTH_BYTES,
            )

    def _on_flood(self, connection: Connection, reason: str) -> None:
        """Log that a connection was cut off; its end is reported next."""
        self._log_once(
            f"the connection to {connection.address} was cut off: {reason}", kind="flood"
        )

    def _move_on(self, pause_s: float) -> None:
        """Give up a connection that is not made yet, and try the next address."""
        self._ending = True
        self._loop.call_soon(self._close_refused)
        self._again(pause_s)

    def _find(self) -> tuple[str, str]:
        """Return the addresses of the learner: this user's Unix sockets for its port if there are
        any, else TCP.
        """
        if self._path:
            return urls_of(self._path)
        if self._keys is None and is_loopback(self._host):
            try:
                path = find_local(self._port)
            except SecurityError as error:
                self._log_once(str(error))
            else:
                if path is not None:
                    return urls_of(path)
        return url(self._host, self._port), url(self._host, self._port + 1)

    def _on_progress(self) -> None:
        if self._connected or not all(channel.ready for channel in self._channels):
            return
        self._connected = True
        self._addresses.confirm()
        self._pause_s = self._limits.retry_s
        self._last_reason = ""
        self._said.clear()
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
        self._ending = True
        self._set_timer("ended", _SETTLE_S, lambda: self._report_ended(channel))

    def _report_ended(self, channel: Channel) -> None:
        if self._closed:
            return
        for each in self._channels:
            each.pump.drain()
        if not self._channels:  # a callback closed us
            return
        was_connected = self._connected
        self._connected = False
        for socket in self._give_up_channels():
            socket.close(0)
        if was_connected:
            address = channel.url
            if channel.silent_s > self._limits.dead_after_s:
                reason = f"nothing was heard from {address} for {channel.silent_s:.1f} s"
            else:
                reason = f"the connection to {address} ended"
            logger.info("%s; connecting again", reason)
            self.on_event(Event(EventKind.DISCONNECTED, reason, address=self.address))
            self._again(_RETRY_S)
        else:
            self._again(self._next_pause())

    def _on_refused(self, channel: Channel, reason: str) -> None:
        self._move_on(self._next_pause())
        self._log_once(f"{channel.url}: {reason}; trying again")
        self.on_event(Event(EventKind.REFUSED, reason, address=channel.url))

    def _close_refused(self) -> None:
        if not self._closed and self._ending:
            for socket in self._give_up_channels():
                socket.close(0)

    def _again(self, pause_s: float) -> None:
        if not self._closed:
            self._set_timer("again", pause_s, self._connect)

    def _next_pause(self) -> float:
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, self._limits.max_retry_s)
        return pause_s * random.uniform(0.75, 1.25)

    def _give_up_channels(self) -> list[zmq.Socket[bytes]]:
        channels = self._channels
        self._channels = ()
        self._connected = False
        self._queue.clear()
        for channel in channels:
            self._give_up(channel)
        return [channel.socket for channel in channels]

    def _give_up(self, channel: Channel) -> None:
        channel.close()
        if channel.connection is not None:
            self._open_connections.forget(channel.connection)

    # --- upkeep

    def _tick(self) -> None:
        self._set_timer("tick", self._limits.tick_s, self._tick)
        for channel in self._channels:
            channel.pump.look()
            channel.monitor.pump.look()
        self._flush()
        if self._ending or not self._channels:
            return
        now = self._loop.time()
        # time in which we stood still ourselves does not count as silence
        elapsed_s = min(now - self._listened, 2 * self._limits.tick_s)
        self._listened = now
        for channel in self._channels:
            if channel.shook_hands:
                channel.listen(elapsed_s)
            if channel.silent_s > self._limits.dead_after_s:
                self._on_ended(channel)
                return
        if self._connected:
            return
        waiting = [each for each in self._channels if not each.shook_hands]
        # libzmq itself waits forever if the other side speaks another protocol
        if late := [each for each in waiting if now - each.tcp_since > self._limits.handshake_s]:
            self._on_refused(late[0], NO_HANDSHAKE)
            return
        is_quiet = any(channel.tcp_since == math.inf for channel in self._channels)
        patience_s = max(_PATIENCE_S, min(self._pause_s, 2 * _PATIENCE_S))
        if is_quiet and now - self._since > patience_s and self._addresses.has_others():
            self._wait_for(f"no answer from {self.address}.", kind=f"no answer from {self.address}")
            self._next_pause()  # over a slow link, each round takes longer
            self._move_on(_RETRY_S)
            return
        if now - self._since > _PATIENCE_S and not self._last_reason and self._lookup is None:
            self._lookup = self._loop.run_in_executor(None, getaddrinfo, self._host, self._port)
            self._lookup.add_done_callback(self._explain_wait)

    def _explain_wait(self, lookup: asyncio.Future[object]) -> None:
        """Report why nothing happens; libzmq doesn't say that it can't find a host name."""
        self._lookup = None
        if not lookup.cancelled() and (error := lookup.exception()):
            self._wait_for(f"the host name {self._host!r} can't be found ({error}).")
        else:
            names = " and ".join(channel.url for channel in self._channels if not channel.ready)
            self._wait_for(
                f"no answer from {names} yet: is the learner running there, are both ports open"
                " to us?"
            )

    def _wait_for(self, reason: str, kind: str = "") -> None:
        """Report why there is no connection; reasons of one kind, for example for both ports, are
        logged once.
        """
        if self._closed or self._connected or reason == self._last_reason:
            return
        self._log_once(f"{reason} Still trying.", kind)
        self._last_reason = reason
        self.on_event(Event(EventKind.WAITING, reason, address=self.address))

    def _log_once(self, reason: str, kind: str = "") -> None:
        if (kind or reason) not in self._said:
            self._said.add(kind or reason)
            logger.warning("%s", reason)

    def _set_timer(self, name: str, after_s: float, call: Callable[[], None]) -> None:
        old = self._timers.pop(name, None)
        if old is not None:
            old.cancel()
        self._timers[name] = self._loop.call_later(after_s, call)

    def _check_open(self) -> None:
        if self._closed or not self._started:
            raise EndpointClosed(
                "the endpoint is closed" if self._closed else "the endpoint was not started"
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
        more = True
        limits = self.limits
        while more:
            frame = self.socket.recv(zmq.DONTWAIT, copy=False)
            more = frame.more
            size = len(frame)
            num_bytes += size
            if self.connection is not None:
                self.connection.taken_bytes += size + (
                    _OVERHEAD if size <= _MAX_SHORT else _LONG_OVERHEAD
                )
            if len(frames) <= limits.max_frames and num_bytes <= limits.max_message_bytes:
                frames.append(keep(frame))
        self.heard = True
        return (
            []
            if len(frames) > limits.max_frames or num_bytes > limits.max_message_bytes
            else frames
        )

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
