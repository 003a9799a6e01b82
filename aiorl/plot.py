"""`python -m aiorl.plot RUN...`: runs and seeds of one experiment as one curve with a band, several beside another."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aiorl.config.parser import Parser, exit_status
from aiorl.errors import ConfigError
from aiorl.extras import install_command
from aiorl.report.experiments import Band, Experiment, RunCurve, band_of, find_runs, group_runs, interquartile_mean
from aiorl.report.plot import INK, finish_axes
from aiorl.report.replaced_file import replaced

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["main", "plot_experiments"]

_PROG = "python -m aiorl.plot"
_EXAMPLES = """examples:
  python -m aiorl.plot runs/ppo-1 runs/ppo-2 runs/ppo-3                # three seeds, one curve
  python -m aiorl.plot runs/ppo-* runs/impala-* --out compared.png    # two experiments
  python -m aiorl.plot runs                                           # all runs in there

Runs that differ in nothing but their seed are one experiment: the line is the interquartile mean of their mean returns,
the band its 95 % bootstrap interval. Where some of the runs have ended already, the line is dashed.
"""
_COLOURS = ("#1f6f8b", "#d1495b", "#e09f3e", "#5b8c5a", "#6a4c93", "#8d6a4f", "#3d5a80", "#b56576")
_SEED = 0  # of the bootstrap, so that a picture can be drawn again


def plot_experiments(experiments: Sequence[Experiment], path: Path, *, goal: float | None = None) -> None:
    """Draw mean returns over env steps and over training time, side by side.

    Args:
        experiments: what to draw, a colour each.
        path: the picture; its ending says which kind.
        goal: a return that is drawn as a line.

    Raises:
        ConfigError: the file can't be written, or is of no kind that can.
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rng = np.random.default_rng(_SEED)
    figure = Figure(figsize=(12, 5), dpi=120, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    for index, experiment in enumerate(experiments):
        colour = _COLOURS[index % len(_COLOURS)]
        label = f"{experiment.name} ({_runs(len(experiment.runs))})"
        _draw(left, band_of(experiment.runs, by="steps", rng=rng), colour, label)
        _draw(right, band_of(experiment.runs, by="seconds", rng=rng), colour, label)
    for axes, what in ((left, "env steps"), (right, "training time in seconds")):
        if goal is not None:
            axes.axhline(goal, color=INK, linewidth=1.0, linestyle=(0, (2, 3)), label=f"goal {goal:g}")
        finish_axes(axes, what)
        axes.set_xlim(left=0)
    left.set_ylabel("mean episode return", color=INK)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", frameon=False, labelcolor=INK, ncols=2)
    try:
        with replaced(path) as temporary:
            figure.savefig(temporary)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be drawn: {error}.", key="out", value=str(path)) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Draw; the exit status: 0 drawn, 1 failed, 2 wrong usage, 130 ended by Ctrl-C."""
    parser = Parser(_PROG, "RUN... [options]", "Draw runs and seeds of experiments as curves with bands.", _EXAMPLES)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories, or directories of them")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the picture: .png, .svg or .pdf (curves.png)")
    parser.add_argument("--goal", type=float, metavar="X", help="a return to draw as a line")
    given = parser.parse(sys.argv[1:] if argv is None else argv)
    return exit_status(lambda: _plot(given))


def _plot(given: Mapping[str, Any]) -> None:
    path: Path = given.get("out", Path("curves.png"))
    curves = []
    for directory in find_runs(given["runs"]):
        try:
            curves.append(RunCurve.read(directory))
        except ConfigError as error:
            sys.stderr.write(f"aiorl: left out: {error}\n")
    if not curves:
        raise ConfigError("There is nothing to draw.", key="run")
    experiments = group_runs(curves)
    try:
        plot_experiments(experiments, path, goal=given.get("goal"))
    except ImportError as error:
        raise ImportError(f"pictures need matplotlib ({error}): {install_command('learner')}") from error
    for experiment in experiments:
        last = np.array([run.returns[-1] for run in experiment.runs])
        sys.stdout.write(
            f"{experiment.name}: {_runs(len(last))}, at their ends {float(interquartile_mean(last)):,.1f} "
            f"(interquartile mean; {last.min():,.1f} to {last.max():,.1f})\n"
        )
    sys.stdout.write(f"{path}\n")


def _draw(axes: Axes, band: Band, colour: str, label: str) -> None:
    whole = band.num_runs == band.num_runs.max()
    axes.fill_between(band.at, band.low, band.high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(band.at, band.mean, color=colour, linewidth=1.4, linestyle=(0, (4, 2)))
    axes.plot(band.at, np.where(whole, band.mean, np.nan), color=colour, linewidth=2.2, label=label)


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"


if __name__ == "__main__":
    raise SystemExit(main())
