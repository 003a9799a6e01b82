"""Measurement of figures: subject and baseline in turn, medians, on one core, in a fresh
process.
"""

from __future__ import annotations

import contextlib
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
    "middle_of",
    "pin_to_one_core",
    "rate_of_command",
    "rate_when_warm",
    "run_command",
    "run_fresh",
]

SINGLE_THREADED = {
    name: "1"
    for name in (
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
    )
}
"""Environment variables that limit numerical libraries to one thread; they are read when NumPy is
imported."""

_MIN_RESULTS = 5


def alternate(
    subject: Callable[[], float], baseline: Callable[[], float], rounds: int = 5
) -> tuple[float, float]:
    """Measure subject and baseline in turn, so that both see the same machine.

    Returns: the baseline's median times the median ratio of the rounds, and the baseline's median.
    """
    return middle_of([(subject(), baseline()) for _ in range(rounds)])


def middle_of(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return value and baseline of rounds, as `alternate` does.

    Args:
        pairs: value and baseline of each round.
    """
    middle = statistics.median(pair[1] for pair in pairs)
    return middle * statistics.median(pair[0] / pair[1] for pair in pairs), middle


def pin_to_one_core() -> None:
    """Pin this process to the last of its cores, if the system allows it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def exit_on_sigterm() -> None:
    """Make SIGTERM unwind the process, so that it cleans up and ends the command that it waits
    for.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def run_fresh(module: str, *arguments: str, timeout_s: float = 300.0) -> Any:
    """Run ``python -m module arguments`` with single-threaded numerical libraries; return the JSON
    that it prints.

    Raises:
        RuntimeError: it failed; the message ends with its stderr.
    """
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    return json.loads(run_command(command, timeout_s, env={**os.environ, **SINGLE_THREADED}))


def learner_rate(options: Mapping[str, object], seconds: float) -> float:
    """Run a learner from the command line; return env steps per second, sampled and trained on,
    once it is warm.

    Args:
        options: command-line options without dashes, None for one without a value; this function
            adds the run directory and the seed.
        seconds: measured time. Everything up to the first update is left out, however long the
            start takes, and so is the same time after it.

    Raises:
        RuntimeError: it failed, or gave too few results.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        # Results depend on time alone, however few env steps an iteration has.
        added = {
            "min-iter-time-s": 0.5,
            "timesteps-per-iteration": 0,
            "run-dir": run_dir,
            "seed": 1,
        }
        words = [
            f"--{name}" + ("" if value is None else f"={value}")
            for name, value in {**options, **added}.items()
        ]
        return rate_of_command(
            [sys.executable, "-m", "aiorl.learner", *words], run_dir / "result.jsonl", seconds
        )


def rate_of_command(
    command: Sequence[str], results: Path, seconds: float, timeout_s: float = 180.0
) -> float:
    """Run a learner until its results tell its rate, then stop it by SIGINT; see `learner_rate`.

    Args:
        command: argument vector of the learner, which runs until it is stopped.
        results: file to which it adds a line of JSON for each result.
        seconds: measured time.
        timeout_s: time after which the results must suffice.

    Raises:
        RuntimeError: it failed, or gave too few results.
    """
    until = time.monotonic() + timeout_s
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen(command, stdout=output, stderr=output) as learner,
    ):
        try:
            rate = None
            while rate is None:
                has_ended = learner.poll() is not None
                rows = _read_rows(results)
                rate = rate_when_warm(rows, seconds)
                if rate is None and (has_ended or time.monotonic() > until):
                    output.seek(0)
                    text = output.read()[-2000:].decode(errors="replace")
                    raise RuntimeError(
                        f"{len(rows)} results are too few to measure a rate over {seconds:g} s:"
                        f" {text}"
                    )
                time.sleep(0.1)
            learner.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                learner.wait(30)
            return rate
        finally:
            learner.kill()


def rate_when_warm(rows: Sequence[Mapping[str, float]], seconds: float) -> float | None:
    """Return the rate of the last results, or None while there are too few.

    The measured time begins ``seconds`` after the first result with an update and has that length
    at least.
    """
    trained = [row for row in rows if row["env_steps_trained_total"] > 0]
    if not trained:
        return None
    warm = [row for row in trained if row["time_total_s"] >= trained[0]["time_total_s"] + seconds]
    if len(warm) < _MIN_RESULTS:
        return None
    measured_s = warm[-1]["time_total_s"] - warm[0]["time_total_s"]
    if measured_s < seconds:
        return None
    return (warm[-1]["env_steps_trained_total"] - warm[0]["env_steps_trained_total"]) / measured_s


def _read_rows(path: Path) -> list[dict[str, float]]:
    """Return the results so far; the line that is being written is left out."""
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def command_seconds(command: Sequence[str]) -> float:
    """Return how long a command takes from start to end.

    Raises:
        RuntimeError: it failed.
    """
    began = time.monotonic()
    run_command(command)
    return time.monotonic() - began


def run_command(
    command: Sequence[str], timeout_s: float = 180.0, env: Mapping[str, str] | None = None
) -> str:
    """Run a command and return its output.

    Raises:
        RuntimeError: it failed; the message ends with its stderr.
    """
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env=env, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)[:200]} failed: {done.stderr[-2000:]}")
    return done.stdout
