"""Runs and seeds next to each other, grouped as `aiorl plot` groups them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiorl.config.layers import CONFIG_FILE
from aiorl.run.report.loggers import JSONL_FILE
from aiorl.run.report.plot import F64, OF_A_RUN, Band, RunCurve, band_of, group_runs
from aiorl.text import one_line
from aiorl.watch.glance import Run, plain
from aiorl.watch.reading import SECONDS, STEPS, Curves, config_text, parsed_config, signature

_POINTS = 200
_BLOCKS = re.compile(r"(?m)^(?=\w)")
_DIGITS = 6


class Compared:
    """Curves of experiments by any number of the results; what has not changed is kept."""

    def __init__(self) -> None:
        """Start with nothing read."""
        self._curves: dict[tuple[str, str], tuple[object, RunCurve | None]] = {}
        self._bands: dict[tuple[Any, ...], Band] = {}

    def experiments(self, runs: Sequence[Run], metric: str, by: str) -> list[dict[str, Any]]:
        """Return each experiment as a curve with its band, 95 % bootstrap interval of the interquartile mean.

        Args:
            runs: the runs; those without this number are left out.
            metric: name of a number of the results.
            by: ``steps`` or ``seconds``.

        Returns:
            For each experiment its name, environment, the names of its runs, and lists ``at``, ``mean``, ``low``,
            ``high``, of which ``at`` is in env steps or seconds.
        """
        names = {run.path: run.name for run in runs}
        found = [curve for run in runs if (curve := self._curve(run, metric)) is not None]
        made = []
        for one in group_runs(found):
            key = (metric, by, *((curve.path, len(curve.steps), curve.steps[-1]) for curve in one.runs))
            if key not in self._bands:
                if len(self._bands) > 1000:
                    self._bands.clear()
                self._bands[key] = band_of(one.runs, by=by, rng=np.random.default_rng(0))
            band = self._bands[key]
            columns = {"at": band.at, "mean": band.mean, "low": band.low, "high": band.high}
            made.append(
                {
                    "name": plain(one_line(one.name, 200)),
                    "env": plain(one_line(one.env, 100)),
                    "runs": [names[curve.path] for curve in one.runs],
                    "last": float(np.mean([curve.returns[-1] for curve in one.runs])),
                    **{name: shorter(column) for name, column in columns.items()},
                }
            )
        return made

    def _curve(self, run: Run, metric: str) -> RunCurve | None:
        files = signature(run.path / JSONL_FILE, run.path / CONFIG_FILE)
        known = self._curves.get((run.name, metric))
        if known is None or known[0] != files:
            known = self._curves[run.name, metric] = files, _read(run, metric)
        return known[1]


def _read(run: Run, metric: str) -> RunCurve | None:
    curves = Curves(run.path, max_points=_POINTS, names={STEPS, SECONDS, metric})
    values, steps, seconds = (curves.column(name) for name in (metric, STEPS, SECONDS))
    there = np.flatnonzero(np.isfinite(values))
    there = there[np.unique(steps[there], return_index=True)[1]]
    if not len(there):
        return None
    blocks = _BLOCKS.split(config_text(run.path))  # most runs of an experiment share the rest, and so the parsing
    config = parsed_config("".join(block for block in blocks if not block.startswith(OF_A_RUN)))
    return RunCurve(run.path, config, steps[there], seconds[there], values[there])


def shorter(values: F64) -> list[float | None]:
    """Return numbers for a picture, with six digits; None stands for those that are not finite."""
    return [float(f"{value:.{_DIGITS}g}") if np.isfinite(value) else None for value in values.tolist()]
