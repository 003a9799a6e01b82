"""Runs and seeds next to each other, grouped as `aiorl plot` groups them. What has not changed is kept."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aiorl.config.layers import CONFIG_FILE
from aiorl.run.report.loggers import JSONL_FILE
from aiorl.run.report.plot import OF_A_RUN, Band, RunCurve, band_of, group_runs
from aiorl.text import one_line
from aiorl.watch.glance import Run
from aiorl.watch.reading import SECONDS, STEPS, config_text, curves, parsed_config, signature

_POINTS = 200
_BLOCKS = re.compile(r"(?m)^(?=\w)")


def experiments(runs: Sequence[Run], metric: str, by: str) -> list[dict[str, Any]]:
    """Return each experiment as a curve with its band, 95 % bootstrap interval of the interquartile mean.

    Args:
        runs: the runs; those without this number are left out.
        metric: name of a number of the results.
        by: ``steps`` or ``seconds``.

    Returns:
        For each experiment its name, environment, the names of its runs, and arrays ``at``, ``mean``, ``low``,
        ``high``, of which ``at`` is in env steps or seconds.
    """
    names = {run.path: run.name for run in runs}
    files = {path: signature(path / JSONL_FILE, path / CONFIG_FILE) for path in names}
    found = [curve for path in names if (curve := _curve(path, files[path], metric)) is not None]
    made = []
    for one in group_runs(found):
        band = _band(tuple((curve.path, files[curve.path]) for curve in one.runs), metric, by)
        made.append(
            {
                "name": one_line(one.name, 200),
                "env": one_line(one.env, 100),
                "runs": [names[curve.path] for curve in one.runs],
                "last": float(np.mean([curve.returns[-1] for curve in one.runs])),
                **{name: getattr(band, name).astype(np.float32) for name in ("at", "mean", "low", "high")},
            }
        )
    return made


@functools.lru_cache(maxsize=2000)
def _curve(path: Path, state: object, metric: str) -> RunCurve | None:
    """Return the curve of a run with a `signature`, None if it has none."""
    columns, _ = curves(path, num_points=_POINTS, names={STEPS, SECONDS, metric})
    values, steps, seconds = (columns[name] for name in (metric, STEPS, SECONDS))
    there = np.flatnonzero(np.isfinite(values))
    there = there[np.unique(steps[there], return_index=True)[1]]
    if not len(there):
        return None
    blocks = _BLOCKS.split(config_text(path))  # most runs of an experiment share the rest, and so the parsing
    config = parsed_config("".join(block for block in blocks if not block.startswith(OF_A_RUN)))
    return RunCurve(path, config, steps[there], seconds[there], values[there])


@functools.lru_cache(maxsize=1000)
def _band(runs: tuple[tuple[Path, object], ...], metric: str, by: str) -> Band:
    found = [curve for path, state in runs if (curve := _curve(path, state, metric)) is not None]
    return band_of(found, by=by, rng=np.random.default_rng(0))
