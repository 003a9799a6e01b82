"""How figures are measured: subject and baseline in turn, medians, on one core, in a fresh process."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "SINGLE_THREADED",
    "alternate",
    "learner_rate",
    "learner_rows",
    "pin_to_one_core",
    "rate_of",
    "run_command",
    "run_fresh",
]

SINGLE_THREADED = {
    name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
}
"""Environment variables that keep numerical libraries to one thread; they are read when NumPy is imported."""


def alternate(subject: Callable[[], float], baseline: Callable[[], float], rounds: int = 5) -> tuple[float, float]:
    """Medians of subject and baseline, measured in turn so that both see the same machine."""
    pairs = [(subject(), baseline()) for _ in range(rounds)]
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


def pin_to_one_core() -> None:
    """Keep this process to the last of the cores it may use, where the system lets us."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def run_fresh(module: str, *arguments: str, timeout_s: float = 300.0) -> Any:
    """What ``python -m module arguments`` printed as JSON, with numerical libraries on one thread.

    Raises:
        RuntimeError: it failed; the message ends with what it wrote to stderr.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *arguments],
        env={**os.environ, **SINGLE_THREADED},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{module} {' '.join(arguments)} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def learner_rate(options: Mapping[str, object], seconds: float) -> float:
    """Env steps per second sampled and trained on by a learner started from the command line, at the end of its run.

    Args:
        options: of the command line, without dashes; how long it runs, the run directory and the seed are added.
        seconds: of the end of the run; start-up and as much before it are left out.

    Raises:
        RuntimeError: it failed.
    """
    return rate_of(learner_rows(options, seconds))


def learner_rows(options: Mapping[str, object], seconds: float, start_s: float = 5.0) -> list[dict[str, Any]]:
    """Results of the last seconds of a learner's run, but for the very last, which is made when the run is stopped.

    Args:
        options: of the learner.
        seconds: how long they go on for; the run begins to train as long before them, or earlier.
        start_s: how long the learner and its workers may take to start.

    Raises:
        RuntimeError: it failed, or trained for too short a time to tell its rate.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        added = {"min-iter-time-s": 0.5, "stop-time-s": start_s + 2 * seconds, "run-dir": run_dir, "seed": 1}
        words = [f"--{name}={value}" for name, value in {**options, **added}.items()]
        run_command([sys.executable, "-m", "aiorl.learner", *words])
        rows = [json.loads(line) for line in (run_dir / "result.jsonl").read_text().splitlines()]
    late = [row for row in rows[:-1] if row["time_total_s"] >= rows[-2]["time_total_s"] - seconds]
    if len(late) < 5 or late[-1]["time_total_s"] - late[0]["time_total_s"] < seconds / 2:
        raise RuntimeError(f"{len(late)} results in the last {seconds:g} s: too few to measure by; give start_s more")
    return late


def rate_of(rows: Sequence[Mapping[str, Any]]) -> float:
    """Env steps trained on per second from the first to the last of some results."""
    steps = rows[-1]["env_steps_trained_total"] - rows[0]["env_steps_trained_total"]
    return float(steps / (rows[-1]["time_total_s"] - rows[0]["time_total_s"]))


def run_command(command: Sequence[str], timeout_s: float = 180.0) -> str:
    """What a command printed.

    Raises:
        RuntimeError: it failed; the message ends with what it wrote to stderr.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[:4])} failed: {done.stderr[-2000:]}")
    return done.stdout
