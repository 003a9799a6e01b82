"""`python -m benchmarks.worker_counts`: check that one worker and four workers learn equally well.

The command line trains each algorithm with its preset (IQL has none here), with all environments in
one worker or a quarter of them in each of four. With stored experience, each worker reads its
share. The seeds are the same, but the workers' samples differ, so single runs differ, too; only the
distribution of runs must not. Ape-X's workers have one share of random actions here, because shares
of their own would depend on the number of workers. Each row of ``docs/results/workers.csv`` is one
algorithm, number of workers and seed; existing rows are not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.run.report.loggers import read_results
from benchmarks.measure import exit_on_sigterm, run_command
from benchmarks.recordings import MIXED_CARTPOLE, default_cache, files_of
from benchmarks.rows import add_row, read_csv

__all__ = [
    "CASES",
    "COUNTS",
    "Case",
    "WorkersRow",
    "chance_of",
    "measured",
    "read_workers_rows",
    "words_of",
    "workers_section",
]

Array = NDArray[Any]

COUNTS = (1, 4)
_GRID = 100
_FOLDER = Path(__file__).parents[1] / "docs" / "results"
_FILE = "workers.csv"
_TIMEOUT_S = 3600.0
_EVALUATED = 10
_HEAD = f"""
## One worker or four

The same environments in one worker or divided among four, with the preset (IQL: none) and the same five seeds, for A2C
ten (`python -m benchmarks.worker_counts`, [all runs](results/workers.csv)). "Over all" is the mean of the learning
curve: the mean return of the last 100 episodes at each env step. Standard deviations over seeds are in parentheses.
"Chance" is the p-value of a permutation test: the share of all divisions of the runs into two groups whose means differ
at least as much. It is small if the number of workers matters. Ape-X uses one `epsilon_schedule` here, since
`per_worker_epsilon` depends on the number of workers. With stored experience ("data") each worker reads its share, env
steps are rows read, and the curve is that of evaluations of {_EVALUATED} episodes over the rows trained on.

| Algorithm | Of | Env steps | 1 worker, last | 4 workers, last | 1 worker, over all | 4 workers, over all | Chance |
|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Case:
    """Settings to train with one worker and with four.

    Attributes:
        algo: name of the algorithm.
        preset: name of the preset; "" for none.
        env: environment.
        num_envs: number of environments in all workers together; 0 with stored experience.
        env_steps: env steps to train on.
        options: further options of the command line.
        data: names of recordings to learn from, see `files_of`; if empty, the environments are
            sampled.
        evaluated_every: env steps between evaluations, with data.
        seeds: seeds to run.
    """

    algo: str
    preset: str
    env: str
    num_envs: int
    env_steps: int
    options: Mapping[str, Any] = field(default_factory=dict)
    data: tuple[str, ...] = ()
    evaluated_every: int = 20_000
    seeds: tuple[int, ...] = tuple(range(5))


_ONE_EPSILON = {"per-worker-epsilon": "off", "epsilon-schedule": "[[0, 1.0], [8000, 0.04]]"}
_SMALL_IQL = {
    "train-batch-size": 256,
    "training-intensity": 32,
    "lr": 1e-3,
    "model.fcnet-hiddens": "[128, 128]",
}
CASES = (
    Case("ppo", "ppo-cartpole", "CartPole-v1", 8, 100_000),
    Case("pg", "pg-cartpole", "CartPole-v1", 16, 300_000),
    Case("a2c", "a2c-cartpole", "CartPole-v1", 16, 300_000, seeds=tuple(range(10))),
    Case("a3c", "a3c-cartpole", "CartPole-v1", 8, 300_000),
    Case("impala", "impala-cartpole", "CartPole-v1", 64, 500_000),
    Case("appo", "appo-cartpole", "CartPole-v1", 64, 500_000),
    Case("dqn", "dqn-cartpole", "CartPole-v1", 8, 50_000),
    Case("apex", "apex-cartpole", "CartPole-v1", 16, 100_000, _ONE_EPSILON),
    Case("sac", "sac-pendulum", "Pendulum-v1", 4, 6_000),
    Case("td3", "td3-pendulum", "Pendulum-v1", 4, 6_000),
    Case("bc", "bc-cartpole", "CartPole-v1", 0, 500_000, data=MIXED_CARTPOLE),
    Case("marwil", "marwil-cartpole", "CartPole-v1", 0, 500_000, data=MIXED_CARTPOLE),
    Case(
        "cql", "cql-cartpole", "CartPole-v1", 0, 150_000, data=MIXED_CARTPOLE, evaluated_every=2500
    ),
    Case("iql", "", "CartPole-v1", 0, 130_000, _SMALL_IQL, MIXED_CARTPOLE, evaluated_every=2500),
)


@dataclass(frozen=True)
class WorkersRow:
    """Result of one run.

    Attributes:
        algo: name of the algorithm.
        workers: number of workers.
        seed: seed of the run.
        env_steps: env steps trained on.
        return_last: mean return of the last 100 episodes; with stored experience, of the last
            evaluation.
        return_over_all: mean of the learning curve.
    """

    algo: str
    workers: int
    seed: int
    env_steps: int
    return_last: float
    return_over_all: float


def words_of(case: Case, workers: int, files: Sequence[str] = ()) -> list[str]:
    """Return the options of the command line, including the files of stored experience."""
    own = {
        "algo": case.algo,
        "env": case.env,
        "stop-timesteps": case.env_steps,
        "num-workers": workers,
    }
    if case.preset:
        own["preset"] = case.preset
    if case.data:
        own |= {
            "input": json.dumps(files),
            "timesteps-per-iteration": case.evaluated_every,
            "evaluation-interval": 1,
            "evaluation-num-workers": 0,
            "evaluation-num-episodes": _EVALUATED,
        }
    else:
        own["num-envs-per-worker"] = case.num_envs // workers
    return [f"--{name}={value}" for name, value in {**own, **case.options}.items()]


def measured(
    case: Case, workers: int, seed: int, folder: Path = _FOLDER, cache: Path | None = None
) -> WorkersRow:
    """Train one run.

    Args:
        case: settings of the run.
        workers: number of workers.
        seed: seed of the run.
        folder: directory of results, see `files_of`.
        cache: directory of stored experience; None: `default_cache`.

    Raises:
        RuntimeError: the run failed.
    """
    files = files_of(case.data, cache or default_cache(), folder) if case.data else []
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "run"
        words = [*words_of(case, workers, files), f"--seed={seed}", f"--run-dir={run_dir}"]
        run_command([sys.executable, "-m", "aiorl.learner", *words], timeout_s=_TIMEOUT_S)
        results = read_results(run_dir)
    steps, returns, end = _curve(case, results)
    over_all = np.interp(np.linspace(0, end, _GRID), steps, returns).mean()
    last, trained = float(returns[-1]), int(results[-1]["env_steps_trained_total"])
    return WorkersRow(case.algo, workers, seed, trained, round(last, 2), round(float(over_all), 2))


def _curve(case: Case, results: Sequence[Mapping[str, Any]]) -> tuple[Array, Array, float]:
    """Return the steps at which returns are known, these returns, and the last step of the curve.

    With stored experience, steps are rows trained on. A replay fills first, for a time that depends
    on the worker that reads its share first.
    """
    if case.data:
        evaluations = [row["evaluation"] for row in results if "evaluation" in row]
        found = [(row["env_steps_trained"], row["episode_reward_mean"]) for row in evaluations]
    else:
        found = [
            (row["env_steps_trained_total"], row["episode_reward_mean_last_100"]) for row in results
        ]
    steps, returns = np.array([pair for pair in found if np.isfinite(pair[1] or np.nan)]).T
    if not case.data:
        return steps, returns, case.env_steps
    read = [row["env_steps_trained_total"] for row in results]
    used = [row["learner"].get("rows_trained", row["env_steps_trained_total"]) for row in results]
    return np.interp(steps, read, used), returns, used[-1]


def chance_of(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the share of splits of the values whose means differ at least as much (exact
    permutation test).
    """
    values = np.array([*first, *second], float)
    parted = np.array(
        [
            values[list(chosen)].mean() - np.delete(values, chosen).mean()
            for chosen in itertools.combinations(range(len(values)), len(first))
        ]
    )
    found = np.mean(first) - np.mean(second)
    return float(np.mean(np.abs(parted) >= abs(found) * (1 - 1e-12)))


def read_workers_rows(folder: Path) -> list[WorkersRow]:
    """Return the existing rows."""
    return read_csv(folder / _FILE, WorkersRow)


def workers_section(rows: Iterable[WorkersRow]) -> list[str]:
    """Return the lines of the results page; none without rows."""
    rows = list(rows)
    lines = []
    for case in CASES:
        own = [
            [row for row in rows if (row.algo, row.workers) == (case.algo, count)]
            for count in COUNTS
        ]
        if not all(own):
            continue
        last = [[row.return_last for row in group] for group in own]
        over_all = [[row.return_over_all for row in group] for group in own]
        cells = [
            case.algo,
            f"{case.num_envs} envs" if case.num_envs else "data",
            f"{case.env_steps:,}",
            *(f"{np.mean(values):.1f} ({np.std(values):.1f})" for values in (*last, *over_all)),
            f"{chance_of(*over_all):.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [_HEAD, *lines] if lines else []


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the missing rows; `python -m benchmarks.results --page` then writes the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.worker_counts", description=__doc__)
    known = [case.algo for case in CASES]
    parser.add_argument(
        "algos", nargs="*", metavar="ALGO", help=f"default: all; known: {', '.join(known)}"
    )
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.algos) - set(known)):
        parser.error(f"there is no case {unknown[0]!r}; known: {', '.join(known)}")
    exit_on_sigterm()
    chosen = [each for each in CASES if not args.algos or each.algo in args.algos]
    runs = [(each, *run) for each in chosen for run in itertools.product(each.seeds, COUNTS)]
    for case, seed, workers in runs:
        if any(_key(row) == (case.algo, workers, seed) for row in read_workers_rows(_FOLDER)):
            continue
        row = measured(case, workers, seed)
        print(
            f"{case.algo}, {workers} workers, seed {seed}: {row.return_over_all:.1f} over all",
            flush=True,
        )
        add_row(_FOLDER / _FILE, row, _key)
    return 0


def _key(row: WorkersRow) -> tuple[str, int, int]:
    return row.algo, row.workers, row.seed


if __name__ == "__main__":
    sys.exit(main())
