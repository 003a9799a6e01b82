"""Wire alone, over TCP on loopback: fragments from a worker process to decoded columns in the
learner process.

The baseline is a bare pyzmq PUSH/PULL pair between two processes: zmq.asyncio on uvloop,
``copy=False``, one frame of the same size. Each sender is a process that sends one burst for each
line on its standard input.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial

import numpy as np
import uvloop
import zmq
import zmq.asyncio

from aiorl.net.protocol import events as ev
from aiorl.net.protocol.learner_session import LearnerSession
from aiorl.net.protocol.pacing import Pacing
from aiorl.net.protocol.worker_session import WorkerSession, WorkerSettings
from aiorl.net.transport.endpoint import Event, EventKind
from aiorl.net.transport.zmq_learner import ZmqLearnerEndpoint
from aiorl.net.transport.zmq_worker import ZmqWorkerEndpoint
from aiorl.net.wire import messages as m
from aiorl.net.wire.decoding import decode
from aiorl.net.wire.encoding import encode
from aiorl.sampling.table import allocate_together
from benchmarks.measure import SINGLE_THREADED, alternate, run_fresh
from benchmarks.result import Figure

__all__ = ["wire_large_fragments", "wire_small_fragments"]

ROUNDS = 7
BURSTS = 5
LARGE_BYTES = 1 << 20
LARGE_BURST = 500
SMALL_BYTES = 4 << 10
SMALL_BURST = 10_000
SMALL_RATIO = 0.28
"""Bound; the codec, two sessions and leases cost about 35 us for a fragment, the bare pair about
15."""
NUM_COLUMNS = 8
OUTSTANDING = 1024
TIMEOUT_S = 60.0


def wire_large_fragments() -> list[Figure]:
    """Measure fragments with 1 MiB of float32 columns: codec and endpoint."""
    value, bare = alternate(
        lambda: _rate("columns", LARGE_BURST), lambda: _rate("push", LARGE_BURST), ROUNDS
    )
    to_mb = LARGE_BYTES / 1e6
    return [Figure("wire, 1 MiB fragments", value * to_mb, "MB/s", bare * to_mb, target_ratio=0.6)]


def _rate(role: str, burst_size: int) -> float:
    """Return messages per second between two fresh processes, so that settings of one side don't
    help the other.
    """
    return float(run_fresh("benchmarks.wire", "measure", role, str(burst_size)))


def _measure(role: str, burst_size: int) -> float:
    """Return the median over bursts; the first one only warms up."""
    kinds = (_ColumnReceiver, _SessionReceiver, _BareReceiver, _SmallBareReceiver)
    kind = next(kind for kind in kinds if kind.role == role)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        receiver = runner.run(_open(kind(burst_size)))
        rates = sorted([runner.run(receiver.burst()) for _ in range(BURSTS + 1)][1:])
        runner.run(receiver.close())
    return rates[BURSTS // 2]


def wire_small_fragments() -> list[Figure]:
    """Measure fragments with 4 KiB of columns: codec, endpoint and both sessions, under leases."""
    value, bare = alternate(
        lambda: _rate("session", SMALL_BURST), lambda: _rate("push_small", SMALL_BURST), ROUNDS
    )
    return [Figure("wire, 4 KiB fragments", value, "fragments/s", bare, target_ratio=SMALL_RATIO)]


def make_samples(num_bytes: int) -> m.Samples:
    """Return a fragment of float32 columns [T, N] with ``num_bytes`` in total; random, so that
    nothing compresses.
    """
    rows = num_bytes // 4 // NUM_COLUMNS
    rng = np.random.default_rng(0)
    arrays = allocate_together([((rows // 8, 8), np.float32)] * NUM_COLUMNS)  # as the sampler does
    for array in arrays:
        rng.standard_normal(array.shape, np.float32, out=array)
    columns = {f"column_{index}": array for index, array in enumerate(arrays)}
    return m.Samples(
        seq=1,
        lease_id=1,
        env_steps=rows,
        agent_steps=rows,
        first_version=0,
        last_version=0,
        num_envs=8,
        length=rows // 8,
        batches={"default_policy": columns},
        episodes={},
        filter_deltas={},
        perf={},
        sampled_total=rows,
    )


# Receivers
# --------------------------------------------------------------------------------------------------


class _Receiver:
    """Receiver that counts its sender's messages, and times a burst from its first message to its
    last.
    """

    role = ""

    def __init__(self, burst_size: int) -> None:
        self._burst_size = burst_size
        self._count = 0
        self._first_at = 0.0
        self._done = asyncio.Event()
        self._sender: subprocess.Popen[bytes] | None = None

    async def open(self) -> str:
        """Start to listen; return the address."""
        raise NotImplementedError

    async def close(self) -> None:
        """End the sender's process."""
        assert self._sender is not None
        self._sender.kill()
        self._sender.wait()
        if self._sender.stdin is not None:
            self._sender.stdin.close()

    def start_sender(self, address: str) -> None:
        self._sender = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.wire", self.role, address, str(self._burst_size)],
            stdin=subprocess.PIPE,
            env=_environment(),
        )

    async def burst(self) -> float:
        """Receive one burst; return messages per second."""
        assert self._sender is not None
        assert self._sender.stdin is not None
        self._count = 0
        self._done.clear()
        self._sender.stdin.write(b"go\n")
        self._sender.stdin.flush()
        async with asyncio.timeout(TIMEOUT_S):
            await self._done.wait()
        return (self._burst_size - 1) / (time.perf_counter() - self._first_at)

    def note(self) -> None:
        """Count one message."""
        self._count += 1
        if self._count == 1:
            self._first_at = time.perf_counter()
        if self._count == self._burst_size:
            self._done.set()


class _BareReceiver(_Receiver):
    role = "push"

    async def open(self) -> str:
        self._context = zmq.asyncio.Context()
        self._pull = self._context.socket(zmq.PULL)
        port = self._pull.bind_to_random_port("tcp://127.0.0.1")
        self._task = asyncio.create_task(self._receive())
        return f"tcp://127.0.0.1:{port}"

    async def close(self) -> None:
        await super().close()
        self._task.cancel()
        self._context.destroy(0)

    async def _receive(self) -> None:
        while True:
            await self._pull.recv(copy=False)
            self.note()


class _SmallBareReceiver(_BareReceiver):
    role = "push_small"


class _ColumnReceiver(_Receiver):
    role = "columns"

    async def open(self) -> str:
        # no keys, like the bare pair
        self._endpoint = ZmqLearnerEndpoint("tcp://127.0.0.1:0", insecure=True)
        self._endpoint.on_message = self._on_message
        self._endpoint.start()
        return self._endpoint.address

    async def close(self) -> None:
        await super().close()
        await self._endpoint.close()

    def _on_message(self, peer: bytes, frames: list[memoryview], user_id: str) -> None:
        if isinstance(decode(frames), m.Hello):
            # a connection without replies may leave little unread
            self._endpoint.send(peer, encode(m.Ack(0)))
        else:
            self.note()


class _SessionReceiver(_ColumnReceiver):
    role = "session"

    async def open(self) -> str:
        self._session = LearnerSession("benchmark", "learner")
        # The budget begins at several batches: only the per-worker limit bounds a worker, because
        # no update raises it.
        self._session.leases.begin_streaming(Pacing(OUTSTANDING, None, per_worker=OUTSTANDING))
        now = time.monotonic()
        self._session.begin({}, {}, now)
        self._session.publish(m.Snapshot(0, {}, {}, {}, {}), now)
        self._pending = False
        address = await super().open()
        return address

    def _on_message(self, peer: bytes, frames: list[memoryview], user_id: str) -> None:
        self._session.receive(peer, decode(frames), time.monotonic(), user_id)
        if not self._pending:
            self._pending = True
            asyncio.get_running_loop().call_soon(self._settle)

    def _settle(self) -> None:
        """Do a service's work after each batch of messages: take the fragments, lease new ones,
        acknowledge.
        """
        self._pending = False
        for event in self._session.events():
            if isinstance(event, ev.SamplesAccepted):
                self._session.ledger.train(event.message.env_steps)
                self.note()
        self._session.stream(0, 0)
        for target, message in self._session.messages_to_send():
            if target is None:
                self._endpoint.broadcast(encode(message))
            else:
                self._endpoint.send(target, encode(message))


async def _open(receiver: _Receiver) -> _Receiver:
    receiver.start_sender(await receiver.open())
    return receiver


def _environment() -> dict[str, str]:
    return {**os.environ, **SINGLE_THREADED}


# Senders
# --------------------------------------------------------------------------------------------------


async def _on_each_line(burst: Callable[[], Coroutine[None, None, None]]) -> None:
    """Run a burst for each line on standard input; end the process when it closes, even in the
    middle of a burst.
    """
    loop = asyncio.get_running_loop()
    orders: asyncio.Queue[None] = asyncio.Queue()

    def listen() -> None:
        for _ in sys.stdin.buffer:
            loop.call_soon_threadsafe(orders.put_nowait, None)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        await orders.get()
        await burst()


async def _send_bare(address: str, burst_size: int, num_bytes: int = LARGE_BYTES) -> None:
    context = zmq.asyncio.Context()
    push = context.socket(zmq.PUSH)
    push.connect(address)
    payload = bytes(num_bytes)

    async def burst() -> None:
        for _ in range(burst_size):
            await push.send(payload, copy=False)

    await _on_each_line(burst)


async def _connect(endpoint: ZmqWorkerEndpoint) -> None:
    connected = asyncio.Event()

    def on_event(event: Event) -> None:
        if event.kind is EventKind.CONNECTED:
            connected.set()

    endpoint.on_event = on_event
    endpoint.start()
    await connected.wait()


async def _send_columns(address: str, burst_size: int) -> None:
    endpoint = ZmqWorkerEndpoint(address)
    answered = asyncio.Event()
    endpoint.on_message = lambda frames: answered.set()
    await _connect(endpoint)
    endpoint.send(encode(m.Hello(m.PROTOCOL_VERSION, "", "worker", "life")))
    await answered.wait()
    samples = make_samples(LARGE_BYTES)

    async def burst() -> None:
        for _ in range(burst_size):
            frames = encode(samples)
            while not endpoint.send(frames):
                await endpoint.wait_writable()

    await _on_each_line(burst)


async def _send_fragments(address: str, burst_size: int) -> None:
    endpoint = ZmqWorkerEndpoint(address)
    session = WorkerSession(WorkerSettings("benchmark-worker"))
    changed = asyncio.Event()

    def on_message(frames: list[memoryview]) -> None:
        session.receive(decode(frames), time.monotonic())
        changed.set()

    endpoint.on_message = on_message
    await _connect(endpoint)
    session.connected(time.monotonic())
    samples = make_samples(SMALL_BYTES)

    async def say() -> None:
        for message in session.messages_to_send():
            frames = encode(message)
            while not endpoint.send(frames):
                await endpoint.wait_writable()

    async def burst() -> None:
        left = burst_size
        while left:
            changed.clear()
            while left and session.may_sample(0):
                lease_id = session.start_fragment(0)
                assert lease_id is not None
                session.fragment_done(_under(samples, lease_id), time.monotonic())
                left -= 1
                await say()
            await say()
            if left:
                await changed.wait()

    await say()
    await _on_each_line(burst)


def _under(samples: m.Samples, lease_id: int) -> m.Samples:
    return samples._replace(lease_id=lease_id)


ROLES: dict[str, Callable[[str, int], Coroutine[None, None, None]]] = {
    "push": _send_bare,
    "push_small": partial(_send_bare, num_bytes=SMALL_BYTES),
    "columns": _send_columns,
    "session": _send_fragments,
}

if __name__ == "__main__":
    if sys.argv[1] == "measure":
        sys.stdout.write(json.dumps(_measure(sys.argv[2], int(sys.argv[3]))))
    else:
        uvloop.run(ROLES[sys.argv[1]](sys.argv[2], int(sys.argv[3])))
