"""`python -m benchmarks.results [TASK...]`: measure the learning results of presets seed by seed,
and write their page.

Each seed is one run of the command line with a preset, followed by 100 episodes of its last
checkpoint with the most likely actions. Its result is one row of ``docs/results/TASK.csv``, and its
learning curve is ``docs/results/curves/TASK-SEED.csv``. Seeds with a row are not repeated, so the
command can be stopped at any time and continued later. ``docs/results.md`` is written from these
files alone. Tasks that learn from stored experience record it into a cache first
(`benchmarks.recordings`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import aiorl
from aiorl.process.machine import usable_cores
from aiorl.process.replaced_file import replaced
from aiorl.run.report.loggers import read_results
from aiorl.run.report.plot import interquartile_mean
from benchmarks.comparison import comparison_section, read_compared_rows
from benchmarks.measure import exit_on_sigterm, run_command
from benchmarks.recordings import (
    MIXED_CARTPOLE,
    RECORDINGS,
    DataRow,
    Recording,
    default_cache,
    files_of,
    read_data_row,
)
from benchmarks.rows import add_row, read_csv, write_csv
from benchmarks.staleness import read_stale_rows, section_of
from benchmarks.worker_counts import read_workers_rows, workers_section

__all__ = ["TASKS", "OfflineTask", "Row", "Task", "main", "measure", "page_of", "read_rows"]

_ROOT = Path(__file__).parents[1] / "docs"
_SEEDS = (0, 1, 2, 3, 4)
_EPISODES = 100
_CURVE_POINTS = 200
_WORST = 0.2
"""Largest share of the bar by which any seed may miss it."""
_TIMEOUT_S = 6 * 3600.0
_HEAD = """\
# Results

The returns that presets reach, measured by `make results`. Each seed is trained on the command line, then evaluated for
100 episodes with the most likely actions. A task links to a file with one row per seed. Learning curves are in
`results/curves/TASK-SEED.csv`.

- **Mean, deviation, IQM** (interquartile mean) and **worst** are over seeds.
- The **bar** is for the mean. No seed may be worse than the bar by more than 20 % of it.
- **Published** figures name their source, and the version of the environment if it differs.
- `CartPoles` has four agents and two policies; the return shown is per agent, for the weaker policy.
- **Wall times** are from a machine with other work.

| Task | Environment | Env steps | Seeds | Mean | Deviation | IQM | Worst | Bar | Holds | Published | Wall time |
|---|---|---|---|---|---|---|---|---|---|---|---|"""
_OFFLINE_HEAD = """
## From stored experience

These runs learn only from recordings of other policies. The bar is for the mean over seeds. "Drawn" means that the
evaluation draws actions, as the recorded policy did; otherwise it takes the most likely ones. `make results` records
missing data again.

| Task | Data | Rows read | Seeds | Mean | Deviation | IQM | Worst | Bar | Holds | Wall time |
|---|---|---|---|---|---|---|---|---|---|---|"""
_DATA_HEAD = """
The recordings (`docs/results/data/`) have fixed seeds and drawn actions. "Policy" is the mean return of the recorded
policy with the most likely actions, and the env steps that it was trained on.

| Data | Environment | Rows | Episodes | Mean return | Deviation | Least | Greatest | Policy |
|---|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Task:
    """Preset on an environment, with a budget of env steps.

    Attributes:
        name: name of its files.
        preset: name of the preset.
        env: environment.
        env_steps: env steps to train on.
        bar: lowest mean return over seeds that passes; minus infinity for none.
        published: published figure and its source.
        seeds: seeds to run.
        options: further options of the command line.
    """

    name: str
    preset: str
    env: str
    env_steps: int
    bar: float
    published: str
    seeds: tuple[int, ...] = _SEEDS
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OfflineTask(Task):
    """Preset that learns from stored experience; its env steps are rows.

    Attributes:
        data: names of recordings; several contribute equal shares.
        explore: the evaluation draws actions.
        of_data: lowest and highest mean as shares of the data's mean return; infinite for none.
        above: another task, and the margin by which the mean must exceed that task's; empty for
            none.
    """

    data: tuple[str, ...] = ()
    explore: bool = False
    of_data: tuple[float, float] | None = None
    above: tuple[str, float] | None = None

    def verdict(self, mean: float, folder: Path) -> tuple[str, bool | None]:
        """Return the bar in words, and whether a mean holds it; None without a bar, or if its
        reference is missing.
        """
        said, held = [], []
        if np.isfinite(self.bar):
            said.append(f"{self.bar:g}")
            held.append(mean >= self.bar)
        data = read_data_row(self.data[0], folder)
        if self.of_data is not None:
            low, high = (
                share * (np.nan if data is None else data.return_mean) for share in self.of_data
            )
            said.append(
                _between(*self.of_data, "{:g}") + " of the data"
                if data is None
                else _between(low, high)
            )
            held += [] if data is None else [low <= mean <= high]
        if self.above is not None:
            name, by = self.above
            said.append(f"`{name}` + {by:g}")
            others = [
                row.return_mean
                for row in read_rows(next(task for task in TASKS if task.name == name), folder)
            ]
            held += [mean >= float(np.mean(others)) + by] if others else []
        return " and ".join(said) or "none", all(held) if held and len(held) == len(said) else None


_ZOO = "rl-baselines3-zoo"
_NO_BAR = -np.inf
_MEDIUM_CHEETAH = ("halfcheetah-medium",)
_BLIND = "aiorl.testing.envs:CartPoleWithoutVelocities"
_SEVERAL = "examples.multi_agent_cartpole:CartPoles"
_TWO_POLICIES = {
    "multiagent.policies": "{even: null, odd: null}",
    "multiagent.policy-mapping-fn": "examples.multi_agent_cartpole:policy_for",
}
_C51 = {"num-atoms": 101, "v-min": 0, "v-max": 100, "lr-schedule": "[[0, 1e-3], [200000, 0]]"}
TASKS = (
    Task(
        "ppo-cartpole",
        "ppo-cartpole",
        "CartPole-v1",
        100_000,
        490,
        f"500 at 100 k ({_ZOO})",
        seeds=(*_SEEDS, *range(70, 80)),  # the preset was tuned on the first five
    ),
    Task(
        "impala-cartpole",
        "impala-cartpole",
        "CartPole-v1",
        1_000_000,
        475,
        "450 at 2 M is RLlib's criterion",
    ),
    Task("appo-cartpole", "appo-cartpole", "CartPole-v1", 1_000_000, 475, ""),
    Task(
        "ppo-pendulum",
        "ppo-pendulum",
        "Pendulum-v1",
        400_000,
        -200,
        f"-172 at 100 k, with gSDE ({_ZOO})",
    ),
    Task("ppo-acrobot", "ppo-acrobot", "Acrobot-v1", 1_000_000, -85, f"-73.5 at 1 M ({_ZOO})"),
    Task(
        "ppo-mountaincar",
        "ppo-mountaincar",
        "MountainCar-v0",
        1_000_000,
        -112,
        f"-110 at 1 M ({_ZOO})",
    ),
    Task(
        "ppo-lunarlander-300k",
        "ppo-lunarlander",
        "LunarLander-v3",
        300_000,
        200,
        f"v2: 242 at 1 M ({_ZOO})",
    ),
    Task(
        "ppo-lunarlander",
        "ppo-lunarlander",
        "LunarLander-v3",
        1_000_000,
        240,
        f"v2: 242 at 1 M ({_ZOO})",
        options={"lr-schedule": "[[0, 1e-3], [1000000, 0]]"},
    ),
    Task(
        "ppo-lstm-cartpole",
        "ppo-lstm-cartpole",
        _BLIND,
        200_000,
        475,
        f"500 at 100 k ({_ZOO}, CartPoleNoVel-v1)",
    ),
    Task(
        "ppo-halfcheetah",
        "ppo-halfcheetah",
        "HalfCheetah-v5",
        1_000_000,
        5000,
        f"v3: 5,819 at 1 M ({_ZOO})",
    ),
    Task("ppo-hopper", "ppo-hopper", "Hopper-v5", 1_000_000, 2400, f"v3: 2,410 at 1 M ({_ZOO})"),
    Task(
        "ppo-walker2d", "ppo-walker2d", "Walker2d-v5", 1_000_000, 3500, f"v3: 3,479 at 1 M ({_ZOO})"
    ),
    Task(
        "ppo-pong", "ppo-pong", "ALE/Pong-v5", 3_000_000, 18, f"20.99 at 10 M ({_ZOO})", seeds=(0,)
    ),
    Task("impala-acrobot", "impala-acrobot", "Acrobot-v1", 1_000_000, _NO_BAR, ""),
    Task("impala-mountaincar", "impala-mountaincar", "MountainCar-v0", 1_000_000, _NO_BAR, ""),
    Task("impala-pendulum", "impala-pendulum", "Pendulum-v1", 1_000_000, _NO_BAR, ""),
    Task("impala-lunarlander", "impala-lunarlander", "LunarLander-v3", 1_000_000, _NO_BAR, ""),
    Task("appo-pendulum", "appo-pendulum", "Pendulum-v1", 200_000, _NO_BAR, "", seeds=(0,)),
    Task(
        "appo-lunarlander", "appo-lunarlander", "LunarLander-v3", 300_000, 200, "", seeds=(0, 1, 2)
    ),
    Task(
        "appo-halfcheetah", "appo-mujoco", "HalfCheetah-v5", 1_000_000, _NO_BAR, "", seeds=(0, 1, 2)
    ),
    Task("appo-atari", "appo-atari", "ALE/Pong-v5", 1_500_000, _NO_BAR, "", seeds=(0,)),
    Task("impala-halfcheetah", "impala-mujoco", "HalfCheetah-v5", 1_000_000, _NO_BAR, ""),
    Task("impala-hopper", "impala-mujoco", "Hopper-v5", 1_000_000, _NO_BAR, ""),
    Task("impala-walker2d", "impala-mujoco", "Walker2d-v5", 1_000_000, _NO_BAR, ""),
    Task(
        "ppo-atari",
        "ppo-atari",
        "ALE/Pong-v5",
        3_000_000,
        _NO_BAR,
        f"20.99 at 10 M ({_ZOO})",
        seeds=(0,),
    ),
    Task(
        "impala-atari",
        "impala-atari",
        "ALE/Breakout-v5",
        3_000_000,
        _NO_BAR,
        "385 at 10 M, 32 workers (RLlib)",
        seeds=(0,),
    ),
    Task("ppo-cartpoles", "ppo-cartpole", _SEVERAL, 100_000, 400, "", options=_TWO_POLICIES),
    Task("pg-cartpole", "pg-cartpole", "CartPole-v1", 500_000, 450, "249 at 200 k (XuanCe)"),
    Task("a2c-cartpole", "a2c-cartpole", "CartPole-v1", 500_000, 475, f"500 at 500 k ({_ZOO})"),
    Task(
        "a3c-cartpole",
        "a3c-cartpole",
        "CartPole-v1",
        500_000,
        475,
        f"500 at 500 k with A2C ({_ZOO})",
    ),
    Task("a2c-acrobot", "a2c-acrobot", "Acrobot-v1", 500_000, -90, f"-83.3 at 500 k ({_ZOO})"),
    Task("dqn-cartpole", "dqn-cartpole", "CartPole-v1", 100_000, 475, f"500 at 50 k ({_ZOO})"),
    Task(
        "dqn-cartpoles",
        "dqn-cartpole",
        _SEVERAL,
        100_000,
        400,
        "",
        # each policy has the rows of two agents
        options={
            **_TWO_POLICIES,
            "replay-capacity": 200_000,
        },
    ),
    Task(
        "c51-cartpole",
        "dqn-cartpole",
        "CartPole-v1",
        200_000,
        490,
        "493 at 200 k (XuanCe)",
        options=_C51,
    ),
    Task("rainbow-cartpole", "rainbow-cartpole", "CartPole-v1", 100_000, 475, ""),
    Task("dqn-acrobot", "dqn-acrobot", "Acrobot-v1", 100_000, -85, f"-76.6 at 100 k ({_ZOO})"),
    Task(
        "dqn-mountaincar",
        "dqn-mountaincar",
        "MountainCar-v0",
        120_000,
        -110,
        f"-100.8 at 120 k ({_ZOO})",
    ),
    Task(
        "dqn-lunarlander",
        "dqn-lunarlander",
        "LunarLander-v3",
        300_000,
        200,
        f"v2: 154 at 100 k ({_ZOO})",
    ),
    Task(
        "apex-cartpole",
        "apex-cartpole",
        "CartPole-v1",
        250_000,
        475,
        f"500 at 50 k with DQN ({_ZOO})",
    ),
    Task("dqn-lstm-cartpole", "dqn-lstm-cartpole", _BLIND, 200_000, 400, ""),
    Task("sac-pendulum", "sac-pendulum", "Pendulum-v1", 20_000, -160, f"-157 at 20 k ({_ZOO})"),
    Task("td3-pendulum", "td3-pendulum", "Pendulum-v1", 20_000, -160, f"-151.9 at 20 k ({_ZOO})"),
    Task("sac-cartpole", "sac-cartpole", "CartPole-v1", 200_000, 475, "262 at 200 k (XuanCe)"),
    Task(
        "sac-halfcheetah",
        "sac-halfcheetah",
        "HalfCheetah-v5",
        200_000,
        5000,
        "10,051 at 1 M (XuanCe)",
        seeds=(0,),
    ),
    Task(
        "td3-halfcheetah",
        "td3-halfcheetah",
        "HalfCheetah-v5",
        200_000,
        5000,
        "7,993 at 1 M (XuanCe)",
        seeds=(0,),
    ),
    Task("dqn-pong", "dqn-pong", "ALE/Pong-v5", 1_500_000, -10, "", seeds=(0,)),
    OfflineTask(
        "bc-cartpole-expert",
        "bc-cartpole",
        "CartPole-v1",
        1_000_000,
        475,
        "",
        data=("cartpole-expert",),
    ),
    OfflineTask(
        "bc-cartpole-medium",
        "bc-cartpole",
        "CartPole-v1",
        1_000_000,
        _NO_BAR,
        "",
        data=("cartpole-medium",),
        explore=True,
        of_data=(0.9, 1.1),
    ),
    OfflineTask(
        "bc-cartpole-mixed",
        "bc-cartpole",
        "CartPole-v1",
        1_000_000,
        _NO_BAR,
        "",
        data=MIXED_CARTPOLE,
    ),
    OfflineTask(
        "marwil-cartpole-mixed",
        "marwil-cartpole",
        "CartPole-v1",
        1_000_000,
        300,
        "",
        data=MIXED_CARTPOLE,
        above=("bc-cartpole-mixed", 50.0),
    ),
    OfflineTask(
        "cql-cartpole-mixed", "cql-cartpole", "CartPole-v1", 300_000, 450, "", data=MIXED_CARTPOLE
    ),
    OfflineTask(
        "cql-pendulum-replay",
        "cql-pendulum",
        "Pendulum-v1",
        110_000,
        -250,
        "",
        data=("pendulum-replay",),
    ),
    OfflineTask(
        "bc-halfcheetah-expert",
        "bc-halfcheetah",
        "HalfCheetah-v5",
        3_000_000,
        _NO_BAR,
        "",
        data=("halfcheetah-expert",),
        of_data=(0.9, np.inf),
    ),
    OfflineTask(
        "bc-halfcheetah-medium",
        "bc-halfcheetah",
        "HalfCheetah-v5",
        3_000_000,
        _NO_BAR,
        "",
        data=_MEDIUM_CHEETAH,
    ),
    OfflineTask(
        "iql-halfcheetah-medium",
        "iql-halfcheetah",
        "HalfCheetah-v5",
        200_000,
        _NO_BAR,
        "",
        data=_MEDIUM_CHEETAH,
        of_data=(1.0, np.inf),
        above=("bc-halfcheetah-medium", 0.0),
    ),
    OfflineTask(
        "cql-halfcheetah-medium",
        "cql-halfcheetah",
        "HalfCheetah-v5",
        300_000,
        _NO_BAR,
        "",
        data=_MEDIUM_CHEETAH,
        of_data=(1.0, np.inf),
        above=("bc-halfcheetah-medium", 0.0),
        seeds=(0,),
    ),
)
"""In the order in which they run: the quick ones first."""


@dataclass(frozen=True)
class Row:
    """Result of one seed.

    Attributes:
        seed: seed of the run; the evaluation has another.
        env_steps: env steps trained on.
        return_mean: mean return of the evaluation's episodes; with several policies, that of the
            weakest, per agent.
        return_std: standard deviation of these returns.
        episodes: number of evaluation episodes.
        wall_s: seconds of training without start-up.
        cores: number of cores that the run had.
        version: version of aiorl.
        commit: commit of the code, with a + if files differed from it; "" for rows older than this
            field.
    """

    seed: int
    env_steps: int
    return_mean: float
    return_std: float
    episodes: int
    wall_s: float
    cores: int
    version: str
    commit: str = ""


def measure(
    task: Task, seed: int, folder: Path, *, episodes: int = _EPISODES, cache: Path | None = None
) -> Row:
    """Train and evaluate one seed, and write its result.

    Args:
        task: task to train.
        seed: seed of the run.
        folder: directory for the row and the curve; runs from stored experience have no curve.
        episodes: number of evaluation episodes.
        cache: directory of stored experience; None: `default_cache`.

    Raises:
        RuntimeError: the run failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "run"
        own = {
            "preset": task.preset,
            "env": task.env,
            "seed": seed,
            "stop-timesteps": task.env_steps,
            **task.options,
        }
        is_offline = isinstance(task, OfflineTask)
        if isinstance(task, OfflineTask):
            own["input"] = json.dumps(files_of(task.data, cache or default_cache(), folder))
        words = [f"--{name}={value}" for name, value in {**own, "run-dir": run_dir}.items()]
        run_command([sys.executable, "-m", "aiorl.learner", *words], timeout_s=_TIMEOUT_S)
        results = read_results(run_dir)
        draws = isinstance(task, OfflineTask) and task.explore
        found = aiorl.evaluate(run_dir, episodes=episodes, seed=10_000 + seed, explore=draws)
    returns = min(
        [found.returns] if not found.policy_returns else found.policy_returns.values(), key=np.mean
    )
    row = Row(
        seed=seed,
        env_steps=found.env_steps,
        return_mean=round(float(np.mean(returns)), 3),
        return_std=round(float(np.std(returns)), 3),
        episodes=len(found.returns),
        wall_s=round(float(results[-1]["time_total_s"]), 1),
        cores=usable_cores(),
        version=aiorl.__version__,
        commit=_commit(),
    )
    if not is_offline:
        _write_curve(folder / "curves" / f"{task.name}-{seed}.csv", results)
    add_row(folder / f"{task.name}.csv", row, lambda each: each.seed)
    return row


def _commit() -> str:
    command = [
        "git",
        "-C",
        str(_ROOT),
        "describe",
        "--always",
        "--abbrev=10",
        "--dirty=+",
        "--exclude=*",
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def read_rows(task: Task, folder: Path) -> list[Row]:
    """Return the existing rows of a task, by seed."""
    return read_csv(folder / f"{task.name}.csv", Row)


def page_of(folder: Path, tasks: Iterable[Task] = TASKS) -> str:
    """Return the page of results from the rows in a folder."""
    tasks = list(tasks)
    lines = [_HEAD]
    for task in (task for task in tasks if not isinstance(task, OfflineTask)):
        rows = read_rows(task, folder)
        env, steps, has_bar = task.env.rpartition(":")[2], f"{task.env_steps:,}", task.bar > _NO_BAR
        bar = f"{task.bar:g}" if has_bar else "none"
        if not rows:
            known = f"| `{task.name}` | {env} | {steps} | 0 | not measured yet"
            lines.append(f"{known} | | | | {bar} | | {task.published} | |")
            continue
        means = np.array([row.return_mean for row in rows])
        holds = bool(means.mean() >= task.bar and means.min() >= task.bar - _WORST * abs(task.bar))
        cells = [
            f"[`{task.name}`](results/{task.name}.csv)",
            env,
            steps,
            *_over_seeds(rows),
            bar,
            _said(holds if has_bar else None, task, rows),
            task.published,
            _wall_time(rows),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        (
            "Learning curves: `docs/results/curves/TASK-SEED.csv`, mean return of the last 100"
            " training episodes."
        ),
    ]
    lines += comparison_section(read_compared_rows(folder))
    lines += workers_section(read_workers_rows(folder))
    lines += section_of(read_stale_rows(folder))
    offline = [task for task in tasks if isinstance(task, OfflineTask)]
    if offline:
        names = dict.fromkeys(name for task in offline for name in task.data)
        lines += [_OFFLINE_HEAD, *(_offline_line(task, folder) for task in offline)]
        lines += [
            _DATA_HEAD,
            *(_data_line(RECORDINGS[name], read_data_row(name, folder)) for name in names),
        ]
    return "\n".join(lines) + "\n"


def _offline_line(task: OfflineTask, folder: Path) -> str:
    data = ", ".join(f"`{name}`" for name in task.data) + (
        ", half each" if len(task.data) > 1 else ""
    )
    data += "; drawn" if task.explore else ""
    rows = read_rows(task, folder)
    bar, holds = task.verdict(
        float(np.mean([row.return_mean for row in rows])) if rows else np.nan, folder
    )
    if not rows:
        return (
            f"| `{task.name}` | {data} | {task.env_steps:,} | 0 | not measured yet | | | | {bar}"
            " | | |"
        )
    cells = [
        f"[`{task.name}`](results/{task.name}.csv)",
        data,
        f"{task.env_steps:,}",
        *_over_seeds(rows),
        bar,
        _said(holds, task, rows),
        _wall_time(rows),
    ]
    return f"| {' | '.join(cells)} |"


def _over_seeds(rows: Sequence[Row]) -> list[str]:
    """Return cells: number of seeds, their mean, deviation, interquartile mean and worst."""
    means = np.array([row.return_mean for row in rows])
    figures = (means.mean(), means.std(), interquartile_mean(means[:, None])[0], means.min())
    return [str(len(rows)), *(_readable(float(figure)) for figure in figures)]


def _said(holds: bool | None, task: Task, rows: Sequence[Row]) -> str:
    """Return the cell that says if the bar holds, or holds so far; empty without a bar."""
    if holds is None:
        return ""
    if len(rows) < len(task.seeds):
        return "so far" if holds else "not so far"
    return "yes" if holds else "no"


def _wall_time(rows: Sequence[Row]) -> str:
    return f"{np.median([row.wall_s for row in rows]):,.0f} s on {rows[-1].cores} cores"


def _data_line(recording: Recording, row: DataRow | None) -> str:
    if row is None:
        return (
            f"| `{recording.name}` | {recording.env} | {recording.rows:,} | | not recorded yet | |"
            " | | |"
        )
    policy = "actions at random"
    if recording.player is not None:
        policy = (
            f"{_readable(row.policy_return)} after {row.policy_env_steps:,} of"
            f" `{recording.player.preset}`"
        )
    figures = (row.return_mean, row.return_std, row.return_min, row.return_max)
    cells = [
        f"[`{recording.name}`](results/data/{recording.name}.csv)",
        recording.env,
        f"{row.rows:,}",
        f"{row.episodes:,}",
        *map(_readable, figures),
        policy,
    ]
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the seeds without a row and write the page; the exit status is 0."""
    names = [task.name for task in TASKS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description=__doc__)
    parser.add_argument(
        "tasks", nargs="*", metavar="TASK", help=f"default: all; known: {', '.join(names)}"
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="run only the first N seeds of each")
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help=f"directory of stored experience ({default_cache()})",
    )
    parser.add_argument("--page", action="store_true", help="only write the page")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.tasks) - set(names)):
        parser.error(f"there is no task {unknown[0]!r}; known: {', '.join(names)}")
    exit_on_sigterm()
    folder = _ROOT / "results"
    for task in TASKS if not args.page else ():
        if args.tasks and task.name not in args.tasks:
            continue
        there = {row.seed for row in read_rows(task, folder)}
        for seed in task.seeds[: args.seeds]:
            if seed not in there:
                began = time.monotonic()
                row = measure(task, seed, folder, cache=args.cache)
                print(
                    f"{task.name} seed {seed}: {row.return_mean:,.1f}"
                    f" ({time.monotonic() - began:.0f} s)",
                    flush=True,
                )
                _write_page(folder)
    _write_page(folder)
    return 0


def _write_page(folder: Path) -> None:
    with replaced(_ROOT / "results.md") as path:
        path.write_text(page_of(folder), encoding="utf-8")


def _write_curve(path: Path, results: Sequence[Mapping[str, Any]]) -> None:
    kept = results[:: max(1, -(-len(results) // _CURVE_POINTS))]
    names = ("env_steps_trained_total", "episode_reward_mean_last_100", "time_total_s")
    write_csv(path, [{name: result[name] for name in names} for result in kept])


def _between(low: float, high: float, form: str = "") -> str:
    said = [
        form.format(number) if form else _readable(number)
        for number in (low, high)
        if np.isfinite(number)
    ]
    return " to ".join(said)


def _readable(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"


if __name__ == "__main__":
    sys.exit(main())
