"""Messages between a parent and its children: how they are cut into frames again, and what a child
that reads nothing, or writes nonsense, gets.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, strategies as st

from aiorl.errors import RemoteProtocolError
from aiorl.net.transport.endpoint import EndpointLimits, EventKind
from aiorl.net.transport.inherited import ChildrenEndpoint, InheritedEndpoint
from aiorl.net.transport.message_stream import MessageReader, MessageStream

LIMITS = EndpointLimits(
    max_frames=8, max_message_bytes=2 << 20, queue_bytes=1 << 22, max_queued_bytes=1 << 24
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
        reader.add(len(piece))
        while (message := reader.next_message()) is not None:
            messages.append(message)
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
        struct.pack("<IIQ", 0, 1, (2 << 20) + 1000),
        struct.pack("<IIQ", 0, 2, 16) + struct.pack("<QQ", 16, 0),
        struct.pack("<IIQ", 0, 2, 0),
    ],
    ids=["too many frames", "too long", "frames longer than the message", "no sizes"],
)
async def test_a_child_that_breaks_the_rules_is_cut_off_and_the_others_are_not(stage, written):
    parent = stage.started(ChildrenEndpoint(LIMITS))
    child = stage.started(InheritedEndpoint(parent.endpoint.connect()[1], LIMITS))
    with parent.endpoint.connect()[1] as hostile:
        hostile.sendall(written)
        gone = await parent.until_event(EventKind.DISCONNECTED)
        assert "a message" in gone.reason
        assert not hostile.recv(1)
    await stage.exchange(parent, child)


async def test_a_child_that_does_not_read_misses_broadcasts_and_is_cut_off_by_messages(stage):
    parent = stage.started(ChildrenEndpoint(LIMITS))
    child = stage.started(InheritedEndpoint(parent.endpoint.connect()[1], LIMITS))
    peer, connection = parent.endpoint.connect()
    with connection:
        for number in range(100):
            parent.endpoint.broadcast([b"%d" % number, bytes(1 << 19)])
            await child.until(lambda number=number: len(child.broadcasts) == number + 1)
        assert parent.endpoint.stats().queued_messages < 10
        num_sent = 0
        while parent.endpoint.send(peer, [bytes(1 << 19)]):
            num_sent += 1
        assert num_sent << 19 > 2 * LIMITS.queue_bytes
        assert (await parent.until_event(EventKind.DROPPED)).peer == peer
        await parent.until_event(EventKind.DISCONNECTED)
    await stage.exchange(parent, child)


async def test_messages_that_wait_do_not_make_a_child_miss_a_broadcast(stage):
    parent = stage.started(ChildrenEndpoint(LIMITS))
    peer, connection = parent.endpoint.connect()
    for _ in range(40):
        assert parent.endpoint.send(peer, [bytes(80_000)])
    assert parent.endpoint.has_unsent(peer)
    parent.endpoint.broadcast([b"news"])
    child = stage.started(InheritedEndpoint(connection, LIMITS))
    await child.until(lambda: child.broadcasts == [[b"news"]])


async def test_the_last_messages_of_a_process_arrive_although_its_fork_keeps_the_socket(stage):
    parent = stage.started(ChildrenEndpoint(LIMITS))
    peer, connection = parent.endpoint.connect()
    with connection:  # as a fork of the process would
        connection.sendall(await bytes_of([(False, [b"last"])]))
        parent.endpoint.forget(peer)
        assert [frames for _, frames, _ in parent.messages] == [[b"last"]]
        assert peer not in parent.endpoint
        assert not connection.recv(1)


async def test_the_end_of_a_process_that_its_owner_knows_is_not_reported_again(stage):
    parent = stage.started(ChildrenEndpoint(LIMITS))
    peer, connection = parent.endpoint.connect()
    connection.sendall(await bytes_of([(False, [b"last"])]))
    connection.close()
    parent.endpoint.forget(peer)
    assert [frames for _, frames, _ in parent.messages] == [[b"last"]]
    await asyncio.sleep(0)
    assert parent.kinds() == [EventKind.CONNECTED]


async def test_messages_before_a_bad_one_are_delivered(stage):
    parent = stage.started(ChildrenEndpoint(LIMITS))
    _, connection = parent.endpoint.connect()
    with connection:
        good = await bytes_of([(False, [b"%d" % number]) for number in range(3)])
        connection.sendall(good + struct.pack("<IIQ", 0, 9, 0))
        await parent.until_event(EventKind.DISCONNECTED)
        assert [int(frames[0]) for _, frames, _ in parent.messages] == [0, 1, 2]


async def test_an_error_of_a_callback_concerns_one_message():
    errors = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: errors.append(context["exception"]))
    arrived = []
    have_arrived = asyncio.Event()

    def receive(message):
        arrived.append(int(message.frames[0]))
        if len(arrived) == 6:
            have_arrived.set()
        if arrived[-1] % 2:
            raise ValueError(arrived[-1])

    ours, theirs = socket.socketpair()
    with theirs:
        stream = MessageStream(ours, LIMITS, on_message=receive, on_end=print)
        theirs.sendall(await bytes_of([(False, [b"%d" % number]) for number in range(6)]))
        await asyncio.wait_for(have_arrived.wait(), 10)
        stream.close()
    assert arrived == list(range(6))
    assert [type(error) for error in errors] == [ValueError] * 3


class WithoutBuffers:
    """Socket of a system that has no memory for the second thing that is sent."""

    def __init__(self, connection):
        self._connection = connection
        self._num_sent = 0

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def sendmsg(self, *args):
        self._num_sent += 1
        if self._num_sent == 2:
            raise OSError(errno.ENOBUFS, "no buffer space available")
        return self._connection.sendmsg(*args)


async def test_nothing_follows_a_message_that_was_cut_by_an_error():
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with theirs:
        connection = WithoutBuffers(ours)
        stream = MessageStream(connection, EndpointLimits(), on_message=print, on_end=print)
        stream.send([bytes(1 << 25)])  # the socket takes a part of it
        written = bytearray()
        while piece := await asyncio.get_running_loop().sock_recv(theirs, 1 << 20):
            written += piece
            stream.send([b"more"])
        stream.close()
    assert 0 < len(written) < 1 << 25
    assert written.count(b"more") == 0


def test_the_end_of_a_child_is_no_signal_for_a_program_that_dies_of_them():
    program = """
import asyncio, signal
from aiorl.net.transport.endpoint import EndpointLimits
from aiorl.net.transport.inherited import ChildrenEndpoint
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
async def main():
    endpoint = ChildrenEndpoint(EndpointLimits())
    endpoint.start()
    peer, connection = endpoint.connect()
    connection.close()
    endpoint.send(peer, [b"to no one"])
    await endpoint.close()
asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", program], check=True)


async def test_peers_of_other_endpoints_can_not_guess_the_name_of_a_child(stage):
    peers = set()
    for _ in range(3):
        parent = stage.started(ChildrenEndpoint(LIMITS))
        peer, connection = parent.endpoint.connect()
        connection.close()
        peers.add(peer)
    assert len(peers) == 3
    assert {len(peer) for peer in peers} == {16}
