"""Runs as a page shows them, read from their directories alone: what they do in plain words,
figures, curves, logs.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import re
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aiorl.config.files import MAX_BYTES, folders_inside, names_inside
from aiorl.config.layers import CONFIG_FILE
from aiorl.config.yaml_text import parse_yaml
from aiorl.data.columns import Array
from aiorl.errors import ConfigError
from aiorl.run.observers import STOP_CRITERIA
from aiorl.run.report.loggers import JSONL_FILE, numbers_of, results_in
from aiorl.run.report.plot import OF_A_RUN, Band, RunCurve, band_of, group_runs, shared_part
from aiorl.status import FILES, SILENT_S, Part, is_run, part_of, signature, status_of_run
from aiorl.text import many_lines, one_line

STEPS = "timesteps_total"
SECONDS = "time_total_s"
_MAX_NAMES = 2000
_MAX_NUMBERS = 4_000_000
_USUAL_BYTES = 4 << 10
_TAIL_BYTES = 64 << 10
_LOG_BYTES = 8 << 20
_MAX_ENTRIES = 300
_MAX_ENTRY = 24_000
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_ENTRY = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ ([A-Z]+) [\w.]+: (.*)"  # a learner's
    r"|(\d\d:\d\d:\d\d) (?:\S+ )?([DIWEC]) (.*)"  # a worker's
)
_KEYS = re.compile(r"(?m)^(?=\w)")
"""Places in a config's text where its keys begin."""
_MAX_KEPT_SETTINGS = 64 << 10
"""Most characters of settings that are kept, in 30 times the memory: another user can change those
of a run again and again."""
_FILMS = (".mp4", ".webm", ".gif")
_MAX_FILMS = 50
_HEAD = ("algo:", "env:", "seed:", "stop_")
"""Beginnings of the parts of a config's text that a glance at a run shows."""
OVER = ("ended", "failed", "gone", "unknown")
"""Phases that only a change of the files ends."""
_ABSENT = {
    True: ("silent", "Its process exists, but has written nothing for a while."),
    False: ("gone", "Its process is gone without a last word. It continues with --resume."),
    None: ("unknown", "No process of this host writes here."),
}
"""Existence of a silent run's process -> phase of the run."""
_SLOW_S = 30.0
_FAILED = "the learner failed"
_MAX_WORDS = 300
_MAX_FAILURES = 20
_POINTS = 200


# Results
# --------------------------------------------------------------------------------------------------


def numbers_from(
    directory: Path, start: int, skipped_bytes: int = 0
) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the end of each line of result.jsonl and its numbers by name; see `results_in`.

    Results without env steps or time are left out.
    """
    with contextlib.suppress(OSError):
        for end, result in results_in(directory / JSONL_FILE, skipped_bytes, start):
            numbers = {}
            with contextlib.suppress(OverflowError, RecursionError):
                numbers = numbers_of(result)
            if len(numbers) <= _MAX_NAMES and all(
                math.isfinite(numbers.get(name, math.nan)) for name in (STEPS, SECONDS)
            ):
                yield end, numbers


def curves(
    directory: Path, *, names: Collection[str] | None = None, num_points: int = 1000
) -> tuple[dict[str, Array], int]:
    """Return the numbers of a run's results by name [P], NaN where a result has none.

    Args:
        directory: the run directory.
        names: the numbers to return; None returns all.
        num_points: number of results to which a large file is thinned, evenly.

    Returns:
        The numbers, and the bytes of result.jsonl up to the end of the last result.
    """
    _, size = part_of(directory, JSONL_FILE, 0, 0)
    skipped_bytes = 0
    if size > num_points * _USUAL_BYTES:
        skipped_bytes = size // num_points
    results = [*numbers_from(directory, 0, skipped_bytes)]
    if skipped_bytes:  # none of the newest results is left out
        start = max([0, size - _TAIL_BYTES, *(end for end, _ in results)])
        results += numbers_from(directory, start)
    rows = [row for _, row in results]
    if names is None:
        max_names = _MAX_NUMBERS // max(1, len(rows))
        names = sorted({name for row in rows for name in row})[:max_names]
    columns = dict[str, Array]()
    for name in names:
        # float32 is enough for pictures
        dtype = np.float64 if name in (STEPS, SECONDS) else np.float32
        columns[name] = np.array([row.get(name, math.nan) for row in rows], dtype)
    return columns, max((end for end, _ in results), default=0)


# Config
# --------------------------------------------------------------------------------------------------


def config_text(directory: Path) -> str:
    """Return the text of a run's config, "" if there is none."""
    return part_of(directory, CONFIG_FILE, 0, MAX_BYTES)[0].decode("utf-8", "replace")


def all_settings(text: str) -> Mapping[str, Any]:
    """Return the values in a config's text, {} if it is damaged."""
    with contextlib.suppress(ConfigError):
        return parse_yaml(Path(CONFIG_FILE), text.encode())[0]
    return {}


_kept_settings = functools.lru_cache(maxsize=500)(all_settings)


def settings(text: str, pick: Callable[[str], object]) -> Mapping[str, Any]:
    """Return some of the values in a config's text, which are kept for the next time; {} if they
    are damaged. Values that are too large to keep become a digest, so that those of two runs still
    differ.

    Args:
        text: the text.
        pick: called with the text of each key and its value; those for which it returns False are
            left out.
    """
    picked = "".join(filter(pick, _KEYS.split(text)))
    if len(picked) > _MAX_KEPT_SETTINGS:
        return {"digest": hashlib.sha256(picked.encode()).hexdigest()}
    return _kept_settings(picked)


# Logs and films
# --------------------------------------------------------------------------------------------------


def log_entries(
    path: Path, words: str = "", level: str = "DEBUG", *, inside: Path | None = None
) -> tuple[list[dict[str, str]], bool]:
    """Return the newest entries of a log, oldest first.

    Args:
        path: the log.
        words: text that the entries contain, in upper or lower case.
        level: lowest level of the entries.
        inside: the run directory, in which no link is followed; None = that of the log.

    Returns:
        Entries with ``time``, ``level``, ``text`` and the lines that follow it as ``more``, such as
        a traceback; and whether older parts of the log, or older entries, were left out.
    """
    directory = inside or path.parent
    tail, size = part_of(directory, str(path.relative_to(directory)), -_LOG_BYTES, _LOG_BYTES)
    lowest = LEVELS.index(level)
    entries: list[dict[str, str]] = []
    lines_after: list[str] = []
    for line in reversed(tail.decode("utf-8", "replace").split("\n")):
        match = _ENTRY.fullmatch(line)
        if match is None:
            lines_after.append(line)
            continue
        at, letters, text = match.group(1, 2, 3) if match[1] else match.group(4, 5, 6)
        entry_level = next((name for name in LEVELS if name.startswith(letters)), "INFO")
        after = "\n".join(reversed(lines_after)).rstrip()
        lines_after.clear()
        if LEVELS.index(entry_level) < lowest:
            continue
        if words.casefold() not in f"{at} {text}\n{after}".casefold():
            continue
        if len(entries) == _MAX_ENTRIES:
            return entries[::-1], True
        entries.append(
            {
                "time": at,
                "level": entry_level,
                "text": one_line(text, _MAX_ENTRY),
                "more": many_lines(after, _MAX_ENTRY),
            }
        )
    return entries[::-1], size > _LOG_BYTES


def films(directory: Path) -> list[str]:
    """Return paths of the films in a run directory and in the directories inside it, relative to
    it.
    """
    paths = [*names_inside(directory)]
    for folder in folders_inside(directory):
        paths += [f"{folder}/{name}" for name in names_inside(directory, folder)]
    return sorted([path for path in paths if path.endswith(_FILMS)][:_MAX_FILMS])


# Runs
# --------------------------------------------------------------------------------------------------


class Run:
    """A run directory as a page shows it.

    Attributes:
        path: the directory.
        name: its name for people, which is unique in the page.
        account: its account, as `glance` has read it.
    """

    def __init__(self, path: Path) -> None:
        """Take over a directory without reading it yet."""
        self.path = path
        self.name = one_line(path.absolute().name, 255)
        self._files: object = None
        self._glance: dict[str, Any] = {}
        self.account = Part({})

    def glance(self) -> dict[str, Any]:
        """Return the run's most important figures."""
        files = signature(self.path, *FILES)
        if files != self._files or self._glance["phase"] not in OVER:
            self._glance = self._look()
            self._files = files
        return self._glance

    def details(self) -> dict[str, Any]:
        """Return all that a page of this run shows, except curves, the config and whole logs."""
        glance = self.glance()
        # hist_stats are long lists
        result = {**self.account.part("result").value}
        result.pop("hist_stats", None)
        return {
            "glance": glance,
            "account": {**self.account.value, "result": result},
            "failures": self._failures(),
            "films": films(self.path),
        }

    def _failures(self) -> list[dict[str, str]]:
        return _failures_in(self.path, signature(self.path, "log.txt"))

    def _look(self) -> dict[str, Any]:
        self.account = Part(status_of_run(self.path))
        result = self.account.part("result")
        config = Part(settings(config_text(self.path), lambda key: key.startswith(_HEAD)))
        phase, words = self._phase()
        figures = {name: result.number(name) for name in result.value}
        returns = result.part("hist_stats").numbers("episode_reward")
        if returns:
            figures["std"] = statistics.pstdev(returns)
        figures["policy_lag"] = result.part("policy_lag").number("mean")
        if phase in OVER:
            figures |= {"sampled_steps_per_s": None, "trained_steps_per_s": None}
        return {
            "name": self.name,
            "env": config.text("env", 100),
            "algo": config.text("algo", 100),
            "seed": config.number("seed"),
            "phase": phase,
            "words": one_line(words, _MAX_WORDS),
            "changed": time.time() - self.account.value["silent_s"],
            "figures": figures,
            "stops": {name: config.number(name) for name in STOP_CRITERIA},
        }

    def _phase(self) -> tuple[str, str]:
        """Return the kind of thing that the run does, and a sentence about it."""
        account = self.account.value
        learner = self.account.part("learner")
        end = learner.text("end")
        state = learner.text("state") or "starting"
        if end == _FAILED:
            errors = self._failures()
            reason = errors[-1]["text"] if errors else "its log has the reason."
            return "failed", f"Failed: {reason}"
        if end:
            return "ended", end
        if account["is_alive"] is False or account["silent_s"] >= SILENT_S:
            return _ABSENT[account["is_alive"]]
        if not self.account.part("result").value:
            return "starting", f"{state[:1].upper()}{state[1:]}."
        waited_s = learner.number("no_update_s") or 0.0
        if waited_s > _SLOW_S:
            return "waiting", f"No update for {waited_s:.0f} s. {account['learner_words']}"
        return "training", "Training."


@functools.lru_cache(maxsize=256)
def _failures_in(directory: Path, state: object) -> list[dict[str, str]]:
    """Return the newest errors in a run's log with a `signature`."""
    return log_entries(directory / "log.txt", level="ERROR")[0][-_MAX_FAILURES:]


class Runs:
    """The runs below a directory, or the one that it holds.

    Attributes:
        root: the directory.
        is_single: True if it is a run itself.
    """

    def __init__(self, root: Path) -> None:
        """Take over a run directory, or a directory of runs."""
        self.root = root
        self.is_single = is_run(root)
        self._runs: dict[Path, Run] = {}

    def find(self) -> dict[str, Run]:
        """Return the runs that exist now by name, sorted; links to other places are not
        followed.
        """
        paths = [self.root]
        if not self.is_single:
            paths = [self.root / name for name in sorted(folders_inside(self.root))]
        self._runs = {path: self._runs.get(path) or Run(path) for path in paths if is_run(path)}
        return {run.name: run for run in self._runs.values()}

    def glances(self) -> list[dict[str, Any]]:
        """Return the figures of all runs."""
        return [run.glance() for run in self.find().values()]


# Runs next to each other
# --------------------------------------------------------------------------------------------------


def experiments(runs: Sequence[Run], metric: str, by: str) -> list[dict[str, Any]]:
    """Return runs and seeds as curves, grouped as `aiorl plot` groups them. What has not changed is
    kept.

    Args:
        runs: the runs; those without this number are left out.
        metric: name of a number of the results.
        by: ``steps`` or ``seconds``.

    Returns:
        For each experiment its name, environment, the names of its runs, the mean of their last
        values, and arrays ``at`` (env steps or seconds), ``mean``, ``low`` and ``high``: the
        interquartile mean of the runs, and its 95 % bootstrap interval.
    """
    names = {run.path: run.name for run in runs}
    curves_of_runs = [
        _curve(path, signature(path, JSONL_FILE, CONFIG_FILE), metric) for path in names
    ]
    descriptions = []
    for experiment in group_runs([curve for curve in curves_of_runs if len(curve.steps)]):
        band = _band(experiment.runs, by)
        if by == "seconds":
            band = shared_part(band, len(experiment.runs))
        descriptions.append(
            {
                "name": one_line(experiment.name, 200),
                "env": one_line(experiment.env, 100),
                "runs": [names[curve.path] for curve in experiment.runs],
                "last": float(np.mean([curve.returns[-1] for curve in experiment.runs])),
                "at": band.at.astype(np.float32),
                "mean": band.mean.astype(np.float32),
                "low": band.low.astype(np.float32),
                "high": band.high.astype(np.float32),
            }
        )
    return descriptions


@functools.lru_cache(maxsize=1000)
def _curve(path: Path, state: object, metric: str) -> RunCurve:
    """Return the curve of a run with a `signature`, which can be empty."""
    columns, _ = curves(path, num_points=_POINTS, names={STEPS, SECONDS, metric})
    steps = columns[STEPS]
    # results that have the metric, the first one of those with the same env steps
    rows = np.flatnonzero(np.isfinite(columns[metric]))
    _, first_rows = np.unique(steps[rows], return_index=True)
    rows = rows[first_rows]
    # most runs of an experiment share the other settings, and so the parsing
    config = settings(config_text(path), lambda key: not key.startswith(OF_A_RUN))
    return RunCurve(
        path=path,
        config=config,
        steps=steps[rows],
        seconds=columns[SECONDS][rows],
        returns=columns[metric][rows],
    )


@functools.lru_cache(maxsize=500)
def _band(runs: tuple[RunCurve, ...], by: str) -> Band:
    return band_of(runs, by=by, rng=np.random.default_rng(0))
