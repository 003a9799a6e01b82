"""Experiments: runs that differ in nothing but their seed, and what they achieved together.

Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice": the interquartile mean over
seeds, with a stratified bootstrap interval around it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.config.files import MAX_BYTES, parse_yaml, read_regular
from aiorl.config.layers import CONFIG_FILE
from aiorl.errors import ConfigError
from aiorl.run.report.figures import number_at
from aiorl.run.report.loggers import each_result
from aiorl.text import one_line

__all__ = ["Band", "Experiment", "RunCurve", "band_of", "find_runs", "group_runs", "interquartile_mean"]

F64 = NDArray[np.float64]

_RESULTS = "result.jsonl"
_COLUMNS = ("timesteps_total", "time_total_s", "episode_reward_mean")
_POINTS = 300
_RESAMPLES = 2000
_MAX_TOLD = 3  # settings in a name
_MAX_VALUE = 30  # characters of each
_OF_A_RUN = (
    "bind", "checkpoint_", "compilation_cache", "extra_python_environs", "insecure", "keys", "log_", "loggers",
    "max_worker_", "output", "replay_spill_dir", "resume", "run_dir", "seed", "stop_", "transport",
)  # fmt: skip
"""Beginnings of keys that don't make a run another experiment."""


@dataclass(frozen=True, slots=True)
class RunCurve:
    """One run.

    Attributes:
        path: its directory.
        config: its effective configuration, as plain data; empty where there is none.
        steps: [P] env steps, rising.
        seconds: [P] training time.
        returns: [P] mean episode return.
    """

    path: Path
    config: Mapping[str, Any]
    steps: F64
    seconds: F64
    returns: F64

    @classmethod
    def read(cls, path: Path) -> RunCurve:
        """Read a run directory.

        Raises:
            ConfigError: it holds no results, no episode has ended yet, or its config can't be read.
            OSError: a file can't be read.
        """
        rows = ([number_at(result, name) for name in _COLUMNS] for result in each_result(path))
        table = np.asarray([row for row in rows if all(map(math.isfinite, row))], np.float64)
        if not len(table):
            raise ConfigError(f"{path}: no episode has ended yet, so there is no curve.", key="run", value=str(path))
        table = table[np.unique(table[:, 0], return_index=True)[1]]
        file = path / CONFIG_FILE
        config, _ = parse_yaml(file, read_regular(file, max_bytes=MAX_BYTES)) if file.exists() else ({}, {})
        return cls(path, config, *table.T)


@dataclass(frozen=True, slots=True)
class Experiment:
    """Runs of one configuration.

    Attributes:
        name: its algorithm, and the settings that tell it from other experiments in its environment.
        env: its environment.
        runs: its runs.
    """

    name: str
    env: str
    runs: tuple[RunCurve, ...]


@dataclass(frozen=True, slots=True)
class Band:
    """Several runs as one curve.

    Attributes:
        at: [G] env steps, or seconds.
        mean: [G] interquartile mean over the runs that have got there.
        low: [G] lower end of its 95 % bootstrap interval; the mean itself for a single run.
        high: [G] upper end.
        num_runs: [G] how many runs have got there.
    """

    at: F64
    mean: F64
    low: F64
    high: F64
    num_runs: NDArray[np.int64]


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Run directories: those given, and those within directories given that are none themselves.

    Raises:
        ConfigError: a path is neither a run directory nor holds one.
    """
    found: list[Path] = []
    for path in paths:
        inside = [path] if (path / _RESULTS).exists() else sorted(file.parent for file in path.glob(f"*/{_RESULTS}"))
        if not inside:
            raise ConfigError(
                f"{path} is no run directory: it holds no {_RESULTS}, nor does a directory in it.",
                key="run",
                value=str(path),
            )
        found += [one for one in inside if one not in found]
    return found


def group_runs(runs: Sequence[RunCurve]) -> list[Experiment]:
    """Group runs that differ in nothing but seeds, places and ends, in the order in which they are given."""
    groups: dict[str, list[RunCurve]] = {}
    by_task: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}  # (algorithm, environment) -> its experiments
    for run in runs:
        own = {name: value for name, value in _flat(run.config) if not name.startswith(_OF_A_RUN)}
        of = str(own.pop("algo", "unknown")), str(own.pop("env", "unknown"))
        key = repr((of, sorted(own.items())))
        groups.setdefault(key, []).append(run)
        by_task.setdefault(of, {})[key] = own
    made = {}
    for (algo, env), settings in by_task.items():
        for key, differences in zip(settings, _differences(list(settings.values())), strict=True):
            made[key] = Experiment(", ".join([algo, *differences]), env, tuple(groups[key]))
    return _with_names_of_their_own([made[key] for key in groups])


def _differences(settings: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """For each of several settings "name=value" of the few keys that tell most of them apart."""
    order = dict.fromkeys(["preset", *(name for own in settings for name in own)])
    columns = {name: [repr(own[name]) if name in own else "" for own in settings] for name in order}
    chosen: list[str] = []
    parts = [""] * len(settings)
    while len(chosen) < _MAX_TOLD and len({*parts}) < len(settings):
        best = max(columns, key=lambda name: len({*zip(parts, columns[name], strict=True)}))  # the first of equals
        chosen.append(best)
        parts = [f"{part}\n{text}" for part, text in zip(parts, columns[best], strict=True)]
    short = {name: name.rpartition(".")[2] for name in chosen}
    called = {name: short[name] if list(short.values()).count(short[name]) == 1 else name for name in chosen}
    return [[f"{called[name]}={_value_text(own[name])}" for name in chosen if name in own] for own in settings]


def _value_text(value: Any) -> str:
    text = "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return one_line(text, _MAX_VALUE)


def _with_names_of_their_own(experiments: list[Experiment]) -> list[Experiment]:
    """Add the first run's directory where that alone tells two experiments apart."""
    names = [(one.env, one.name) for one in experiments]
    return [
        replace(one, name=f"{one.name} ({one.runs[0].path.name})") if names.count((one.env, one.name)) > 1 else one
        for one in experiments
    ]


def interquartile_mean(values: F64) -> F64:
    """Mean of the middle half along the first axis: a quarter of the values, rounded down, is cut at each end."""
    cut = len(values) // 4
    middle: F64 = np.sort(values, axis=0)[cut : len(values) - cut].mean(axis=0)
    return middle


def band_of(runs: Sequence[RunCurve], *, by: str, rng: np.random.Generator) -> Band:
    """Several runs as one curve over env steps (``by="steps"``) or training time (``by="seconds"``).

    Between two results a run's return is interpolated; before its first and behind its last it has none.
    """
    axes = [getattr(run, by) for run in runs]
    at = np.linspace(min(axis[0] for axis in axes), max(axis[-1] for axis in axes), _POINTS)
    table = np.stack(
        [np.interp(at, axis, run.returns, left=np.nan, right=np.nan) for axis, run in zip(axes, runs, strict=True)]
    )
    there = np.isfinite(table)
    mean, low, high = (np.full(_POINTS, np.nan) for _ in range(3))
    for which in np.unique(there, axis=1).T:  # runs begin and end at few places
        columns = (there == which[:, None]).all(axis=0)
        values = table[which][:, columns]
        if not len(values):
            continue
        mean[columns] = low[columns] = high[columns] = interquartile_mean(values)
        if len(values) > 1:
            drawn = rng.integers(len(values), size=(len(values), _RESAMPLES))
            low[columns], high[columns] = np.quantile(interquartile_mean(values[drawn]), (0.025, 0.975), axis=0)
    return Band(at, mean, low, high, there.sum(axis=0))


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            pairs += _flat(value, f"{prefix}{name}.")
        else:
            pairs.append((f"{prefix}{name}", value))
    return pairs
