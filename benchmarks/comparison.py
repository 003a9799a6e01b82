"""`python -m benchmarks.comparison [TASK...]`: compare the defaults of aiorl and Stable-Baselines3
at equal env steps.

Both train each task with their defaults, without a preset, and then play episodes with the most
likely actions. The virtual environment of Stable-Baselines3 is made at first use. Each run is one
process with one thread, and gets one row of ``docs/results/comparison.csv``. Runs with a row are
not repeated, so the command can be stopped at any time and continued later. At the end it writes
the page of results.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import SINGLE_THREADED, exit_on_sigterm, run_command
from benchmarks.rows import add_row, read_csv
from benchmarks.stable_baselines import BREAKOUT, installed

__all__ = [
    "LIBRARIES",
    "TASKS",
    "ComparedRow",
    "ComparedTask",
    "comparison_section",
    "measured",
    "ratio_of",
    "read_compared_rows",
]

LIBRARIES = ("aiorl", "sb3")
BAR = 0.95
_FOLDER = Path(__file__).parents[1] / "docs" / "results"
_FILE = "comparison.csv"
_TIMEOUT_S = 3600.0
_NEARLY = 0.985
"""Share of the env steps after which aiorl stops: vectorised environments lose some of each train
batch to resets."""
_HEAD = f"""
## Compared with Stable-Baselines3

The defaults of aiorl and of Stable-Baselines3 2.9.2 after the same number of env steps, without presets
(`python -m benchmarks.comparison`, [all runs](results/{_FILE})). Both run in one process with one thread. If a row says
"envs", Stable-Baselines3 has that many environments with 256 steps each, otherwise its defaults. "Training" is the mean
return of the last 100 training episodes, "greedy" that of later episodes with the most likely actions. Figures are
means over seeds, with the lowest and the highest seed in parentheses. The ratio is 1 + (aiorl - theirs) / |theirs|,
which for positive returns is aiorl / theirs.

| Algorithm | Environment | Env steps | Seeds | Training: aiorl | SB3 | Ratio | Greedy: aiorl | SB3 | Ratio |
|---|---|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class ComparedTask:
    """Task for both libraries.

    Attributes:
        algo: name of the algorithm.
        env: environment.
        env_steps: env steps to train on; a multiple of both libraries' train batches.
        episodes: episodes to play after training.
        num_envs: environments of Stable-Baselines3; more than one collect 256 steps each.
        seeds: number of seeds.
    """

    algo: str
    env: str
    env_steps: int
    episodes: int = 20
    num_envs: int = 1
    seeds: int = 5

    @property
    def name(self) -> str:
        """Name in the file, such as ppo-CartPole-v1."""
        return f"{self.algo}-{'Breakout' if self.env == BREAKOUT else self.env}"


TASKS = (
    ComparedTask("ppo", "CartPole-v1", 49_152),
    ComparedTask("ppo", "FrozenLake-v1", 102_400, episodes=200, num_envs=8),
    ComparedTask("ppo", "InvertedDoublePendulum-v5", 102_400),
    ComparedTask("ppo", BREAKOUT, 102_400, episodes=50, num_envs=8),
    ComparedTask("ppo", "Swimmer-v5", 49_152, episodes=5),
    ComparedTask("ppo", "Reacher-v5", 49_152, episodes=100),
    ComparedTask("ppo", "BipedalWalker-v3", 102_400, episodes=10),
    ComparedTask("sac", "InvertedDoublePendulum-v5", 5_000),
    ComparedTask("sac", "Pendulum-v1", 5_000, seeds=2),
    ComparedTask("dqn", "CartPole-v1", 50_000),
    ComparedTask("dqn", "LunarLander-v3", 50_000),
)


@dataclass(frozen=True)
class ComparedRow:
    """Outcome of one run.

    Attributes:
        task: name of the task.
        library: library that trained.
        seed: seed of the run.
        env_steps: env steps trained on.
        return_train: mean return of the last 100 episodes of training.
        return_greedy: mean return of the episodes played afterwards.
        episodes: number of episodes played afterwards.
        cpu_s: CPU seconds of the whole process.
    """

    task: str
    library: str
    seed: int
    env_steps: int
    return_train: float
    return_greedy: float
    episodes: int
    cpu_s: float


def measured(
    task: ComparedTask, library: str, seed: int, options: Mapping[str, Any] | None = None
) -> ComparedRow:
    """Train one run and play its episodes in a separate process.

    Args:
        task: task to train.
        library: library to train with.
        seed: seed of the run.
        options: settings of aiorl that replace its defaults.

    Raises:
        RuntimeError: the run failed.
    """
    python, games = installed()
    program = [sys.executable, "-W", "ignore", "-m", "benchmarks.comparison", "--run"]
    given = dict(options or {})
    if library == "sb3":
        program = [
            str(python),
            "-W",
            "ignore",
            str(Path(__file__).with_name("stable_baselines.py")),
            "learn",
        ]
        given = {"n_steps": 256} if task.num_envs > 1 else {}
    wanted = {**vars(task), "seed": seed, "options": given}
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(games)]))
    printed = run_command(
        [*program, json.dumps(wanted)],
        _TIMEOUT_S,
        {**os.environ, **SINGLE_THREADED, "PYTHONPATH": path},
    )
    found = json.loads(printed.splitlines()[-1])
    rounded = {name: round(found[name], 3) for name in ("return_train", "return_greedy", "cpu_s")}
    return ComparedRow(
        task.name, library, seed, int(found["env_steps"]), episodes=task.episodes, **rounded
    )


def _learned(wanted: Mapping[str, Any]) -> dict[str, float]:
    """Train a whole run with the defaults of aiorl in this process, and play its episodes."""
    import aiorl

    with tempfile.TemporaryDirectory() as folder:
        result = aiorl.train(
            wanted["env"],
            algo=wanted["algo"],
            num_workers=0,
            threads=1,
            seed=wanted["seed"],
            log_level="ERROR",
            stop_timesteps=int(_NEARLY * wanted["env_steps"]),
            run_dir=f"{folder}/run",
            config=wanted["options"],
        )
        found = aiorl.evaluate(
            f"{folder}/run", episodes=wanted["episodes"], seed=10_000 + wanted["seed"]
        )
    return {
        "env_steps": result["env_steps_trained_total"],
        "return_train": result["episode_reward_mean_last_100"],
        "return_greedy": found.mean,
        "cpu_s": time.process_time(),
    }


def ratio_of(ours: float, theirs: float) -> float:
    """Compare our return with theirs: the quotient if theirs is positive; 0.95 is short by 5 % of
    its size.
    """
    return 1.0 + (ours - theirs) / abs(theirs)


def read_compared_rows(folder: Path) -> list[ComparedRow]:
    """Return the existing rows."""
    return read_csv(folder / _FILE, ComparedRow)


def comparison_section(rows: Iterable[ComparedRow]) -> list[str]:
    """Return the lines of the results page; none without rows."""
    rows, lines = list(rows), []
    for task in TASKS:
        ours, theirs = (
            [row for row in rows if (row.task, row.library) == (task.name, each)]
            for each in LIBRARIES
        )
        if not ours or not theirs:
            continue
        env = "MinAtar Breakout" if task.env == BREAKOUT else task.env
        env += f", {task.num_envs} envs" if task.num_envs > 1 else ""
        seeds = " and ".join(map(str, dict.fromkeys((len(ours), len(theirs)))))
        cells = [task.algo.upper(), env, f"{task.env_steps:,}", seeds]
        for name in ("return_train", "return_greedy"):
            pair = [[getattr(row, name) for row in group] for group in (ours, theirs)]
            cells += [f"{_said(np.mean(of))} ({_said(min(of))} to {_said(max(of))})" for of in pair]
            cells.append(f"{ratio_of(*(float(np.mean(of)) for of in pair)):.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return [_HEAD, *lines] if lines else []


def _said(value: Any) -> str:
    return (
        f"{value:,.0f}"
        if abs(value) >= 1000
        else f"{value:.3g}"
        if abs(value) < 100
        else f"{value:.0f}"
    )


def _key(row: ComparedRow) -> tuple[str, str, int]:
    return row.task, row.library, row.seed


def main(argv: Sequence[str] | None = None) -> int:
    """Train the runs without a row and write the page of results; the exit status is 0."""
    names = [task.name for task in TASKS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.comparison", description=__doc__)
    parser.add_argument(
        "tasks", nargs="*", metavar="TASK", help=f"default: all; known: {', '.join(names)}"
    )
    parser.add_argument("--library", choices=LIBRARIES, help="train only with this library")
    parser.add_argument(
        "--jobs", type=int, default=2, metavar="N", help="runs at a time; default: 2"
    )
    parser.add_argument("--run", metavar="JSON", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.run:
        print(json.dumps(_learned(json.loads(args.run))))
        return 0
    if unknown := sorted(set(args.tasks) - set(names)):
        parser.error(f"there is no task {unknown[0]!r}; known: {', '.join(names)}")
    exit_on_sigterm()
    installed()
    there = set(map(_key, read_compared_rows(_FOLDER)))
    chosen = [task for task in TASKS if not args.tasks or task.name in args.tasks]
    runs = [
        (task, library, seed)
        for task in chosen
        for seed, library in itertools.product(range(task.seeds), LIBRARIES)
        if library == (args.library or library) and (task.name, library, seed) not in there
    ]
    threads = ThreadPoolExecutor(args.jobs)
    try:
        for done in as_completed([threads.submit(measured, *run) for run in runs]):
            row = done.result()
            add_row(_FOLDER / _FILE, row, _key)
            print(" ".join(f"{name}={value}" for name, value in vars(row).items()), flush=True)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
    from benchmarks.results import main as write_results

    return write_results(["--page"])


if __name__ == "__main__":
    sys.exit(main())
