"""Loggers that write results to files: progress.csv, result.jsonl and TensorBoard events.

result.jsonl grows only by whole lines, so a killed run leaves at most one damaged last line. A
resumed run cuts it off, along with the results of iterations after its checkpoint. Files can have
any size: they are read line by line. A disk that fails during training is reported once and does
not affect training.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import itertools
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson

from aiorl.config.code import check_takes, import_object, named_failures
from aiorl.config.files import num_containers, open_regular
from aiorl.errors import ConfigError, nearest
from aiorl.process.imports import missing, require_packages
from aiorl.process.replaced_file import replaced

_log = logging.getLogger(__name__)

CSV_FILE = "progress.csv"
JSONL_FILE = "result.jsonl"
MAX_LINE_BYTES = 16 << 20
"""Longest line of result.jsonl that aiorl writes; a longer one means that the file is damaged or of
another kind."""
_MAX_CONTAINERS = 1 << 18
"""Most lists and objects in a line that is read: millions of empty ones would stop all threads of
its reader for seconds."""

_SHORT_NAMES = {"mlflow": "aiorl.tracking:MLflow", "wandb": "aiorl.tracking:WandB"}
"""Short names of loggers, which are also the names of the packages that they need."""
_MAX_COLUMNS = 2000
_READ_WHOLE_BYTES = 32 << 20
_SAMPLES = 1000
_MAX_WAITING = 64


class Logger(Protocol):
    """Interface of loggers, which get the result of each iteration."""

    def write(self, result: Mapping[str, Any]) -> None:
        """Record a result.

        Raises:
            OSError: it can't be stored; no part of it is written then.
        """
        ...

    def close(self) -> None:
        """Close files; later calls do nothing.

        Raises:
            OSError: that fails.
        """
        ...


class _AppendedFile:
    """File that grows by whole records: a record that doesn't fit on the disk is removed again.

    Args:
        path: the file, made if missing.

    Raises:
        OSError: the file can't be opened for writing.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def append(self, record: bytes) -> None:
        """Write a record.

        Raises:
            OSError: it can't be stored.
        """
        end = os.fstat(self._file.fileno()).st_size
        try:
            unwritten = memoryview(record)
            while unwritten:  # a partial write raises nothing; the next one raises the reason
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), end)
            raise

    def close(self) -> None:
        """Close the file; later calls do nothing."""
        self._file.close()


class JsonlLogger(_AppendedFile):
    """Logger for result.jsonl: one result per line, all keys, strict JSON (NaN and infinities
    become null).

    Args:
        path: file to append to.
        resume_after: drop results of training iterations after this one; None keeps all.

    Raises:
        OSError: the file can't be written.
    """

    def __init__(self, path: Path, *, resume_after: int | None = None) -> None:
        super().__init__(path)
        last_end = 0
        for end, result in results_in(path):
            iteration = result.get("training_iteration")
            if isinstance(iteration, int) and (resume_after is None or iteration <= resume_after):
                last_end = end
        os.truncate(path, last_end)

    def write(self, result: Mapping[str, Any]) -> None:
        """Record a result."""
        line = json.dumps(to_json(result), allow_nan=False, separators=(",", ":")).encode() + b"\n"
        if len(line) > MAX_LINE_BYTES:
            raise OSError(
                errno.EFBIG,
                f"a result takes {len(line):,} bytes, more than the limit of {MAX_LINE_BYTES:,}",
            )
        self.append(line)


class CsvLogger(_AppendedFile):
    """Logger for progress.csv: finite numbers and strings of each result, nested names joined by /,
    without lists.

    It contains the results of the result.jsonl next to it, which must be written first. Its
    columns, at most 2,000, are those of all results when the file is opened and of the first result
    after that; `close` adds later ones.

    Args:
        path: the file.

    Raises:
        OSError: the file can't be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns: dict[str, None] = {}
        self._has_new_columns = False
        self._rewrite()
        super().__init__(path)

    def write(self, result: Mapping[str, Any]) -> None:
        """Record a result."""
        row = dict(flatten(result))
        header = b""
        if not self._columns:
            self._columns = dict.fromkeys(itertools.islice(row, _MAX_COLUMNS))
            header = _csv_line(self._columns)
        if not row.keys() <= self._columns.keys():
            self._has_new_columns = True
        try:
            self.append(header + _csv_line(row.get(name) for name in self._columns))
        except OSError:
            if header:
                self._columns = {}
            raise

    def close(self) -> None:
        """Close the file."""
        super().close()
        if self._has_new_columns:
            self._has_new_columns = False
            self._rewrite()

    def _rewrite(self) -> None:
        """Rewrite the file with all results; new columns come last."""
        source = self._path.with_name(JSONL_FILE)
        columns = self._columns
        for _, result in results_in(source):
            for name, _ in flatten(result):
                if len(columns) < _MAX_COLUMNS:
                    columns[name] = None
        with replaced(self._path) as temporary, temporary.open("wb") as file:
            if columns:
                file.write(_csv_line(columns))
            for _, result in results_in(source):
                row = dict(flatten(result))
                file.write(_csv_line(row.get(name) for name in columns))


def _csv_line(cells: Iterable[object]) -> bytes:
    """Return a line of a CSV file; numbers that are not finite become empty cells, as None does."""
    text = io.StringIO()
    row = [None if isinstance(cell, float) and not math.isfinite(cell) else cell for cell in cells]
    csv.writer(text, lineterminator="\n").writerow(row)
    return text.getvalue().encode("utf-8", "backslashreplace")


class TensorBoardLogger:
    """Logger for TensorBoard event files, written by TensorFlow: each number of a result over the
    env steps sampled.

    The first result makes the file. A writer that fails is replaced by a new one, which makes a new
    file.

    Args:
        directory: directory of the event file.
        resume_after_step: env steps of the checkpoint; TensorBoard then drops points beyond it.
            None for a new run.
    """

    def __init__(self, directory: Path, *, resume_after_step: int | None = None) -> None:
        self._directory = directory
        self._resume_after_step = resume_after_step
        self._writer: Any = None

    def write(self, result: Mapping[str, Any]) -> None:
        """Record a result.

        Raises:
            OSError: it can't be stored.
        """
        import tensorflow as tf  # already loaded when there are results

        v1 = tf.compat.v1
        event = v1.Event(
            wall_time=float(result.get("timestamp") or time.time()),
            step=int(result.get("timesteps_total", 0)),
            summary=v1.Summary(
                value=[
                    v1.Summary.Value(tag=name, simple_value=number)
                    for name, number in numbers_of(result).items()
                    if name != "timestamp"
                ]
            ),
        )
        try:
            if self._writer is None:
                self._open(tf)
            self._append(event)
        except tf.errors.OpError as error:
            self._writer = None
            raise OSError(error.message) from error

    def close(self) -> None:
        """Close the file; everything has been flushed already."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, tf: Any) -> None:
        v1 = tf.compat.v1
        now = time.time()
        self._writer = tf.io.TFRecordWriter(f"{self._directory}/events.out.tfevents.{now:.6f}.v2")
        self._append(v1.Event(wall_time=now, file_version="brain.Event:2"))
        if self._resume_after_step is not None:
            start = v1.SessionLog(status=v1.SessionLog.START)
            self._append(
                v1.Event(wall_time=now, step=self._resume_after_step + 1, session_log=start)
            )
            self._resume_after_step = None

    def _append(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()


class Loggers:
    """Several loggers as one that never fails: a failure of one is reported once, and later results
    are tried again.

    Args:
        loggers: loggers by their name in messages.
        faults: class of the exceptions that count as a logger's failure.
    """

    def __init__(self, loggers: Mapping[str, Logger], faults: type[Exception] = OSError) -> None:
        self._loggers = dict(loggers)
        self._faults = faults
        self._failing: set[str] = set()

    def write(self, result: Mapping[str, Any]) -> None:
        """Record a result with each logger."""
        for name, logger in self._loggers.items():
            try:
                logger.write(result)
            except self._faults as error:
                self._report_once(name, error, "; training continues without it")
            else:
                if name in self._failing:
                    self._failing.discard(name)
                    _log.warning("%s can be written again; it lacks the results in between", name)

    def close(self) -> None:
        """Close each logger."""
        for name, logger in self._loggers.items():
            try:
                logger.close()
            except self._faults as error:
                self._report_once(name, error, "")

    def _report_once(self, name: str, error: Exception, consequence: str) -> None:
        if name not in self._failing:
            self._failing.add(name)
            _log.error(
                "%s can't be written (%s)%s",
                name,
                getattr(error, "strerror", None) or error,
                consequence,
            )


class BackgroundLogger:
    """Logger that writes with another logger in its own thread, in order and without delay unless
    the disk is slow.

    The next call of any method raises the other logger's errors.
    """

    def __init__(self, logger: Logger) -> None:
        """Take over a logger; the thread starts with the first result."""
        self._logger = logger
        self._thread = ThreadPoolExecutor(1, "aiorl-results")
        self._waiting: deque[Future[None]] = deque()

    def write(self, result: Mapping[str, Any]) -> None:
        """Queue a copy of a result for writing; wait only if 64 results are queued already."""
        while self._waiting and (self._waiting[0].done() or len(self._waiting) >= _MAX_WAITING):
            self._waiting.popleft().result()
        copy = _copied(result)
        try:
            self._waiting.append(self._thread.submit(self._logger.write, copy))
        except RuntimeError:  # Python is shutting down and starts no more threads
            self._logger.write(copy)

    def flush(self) -> None:
        """Wait until all results are written."""
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        """Write the queued results, end the thread and close the other logger."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._logger.close)
            stack.callback(self._thread.shutdown)
            self.flush()


def _copied(value: Any) -> Any:
    """Return a copy of plain data, which does not change with the original."""
    if isinstance(value, Mapping):
        return {name: _copied(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_copied(inner) for inner in value]
    return value


def check_loggers(paths: Sequence[str]) -> list[Callable[[Path, dict[str, Any]], Logger]]:
    """Return the functions that make a config's loggers; each takes a run directory and a config.

    Args:
        paths: the key ``loggers``: import paths, or short names.

    Raises:
        ConfigError: a logger can't be imported or called with these arguments, or its package is
            not installed.
    """
    factories = []
    for number, path in enumerate(paths):
        key = f"loggers[{number}]"
        if path in _SHORT_NAMES:
            require_packages(f"the logger {path}", [path], "tracking", key=key, value=path)
        elif ":" not in path:
            raise ConfigError(
                f"{key} is {path!r}, expected {', '.join(_SHORT_NAMES)} or the import path of a"
                f" logger, 'package.module:Name'.{nearest(path, _SHORT_NAMES)}",
                key=key,
                value=path,
            )
        imported = import_object(_SHORT_NAMES.get(path, path), key=key)
        if callable(imported):
            run_dir_and_config: tuple[Any, ...] = (Path(), {})
            check_takes(imported, path, key, *run_dir_and_config)
            factories.append(imported)
        elif hasattr(imported, "write") and hasattr(imported, "close"):
            factories.append(lambda run_dir, config, logger=imported: logger)
        else:
            raise ConfigError(f"{key} is {path!r}, which can't be called.", key=key, value=path)
    return factories


def make_loggers(paths: Sequence[str], run_dir: Path, config: Mapping[str, Any]) -> Loggers:
    """Make a config's loggers; their failures never end a run.

    Args:
        paths: the key ``loggers``: import paths, or short names.
        run_dir: the run's directory.
        config: the effective configuration, as plain data.

    Raises:
        ConfigError: a logger can't be imported or made.
    """
    loggers: dict[str, Logger] = {}
    for path, factory in zip(paths, check_loggers(paths), strict=True):
        make = named_failures(factory, f"the logger {path!r}", "loggers")
        loggers[f"the logger {path}"] = make(run_dir, dict(config))
    return Loggers(loggers, faults=Exception)


def open_loggers(
    run_dir: Path,
    *,
    resume_iteration: int | None = None,
    resume_step: int | None = None,
    tensorboard: bool = True,
) -> Loggers:
    """Open the loggers of a run directory; they append to existing files.

    Args:
        run_dir: an existing directory.
        resume_iteration: iteration of the checkpoint that the run continues from; later results are
            removed.
        resume_step: `timesteps_total` of that checkpoint.
        tensorboard: also write event files, if TensorFlow is installed.

    Raises:
        ConfigError: a file can't be written.
    """
    jsonl_path = run_dir / JSONL_FILE
    csv_path = run_dir / CSV_FILE
    try:
        loggers: dict[str, Logger] = {
            str(jsonl_path): JsonlLogger(jsonl_path, resume_after=resume_iteration),
            str(csv_path): CsvLogger(csv_path),  # reads the other file, which is cut by now
        }
        if tensorboard and not missing(["tensorflow"]):
            loggers["the TensorBoard event file"] = TensorBoardLogger(
                run_dir, resume_after_step=resume_step
            )
    except OSError as error:
        raise ConfigError(
            f"The run directory {run_dir} can't be written: {error.strerror or error}.",
            key="run_dir",
            value=str(run_dir),
            hint="Choose another one with --run-dir DIR.",
        ) from error
    return Loggers(loggers)


def each_result(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Return an iterator over the results of a run so far; of a large file, about a thousand evenly
    spread results.

    Damaged lines are skipped. A line above the size limit is reported and ends the iteration.

    Raises:
        OSError: result.jsonl can't be read.
    """
    path = run_dir / JSONL_FILE
    size = path.stat().st_size
    skipped_bytes = size // _SAMPLES if size > _READ_WHOLE_BYTES else 0
    return (result for _, result in results_in(path, skipped_bytes))


def read_results(run_dir: Path) -> list[dict[str, Any]]:
    """Return the results of a run so far as a list; see `each_result`.

    Raises:
        OSError: result.jsonl can't be read.
    """
    return list(each_result(run_dir))


def flatten(result: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the scalars of a result with their paths, joined by /; lists and empty dicts are left
    out.
    """
    # metrics of a policy are there twice, by the same path
    for name, value in dict(flat_items(result, separator="/")).items():
        if isinstance(value, np.number):
            yield name, value.item()
        elif value is None or isinstance(value, str | int | float):
            yield name, value


def flat_items(
    values: Mapping[str, Any], *, separator: str, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield everything in nested dicts that is no dict itself, with its path.

    Args:
        values: the outermost dict.
        separator: text between the names in a path.
        prefix: text in front of each path.
    """
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from flat_items(value, separator=separator, prefix=f"{path}{separator}")
        else:
            yield path, value


def numbers_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a result by name; nested names are joined by /."""
    return {name: float(value) for name, value in flatten(result) if type(value) in (int, float)}


def to_json(value: Any) -> Any:
    """Convert `value` for strict JSON: NaN and infinities become None, arrays lists, NumPy scalars
    numbers.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return to_json(value.tolist())
    if isinstance(value, Mapping):
        return {str(name): to_json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(inner) for inner in value]
    return str(value)


def results_in(
    path: Path, skipped_bytes: int = 0, start: int = 0
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the end of each line of a result.jsonl and its result, without damaged lines.

    A last line without a line break does not count: its writer was killed, or is writing it now.

    Args:
        path: the file.
        skipped_bytes: number of bytes to skip between two results.
        start: byte to begin at; inside a line, the rest of it counts as damaged.
    """
    with open_regular(path) as file:
        end = file.seek(start)
        while line := file.readline(MAX_LINE_BYTES):
            if not line.endswith(b"\n"):
                if len(line) == MAX_LINE_BYTES:
                    _log.warning(
                        "%s is damaged: the line at byte %d never ends; the rest is left out",
                        path,
                        end,
                    )
                return
            end += len(line)
            result = result_of(line)
            if result is not None:
                yield end, result
            if skipped_bytes:
                file.seek(end + skipped_bytes)
                file.readline(MAX_LINE_BYTES)  # the rest of a line
                end = file.tell()


def result_of(line: bytes) -> dict[str, Any] | None:
    """Return the result in a line of result.jsonl, or None if the line is damaged."""
    value = None
    if num_containers(line) > _MAX_CONTAINERS:
        return None
    try:
        value = orjson.loads(line)
    except ValueError:
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)  # it accepts a lone surrogate, unlike orjson
    return value if isinstance(value, dict) else None
