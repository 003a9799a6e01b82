"""One subscription for each host: what a relay hands on, and what workers do without it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
import zmq
from processes import Processes, free_address, wait_until

from aiorl.keys import make_keys
from aiorl.net.transport.endpoint import EndpointLimits, EndpointTimes
from aiorl.net.transport.relay import RelayedEndpoint
from aiorl.net.transport.security import load_learner_keys, load_worker_keys
from aiorl.net.transport.zmq_learner import ZmqLearnerEndpoint
from aiorl.process.children import HOPELESS, RELAY

LIMITS = EndpointLimits(times=EndpointTimes(tick_s=0.05, retry_s=0.1, max_retry_s=0.2))
BEAT = b"beat"


def subscriptions(port: int) -> int:
    """Return the number of connections to the broadcast port of a learner in this process."""
    found = psutil.Process().net_connections("tcp")
    return sum(
        each.laddr.port == port + 1 and each.status == psutil.CONN_ESTABLISHED for each in found
    )


class Host:
    """A learner in this process, the relay of a host in its own, and endpoints of the host's
    workers.
    """

    def __init__(self, folder: Path) -> None:
        self.keys = folder / "keys"
        make_keys(self.keys)
        self.name = f"relay-{os.urandom(6).hex()}"
        self.relays: list[subprocess.Popen[bytes]] = []
        self.limits = LIMITS
        self.port = int(free_address().rpartition(":")[2])
        self.workers: list[RelayedEndpoint] = []
        self.got: list[list[list[bytes]]] = []

    async def start(self, *, with_relay: bool = True, num_workers: int = 3) -> None:
        if with_relay:
            self.start_relay()
        self.start_learner()
        for _ in range(num_workers):
            worker = RelayedEndpoint(
                self.address, self.name, keys=load_worker_keys(self.keys), limits=self.limits
            )
            got: list[list[bytes]] = []
            worker.on_broadcast = lambda frames, got=got: (
                frames == [BEAT] or got.append([*map(bytes, frames)])
            )
            worker.start()
            self.workers.append(worker)
            self.got.append(got)
        await self.until(lambda: self.num_connected == num_workers)
        if with_relay:
            await self.until(lambda: self.num_relayed == num_workers)

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def num_connected(self) -> int:
        return sum(worker.connected for worker in self.workers)

    @property
    def num_relayed(self) -> int:
        return sum(worker.connected and worker.is_relayed for worker in self.workers)

    def start_learner(self) -> None:
        self.learner = ZmqLearnerEndpoint(
            self.address, keys=load_learner_keys(self.keys), limits=LIMITS
        )
        self.learner.start()
        self.beats = asyncio.create_task(self.beat())

    async def end_learner(self) -> None:
        self.beats.cancel()
        await self.learner.close(flush_s=0.0)

    def start_relay(self, keys: Path | None = None) -> None:
        self.relays.append(
            subprocess.Popen(
                [sys.executable, "-m", "aiorl.net.transport.relay", str(keys or self.keys), ""],
                env={**os.environ, RELAY: self.name},
                stdin=subprocess.PIPE,
            )
        )

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.01)

    async def check(self, *messages: list[bytes]) -> None:
        """Broadcast messages, and check that each worker gets these and no others."""
        for got in self.got:
            got.clear()
        for message in messages:
            self.learner.broadcast(message)
            await asyncio.sleep(0)
        await self.until(lambda: all(len(got) >= len(messages) for got in self.got))
        assert all(got == list(messages) for got in self.got)

    async def beat(self) -> None:
        """Send what keeps live connections from counting as silent."""
        while True:
            self.learner.broadcast([BEAT])
            for peer in list(self.learner._messenger.port.table.by_peer):
                self.learner.send(peer, [BEAT])
            await asyncio.sleep(0.2)

    async def close(self) -> None:
        for worker in self.workers:
            await worker.close(flush_s=0.0)
        await self.end_learner()
        for relay in self.relays:
            relay.send_signal(signal.SIGCONT)
            assert relay.stdin is not None
            relay.stdin.close()  # as when its parent is gone
            relay.wait(10)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        yield Path(runtime) / "aiorl"


@pytest.fixture
def run(place: Path, tmp_path: Path) -> Callable[[Callable[[Host], Awaitable[None]]], None]:
    def run(test: Callable[[Host], Awaitable[None]]) -> None:
        async def main() -> None:
            host = Host(tmp_path)
            async with asyncio.timeout(60):
                try:
                    await test(host)
                finally:
                    await host.close()

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    return run


def test_all_workers_of_a_host_get_the_bytes_that_the_learner_sent_over_one_subscription(
    run, place
) -> None:
    async def test(host: Host) -> None:
        await host.start(num_workers=4)
        draw = random.Random(1)
        sizes = [0, 1, 15, 16, 17, 65_535, 65_536, 1_000_003]
        for _ in range(20):
            few = range(draw.randint(1, 8))  # what may wait for a subscriber
            await host.check(
                *(
                    [draw.randbytes(draw.choice(sizes)) for _ in range(draw.randint(1, 6))]
                    for _ in few
                )
            )
        await host.until(lambda: subscriptions(host.port) == 1)
        assert host.num_relayed == 4
        assert [path.name for path in place.iterdir() if path.name.startswith("relay")] == [
            host.name
        ]
        assert place.stat().st_mode & 0o777 == 0o700
        assert host.relays[0].stdin is not None
        host.relays[0].stdin.close()  # its parent is gone
        assert await asyncio.to_thread(host.relays[0].wait, 10) == 143
        assert not [path for path in place.iterdir() if path.name.startswith("relay")]

    run(test)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_workers_connect_again_when_their_relay_has_ended_or_stands_still(run, number: int) -> None:
    async def test(host: Host) -> None:
        host.limits = LIMITS._replace(times=LIMITS.times._replace(dead_after_s=3.0))
        await host.start()
        host.relays[0].send_signal(number)
        await host.until(lambda: host.num_relayed == 0)
        await host.until(lambda: host.num_connected == 3)
        await host.check([b"weights", b"1" * 100_000])
        if number == signal.SIGKILL:
            host.start_relay()
        else:
            host.relays[0].send_signal(signal.SIGCONT)
        await host.until(lambda: host.num_relayed == 3)
        await host.check([b"weights", b"2" * 100_000])
        await host.until(lambda: subscriptions(host.port) == 1)

    run(test)


def test_workers_subscribe_themselves_until_there_is_a_relay(run) -> None:
    async def test(host: Host) -> None:
        await host.start(with_relay=False)
        await host.check([b"weights"])
        assert (host.num_relayed, subscriptions(host.port)) == (0, 3)
        host.start_relay()
        await host.until(lambda: host.num_relayed == 3)
        await host.check([b"weights"])
        await host.until(lambda: subscriptions(host.port) == 1)

    run(test)


def test_relay_and_workers_follow_a_learner_that_is_started_again(run) -> None:
    async def test(host: Host) -> None:
        await host.start()
        for text in (b"second", b"third"):
            await host.end_learner()
            await host.until(lambda: host.num_connected == 0)
            host.start_learner()
            await host.until(lambda: host.num_relayed == 3)
            await host.check([text, b"weights" * 20_000])
            await host.until(lambda: subscriptions(host.port) == 1)

    run(test)


def test_a_relay_is_admitted_by_its_keys_alone(run, tmp_path) -> None:
    async def test(host: Host) -> None:
        stranger = tmp_path / "stranger"
        make_keys(stranger)
        (stranger / "learner.key").write_bytes((host.keys / "learner.key").read_bytes())
        host.start_relay(stranger)
        await host.start(with_relay=False)
        await asyncio.sleep(0.5)
        assert host.num_relayed == 0
        (host.keys / "admitted" / "stranger.key").write_bytes(
            (stranger / "worker.key").read_bytes()
        )
        await host.until(lambda: host.num_relayed == 3)
        await host.check([b"weights"])
        host.start_relay(tmp_path)  # without keys
        assert await asyncio.to_thread(host.relays[-1].wait, 10) == HOPELESS

    run(test)


def test_junk_sent_to_a_relay_changes_nothing(run, place) -> None:
    async def test(host: Host) -> None:
        await host.start()
        with zmq.Context() as context, context.socket(zmq.XSUB) as junk:
            junk.linger = 0
            junk.connect(f"ipc://{place / host.name}")
            for topic in (b"", b"\xff" * 40, b"tcp://x:70000 ", b"ipc:///tmp/x ", b"a" * 5000):
                junk.send(b"\x01" + topic)
            for port in range(40):
                junk.send(b"\x01tcp://127.0.0.1:%d " % (1000 + port))
            await asyncio.sleep(0.3)
        await host.check([b"weights"])
        assert (host.num_relayed, host.relays[0].poll()) == (3, None)

    run(test)


@pytest.fixture
def processes(tmp_path: Path, place: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path)
    yield processes
    processes.end()


@pytest.mark.slow
def test_training_continues_while_relay_and_learner_are_killed(
    processes: Processes, place: Path, tmp_path: Path
) -> None:
    keys, address = tmp_path / "keys", free_address()
    port = int(address.rpartition(":")[2])
    make_keys(keys)
    options = (f"--bind={address}", f"--keys={keys}", "--num-workers=0", "--min-iter-time-s=0.2")
    options += ("--checkpoint-interval-s=1",)
    learner = processes.learner(*options)
    host = processes.worker(address, f"--keys={keys}", "--num-workers=2")

    def relays() -> list[psutil.Process]:
        children = psutil.Process(host.pid).children()
        return [child for child in children if "aiorl.net.transport.relay" in child.cmdline()]

    def connections() -> list[Any]:
        mine = psutil.Process(learner.pid).net_connections("tcp")
        return [
            each
            for each in mine
            if each.laddr.port == port + 1 and each.status == psutil.CONN_ESTABLISHED
        ]

    first = learner.wait_for_result(lambda result: result["num_healthy_workers"] == 2)
    wait_until(lambda: len(connections()) == 1)
    (relay,) = relays()
    relay.send_signal(signal.SIGSTOP)
    # on-policy
    first = learner.wait_for_result(
        lambda result: result["updates_total"] > first["updates_total"] + 3
    )
    relay.kill()
    line = host.wait_for("relay ended with status -9")
    host.wait_for("weights come through the relay", after=line)
    later = learner.wait_for_result(
        lambda result: result["updates_total"] > first["updates_total"] + 5
    )
    assert (later["num_healthy_workers"], later["ledger"]["lost"]) == (2, {})
    wait_until(lambda: len(connections()) == 1)
    learner.send(signal.SIGKILL)
    learner.wait()
    learner = processes.learner(resume=True)
    learner.wait_for_result(lambda result: result["updates_total"] > later["updates_total"] + 5)
    wait_until(lambda: len(connections()) == 1)
    (relay,) = relays()
    host.send(signal.SIGTERM)
    assert host.wait() == 143
    relay.wait(10)
    assert not list(place.glob("relay*"))
