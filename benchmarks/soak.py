"""A long run with everything on: two recurrent policies, filters, compression, environments that crash.

    python -m benchmarks.soak --minutes 30

A learner with a local worker trains two LSTM policies in multi-agent environments that each have a process of their
own, and that end it without a word now and then. Watched are the memory of learner and worker, the ledger in every
result, and the log, in which no warning may stand more than once a minute.
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
_ROOT = Path(__file__).parents[1]  # where this module can be imported by name
_SAMPLE_EVERY_S = 2.0
_START_S = 30.0
_END_S = 60.0


class CrashingCartPoles(MultiAgentCartPole):
    """CartPoles for several agents whose process ends at once after some number of steps."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Make one copy.

        Args:
            config: ``mean_steps``: env steps after which the process ends, on average.
        """
        super().__init__(NUM_AGENTS)
        # unseeded: a process that replaces another is to live for another time
        self._left = int(np.random.default_rng().exponential(config["mean_steps"])) + 1

    def step(self, action_dict: dict[Any, Any]) -> tuple[dict[Any, Any], ...]:
        """Step all agents, or end the process."""
        self._left -= 1
        if self._left <= 0:
            os._exit(3)
        return super().step(action_dict)


def policy_of(agent_id: Any) -> str:
    """Agents take turns: 0 and 2 have one policy, 1 and 3 the other."""
    return "even" if agent_id % 2 == 0 else "odd"


@dataclass(slots=True)
class SoakReport:
    """What was seen.

    Attributes:
        status: exit status of the learner.
        results: results written.
        env_steps: env steps sampled in all.
        restarts: environments restarted, as the log says.
        unbalanced: results whose ledger does not balance.
        repeated: warnings that stand more than once within a minute, digits left out.
        memory: process -> seconds and private memory in bytes, one row per look.
    """

    status: int
    results: int
    env_steps: int
    restarts: int
    unbalanced: int
    repeated: list[str]
    memory: dict[str, list[tuple[float, float]]] = field(repr=False)

    def slope(self, process: str, warm_up_s: float) -> float:
        """Growth of a process's memory in MB per 10 minutes after warm-up: median of all slopes (Theil-Sen)."""
        rows = np.array([row for row in self.memory[process] if row[0] >= warm_up_s])
        first, second = np.triu_indices(len(rows), k=1)
        slopes = (rows[second, 1] - rows[first, 1]) / (rows[second, 0] - rows[first, 0])
        return float(np.median(slopes)) * 600.0 / 1e6


def run_soak(seconds: float, folder: Path, *, mean_steps: float) -> SoakReport:
    """Train for so long, and watch.

    Args:
        seconds: how long the learner trains.
        folder: gets the run directory, the learner's output, and memory.json: all looks at each process.
        mean_steps: env steps after which an environment's process ends, on average.
    """
    config = folder / "soak.yaml"
    config.write_text(yaml.safe_dump(_settings(mean_steps)), encoding="utf-8")
    run_dir = folder / "run"
    command = [
        sys.executable, "-m", "aiorl.learner", "--config", str(config), "--run-dir", str(run_dir),
        "--stop-time-s", str(seconds),
    ]  # fmt: skip
    with (folder / "output.txt").open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=_ROOT, start_new_session=True)
        try:
            memory = _watch(process, time.monotonic() + seconds + _START_S + _END_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
    (folder / "memory.json").write_text(json.dumps(memory), encoding="utf-8")
    lines = (run_dir / "result.jsonl").read_text(encoding="utf-8").splitlines()
    results = [json.loads(line) for line in lines]
    logs = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(run_dir.rglob("*.txt"))]
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
    """Private memory of the learner and its worker, until the learner ends."""
    memory: dict[str, list[tuple[float, float]]] = {"learner": [], "worker": []}
    learner = psutil.Process(process.pid)
    began = time.monotonic()
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(psutil.Error):  # it ended between two looks
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
    """Warnings of one process that stand again within the period, digits left out, each once.

    Args:
        log: lines that begin with the time of day, then a level or its first letter.
        period_s: how long a warning must not come again.
    """
    pattern = re.compile(r"^(?:\d{4}-\d\d-\d\d )?(\d\d):(\d\d):(\d\d)\S* (?:W|E|WARNING|ERROR) (.*)")
    seen: dict[str, float] = {}
    repeated: dict[str, None] = {}
    for line in log.splitlines():
        found = pattern.match(line)
        if found is None:
            continue
        hours, minutes, seconds = map(int, found.groups()[:3])
        at = 3600.0 * hours + 60.0 * minutes + seconds
        text = re.sub(r"\d+", "#", found[4])
        # the times are whole seconds, and start afresh at midnight
        if (at - seen.get(text, -np.inf)) % 86_400.0 < period_s - 1.0:
            repeated[text] = None
        seen[text] = at
    return list(repeated)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a soak; the exit status is 1 if anything is not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long to train")
    parser.add_argument("--mean-steps", type=float, default=20_000.0, help="env steps between two crashes of one copy")
    parser.add_argument("--folder", type=Path, help="where the run is kept; default: it is not")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        report = run_soak(60.0 * args.minutes, args.folder or Path(folder), mean_steps=args.mean_steps)
    warm_up_s = 20.0 * args.minutes  # the first third
    slopes = {name: report.slope(name, warm_up_s) for name in report.memory}
    lines = [
        report.status == 0, f"learner's exit status {report.status}",
        report.env_steps > 0, f"{report.env_steps:,} env steps in {report.results} results",
        report.restarts > 0, f"{report.restarts} environments restarted",
        report.unbalanced == 0, f"{report.unbalanced} results whose ledger does not balance",
        not report.repeated, f"warnings within a minute of each other: {report.repeated or 'none'}",
    ]  # fmt: skip
    for name, slope in slopes.items():
        last = report.memory[name][-1][1] / 1e6
        lines += [slope < MB_PER_10_MINUTES, f"{name}: {last:.1f} MB, {slope:+.2f} MB per 10 minutes (< 1)"]
    ok = True
    for holds, text in zip(lines[::2], lines[1::2], strict=True):
        print("ok " if holds else "NO ", text)
        ok = ok and bool(holds)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
