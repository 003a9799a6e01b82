"""Results into files: progress.csv, result.jsonl and TensorBoard events.

Every file is only ever appended to in whole records, so a run that is killed leaves at most one damaged last line,
which a resumed run cuts off, with what is of later iterations than its checkpoint. Files may be of any size: they are
read line by line. A disk that fails while training is reported once and costs the training nothing.
"""

from __future__ import annotations

import csv
import errno
import io
import itertools
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import orjson

from aiorl.config.code import check_takes, import_object, named_failures
from aiorl.config.files import open_regular
from aiorl.errors import ConfigError, nearest
from aiorl.process.imports import want_packages
from aiorl.process.replaced_file import replaced
from aiorl.run.report.appended_file import AppendedFile
from aiorl.run.report.tensorboard_events import EventFile
from aiorl.run.report.whole_lines import MAX_LINE_BYTES, TooLongLine, last_lines, sampled_lines, whole_lines

__all__ = [
    "CSV_FILE",
    "JSONL_FILE",
    "CsvLogger",
    "JsonlLogger",
    "Logger",
    "Loggers",
    "TensorBoardLogger",
    "check_loggers",
    "each_result",
    "flatten",
    "make_loggers",
    "open_loggers",
    "read_results",
]

_log = logging.getLogger(__name__)

CSV_FILE = "progress.csv"
JSONL_FILE = "result.jsonl"

_NAMED = {"mlflow": "aiorl.tracking:MLflow", "wandb": "aiorl.tracking:WandB"}
"""Short names of loggers, which are those of the packages that they need."""
_MAX_COLUMNS = 2000
_PLAIN = frozenset({bool, int, float, str, type(None)})
_SMALL_FILE = 1 << 20  # bytes that are rewritten without a thought


class Logger(Protocol):
    """Takes the results of a run, one for each iteration."""

    def write(self, result: Mapping[str, Any]) -> None:
        """Records one result.

        Raises: OSError when it can't be stored; nothing is left half written then.
        """
        ...

    def close(self) -> None:
        """Lets go of files; more calls do nothing.

        Raises: OSError when that fails.
        """
        ...


class JsonlLogger:
    """result.jsonl: one result a line, all keys, strict JSON (NaN and infinities become null).

    A file whose last line is longer than any may be is none of ours: it is renamed, and a new one begun.

    Args:
        path: file to append to.
        resume_after: drop what is there of later training iterations; None keeps all.
    Raises: OSError when the file can't be written.
    """

    def __init__(self, path: Path, *, resume_after: int | None = None) -> None:
        if path.exists():
            try:
                _cut(path, _end_of_kept_lines(path, resume_after))
            except TooLongLine as error:
                aside = _set_aside(path)
                _log.warning("%s is damaged (%s): it is %s now, and a new one is begun", path, error, aside.name)
        self._file = AppendedFile(path)

    def write(self, result: Mapping[str, Any]) -> None:
        """Records one result."""
        line = json.dumps(to_json(result), allow_nan=False, separators=(",", ":")).encode() + b"\n"
        if len(line) > MAX_LINE_BYTES:
            text = f"a result takes {len(line):,} bytes, more than the {MAX_LINE_BYTES:,} that it may have"
            raise OSError(errno.EFBIG, text)
        self._file.append(line)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class CsvLogger:
    """progress.csv: the numbers and words of each result, nested names joined by /, lists left out.

    Columns stay where they are once written, 2,000 at most. A result that brings a new one makes the file be rewritten
    with that column at the end, empty in earlier rows; the old file is replaced at once or not at all. A large file is
    rewritten only after it has grown by an eighth, so names that never end cost no more than the rows do.

    Args:
        path: file to append to.
        resume_after: drop what is there of later training iterations; None keeps all.
    Raises: OSError when the file can't be written.
    """

    def __init__(self, path: Path, *, resume_after: int | None = None) -> None:
        self._path = path
        header: list[str] = []
        if path.exists():
            header, kept_to = _end_of_kept_rows(path, resume_after)
            _cut(path, kept_to)
        self._columns = dict.fromkeys(header[:_MAX_COLUMNS])
        if len(header) > _MAX_COLUMNS:
            _replace(path, self._lines(self._columns, (row[:_MAX_COLUMNS] for row in _rows(path))))
        self._file: AppendedFile | None = AppendedFile(path)
        self._grown = path.stat().st_size
        self._has_said_full = False

    def write(self, result: Mapping[str, Any]) -> None:
        """Records one result."""
        row = dict(flatten(result))
        new = [name for name in row if name not in self._columns]
        if new:
            self._widen(new)
        if self._file is None:
            self._file = AppendedFile(self._path)
        line = self._line(row.get(name) for name in self._columns).encode("utf-8", "backslashreplace")
        self._file.append(line)
        self._grown += len(line)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def _widen(self, new: list[str]) -> None:
        room = _MAX_COLUMNS - len(self._columns)
        if len(new) > room and not self._has_said_full:
            self._has_said_full = True
            text = "%s has as many columns as it may have, %d; %r and all further ones are in %s only"
            _log.warning(text, self._path, _MAX_COLUMNS, new[room], JSONL_FILE)
        new = new[:room]
        size = self._path.stat().st_size
        if not new or (size > _SMALL_FILE and self._grown < size / 8):
            return
        wider = {**self._columns, **dict.fromkeys(new)}
        _replace(self._path, self._lines(wider, ([*row, *[""] * len(new)] for row in _rows(self._path))))
        self._columns, self._grown = wider, 0
        if self._file is not None:
            self._file.close()
            self._file = None  # the one before is gone; opened anew by what writes next, which may fail

    def _lines(self, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Iterator[str]:
        yield self._line(columns)
        yield from map(self._line, rows)

    @staticmethod
    def _line(cells: Iterable[object]) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(["" if cell is None else cell for cell in cells])
        return text.getvalue()


class TensorBoardLogger:
    """Event files for TensorBoard: each number of a result over the env steps sampled.

    Args:
        directory: where the event file is made.
        resume_after: tells TensorBoard to forget points past this many env steps; None for a new run.
    Raises: OSError when the file can't be written; ImportError when tensorboard isn't installed.
    """

    def __init__(self, directory: Path, *, resume_after_step: int | None = None) -> None:
        self._file = EventFile(directory, resume_after_step=resume_after_step)

    def write(self, result: Mapping[str, Any]) -> None:
        """Records one result."""
        values = {name: float(value) for name, value in flatten(result) if _is_number(value) and name != "timestamp"}
        wall_time = float(result.get("timestamp") or time.time())
        self._file.append(values, step=int(result.get("timesteps_total", 0)), wall_time=wall_time)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class Loggers:
    """Several loggers as one that never fails: each one's trouble is said once, then it is tried again.

    Args:
        named: what a message calls a logger -> the logger.
        faults: what may be wrong with one of them.
    """

    def __init__(self, named: Mapping[str, Logger], faults: type[Exception] = OSError) -> None:
        self._named = dict(named)
        self._faults = faults
        self._failing: set[str] = set()

    def write(self, result: Mapping[str, Any]) -> None:
        """Records one result with each logger."""
        for name, logger in self._named.items():
            try:
                logger.write(result)
            except self._faults as error:
                self._say_once(name, error, "; training goes on without it")
            else:
                if name in self._failing:
                    self._failing.discard(name)
                    _log.warning("%s is written again; results in between are missing there", name)

    def close(self) -> None:
        """Closes each logger."""
        for name, logger in self._named.items():
            try:
                logger.close()
            except self._faults as error:
                self._say_once(name, error, "")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _say_once(self, name: str, error: Exception, follows: str) -> None:
        if name not in self._failing:
            self._failing.add(name)
            _log.error("%s can't be written (%s)%s", name, getattr(error, "strerror", None) or error, follows)


def check_loggers(paths: Sequence[str]) -> list[Callable[[Path, dict[str, Any]], Logger]]:
    """What makes the loggers that a config names, each called with a run directory and a config.

    Args:
        paths: the key ``loggers``: import paths, or short names.

    Raises:
        ConfigError: one can't be imported, or can't be called so, or its package is not installed.
    """
    made = []
    for number, path in enumerate(paths):
        key = f"loggers[{number}]"
        if path in _NAMED:
            want_packages(f"the logger {path}", [path], "tracking", key=key, value=path)
        elif ":" not in path:
            raise ConfigError(
                f"{key} is {path!r}, expected {', '.join(_NAMED)} or the import path of a logger, "
                f"'package.module:Name'.{nearest(path, _NAMED)}",
                key=key, value=path,
            )  # fmt: skip
        found = import_object(_NAMED.get(path, path), key=key)
        if callable(found):
            check_takes(found, path, key, Path(), {})
        elif not (hasattr(found, "write") and hasattr(found, "close")):
            raise ConfigError(f"{key} is {path!r}, which can't be called.", key=key, value=path)
        made.append(found if callable(found) else partial(_given, found))
    return made


def _given(logger: Logger, run_dir: Path, config: dict[str, Any]) -> Logger:
    """Return a logger that was made before."""
    return logger


def make_loggers(paths: Sequence[str], run_dir: Path, config: Mapping[str, Any]) -> Loggers:
    """The loggers that a config names; none of them ever fails a run.

    Args:
        paths: the key ``loggers``: import paths, or short names.
        run_dir: the run's directory.
        config: the effective configuration, as plain data.

    Raises:
        ConfigError: one can't be imported or made.
    """
    named: dict[str, Logger] = {}
    for path, make in zip(paths, check_loggers(paths), strict=True):
        named[f"the logger {path}"] = named_failures(make, f"the logger {path!r}", "loggers")(run_dir, dict(config))
    return Loggers(named, faults=Exception)


def open_loggers(
    run_dir: Path, *, resume_iteration: int | None = None, resume_step: int | None = None, tensorboard: bool = True
) -> Loggers:
    """The loggers of a run directory; existing files are appended to.

    Args:
        run_dir: an existing directory.
        resume_iteration: iteration of the checkpoint that the run goes on from: later results are taken off.
        resume_step: its `timesteps_total`.
        tensorboard: also write event files; left out with a warning when the package isn't installed.
    Raises: ConfigError when a file can't be written.
    """
    try:
        named: dict[str, Logger] = {
            str(run_dir / JSONL_FILE): JsonlLogger(run_dir / JSONL_FILE, resume_after=resume_iteration),
            str(run_dir / CSV_FILE): CsvLogger(run_dir / CSV_FILE, resume_after=resume_iteration),
        }
        if tensorboard:
            try:
                named["the TensorBoard event file"] = TensorBoardLogger(run_dir, resume_after_step=resume_step)
            except ImportError:
                _log.warning("tensorboard is not installed, so no event files are written")
    except OSError as error:
        raise ConfigError(
            f"The run directory {run_dir} can't be written: {error.strerror or error}.",
            key="run_dir",
            value=str(run_dir),
            hint="Give another one with --run-dir DIR.",
        ) from error
    return Loggers(named)


def each_result(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The results of a run so far, one at a time; of very many a thousand, evenly spread, first and last included.

    Lines that a crash damaged are left out. One that is longer than any may be is named and ends them.

    Raises: OSError when there is no result.jsonl to read.
    """
    path = run_dir / JSONL_FILE
    with open_regular(path) as file:
        try:
            for line in sampled_lines(file):
                result = _json(line)
                if isinstance(result, dict):
                    yield result
        except TooLongLine as error:
            _log.warning("%s is damaged: %s; what follows is left out", path, error)


def read_results(run_dir: Path) -> list[dict[str, Any]]:
    """The results of a run so far, as `each_result` gives them.

    Raises: OSError when there is no result.jsonl to read.
    """
    return list(each_result(run_dir))


def flatten(result: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The scalars of a result, each with its path joined by /; lists and empty dicts are left out."""
    for name, value in result.items():
        if type(value) in _PLAIN:
            yield f"{prefix}{name}", value
        elif isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}/")
        elif value is None or isinstance(value, str | bool | int | float | np.number):
            yield f"{prefix}{name}", value.item() if isinstance(value, np.number) else value


def to_json(value: Any) -> Any:
    """`value` as strict JSON can hold it: NaN and infinities become None, arrays lists, NumPy scalars numbers."""
    kind = type(value)
    if kind is float:
        return value if math.isfinite(value) else None
    if kind in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {str(name): to_json(inner) for name, inner in value.items()}
    if isinstance(value, np.ndarray):
        return to_json(value.tolist())
    if isinstance(value, list | tuple):
        return [to_json(inner) for inner in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int | bool) else str(value)


def _end_of_kept_lines(path: Path, resume_after: int | None) -> int:
    """Where the last line of result.jsonl ends that a resumed run keeps: sought from the end, where it is near.

    Raises: TooLongLine where a line is longer than any may be.
    """
    with open_regular(path) as file:
        for end, line in last_lines(file):
            if resume_after is None or _is_kept(_iteration(_json(line)), resume_after):
                return end
    return 0


def _end_of_kept_rows(path: Path, resume_after: int | None) -> tuple[list[str], int]:
    """The names of the columns of a CSV file, and where the last row ends that a resumed run keeps."""
    header: list[str] = []
    kept_to = 0
    for end, row in _table(path):
        if not header:
            header, kept_to = row, end
        elif _is_kept(_csv_iteration(header, row), resume_after):
            kept_to = end
    return header, kept_to


def _rows(path: Path) -> Iterator[list[str]]:
    """The rows of a CSV file below its header, each with a cell for every name."""
    table = (row for _, row in _table(path))
    header = next(table, [])
    for row in table:
        yield [*row, *[""] * (len(header) - len(row))]


def _table(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows of a CSV file, the header first: where each ends, and its cells; those that are damaged end it."""
    begins, ends, is_quoted = 1, 0, False  # lines of the row
    row: list[bytes] = []
    try:
        with open_regular(path) as file:
            for number, (end, line) in enumerate(whole_lines(file), start=1):
                row.append(line)
                is_quoted ^= line.count(b'"') % 2 == 1
                if is_quoted and end - ends <= MAX_LINE_BYTES:
                    continue  # a line break within a cell
                yield end, next(csv.reader([b"".join(row).decode("utf-8", "replace")]))
                row.clear()
                begins, ends = number + 1, end
        if row:
            raise csv.Error("a quote has no end")
    except (csv.Error, TooLongLine) as error:
        text = "%s is damaged in line %d (%s); its rows from there on are dropped, %s has them"
        _log.warning(text, path, begins, error, JSONL_FILE)


def _cut(path: Path, end: int) -> None:
    if path.stat().st_size > end:
        os.truncate(path, end)


def _set_aside(path: Path) -> Path:
    """Give a file a name that no other has."""
    names = (path.with_name(f"{path.name}.damaged{number or ''}") for number in itertools.count())
    aside = next(name for name in names if not os.path.lexists(name))
    return path.rename(aside)


def _replace(path: Path, lines: Iterable[str]) -> None:
    with replaced(path) as temporary, temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(lines)


def _is_kept(iteration: int | None, resume_after: int | None) -> bool:
    return iteration is not None and (resume_after is None or iteration <= resume_after)


def _json(line: bytes) -> Any:  # Any: whatever JSON holds
    """What a line holds; None if it is no JSON."""
    try:
        return orjson.loads(line)
    except ValueError:
        return None


def _iteration(result: Any) -> int | None:  # Any: whatever JSON holds
    found = result.get("training_iteration") if isinstance(result, dict) else None
    return found if isinstance(found, int) else None


def _csv_iteration(header: list[str], row: list[str]) -> int | None:
    try:
        return int(row[header.index("training_iteration")])
    except (ValueError, IndexError):
        return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
