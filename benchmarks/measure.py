"""Measurement of figures: subject and baseline in turn, medians, on one core, in a fresh process."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "SINGLE_THREADED",
    "alternate",
    "command_seconds",
    "exit_on_sigterm",
    "learner_rate",
    "pin_to_one_core",
    "run_command",
    "run_fresh",
]

SINGLE_THREADED = {
    name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
}
"""Environment variables that limit numerical libraries to one thread; they are read when NumPy is imported."""


def alternate(subject: Callable[[], float], baseline: Callable[[], float], rounds: int = 5) -> tuple[float, float]:
    """Measure subject and baseline in turn, so that both see the same machine.

    Returns: the baseline's median times the median ratio of the rounds, and the baseline's median.
    """
    pairs = [(subject(), baseline()) for _ in range(rounds)]
    middle = statistics.median(pair[1] for pair in pairs)
    return middle * statistics.median(pair[0] / pair[1] for pair in pairs), middle


def pin_to_one_core() -> None:
    """Pin this process to the last of its cores, if the system allows it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def exit_on_sigterm() -> None:
    """Make SIGTERM unwind the process, so that it cleans up and ends the command that it waits for."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def run_fresh(module: str, *arguments: str, timeout_s: float = 300.0) -> Any:
    """Run ``python -m module arguments`` with single-threaded numerical libraries; return the JSON that it prints.

    Raises:
        RuntimeError: it failed; the message ends with its stderr.
    """
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    return json.loads(run_command(command, timeout_s, env={**os.environ, **SINGLE_THREADED}))


def learner_rate(options: Mapping[str, object], seconds: float) -> float:
    """Run a learner from the command line; return env steps per second, sampled and trained on, at the end of its run.

    Args:
        options: command-line options without dashes, None for one without a value; this function adds the duration, the
            run directory and the seed.
        seconds: measured time at the end of the run; start-up and the same time before are left out.

    Raises:
        RuntimeError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        # Results depend on time alone, however few env steps an iteration has.
        often = {"min-iter-time-s": 0.5, "timesteps-per-iteration": 0}
        added = {**often, "stop-time-s": 5.0 + 2 * seconds, "run-dir": run_dir, "seed": 1}
        words = [f"--{name}" + ("" if value is None else f"={value}") for name, value in {**options, **added}.items()]
        run_command([sys.executable, "-m", "aiorl.learner", *words])
        rows = [json.loads(line) for line in (run_dir / "result.jsonl").read_text().splitlines()]
    # The very last result is left out, because stopping the run makes it.
    late = [row for row in rows[:-1] if row["time_total_s"] >= rows[-2]["time_total_s"] - seconds]
    if len(late) < 5 or late[-1]["time_total_s"] - late[0]["time_total_s"] < seconds / 2:
        raise RuntimeError(f"only {len(late)} results in the last {seconds:g} s: too few to measure a rate")
    steps = late[-1]["env_steps_trained_total"] - late[0]["env_steps_trained_total"]
    return float(steps / (late[-1]["time_total_s"] - late[0]["time_total_s"]))


def command_seconds(command: Sequence[str]) -> float:
    """Return how long a command takes from start to end.

    Raises:
        RuntimeError: it failed.
    """
    began = time.monotonic()
    run_command(command)
    return time.monotonic() - began


def run_command(command: Sequence[str], timeout_s: float = 180.0, env: Mapping[str, str] | None = None) -> str:
    """Run a command and return its output.

    Raises:
        RuntimeError: it failed; the message ends with its stderr.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)[:200]} failed: {done.stderr[-2000:]}")
    return done.stdout
