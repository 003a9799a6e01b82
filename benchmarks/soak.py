"""Long run with everything on: two recurrent policies, filters, compression, environments that
crash.

    python -m benchmarks.soak --minutes 30

A learner with a local worker trains two LSTM policies in multi-agent environments. Each environment
has a separate process, which sometimes ends without a word. The soak watches the memory of learner
and worker, the ledger in every result, and the log, in which no warning may occur more than once a
minute.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

from benchmarks.chaos.processes import memory_of
from benchmarks.general import MultiAgentCartPole
from benchmarks.ledger import ledger_gap

__all__ = ["CrashingCartPoles", "SoakReport", "policy_of", "run_soak"]

NUM_AGENTS = 4
NUM_ENVS = 4
MB_PER_10_MINUTES = 1.0
_ROOT = Path(__file__).parents[1]  # the directory from which this module can be imported
_SAMPLE_EVERY_S = 2.0
_START_S = 30.0
_END_S = 60.0


class CrashingCartPoles(MultiAgentCartPole):
    """CartPoles for several agents in a process that suddenly ends after a random number of
    steps.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Make one copy.

        Args:
            config: ``mean_steps``: mean number of env steps until the process ends.
        """
        super().__init__(NUM_AGENTS)
        # Unseeded, so that a replacement process lives for another number of steps.
        self._left = int(np.random.default_rng().exponential(config["mean_steps"])) + 1

    def step(self, action_dict: dict[Any, Any]) -> tuple[dict[Any, Any], ...]:
        """Step all agents, or end the process."""
        self._left -= 1
        if self._left <= 0:
            os._exit(3)
        return super().step(action_dict)


def policy_of(agent_id: Any) -> str:
    """Return an agent's policy: 0 and 2 share one, 1 and 3 the other."""
    return "even" if agent_id % 2 == 0 else "odd"


@dataclass(slots=True)
class SoakReport:
    """Observations of a soak.

    Attributes:
        status: exit status of the learner.
        results: number of results.
        env_steps: total of env steps sampled.
        restarts: restarts of environments, according to the log.
        unbalanced: results with an unbalanced ledger.
        repeated: warnings that occur more than once within a minute, without their digits.
        memory: process -> seconds and private memory in bytes, one row per sample.
    """

    status: int
    results: int
    env_steps: int
    restarts: int
    unbalanced: int
    repeated: list[str]
    memory: dict[str, list[tuple[float, float]]] = field(repr=False)

    def slope(self, process: str, warm_up_s: float) -> float:
        """Return the growth of a process's memory after warm-up in MB per 10 minutes: median slope
        (Theil-Sen).
        """
        rows = np.array([row for row in self.memory[process] if row[0] >= warm_up_s])
        first, second = np.triu_indices(len(rows), k=1)
        slopes = (rows[second, 1] - rows[first, 1]) / (rows[second, 0] - rows[first, 0])
        return float(np.median(slopes)) * 600.0 / 1e6


def run_soak(seconds: float, folder: Path, *, mean_steps: float) -> SoakReport:
    """Train for the given time and watch.

    Args:
        seconds: duration of training.
        folder: directory for the run directory, the learner's output, and memory.json with all
            samples of each process.
        mean_steps: mean number of env steps until an environment's process ends.
    """
    config = folder / "soak.yaml"
    config.write_text(yaml.safe_dump(_settings(mean_steps)), encoding="utf-8")
    run_dir = folder / "run"
    command = [
        sys.executable,
        "-m",
        "aiorl.learner",
        "--config",
        str(config),
        "--run-dir",
        str(run_dir),
        "--stop-time-s",
        str(seconds),
    ]
    with (folder / "output.txt").open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=_ROOT, start_new_session=True
        )
        try:
            memory = _watch(process, time.monotonic() + seconds + _START_S + _END_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
    (folder / "memory.json").write_text(json.dumps(memory), encoding="utf-8")
    lines = (run_dir / "result.jsonl").read_text(encoding="utf-8").splitlines()
    results = [json.loads(line) for line in lines]
    logs = [
        path.read_text(encoding="utf-8", errors="replace")
        for path in sorted(run_dir.rglob("*.txt"))
    ]
    return SoakReport(
        status=status,
        results=len(results),
        env_steps=int(results[-1]["timesteps_total"]) if results else 0,
        restarts=sum(log.count("restarting an environment") for log in logs),
        unbalanced=sum(bool(ledger_gap(result["ledger"])) for result in results),
        repeated=[text for log in logs for text in repeated_warnings(log)],
        memory=memory,
    )


def _settings(mean_steps: float) -> dict[str, Any]:
    policy = {"even": None, "odd": None}
    return {
        "env": "benchmarks.soak:CrashingCartPoles",
        "env_config": {"mean_steps": mean_steps},
        "algo": "ppo",
        "num_workers": 1,
        "num_envs_per_worker": NUM_ENVS,
        "remote_worker_envs": True,
        "max_env_restarts_per_hour": 10_000,
        "rollout_fragment_length": 32,
        "train_batch_size": 1024,
        "sgd_minibatch_size": 256,
        "num_sgd_iter": 2,
        "observation_filter": "MeanStdFilter",
        "model": {"fcnet_hiddens": [32], "use_lstm": True, "lstm_cell_size": 32},
        "multiagent": {"policies": policy, "policy_mapping_fn": "benchmarks.soak:policy_of"},
    }


def _watch(process: subprocess.Popen[bytes], until: float) -> dict[str, list[tuple[float, float]]]:
    """Sample the private memory of the learner and its worker until the learner ends."""
    memory: dict[str, list[tuple[float, float]]] = {"learner": [], "worker": []}
    learner = psutil.Process(process.pid)
    began = time.monotonic()
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(psutil.Error):  # it ended between two samples
            workers = [child for child in learner.children() if "aiorl.worker" in child.cmdline()]
            for role, found in [("learner", learner), *(("worker", worker) for worker in workers)]:
                used = memory_of(found)
                if used is not None:
                    memory[role].append((time.monotonic() - began, float(used)))
        try:
            process.wait(_SAMPLE_EVERY_S)
        except subprocess.TimeoutExpired:
            continue
    return memory


def repeated_warnings(log: str, period_s: float = 60.0) -> list[str]:
    """Return the warnings of one process that recur within the period, without their digits, each
    once.

    Args:
        log: lines that begin with the time of day, then a level or its first letter.
        period_s: shortest time until a warning may recur.
    """
    pattern = re.compile(
        r"^(?:\d{4}-\d\d-\d\d )?(\d\d):(\d\d):(\d\d)\S* (?:W|E|WARNING|ERROR) (.*)"
    )
    seen: dict[str, float] = {}
    repeated: dict[str, None] = {}
    for line in log.splitlines():
        found = pattern.match(line)
        if found is None:
            continue
        hours, minutes, seconds = map(int, found.groups()[:3])
        at = 3600.0 * hours + 60.0 * minutes + seconds
        text = re.sub(r"\d+", "#", found[4])
        # The times are whole seconds and restart at midnight.
        if (at - seen.get(text, -np.inf)) % 86_400.0 < period_s - 1.0:
            repeated[text] = None
        seen[text] = at
    return list(repeated)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a soak; the exit status is 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="duration of training")
    parser.add_argument(
        "--mean-steps",
        type=float,
        default=20_000.0,
        help="mean env steps between crashes of one copy",
    )
    parser.add_argument(
        "--folder", type=Path, help="keep the run in this directory; default: delete it"
    )
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        report = run_soak(
            60.0 * args.minutes, args.folder or Path(folder), mean_steps=args.mean_steps
        )
    warm_up_s = 20.0 * args.minutes  # the first third
    slopes = {name: report.slope(name, warm_up_s) for name in report.memory}
    lines = [
        report.status == 0,
        f"learner's exit status {report.status}",
        report.env_steps > 0,
        f"{report.env_steps:,} env steps in {report.results} results",
        report.restarts > 0,
        f"{report.restarts} environments restarted",
        report.unbalanced == 0,
        f"{report.unbalanced} results with an unbalanced ledger",
        not report.repeated,
        f"warnings that recur within a minute: {report.repeated or 'none'}",
    ]
    for name, slope in slopes.items():
        last = report.memory[name][-1][1] / 1e6
        lines += [
            slope < MB_PER_10_MINUTES,
            f"{name}: {last:.1f} MB, {slope:+.2f} MB per 10 minutes (< 1)",
        ]
    ok = True
    for holds, text in zip(lines[::2], lines[1::2], strict=True):
        print("ok " if holds else "NO ", text)
        ok = ok and bool(holds)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
