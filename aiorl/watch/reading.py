"""Readers of a run directory's files: results as curves, the config with its origins, logs and films."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
from array import array
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.config.files import MAX_BYTES, open_regular, parse_yaml, read_regular
from aiorl.config.layers import CONFIG_FILE, named_preset
from aiorl.errors import AiorlError
from aiorl.run.report.loggers import JSONL_FILE, MAX_LINE_BYTES, numbers_of, result_of
from aiorl.text import many_lines, one_line

STEPS, SECONDS = "timesteps_total", "time_total_s"
_RARE = "evaluation/episode_reward_mean"
"""Number that few results have, so that thinning keeps those."""
_MAX_NAMES = 2000
_WHOLE_BYTES = 4 << 20
_LOG_BYTES = 8 << 20
_MAX_ENTRIES, _MAX_ENTRY = 300, 24_000
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_ENTRY = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ ([A-Z]+) [\w.]+: (.*)"  # a learner's
    r"|(\d\d:\d\d:\d\d) (?:\S+ )?([DIWEC]) (.*)"  # a worker's
)
_FILMS = (".mp4", ".webm", ".gif")
_MAX_FILMS = 50


# Results ------------------------------------------------------------------------------------------------------


def signature(*paths: Path) -> tuple[tuple[int, int, int], ...]:
    """Return a value that changes with the contents of files."""
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            stat = path.lstat()
            found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(found)


def last_result(directory: Path) -> dict[str, Any]:
    """Return the newest whole result of a run, {} if there is none."""
    try:
        with open_regular(directory / JSONL_FILE) as file:
            size = os.fstat(file.fileno()).st_size
            tail = 64 << 10
            while True:
                file.seek(max(0, size - tail))
                lines = file.read(tail).split(b"\n")[:-1]
                if len(lines) > 1 or tail >= min(size, MAX_LINE_BYTES):
                    return next((found for line in reversed(lines) if (found := result_of(line)) is not None), {})
                tail *= 8
    except OSError:
        return {}


class Curves:
    """Numbers of a run's results by name, of at most twice ``max_points`` results; more are thinned evenly.

    Attributes:
        end: bytes of result.jsonl read so far, by whole lines.
    """

    def __init__(self, directory: Path, *, max_points: int = 1000, names: Collection[str] | None = None) -> None:
        """Read the present results.

        Args:
            directory: the run directory.
            max_points: number of results to keep at least, if there are as many.
            names: the only numbers to keep; None keeps all.
        """
        self.end = 0
        self._path, self._max_points, self._names = directory / JSONL_FILE, max_points, names
        self._ends = array("q")
        self._columns: dict[str, array[float]] = {}
        self.update()

    def __len__(self) -> int:
        """Return the number of results kept."""
        return len(self._ends)

    @property
    def names(self) -> list[str]:
        """Names of the numbers, sorted."""
        return sorted(self._columns)

    def column(self, name: str) -> NDArray[np.float64]:
        """Return the numbers of a name [P], NaN where a result has none."""
        found = self._columns.get(name)
        return np.full(len(self), np.nan) if found is None else np.frombuffer(found, np.float64).copy()

    def update(self) -> None:
        """Read what the file has gained."""
        try:
            with open_regular(self._path) as file:
                size = os.fstat(file.fileno()).st_size
                if size < self.end:  # a resumed run has removed results
                    self.end, self._ends, self._columns = 0, array("q"), {}
                if size - self.end > max(_WHOLE_BYTES, self._max_points << 12):
                    for at in np.linspace(self.end, size, self._max_points, endpoint=False)[1:]:
                        file.seek(int(at))
                        file.readline(MAX_LINE_BYTES)  # the rest of a line
                        self._add(file.readline(MAX_LINE_BYTES), file.tell())
                for line, end in lines_from(file, self.end if size - self.end <= _WHOLE_BYTES else size - (64 << 10)):
                    self._add(line, end)
        except OSError:
            return

    def _add(self, line: bytes, end: int) -> None:
        if end <= self.end or not line.endswith(b"\n"):
            return
        self.end = end
        row = numbers_in(line)
        if not row:
            return
        if len(self) >= 2 * self._max_points:
            self._thin()
        for name in row.keys() - self._columns.keys():
            if (self._names is None or name in self._names) and len(self._columns) < _MAX_NAMES:
                self._columns[name] = array("d", [math.nan]) * len(self)
        self._ends.append(end)
        for name, column in self._columns.items():
            column.append(row.get(name, math.nan))

    def _thin(self) -> None:
        ends = np.frombuffer(self._ends, np.int64)
        kept = np.searchsorted(ends, np.linspace(ends[0], ends[-1], self._max_points))
        rare = np.flatnonzero(np.isfinite(self.column(_RARE)))[-self._max_points // 4 :]
        kept = np.union1d(kept, rare)
        self._columns = {
            name: array("d", np.frombuffer(column, np.float64)[kept].tobytes())
            for name, column in self._columns.items()
        }
        self._ends = array("q", ends[kept].tobytes())


def numbers_in(line: bytes) -> dict[str, float]:
    """Return the numbers of a line of result.jsonl by name, {} if it is damaged or lacks env steps and time."""
    try:
        found = numbers_of(result_of(line) or {})
    except (OverflowError, RecursionError):
        return {}
    is_whole = all(math.isfinite(found.get(name, math.nan)) for name in (STEPS, SECONDS))
    return found if is_whole and len(found) <= _MAX_NAMES else {}


def lines_from(file: Any, start: int) -> Iterator[tuple[bytes, int]]:
    """Yield each whole line of an open file from a byte on, with the byte after it; a partial first one is left out."""
    end = max(0, start)
    file.seek(max(0, end - 1))
    if end:
        end += len(file.readline(MAX_LINE_BYTES)) - 1
    while (line := file.readline(MAX_LINE_BYTES)).endswith(b"\n"):
        end += len(line)
        yield line, end


# Config -------------------------------------------------------------------------------------------------------


def config_text(directory: Path) -> str:
    """Return the text of a run's config, "" if there is none."""
    try:
        return read_regular(directory / CONFIG_FILE, max_bytes=MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


@functools.lru_cache(maxsize=256)
def parsed_config(text: str) -> Mapping[str, Any]:
    """Return the values of a config's text, {} if it is damaged."""
    try:
        return parse_yaml(Path(CONFIG_FILE), text.encode())[0]
    except AiorlError:
        return {}


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each dotted key of a config with its value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def config_rows(text: str) -> list[tuple[str, str, str]]:
    """Return key, value and origin of each setting of a run.

    A run of this version notes origins in its config. For others, a value is compared with the defaults and the preset.
    """
    values = parsed_config(text)
    known = {"default": dict(flat(_defaults(str(values.get("algo")))))}
    if isinstance(preset := values.get("preset"), str):
        with contextlib.suppress(AiorlError):
            known[f"preset {preset}"] = dict(flat(named_preset(preset).settings))
    noted = {found[1]: found[2] for found in re.finditer(r"(?m)^#   (\S+): (.+)$", text)}
    rows = []
    for key, value in flat(values):
        origins = [origin for origin, of in known.items() if key in of and of[key] == value]
        guessed = origins[-1] if origins else "set for this run" if known["default"] else ""
        rows.append((one_line(key, 200), one_line(_written(value), 1000), one_line(noted.get(key, guessed), 300)))
    return rows


def _written(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@functools.cache
def _defaults(algo: str) -> dict[str, Any]:
    """Return the defaults of one of aiorl's own algorithms; others would have to be imported."""
    from aiorl.learning.algorithms.registry import config_class

    if not re.fullmatch(r"[a-z0-9]+", algo):
        return {}
    try:
        return config_class(algo)().to_dict()
    except AiorlError:
        return {}


# Logs and films -----------------------------------------------------------------------------------------------


def log_names(directory: Path) -> list[str]:
    """Return the names of a run's logs: the learner's, then those of its workers."""
    logs = directory / "logs"
    names = [path.name for path in logs.iterdir() if path.suffix == ".txt"] if logs.is_dir() else []
    return ["log.txt", *sorted((f"logs/{name}" for name in names), key=lambda name: (len(name), name))[:4096]]


def log_entries(path: Path, words: str = "", level: str = "DEBUG") -> tuple[list[dict[str, str]], bool]:
    """Return the newest entries of a log, oldest first.

    Args:
        path: the log.
        words: text that the entries contain, in upper or lower case.
        level: lowest level of the entries.

    Returns:
        Entries with ``time``, ``level``, ``text`` and the lines that follow it as ``more``, such as a traceback; and
        whether older parts of the log, or older entries, were left out.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _LOG_BYTES))
            lines = file.read(_LOG_BYTES).decode("utf-8", "replace").split("\n")
    except OSError:
        return [], False
    least, wanted = _LEVELS.index(level), words.casefold()
    entries: list[dict[str, str]] = []
    more: list[str] = []
    for line in reversed(lines):
        found = _ENTRY.fullmatch(line)
        if found is None:
            more.append(line)
            continue
        at, name, text = found.group(1, 2, 3) if found[1] else found.group(4, 5, 6)
        its = next((each for each in _LEVELS if each.startswith(name)), "INFO")
        after = "\n".join(reversed(more)).rstrip()
        more.clear()
        if _LEVELS.index(its) < least or wanted not in f"{at} {text}\n{after}".casefold():
            continue
        if len(entries) == _MAX_ENTRIES:
            return entries[::-1], True
        entries.append(
            {"time": at, "level": its, "text": one_line(text, _MAX_ENTRY), "more": many_lines(after, _MAX_ENTRY)}
        )
    return entries[::-1], size > _LOG_BYTES


def films(directory: Path) -> list[str]:
    """Return paths of the films in a run directory and in the directories inside it, relative to it."""
    found = [path for pattern in ("*", "*/*") for path in directory.glob(pattern) if path.suffix in _FILMS]
    return sorted(str(path.relative_to(directory)) for path in found[:_MAX_FILMS])
