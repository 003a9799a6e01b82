"""Learning curves of run directories, and of experiments, which are runs that differ only in their
seed.

Curves of experiments show the interquartile mean over seeds with a stratified bootstrap interval,
as in Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice".
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aiorl.config.files import MAX_BYTES, read_regular
from aiorl.config.layers import CONFIG_FILE
from aiorl.config.yaml_text import parse_yaml
from aiorl.data.columns import F64
from aiorl.errors import ConfigError
from aiorl.process.replaced_file import replaced
from aiorl.run.report.figures import number_at
from aiorl.run.report.loggers import JSONL_FILE, each_result, flat_items
from aiorl.text import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes


PLOT_FILE = "learning_curve.png"
_MAX_POINTS = 1000
_FEW_POINTS = 20  # up to this number, points get markers
_LINE = "#1f6f8b"
_GOAL = "#d1495b"
INK = "#333333"
"""Colour of all text."""


def plot_learning_curve(
    run_dir: Path,
    *,
    title: str = "",
    stop_return: float | None = None,
    path: Path | None = None,
) -> Path | None:
    """Draw mean return over env steps, with the range of returns around it and wall time on top.

    It takes about half a second, most of it for the first import of matplotlib. It is safe in any
    thread, since it uses no global state of matplotlib.

    Args:
        run_dir: directory of result.jsonl.
        title: heading; empty takes the run directory's name.
        stop_return: return that the run should reach, drawn as a line; None for none.
        path: file of the picture, replaced atomically; None is learning_curve.png in the run
            directory.

    Returns:
        Path of the picture, or None if no episode has ended yet.

    Raises:
        OSError: a file can't be read or written.
        ImportError: matplotlib is not installed.
    """
    curve = _curve(run_dir)
    if not len(curve):
        return None
    if len(curve) > _MAX_POINTS:
        curve = curve[np.unique(np.linspace(0, len(curve) - 1, _MAX_POINTS).astype(np.int64))]
    steps, seconds, mean, low, high = curve.T
    # imported here: it takes 0.2 s, which only runs with a picture need
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(8, 4.5),
        dpi=120,
        layout="constrained",
        facecolor="white",
    )
    axes = figure.add_subplot()
    axes.fill_between(
        steps,
        low,
        high,
        color=_LINE,
        alpha=0.15,
        linewidth=0,
        label="min to max",
    )
    marker = "o" if steps.size <= _FEW_POINTS else None
    axes.plot(
        steps,
        mean,
        color=_LINE,
        linewidth=2,
        marker=marker,
        markersize=4,
        label="mean return",
    )
    if stop_return is not None:
        axes.axhline(
            stop_return,
            color=_GOAL,
            linewidth=1.2,
            linestyle=(0, (5, 4)),
            label=f"goal {stop_return:g}",
        )
    finish_axes(axes, "env steps")
    axes.set_title(
        title or run_dir.resolve().name,
        loc="left",
        fontsize=12,
        fontweight="bold",
        color=INK,
        pad=12,
    )
    axes.set_ylabel("episode return", color=INK)
    axes.set_xlim(left=0, right=max(float(steps[-1]), 1.0))
    axes.legend(loc="best", frameon=False, labelcolor=INK)
    _add_wall_time(axes, steps, seconds)
    path = run_dir / PLOT_FILE if path is None else path
    with replaced(path) as temporary:
        figure.savefig(temporary)
    return path


def _curve(run_dir: Path) -> F64:
    """Return the columns `_CURVE` of the results with a mean return [P, 5], ordered by env
    steps.
    """
    rows = [[number_at(result, name) for name in _CURVE] for result in each_result(run_dir)]
    table = np.asarray(rows, np.float64).reshape(-1, len(_CURVE))
    table = table[np.isfinite(table[:, _CURVE.index("episode_reward_mean")])]
    _, first_places = np.unique(table[:, 0], return_index=True)
    return table[first_places]


def finish_axes(axes: Axes, what: str) -> None:
    """Give axes the look of all pictures, and label the x-axis with ``what``."""
    from matplotlib.ticker import EngFormatter

    axes.set_xlabel(what, color=INK)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)


def _add_wall_time(axes: Axes, steps: F64, seconds: F64) -> None:
    """Add an axis on top with the wall time by which the steps of each tick below were sampled."""
    if steps.size < 2 or not np.all(np.isfinite(seconds)):
        return
    factor, unit = time_unit(float(seconds[-1]))
    ticks = axes.get_xticks()
    _, right = axes.get_xlim()
    axes.set_xticks(ticks[ticks <= right])  # fixed, so that the layout does not change them
    ticks = ticks[(ticks >= steps[0]) & (ticks <= steps[-1])]
    times = np.interp(ticks, steps, seconds) / factor
    above = axes.twiny()
    above.set_xlim(axes.get_xlim())
    decimals = 1 if times[-1] < 100 else 0
    above.set_xticks(ticks, [f"{time:.{decimals}f}" for time in times])
    above.set_xlabel(f"wall time in {unit}", color="#777777", fontsize=9)
    above.tick_params(
        colors="#777777",
        labelsize=8,
        length=3,
    )
    above.spines[:].set_visible(False)


def time_unit(seconds: float) -> tuple[float, str]:
    """Choose a readable unit for a time in seconds; return the unit's length in seconds and its
    name.
    """
    if seconds < 180:
        return 1.0, "s"
    if seconds < 3 * 3600:
        return 60.0, "minutes"
    return 3600.0, "hours"


_CURVE = (
    "timesteps_total",
    "time_total_s",
    "episode_reward_mean",
    "episode_reward_min",
    "episode_reward_max",
)
_POINTS = 300
_RESAMPLES = 2000
_RESAMPLED_NUMBERS = 1 << 21
"""Numbers of resamples that are held at a time."""
_MAX_SETTINGS = 3  # settings in a curve's name
_MAX_VALUE = 30  # characters of each
OF_A_RUN = (
    "bind",
    "checkpoint_",
    "compilation_cache",
    "extra_python_environs",
    "insecure",
    "keys",
    "log_",
    "loggers",
    "max_worker_",
    "output",
    "replay_spill_dir",
    "resume",
    "run_dir",
    "seed",
    "stop_",
    "transport",
    "web",
)
"""Prefixes of the keys in which runs of one experiment can differ."""


@dataclass(frozen=True, slots=True, eq=False)
class RunCurve:
    """Learning curve of one run.

    Attributes:
        path: the run directory.
        config: the effective configuration, as plain data; empty if there is none.
        steps: [P] env steps, increasing.
        seconds: [P] training time, seconds.
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
            ConfigError: no episode has ended yet, or the config can't be read.
            OSError: a file can't be read.
        """
        table = _curve(path)
        if not len(table):
            raise ConfigError(
                f"{path}: no episode has ended yet, so there is no curve.",
                key="run",
                value=str(path),
            )
        file = path / CONFIG_FILE
        config: Mapping[str, Any] = {}
        if file.exists():
            config, _ = parse_yaml(file, read_regular(file, max_bytes=MAX_BYTES))
        return cls(path, config, *table.T[:3])


@dataclass(frozen=True, slots=True)
class Experiment:
    """Runs of one configuration.

    Attributes:
        name: the algorithm, and the settings that differ from other experiments in this
            environment.
        env: name of the environment.
        runs: the runs.
    """

    name: str
    env: str
    runs: tuple[RunCurve, ...]


@dataclass(frozen=True, slots=True)
class Band:
    """Several runs as one curve.

    Attributes:
        at: [G] env steps, or seconds.
        mean: [G] interquartile mean over the runs that cover this point.
        low: [G] lower end of its 95 % bootstrap interval; the mean itself for a single run.
        high: [G] upper end, likewise.
        num_runs: [G] number of runs that cover this point.
    """

    at: F64
    mean: F64
    low: F64
    high: F64
    num_runs: NDArray[np.int64]


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return run directories: each path that is one, and the ones directly inside any other
    path.

    Raises:
        ConfigError: a path neither is nor contains a run directory.
    """
    run_dirs: dict[Path, None] = {}
    for path in paths:
        inside = [path]
        if not (path / JSONL_FILE).exists():
            inside = sorted(file.parent for file in path.glob(f"*/{JSONL_FILE}"))
        if not inside:
            raise ConfigError(
                f"{path} is no run directory: neither it nor a directory in it has a {JSONL_FILE}.",
                key="run",
                value=str(path),
            )
        run_dirs.update(dict.fromkeys(inside))
    return list(run_dirs)


def group_runs(runs: Sequence[RunCurve]) -> list[Experiment]:
    """Group runs that differ only in seed, directories and stop criteria; the order stays as
    given.
    """
    groups: dict[str, list[RunCurve]] = {}
    # (algorithm, environment) -> key of a group -> settings
    tasks: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for run in runs:
        settings = dict(
            pair
            for pair in flat_items(run.config, separator=".")
            if not pair[0].startswith(OF_A_RUN)
        )
        task = str(settings.pop("algo", "unknown")), str(settings.pop("env", "unknown"))
        key = repr((task, sorted(settings.items())))
        groups.setdefault(key, []).append(run)
        tasks.setdefault(task, {})[key] = settings
    experiments: dict[str, Experiment] = {}
    for (algo, env), by_key in tasks.items():
        for key, differences in zip(by_key, _differences(list(by_key.values())), strict=True):
            experiments[key] = Experiment(
                name=", ".join([algo, *differences]),
                env=env,
                runs=tuple(groups[key]),
            )
    return _with_distinct_names([experiments[key] for key in groups])


def _differences(settings: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return, for each experiment, "name=value" of the few keys that best distinguish the
    experiments.
    """
    names = dict.fromkeys(itertools.chain(["preset"], *settings))
    columns = {
        name: [repr(values[name]) if name in values else "" for values in settings]
        for name in names
    }
    chosen: list[str] = []
    rows: list[tuple[str, ...]] = [()] * len(settings)  # texts of the chosen columns
    while len(chosen) < _MAX_SETTINGS and len({*rows}) < len(settings):
        # the column by which most experiments differ; the first of equals
        best = max(columns, key=lambda name: len({*zip(rows, columns[name], strict=True)}))
        chosen.append(best)
        rows = [(*row, text) for row, text in zip(rows, columns[best], strict=True)]
    short = [name.rpartition(".")[2] for name in chosen]
    labels = {
        name: last_part if short.count(last_part) == 1 else name
        for name, last_part in zip(chosen, short, strict=True)
    }
    return [
        [f"{labels[name]}={_value_text(values[name])}" for name in chosen if name in values]
        for values in settings
    ]


def _value_text(value: Any) -> str:
    if value is None:
        return "null"
    return one_line(f"{value:g}" if isinstance(value, float) else str(value), _MAX_VALUE)


def _with_distinct_names(experiments: list[Experiment]) -> list[Experiment]:
    """Add the name of the first run's directory to names that would otherwise be equal."""
    names = [(experiment.env, experiment.name) for experiment in experiments]
    distinct = []
    for experiment in experiments:
        if names.count((experiment.env, experiment.name)) > 1:
            directory = experiment.runs[0].path.name
            experiment = replace(experiment, name=f"{experiment.name} ({directory})")
        distinct.append(experiment)
    return distinct


def interquartile_mean(values: F64) -> F64:
    """Return the mean of the middle half along the first axis: a quarter, rounded down, is cut at
    each end.
    """
    cut = len(values) // 4
    middle: F64 = np.sort(values, axis=0)[cut : len(values) - cut].mean(axis=0)
    return middle


def band_of(runs: Sequence[RunCurve], *, by: str, rng: np.random.Generator) -> Band:
    """Combine runs into one curve over env steps (``by="steps"``) or training time
    (``by="seconds"``).

    A run's return is interpolated between two results; before its first and after its last result
    it has none.
    """
    axes = [getattr(run, by) for run in runs]
    at = np.linspace(min(axis[0] for axis in axes), max(axis[-1] for axis in axes), _POINTS)
    table = np.stack(
        [
            np.interp(
                at,
                axis,
                run.returns,
                left=np.nan,
                right=np.nan,
            )
            for axis, run in zip(axes, runs, strict=True)
        ]
    )
    is_covered = np.isfinite(table)
    mean, low, high = (np.full(_POINTS, np.nan) for _ in range(3))
    # points that the same runs cover have one sample of seeds: runs begin and end at few points
    for which in np.unique(is_covered, axis=1).T:
        columns = (is_covered == which[:, None]).all(axis=0)
        values = table[which][:, columns]
        if not len(values):
            continue
        mean[columns] = low[columns] = high[columns] = interquartile_mean(values)
        if len(values) > 1:
            resamples = rng.integers(len(values), size=(len(values), _RESAMPLES))
            low[columns], high[columns] = _interval(values, resamples)
    return Band(
        at=at,
        mean=mean,
        low=low,
        high=high,
        num_runs=is_covered.sum(axis=0),
    )


def shared_part(band: Band, num_runs: int) -> Band:
    """Return the part of a curve that all its runs cover; the whole curve if there is none.

    Over time, fast runs end early. The mean of the slow ones alone can look like a collapse.

    Args:
        band: the curve.
        num_runs: number of its runs.
    """
    is_shared = band.num_runs == num_runs
    if not is_shared.any():
        return band
    return Band(
        at=band.at[is_shared],
        mean=band.mean[is_shared],
        low=band.low[is_shared],
        high=band.high[is_shared],
        num_runs=band.num_runs[is_shared],
    )


def _interval(values: F64, resamples: NDArray[np.int64]) -> F64:
    """Return the 95 % interval [2, P] of the interquartile mean, for values [N, P] and the indices
    [N, R] of resamples.

    Some points are taken at a time: all resamples of 300 runs at 300 points would take gigabytes.
    """
    num_points = max(1, _RESAMPLED_NUMBERS // resamples.size)
    parts = []
    for start in range(0, values.shape[1], num_points):
        means = interquartile_mean(values[:, start : start + num_points][resamples])
        parts.append(np.quantile(means, (0.025, 0.975), axis=0))
    interval: F64 = np.concatenate(parts, axis=1)
    return interval
