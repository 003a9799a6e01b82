"""Both endpoints over loopback TCP: delivery, order, backpressure, reconnection, closing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import socket
import threading
import time

import pytest
import zmq
from processes import free_address
from zmtp import RawPeer, frame

from aiorl.config.worker import TransportConfig
from aiorl.errors import ConfigError, EndpointClosed
from aiorl.net.transport import learner_sockets, zmq_worker
from aiorl.net.transport.endpoint import EndpointLimits, EndpointTimes, EventKind

FAST = EndpointLimits(
    times=EndpointTimes(tick_s=0.1, retry_s=0.1, max_retry_s=0.2, handshake_s=0.5)
)

on_either_loop = pytest.mark.parametrize("stage", ["uvloop", "asyncio"], indirect=True)


def test_an_endpoint_without_a_configuration_is_bounded_as_one_with_the_default_configuration():
    assert EndpointLimits() == EndpointLimits.of(TransportConfig())


@on_either_loop
async def test_messages_go_both_ways_and_keep_their_frames(stage):
    learner, worker = await stage.pair()
    frames = [b"header", b"", b"x" * 100, bytes(200_000), memoryview(b"y" * 70_000)]
    assert worker.endpoint.send(frames)
    await learner.until(lambda: learner.messages)
    peer, got, user_id = learner.messages[0]
    assert got == [bytes(frame) for frame in frames]
    assert user_id == ""
    assert learner.endpoint.send(peer, [b"reply", bytes(100_000)])
    await worker.until(lambda: worker.messages)
    assert worker.messages == [[b"reply", bytes(100_000)]]


async def test_large_frames_are_not_copied_on_receipt_and_small_ones_are(stage):
    learner, worker = await stage.pair()
    kept = []
    learner.endpoint.on_message = lambda peer, frames, user_id: kept.extend(frames)
    worker.endpoint.send([b"s" * 1000, b"l" * 100_000])
    await stage.eventually(lambda: kept)
    small, large = kept
    assert isinstance(small.obj, bytes)
    assert not isinstance(large.obj, bytes)
    await worker.endpoint.close()
    await learner.endpoint.close()
    gc.collect()
    assert bytes(large) == b"l" * 100_000, "frames stay valid after the sockets are closed"


@on_either_loop
async def test_ten_thousand_messages_arrive_in_order_in_both_directions(stage):
    count = 10_000
    learner, worker = await stage.pair()
    seen_up, seen_down = [], []

    def on_up(peer, frames, user_id):
        seen_up.append(int.from_bytes(frames[0], "little"))
        while not learner.endpoint.send(peer, [frames[0]]):
            raise AssertionError("the peer is gone")

    learner.endpoint.on_message = on_up
    worker.endpoint.on_message = lambda frames: seen_down.append(
        int.from_bytes(frames[0], "little")
    )
    for index in range(count):
        await worker.send([index.to_bytes(4, "little"), b"payload"])
    await stage.eventually(lambda: len(seen_down) == count, 15)
    assert seen_up == list(range(count))
    assert seen_down == list(range(count))


@on_either_loop
async def test_a_flood_of_messages_lets_other_tasks_run(stage):
    learner, worker = await stage.pair()
    most_at_once = 0
    received = 0

    def on_message(peer, frames, user_id):
        nonlocal received
        received += 1
        time.sleep(0.0005)

    learner.endpoint.on_message = on_message

    async def watch():
        nonlocal most_at_once
        while received < 400:
            before = received
            await asyncio.sleep(0)
            most_at_once = max(most_at_once, received - before)

    watcher = asyncio.create_task(watch())
    for _ in range(400):
        await worker.send([b"m"])
    async with asyncio.timeout(10):
        await watcher
    # a tick reads as much as a turn, and both may come at once
    assert most_at_once <= 2 * EndpointLimits().messages_per_turn


@on_either_loop
async def test_broadcasts_reach_every_worker_from_its_hello_on_and_in_order(stage):
    learner = stage.learner()
    workers = [stage.worker(learner.endpoint.address) for _ in range(4)]
    for worker in workers:
        await worker.until_event(EventKind.CONNECTED)
    for index in range(200):
        learner.endpoint.broadcast([b"%d" % index, bytes(1000)])
        if index % 10 == 9:
            await asyncio.sleep(0.002)
    await asyncio.sleep(0.2)  # subscribers that were too slow for some get the next one
    learner.endpoint.broadcast([b"200", b""])
    for worker in workers:
        await worker.until(
            lambda worker=worker: worker.broadcasts and worker.broadcasts[-1][0] == b"200"
        )
        numbers = [int(frames[0]) for frames in worker.broadcasts]
        assert numbers == sorted(numbers)


async def test_a_broadcast_made_right_after_the_hello_is_never_missed(stage):
    """The subscription is in force before CONNECTED: no slow joiner (LESSONS 2.2)."""
    learner = stage.learner()
    learner.endpoint.on_message = lambda peer, frames, user_id: learner.endpoint.broadcast(
        [b"news", frames[0]]
    )
    for index in range(30):
        worker = stage.worker(learner.endpoint.address)
        worker.endpoint.on_event = lambda event, worker=worker, index=index: (
            worker.endpoint.send([b"hello %d" % index])
            if event.kind is EventKind.CONNECTED
            else None
        )
        await worker.until(lambda worker=worker: worker.broadcasts, timeout_s=3)
        assert worker.broadcasts[0] == [b"news", b"hello %d" % index]
        await worker.endpoint.close()


async def test_a_slow_subscriber_misses_broadcasts_and_hears_later_ones(stage):
    learner, worker = await stage.pair(limits=EndpointLimits(broadcast_messages=2))
    worker.pump(zmq.SUB).pause()
    for index in range(60):
        learner.endpoint.broadcast([b"%d" % index, bytes(2_000_000)])
        await asyncio.sleep(0)
    await asyncio.sleep(0.1)
    worker.pump(zmq.SUB).resume()
    await asyncio.sleep(0.3)
    learner.endpoint.broadcast([b"last"])
    await worker.until(lambda: worker.broadcasts and worker.broadcasts[-1] == [b"last"])
    assert len(worker.broadcasts) < 61


async def test_where_bytes_cannot_be_counted_a_worker_is_held_back_and_loses_nothing(
    stage, monkeypatch
):
    monkeypatch.setattr(learner_sockets, "CAN_TELL_BYTES", False)
    limits = EndpointLimits(receive_messages=2, send_messages=2, queue_messages=3)
    learner = stage.learner(limits=limits)
    worker = await stage.joined(learner.endpoint.address, limits=limits)
    learner.pump(zmq.ROUTER).pause()
    taken = refused = 0
    # ZeroMQ's own thread may still be filling the kernel's buffers
    while taken < 1000 and refused < 20:
        if worker.endpoint.send([taken.to_bytes(4, "little"), bytes(1_000_000)]):
            taken += 1
            refused = 0
        else:
            refused += 1
        await asyncio.sleep(0.01 if refused else 0.001)
    assert 5 <= taken < 200, "sending was not held back"
    waiting = asyncio.create_task(worker.endpoint.wait_writable())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    learner.pump(zmq.ROUTER).resume()
    async with asyncio.timeout(5):
        await waiting
    await learner.until(lambda: len(learner.messages) == taken)
    assert [int.from_bytes(frames[0], "little") for _, frames, _ in learner.messages] == list(
        range(taken)
    )


async def test_a_worker_that_does_not_read_is_cut_off_once_its_queue_is_full_and_others_continue(
    stage,
):
    limits = EndpointLimits(receive_messages=2, send_messages=2, peer_queue_messages=4)
    learner = stage.learner(limits=limits)
    deaf = await stage.joined(learner.endpoint.address, limits=limits)
    other = await stage.joined(learner.endpoint.address)
    peer, _ = await stage.exchange(learner, deaf)
    deaf.pump(zmq.DEALER).pause()
    for _ in range(1000):
        if not learner.endpoint.send(peer, [bytes(1_000_000)]):
            break
        await asyncio.sleep(0.001)
    dropped = await learner.until_event(EventKind.DROPPED)
    assert dropped.peer == peer
    assert (await learner.until_event(EventKind.DISCONNECTED)).peer == peer
    assert not learner.endpoint.send(peer, [b"x"])
    assert learner.endpoint.stats().queued_messages == 0
    await stage.exchange(learner, other)


async def test_a_large_message_counts_as_unsent_until_it_has_left_or_its_receiver_is_gone(stage):
    learner, worker = await stage.pair()
    peer, _ = await stage.exchange(learner, worker)
    assert not learner.endpoint.has_unsent(peer)
    learner.endpoint.send(peer, [bytes(4_000_000)])
    await worker.until(lambda: len(worker.messages) == 2)
    await stage.eventually(lambda: not learner.endpoint.has_unsent(peer))
    worker.pump(zmq.DEALER).pause()
    sent = 0
    while not learner.endpoint.has_unsent(peer) or sent < 32:  # more than kernel and ZeroMQ buffer
        learner.endpoint.send(peer, [bytes(4_000_000)])
        sent += 1
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    assert learner.endpoint.has_unsent(peer)
    await worker.endpoint.close()
    await learner.until_event(EventKind.DISCONNECTED)
    assert not learner.endpoint.has_unsent(peer)


async def test_of_many_that_do_not_read_those_with_the_most_waiting_are_cut_off_and_others_stay(
    stage,
):
    few = EndpointLimits(receive_messages=2, send_messages=2, max_queued_bytes=20_000_000)
    learner = stage.learner(limits=few)
    peers = []
    for _ in range(3):
        worker = await stage.joined(learner.endpoint.address, limits=few)
        peers.append((await stage.exchange(learner, worker))[0])
        worker.pump(zmq.DEALER).pause()
    large, larger, reads_little = peers
    for number in range(300):
        learner.endpoint.send(larger, [bytes(1_000_000)])
        if number % 2:
            learner.endpoint.send(large, [bytes(1_000_000)])
        if number % 50 == 0:
            learner.endpoint.send(reads_little, [bytes(1000)])
        num_small = number // 50 + 1
        assert learner.endpoint.stats().queued_messages <= 20 + num_small
        if any(event.kind is EventKind.DROPPED for event in learner.events):
            break
        await asyncio.sleep(0.002)
    dropped = await learner.until_event(EventKind.DROPPED)
    assert dropped.peer == larger
    assert learner.endpoint.send(reads_little, [b"still here"])


async def test_all_messages_of_a_worker_are_delivered_before_its_end_is_reported(stage):
    learner, worker = await stage.pair()
    for index in range(100):
        await worker.send([b"%d" % index, bytes(20_000)])
    await worker.endpoint.close()
    await learner.until_event(EventKind.DISCONNECTED)
    kinds = [
        kind
        for kind, what in learner.tape
        if kind == "message" or what.kind is EventKind.DISCONNECTED
    ]
    assert kinds == ["message"] * 100 + ["event"]


async def test_a_goodbye_sent_just_before_the_learner_closes_arrives_before_the_end_is_reported(
    stage,
):
    learner, worker = await stage.pair()
    peer, _ = await stage.exchange(learner, worker)
    worker.tape.clear()
    learner.endpoint.send(peer, [b"bye"])
    learner.endpoint.broadcast([b"bye all"])
    await learner.endpoint.close()
    await worker.until_event(EventKind.DISCONNECTED)
    *last_words, end = [kind for kind, _ in worker.tape]
    assert (sorted(last_words), end) == (["broadcast", "message"], "event")


@on_either_loop
async def test_a_worker_finds_the_learner_again_after_its_restart_under_a_new_routing_id(stage):
    learner, worker = await stage.pair(limits=FAST)
    before = await stage.exchange(learner, worker)
    await learner.endpoint.close()
    await worker.until_event(EventKind.DISCONNECTED)
    assert not worker.endpoint.connected
    assert not worker.endpoint.send([b"nobody hears this"])
    again = stage.learner(learner.endpoint.address)
    await worker.until_event(EventKind.CONNECTED, count=2)
    assert await stage.exchange(again, worker) != before


async def test_a_worker_that_starts_first_says_what_it_waits_for_and_joins_when_the_learner_comes(
    stage,
):
    worker = stage.worker(address := free_address(), limits=FAST)
    reason = (await worker.until_event(EventKind.WAITING)).reason
    assert f":{worker.port}" in reason or f":{worker.port + 1}" in reason
    stage.learner(address)
    await worker.until_event(EventKind.CONNECTED)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "no..host", "x" * 64 + ".invalid"])
async def test_a_worker_whose_host_name_cannot_be_found_says_so(stage, host, monkeypatch):
    monkeypatch.setattr(zmq_worker, "_PATIENCE_S", 0.0)
    worker = stage.worker(f"tcp://{host}:5557", limits=FAST)
    waiting = await worker.until_event(EventKind.WAITING)
    assert repr(host) in waiting.reason


@pytest.mark.parametrize("step", range(6))
async def test_a_worker_out_of_descriptors_lets_go_of_what_it_has_and_tries_again(
    stage, monkeypatch, step
):
    num_left = step

    def failing(real):
        def call(*arguments, **keywords):
            nonlocal num_left
            num_left -= 1
            if num_left == -1:
                raise zmq.ZMQError(errno.EMFILE)
            return real(*arguments, **keywords)

        return call

    for name in ("make_socket", "SocketMonitor", "SocketPump"):
        monkeypatch.setattr(zmq_worker, name, failing(getattr(zmq_worker, name)))
    learner = stage.learner()
    worker = stage.worker(
        learner.endpoint.address, limits=EndpointLimits(times=EndpointTimes(retry_s=0.01))
    )
    assert os.strerror(errno.EMFILE) in (await worker.until_event(EventKind.WAITING)).reason
    await worker.until_event(EventKind.CONNECTED)
    assert (stage.num_open(zmq.DEALER), stage.num_open(zmq.SUB)) == (1, 1)
    await stage.exchange(learner, worker)


async def test_a_port_that_speaks_no_zeromq_is_refused(stage):
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as accepted:
        listener.setblocking(False)
        worker = stage.worker("tcp://{}:{}".format(*listener.getsockname()), limits=FAST)
        for count in (1, 2):
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            accepted.enter_context(connection)
            connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
            await worker.until_event(EventKind.REFUSED, count)


async def test_an_address_of_another_machine_is_a_config_error(stage):
    with pytest.raises(ConfigError, match="--bind"):
        stage.learner("tcp://192.0.2.1:5557", insecure=True)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
async def test_ipv6_loopback_works(stage):
    learner, worker = await stage.pair(bind="tcp://[::1]:0")
    await stage.exchange(learner, worker)
    assert learner.endpoint.address.startswith("tcp://[::1]:")


@on_either_loop
async def test_close_is_quick_frees_every_descriptor_and_thread_and_may_be_called_twice(
    stage, caplog
):
    await stage.pair()
    for side in stage.sides:
        await side.endpoint.close()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        learner, worker = await stage.pair()
        for side in (worker, learner, worker, learner):
            await side.endpoint.close()
        assert not caplog.records, "it did not wait for ZeroMQ in vain"
        with pytest.raises(EndpointClosed):
            worker.endpoint.send([b"x"])
        with pytest.raises(EndpointClosed):
            learner.endpoint.broadcast([b"x"])
    await asyncio.sleep(0.05)
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert threading.active_count() <= threads


async def test_close_is_bounded_even_when_the_other_side_has_stopped_reading(stage):
    learner, worker = await stage.pair()
    learner.pump(zmq.ROUTER).pause()
    await stage.eventually(lambda: not worker.endpoint.send([bytes(1_000_000)]))
    async with asyncio.timeout(10):
        await worker.endpoint.close(flush_s=0.3)


async def test_waiting_to_write_ends_with_an_error_when_the_endpoint_is_closed(stage):
    learner = stage.learner()
    address = learner.endpoint.address
    await learner.endpoint.close()
    worker = stage.worker(address)
    waiting = asyncio.create_task(worker.endpoint.wait_writable())
    await asyncio.sleep(0)  # until it waits
    await worker.endpoint.close()
    with pytest.raises(EndpointClosed):
        await waiting


@on_either_loop
async def test_a_callback_that_raises_does_not_stop_the_messages_behind_it(stage):
    loop = asyncio.get_running_loop()
    failures = []
    loop.set_exception_handler(lambda loop, context: failures.append(context["exception"]))
    learner, worker = await stage.pair()
    seen = []

    def on_message(peer, frames, user_id):
        seen.append(bytes(frames[0]))
        if seen[-1] == b"0":
            raise RuntimeError("a bug in the caller")

    learner.endpoint.on_message = on_message
    for index in range(5):
        worker.endpoint.send([b"%d" % index])
    await stage.eventually(lambda: len(seen) == 5)
    assert [str(failure) for failure in failures] == ["a bug in the caller"]


# --- bad input on loopback without keys (the 'Bad input')


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff" + b"y" * 100,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        os.urandom(4096),
        b"\x01\x00" + b"\x05hello" * 10,
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL"
        + bytes(16)
        + b"\x00"
        + bytes(31)
        + b"\xff" * 300,
    ],
    ids=["nothing", "http", "greeting", "tls", "random", "zmtp1", "bad-handshake"],
)
async def test_junk_on_either_port_is_refused_with_a_reason_and_nothing_else_is_disturbed(
    stage, junk
):
    learner, worker = await stage.pair(limits=FAST)
    before = len(learner.kinds())
    for count, port in enumerate((learner.port, learner.port + 1), start=1):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        source = "{}:{}".format(*writer.get_extra_info("sockname"))
        writer.write(junk)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        refused = await learner.until_event(EventKind.REFUSED, count)
        assert refused.address in (source, ""), (
            "libzmq may have closed it before we could ask who it was"
        )
        assert refused.reason
    assert learner.endpoint.stats().refused == 2
    assert not learner.messages
    assert len(learner.kinds()) == before + 4
    await stage.exchange(learner, worker)


async def test_an_oversized_frame_ends_that_connection_only(stage):
    learner, worker = await stage.pair(limits=EndpointLimits(max_frame_bytes=100_000))
    with await asyncio.to_thread(RawPeer, learner.port) as peer:
        peer.send(b"hello")
        await learner.until(lambda: learner.messages)
        peer.send(bytes(100_001))
        gone = await learner.until_event(EventKind.DISCONNECTED)
        assert gone.peer == learner.messages[0][0]
        assert len(learner.messages) == 1
    await stage.exchange(learner, worker)


@pytest.mark.parametrize(
    ("limits", "frames"),
    [
        (EndpointLimits(max_frames=10), [b"x"] * 5000),
        (EndpointLimits(max_message_bytes=100_000), [bytes(50_000)] * 3),
    ],
    ids=["too many frames", "too many bytes"],
)
async def test_a_message_beyond_the_limits_is_thrown_away_and_its_sender_cut_off(
    stage, limits, frames
):
    learner, worker = await stage.pair(limits=limits)
    with await asyncio.to_thread(RawPeer, learner.port) as peer:
        peer.send(*frames)
        dropped = await learner.until_event(EventKind.DROPPED)
        gone = await learner.until_event(EventKind.DISCONNECTED)
        assert gone.peer == dropped.peer
        stats = learner.endpoint.stats()
        assert (stats.rejected, stats.dropped) == (1, 1)
        assert not learner.messages
        await stage.exchange(learner, worker)


async def test_a_message_that_never_ends_is_found_and_its_sender_cut_off(stage):
    learner, worker = await stage.pair(
        limits=EndpointLimits(max_message_bytes=3_000_000, times=EndpointTimes(tick_s=0.05))
    )
    with await asyncio.to_thread(RawPeer, learner.port) as peer:
        peer.send(b"hello")
        await learner.until(lambda: learner.messages)
        with contextlib.suppress(ConnectionError):
            while EventKind.DROPPED not in learner.kinds():
                await asyncio.sleep(0.02)
                await asyncio.to_thread(peer.socket.sendall, frame(bytes(1_000_000), more=True))
        dropped = await learner.until_event(EventKind.DROPPED)
        assert dropped.peer == learner.messages[0][0]
        await learner.until_event(EventKind.DISCONNECTED)
    await stage.exchange(learner, worker)


async def test_honest_messages_of_any_total_size_are_not_taken_for_one_that_never_ends(stage):
    learner, worker = await stage.pair(
        limits=EndpointLimits(max_message_bytes=3_000_000, times=EndpointTimes(tick_s=0.02))
    )
    for _ in range(30):
        await worker.send([bytes(1_000_000)])
        await asyncio.sleep(0.002)
    await learner.until(lambda: len(learner.messages) == 30)
    await asyncio.sleep(0.1)
    assert learner.endpoint.stats().dropped == 0


async def test_a_peer_that_floods_with_small_messages_does_not_keep_others_from_being_served(stage):
    learner, worker = await stage.pair()
    junk = []
    record = learner.endpoint.on_message
    learner.endpoint.on_message = lambda peer, frames, user_id: (
        junk.append(peer) if bytes(frames[0]) == b"junk" else record(peer, frames, user_id)
    )

    def flood():
        with contextlib.suppress(OSError), RawPeer(learner.port) as flooder:
            while True:
                flooder.send(b"junk")

    flooding = asyncio.create_task(asyncio.to_thread(flood))
    await stage.eventually(lambda: junk)
    learner.endpoint.send(junk[0], [b"welcome"])  # a stranger would be cut off soon
    await stage.eventually(lambda: len(junk) > 1000)
    async with asyncio.timeout(15):
        for _ in range(5):
            await stage.exchange(learner, worker)
    learner.endpoint.drop(junk[0], "it floods")
    await flooding


async def test_more_connections_than_allowed_are_cut_off_and_the_first_ones_stay(stage):
    learner, worker = await stage.pair(limits=EndpointLimits(max_peers=3))
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(socket.create_connection(("127.0.0.1", learner.port)))
        await learner.until_event(EventKind.DROPPED, count=3)
        await stage.exchange(learner, worker)
