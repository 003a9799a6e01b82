"""`aiorl serve` and a bare ASGI route with uvicorn, orjson and ONNX Runtime, for the same CartPole
policy.

Both servers run on one core, in turn; the load comes from another one, as bytes that are made
before.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import random
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import psutil
from websockets.frames import Frame, Opcode

import aiorl
from aiorl.acting.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from benchmarks.measure import alternate, run_command
from benchmarks.result import Figure

__all__ = [
    "serve_attacked",
    "serve_latency",
    "serve_requests",
    "serve_start",
    "serve_swaps",
    "serve_tail",
    "serve_websocket",
]

ROUND_S = 2.0
ROUNDS = 5
TAIL_S, TAIL_ROUNDS = 0.25, 8
CLIENTS, ROWS = 32, 64
SWAPS, SWAP_S = 100, 0.6
_CORES = sorted(os.sched_getaffinity(0))
_BARE = """
import sys, numpy as np, onnxruntime as ort, orjson, uvicorn
options = ort.SessionOptions()
options.intra_op_num_threads = 1
session = ort.InferenceSession(sys.argv[1], options)
async def app(scope, receive, send):
    body, more = b"", True
    while more:
        message = await receive()
        body += message["body"]
        more = message["more_body"]
    obs = np.array([orjson.loads(body)["observation"]], np.float32)
    (action,) = session.run(["action"], {"obs": obs})
    answer = orjson.dumps({"action": int(action[0])})
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})
uvicorn.run(app, port=int(sys.argv[2]), http="httptools", loop="uvloop", access_log=False, log_level="warning",
            lifespan="off")
"""
_REQUEST = (
    b"POST /act HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length:"
    b" %d\r\n\r\n%s"
)
_BODY = b'{"observation":[0.01,0.02,-0.03,0.04]}'
_ACT = _REQUEST % (len(_BODY), _BODY)
_UPGRADE = (
    b"GET /ws HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\nsec-websocket-version: 13\r\n\r\n"
)
_ROW = Frame(Opcode.BINARY, msgpack.packb({"id": 1, "observation": b"\x00" * 16})).serialize(
    mask=True
)


def serve_latency() -> list[Figure]:
    """Measure the median latency of one client."""
    with _servers() as (subject, bare):
        value, baseline = alternate(lambda: _latency(subject), lambda: _latency(bare), ROUNDS)
    name = "serve/median latency, 1 client"
    return [Figure(name, value, "us", baseline, target_ratio=1.2, smaller_is_better=True)]


def serve_requests() -> list[Figure]:
    """Measure the requests/s of 32 clients."""
    with _servers() as (subject, bare):
        value, baseline = alternate(lambda: _rate(subject), lambda: _rate(bare), ROUNDS)
    return [Figure("serve/requests, 32 clients", value, "1/s", baseline, target_ratio=1.3)]


def serve_websocket() -> list[Figure]:
    """Measure the rows/s of a WebSocket with 64 of them under way, and those of the bare route with
    32 clients.
    """
    with _servers() as (subject, bare):
        value, baseline = alternate(lambda: _rate(subject, _Rows), lambda: _rate(bare), ROUNDS)
    return [
        Figure("serve/WebSocket, 64 rows under way", value, "rows/s", baseline, target_ratio=2.5)
    ]


def serve_tail() -> list[Figure]:
    """Measure the 99th percentile of the latency in medians, at 70 % of the highest rate.

    The machine pauses for milliseconds in a few of the short rounds, which do not change their
    median.
    """
    with _servers() as (subject, bare), _ahead_of_others():
        value, baseline = alternate(lambda: _tail(subject), lambda: _tail(bare), ROUNDS)
    return [
        Figure(
            "serve/p99 in medians, 70 % load",
            value,
            "",
            baseline,
            target=5.0,
            smaller_is_better=True,
        )
    ]


def serve_attacked() -> list[Figure]:
    """Measure the requests/s of 32 clients among 200 slow ones, 1,000 idle sockets and bodies of 1
    GB announced.
    """
    with _servers() as (subject, _):
        value, baseline = alternate(
            lambda: _rate(subject, is_attacked=True), lambda: _rate(subject), ROUNDS
        )
    return [
        Figure(
            "serve/requests, 32 clients, others attack", value, "1/s", baseline, target_ratio=0.8
        )
    ]


def serve_swaps() -> list[Figure]:
    """Count what 100 swaps of the weights in a minute cost clients with 64 requests under way."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = _trained(folder)
        checkpoints = Path(run_dir, "checkpoints")
        first = load_checkpoint(list_checkpoints(checkpoints)[-1])
        with _server(["-m", "aiorl.serve", run_dir, "--follow", "--port", "PORT"]) as (port, _):
            before = _Asking(port)
            before.join(10.0)
            during = _Asking(port)
            began = time.monotonic()
            for index in range(SWAPS):
                save_checkpoint(
                    checkpoints, first.number + 1 + index, first.tensors, first.meta, keep=3
                )
                time.sleep(max(0.0, began + (index + 1) * SWAP_S - time.monotonic()))
            during.join(1.0)
    num_lost = during.num_asked - sum(during.versions.values())
    name = "serve/100 swaps in a minute"
    return [
        Figure(f"{name}, swaps", len(during.versions) - 1, "", target=float(SWAPS)),
        Figure(
            f"{name}, requests without one answer", num_lost, "", target=0.0, smaller_is_better=True
        ),
        Figure(f"{name}, answers", during.rate, "1/s", before.rate),
    ]


def serve_start() -> list[Figure]:
    """Measure process start to the first answer, and the memory after 32 clients."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = _trained(folder)
        seconds = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            with _server(["-m", "aiorl.serve", run_dir, "--port", "PORT"]) as (port, process):
                seconds.append(time.perf_counter() - began)
                _rate(port)
                megabytes = process.memory_info().rss / 2**20
    return [
        Figure(
            "serve/start to first answer",
            statistics.median(seconds),
            "s",
            target=1.0,
            smaller_is_better=True,
        ),
        Figure("serve/memory (RSS)", megabytes, "MiB", target=120.0, smaller_is_better=True),
    ]


class _Asking:
    """Four threads of clients, each with 16 requests under way; a second answer to one of them
    closes a connection.
    """

    def __init__(self, port: int) -> None:
        self.versions = collections.Counter[str]()
        self.num_asked, self.rate, self._is_over = 0, 0.0, threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(port,)) for _ in range(4)]
        self._began = time.monotonic()
        for thread in self._threads:
            thread.start()

    def _ask(self, port: int) -> None:
        os.sched_setaffinity(0, {_CORES[-1]})  # of this thread
        found = collections.Counter[str]()
        asked = 0
        with (
            aiorl.PolicyClient(f"http://127.0.0.1:{port}") as client,
            contextlib.suppress(Exception),
        ):
            while not self._is_over.is_set():
                asked += 16
                answers = [
                    client.submit("act", observation=[0.01, 0.02, -0.03, 0.04]) for _ in range(16)
                ]
                found.update(answer.result(20)["version"] for answer in answers)
        self.num_asked += asked
        self.versions += found

    def join(self, wait_s: float) -> None:
        """Ask for `wait_s` more, then note the rate."""
        time.sleep(wait_s)
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        self.rate = sum(self.versions.values()) / (time.monotonic() - self._began)


@contextmanager
def _servers() -> Iterator[tuple[int, int]]:
    """Yield the ports of `aiorl serve` and of the bare route."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = _trained(folder)
        aiorl.export_policy(run_dir, Path(folder, "exported"), ["onnx"])
        bare = ["-c", _BARE, f"{folder}/exported/onnx/policy.onnx", "PORT"]
        with (
            _server(["-m", "aiorl.serve", run_dir, "--port", "PORT"]) as subject,
            _server(bare) as other,
        ):
            yield subject[0], other[0]


@contextmanager
def _ahead_of_others() -> Iterator[None]:
    """Run this process and its servers ahead of the machine's other processes, if the system lets
    it.
    """
    threads = [
        thread.id
        for child in psutil.Process().children(recursive=True)
        for thread in child.threads()
    ]
    with contextlib.suppress(PermissionError):
        for number in (0, *threads):
            os.sched_setscheduler(number, os.SCHED_FIFO, os.sched_param(1))
    yield
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _trained(folder: str) -> str:
    run_dir = f"{folder}/run"
    run_command(
        [
            sys.executable,
            "-m",
            "aiorl.learner",
            "--env=CartPole-v1",
            f"--run-dir={run_dir}",
            "--stop-timesteps=1",
        ]
    )
    return run_dir


@contextmanager
def _server(arguments: list[str]) -> Iterator[tuple[int, psutil.Process]]:
    """Run a server on the first core until it answers; "PORT" in its arguments is its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        "taskset",
        "-c",
        str(_CORES[0]),
        sys.executable,
        *(one.replace("PORT", str(port)) for one in arguments),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20.0
        while process.poll() is None and time.monotonic() < deadline:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), 5) as connection,
            ):
                connection.sendall(_ACT)
                if b" 200 OK" in connection.recv(1000):
                    break
            time.sleep(0.002)
        yield port, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(20)


def _latency(port: int) -> float:
    return _quantile(_Load(port, _Client, 1).run(), 0.5)


def _tail(port: int) -> float:
    rate = 0.7 * _rate(port)
    found = [_Load(port, _Client, CLIENTS, rate, seconds=TAIL_S).run() for _ in range(TAIL_ROUNDS)]
    return statistics.median(_quantile(one, 0.99) / _quantile(one, 0.5) for one in found)


def _rate(port: int, kind: type[_Client] | None = None, *, is_attacked: bool = False) -> float:
    load = _Load(port, kind or _Client, 1 if kind else CLIENTS, is_attacked=is_attacked)
    load.run()
    return load.num_answers / ROUND_S


def _quantile(latencies: list[float], share: float) -> float:
    return sorted(latencies)[int(share * len(latencies))] * 1e6


class _Load:
    """Load on a server, from the last core: each client asks again after each answer, or all of
    them at a rate.

    A request costs it a few microseconds, so that latencies are the server's.
    """

    def __init__(
        self,
        port: int,
        kind: type[_Client],
        clients: int,
        rate: float = 0.0,
        is_attacked: bool = False,
        seconds: float = ROUND_S,
    ) -> None:
        self.port, self.kind, self.num_clients, self.rate, self.is_attacked = (
            port,
            kind,
            clients,
            rate,
            is_attacked,
        )
        self.seconds = seconds
        self.latencies: list[float] = []
        self.num_answers = 0

    def run(self) -> list[float]:
        """Return the latencies in seconds."""
        own = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {_CORES[-1]})
        gc.collect()
        gc.disable()  # its pauses would count as the server's
        try:
            with _attack(self.port) if self.is_attacked else contextlib.nullcontext():
                self._run()
        finally:
            gc.enable()
            os.sched_setaffinity(0, own)
        return self.latencies

    def _run(self) -> None:
        with select.epoll() as epoll, contextlib.ExitStack() as held:
            clients = [held.enter_context(self.kind(self.port)) for _ in range(self.num_clients)]
            by_number = {client.fileno(): client for client in clients}
            for number in by_number:
                epoll.register(number, select.EPOLLIN)
            now = time.perf_counter()
            end, due = now + self.seconds, now
            idle, late = clients[:], collections.deque[float]()
            if not self.rate:
                while idle:
                    idle.pop().ask(now)
            while (now := time.perf_counter()) < end:
                while self.rate and due < now:
                    late.append(due)
                    due += random.expovariate(self.rate)
                while late and idle:
                    idle.pop().ask(late.popleft())
                for number, _ in epoll.poll(0 if self.rate else 0.1):
                    client = by_number[number]
                    if (count := client.read()) == 0:
                        continue
                    now = time.perf_counter()
                    self.num_answers += count
                    self.latencies.append(now - client.began)
                    if self.rate:
                        idle.append(client)
                    else:
                        client.ask(now)


@contextmanager
def _attack(port: int) -> Iterator[None]:
    """Hold slow clients, bodies of 1 GB that were announced, and idle sockets."""
    with contextlib.ExitStack() as held:
        ends = [
            held.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(1400)
        ]
        for end in ends[:200]:
            end.sendall(_ACT[:20])
        for end in ends[200:400]:
            end.sendall(
                b"POST /act HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000\r\n\r\n"
                + b" " * 1000
            )
        is_over = threading.Event()

        def trickle() -> None:
            for byte in _ACT[20:]:
                for end in ends[:200]:
                    end.sendall(bytes([byte]))
                if is_over.wait(0.05):
                    return

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


class _Client(socket.socket):
    """Connection with one request under way."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.connect(("127.0.0.1", port))
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.began, self._rest = 0.0, b""

    def ask(self, began: float) -> None:
        """Send a request; it began at a time of `time.perf_counter`."""
        self.began = began
        self.send(_ACT)

    def read(self) -> int:
        """Read what there is, and return the number of answers that are complete."""
        data = self._rest + self.recv(1 << 16)
        assert data.startswith(b"HTTP/1.1 200")
        head, _, body = data.partition(b"\r\n\r\n")
        at = head.find(b"content-length: ") + 16
        is_whole = at > 16 and len(body) == int(head[at : at + 3])
        self._rest = b"" if is_whole else data
        return int(is_whole)


class _Rows(_Client):
    """WebSocket with rows under way."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.sendall(_UPGRADE)
        assert self.recv(1 << 16).startswith(b"HTTP/1.1 101")
        self._count = ROWS

    def ask(self, began: float) -> None:
        self.began = began
        self.send(_ROW * self._count)

    def read(self) -> int:
        data = self._rest + self.recv(1 << 16)
        start, size, self._count = 0, len(data), 0
        while start + 2 <= size and start + 2 + data[start + 1] <= size:
            start += 2 + data[start + 1]
            self._count += 1
        self._rest = data[start:]
        assert b"error" not in data
        return self._count
