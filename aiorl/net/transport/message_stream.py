"""Messages over a connected stream socket, between a process and one that it has started.

A message is a head, the size of each frame, and the frames. Each of these parts begins at a multiple
of 16 bytes, so that arrays in frames are aligned.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from aiorl.errors import RemoteProtocolError
from aiorl.net.transport.endpoint import Buffer, EndpointLimits, frame_bytes

_HEAD: Final = struct.Struct("<?3xIQ")
"""1 for a broadcast, number of frames, and bytes of all that follows."""
_SIZE_BYTES: Final = 8
_ALIGNMENT: Final = 16
_PADDINGS: Final = [bytes(-size % _ALIGNMENT) for size in range(_ALIGNMENT)]
"""Bytes that follow a part, by its size modulo 16."""
_READ_BYTES: Final = 1 << 16
_JOIN_BELOW_BYTES: Final = 1 << 15
"""A shorter message is copied, which takes less time than many buffers."""
_READS_PER_TURN: Final = 16
_SEND_BUFFER_BYTES: Final = 1 << 20
"""Size that we request; the kernel has a bound of its own."""
_NO_SIGNAL: Final = getattr(socket, "MSG_NOSIGNAL", 0)
"""A program may have restored the default of SIGPIPE, which would end it."""
_MAX_BUFFERS: Final = 512
"""Buffers that are sent at once; the kernel takes 1,024."""


class StreamMessage(NamedTuple):
    """A message that has arrived; its frames are read-only."""

    is_broadcast: bool
    frames: list[memoryview]


class _Large(NamedTuple):
    """A message that is larger than the buffer, and is read to where it stays."""

    is_broadcast: bool
    num_frames: int
    body: memoryview


class _Unsent(NamedTuple):
    """A message that waits; bytes that are sent are removed from its buffers."""

    is_broadcast: bool
    buffers: list[memoryview]


class MessageReader:
    """Takes the bytes of a stream, and gives its messages.

    Args:
        limits: bounds of a message.
    """

    def __init__(self, limits: EndpointLimits) -> None:
        self._max_frames = limits.max_frames
        sizes_and_padding = (limits.max_frames + 1) * (_SIZE_BYTES + _ALIGNMENT)
        self._max_bytes = limits.max_message_bytes + sizes_and_padding
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._begin = 0  # of the bytes in the buffer that belong to no message yet
        self._end = 0  # of the bytes in the buffer, or in the body of a large message
        self._large: _Large | None = None

    @property
    def room(self) -> memoryview:
        """Memory for the next bytes of the stream; there is some once `next_message` has returned
        None.
        """
        target = self._buffer if self._large is None else self._large.body
        return target[self._end :]

    def add(self, count: int) -> None:
        """Take note of bytes that have been written to `room`."""
        self._end += count

    def next_message(self) -> StreamMessage | None:
        """Return the next message, None if it has not arrived.

        Raises:
            RemoteProtocolError: it exceeds the limits, or is no message.
            MemoryError: there is not enough memory for it.
        """
        if self._large is not None:
            return self._finished_large(self._large)
        if self._end - self._begin < _HEAD.size:
            self._move_to_front()
            return None
        is_broadcast, num_frames, length = _HEAD.unpack_from(self._buffer, self._begin)
        if num_frames > self._max_frames or length > self._max_bytes:
            raise RemoteProtocolError(
                f"a message of {num_frames} frames and {length} bytes: at most"
                f" {self._max_frames} and {self._max_bytes} are accepted"
            )
        first = self._begin + _HEAD.size
        end = first + length
        if end <= self._end:
            body = memoryview(bytes(self._buffer[first:end]))
            self._begin = end
            if end == self._end:
                self._begin = 0
                self._end = 0
            return _message(is_broadcast, num_frames, body)
        if length <= _READ_BYTES - _HEAD.size:
            self._move_to_front()
            return None
        body = np.empty(length, np.uint8).data  # a bytearray would be cleared first
        arrived = self._buffer[first : self._end]
        body[: len(arrived)] = arrived
        self._large = _Large(is_broadcast, num_frames, body)
        self._end = len(arrived)
        return None

    def _finished_large(self, large: _Large) -> StreamMessage | None:
        if self._end < len(large.body):
            return None
        self._large = None
        self._begin = 0
        self._end = 0
        return _message(large.is_broadcast, large.num_frames, large.body.toreadonly())

    def _move_to_front(self) -> None:
        if not self._begin:
            return
        self._end -= self._begin
        self._buffer[: self._end] = self._buffer[self._begin : self._begin + self._end]
        self._begin = 0


class MessageStream:
    """Sends and receives messages on the running event loop, until the stream ends.

    Args:
        connection: connected stream socket, which belongs to this object.
        limits: bounds of a message.
        on_message: called with each message.
        on_end: called once with the reason when the other side has closed its end or has broken the
            rules, after all its messages; not after `stop_reading` or `close`.

    Attributes:
        num_unsent_bytes: bytes of the messages that wait until the other side reads.
    """

    def __init__(
        self,
        connection: socket.socket,
        limits: EndpointLimits,
        *,
        on_message: Callable[[StreamMessage], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.num_unsent_bytes = 0
        self._connection = connection
        self._reader = MessageReader(limits)
        self._on_message = on_message
        self._on_end = on_end
        self._unsent: deque[_Unsent] = deque()
        self._is_sent = asyncio.Event()
        self._is_sent.set()
        self._loop = asyncio.get_running_loop()
        self._is_reading = True
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # some systems refuse more than they can give
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._loop.add_reader(connection.fileno(), self.read)

    @property
    def num_unsent(self) -> int:
        """Messages that wait until the other side reads."""
        return len(self._unsent)

    @property
    def num_unsent_broadcasts(self) -> int:
        """Broadcasts among these messages."""
        return sum(message.is_broadcast for message in self._unsent)

    def send(self, frames: Sequence[Buffer], *, is_broadcast: bool = False) -> None:
        """Send a message, or keep it until the other side reads; never waits."""
        buffers = _buffers_of(frames, is_broadcast=is_broadcast)
        self.num_unsent_bytes += sum(map(len, buffers))
        if not self._unsent:
            if self._write(buffers):
                return
            self._is_sent.clear()
            self._loop.add_writer(self._connection.fileno(), self._flush)
        self._unsent.append(_Unsent(is_broadcast, buffers))

    async def wait_sent(self) -> None:
        """Wait until no message waits."""
        await self._is_sent.wait()

    def read(self) -> bool:
        """Read what has arrived, within bounds, and deliver the messages that are complete; return
        whether more may have arrived.
        """
        for _ in range(_READS_PER_TURN):
            room = self._reader.room
            if not self._is_reading or not room:  # a callback has failed: deliver the others first
                return False
            try:
                count = self._connection.recv_into(room)
            except BlockingIOError:
                return False
            except OSError as error:
                self._end(f"its connection ended ({error.strerror})")
                return False
            if not count:
                self._end("its connection ended")
                return False
            is_drained = count < len(room)
            self._reader.add(count)
            self._deliver()
            if is_drained:
                return False
        return True

    def stop_reading(self) -> None:
        """Ignore all that arrives from now on."""
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._connection.fileno())

    def close(self) -> None:
        """Close the socket; messages that wait are lost."""
        self.stop_reading()
        self._forget_unsent()
        self._connection.close()

    def _deliver(self) -> None:
        while self._is_reading:
            try:
                message = self._reader.next_message()
            except (RemoteProtocolError, MemoryError) as error:
                self._end(str(error))
                return
            if message is None:
                return
            try:
                self._on_message(message)
            except BaseException:
                self._loop.call_soon(self._deliver)  # an error concerns one message
                raise

    def _end(self, reason: str) -> None:
        self.stop_reading()
        self._on_end(reason)

    def _flush(self) -> None:
        while self._unsent:
            if not self._write(self._unsent[0].buffers):
                return
            if self._unsent:
                self._unsent.popleft()
        self._loop.remove_writer(self._connection.fileno())
        self._is_sent.set()

    def _write(self, buffers: list[memoryview]) -> bool:
        """Write what the socket takes, and remove it; return True if nothing is left."""
        while buffers:
            try:
                count = self._connection.sendmsg(buffers[:_MAX_BUFFERS], (), _NO_SIGNAL)
            except BlockingIOError:
                return False
            except OSError:
                self._give_up()
                return True
            self.num_unsent_bytes -= count
            _remove_bytes(buffers, count)
        return True

    def _give_up(self) -> None:
        """Send nothing more after an error, which can have cut a message: both sides then read the
        end of the stream.
        """
        self._forget_unsent()
        with contextlib.suppress(OSError):  # the other side has closed its end
            self._connection.shutdown(socket.SHUT_WR)

    def _forget_unsent(self) -> None:
        if self._unsent:
            self._loop.remove_writer(self._connection.fileno())
        self._unsent.clear()
        self.num_unsent_bytes = 0
        self._is_sent.set()


@functools.cache
def _sizes_struct(num_frames: int) -> struct.Struct:
    """Return the form of the sizes of the frames, with the padding behind them."""
    return struct.Struct(f"<{num_frames}Q{-num_frames * _SIZE_BYTES % _ALIGNMENT}x")


def _message(is_broadcast: bool, num_frames: int, body: memoryview) -> StreamMessage:
    sizes_of = _sizes_struct(num_frames)
    begin = sizes_of.size
    if begin > len(body):
        raise RemoteProtocolError("a message without the sizes of its frames")
    frames = []
    for size in sizes_of.unpack_from(body):
        frames.append(body[begin : begin + size])
        begin += size + -size % _ALIGNMENT
    if begin != len(body):
        raise RemoteProtocolError("a message whose frames have other sizes than it says")
    return StreamMessage(is_broadcast, frames)


def _buffers_of(frames: Sequence[Buffer], *, is_broadcast: bool) -> list[memoryview]:
    """Return the bytes of a message, in one copy if they are few."""
    sizes = [*map(frame_bytes, frames)]
    sizes_of = _sizes_struct(len(sizes))
    parts: list[Buffer] = [sizes_of.pack(*sizes)]
    length = sizes_of.size
    for frame, size in zip(frames, sizes, strict=True):
        padding = _PADDINGS[size % _ALIGNMENT]
        parts += (frame, padding)
        length += size + len(padding)
    head = _HEAD.pack(is_broadcast, len(sizes), length)
    if length < _JOIN_BELOW_BYTES:
        return [memoryview(head + b"".join(parts))]
    return [memoryview(part).cast("B") for part in (head, *parts) if len(part)]


def _remove_bytes(buffers: list[memoryview], count: int) -> None:
    """Remove the first bytes of buffers."""
    num_whole = 0
    for buffer in buffers:
        if count < buffer.nbytes:
            break
        count -= buffer.nbytes
        num_whole += 1
    del buffers[:num_whole]
    if count:
        buffers[0] = buffers[0][count:]
