"""ZeroMQ sockets on the running asyncio loop: creation, reading, monitoring, send queues and
release.

ZeroMQ's descriptor is edge-triggered: it signals a *change*, and any call on the socket can swallow
that signal. So a pump reads until nothing is left whenever it is woken, must check again after
every send on its socket (``settle``), and checks on a slow tick in case a signal was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import math
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import zmq

from aiorl.config.addresses import url
from aiorl.errors import ConfigError
from aiorl.net.transport.endpoint import Buffer, EndpointLimits, frame_bytes, total_bytes

logger = logging.getLogger(__name__)

COPY_BELOW_BYTES = 64 << 10
"""Frames smaller than this are copied: cheaper than keeping track of shared memory."""

_SLICE_S = 0.005

# plain integers: combining ZeroMQ's own enumerations takes as long as sending a small frame
_DONTWAIT = int(zmq.DONTWAIT)
MORE = int(zmq.DONTWAIT | zmq.SNDMORE)
"""Flags of a frame that is sent without waiting and is followed by others."""
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_POLLOUT = int(zmq.POLLOUT)
# Accept failures are left out: a listener without free descriptors reports them as fast as it can
# try again.
_WATCHED = int(
    zmq.EVENT_CONNECTED
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVENT = struct.Struct("=HI")
_AT_ONCE_S = 0.005
"""Seconds within which libzmq's events fill no queue."""
_MAKE_ROOM_S = 1.0
_names = itertools.count()
BROADCAST_HEAD = struct.Struct("<8sQ")
"""First frame of a broadcast: the learner endpoint's random epoch, and its number of broadcasts so
far.

A message with only this frame announces that number.
"""

_ZERO_COPY_RECV = 10
"""libzmq's option of a context, which pyzmq does not name."""
_TERM_S = 2.0
_FREE_PAIR_TRIES = 50


def keep(frame: zmq.Frame) -> memoryview:
    """Return the bytes of a received frame: a copy if it is small, shared with ZeroMQ if it is
    large.
    """
    if len(frame) < COPY_BELOW_BYTES:
        return memoryview(frame.bytes)
    return frame.buffer


def send_frames(
    socket: zmq.Socket[bytes], frames: Sequence[Buffer], *, track: bool = False
) -> zmq.MessageTracker | None:
    """Send one message without waiting; large frames are shared with ZeroMQ, not copied.

    Returns:
        With ``track``, a tracker that is done once ZeroMQ has released the last large frame; None
        if there is none.

    Raises:
        zmq.Again: when the socket cannot take the message now. If a frame after the first one
            raises it, the connection broke in between, and the socket must be given up.
    """
    last = len(frames) - 1
    tracker = None
    for index, frame in enumerate(frames):
        flags = _DONTWAIT if index == last else MORE
        if frame_bytes(frame) < COPY_BELOW_BYTES:
            socket.send(frame, flags)
        elif track:
            tracker = socket.send(frame, flags, copy=False, track=True)
        else:
            socket.send(frame, flags, copy=False)
    return tracker


class SocketPump:
    """Calls ``receive`` while its socket has messages, a bounded number of times per turn of the
    loop.

    Args:
        socket: a plain socket, used by this thread only.
        receive: takes one whole message off the socket without waiting; raises zmq.Again if there
            is none.
        per_turn: calls before other tasks of the loop get their turn.
        on_empty: called when everything received so far has been read.
        after_turn: called after each turn, for example to send queued messages.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        receive: Callable[[], None],
        *,
        per_turn: int = 64,
        on_empty: Callable[[], None] = lambda: None,
        after_turn: Callable[[], None] | None = None,
    ) -> None:
        self._socket = socket
        self._receive = receive
        self._per_turn = per_turn
        self._on_empty = on_empty
        self._after_turn = after_turn
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._scheduled: asyncio.Handle | None = None
        self._closed = False
        self._loop.add_reader(self._fd, self._wake)
        self.schedule()

    def schedule(self) -> None:
        """Check the socket again in the next turn of the loop."""
        if self._scheduled is None and not self._closed:
            self._scheduled = self._loop.call_soon(self._run_scheduled)

    def settle(self) -> bool:
        """Check the socket after a send, which can swallow the descriptor's edge.

        A turn is scheduled only if there is something to read. While the socket is full, its
        descriptor signals when there is room again; scheduling turns until then would only keep
        other tasks from working.

        Returns:
            True if the socket would accept a message now.
        """
        events = self._ready_events()
        if events & _POLLIN:
            self.schedule()
        return bool(events & _POLLOUT)

    def poll(self) -> None:
        """Schedule a turn if data waits that no edge has signalled."""
        if not self._closed and self._scheduled is None:
            self.is_empty()

    def is_empty(self) -> bool:
        """Return True if nothing waits to be read; otherwise schedule a turn."""
        if self._is_readable():
            self.schedule()
            return False
        return True

    def drain(self, *, at_most: int = 10_000) -> bool:
        """Read all waiting messages, at most ``at_most``; return False if that did not empty the
        socket.
        """
        is_empty = self._read(at_most)
        self.schedule()
        return is_empty

    def close(self) -> None:
        """Stop watching; call this before closing the socket."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None

    def _wake(self) -> None:
        if self._scheduled is None:
            self._turn()

    def _run_scheduled(self) -> None:
        self._scheduled = None
        self._turn()

    def _turn(self) -> None:
        emptied = False
        try:
            emptied = self._read(self._per_turn, time.perf_counter() + _SLICE_S)
        finally:
            # also after a failed callback: no later edge would signal the rest
            if not emptied:
                self.schedule()
        if self._after_turn is not None and not self._closed:
            self._after_turn()

    def _is_readable(self) -> bool:
        return bool(self._ready_events() & _POLLIN)

    def _ready_events(self) -> int:
        return int(self._socket.getsockopt(_EVENTS))

    def _read(self, at_most: int, until: float = math.inf) -> bool:
        for number in range(at_most):
            if self._closed:
                return True
            # Most turns find a single message. After it, this question takes less time than an
            # exception; in a burst, one exception takes less than many questions.
            if number == 1 and not self._is_readable():
                self._on_empty()
                return True
            try:
                self._receive()
            except zmq.Again:
                self._on_empty()
                return True
            if time.perf_counter() > until:
                return False
        return False


class SubscriptionPump(SocketPump):
    """Pump of an XPUB.

    Whenever an XPUB is asked for anything, libzmq first reads all subscriptions, and continues for
    as long as more of them arrive. Other threads must run meanwhile, above all the one that cuts
    off a flood; `zmq.Socket.getsockopt` would keep the interpreter's lock.
    """

    def _ready_events(self) -> int:
        for _, events in zmq.zmq_poll([(self._socket, _POLLIN | _POLLOUT)], 0):
            return events
        return 0


class SendQueue:
    """Bounded queue of one connection.

    Args:
        max_messages: most messages that can wait.
        max_bytes: most bytes that can wait; a single message of any size is always accepted.
    """

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._messages: deque[Sequence[Buffer]] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def num_bytes(self) -> int:
        """Bytes that wait."""
        return self._bytes

    def put(self, frames: Sequence[Buffer]) -> bool:
        """Add a message; return False if the queue is full."""
        num_bytes = self._bytes + total_bytes(frames)
        if self._messages and (len(self) >= self._max_messages or num_bytes > self._max_bytes):
            return False
        self._messages.append(frames)
        self._bytes = num_bytes
        return True

    def flush(self, send: Callable[[Sequence[Buffer]], bool | None]) -> bool | None:
        """Send messages while ``send`` accepts them; return its last result, or True for an empty
        queue.
        """
        sent: bool | None = True
        while self._messages and (sent := send(self._messages[0])):
            self._bytes -= total_bytes(self._messages.popleft())
        return sent

    def clear(self) -> None:
        """Discard all waiting messages."""
        self._messages.clear()
        self._bytes = 0


class SendQueues:
    """Send queues, one for each busy peer.

    Attributes:
        num_bytes: bytes that wait for all peers together.
    """

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self.num_bytes = 0
        self._bounds = (max_messages, max_bytes)
        self._queues: dict[bytes, SendQueue] = {}

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._queues

    def __len__(self) -> int:
        return len(self._queues)

    @property
    def num_messages(self) -> int:
        """Messages that wait for all peers together."""
        return sum(map(len, self._queues.values()))

    def waiting(self, peer: bytes) -> int:
        """Return the number of messages that wait for one peer."""
        return len(self._queues.get(peer, ()))

    def waiting_bytes(self, peer: bytes) -> int:
        """Return the bytes that wait for one peer."""
        return self._queues[peer].num_bytes if peer in self._queues else 0

    @property
    def largest(self) -> bytes:
        """Peer with the most waiting bytes; there must be a busy peer."""
        return max(self._queues, key=lambda peer: self._queues[peer].num_bytes)

    def put(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        """Add a message; return False if that peer's queue is full."""
        if peer not in self._queues:
            self._queues[peer] = SendQueue(*self._bounds)
        queue = self._queues[peer]
        before = queue.num_bytes
        is_taken = queue.put(frames)
        self.num_bytes += queue.num_bytes - before
        return is_taken

    def forget(self, peer: bytes) -> None:
        """Discard all messages that wait for a peer."""
        queue = self._queues.pop(peer, None)
        if queue is not None:
            self.num_bytes -= queue.num_bytes

    def flush(self, send: Callable[[bytes, Sequence[Buffer]], bool | None]) -> None:
        """Send waiting messages; ``send(peer, frames)`` returns True if sent, None if busy, False
        without a peer.
        """
        for peer, queue in list(self._queues.items()):
            before = queue.num_bytes
            sent = queue.flush(partial(send, peer))
            self.num_bytes += queue.num_bytes - before
            if sent is not None:
                self.forget(peer)


class SocketMonitor:
    """Calls ``handler(event, value)`` for each connection event of a socket, in order.

    ``value`` is the descriptor for ACCEPTED, CONNECTED, DISCONNECTED and CLOSED, and the error or
    protocol code for failed handshakes. Close the monitor before its socket. ``pump`` reads the
    events reported so far.

    Events wait in a bounded queue. While it is full, ZeroMQ's own thread waits with the next event,
    and so do all of its sockets. This slows down peers that open connections faster than we can
    look at them. That thread then also holds a lock that binding the watched socket needs, as does
    disabling the monitor. pyzmq would wait for it with the interpreter's lock, and so forever:
    `make_room` first.
    """

    def __init__(self, socket: zmq.Socket[bytes], handler: Callable[[int, int], None]) -> None:
        address = f"inproc://aiorl.monitor.{next(_names)}"
        self._socket = socket
        self._handler = handler
        socket.monitor(address, _WATCHED)
        self._pair: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
        self._pair.connect(address)
        self.pump = SocketPump(self._pair, self._receive)

    @contextlib.contextmanager
    def make_room(self) -> Iterator[bool]:
        """Keep the queue from being full during a block of some milliseconds; the events that were
        in it are handled after the block.

        Yields:
            False if events come too fast for that.
        """
        heads: list[bytes] = []
        try:
            yield self._empty(heads.append)
        finally:
            for head in heads:
                self._handle(head)

    def close(self) -> None:
        """Stop monitoring."""
        self.pump.close()
        if not self._socket.closed and self._empty(lambda head: None):
            self._socket.disable_monitor()
        self._pair.close(0)

    def _empty(self, take: Callable[[bytes], None]) -> bool:
        until = time.perf_counter() + _MAKE_ROOM_S
        while (asked := time.perf_counter()) < until:
            try:
                head, *_ = self._pair.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                # another thread may have had the interpreter's lock since the queue was empty
                if time.perf_counter() - asked < _AT_ONCE_S:
                    return True
            else:
                take(head)
        return False

    def _receive(self) -> None:
        head, *_ = self._pair.recv_multipart(zmq.DONTWAIT)
        self._handle(head)

    def _handle(self, head: bytes) -> None:
        event, value = _EVENT.unpack(head)
        self._handler(event, value)


def make_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Make a context of which the sockets copy small frames that they receive.

    By default, libzmq keeps a whole buffer of 18 KiB for as long as one small frame in it is
    unread, so that a peer that sends every frame in a packet of its own would take hundreds of
    times the memory of what it sends.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(1)
    context.set(_ZERO_COPY_RECV, 0)
    return context


def make_socket(
    context: zmq.Context[zmq.Socket[bytes]],
    kind: int,
    limits: EndpointLimits,
    *,
    ipv6: bool = False,
) -> zmq.Socket[bytes]:
    """Make a socket with our common options: bounded sizes, detection of dead connections, no
    linger at close.

    ZeroMQ's own heartbeats stay off, because libzmq 4.3.5 aborts the process when one is due on a
    connection that broke while its queue was full. The kernel finds a vanished host: neither data
    nor keepalive probes are confirmed within ``dead_after_s``. The endpoints find a process that
    stands still, because it sends nothing.
    """
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.linger = 0
    socket.maxmsgsize = limits.max_frame_bytes
    socket.rcvhwm = limits.receive_messages
    socket.sndhwm = limits.send_messages
    socket.backlog = limits.max_peers  # all workers may join at once
    socket.handshake_ivl = int(limits.times.handshake_s * 1000)
    socket.heartbeat_ivl = 0
    socket.setsockopt(zmq.TCP_MAXRT, int(limits.times.dead_after_s * 1000))
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = max(1, round(limits.times.dead_after_s / 2))
    socket.tcp_keepalive_intvl = max(1, round(limits.times.dead_after_s / 6))
    socket.tcp_keepalive_cnt = 3
    socket.reconnect_ivl = 200
    socket.reconnect_ivl_max = 2000
    socket.connect_timeout = 5000
    if ipv6:
        socket.setsockopt(zmq.IPV6, 1)
    return socket


def bind_pair(first: zmq.Socket[bytes], second: zmq.Socket[bytes], host: str, port: int) -> int:
    """Bind two sockets to two consecutive ports, a free pair if ``port`` is 0, and return the first
    port.

    Raises:
        ConfigError: when a port is in use, or the address does not belong to this machine.
    """
    if not port:
        port, reserved = reserve_pair("", 0)
        for placeholder in reserved:
            placeholder.close()
    for bound, number in ((first, port), (second, port + 1)):
        address = url(host, number)
        try:
            bound.bind(address)
        except (zmq.ZMQError, OverflowError) as error:
            raise _cannot_bind(address, error) from error
    return port


def reserve_pair(host: str, port: int) -> tuple[int, list[socket.socket]]:
    """Reserve two consecutive IPv4 ports without listening on them; port 0 reserves a free pair.

    Returns:
        The first port, and the sockets that reserve both ports until they are closed.

    Raises:
        ConfigError: when a port is in use, or the address does not belong to this machine.
    """
    for tries_left in reversed(range(1 if port else _FREE_PAIR_TRIES)):
        reserved = [socket.socket() for _ in range(2)]
        number = port
        try:
            for placeholder in reserved:
                placeholder.bind((host, number))
                number = placeholder.getsockname()[1] + 1
        except (OSError, OverflowError) as error:
            for placeholder in reserved:
                placeholder.close()
            if not tries_left:
                raise _cannot_bind(url(host, number), error) from error
        else:
            return number - 2, reserved
    raise AssertionError


def _cannot_bind(address: str, error: Exception) -> ConfigError:
    why = "the port is in use" if getattr(error, "errno", None) == errno.EADDRINUSE else f"{error}"
    hint = "use --bind with a free port and an address of this machine, or 0.0.0.0 for all of them."
    return ConfigError(f"cannot bind {address}: {why};", key="bind", value=address, hint=hint)


async def term(
    context: zmq.Context[zmq.Socket[bytes]], sockets: Iterable[zmq.Socket[bytes]], linger_s: float
) -> None:
    """Close the sockets, give unsent messages ``linger_s`` seconds to leave, and free the context.

    This takes at most ``linger_s`` + 2 s. If it is cancelled, the context is freed in the
    background.
    """
    for open_socket in sockets:
        if not open_socket.closed:
            open_socket.close(int(linger_s * 1000))
    loop = asyncio.get_running_loop()
    freed = asyncio.Event()

    def free() -> None:
        context.term()
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile, so no one waits
            loop.call_soon_threadsafe(freed.set)

    threading.Thread(target=free, name="aiorl-zmq-term", daemon=True).start()
    try:
        async with asyncio.timeout(linger_s + _TERM_S):
            await freed.wait()
    except TimeoutError:
        logger.warning(
            "ZeroMQ did not release its sockets within %.1f s; continuing without it",
            linger_s + _TERM_S,
        )


def fd_of(frame: zmq.Frame) -> int:
    """Return the descriptor of the connection that a frame came over, or -1 for none."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def user_id_of(frame: zmq.Frame) -> str:
    """Return the public key (Z85) proved by the connection that a frame came over, "" without
    keys.
    """
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
