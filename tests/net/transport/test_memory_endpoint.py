"""The endpoint inside one process keeps the same promises as the one over ZeroMQ, and makes faults on demand."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_endpoint import Direction, MemoryNetwork

from aiorl.errors import EndpointClosed
from aiorl.net.transport.endpoint import EventKind, LearnerEndpoint, WorkerEndpoint


class Log:
    def __init__(self, network, count=1, **keywords):
        self.network = network
        self.tape = []
        self.learner: LearnerEndpoint = network.learner()
        self.workers: list[WorkerEndpoint] = [network.worker(**keywords) for _ in range(count)]
        self.learner.on_message = lambda peer, frames, user_id: self.tape.append(
            ("up", peer, [bytes(frame) for frame in frames], user_id)
        )
        self.learner.on_event = lambda event: self.tape.append(("learner", event.kind))
        for index, worker in enumerate(self.workers):
            worker.on_message = lambda frames, index=index: self.tape.append(
                ("down", index, [bytes(frame) for frame in frames])
            )
            worker.on_broadcast = lambda frames, index=index: self.tape.append(
                ("broadcast", index, [bytes(frame) for frame in frames])
            )
            worker.on_event = lambda event, index=index: self.tape.append(("worker", event.kind))
        self.learner.start()
        for worker in self.workers:
            worker.start()

    def of(self, kind):
        return [entry for entry in self.tape if entry[0] == kind]


async def settle():
    for _ in range(4):
        await asyncio.sleep(0)


def test_messages_go_both_ways_to_the_right_peer_as_read_only_copies():
    async def main():
        log = Log(MemoryNetwork(), count=2, user_id="host1")
        await settle()
        payload = bytearray(b"payload")
        assert log.workers[1].send([b"a", payload])
        payload[:] = b"changed"
        await settle()
        _, peer, frames, user_id = log.of("up")[0]
        assert (frames, user_id) == ([b"a", b"payload"], "host1")
        assert log.learner.send(peer, [b"b"])
        log.learner.broadcast([b"all"])
        await settle()
        assert log.of("down") == [("down", 1, [b"b"])]
        assert log.of("broadcast") == [("broadcast", 0, [b"all"]), ("broadcast", 1, [b"all"])]
        assert not log.learner.send(b"nobody", [b"x"])
        assert log.workers[1].stats().bytes_out == 8

    asyncio.run(main())


def test_a_cut_ends_every_connection_and_mending_gives_a_new_peer():
    async def main():
        network = MemoryNetwork()
        log = Log(network)
        await settle()
        log.workers[0].send([b"before"])
        await settle()
        log.workers[0].send([b"lost"])
        network.cut()
        assert not log.workers[0].send([b"not taken"])
        waiting = asyncio.create_task(log.workers[0].wait_writable())
        await settle()
        assert not waiting.done()
        network.mend()
        await waiting
        log.workers[0].send([b"after"])
        await settle()
        assert [entry[2] for entry in log.of("up")] == [[b"before"], [b"after"]]
        assert log.of("up")[0][1] != log.of("up")[1][1]
        assert [kind for _, kind in log.of("worker")] == [
            EventKind.CONNECTED,
            EventKind.DISCONNECTED,
            EventKind.CONNECTED,
        ]
        assert log.workers[0].stats().reconnects == 1

    asyncio.run(main())


def test_a_full_queue_takes_no_more_until_it_has_emptied():
    async def main():
        log = Log(MemoryNetwork(), queue_messages=2)
        await settle()
        worker = log.workers[0]
        assert [worker.send([b"x"]) for _ in range(3)] == [True, True, False]
        await worker.wait_writable()
        assert worker.send([b"y"])

    asyncio.run(main())


def test_a_dropped_peer_connects_again_and_a_closed_learner_is_told():
    async def main():
        log = Log(MemoryNetwork())
        await settle()
        log.workers[0].send([b"x"])
        await settle()
        log.learner.drop(log.of("up")[0][1], "bad frames")
        await settle()
        assert log.workers[0].connected
        await log.learner.close()
        assert not log.workers[0].connected
        with pytest.raises(EndpointClosed):
            log.learner.broadcast([b"x"])
        await log.workers[0].close()
        with pytest.raises(EndpointClosed):
            await log.workers[0].wait_writable()

    asyncio.run(main())


@settings(max_examples=40, deadline=None)
@given(plan=st.lists(st.integers(min_value=0, max_value=3), min_size=1, max_size=30))
def test_every_message_arrives_as_often_as_the_fault_says(plan):
    async def main():
        network = MemoryNetwork(
            lambda direction, number: [0.0] * plan[number - 1] if direction is Direction.UP else [0.0]
        )
        log = Log(network, queue_messages=100)
        await settle()
        for index in range(len(plan)):
            assert log.workers[0].send([b"%d" % index])
        await settle()
        got = [int(entry[2][0]) for entry in log.of("up")]
        assert got == [index for index, times in enumerate(plan) for _ in range(times)]

    asyncio.run(main())


def test_delays_reorder_messages():
    async def main():
        network = MemoryNetwork(lambda direction, number: [0.01 if number == 1 else 0.0])
        log = Log(network)
        await settle()
        log.workers[0].send([b"slow"])
        log.workers[0].send([b"fast"])
        async with asyncio.timeout(5):
            while len(log.of("up")) < 2:
                await asyncio.sleep(0)
        assert [entry[2] for entry in log.of("up")] == [[b"fast"], [b"slow"]]

    asyncio.run(main())
