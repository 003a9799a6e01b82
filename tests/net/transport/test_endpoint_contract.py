"""What every pair of endpoints does, whatever lies between them: in memory, over TCP, over this
user's Unix sockets, and over a socket that a child inherits.
"""

from __future__ import annotations

import asyncio

import pytest
from memory_endpoint import MemoryNetwork

from aiorl.errors import EndpointClosed
from aiorl.net.transport.endpoint import (
    EndpointLimits,
    EndpointTimes,
    EventKind,
    LearnerEndpoint,
    WorkerEndpoint,
)
from aiorl.net.transport.inherited import ChildrenEndpoint, InheritedEndpoint
from aiorl.net.transport.zmq_learner import ZmqLearnerEndpoint
from aiorl.net.transport.zmq_worker import ZmqWorkerEndpoint

QUEUE_MESSAGES = 3
LIMITS = EndpointLimits(
    send_messages=2,
    queue_messages=QUEUE_MESSAGES,
    times=EndpointTimes(handshake_s=0.5, retry_s=0.1, max_retry_s=0.2, tick_s=0.1),
)
LARGE = 1_000_000
"""Bytes of a frame of which few fit into the buffers between two processes."""


class MemoryMaker:
    """Makes endpoints in memory."""

    def __init__(self) -> None:
        self._network = MemoryNetwork()

    def learner(self) -> LearnerEndpoint:
        return self._network.learner()

    def worker(self, learner: LearnerEndpoint) -> WorkerEndpoint:
        return self._network.worker(queue_messages=QUEUE_MESSAGES)


class ZmqMaker:
    """Makes endpoints over ZeroMQ.

    Args:
        insecure: True for TCP, False for Unix sockets.
    """

    def __init__(self, insecure: bool) -> None:
        self._insecure = insecure
        self._bind = "tcp://127.0.0.1:0"

    def learner(self) -> LearnerEndpoint:
        """Make a learner, at the address that workers have found the earlier one at."""
        return ZmqLearnerEndpoint(self._bind, insecure=self._insecure, limits=LIMITS)

    def worker(self, learner: LearnerEndpoint) -> WorkerEndpoint:
        self._bind = learner.address
        return ZmqWorkerEndpoint(learner.address, limits=LIMITS)


class InheritedMaker:
    """Makes endpoints of a parent and its children."""

    def learner(self) -> LearnerEndpoint:
        return ChildrenEndpoint(LIMITS)

    def worker(self, learner: LearnerEndpoint) -> WorkerEndpoint:
        assert isinstance(learner, ChildrenEndpoint)
        return InheritedEndpoint(learner.connect()[1], LIMITS)


MAKERS = {
    "memory": MemoryMaker,
    "tcp": lambda: ZmqMaker(insecure=True),
    "unix": lambda: ZmqMaker(insecure=False),
    "inherited": InheritedMaker,
}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]()


connects_again = pytest.mark.parametrize("make", ["memory", "tcp", "unix"], indirect=True)
"""For tests of workers that connect again, which a child never does."""


async def joined(stage, make, learner):
    """Return a worker that is connected to the learner."""
    worker = stage.started(make.worker(learner.endpoint))
    await worker.until_event(EventKind.CONNECTED)
    return worker


async def pair(stage, make):
    """Return a learner and a worker that is connected to it."""
    learner = stage.started(make.learner())
    return learner, await joined(stage, make, learner)


def numbers(messages):
    """Return the numbers in the first frames of messages."""
    return [int(frames[0]) for frames in messages]


async def test_messages_arrive_whole_and_in_order_in_both_directions(stage, make):
    learner, worker = await pair(stage, make)
    await stage.exchange(learner, worker)  # from a stranger, little may be unread
    learner.messages.clear()
    worker.messages.clear()
    payload = [b"", bytearray(b"x" * 100), memoryview(b"y" * 70_000)]
    for number in range(200):
        await worker.send([b"%d" % number, *payload])
    await learner.until(lambda: len(learner.messages) == 200)
    peer, frames, user_id = learner.messages[0]
    assert frames[1:] == [bytes(frame) for frame in payload]
    assert user_id == ""
    assert {sender for sender, _, _ in learner.messages} == {peer}
    assert numbers(frames for _, frames, _ in learner.messages) == list(range(200))
    for number in range(200):
        assert learner.endpoint.send(peer, [b"%d" % number, *payload])
    await worker.until(lambda: len(worker.messages) == 200)
    assert worker.messages[0][1:] == [bytes(frame) for frame in payload]
    assert numbers(worker.messages) == list(range(200))


async def test_frames_can_be_kept_after_the_callback(stage, make):
    learner, worker = await pair(stage, make)
    kept = []
    learner.endpoint.on_message = lambda peer, frames, user_id: kept.extend(frames)
    await worker.send([b"small", b"l" * 100_000])
    await stage.eventually(lambda: kept)
    for side in (worker, learner):
        await side.endpoint.close()
    assert [bytes(frame) for frame in kept] == [b"small", b"l" * 100_000]


async def test_a_broadcast_reaches_every_worker_from_which_a_message_was_read(stage, make):
    learner = stage.started(make.learner())
    workers = [await joined(stage, make, learner) for _ in range(3)]
    for worker in workers:
        await worker.send([b"hello"])
    await learner.until(lambda: len(learner.messages) == len(workers))
    for number in range(10):
        learner.endpoint.broadcast([b"%d" % number, b"news"])
    for worker in workers:
        await worker.until(lambda worker=worker: len(worker.broadcasts) == 10)
        assert numbers(worker.broadcasts) == list(range(10))
        assert not worker.messages


async def test_the_end_of_a_worker_is_reported_after_all_its_messages(stage, make):
    learner, worker = await pair(stage, make)
    await stage.exchange(learner, worker)  # from a stranger, little may be unread
    learner.messages.clear()
    for number in range(50):
        await worker.send([b"%d" % number, bytes(20_000)])
    await worker.endpoint.close()
    gone = await learner.until_event(EventKind.DISCONNECTED)
    assert gone.reason
    assert numbers(frames for _, frames, _ in learner.messages) == list(range(50))
    assert learner.tape[-1] == ("event", gone)
    peer = learner.messages[0][0]
    assert gone.peer == peer
    assert not learner.endpoint.send(peer, [b"nobody is there"])
    assert not learner.endpoint.has_unsent(peer)


async def test_the_end_of_the_learner_is_reported_after_its_goodbyes(stage, make):
    learner, worker = await pair(stage, make)
    peer, _ = await stage.exchange(learner, worker)
    worker.tape.clear()
    learner.endpoint.send(peer, [b"bye"])
    learner.endpoint.broadcast([b"bye all"])
    await learner.endpoint.close()
    gone = await worker.until_event(EventKind.DISCONNECTED)
    assert gone.reason
    assert (worker.messages[-1], worker.broadcasts[-1]) == ([b"bye"], [b"bye all"])
    assert len(worker.tape) == 3
    assert worker.tape[-1] == ("event", gone)
    assert not worker.endpoint.connected
    assert not worker.endpoint.send([b"nobody is there"])


@connects_again
async def test_a_worker_comes_back_to_the_next_learner_as_a_new_peer(stage, make):
    learner, worker = await pair(stage, make)
    former, _ = await stage.exchange(learner, worker)
    await learner.endpoint.close()
    await worker.until_event(EventKind.DISCONNECTED)
    successor = stage.started(make.learner())
    await worker.until_event(EventKind.CONNECTED, count=2)
    assert worker.endpoint.connected
    peer, _ = await stage.exchange(successor, worker)
    assert peer != former


@connects_again
async def test_a_dropped_peer_is_cut_off_and_its_worker_comes_back_as_a_new_one(stage, make):
    learner, worker = await pair(stage, make)
    other = await joined(stage, make, learner)
    peer, _ = await stage.exchange(learner, worker)
    learner.endpoint.drop(peer, "it broke the protocol")
    dropped = await learner.until_event(EventKind.DROPPED)
    assert (dropped.peer, dropped.reason) == (peer, "it broke the protocol")
    assert not learner.endpoint.send(peer, [b"nobody is there"])
    assert (await learner.until_event(EventKind.DISCONNECTED)).peer == peer
    await worker.until_event(EventKind.DISCONNECTED)
    await worker.until_event(EventKind.CONNECTED, count=2)
    successor, _ = await stage.exchange(learner, worker)
    assert successor != peer
    learner.endpoint.drop(peer, "again")
    await stage.exchange(learner, other)
    assert learner.kinds().count(EventKind.DROPPED) == 1
    assert learner.endpoint.stats().dropped == 1


async def test_a_message_to_an_unknown_peer_is_not_accepted(stage, make):
    learner, worker = await pair(stage, make)
    assert not learner.endpoint.send(b"nobody", [b"hello"])
    assert not learner.endpoint.has_unsent(b"nobody")
    learner.endpoint.drop(b"nobody", "it is not there")
    await stage.exchange(learner, worker)
    assert EventKind.DROPPED not in learner.kinds()


async def test_sending_is_refused_while_too_much_waits_and_nothing_accepted_is_lost(stage, make):
    learner, worker = await pair(stage, make)
    await stage.exchange(learner, worker)  # from a stranger, little may be unread
    num_accepted = 0
    while worker.endpoint.send([b"%d" % num_accepted, bytes(LARGE)]):
        num_accepted += 1
        assert num_accepted < 1000, "sending was never refused"
    assert num_accepted >= QUEUE_MESSAGES
    await worker.endpoint.wait_writable()
    assert worker.endpoint.send([b"%d" % num_accepted])
    await stage.eventually(lambda: len(learner.messages) > num_accepted + 1)
    arrived = numbers(frames for _, frames, _ in learner.messages[1:])
    assert arrived == list(range(num_accepted + 1))


@connects_again
async def test_a_worker_that_starts_before_its_learner_sends_nothing_until_it_is_connected(
    stage, make
):
    learner = make.learner()
    learner.start()  # for its address
    worker = make.worker(learner)
    await learner.close()
    waiting_worker = stage.started(worker)
    assert not worker.connected
    assert not worker.send([b"nobody is there"])
    waiting = asyncio.create_task(worker.wait_writable())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    successor = stage.started(make.learner())
    await waiting_worker.until_event(EventKind.CONNECTED)
    await waiting
    assert worker.connected
    await stage.exchange(successor, waiting_worker)


async def test_closing_twice_is_harmless_and_nothing_can_be_sent_before_or_after(stage, make):
    learner = make.learner()
    with pytest.raises(EndpointClosed):
        learner.send(b"peer", [b"x"])
    with pytest.raises(EndpointClosed):
        learner.broadcast([b"x"])
    started_learner = stage.started(learner)
    worker = make.worker(learner)
    with pytest.raises(EndpointClosed):
        worker.send([b"x"])
    started_worker = stage.started(worker)
    await started_worker.until_event(EventKind.CONNECTED)
    peer, _ = await stage.exchange(started_learner, started_worker)
    for endpoint in (worker, learner, worker, learner):
        await endpoint.close()
    assert not worker.connected
    with pytest.raises(EndpointClosed):
        worker.send([b"x"])
    with pytest.raises(EndpointClosed):
        await worker.wait_writable()
    with pytest.raises(EndpointClosed):
        learner.send(peer, [b"x"])
    with pytest.raises(EndpointClosed):
        learner.broadcast([b"x"])
    learner.drop(peer, "it is closed")
    assert EventKind.DROPPED not in started_learner.kinds()


async def test_an_endpoint_that_was_never_started_can_be_closed(stage, make):
    learner = make.learner()
    await learner.close()
    await learner.close()


async def test_waiting_to_write_ends_with_an_error_when_the_endpoint_is_closed(stage, make):
    learner, worker = await pair(stage, make)
    await learner.endpoint.close()
    await worker.until_event(EventKind.DISCONNECTED)
    waiting = asyncio.create_task(worker.endpoint.wait_writable())
    await asyncio.sleep(0)  # until it waits
    await worker.endpoint.close()
    with pytest.raises(EndpointClosed):
        await waiting


async def test_the_bytes_of_messages_are_counted(stage, make):
    learner, worker = await pair(stage, make)
    peer, _ = await stage.exchange(learner, worker)
    before = learner.endpoint.stats()
    await worker.send([b"x" * 10, b"y" * 20])
    await learner.until(lambda: len(learner.messages) == 2)
    learner.endpoint.send(peer, [b"z" * 5])
    learner.endpoint.broadcast([b"z" * 7])
    after = learner.endpoint.stats()
    assert after.bytes_in - before.bytes_in == 30
    assert after.bytes_out - before.bytes_out == 12
    assert after.queued_messages == 0
