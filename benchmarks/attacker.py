"""Hostile peer: `python -m benchmarks.attacker WHAT --port P --seconds S [--who WHO]`, on loopback
only.

Each attack has a fixed rate, so that it costs the learner's own work rather than the attacker's
share of the cores. WHO is *anyone* (no key; the learner has none either), *keyless* (no key,
although the learner requires one), *admitted* (a worker's key from --keys DIR) or *stranger* (a key
of its own making, new for each connection). The attacker prints "begins", and at the end how much
it did and at what cost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgpack
import numpy as np
import zmq
from numpy.typing import NDArray

from aiorl.data.metrics import EpisodeColumns
from aiorl.net.protocol.worker_session import WorkerSession, WorkerSettings
from aiorl.net.transport.security import WorkerKeys, load_worker_keys
from aiorl.net.transport.zmq_worker import ZmqWorkerEndpoint
from aiorl.net.wire import messages as m
from aiorl.net.wire.encoding import encode
from aiorl.run.worker.service import WorkerService

__all__ = ["ATTACKS", "GREETING_OF_DEALER", "main"]

_HOST = "127.0.0.1"
_LONG_NAME = 60_000
_PEERS = 20
_CONNECTIONS = 1100
_SUBSCRIPTIONS_AT_ONCE = 1000
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x04\x29\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
GREETING_OF_DEALER = _GREETING + _READY
"""Bytes that a peer without keys sends to a ROUTER before its messages."""
_PING = b"\x04\x07\x04PING\x00\x00"
_JUNK = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\xff" + bytes(7) + b"\x01\x7f",
    bytes(64),
    secrets.token_bytes(4096),
)


@dataclass(slots=True)
class Attacker:
    """Target, identity and deadline of an attack.

    Attributes:
        port: the learner's first port.
        keys: keys of an admitted worker, None to connect without keys.
        invents_keys: connect with new keys each time instead.
        until: deadline by the monotonic clock.
    """

    port: int
    keys: WorkerKeys | None
    invents_keys: bool
    until: float

    def connect(self, kind: int = zmq.DEALER) -> zmq.Socket[bytes]:
        """Return a socket connected to the port that serves its kind."""
        found: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        found.linger = 0
        found.sndhwm = 1000
        if self.keys is not None:
            found.curve_publickey, found.curve_secretkey = (
                self.keys.public_key,
                self.keys.secret_key,
            )
            found.curve_serverkey = self.keys.learner_key
        if self.invents_keys:
            found.curve_publickey, found.curve_secretkey = zmq.curve_keypair()
        found.connect(f"tcp://{_HOST}:{self.port + (kind == zmq.XSUB)}")
        return found

    def dial(self, port_offset: int = 0, timeout_s: float = 1.0) -> socket.socket:
        """Open a plain connection."""
        return socket.create_connection((_HOST, self.port + port_offset), timeout=timeout_s)

    def at_rate(self, per_s: float) -> Iterator[int]:
        """Count up at this rate until the deadline; counts that come too late are skipped."""
        number, due = 0, time.monotonic()
        while (now := time.monotonic()) < self.until:
            if now < due:
                time.sleep(min(due - now, self.until - now))
                continue
            due = max(due + 1.0 / per_s, now - 0.5)
            yield number
            number += 1


Attack = Callable[[Attacker], int]
ATTACKS: dict[str, Attack] = {}
"""Attacks by name; each returns how many times it acted."""


def _attack(function: Attack) -> Attack:
    ATTACKS[function.__name__.replace("_", " ")] = function
    return function


# Peers that can reach the port
# --------------------------------------------------------------------------------------------------


@_attack
def knocking(attacker: Attacker) -> int:
    """Open 20 connections a second that are not admitted."""
    count = 0
    for count in attacker.at_rate(20):  # noqa: B007
        with attacker.connect():
            time.sleep(0.04)
    return count


@_attack
def resets(attacker: Attacker) -> int:
    """Open 200 connections a second to both ports and reset them immediately."""
    count = 0
    for count in attacker.at_rate(200):
        with contextlib.suppress(OSError), attacker.dial(count % 2) as found:
            if count % 4 < 2:
                found.sendall(_GREETING + _READY)
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return count


@_attack
def descriptors(attacker: Attacker) -> int:
    """Open more connections than the learner may have open files, and keep them open."""
    count = 0
    with contextlib.ExitStack() as stack:
        for count in attacker.at_rate(400):
            if count < _CONNECTIONS:
                with contextlib.suppress(OSError):
                    stack.enter_context(attacker.dial(count % 2))
    return min(count, _CONNECTIONS)


@_attack
def silence(attacker: Attacker) -> int:
    """Keep 200 silent connections open, half of them after a handshake; reopen those that are
    cut.
    """
    with contextlib.ExitStack() as stack:
        for number in range(100):
            stack.enter_context(attacker.connect())
            # a full queue needs a second try, 1 s later
            stack.enter_context(attacker.dial(number % 2, timeout_s=10.0))
        time.sleep(max(attacker.until - time.monotonic(), 0.0))
    return 200


@_attack
def garbage(attacker: Attacker) -> int:
    """Open 100 connections a second that speak another protocol."""
    count = 0
    for count in attacker.at_rate(100):
        with contextlib.suppress(OSError), attacker.dial(count % 2) as found:
            found.sendall(_JUNK[count % len(_JUNK)])
            time.sleep(0.005)
    return count


@_attack
def large_messages(attacker: Attacker) -> int:
    """Send 25 messages of 1 MB a second without having registered."""
    return _say(attacker, 25, [bytes(1 << 20)])


@_attack
def decompression_bombs(attacker: Attacker) -> int:
    """Send 25 messages a second that decompress to 64 MB."""
    columns = {"p": {"obs": np.zeros((64, 1 << 20), np.uint8)}}
    bomb = m.Samples(1, 1, 64, 64, 0, 0, 1, 64, columns, {}, {}, {})
    return _say(attacker, 25, [bytes(frame) for frame in encode(bomb)])


@_attack
def long_names(attacker: Attacker) -> int:
    """Have 20 peers with names of 60 kB say hello twice a second."""
    found = [attacker.connect() for _ in range(_PEERS)]
    count = 0
    for count in attacker.at_rate(2 * _PEERS):
        hello = msgpack.unpackb(bytes(encode(_hello())[0]))
        hello[2]["incarnation"] = f"{count:x>{_LONG_NAME}}"
        _send(found[count % _PEERS], [msgpack.packb(hello)])
    for each in found:
        each.close()
    return count


@_attack
def pings(attacker: Attacker) -> int:
    """Send 20,000 ZeroMQ heartbeats a second over one connection and read the answers."""
    count, found = 0, None
    for count in attacker.at_rate(200):  # noqa: B007
        with contextlib.suppress(OSError):
            if found is None:
                found = attacker.dial()
                found.sendall(_GREETING + _READY)
            try:
                found.sendall(_PING * 100)
                found.settimeout(0.05)
                if not found.recv(1 << 16):
                    raise ConnectionResetError
            except OSError:
                found.close()
                found = None
    if found is not None:
        found.close()
    return count * 100


# Peers that are registered, or can be
# --------------------------------------------------------------------------------------------------


@_attack
def hellos(attacker: Attacker) -> int:
    """Send 200 hellos a second, each for another worker, half of them over one connection."""
    count, found = 0, attacker.connect()
    for count in attacker.at_rate(200):
        if count % 2:
            _send(found, encode(_hello()))
            while found.poll(0):
                found.recv_multipart(copy=False)
        else:
            with attacker.connect() as other:
                _send(other, encode(_hello()))
    found.close()
    return count


@_attack
def coming_and_going(attacker: Attacker) -> int:
    """Register and leave as 20 workers a second."""
    count = 0
    for count in attacker.at_rate(20):  # noqa: B007
        with attacker.connect() as found:
            _send(found, encode(_hello()))
            if found.poll(200):
                found.recv_multipart(copy=False)
                _send(found, encode(m.Leaving("I have seen enough")))
                found.linger = 100
    return count


@_attack
def failures(attacker: Attacker) -> int:
    """Send 588 failure reports a second with tracebacks of the maximum length, from one worker
    after another.
    """
    failure = encode(m.Failure("env", "no", "line of a traceback\n" * 3000))
    count, found = 0, None
    for count in attacker.at_rate(588):  # noqa: B007
        if found is None:
            found = attacker.connect()
            _send(found, encode(_hello()))
        _send(found, failure)
        while found is not None and found.poll(0):
            frames = found.recv_multipart(copy=False)
            if b"refused" in bytes(frames[0].buffer[:64]):
                found.close()
                found = None
    if found is not None:
        found.close()
    return count


@_attack
def subscriptions(attacker: Attacker) -> int:
    """Subscribe endlessly, as fast as the learner accepts it."""
    count, found = 0, attacker.connect(zmq.XSUB)  # SUB would not repeat a subscription
    while time.monotonic() < attacker.until:
        with contextlib.suppress(zmq.Again):
            for _ in range(_SUBSCRIPTIONS_AT_ONCE):
                found.send(b"\x01", zmq.DONTWAIT)
                found.send(b"\x00", zmq.DONTWAIT)
                count += 2
        while found.poll(0):
            found.recv_multipart(copy=False)
        time.sleep(0.01)
    found.close()
    return count


@_attack
def metrics(attacker: Attacker) -> int:
    """Send 990 custom metrics of 1,000 values each in a worker's first fragment; then sample
    without any.
    """
    return asyncio.run(_sample(attacker))


async def _sample(attacker: Attacker) -> int:
    values = np.linspace(0.1, 0.9, 1000)
    junk = {f"custom/junk{number}".ljust(190, "x"): values for number in range(990)}
    honest, sent = EpisodeColumns.to_arrays, 0

    def to_arrays(episodes: EpisodeColumns) -> dict[str, NDArray[Any]]:
        nonlocal sent
        sent += 1
        return {**honest(episodes), **(junk if sent == 1 else {})}

    endpoint = ZmqWorkerEndpoint(f"tcp://{_HOST}:{attacker.port}", keys=attacker.keys)
    service = WorkerService(endpoint, WorkerSession(WorkerSettings(secrets.token_hex(8))))
    asyncio.get_running_loop().call_later(attacker.until - time.monotonic(), service.stop, "done")
    with patch.object(EpisodeColumns, "to_arrays", to_arrays):
        outcome = await service.run()
    if not outcome.ok:
        print(outcome.reason, file=sys.stderr)
    return min(sent, 1)


def _say(attacker: Attacker, per_s: float, frames: Sequence[bytes]) -> int:
    """Send the same frames repeatedly over one of several connections; reopen those that are
    cut.
    """
    found = [attacker.connect() for _ in range(4)]
    count = 0
    for number in attacker.at_rate(per_s):
        count += _send(found[number % len(found)], frames)
    for each in found:
        each.close()
    return count


def _send(found: zmq.Socket[bytes], frames: Sequence[Any]) -> bool:
    """Send without blocking; return False if the queue is full."""
    with contextlib.suppress(zmq.Again):
        found.send_multipart(frames, zmq.DONTWAIT)
        return True
    return False


def _hello() -> m.Hello:
    return m.Hello(
        m.PROTOCOL_VERSION, "", secrets.token_hex(8), secrets.token_hex(8), host="attacker"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one attack until its time is over."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attacker", description=__doc__)
    parser.add_argument("what", choices=tuple(ATTACKS))
    parser.add_argument(
        "--port", type=int, required=True, help="the learner's first port, on loopback"
    )
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--keys", type=Path, help="directory of the learner's keys and a worker's")
    parser.add_argument(
        "--who", choices=("anyone", "keyless", "admitted", "stranger"), default="anyone"
    )
    args = parser.parse_args(argv)
    keys = load_worker_keys(args.keys) if args.who in ("admitted", "stranger") else None
    attacker = Attacker(args.port, keys, args.who == "stranger", time.monotonic() + args.seconds)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    print("begins", flush=True)
    cpu = time.process_time()
    count = ATTACKS[args.what](attacker)
    print(
        json.dumps(
            {"what": args.what, "count": count, "cpu_s": round(time.process_time() - cpu, 2)}
        ),
        flush=True,
    )
    zmq.Context.instance().destroy(linger=0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
