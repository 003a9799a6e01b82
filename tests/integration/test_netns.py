"""Endpoints on two hosts: who gets in, who is told why not, and what a bad link costs."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest
from netns import LEARNER_HOST, NEEDS_NAMESPACES, PORT, WORKER_HOST, Network, Process, network
from processes import wait_until

from aiorl.keys import make_keys
from aiorl.net.transport.security import read_public_key

__all__ = ["network"]

pytestmark = NEEDS_NAMESPACES

_DRIVER = f"""
import asyncio, json, logging, sys
from aiorl.net.transport.endpoint import EndpointLimits, EventKind
from aiorl.net.transport.security import load_learner_keys, load_worker_keys
from aiorl.net.transport.zmq_learner import ZmqLearnerEndpoint
from aiorl.net.transport.zmq_worker import ZmqWorkerEndpoint

LIMITS = EndpointLimits(dead_after_s=2.5, retry_s=0.2, max_retry_s=0.5, handshake_s=2.0, tick_s=0.1)

def tell(**what):
    print(json.dumps(what), flush=True)

def tell_event(event):
    tell(event=event.kind, reason=event.reason, address=event.address)

async def learner(keys):
    endpoint = ZmqLearnerEndpoint("tcp://0.0.0.0:{PORT}", keys=load_learner_keys(keys), limits=LIMITS)
    def on_message(peer, frames, user_id):
        number = int(frames[0])
        tell(got=number, user=user_id)
        endpoint.send(peer, [frames[0]])
    endpoint.on_message = on_message
    endpoint.on_event = tell_event
    endpoint.start()
    tell(listening=endpoint.address)
    count = 0
    while True:
        await asyncio.sleep(0.05)
        count += 1
        endpoint.broadcast([b"%d" % count, bytes(10_000)])

async def worker(keys):
    endpoint = ZmqWorkerEndpoint(
        "tcp://{LEARNER_HOST}:{PORT}", keys=load_worker_keys(keys) if keys else None, limits=LIMITS
    )
    acknowledged, heard = 0, 0
    def on_message(frames):
        nonlocal acknowledged
        acknowledged = max(acknowledged, int(frames[0]))
    def on_broadcast(frames):
        nonlocal heard
        heard = int(frames[0])
    endpoint.on_message = on_message
    endpoint.on_broadcast = on_broadcast
    endpoint.on_event = tell_event
    endpoint.start()
    while True:
        # stop and wait: the next number goes out only when the one before has been answered
        await asyncio.sleep(0.05)
        if endpoint.connected:
            endpoint.send([b"%d" % (acknowledged + 1), bytes(20_000)])
        tell(acknowledged=acknowledged, heard=heard)

asyncio.run(globals()[sys.argv[1]](sys.argv[2] if len(sys.argv) > 2 else ""))
"""


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def _python(code: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code, *arguments)


def _start_learner(net: Network, keys: Path) -> Process:
    learner = net.start(net.learner, *_python(_DRIVER, "learner", str(keys)))
    learner.wait_for_text('"listening"')
    return learner


def _start_worker(net: Network, keys: Path | None) -> Process:
    return net.start(net.worker, *_python(_DRIVER, "worker", *([str(keys)] if keys else [])))


def _last(key: str, lines: list[str]) -> int:
    for line in reversed(lines):
        if f'"{key}": ' in line:
            return int(json.loads(line)[key])
    return 0


def _flows(worker: Process, timeout_s: float = 20.0) -> None:
    """Wait until something more has gone up and come down."""
    text = worker.text.splitlines()
    up, down = _last("acknowledged", text), _last("heard", text)
    wait_until(
        lambda: _last("acknowledged", worker.lines) > up + 5 and _last("heard", worker.lines) > down + 5, timeout_s
    )


def test_a_worker_with_keys_on_another_host_talks_under_its_key(network, keys):
    net = network()
    learner, worker = _start_learner(net, keys), _start_worker(net, keys)
    _flows(worker)
    got = json.loads(learner.wait_for_text('"got": 1,'))
    assert got["user"] == read_public_key(keys / "worker.key").decode()
    connected = json.loads(learner.wait_for_text('"event": "connected"'))
    assert connected["address"].startswith(WORKER_HOST + ":")


def test_everything_without_an_admitted_key_is_refused_with_reasons_and_the_worker_goes_on(network, keys, tmp_path):
    make_keys(tmp_path / "stranger")
    (tmp_path / "stranger" / "learner.key").write_bytes((keys / "learner.key").read_bytes())
    make_keys(tmp_path / "lost")  # a key pair of another learner
    net = network()
    learner, worker = _start_learner(net, keys), _start_worker(net, keys)
    _flows(worker)

    stranger = _start_worker(net, tmp_path / "stranger")
    assert "add" in stranger.wait_for_text("refused our key")
    public_key = read_public_key(tmp_path / "stranger" / "worker.key").decode()
    refused = json.loads(learner.wait_for_text("^{.*" + re.escape(json.dumps(public_key)[1:-1])))
    assert refused["address"] == WORKER_HOST

    lost = _start_worker(net, tmp_path / "lost")
    lost.wait_for_text("server key mismatch")
    learner.wait_for_text("another learner's public key")

    bare = _start_worker(net, None)
    bare.wait_for_text(r'"refused".*--keys DIR')

    for offset in (0, 1):
        junk = (
            f"import socket; s = socket.create_connection(('{LEARNER_HOST}', {PORT + offset}), 5); "
            r"s.sendall(b'GET / HTTP/1.1\r\n\r\n'); s.settimeout(10)"
            "\ntry:\n while s.recv(100): pass\nexcept ConnectionError: pass\nprint('closed')"
        )
        net.start(net.worker, *_python(junk)).wait_for_text("closed")
    learner.wait_for_text("no ZeroMQ handshake|broke the ZeroMQ handshake|middle of the handshake")

    _flows(worker)
    assert '"disconnected"' not in worker.text
    assert worker.text.count('"event": "connected"') == 1


@pytest.mark.parametrize("cut_s", [1.0, pytest.param(18.0, marks=pytest.mark.nightly)])
def test_traffic_resumes_after_the_link_was_cut(network, keys, cut_s):
    net = network()
    _start_learner(net, keys)
    worker = _start_worker(net, keys)
    _flows(worker)
    net.cut()
    worker.wait_for_text('"disconnected"')
    time.sleep(cut_s)
    net.mend()
    _flows(worker, 15.0)
    assert worker.text.count('"event": "connected"') >= 2


def test_a_slow_and_lossy_link_carries_everything(network, keys):
    net = network(delay_s=0.05, loss=0.01)
    _start_learner(net, keys)
    worker = _start_worker(net, keys)
    _flows(worker)
    assert '"disconnected"' not in worker.text
