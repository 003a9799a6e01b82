"""Readers of a run directory's files: results as curves, the config with its origins, logs and films."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.config.files import MAX_BYTES, parse_yaml
from aiorl.config.layers import CONFIG_FILE
from aiorl.errors import ConfigError
from aiorl.run.report.loggers import JSONL_FILE, numbers_of, results_in
from aiorl.status import part_of
from aiorl.text import many_lines, one_line

STEPS, SECONDS = "timesteps_total", "time_total_s"
_MAX_NAMES, _MAX_NUMBERS = 2000, 4_000_000
_USUAL_BYTES = 4 << 10
_TAIL_BYTES = 64 << 10
_LOG_BYTES = 8 << 20
_MAX_ENTRIES, _MAX_ENTRY = 300, 24_000
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_ENTRY = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ ([A-Z]+) [\w.]+: (.*)"  # a learner's
    r"|(\d\d:\d\d:\d\d) (?:\S+ )?([DIWEC]) (.*)"  # a worker's
)
_KEYS = re.compile(r"(?m)^(?=\w)")
"""Places in a config's text where its keys begin."""
_FILMS = (".mp4", ".webm", ".gif")
_MAX_FILMS = 50


# Results ------------------------------------------------------------------------------------------------------


def numbers_from(directory: Path, start: int, skipped_bytes: int = 0) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the end of each line of result.jsonl and its numbers by name; see `results_in`.

    Results without env steps and time are left out.
    """
    with contextlib.suppress(OSError):
        for end, result in results_in(directory / JSONL_FILE, skipped_bytes, start):
            found = {}
            with contextlib.suppress(OverflowError, RecursionError):
                found = numbers_of(result)
            if len(found) <= _MAX_NAMES and all(math.isfinite(found.get(name, math.nan)) for name in (STEPS, SECONDS)):
                yield end, found


def curves(
    directory: Path, *, names: Collection[str] | None = None, num_points: int = 1000
) -> tuple[dict[str, NDArray[Any]], int]:
    """Return the numbers of a run's results by name [P], NaN where a result has none.

    Args:
        directory: the run directory.
        names: the numbers to return; None returns all.
        num_points: number of results to which a large file is thinned, evenly.

    Returns:
        The numbers, and the bytes of result.jsonl up to the end of the last result.
    """
    _, size = part_of(directory / JSONL_FILE, 0, 0)
    skipped_bytes = size // num_points if size > num_points * _USUAL_BYTES else 0
    found = [*numbers_from(directory, 0, skipped_bytes)]
    if skipped_bytes:  # the newest results are there
        found += numbers_from(directory, max(found[-1][0] if found else 0, size - _TAIL_BYTES))
    if names is None:
        names = sorted({name for _, row in found for name in row})[: _MAX_NUMBERS // max(1, len(found))]
    kinds = {STEPS: np.float64, SECONDS: np.float64}  # others are for pictures
    columns = {
        name: np.array([row.get(name, math.nan) for _, row in found], kinds.get(name, np.float32)) for name in names
    }
    return columns, found[-1][0] if found else 0


# Config -------------------------------------------------------------------------------------------------------


def config_text(directory: Path) -> str:
    """Return the text of a run's config, "" if there is none."""
    return part_of(directory / CONFIG_FILE, 0, MAX_BYTES)[0].decode("utf-8", "replace")


def settings(text: str, pick: Callable[[str], object] = bool) -> Mapping[str, Any]:
    """Return the values in a config's text, {} if it is damaged.

    Args:
        text: the text.
        pick: called with the text of each key and its value; those for which it returns False are left out.
    """
    return _parsed("".join(filter(pick, _KEYS.split(text))))


@functools.lru_cache(maxsize=1000)
def _parsed(text: str) -> Mapping[str, Any]:
    with contextlib.suppress(ConfigError):
        return parse_yaml(Path(CONFIG_FILE), text.encode())[0]
    return {}


# Logs and films -----------------------------------------------------------------------------------------------


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
    tail, size = part_of(path, -_LOG_BYTES, _LOG_BYTES)
    least, wanted = LEVELS.index(level), words.casefold()
    entries: list[dict[str, str]] = []
    more: list[str] = []
    for line in reversed(tail.decode("utf-8", "replace").split("\n")):
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
