"""`python -m aiorl.plot RUN...`: draw the learning curve of a run, or curves with bands for several
runs and seeds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from aiorl.config.command_line import (
    Parser,
    check_directory_of,
    exit_status,
    finite_number,
)
from aiorl.errors import ConfigError
from aiorl.process.imports import install_command
from aiorl.process.replaced_file import replaced
from aiorl.run.report.comparison import compare, scores_of
from aiorl.run.report.plot import (
    INK,
    PLOT_FILE,
    Band,
    Experiment,
    RunCurve,
    band_of,
    find_runs,
    finish_axes,
    group_runs,
    interquartile_mean,
    plot_learning_curve,
    shared_part,
    time_unit,
)
from aiorl.text import one_line

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_experiments", "main", "plot_experiments"]

_PROG = "python -m aiorl.plot"
_EXAMPLES = """examples:
  python -m aiorl.plot runs/mine                                      # Draws its learning curve in its directory.
  python -m aiorl.plot runs/ppo-1 runs/ppo-2 runs/ppo-3               # Draws three seeds as one curve.
  python -m aiorl.plot runs/ppo-* runs/impala-* --out compared.png    # Compares two experiments.
  python -m aiorl.plot runs/a runs/b --label "small net" --label "large net"
  python -m aiorl.plot runs                                           # Draws all runs in a directory.
  python -m aiorl.plot runs --normalize CartPole-v1=20:500 --normalize Pendulum-v1=-1200:-150

Runs that differ only in their seed are one experiment. The line is the interquartile mean of their mean returns, and
the band is its 95 % bootstrap interval. Over env steps, the line is dashed after the first of the runs has ended; over
training time, it ends there, since runs of one experiment differ in speed; runs that share no time, such as short ones
that took different times to compile, have a line each. Each curve has the name of its algorithm and the settings in
which it differs from the others. Each environment has its own panels.
Experiments with two runs or more are compared by the probability that a run of one ends better than a run of the
other (Agarwal et al. 2021, "probability of improvement").
With --normalize, they also get a score over several environments: the interquartile mean of all their runs, where the
first return counts 0, such as that of random actions, and the second one 1.
"""
_SEED = 0  # of the bootstrap, so that pictures are reproducible
# inches
_WIDTH = 12.0
_PANEL_HEIGHT = 4.3
_LEGEND_LINE = 0.22
_PAD = 0.1
_LEGEND_WIDTH = 128  # characters side by side


def plot_experiments(
    experiments: Sequence[Experiment], path: Path, *, goal: float | None = None
) -> None:
    """Draw mean returns over env steps and over training time, side by side, with a row of panels
    per environment.

    Args:
        experiments: the experiments; each name gets a colour.
        path: file of the picture; its suffix chooses the format.
        goal: a return to draw as a horizontal line; None for none.

    Raises:
        ConfigError: the file can't be written, or its format is not supported.
        ImportError: matplotlib is not installed.
    """
    figure = draw_experiments(experiments, goal=goal)
    try:
        with replaced(path) as temporary:
            figure.savefig(temporary)
    except (OSError, ValueError) as error:
        raise _not_drawn(path, error) from error


def draw_experiments(experiments: Sequence[Experiment], *, goal: float | None = None) -> Figure:
    """Draw the figure that `plot_experiments` writes.

    Args:
        experiments: the experiments; each name gets a colour.
        goal: a return to draw as a horizontal line; None for none.

    Returns:
        The figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    rng = np.random.default_rng(_SEED)
    envs = list(dict.fromkeys(experiment.env for experiment in experiments))
    names = _names_of(experiments)
    labels = {name: fill(_with_runs(name, experiments), _LEGEND_WIDTH) for name in names}
    label_width = 8 + max(map(len, labels.values()))
    columns = max(1, min(len(names), 4, _LEGEND_WIDTH // label_width))
    lines = sum(label.count("\n") + 1 for label in labels.values()) / columns + 1
    figure = Figure(
        figsize=(_WIDTH, _PANEL_HEIGHT * len(envs) + _LEGEND_LINE * (lines + 1)),
        dpi=120,
        facecolor="white",
    )
    figure.set_layout_engine("constrained", w_pad=_PAD, h_pad=_PAD)
    handles: dict[str, Artist] = {}
    panels = figure.subplots(len(envs), 2, sharey="row", squeeze=False)
    for (over_steps, over_time), env in zip(panels, envs, strict=True):
        in_env = [experiment for experiment in experiments if experiment.env == env]
        longest_s = max(run.seconds[-1] for experiment in in_env for run in experiment.runs)
        factor, unit = time_unit(float(longest_s))
        for experiment in in_env:
            colour = f"C{names.index(experiment.name)}"
            steps_band = band_of(experiment.runs, by="steps", rng=rng)
            time_band = band_of(experiment.runs, by="seconds", rng=rng)
            num_runs = len(experiment.runs)
            time_band = shared_part(time_band, num_runs)
            handles[labels[experiment.name]] = _draw(over_steps, steps_band, colour, num_runs)
            if time_band.num_runs.max() == num_runs:
                _draw(over_time, time_band, colour, num_runs, factor)
                continue
            # at no time do all runs have a return: a mean would jump where a run begins or ends
            for run in experiment.runs:
                over_time.plot(run.seconds / factor, run.returns, color=colour, linewidth=1.0)
        for axes, what in ((over_steps, "env steps"), (over_time, f"training time in {unit}")):
            if goal is not None:
                line = axes.axhline(goal, color=INK, linewidth=1.0, linestyle=(0, (2, 3)))
                handles[f"goal {goal:g}"] = line
            finish_axes(axes, what)
            axes.set_xlim(left=0)
        title = one_line(env, _LEGEND_WIDTH // 2)
        over_steps.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK)
        over_steps.set_ylabel("mean episode return", color=INK)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        frameon=False,
        labelcolor=INK,
        ncols=columns,
        fontsize=9,
    )
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status: 0 done, 1 failed, 2 wrong usage, 130 ended by
    Ctrl-C.

    Args:
        argv: the command's arguments; None takes those of the process.
    """
    parser = Parser(
        _PROG,
        "RUN... [options]",
        "Draw learning curves of runs, and compare experiments.",
        _EXAMPLES,
    )
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="run directories, or directories of runs"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=(
            "the picture: .png, .svg or .pdf (curves.png; for a single run "
            f"{PLOT_FILE} in its directory)"
        ),
    )
    parser.add_argument(
        "--goal", type=finite_number, metavar="X", help="a return to draw as a line"
    )
    parser.add_argument(
        "--label",
        action="append",
        metavar="TEXT",
        help="name of a curve; once for each curve, in the same order",
    )
    parser.add_argument(
        "--normalize",
        action="append",
        metavar="ENV=LOW:HIGH",
        help="returns that score 0 and 1 in an environment; once for each that should count",
    )
    options = parser.parse(argv)
    return exit_status(lambda: _plot(options))


def _plot(options: Mapping[str, Any]) -> None:
    out: Path | None = options.get("out")
    if out is not None:
        _check_picture(out)
    curves = []
    for directory in find_runs(options["runs"]):
        try:
            curves.append(RunCurve.read(directory))
        except ConfigError as error:
            sys.stderr.write(f"aiorl: left out: {error}\n")
    if not curves:
        raise ConfigError("There are no results to draw.", key="run")
    experiments = _labelled(group_runs(curves), options.get("label", []))
    ranges = _ranges(options.get("normalize", []), {experiment.env for experiment in experiments})
    try:
        path = _drawn(experiments, out, options.get("goal"))
    except ImportError as error:
        raise ImportError(
            f"pictures need matplotlib ({error}): {install_command('learner')}"
        ) from error
    for experiment in experiments:
        last = np.array([run.returns[-1] for run in experiment.runs])
        sys.stdout.write(
            f"{experiment.name} on {experiment.env}: {_runs(len(last))}, at the end"
            f" {float(interquartile_mean(last)):,.1f} (interquartile mean; {last.min():,.1f} to"
            f" {last.max():,.1f})\n"
        )
    for pair in compare(experiments, np.random.default_rng(_SEED)):
        envs = "" if pair.num_envs == 1 else f" over {pair.num_envs} environments"
        sys.stdout.write(
            f"{pair.better} ends better than {pair.worse} with probability {pair.probability:.2f}"
            f" (95 % interval {pair.low:.2f} to {pair.high:.2f}{envs})\n"
        )
    for score in scores_of(experiments, ranges, np.random.default_rng(_SEED)):
        envs = "1 environment" if score.num_envs == 1 else f"{score.num_envs} environments"
        sys.stdout.write(
            f"{score.name} scores {score.mean:.2f} (interquartile mean of {_runs(score.num_runs)}"
            f" in {envs}; 95 % interval {score.low:.2f} to {score.high:.2f})\n"
        )
    sys.stdout.write(f"{path}\n")


def _ranges(texts: Sequence[str], envs: Collection[str]) -> dict[str, tuple[float, float]]:
    """Return the returns that score 0 and 1 by environment.

    Args:
        texts: "ENV=LOW:HIGH" of each.
        envs: environments that have runs.

    Raises:
        ConfigError: a text has another form, or names no environment of the runs.
    """
    ranges = {}
    for text in texts:
        env, _, numbers = text.rpartition("=")
        try:
            low, high = map(float, numbers.split(":"))
        except ValueError:
            low = high = math.nan
        if not math.isfinite(high - low) or low == high:
            raise ConfigError(
                f"--normalize is {text!r}, expected ENV=LOW:HIGH with two different returns, such"
                " as CartPole-v1=20:500.",
                key="normalize",
                value=text,
            )
        if env not in envs:
            raise ConfigError(
                f"--normalize names {env!r}, but the runs are of {', '.join(sorted(envs))}.",
                key="normalize",
                value=text,
            )
        ranges[env] = (low, high)
    return ranges


def _check_picture(out: Path) -> None:
    """Refuse the file of a picture before anything is read, if it can't be written.

    Raises:
        ConfigError: its directory does not exist, or its name says no format.
    """
    check_directory_of(out, "--out")
    if not out.suffix:
        raise ConfigError(
            f"--out is {str(out)!r}, expected a file name that ends in .png, .svg or .pdf."
        )


def _names_of(experiments: Sequence[Experiment]) -> list[str]:
    return list(dict.fromkeys(experiment.name for experiment in experiments))


def _labelled(experiments: list[Experiment], labels: Sequence[str]) -> list[Experiment]:
    """Return the experiments with the names that the user gives their curves."""
    names = _names_of(experiments)
    if labels and len(labels) != len(names):
        raise ConfigError(
            f"--label is given {len(labels)} times, but the number of curves is {len(names)}:"
            f" {'; '.join(names)}.",
            key="label",
            value=list(labels),
            hint="Give a label for each curve, in this order.",
        )
    label_of = dict(zip(names, labels or names, strict=True))
    return [replace(experiment, name=label_of[experiment.name]) for experiment in experiments]


def _drawn(experiments: Sequence[Experiment], out: Path | None, goal: float | None) -> Path:
    """Draw the picture and return its path; for a single run, it shows the range of returns."""
    experiment = experiments[0]
    if len(experiments) > 1 or len(experiment.runs) > 1:
        path = out or Path("curves.png")
        plot_experiments(experiments, path, goal=goal)
        return path
    run = experiment.runs[0]
    path = out or run.path / PLOT_FILE
    title = f"{experiment.name} on {experiment.env}"
    if goal is None:
        goal = run.config.get("stop_return")
    try:
        plot_learning_curve(run.path, title=title, stop_return=goal, path=path)
    except (OSError, ValueError) as error:
        raise _not_drawn(path, error) from error
    return path


def _not_drawn(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path} can't be drawn: {error}.", key="out", value=str(path))


def _draw(axes: Axes, band: Band, colour: str, num_runs: int, factor: float = 1.0) -> Artist:
    """Draw a curve with its band, in units of ``factor`` steps or seconds, and return its artist
    for the legend. Where it has fewer than ``num_runs``, it is dashed.
    """
    has_all_runs = band.num_runs == num_runs
    at = band.at / factor
    axes.fill_between(at, band.low, band.high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(at, band.mean, color=colour, linewidth=1.4, linestyle=(0, (4, 2)))
    mean = np.where(has_all_runs, band.mean, np.nan)
    (line,) = axes.plot(at, mean, color=colour, linewidth=2.2)
    return line


def _with_runs(name: str, experiments: Sequence[Experiment]) -> str:
    """Return a curve's name, with its number of runs if all environments have the same number."""
    counts = {len(experiment.runs) for experiment in experiments if experiment.name == name}
    return f"{name} ({_runs(*counts)})" if len(counts) == 1 else name


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"


if __name__ == "__main__":
    raise SystemExit(main())
