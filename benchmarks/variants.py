"""`python -m benchmarks.variants FILE --task ALGO:ENV:STEPS --set KEY=A/B`: compare settings over
several seeds.

Each run is one process with one thread, and gets one row of FILE. Runs with a row are not repeated,
so the command can be stopped at any time and continued later. A variant takes one value of each
--set, so that several of them make all combinations; values are YAML. Afterwards the most likely
actions and sampled ones are played. At the end, a table has the mean over seeds of each task and
variant, with the lowest and the highest seed::

    python -m benchmarks.variants units.csv --task ppo:Pendulum-v1:200000 --set normalize_actions=false/true
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.measure import SINGLE_THREADED, exit_on_sigterm, run_command
from benchmarks.rows import add_row, read_csv

__all__ = ["VariantRow", "main"]

_TIMEOUT_S = 4 * 3600.0
_RETURNS = ("return_train", "return_greedy", "return_exploring")


@dataclass(frozen=True)
class VariantRow:
    """Outcome of one run.

    Attributes:
        task: algorithm, environment and env steps, such as ppo:Pendulum-v1:200000.
        variant: settings as JSON.
        seed: seed of the run.
        env_steps: env steps trained on.
        return_train: mean return of the last 100 episodes of training.
        return_greedy: mean return of the episodes played with the most likely actions.
        return_exploring: mean return of the episodes played with sampled actions.
        worst_greedy: lowest return of the episodes played with the most likely actions.
        cpu_s: CPU seconds of the whole process.
    """

    task: str
    variant: str
    seed: int
    env_steps: int
    return_train: float
    return_greedy: float
    return_exploring: float
    worst_greedy: float
    cpu_s: float


def _measured(task: str, variant: str, seed: int, episodes: int) -> VariantRow:
    """Train and play one run in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.variants", "-"]
    wanted = {"task": task, "variant": variant, "seed": seed, "episodes": episodes}
    printed = run_command(
        [*command, "--run", json.dumps(wanted)], _TIMEOUT_S, {**os.environ, **SINGLE_THREADED}
    )
    return VariantRow(**json.loads(printed.splitlines()[-1]))


def _trained(task: str, variant: str, seed: int, episodes: int) -> VariantRow:
    """Train and play one run in this process."""
    import aiorl

    algo, env, env_steps = task.split(":")
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "num_workers": 0,
            "threads": 1,
            "seed": seed,
            "log_level": "ERROR",
            "run_dir": f"{folder}/run",
            "stop_timesteps": int(env_steps),
            **json.loads(variant),
        }
        result = aiorl.train(env, algo=algo, config=settings)
        greedy, exploring = (
            aiorl.evaluate(f"{folder}/run", episodes=episodes, seed=10_000 + seed, explore=explore)
            for explore in (False, True)
        )
    return VariantRow(
        task=task,
        variant=variant,
        seed=seed,
        env_steps=result["env_steps_trained_total"],
        return_train=round(result["episode_reward_mean_last_100"], 3),
        return_greedy=round(greedy.mean, 3),
        return_exploring=round(exploring.mean, 3),
        worst_greedy=round(min(greedy.returns), 3),
        cpu_s=round(time.process_time(), 1),
    )


def _variants(settings: Sequence[str]) -> list[str]:
    """Return all combinations of the values of KEY=A/B, each as JSON."""
    choices = []
    for setting in settings:
        key, _, values = setting.partition("=")
        choices.append([(key, yaml.safe_load(value)) for value in values.split("/")])
    return [json.dumps(_nested(pairs)) for pairs in itertools.product(*choices)]


def _nested(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in pairs:
        *groups, last = key.split(".")
        inner = nested
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[last] = value
    return nested


def _table(rows: Sequence[VariantRow]) -> list[str]:
    """Return a line for each task and variant."""
    lines = [
        "| Task | Variant | Seeds | Training | Greedy | Exploring |",
        "|---|---|---|---|---|---|",
    ]
    for task, variant in dict.fromkeys((row.task, row.variant) for row in rows):
        group = [row for row in rows if (row.task, row.variant) == (task, variant)]
        cells = [task, variant, str(len(group))]
        for name in _RETURNS:
            values = [getattr(row, name) for row in group]
            cells.append(f"{np.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _key(row: VariantRow) -> tuple[str, str, int]:
    return row.task, row.variant, row.seed


def main(argv: Sequence[str] | None = None) -> int:
    """Train the runs without a row and print the table; the exit status is 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.variants", description=__doc__)
    parser.add_argument("file", type=Path, help="CSV file of the rows")
    parser.add_argument("--task", action="append", default=[], metavar="ALGO:ENV:STEPS")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=A/B", dest="settings")
    parser.add_argument("--seeds", type=int, default=5, metavar="N")
    parser.add_argument("--episodes", type=int, default=20, metavar="N")
    parser.add_argument(
        "--jobs", type=int, default=2, metavar="N", help="runs at a time; default: 2"
    )
    parser.add_argument("--run", metavar="JSON", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.run:
        print(json.dumps(vars(_trained(**json.loads(args.run)))))
        return 0
    exit_on_sigterm()
    known = set(map(_key, read_csv(args.file, VariantRow)))
    runs = [
        (task, variant, seed)
        for seed in range(args.seeds)
        for task in args.task
        for variant in _variants(args.settings)
        if (task, variant, seed) not in known
    ]
    threads = ThreadPoolExecutor(args.jobs)
    try:
        futures = [threads.submit(_measured, *run, args.episodes) for run in runs]
        for future in as_completed(futures):
            row = future.result()
            add_row(args.file, row, _key)
            print(" ".join(f"{name}={value}" for name, value in vars(row).items()), flush=True)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
    print("\n".join(_table(read_csv(args.file, VariantRow))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
