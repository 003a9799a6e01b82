"""`python -m aiorl.worker` as processes: the parent that restarts workers, and the exit
statuses.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from in_process import learner_over_tcp, until

HEAVY = re.compile("numpy|zmq|onnxruntime|pydantic|_ssl")
NOBODY = "--connect=tcp://127.0.0.1:9"


def run(*words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "aiorl.worker", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ((), "--connect"),
        (("--conect=tcp://127.0.0.1:9",), "'--connect'"),
        (("--connect=127.0.0.1",), "tcp://HOST:PORT"),
        ((NOBODY, "--num-workers=x"), "--num-workers"),
    ],
)
def test_wrong_usage_is_reported_once_and_ends_with_2(words: tuple[str, ...], value: str) -> None:
    status, text = run(*words)
    assert status == 2
    assert value in text
    assert text.count("`python -m aiorl.worker --help`") == 1


def test_a_failure_that_would_repeat_is_reported_once_and_ends_with_2(tmp_path: Path) -> None:
    status, text = run(NOBODY, f"--keys={tmp_path / 'nowhere'}")
    assert status == 2
    assert len(text.splitlines()) == 1
    assert str(tmp_path / "nowhere") in text


def test_a_worker_can_open_as_many_files_as_its_user_allows() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    command = [sys.executable, "-m", "aiorl.worker", NOBODY, "--num-workers=1"]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard)),
    ) as parent:
        assert parent.stderr is not None
        assert b"tcp://127.0.0.1:9" in parent.stderr.readline()
        assert resource.prlimit(child_of(parent.pid), resource.RLIMIT_NOFILE) == (hard, hard)
        parent.terminate()


async def test_a_worker_is_restarted_whatever_ends_it_and_its_parent_is_small() -> None:
    both = learner_over_tcp()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "aiorl.worker",
        "--connect",
        both.source.address,
        stderr=subprocess.PIPE,
    )
    await both.updates_done(2, 60)
    first = child_of(process.pid)
    parent = psutil.Process(process.pid)
    assert not [loaded.path for loaded in parent.memory_maps() if HEAVY.search(loaded.path)]
    assert parent.memory_info().rss < 20e6
    os.kill(first, signal.SIGABRT)
    await until(
        lambda: {worker.pid for worker in both.source.session.workers} not in (set(), {first})
    )
    await until(lambda: first not in [worker.pid for worker in both.source.session.workers])
    await both.updates_done(len(both.updates) + 2, 60)
    second = child_of(process.pid)
    assert second != first
    await both.close()
    assert process.stderr is not None
    text = (await process.stderr.read()).decode()
    assert await process.wait() == 0  # the run is over
    assert not psutil.pid_exists(second)
    assert re.search(r"-6 .*SIGABRT.* 1 .*0\.2 s", text)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
async def test_when_the_parent_is_ended_its_worker_says_goodbye(number: signal.Signals) -> None:
    both = learner_over_tcp()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "aiorl.worker",
        "--connect",
        both.source.address,
        stderr=subprocess.DEVNULL,
    )
    await both.updates_done(1, 60)
    child = child_of(process.pid)
    process.send_signal(number)
    await until(lambda: not both.source.session.slots)
    status = await process.wait()
    await until(lambda: not psutil.pid_exists(child))
    await both.close()
    _, lost, *_ = both.events
    assert status in (143, -signal.SIGKILL)
    assert ("SIGTERM" in lost) == (status == 143)


def child_of(pid: int) -> int:
    (child,) = psutil.Process(pid).children()
    return child.pid
