"""Moves messages from a plain ZeroMQ socket to a callback on the running asyncio loop.

ZeroMQ's descriptor is edge-triggered: it tells of a *change*, and any call on the socket may swallow it.
So a pump reads until nothing is left whenever it is woken, is to look again after every send on its socket
(``settle``), and looks by itself on a slow tick in case a wake-up was lost.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence

import zmq

from aiorl.net.transport.endpoint import Buffer

__all__ = ["COPY_BELOW_BYTES", "MORE", "SocketPump", "keep", "send_frames", "total_bytes"]

COPY_BELOW_BYTES = 64 << 10
"""Frames smaller than this are copied: cheaper than keeping track of shared memory."""

_SLICE_S = 0.005

# plain integers: to combine ZeroMQ's own enumerations takes as long as to send a small frame
_DONTWAIT = int(zmq.DONTWAIT)
MORE = int(zmq.DONTWAIT | zmq.SNDMORE)
"""Flags of a frame that is sent without waiting and that others follow."""
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_POLLOUT = int(zmq.POLLOUT)


def keep(frame: zmq.Frame) -> memoryview:
    """The bytes of a received frame, copied when small, shared with ZeroMQ when large."""
    if len(frame) < COPY_BELOW_BYTES:
        return memoryview(frame.bytes)
    return frame.buffer


def send_frames(
    socket: zmq.Socket[bytes], frames: Sequence[Buffer], *, track: bool = False
) -> zmq.MessageTracker | None:
    """Send one message without waiting; large frames are shared with ZeroMQ, not copied.

    Returns: with ``track``, what tells when ZeroMQ has let go of the last large frame; None if there is none.

    Raises:
        zmq.Again: the socket cannot take it now. When a later frame than the first raises it, the connection
            broke in between and the socket must be given up.
    """
    last = len(frames) - 1
    tracker = None
    for index, frame in enumerate(frames):
        flags = _DONTWAIT if index == last else MORE
        if _size(frame) < COPY_BELOW_BYTES:
            socket.send(frame, flags)
        elif track:
            tracker = socket.send(frame, flags, copy=False, track=True)
        else:
            socket.send(frame, flags, copy=False)
    return tracker


def total_bytes(frames: Sequence[Buffer]) -> int:
    """Payload of a message."""
    return sum(map(_size, frames))


def _size(frame: Buffer) -> int:
    return frame.nbytes if isinstance(frame, memoryview) else len(frame)


class SocketPump:
    """Calls ``receive`` as long as its socket has messages, a bounded number per turn of the loop.

    Args:
        socket: a plain socket, used by this thread only.
        receive: takes one whole message off the socket without waiting; raises zmq.Again if there is none.
        per_turn: calls before other tasks of the loop get their turn.
        after_turn: called after each turn, e.g. to send what was waiting.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        receive: Callable[[], None],
        *,
        per_turn: int = 64,
        after_turn: Callable[[], None] | None = None,
    ) -> None:
        self._socket = socket
        self._receive = receive
        self._per_turn = per_turn
        self._after_turn = after_turn
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._scheduled: asyncio.Handle | None = None
        self._closed = False
        self._loop.add_reader(self._fd, self._wake)
        self.schedule()

    def schedule(self) -> None:
        """Look at the socket again in the next turn of the loop."""
        if self._scheduled is None and not self._closed:
            self._scheduled = self._loop.call_soon(self._run_scheduled)

    def settle(self) -> bool:
        """Look at the socket after a send, which may have swallowed the descriptor's edge.

        A turn is scheduled only if there is something to read: while a socket is full, its descriptor tells when it
        takes more, and turning until then would only keep others from working.

        Returns: whether the socket would take a message now.
        """
        events = int(self._socket.getsockopt(_EVENTS))
        if events & _POLLIN:
            self.schedule()
        return bool(events & _POLLOUT)

    def look(self) -> None:
        """Schedule a turn if data waits that nothing has told of."""
        if not self._closed and self._scheduled is None:
            self.is_empty()

    def is_empty(self) -> bool:
        """Whether nothing waits to be read; if something does, a turn is scheduled."""
        if int(self._socket.getsockopt(_EVENTS)) & _POLLIN:
            self.schedule()
            return False
        return True

    def drain(self, *, at_most: int = 10_000) -> bool:
        """Read everything that is there now; returns False if ``at_most`` messages did not empty it."""
        is_empty = self._read(at_most)
        self.schedule()
        return is_empty

    def close(self) -> None:
        """Stop watching; call it before the socket is closed."""
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
            # also when a callback has failed: no later edge would tell of what is left
            if not emptied:
                self.schedule()
        if self._after_turn is not None and not self._closed:
            self._after_turn()
        if emptied:
            self.look()

    def _read(self, at_most: int, until: float = math.inf) -> bool:
        for _ in range(at_most):
            if self._closed:
                return True
            try:
                self._receive()
            except zmq.Again:
                return True
            if time.perf_counter() > until:
                return False
        return False
