"""Memory that peers without admission, and clients that are let in, can make a process hold.

Each figure is by how much the resident memory of the attacked process grows, at the most, while an
attack continues.
"""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
from gymnasium import spaces

import aiorl
from aiorl.data.spaces import space_to_dict
from aiorl.env.external_env import ExternalBaseEnv
from aiorl.env.registry import EnvContext, resolve_env
from aiorl.net.wire import messages as m
from aiorl.net.wire.encoding import encode
from aiorl.web.ports import Ports
from benchmarks.attacker import GREETING_OF_DEALER
from benchmarks.measure import run_command
from benchmarks.result import Figure

__all__ = ["memory_of_client_port", "memory_of_learner", "memory_of_server"]

STRANGERS_MIB, CLIENTS_MIB, GATE_MIB = 64.0, 256.0, 512.0
"""Bounds for peers without admission, for clients of a server that are let in, and for clients of a
run's port."""
PEER_MIB = 128.0
"""Bound for one peer of a learner that is no worker: 2 MiB of empty frames take 64 MiB, allocators
some more, and more arrives until the guard looks again, 50 ms later. Twice as fast a machine has
measured 97."""
CONNECTIONS, SESSIONS = 60, 90
_BODY_BYTES = 15 << 20
_ATTACK_S, _LOOK_S = 8.0, 0.05
_SETTLES_S, _STEADY_S, _STEADY_BYTES = 60.0, 3.0, 2 << 20
_ACT = (
    b"POST /act HTTP/1.1\r\nhost: localhost\r\ncontent-length:"
    b' 31\r\n\r\n{"observation":[0.1,0.2,0.3,0]}'
)
_HEALTH = b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
_HALF = b"POST /act HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (_BODY_BYTES + 1)
_GREETING_BYTES = 64
_EMPTY_FRAME, _MANY = b"\x01\x00", 1 << 16

Attack = Callable[[int, threading.Event], None]
"""Function that attacks a port until the event is set."""


def memory_of_learner(port: int, pid: int) -> list[Figure]:
    """Send empty frames of one message without end, after a request that needs no registration."""

    def attack(port: int, is_over: threading.Event) -> None:
        request = b"".join(bytes(frame) for frame in encode(m.StatusRequest(1 << 16)))
        with socket.create_connection(("127.0.0.1", port), 10.0) as connection:
            connection.sendall(GREETING_OF_DEALER)
            received = 0
            while received <= _GREETING_BYTES:  # the learner's greeting, and its READY
                received += len(connection.recv(1 << 16))
            connection.sendall(bytes([0, len(request)]) + request)
            connection.recv(1 << 16)  # its answer
            _send_endlessly(connection, _EMPTY_FRAME * _MANY, is_over)

    grown = _grown(port, pid, [attack])
    name = "attacks/memory, anyone: a message without end after a status request"
    return [Figure(name, grown, "MiB", target=PEER_MIB, smaller_is_better=True)]


def memory_of_server() -> list[Figure]:
    """Attack `aiorl serve` without the token, and as clients that are let in."""
    kinds = {
        "requests without a token, unread answers": (_ACT * 1000, ["--token-file"], STRANGERS_MIB),
        "open requests, unread answers": (_HEALTH * 1000, ["--token-file"], STRANGERS_MIB),
        "half bodies without a token": (
            _HALF + bytes(_BODY_BYTES),
            ["--token-file"],
            STRANGERS_MIB,
        ),
        "requests of clients, unread answers": (_ACT * 1000, [], CLIENTS_MIB),
        "half bodies of clients": (_HALF + bytes(_BODY_BYTES), [], CLIENTS_MIB),
    }
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        run_command(
            [
                sys.executable,
                "-m",
                "aiorl.learner",
                "--env=CartPole-v1",
                f"--run-dir={folder}/run",
                "--stop-timesteps=1",
            ]
        )
        for kind, (sent, options, bound) in kinds.items():
            words = [*options, *([f"{folder}/token"] if options else [])]
            with _served(f"{folder}/run", words) as (port, pid):
                grown = _grown(port, pid, [_sending(sent)] * CONNECTIONS)
            name = f"attacks/memory, {CONNECTIONS} connections: {kind}"
            figures.append(Figure(name, grown, "MiB", target=bound, smaller_is_better=True))
    return figures


def memory_of_client_port() -> list[Figure]:
    """Have 90 sessions of a run's port for clients send 15 MB each to a worker that does not
    answer.
    """
    box, actions = spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(3)
    config = {"observation_space": space_to_dict(box), "action_space": space_to_dict(actions)}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "logs").mkdir()
        ports = Ports()
        ports.open(Path(folder), clients=0)
        env = resolve_env("external")(
            EnvContext({**config, **ports.gate, "max_concurrent": SESSIONS})
        )
        # it asks for observations once, and never answers
        threading.Thread(target=ExternalBaseEnv(env).poll, daemon=True).start()
        try:
            url = ports.ways["clients"]
            with aiorl.PolicyClient(url) as client:
                games = [client.session() for _ in range(SESSIONS)]

                def attack(port: int, is_over: threading.Event) -> None:
                    keys = {"observation": [0.0, 0.0], "info": {"text": "x" * _BODY_BYTES}}
                    with contextlib.suppress(ConnectionError):
                        for game in games:
                            if not is_over.is_set():
                                client.submit("act", session=game.id, **keys)

                (gate,) = (
                    child
                    for child in psutil.Process().children()
                    if "aiorl.web.ports" in child.cmdline()
                )
                grown = _grown(int(url.rpartition(":")[2]), gate.pid, [attack])
        finally:
            env.close()
            ports.close()
    name = f"attacks/memory, client port: {SESSIONS} sessions with 15 MiB each, no answers"
    return [Figure(name, grown, "MiB", target=GATE_MIB, smaller_is_better=True)]


def _grown(port: int, pid: int, attacks: Sequence[Attack]) -> float:
    """Return by how many MiB the memory of a process grows, at the most, during attacks on its
    port.
    """
    process, is_over = psutil.Process(pid), threading.Event()
    before = peak = _settled(process)
    threads = [
        threading.Thread(target=attack, args=(port, is_over), daemon=True) for attack in attacks
    ]
    for thread in threads:
        thread.start()
    ends_at = time.monotonic() + _ATTACK_S
    while time.monotonic() < ends_at:
        peak = max(peak, process.memory_info().rss)
        time.sleep(_LOOK_S)
    is_over.set()
    for thread in threads:
        thread.join(10.0)
    return float(peak - before) / 2**20


def _settled(process: psutil.Process) -> int:
    """Return the bytes of a process once they stay the same; one that has just started still
    compiles and allocates.
    """
    ends_at = time.monotonic() + _SETTLES_S
    before, now = 0, process.memory_info().rss
    while now - before > _STEADY_BYTES and time.monotonic() < ends_at:
        time.sleep(_STEADY_S)
        before, now = now, process.memory_info().rss
    return now


def _sending(sent: bytes) -> Attack:
    def attack(port: int, is_over: threading.Event) -> None:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), 1.0) as connection,
        ):
            _send_endlessly(connection, sent, is_over)

    return attack


def _send_endlessly(connection: socket.socket, sent: bytes, is_over: threading.Event) -> None:
    """Send the same bytes again and again, and read nothing, until it is over or the peer has
    closed.
    """
    connection.settimeout(0.1)
    rest = memoryview(sent)
    while not is_over.is_set():
        try:
            rest = rest[connection.send(rest) :] or memoryview(sent)
        except TimeoutError:
            continue
        except OSError:
            return


@contextlib.contextmanager
def _served(run_dir: str, options: Sequence[str]) -> Iterator[tuple[int, int]]:
    words = [sys.executable, "-m", "aiorl.serve", run_dir, "--port=0", *options]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        found = re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())
        assert found is not None
        try:
            yield int(found[1]), process.pid
        finally:
            process.terminate()
