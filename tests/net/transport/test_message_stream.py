"""Messages between a parent and its children: how they are cut into frames again, and what a child
that reads nothing, or writes nonsense, gets.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

import numpy as np
import pytest
from hypothesis import given, strategies as st

from aiorl.errors import RemoteProtocolError
from aiorl.net.transport.endpoint import EndpointLimits, EventKind
from aiorl.net.transport.inherited import ChildrenEndpoint, InheritedEndpoint
from aiorl.net.transport.message_stream import MessageReader, MessageStream

LIMITS = EndpointLimits(
    max_frames=8, max_frame_bytes=1 << 20, max_message_bytes=2 << 20, queue_bytes=1 << 22
)
SIZES = st.one_of(st.integers(0, 100), st.sampled_from([0, 16, 65_500, 65_536, 200_000]))
MESSAGES = st.lists(st.tuples(st.booleans(), st.lists(SIZES, max_size=8)), max_size=6)


def some_bytes(size):
    return np.random.default_rng(size).bytes(size)


async def bytes_of(messages):
    """Return what a stream writes."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.setblocking(False)
        stream = MessageStream(ours, LIMITS, on_message=print, on_end=print)
        for is_broadcast, frames in messages:
            stream.send(frames, is_broadcast=is_broadcast)
        loop = asyncio.get_running_loop()
        written = bytearray()
        while stream.num_unsent:
            written += await loop.sock_recv(theirs, 1 << 20)
        stream.close()
        while rest := await loop.sock_recv(theirs, 1 << 20):
            written += rest
    return written


def read(written, sizes):
    """Return the messages in bytes that arrive in pieces of these sizes, over and over."""
    reader = MessageReader(LIMITS)
    messages = []
    begin = 0
    number = 0
    while begin < len(written):
        room = reader.room
        piece = written[begin : begin + min(sizes[number % len(sizes)], len(room))]
        room[: len(piece)] = piece
        del room
        messages += reader.take(len(piece))
        begin += len(piece)
        number += 1
    return messages


@given(messages=MESSAGES, sizes=st.lists(st.integers(1, 100_000), min_size=1, max_size=5))
def test_messages_come_out_as_they_went_in_however_they_are_cut(messages, sizes):
    sent = [(to_all, [some_bytes(size) for size in frames]) for to_all, frames in messages]
    written = asyncio.run(bytes_of(sent))
    arrived = read(written, [max(sizes), *sizes])
    assert [(to_all, [bytes(frame) for frame in frames]) for to_all, frames in arrived] == sent


@pytest.mark.parametrize("size", [3, 1001, 100_001])
async def test_each_frame_is_aligned_for_any_array(size):
    written = await bytes_of([(False, [bytes(size)] * 5)] * 3)
    for message in read(written, [1 << 20]):
        for frame in message.frames:
            assert frame.readonly
            assert np.frombuffer(frame, np.uint8).ctypes.data % 16 == 0


@given(written=st.binary(min_size=1, max_size=200), size=st.integers(1, 50))
def test_bytes_that_are_no_messages_are_refused_or_wait_for_more(written, size):
    with contextlib.suppress(RemoteProtocolError):
        read(written, [size])


@pytest.mark.parametrize(
    "written",
    [
        struct.pack("<IIQ", 0, 9, 0),
        struct.pack("<IIQ", 0, 1, (2 << 20) + 1),
        struct.pack("<IIQ", 0, 2, 16) + struct.pack("<QQ", 16, 0),
        struct.pack("<IIQ", 0, 2, 0),
    ],
    ids=["too many frames", "too long", "frames longer than the message", "no sizes"],
)
async def test_a_child_that_breaks_the_rules_is_cut_off_and_the_others_are_not(stage, written):
    parent = stage.started(ChildrenEndpoint(LIMITS))
    child = stage.started(InheritedEndpoint(parent.endpoint.connect(), LIMITS))
    with parent.endpoint.connect() as hostile:
        hostile.sendall(written)
        gone = await parent.until_event(EventKind.DISCONNECTED)
        assert "a message" in gone.reason
        assert not hostile.recv(1)
    await stage.exchange(parent, child)


async def test_a_child_that_does_not_read_misses_broadcasts_and_is_cut_off_by_messages(stage):
    parent = stage.started(ChildrenEndpoint(LIMITS))
    child = stage.started(InheritedEndpoint(parent.endpoint.connect(), LIMITS))
    with parent.endpoint.connect() as stopped:
        stopped.sendall(await bytes_of([(False, [b"me"])]))
        await parent.until(lambda: len(parent.messages) == 1)
        peer = parent.messages[0][0]
        for number in range(100):
            parent.endpoint.broadcast([b"%d" % number, bytes(1 << 19)])
            await child.until(lambda number=number: len(child.broadcasts) == number + 1)
        assert parent.endpoint.stats().queued_messages < 10
        assert EventKind.DROPPED not in parent.kinds()
        while parent.endpoint.send(peer, [bytes(1 << 19)]):
            pass
        assert (await parent.until_event(EventKind.DROPPED)).peer == peer
        await parent.until_event(EventKind.DISCONNECTED)
    await stage.exchange(parent, child)
