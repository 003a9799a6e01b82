"""Hostile peer: `python -m benchmarks.chaos.intruder WHAT --port P --key FILE --seconds S`.

*subscribe* connects to the broadcast port with an admitted key and subscribes again and again.
*knock* tries to connect with keys that are not admitted, a new one each time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import zmq

from aiorl.net.transport.security import WorkerKeys, load_worker_keys

__all__ = ["main"]

_KNOCK_S = 0.05
_BURST = 1000


def main(argv: Sequence[str] | None = None) -> int:
    """Run until the time is over."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos.intruder", description=__doc__
    )
    parser.add_argument("what", choices=("subscribe", "knock"))
    parser.add_argument("--port", type=int, required=True, help="the learner's first port")
    parser.add_argument(
        "--key", type=Path, required=True, help="private key, next to the learner's public one"
    )
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args(argv)
    keys, until = load_worker_keys(args.key), time.monotonic() + args.seconds
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    print("begins", flush=True)
    if args.what == "subscribe":
        _subscribe(context, args.port + 1, keys, until)
    else:
        _knock(context, args.port, keys, until)
    context.destroy(linger=0)
    return 0


def _subscribe(
    context: zmq.Context[zmq.Socket[bytes]], port: int, keys: WorkerKeys, until: float
) -> None:
    socket = context.socket(zmq.XSUB)  # SUB would not repeat a subscription
    socket.curve_publickey, socket.curve_secretkey = keys.public_key, keys.secret_key
    socket.curve_serverkey = keys.learner_key
    socket.connect(f"tcp://127.0.0.1:{port}")
    while time.monotonic() < until:
        try:
            for _ in range(_BURST):
                socket.send(b"\x01", zmq.DONTWAIT)
                socket.send(b"\x00", zmq.DONTWAIT)
        except zmq.Again:
            time.sleep(0.01)
        while socket.poll(0):
            socket.recv_multipart(copy=False)


def _knock(
    context: zmq.Context[zmq.Socket[bytes]], port: int, keys: WorkerKeys, until: float
) -> None:
    while time.monotonic() < until:
        socket = context.socket(zmq.DEALER)
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = keys.learner_key
        socket.connect(f"tcp://127.0.0.1:{port}")
        time.sleep(_KNOCK_S)
        socket.close(0)


if __name__ == "__main__":
    sys.exit(main())
