"""Time from a process's start to its first work and to a solved CartPole, and a worker's memory.

The baseline of a learner's start is the unavoidable part: Python imports TensorFlow and compiles
one function. That of a worker's start is a Python that imports the packages a worker needs.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.measure import alternate, command_seconds
from benchmarks.result import Figure

__all__ = ["startup_learner", "startup_solve_cartpole", "startup_worker", "startup_worker_memory"]

ROUNDS = 5
_BARE = (
    "import tensorflow as tf; tf.function(lambda x: tf.reduce_sum(tf.tanh(x @ x)),"
    " jit_compile=True)(tf.ones((64, 64)))"
)


_BARE_WORKER = (
    "import gymnasium, numpy, onnxruntime, uvloop, zmq.asyncio; gymnasium.make('CartPole-v1')"
)


def startup_learner() -> list[Figure]:
    """Measure process start to the first update; and again after an earlier run has compiled it."""
    with tempfile.TemporaryDirectory() as folder:
        cache, seeds = f"{folder}/cache", itertools.count()
        _to_first_update(cache, next(seeds))

        def figure(name: str, cache: str, ratio: float) -> Figure:
            value, baseline = alternate(
                lambda: _to_first_update(cache, next(seeds)), _bare_start, ROUNDS
            )
            name = f"startup/learner to first update{name}"
            return Figure(name, value, "s", baseline, target_ratio=ratio, smaller_is_better=True)

        return [figure("", "off", 2.0), figure(" again", cache, 1.6)]


def _bare_start() -> float:
    return command_seconds([sys.executable, "-c", _BARE])


def _to_first_update(cache: str, seed: int) -> float:
    with _learner("--stop-timesteps=1", f"--seed={seed}", f"--compilation-cache={cache}") as (
        process,
        run_dir,
    ):
        began = time.monotonic()
        results = run_dir / "result.jsonl"
        while not (results.exists() and results.stat().st_size) and process.poll() is None:
            time.sleep(0.01)
        return time.monotonic() - began


def startup_solve_cartpole() -> list[Figure]:
    """Measure process start to a mean return of 475 over the last 100 episodes, with five seeds."""
    seconds = []
    for seed in range(1, 6):
        with _learner("--stop-return=475", f"--seed={seed}", "--stop-time-s=60") as (process, _):
            began = time.monotonic()
            assert process.stdout is not None
            solved = any("Solved" in line for line in process.stdout)
            seconds.append(time.monotonic() - began if solved else 999.0)
    bare = statistics.median(_bare_start() for _ in range(ROUNDS))
    return [
        Figure(
            f"startup/CartPole to 475, {which}",
            value,
            "s",
            bare,
            target_ratio=ratio,
            smaller_is_better=True,
        )
        for which, value, ratio in (
            ("median", statistics.median(seconds), 4.0),
            ("slowest", max(seconds), 8.0),
        )
    ]


def startup_worker() -> list[Figure]:
    """Measure process start to the first fragment sent to a waiting learner."""
    seconds = []
    with _learner("--num-workers=0", "--bind=tcp://127.0.0.1:20557") as (_, run_dir):
        address = _address(run_dir)
        _wait_for_log(run_dir, "is compiled")
        for _ in range(ROUNDS):
            with _worker(address) as worker:
                assert worker.stderr is not None
                for line in worker.stderr:
                    found = re.search(r"first fragment is sent, ([\d.]+) s", line)
                    if found:
                        seconds.append(float(found[1]))
                        break
    median = statistics.median(seconds)
    bare = statistics.median(
        command_seconds([sys.executable, "-c", _BARE_WORKER]) for _ in range(ROUNDS)
    )
    return [
        Figure(
            "startup/worker to first fragment",
            median,
            "s",
            bare,
            target_ratio=2.5,
            smaller_is_better=True,
        )
    ]


def startup_worker_memory() -> list[Figure]:
    """Measure the proportional set size of a worker that samples CartPole."""
    with _learner("--num-workers=1", "--stop-time-s=60") as (process, run_dir):
        results = run_dir / "result.jsonl"
        while (
            not (results.exists() and results.read_text().count("\n") >= 5)
            and process.poll() is None
        ):
            time.sleep(0.1)
        worker = psutil.Process(process.pid).children()[0]
        megabytes = worker.memory_full_info().pss / 2**20
    return [
        Figure("startup/worker memory (PSS)", megabytes, "MiB", target=75.0, smaller_is_better=True)
    ]


@contextmanager
def _learner(*options: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [
            sys.executable,
            "-m",
            "aiorl.learner",
            "--env=CartPole-v1",
            f"--run-dir={run_dir}",
            *options,
        ]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            yield process, run_dir
        finally:
            _end(process)


@contextmanager
def _worker(address: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "aiorl.worker", f"--connect={address}"]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()


def _address(run_dir: Path) -> str:
    _wait_until((run_dir / "run.json").exists)
    return str(json.loads((run_dir / "run.json").read_text())["address"])


def _wait_for_log(run_dir: Path, text: str) -> None:
    _wait_until(lambda: text in (run_dir / "log.txt").read_text())


def _wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the learner was not ready within {timeout_s:g} s")
        time.sleep(0.02)
