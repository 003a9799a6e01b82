"""Exit statuses that engines act on, and workers that follow a learner to another address."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from netns import LEARNER_HOST, NEEDS_NAMESPACES, WORKER_HOST, Network, network
from processes import CARTPOLE, SMALL, Processes, Started, free_address, wait_until

from aiorl.acting.checkpoint import find_checkpoint
from aiorl.config.addresses import Addresses, dialable, places_of
from aiorl.errors import ConfigError
from aiorl.keys import make_keys
from aiorl.net.transport.endpoint import EndpointLimits, EndpointTimes, Event, EventKind
from aiorl.net.transport.zmq_learner import ZmqLearnerEndpoint
from aiorl.net.transport.zmq_worker import ZmqWorkerEndpoint

__all__ = ["network"]

# not that of other tests: the sockets for workers of the same user have names that all namespaces
# share
PORT = 5571
FAST = EndpointLimits(times=EndpointTimes(tick_s=0.05, retry_s=0.1, max_retry_s=0.2))


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.end()


@pytest.mark.slow
def test_after_sigterm_workers_elsewhere_follow_the_resumed_learner_and_end_with_its_goodbye(
    processes: Processes,
) -> None:
    learner = processes.learner(
        "--num-workers=1", f"--bind={free_address()}", "--min-iter-time-s=0.2"
    )
    worker = processes.worker(f"run:{learner.run_dir}", "--num-workers=2")
    learner.wait_for_result(lambda result: result["num_healthy_workers"] == 3)
    (killed, _) = (
        each for each in psutil.Process(worker.pid).children() if "aiorl.worker" in each.cmdline()
    )
    killed.kill()
    said = rf"on {re.escape(socket.gethostname())} failed: .*SIGKILL"
    wait_until(
        lambda: re.search(said, learner.log), what="the end of the killed process in the log"
    )
    before = learner.address
    learner.send(signal.SIGTERM)
    assert learner.wait(15) == 143, learner.text
    saved = find_checkpoint(learner.run_dir).meta["counters"]["updates"]
    assert saved == learner.results()[-1]["updates_total"]
    worker.wait_for("said goodbye")
    resumed = processes.learner(f"--bind={free_address()}", resume=True)
    resumed.wait_for_result(
        lambda result: result["updates_total"] > saved and result["num_healthy_workers"] == 3
    )
    assert resumed.address != before
    assert worker.process.poll() is None, worker.text
    resumed.send(signal.SIGINT)
    assert resumed.wait(15) == 0, resumed.text
    assert worker.wait(15) == 0, worker.text


@pytest.mark.slow
@NEEDS_NAMESPACES[0]
@NEEDS_NAMESPACES[1]
def test_workers_follow_a_learner_that_was_resumed_on_another_host(
    network: Callable[..., Network], tmp_path: Path
) -> None:
    """They were started with the join command that it printed, and with its run directory."""
    net, run_dir, keys = network(), tmp_path / "run", tmp_path / "my keys"
    make_keys(keys)
    place = (f"--bind=tcp://0.0.0.0:{PORT}", f"--keys={os.path.relpath(keys)}")
    first = net.start_learner(
        CARTPOLE, *SMALL, *place, "--num-workers=0", f"--run-dir={run_dir}", "--min-iter-time-s=0.2"
    )
    printed = first.wait_for_text("aiorl worker --connect", 60.0)
    options = shlex.split(printed.partition("aiorl worker")[2])
    assert options == ["--connect", f"tcp://{LEARNER_HOST}:{PORT}", "--keys", str(keys)]
    worker = net.start(
        net.worker, sys.executable, "-m", "aiorl.worker", *options, f"--connect=run:{run_dir}"
    )
    worker.wait_for_text("the first fragment is sent", 60.0)
    first.send(signal.SIGTERM)
    assert first.wait(20) == 143, first.text
    second = net.start(
        net.worker, sys.executable, "-m", "aiorl.learner", f"--resume={run_dir}", *place
    )
    second.wait_for("worker 1 joined", 60.0)
    assert (
        f"tcp://{WORKER_HOST}:{PORT}" in json.loads((run_dir / "run.json").read_text())["addresses"]
    )
    second.send(signal.SIGINT)
    assert second.wait(20) == 0, second.text
    assert worker.wait(15) == 0, worker.text


# Failures and logs
# --------------------------------------------------------------------------------------------------


def test_a_failure_on_another_host_is_in_the_learners_log_with_the_hosts_name(
    processes: Processes,
) -> None:
    learner = processes.learner(
        "--num-workers=0",
        f"--bind={free_address()}",
        "--env=aiorl.testing.envs:FaultyEnv",
        "--env-config={fault: reset}",
    )
    worker = processes.worker(f"run:{learner.run_dir}", "--max-worker-restarts=0")
    assert worker.wait(60) == 1, worker.text
    host = re.escape(socket.gethostname())
    wait_until(
        lambda: re.search(
            rf"worker 1 on {host} failed: .*(\n.*)+worker 1 on {host} lost: ", learner.log
        )
    )


@pytest.mark.slow
def test_worker_processes_append_to_logs_of_their_own(processes: Processes, tmp_path: Path) -> None:
    def start(number: int) -> Started:
        return processes.worker(free_address(), f"--log-dir={tmp_path}", f"--num-workers={number}")

    def counts() -> list[int]:
        return sorted(path.read_text().count("connects to") for path in tmp_path.iterdir())

    started = [start(2), start(1)]
    wait_until(lambda: counts() == [1, 1, 1])
    for each in started:
        each.send(signal.SIGTERM)
        assert each.wait(10) == 143
    start(3)
    wait_until(lambda: counts() == [2, 2, 2])


# Addresses
# --------------------------------------------------------------------------------------------------


class Tried:
    """A worker's endpoint over TCP, and its events."""

    def __init__(self, *places: str) -> None:
        self.events: list[Event] = []
        self.endpoint = ZmqWorkerEndpoint(places, limits=FAST)
        self.endpoint.on_event = self.events.append

    async def reaches(self, learner: ZmqLearnerEndpoint) -> None:
        await self.until(
            lambda: self.endpoint.connected and self.endpoint.address == learner.address
        )

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.02)


def listening() -> ZmqLearnerEndpoint:
    learner = ZmqLearnerEndpoint("tcp://127.0.0.1:0", insecure=True)
    learner.start()
    return learner


async def test_a_worker_waits_for_its_file_and_follows_it_when_the_learner_is_gone(
    tmp_path: Path,
) -> None:
    file = tmp_path / "address"
    tried = Tried(f"@{file}")
    tried.endpoint.start()
    await tried.until(lambda: any(str(file) in event.reason for event in tried.events))
    first, second = listening(), listening()
    file.write_text(f"{first.address}\n")
    await tried.reaches(first)
    file.write_text(second.address)
    await first.close()
    await tried.reaches(second)
    assert [event.kind for event in tried.events].count(EventKind.CONNECTED) == 2
    await tried.endpoint.close()
    await second.close()


async def test_several_addresses_are_tried_in_turn(tmp_path: Path) -> None:
    learner = listening()
    tried = Tried("tcp://192.0.2.1:5557", free_address(), f"run:{tmp_path}", learner.address)
    tried.endpoint.start()
    await tried.reaches(learner)
    await tried.endpoint.close()
    await learner.close()


def test_the_address_that_worked_comes_first_until_it_is_no_longer_valid(tmp_path: Path) -> None:
    file = tmp_path / "address"
    a, b, c = (f"tcp://{host}:1" for host in "abc")
    file.write_text(f"{a}, {b}")
    addresses = Addresses([f"@{file}", c])
    assert [addresses.next() for _ in range(5)] == [a, b, c, a, b]
    addresses.confirm()
    assert [addresses.next() for _ in range(2)] == [b, c]
    addresses.confirm()
    file.unlink()
    assert addresses.next() == c
    assert not addresses.has_others()
    assert str(file) in addresses.problem


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"run_id": "r", "address": 3}',
        '{"run_id": "r", "address": "h"}',
        '{"run_id": "r", "address": "tcp://h:1", "addresses": ["tcp://h:1", {}]}',
        '{"run_id": "r", "address": "tcp://0.0.0.0:5557"}',
        "\xff" * 70_000,
    ],
)
def test_a_run_directory_that_names_no_address_yet_is_looked_at_again(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / "run.json").write_text(content)
    addresses = Addresses([f"run:{tmp_path}"])
    assert (addresses.next(), addresses.next()) == ("", "")
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "r", "address": "tcp://h:1"}))
    assert (addresses.next(), addresses.problem) == ("tcp://h:1", "")


def test_places_are_absolute_and_may_hold_commas(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert places_of("tcp://h:1,run:a,b,@c") == [
        "tcp://h:1",
        f"run:{tmp_path}/a,b",
        f"@{tmp_path}/c",
    ]
    for text in ("", "run:", "@", "h:1", "tcp://h:0", "tcp://h:1,h:2"):
        with pytest.raises(ConfigError):
            places_of(text)


def test_no_address_for_others_stands_for_all_interfaces() -> None:
    for bound in ("tcp://0.0.0.0:7", "tcp://*:7", "tcp://[::]:7"):
        found = dialable(bound)
        assert found
        assert all(
            address.endswith(":7") and "127.0.0.1" not in address and "0.0.0.0" not in address
            for address in found
        )
    assert dialable("tcp://10.0.0.3:7") == ["tcp://10.0.0.3:7"]
    assert dialable("tcp://0.0.0.0:7", "gate, tcp://[fd00::1]:9") == [
        "tcp://gate:7",
        "tcp://[fd00::1]:9",
    ]
    for wrong in ("", "0.0.0.0", "tcp://gate", "a b", "tcp://gate:0"):
        with pytest.raises(ConfigError) as caught:
            dialable("tcp://0.0.0.0:7", wrong)
        assert caught.value.key == "advertise"
