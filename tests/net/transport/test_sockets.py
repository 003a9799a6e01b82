"""Send queues: order, bounds, and peers that are gone. Other threads run while a pump waits for
libzmq.
"""

from __future__ import annotations

import threading

import zmq
from hypothesis import given, strategies as st
from zmtp import RawPeer, frame

from aiorl.net.transport.sockets import SendQueues, SubscriptionPump


def test_a_queue_is_bounded_in_messages_and_bytes_but_takes_one_message_of_any_size():
    queues = SendQueues(max_messages=2, max_bytes=100)
    assert queues.put(b"a", [bytes(1000)])
    assert not queues.put(b"a", [b"x"])
    assert [queues.put(b"b", [b"x"]) for _ in range(3)] == [True, True, False]
    assert (queues.num_messages, queues.waiting(b"b")) == (3, 2)
    queues.forget(b"a")
    assert (queues.num_messages, len(queues)) == (2, 1)
    assert queues.put(b"a", [b"x"])


def test_the_bytes_of_all_queues_are_known_and_whose_queue_is_largest():
    queues = SendQueues(max_messages=5, max_bytes=1000)
    for peer, size in ((b"a", 10), (b"b", 300), (b"a", 200), (b"b", 800), (b"c", 5)):
        queues.put(peer, [bytes(size)])
    assert (queues.num_bytes, queues.largest) == (515, b"b")
    queues.flush(lambda peer, frames: None if peer == b"a" else True)
    assert (queues.num_bytes, queues.largest) == (210, b"a")
    queues.forget(b"a")
    assert queues.num_bytes == 0


@given(
    st.lists(
        st.one_of(st.tuples(st.sampled_from("ab"), st.integers(1, 30)), st.integers(0, 5)),
        max_size=60,
    )
)
def test_messages_of_a_peer_leave_in_order(steps):
    queues = SendQueues(5, 60)
    taken, left = {"a": [], "b": []}, {"a": [], "b": []}
    number = 0
    for step in steps:
        if isinstance(step, tuple):
            peer, size = step
            number += 1
            if queues.put(peer.encode(), [b"%04d" % number, bytes(size)]):
                taken[peer].append(number)
        else:
            budget = [step]

            def send(peer, frames, budget=budget):
                if not budget[0]:
                    return None
                budget[0] -= 1
                left[peer.decode()].append(int(frames[0]))
                return True

            queues.flush(send)
        waiting = {peer: taken[peer][len(left[peer]) :] for peer in taken}
        assert queues.num_messages == sum(map(len, waiting.values()))
    for peer in taken:
        assert left[peer] == taken[peer][: len(left[peer])]


async def test_other_threads_run_while_libzmq_reads_subscriptions():
    with zmq.Context() as context, context.socket(zmq.XPUB) as xpub:
        xpub.rcvhwm = 0
        port = xpub.bind_to_random_port("tcp://127.0.0.1")
        pump = SubscriptionPump(xpub, xpub.recv)
        with RawPeer(port, "SUB") as flooder:
            flooder.socket.sendall(frame(b"\x01") * 1_000_000)
        turns = 0
        is_over = threading.Event()

        def run():
            nonlocal turns
            while not is_over.wait(0.001):
                turns += 1

        thread = threading.Thread(target=run)
        thread.start()
        is_over.wait(1.0)  # libzmq's own thread receives them
        before = turns
        pump.settle()
        during = turns - before
        is_over.set()
        thread.join()
        pump.close()
        assert during > 5
