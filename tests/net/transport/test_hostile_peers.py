"""A learner's endpoint in its own process, and malicious peers."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import Started, wait_until
from zmtp import RawListener, RawPeer, frame

_DRIVER = """
import asyncio, json, os, resource, sys, time
limits, open_files, slow_s = json.loads(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
if open_files:
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
from aiorl.net.transport.endpoint import EndpointLimits, EndpointTimes
from aiorl.net.transport import zmq_learner
from aiorl.net.transport.zmq_learner import ZmqLearnerEndpoint

find_max_peers = zmq_learner.peers_per_port
max_peers = 0

def peers_per_port(configured):
    global max_peers
    max_peers = find_max_peers(configured)
    return max_peers

zmq_learner.peers_per_port = peers_per_port

def tell(**what):
    print(json.dumps(what), flush=True)

async def main():
    limits["times"] = EndpointTimes(**limits.get("times", {}))
    endpoint = ZmqLearnerEndpoint("tcp://127.0.0.1:0", insecure=True, limits=EndpointLimits(**limits))
    done = asyncio.Event()
    registered = set()
    endpoint.is_registered = registered.__contains__

    def on_message(peer, frames, user_id):
        word = bytes(frames[0][:20]).decode()
        if word == "end":
            done.set()
        elif word == "echo":
            endpoint.send(peer, [b"echo"])
        elif word == "register":
            registered.add(peer)
            endpoint.send(peer, [b"register"])
        elif word == "question":
            endpoint.send(peer, [b"answer" * 10_000])
        elif word == "broadcast":
            endpoint.broadcast([b"news"])
        elif word == "files":
            kept = []
            try:
                kept = [open(os.devnull) for _ in range(int(bytes(frames[1])))]
            except OSError:
                pass
            endpoint.send(peer, [b"%d" % len(kept)])
        elif word == "violation":
            endpoint.send(peer, [b"refused", b"since " * 100_000])
            endpoint.drop(peer, "a violation")
        elif slow_s:
            time.sleep(slow_s)

    endpoint.on_message = on_message
    endpoint.on_event = lambda event: tell(event=event.kind, reason=event.reason, address=event.address)
    endpoint.start()
    tell(port=int(endpoint.address.rpartition(":")[2]), max_peers=max_peers)
    async def flood():
        while not done.is_set():
            endpoint.broadcast([bytes(50_000)])
            await asyncio.sleep(0.002)
    flooding = asyncio.create_task(flood()) if limits.get("broadcast_messages") == 1 else None
    await done.wait()
    before = time.monotonic()
    await endpoint.close()
    tell(closed_s=time.monotonic() - before)

asyncio.run(main())
"""


def _peak_mb(pid: int) -> float:
    """Return the most memory that a process has had in use so far."""
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert peak is not None
    return int(peak[1]) / 1e3


class Learner(Started):
    """The process."""

    def __init__(self, limits: dict[str, Any], open_files: int, slow_s: float) -> None:
        super().__init__(
            [sys.executable, "-c", _DRIVER, json.dumps(limits), str(open_files), str(slow_s)]
        )
        first = self.told('"port"')
        self.port, self.max_peers = first["port"], first["max_peers"]

    def told(self, pattern: str, timeout_s: float = 15.0) -> dict[str, Any]:
        """Return the first line of its output that matches."""
        return json.loads(self.lines[self.wait_for(pattern, timeout_s) - 1])

    def has_cut_newcomers(self) -> bool:
        """Return whether connections were cut off when they came."""
        told = [json.loads(line) for line in self.text.splitlines() if line.startswith('{"event"')]
        opened, cut = (
            {each["address"] for each in told if each["event"] == kind}
            for kind in ("connected", "dropped")
        )
        return bool(cut - opened)

    def peer(self) -> RawPeer:
        return RawPeer(self.port)

    def subscriber(self) -> RawPeer:
        peer = RawPeer(self.port + 1, "SUB")
        peer.send(b"\x01")
        return peer

    def rss_mb(self) -> float:
        return psutil.Process(self.pid).memory_info().rss / 1e6


@pytest.fixture
def start() -> Iterator[Callable[..., Learner]]:
    learners: list[Learner] = []

    def make(*, open_files: int = 0, slow_s: float = 0.0, **limits: Any) -> Learner:
        learners.append(Learner(limits, open_files, slow_s))
        return learners[-1]

    yield make
    for learner in learners:
        learner.end()


def _is_served(peer: RawPeer, word: bytes = b"echo") -> bool:
    peer.send(word)
    while answer := peer.receive():
        if answer == [word]:
            return True
    return False


def _is_registered(peer: RawPeer) -> bool:
    return _is_served(peer, b"register")


_PING = b"\x04\x07\x04PING\x00\x00"


def test_hundreds_can_connect_before_the_learner_takes_the_first_one(start):
    learner = start()
    os.kill(learner.pid, signal.SIGSTOP)
    with contextlib.ExitStack() as stack:
        stack.callback(os.kill, learner.pid, signal.SIGCONT)
        for _ in range(300):
            stack.enter_context(socket.create_connection(("127.0.0.1", learner.port), 10))


@pytest.mark.parametrize("said", [frame(bytes(1000)) * 50, (frame(bytes(100)) * 10 + _PING) * 20])
def test_peers_that_reset_with_full_queues_do_not_abort_the_process(start, said):
    """libzmq 4.3.5 aborts if it has a heartbeat to send or to answer on such a connection."""
    learner = start(slow_s=0.005, receive_messages=2, send_messages=2, broadcast_messages=1)
    for _ in range(4):
        peer, subscriber = learner.peer(), learner.subscriber()  # they never read
        with contextlib.suppress(OSError):
            peer.socket.sendall(said)
        time.sleep(0.03)
        peer.reset()
        subscriber.reset()
        assert learner.process.poll() is None, learner.text
    with learner.peer() as peer:
        assert _is_served(peer)


_FLOOD_BYTES_PER_S = 25e6


def _flood(connection: socket.socket, payload: bytes, seconds: float) -> bool:
    """Send the same bytes repeatedly; return True if the other side has stopped reading before the
    time was up.

    The rate is below that of most networks, because the bytes that arrive before a busy machine
    runs the learner prove nothing.
    """
    until = time.monotonic() + seconds
    connection.settimeout(1)
    with contextlib.suppress(OSError):
        while time.monotonic() < until:
            connection.sendall(payload)
            time.sleep(len(payload) / _FLOOD_BYTES_PER_S)
        return False
    return True


@pytest.mark.parametrize(
    "payload",
    [frame(bytes(1 << 20)), frame(bytes(1 << 20), more=True)],
    ids=["messages", "one without end"],
)
def test_unread_data_of_peers_is_bounded_while_the_learner_is_busy(start, payload):
    learner = start(slow_s=0.8, max_message_bytes=8 << 20, max_unread_bytes=48 << 20)
    with learner.peer() as honest, learner.peer() as busy, contextlib.ExitStack() as stack:
        assert _is_served(honest)
        flooders = [stack.enter_context(learner.peer()) for _ in range(4)]
        for flooder in flooders:
            assert _is_registered(flooder)
        before_mb = learner.rss_mb()
        busy.send(b"busy")
        threads = [
            threading.Thread(target=_flood, args=(flooder.socket, payload, 1.0))
            for flooder in flooders
        ]
        for thread in threads:
            thread.start()
        peak_mb = 0.0
        while any(thread.is_alive() for thread in threads):
            peak_mb = max(peak_mb, learner.rss_mb())
            time.sleep(0.01)
        learner.told('"dropped"')
        assert _is_served(honest)
        assert peak_mb < before_mb + 600, "without a bound it is gigabytes"


def test_unread_data_of_short_connections_is_bounded_too(start):
    learner = start(slow_s=0.01, max_message_bytes=8 << 20, max_unread_bytes=48 << 20)
    with learner.peer() as honest:
        assert _is_served(honest)
        for _ in range(20):  # on a busy machine, all data of the first ones may have been read
            with contextlib.suppress(OSError), learner.peer() as short:
                short.socket.sendall(frame(b"x" * 1000) * 200)
                # a close may reset the connection and discard unread data
                short.socket.shutdown(socket.SHUT_WR)
                while short.socket.recv(4096):
                    pass
            if learner.has_cut_newcomers():
                break
        wait_until(learner.has_cut_newcomers)
        assert _is_served(honest)


def _is_stranger(peer: RawPeer) -> bool:
    return True


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    "is_introduced",
    [_is_stranger, _is_served, _is_registered],
    ids=["stranger", "answered", "registered"],
)
def test_an_endless_message_of_empty_frames_is_cut_off_before_it_takes_much_memory(
    start, is_introduced
):
    learner = start()
    with learner.peer() as honest, learner.peer() as flooder:
        assert _is_served(honest)
        assert is_introduced(flooder)
        before_mb = _peak_mb(learner.pid)
        assert _flood(flooder.socket, frame(b"", more=True) * (1 << 17), 30.0), (
            "it was never cut off"
        )
        learner.told('"dropped"')
        assert _is_served(honest)
        assert _peak_mb(learner.pid) < before_mb + 600


@pytest.mark.slow
def test_endless_messages_of_many_strangers_together_take_little_memory(start):
    learner = start()
    with learner.peer() as honest, contextlib.ExitStack() as stack:
        assert _is_served(honest)
        before_mb = _peak_mb(learner.pid)
        for _ in range(120):  # together, they would take 900 MB
            flooder = stack.enter_context(learner.peer())
            assert _is_served(flooder)
            payload = frame(b"", more=True) * 120_000
            with contextlib.suppress(OSError):  # cut off already
                flooder.socket.sendall(payload)
            time.sleep(len(payload) / _FLOOD_BYTES_PER_S)
        learner.told('"dropped"')
        assert _is_served(honest)
        assert _peak_mb(learner.pid) < before_mb + 600, "each of them would be let alone"


def test_frames_in_packets_of_their_own_take_no_more_memory_than_others(start):
    learner = start()
    with learner.peer() as peer:
        assert _is_registered(peer)
        peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        before_mb = _peak_mb(learner.pid)
        for _ in range(4000):
            peer.socket.sendall(frame(bytes(40), more=True))
            while _num_on_its_way(peer.socket):
                pass
        peer.send(b"")
        learner.told('"dropped"')
        assert _peak_mb(learner.pid) < before_mb + 12, (
            "it takes hundreds of times the bytes on the wire"
        )


def _num_on_its_way(connection: socket.socket) -> int:
    """Return the bytes that the other side's kernel has not confirmed yet."""
    return struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]


def test_few_answers_wait_for_a_stranger_who_does_not_read_them(start):
    learner = start()
    with RawPeer(learner.port, receive_buffer=4096) as stranger, learner.peer() as honest:
        before_mb = _peak_mb(learner.pid)
        for _ in range(400):
            stranger.send(b"question")
        learner.told('"dropped"')
        assert _is_served(honest)
        assert _peak_mb(learner.pid) < before_mb + 20


_WORKER_DRIVER = """
import asyncio, sys
from aiorl.net.transport.zmq_worker import ZmqWorkerEndpoint

async def main():
    endpoint = ZmqWorkerEndpoint(sys.argv[1])
    endpoint.on_event = lambda event: print(event.kind, flush=True)
    endpoint.start()
    print("started", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.rest_slow
@pytest.mark.parametrize("channel", [0, 1], ids=["messages", "broadcasts"])
def test_a_false_learners_endless_message_takes_little_of_a_workers_memory(channel):
    with RawListener() as listener:
        worker = Started([sys.executable, "-c", _WORKER_DRIVER, f"tcp://127.0.0.1:{listener.port}"])
        try:
            worker.wait_for("started")
            pair = listener.accept()
            before_mb = _peak_mb(worker.pid)
            with pair[0], pair[1]:
                assert _flood(pair[channel].socket, frame(b"", more=True) * (1 << 17), 30.0), (
                    "it was never cut off"
                )
            pair = listener.accept()  # it connects again
            with pair[0], pair[1]:
                assert _peak_mb(worker.pid) < before_mb + 600
        finally:
            worker.end()


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    "subscriptions",
    [
        frame(b"\x01"),
        frame(b"\x01") + frame(b"\x00"),
        frame(b"\x01" + bytes(200)),
        frame(b"\x01x", more=True),
    ],
    ids=["one topic", "to and fro", "long topics", "without end"],
)
def test_a_flood_of_subscriptions_is_cut_off_and_others_still_get_broadcasts(start, subscriptions):
    learner = start(times={"tick_s": 0.1})
    with learner.peer() as peer, learner.subscriber() as honest:
        before_mb = learner.rss_mb()
        for _ in range(3):
            with RawPeer(learner.port + 1, "SUB") as flooder:
                assert _flood(flooder.socket, subscriptions * 4096, 30.0), "it was never cut off"
            learner.told('"dropped"')
        peer.send(b"broadcast")
        while honest.receive()[1:] != [b"news"]:
            pass
        assert _is_served(peer)
        assert learner.rss_mb() < before_mb + 150


def test_every_dropped_peer_gets_the_reason(start):
    learner = start()
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(learner.peer()) for _ in range(20)]
        for peer in peers:
            peer.send(b"violation")
        for peer in peers:
            assert peer.receive() == [
                b"refused",
                b"since " * 100_000,
            ], "longer than what a connection takes at once"
            assert peer.receive() == []


def test_a_dropped_peer_that_does_not_read_cannot_delay_its_end(start):
    learner = start()
    with RawPeer(learner.port, receive_buffer=4096) as peer:
        peer.send(b"violation")
        learner.told('"dropped"')
        assert learner.told('"disconnected"', timeout_s=5)["reason"] == "a violation"


def test_a_storm_of_connections_and_resets_leaves_nothing_behind(start):
    learner = start()
    with learner.peer() as peer:
        for index in range(600):
            if index == 200:
                assert _is_served(peer)
                before_mb = learner.rss_mb()
            other = learner.peer() if index % 2 else learner.subscriber()
            other.send(b"\x01" if index % 2 == 0 else b"x")
            other.reset()
        assert _is_served(peer)
        assert learner.rss_mb() < before_mb + 5
        assert len(os.listdir(f"/proc/{learner.process.pid}/fd")) < 60


def test_out_of_descriptors_admitted_peers_are_served_and_files_can_be_opened(start):
    learner = start(open_files=256)
    assert 20 < learner.max_peers < 100
    with learner.peer() as peer, contextlib.ExitStack() as stack:
        for index in range(600):
            other = stack.enter_context(socket.socket())
            # the bound may be reached before the connection is set up
            with contextlib.suppress(OSError):
                other.connect(("127.0.0.1", learner.port + index % 2))
        learner.told(rf'"dropped".*\b{learner.max_peers}\b')
        assert _is_served(peer)
        answer = [b"0"]
        until = time.monotonic() + 5  # connections beyond the bound exist for a moment
        while answer != [b"40"] and time.monotonic() < until:
            peer.send(b"files", b"40")
            answer = peer.receive()
        assert answer == [b"40"]
        peer.send(b"end")
        assert learner.told("closed_s")["closed_s"] < 3
        assert learner.wait() == 0
