"""Messages over a connected stream socket, between a process and one that it has started.

A message is a head, the size of each frame, and the frames. Each of these parts begins at a multiple
of 16 bytes, so that arrays in frames are aligned.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from aiorl.errors import RemoteProtocolError
from aiorl.net.transport.endpoint import Buffer, EndpointLimits, total_bytes

_HEAD: Final = struct.Struct("<?3xIQ")
"""1 for a broadcast, number of frames, and bytes of all that follows."""
_ALIGNMENT: Final = 16
_PADDING: Final = bytes(_ALIGNMENT)
_READ_BYTES: Final = 1 << 16
"""Longer messages are read to where they stay."""
_JOIN_BELOW_BYTES: Final = 1 << 15
"""A shorter message is copied, which takes less time than many buffers."""
_READS_PER_TURN: Final = 16
_SEND_BUFFER_BYTES: Final = 1 << 20
"""Size that we request; the kernel has a bound of its own."""
_MAX_BUFFERS: Final = 512
"""Buffers that are sent at once; the kernel takes 1,024."""


class StreamMessage(NamedTuple):
    """A message that has arrived; its frames are read-only."""

    is_broadcast: bool
    frames: list[memoryview]


class _LongMessage(NamedTuple):
    """A message that arrives in pieces, which are read to where they stay."""

    is_broadcast: bool
    num_frames: int
    body: memoryview


class MessageReader:
    """Takes the bytes of a stream, and gives its messages.

    Args:
        limits: bounds of a message.
    """

    def __init__(self, limits: EndpointLimits) -> None:
        self._limits = limits
        self._short = bytearray(_READ_BYTES)
        self._long: _LongMessage | None = None
        self._num_read = 0

    @property
    def room(self) -> memoryview:
        """Memory for the next bytes of the stream."""
        target = memoryview(self._short) if self._long is None else self._long.body
        return target[self._num_read :]

    def take(self, count: int) -> list[StreamMessage]:
        """Return the messages that are complete.

        Args:
            count: number of bytes that have been written to `room`.

        Raises:
            RemoteProtocolError: a message exceeds the limits, or is none.
        """
        self._num_read += count
        long = self._long
        if long is None:
            return self._take_short()
        if self._num_read < len(long.body):
            return []
        self._long = None
        self._num_read = 0
        return [_message(long.is_broadcast, long.num_frames, long.body.toreadonly())]

    def _take_short(self) -> list[StreamMessage]:
        messages: list[StreamMessage] = []
        begin = 0
        limits = self._limits
        while self._num_read - begin >= _HEAD.size:
            is_broadcast, num_frames, length = _HEAD.unpack_from(self._short, begin)
            if num_frames > limits.max_frames or length > limits.max_message_bytes:
                raise RemoteProtocolError(
                    f"a message of {num_frames} frames and {length} bytes: at most"
                    f" {limits.max_frames} and {limits.max_message_bytes} are accepted"
                )
            first = begin + _HEAD.size
            end = first + length
            if end > self._num_read:
                if length > _READ_BYTES - _HEAD.size:
                    arrived = self._short[first : self._num_read]
                    body = np.empty(length, np.uint8).data  # a bytearray would be cleared first
                    body[: len(arrived)] = arrived
                    self._long = _LongMessage(is_broadcast, num_frames, body)
                    self._num_read = len(arrived)
                    return messages
                break
            body = memoryview(self._short[first:end]).toreadonly()
            messages.append(_message(is_broadcast, num_frames, body))
            begin = end
        rest = self._short[begin : self._num_read]
        self._short[: len(rest)] = rest
        self._num_read = len(rest)
        return messages


class MessageStream:
    """Sends and receives messages on the running event loop, until the stream ends.

    Args:
        connection: connected stream socket, which belongs to this object.
        limits: bounds of a message.
        on_message: called with each message.
        on_end: called once with the reason when the other side has closed its end or has broken the
            rules, after all its messages.
    """

    def __init__(
        self,
        connection: socket.socket,
        limits: EndpointLimits,
        *,
        on_message: Callable[[StreamMessage], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._connection = connection
        self._reader = MessageReader(limits)
        self._on_message = on_message
        self._on_end = on_end
        self._unsent: deque[list[memoryview]] = deque()
        self._is_sent = asyncio.Event()
        self._is_sent.set()
        self._loop = asyncio.get_running_loop()
        self._is_reading = True
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._loop.add_reader(connection.fileno(), self._read)

    @property
    def num_unsent(self) -> int:
        """Messages that wait until the other side reads."""
        return len(self._unsent)

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes of these messages."""
        return sum(map(total_bytes, self._unsent))

    def send(self, frames: Sequence[Buffer], *, is_broadcast: bool = False) -> None:
        """Send a message, or keep it until the other side reads; never waits."""
        buffers = _buffers_of(frames, is_broadcast=is_broadcast)
        if self._unsent:
            self._unsent.append(buffers)
        elif not self._write(buffers):
            self._unsent.append(buffers)
            self._is_sent.clear()
            self._loop.add_writer(self._connection.fileno(), self._flush)

    async def wait_sent(self) -> None:
        """Wait until no message waits."""
        await self._is_sent.wait()

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

    def _read(self) -> None:
        for _ in range(_READS_PER_TURN):
            room = self._reader.room
            try:
                count = self._connection.recv_into(room)
            except BlockingIOError:
                return
            except OSError as error:
                self._end(f"its connection ended ({error.strerror})")
                return
            if not count:
                self._end("its connection ended")
                return
            is_all = count < len(room)
            del room  # memory in use can't be replaced
            try:
                messages = self._reader.take(count)
            except RemoteProtocolError as error:
                self._end(str(error))
                return
            for message in messages:
                self._on_message(message)
                if not self._is_reading:
                    return
            if is_all:
                return

    def _end(self, reason: str) -> None:
        self.stop_reading()
        self._on_end(reason)

    def _flush(self) -> None:
        while self._unsent:
            if not self._write(self._unsent[0]):
                return
            self._unsent.popleft()
        self._loop.remove_writer(self._connection.fileno())
        self._is_sent.set()

    def _write(self, buffers: list[memoryview]) -> bool:
        """Write what the socket takes, and remove it; return True if nothing is left."""
        while buffers:
            try:
                count = self._connection.sendmsg(buffers[:_MAX_BUFFERS])
            except BlockingIOError:
                return False
            except OSError:  # the other side has gone, which reading will report
                buffers.clear()
                return True
            _remove_bytes(buffers, count)
        return True

    def _forget_unsent(self) -> None:
        if self._unsent:
            self._loop.remove_writer(self._connection.fileno())
        self._unsent.clear()
        self._is_sent.set()


@functools.cache
def _sizes_struct(num_frames: int) -> struct.Struct:
    return struct.Struct(f"<{num_frames}Q")


def _message(is_broadcast: bool, num_frames: int, body: memoryview) -> StreamMessage:
    sizes_of = _sizes_struct(num_frames)
    begin = sizes_of.size + -sizes_of.size % _ALIGNMENT
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
    views = [memoryview(frame) for frame in frames]
    sizes = [view.nbytes for view in views]
    packed_sizes = _sizes_struct(len(sizes)).pack(*sizes)
    parts: list[Buffer] = []
    length = 0
    all_parts: list[Buffer] = [packed_sizes, *views]
    for part, size in zip(all_parts, (len(packed_sizes), *sizes), strict=True):
        padding = -size % _ALIGNMENT
        parts.append(part)
        if padding:
            parts.append(_PADDING[:padding])
        length += size + padding
    head = _HEAD.pack(is_broadcast, len(sizes), length)
    if length < _JOIN_BELOW_BYTES:
        return [memoryview(b"".join((head, *parts)))]
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
