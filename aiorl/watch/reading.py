"""Readers of a run directory's files: results as curves, the config with its origins, logs and films."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from aiorl.config.files import MAX_BYTES, open_regular, parse_yaml, read_regular
from aiorl.config.layers import CONFIG_FILE
from aiorl.errors import AiorlError
from aiorl.run.report.loggers import JSONL_FILE, numbers_of, result_of, results_in
from aiorl.run.report.plot import F64
from aiorl.status import last_line
from aiorl.text import many_lines, one_line

STEPS, SECONDS = "timesteps_total", "time_total_s"
_RARE = "evaluation/episode_reward_mean"
"""Number that few results have, so that thinning keeps those."""
_MAX_NAMES = 2000
_USUAL_BYTES = 4 << 10
_TAIL_BYTES, _LAST_BYTES = 64 << 10, 1 << 20
_LOG_BYTES = 8 << 20
_MAX_ENTRIES, _MAX_ENTRY = 300, 24_000
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_ENTRY = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ ([A-Z]+) [\w.]+: (.*)"  # a learner's
    r"|(\d\d:\d\d:\d\d) (?:\S+ )?([DIWEC]) (.*)"  # a worker's
)
_FILMS = (".mp4", ".webm", ".gif")
_MAX_FILMS = 50


def signature(*paths: Path) -> tuple[tuple[int, int, int], ...]:
    """Return a value that changes with the contents of files."""
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            stat = path.lstat()
            found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(found)


# Results ------------------------------------------------------------------------------------------------------


def last_result(directory: Path) -> dict[str, Any]:
    """Return the newest whole result of a run, {} if there is none."""
    return result_of(last_line(directory / JSONL_FILE, _LAST_BYTES).encode("utf-8", "replace")) or {}


def numbers_from(directory: Path, start: int, skipped_bytes: int = 0) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the end of each line of result.jsonl and its numbers by name; see `results_in`.

    Results without env steps and time are left out.
    """
    for end, result in results_in(directory / JSONL_FILE, skipped_bytes, start):
        found = {}
        with contextlib.suppress(OverflowError, RecursionError):
            found = numbers_of(result)
        if len(found) <= _MAX_NAMES and all(math.isfinite(found.get(name, math.nan)) for name in (STEPS, SECONDS)):
            yield end, found


def curves(
    directory: Path, *, names: Collection[str] | None = None, num_points: int = 1000
) -> tuple[dict[str, F64], int]:
    """Return the numbers of a run's results by name [P], NaN where a result has none.

    Args:
        directory: the run directory.
        names: the numbers to return; None returns all.
        num_points: number of results from which on some are left out, evenly; about twice as many are left.

    Returns:
        The numbers, and the bytes of result.jsonl up to the end of the last result.
    """
    found: list[tuple[int, dict[str, float]]] = []
    with contextlib.suppress(OSError):
        size = (directory / JSONL_FILE).stat().st_size
        skipped_bytes = size // num_points if size > num_points * _USUAL_BYTES else 0
        found += numbers_from(directory, 0, skipped_bytes)
        if skipped_bytes:
            found += numbers_from(directory, max(found[-1][0] if found else 0, size - _TAIL_BYTES))
    step = 1 + len(found) // (2 * num_points)
    rows = [row for at, (_, row) in enumerate(found, 1) if at % step == 0 or at == len(found) or _RARE in row]
    all_names = sorted({name for row in rows for name in row})[:_MAX_NAMES] if names is None else names
    columns = {name: np.array([row.get(name, math.nan) for row in rows], np.float64) for name in all_names}
    return columns, found[-1][0] if found else 0


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


# Logs and films -----------------------------------------------------------------------------------------------


def log_names(directory: Path) -> list[str]:
    """Return the names of a run's logs: the learner's, then those of its workers."""
    names = (f"logs/{path.name}" for path in directory.glob("logs/*.txt"))
    return ["log.txt", *sorted(names, key=lambda name: (len(name), name))[:4096]]


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
    least, wanted = LEVELS.index(level), words.casefold()
    entries: list[dict[str, str]] = []
    more: list[str] = []
    for line in reversed(lines):
        found = _ENTRY.fullmatch(line)
        if found is None:
            more.append(line)
            continue
        at, name, text = found.group(1, 2, 3) if found[1] else found.group(4, 5, 6)
        its = next((each for each in LEVELS if each.startswith(name)), "INFO")
        after = "\n".join(reversed(more)).rstrip()
        more.clear()
        if LEVELS.index(its) < least or wanted not in f"{at} {text}\n{after}".casefold():
            continue
        if len(entries) == _MAX_ENTRIES:
            return entries[::-1], True
        text, after = one_line(text, _MAX_ENTRY), many_lines(after, _MAX_ENTRY)
        entries.append({"time": at, "level": its, "text": text, "more": after})
    return entries[::-1], size > _LOG_BYTES


def films(directory: Path) -> list[str]:
    """Return paths of the films in a run directory and in the directories inside it, relative to it."""
    found = [path for pattern in ("*", "*/*") for path in directory.glob(pattern) if path.suffix in _FILMS]
    return sorted(str(path.relative_to(directory)) for path in found[:_MAX_FILMS])
