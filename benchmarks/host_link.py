"""Sixteen workers of one host behind a link of 1 Gbit/s: IMPALA with the Nature CNN, whose weights
have 6.8 MB.

The link joins two network namespaces, which needs root and iproute2. Workers with a parent of their
own each download all weights themselves, as far as the link lets them; those of one parent share
its relay's download. Steps take so long that environments, not cores, bound the rate without a
limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from aiorl.keys import make_keys
from benchmarks.measure import run_command
from benchmarks.result import Figure

__all__ = ["SlowFrames", "host_link_nature"]

NUM_WORKERS = 16
STEP_S = 0.200
ROUNDS = 3
SECONDS = 15.0
RATE = "1gbit"
TARGET_RATIO = 0.9
TARGET_MB = 7.5
_LEARNER, _WORKER, _PORT = "10.79.31.1", "10.79.31.2", 5557
_START_S = 120.0


class SlowFrames(gymnasium.Env[NDArray[np.uint8], np.int64]):
    """Stacks of four frames, a step each 200 ms, so that cores stay idle."""

    observation_space = gymnasium.spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = gymnasium.spaces.Discrete(6)

    def __init__(self) -> None:
        self._frames = np.zeros((84, 84, 4), np.uint8)
        self._num_steps = 0

    def reset(self, **_: Any) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Begin an episode of 200 steps."""
        self._num_steps = 0
        return self._frames, {}

    def step(self, action: np.int64) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        """Return the same frames, 200 ms later."""
        time.sleep(STEP_S)
        self._num_steps += 1
        return self._frames, float(action == 0), self._num_steps == 200, False, {}


def host_link_nature() -> list[Figure]:
    """Measure the rate of training over the link, and the bytes that leave the learner for each
    update.
    """
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("tc"):
        return [
            Figure.unmeasured("host link", "network namespaces need root and iproute2 (ip, tc)")
        ]
    rounds = [
        [_measure(rate, parents) for rate, parents in ((RATE, 1), (None, 1), (RATE, NUM_WORKERS))]
        for _ in range(ROUNDS)
    ]
    shared, free, apart = ([tuple(each) for each in column] for column in zip(*rounds, strict=True))
    rate = statistics.median(one[0] / other[0] for one, other in zip(shared, free, strict=True))
    without = statistics.median(one[0] / other[0] for one, other in zip(apart, free, strict=True))
    baseline = statistics.median(each[0] for each in free)
    sent, sent_apart = (statistics.median(each[1] for each in column) for column in (shared, apart))
    name = f"host link/{NUM_WORKERS} workers, 1 Gbit/s"
    return [
        Figure(
            f"{name}, relay", rate * baseline, "env steps/s", baseline, target_ratio=TARGET_RATIO
        ),
        Figure(f"{name}, no relay", without * baseline, "env steps/s", baseline),
        Figure(
            f"{name}, sent", sent, "MB/update", sent_apart, target=TARGET_MB, smaller_is_better=True
        ),
    ]


def _measure(rate: str | None, parents: int) -> tuple[float, float]:
    """Return env steps trained per second, and megabytes that leave the learner for each update."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        keys, run_dir = folder / "keys", folder / "run"
        make_keys(keys)
        ends = stack.enter_context(_link(rate))
        options: dict[str, object] = {
            "env": "benchmarks.host_link:SlowFrames",
            "algo": "impala",
            "bind": f"tcp://0.0.0.0:{_PORT}",
            "keys": keys,
            "num-workers": 0,
            "run-dir": run_dir,
            "seed": 1,
            "num-envs-per-worker": 1,
            "rollout-fragment-length": 4,
            "train-batch-size": 32,
            "model.vf-share-layers": "true",
            "min-iter-time-s": 0.5,
            "timesteps-per-iteration": 0,
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        _start(stack, ends[0], "aiorl.learner", *words)
        for _ in range(parents):
            each = f"--num-workers={NUM_WORKERS // parents}"
            _start(
                stack,
                ends[1],
                "aiorl.worker",
                f"--connect=tcp://{_LEARNER}:{_PORT}",
                f"--keys={keys}",
                each,
            )
        _wait_for_workers(run_dir / "result.jsonl")
        before, bytes_before = _newest(run_dir / "result.jsonl"), _bytes_sent(ends[0])
        time.sleep(SECONDS)
        after, bytes_after = _newest(run_dir / "result.jsonl"), _bytes_sent(ends[0])
    updates = after["updates_total"] - before["updates_total"]
    steps = after["env_steps_trained_total"] - before["env_steps_trained_total"]
    return steps / (after["time_total_s"] - before["time_total_s"]), (
        bytes_after - bytes_before
    ) / updates / 1e6


def _wait_for_workers(results: Path) -> None:
    until = time.monotonic() + _START_S
    while not results.exists() or _newest(results).get("num_healthy_workers", 0) < NUM_WORKERS:
        if time.monotonic() > until:
            raise RuntimeError(f"{NUM_WORKERS} workers had not joined after {_START_S:g} s")
        time.sleep(0.2)
    time.sleep(SECONDS / 4)


def _newest(results: Path) -> dict[str, Any]:
    lines = [line for line in results.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return dict(json.loads(lines[-1])) if lines else {}


@contextlib.contextmanager
def _link(rate: str | None) -> Iterator[tuple[str, str]]:
    """Make two namespaces, called after their devices; the first one can send at the rate."""
    tag = secrets.token_hex(3)
    ends = (f"hl{tag}l", f"hl{tag}w")
    try:
        for end in ends:
            _run("ip", "netns", "add", end)
        _run(
            "ip",
            "link",
            "add",
            ends[0],
            "netns",
            ends[0],
            "type",
            "veth",
            "peer",
            "name",
            ends[1],
            "netns",
            ends[1],
        )
        for end, host in zip(ends, (_LEARNER, _WORKER), strict=True):
            _run("ip", "-n", end, "addr", "add", f"{host}/24", "dev", end)
            _run("ip", "-n", end, "link", "set", "lo", "up")
            _run("ip", "-n", end, "link", "set", end, "up")
        if rate is not None:
            tbf = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
            _run("ip", "netns", "exec", ends[0], "tc", "qdisc", "add", "dev", ends[0], "root", *tbf)
        yield ends
    finally:
        for end in ends:
            subprocess.run(("ip", "netns", "del", end), capture_output=True, check=False)


def _run(*command: str) -> str:
    return run_command(command, 20.0)


def _start(stack: contextlib.ExitStack, end: str, *words: str) -> None:
    command = ["ip", "netns", "exec", end, sys.executable, "-W", "ignore", "-m", *words]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)

    def stop() -> None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20.0)
        process.kill()
        process.wait()

    stack.callback(stop)


def _bytes_sent(end: str) -> int:
    found = json.loads(_run("ip", "-n", end, "-s", "-j", "link", "show", end))
    return int(found[0]["stats64"]["tx"]["bytes"])
