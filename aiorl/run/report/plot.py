"""The learning curve of one run as a picture, drawn from result.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aiorl.process.replaced_file import replaced
from aiorl.run.report.figures import number_at
from aiorl.run.report.loggers import each_result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["INK", "PLOT_FILE", "finish_axes", "plot_learning_curve", "time_unit"]

PLOT_FILE = "learning_curve.png"

_MAX_POINTS = 1000
_FEW_POINTS = 20  # that are marked
_LINE, _BAND, _GOAL = "#1f6f8b", "#1f6f8b", "#d1495b"
INK = "#333333"
"""Colour of all text."""


def plot_learning_curve(
    run_dir: Path, *, title: str = "", stop_return: float | None = None, path: Path | None = None
) -> Path | None:
    """Draws mean return over env steps, with the range of returns around it and wall time on top.

    Takes about half a second, most of it for the import of matplotlib when first used; safe in any thread, since no
    global state of matplotlib is touched.

    Args:
        run_dir: where result.jsonl is.
        title: heading; empty takes the run directory's name.
        stop_return: return that the run is to reach, drawn as a line.
        path: the picture, replaced at once, never half written; None is learning_curve.png in the run directory.
    Returns: the picture's path, or None when no episode has ended yet.
    Raises: OSError when a file can't be read or written; ImportError without matplotlib.
    """
    curve = _Curve(each_result(run_dir))
    if not curve.steps.size:
        return None
    # Imported here: 0.2 s that only runs with a picture need.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.fill_between(curve.steps, curve.low, curve.high, color=_BAND, alpha=0.15, linewidth=0, label="min to max")
    marker = "o" if curve.steps.size <= _FEW_POINTS else None
    axes.plot(curve.steps, curve.mean, color=_LINE, linewidth=2, marker=marker, markersize=4, label="mean return")
    if stop_return is not None:
        axes.axhline(stop_return, color=_GOAL, linewidth=1.2, linestyle=(0, (5, 4)), label=f"goal {stop_return:g}")
    finish_axes(axes, "env steps")
    axes.set_title(title or run_dir.resolve().name, loc="left", fontsize=12, fontweight="bold", color=INK, pad=12)
    axes.set_ylabel("episode return", color=INK)
    axes.set_xlim(left=0, right=max(float(curve.steps[-1]), 1.0))
    axes.legend(loc="best", frameon=False, labelcolor=INK)
    _add_wall_time(axes, curve)
    path = run_dir / PLOT_FILE if path is None else path
    with replaced(path) as temporary:
        figure.savefig(temporary)
    return path


class _Curve:
    """The columns of the results that are drawn, thinned to what a picture can show.

    Attributes:
        steps: [P] env steps, never falling.
        mean: [P] mean return, likewise low, high: least and greatest.
        seconds: [P] training time.
    """

    def __init__(self, results: Iterable[Mapping[str, Any]]) -> None:
        rows = [
            [number_at(result, name) for name in _COLUMNS]
            for result in results
            if math.isfinite(number_at(result, "episode_reward_mean"))
        ]
        table = np.asarray(rows, np.float64).reshape(-1, len(_COLUMNS))
        table = table[np.argsort(table[:, 0], kind="stable")]
        if len(table) > _MAX_POINTS:
            table = table[np.unique(np.linspace(0, len(table) - 1, _MAX_POINTS).astype(np.int64))]
        columns: list[NDArray[np.float64]] = list(table.T)
        self.steps, self.mean, self.low, self.high, self.seconds = columns


_COLUMNS = ("timesteps_total", "episode_reward_mean", "episode_reward_min", "episode_reward_max", "time_total_s")


def finish_axes(axes: Axes, what: str) -> None:
    """Give axes the looks that all pictures have; ``what`` is along the bottom."""
    from matplotlib.ticker import EngFormatter

    axes.set_xlabel(what, color=INK)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=INK)


def _add_wall_time(axes: Axes, curve: _Curve) -> None:
    """Add an axis on top: the wall time at which the steps of each tick below had been sampled."""
    if curve.steps.size < 2 or not np.all(np.isfinite(curve.seconds)) or curve.steps[0] == curve.steps[-1]:
        return
    factor, unit = time_unit(float(curve.seconds[-1]))
    ticks = axes.get_xticks()
    axes.set_xticks(ticks[ticks <= axes.get_xlim()[1]])  # kept, whatever room the layout leaves them
    ticks = ticks[(ticks >= curve.steps[0]) & (ticks <= curve.steps[-1])]
    times = np.interp(ticks, curve.steps, curve.seconds) / factor
    above = axes.twiny()
    above.set_xlim(axes.get_xlim())
    above.set_xticks(ticks, [f"{time:.1f}" if times[-1] < 100 else f"{time:.0f}" for time in times])
    above.set_xlabel(f"wall time in {unit}", color="#777777", fontsize=9)
    above.tick_params(colors="#777777", labelsize=8, length=3)
    for side in ("top", "right", "left", "bottom"):
        above.spines[side].set_visible(False)


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit in which a time is easy to read: its seconds and its name."""
    if seconds < 180:
        return 1.0, "s"
    return (60.0, "minutes") if seconds < 3 * 3600 else (3600.0, "hours")
