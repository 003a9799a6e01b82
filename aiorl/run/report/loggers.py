"""Results into files: progress.csv, result.jsonl and TensorBoard events.

result.jsonl is only ever appended to in whole lines, so a run that is killed leaves at most one damaged last line,
which a resumed run cuts off, with the results of later iterations than its checkpoint. Files may be of any size: they
are read line by line. A disk that fails while training is reported once and costs the training nothing.
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
from aiorl.config.files import open_regular
from aiorl.errors import ConfigError, nearest
from aiorl.process.imports import missing, want_packages
from aiorl.process.replaced_file import replaced

_log = logging.getLogger(__name__)

CSV_FILE = "progress.csv"
JSONL_FILE = "result.jsonl"
MAX_LINE_BYTES = 16 << 20
"""A longer line of result.jsonl is none of ours: the file is damaged, or not what it is taken for."""

_NAMED = {"mlflow": "aiorl.tracking:MLflow", "wandb": "aiorl.tracking:WandB"}
"""Short names of loggers, which are those of the packages that they need."""
_MAX_COLUMNS = 2000
_READ_WHOLE_BYTES = 32 << 20
_SAMPLES = 1000
_MAX_WAITING = 64


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


class _AppendedFile:
    """A file that grows by whole records: one that doesn't fit on the disk is taken off again.

    Args:
        path: made if it isn't there.
    Raises: OSError when it can't be opened for writing.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def append(self, record: bytes) -> None:
        """Write a record.

        Raises: OSError when it can't be stored.
        """
        end = os.fstat(self._file.fileno()).st_size
        try:
            left = memoryview(record)
            while left:  # a write that comes short says nothing; the next one says why
                left = left[self._file.write(left) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), end)
            raise

    def close(self) -> None:
        """Close the file; more calls do nothing."""
        self._file.close()


class JsonlLogger(_AppendedFile):
    """result.jsonl: one result a line, all keys, strict JSON (NaN and infinities become null).

    Args:
        path: file to append to.
        resume_after: drop results of later training iterations; None keeps all.
    Raises: OSError when the file can't be written.
    """

    def __init__(self, path: Path, *, resume_after: int | None = None) -> None:
        super().__init__(path)
        kept_to = 0
        for end, result in _results(path):
            found = result.get("training_iteration")
            if isinstance(found, int) and (resume_after is None or found <= resume_after):
                kept_to = end
        os.truncate(path, kept_to)

    def write(self, result: Mapping[str, Any]) -> None:
        """Record a result."""
        line = json.dumps(to_json(result), allow_nan=False, separators=(",", ":")).encode() + b"\n"
        if len(line) > MAX_LINE_BYTES:
            text = f"a result takes {len(line):,} bytes, more than the {MAX_LINE_BYTES:,} that it may have"
            raise OSError(errno.EFBIG, text)
        self.append(line)


class CsvLogger(_AppendedFile):
    """progress.csv: the finite numbers and words of each result, nested names joined by /, lists left out.

    It holds the results of the result.jsonl beside it, which is to be written first. Its columns, 2,000 at most, are
    those of all results when the file is opened and of the first one after that; `close` adds those that came later.

    Args:
        path: the file.
    Raises: OSError when the file can't be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns: dict[str, None] = {}
        self._has_more = False
        self._write_anew()
        super().__init__(path)

    def write(self, result: Mapping[str, Any]) -> None:
        """Record a result."""
        row = dict(flatten(result))
        header = b""
        if not self._columns:
            self._columns = dict.fromkeys(itertools.islice(row, _MAX_COLUMNS))
            header = _csv_line(self._columns)
        self._has_more = self._has_more or not row.keys() <= self._columns.keys()
        try:
            self.append(header + _csv_line(row.get(name) for name in self._columns))
        except OSError:
            if header:
                self._columns = {}
            raise

    def close(self) -> None:
        """Close the file."""
        super().close()
        if self._has_more:
            self._has_more = False
            self._write_anew()

    def _write_anew(self) -> None:
        """Write all results, with new columns behind the others."""
        source, columns = self._path.with_name(JSONL_FILE), self._columns
        for _, result in _results(source):
            columns.update((name, None) for name, _ in flatten(result) if len(columns) < _MAX_COLUMNS)
        with replaced(self._path) as temporary, temporary.open("wb") as file:
            if columns:
                file.write(_csv_line(columns))
            for _, result in _results(source):
                row = dict(flatten(result))
                file.write(_csv_line(row.get(name) for name in columns))


def _csv_line(cells: Iterable[object]) -> bytes:
    text = io.StringIO()
    finite = ("" if cell is None or (isinstance(cell, float) and not math.isfinite(cell)) else cell for cell in cells)
    csv.writer(text, lineterminator="\n").writerow(finite)
    return text.getvalue().encode("utf-8", "backslashreplace")


class TensorBoardLogger:
    """Event files for TensorBoard, by TensorFlow: each number of a result over the env steps sampled.

    The file is made by the first result. A writer that fails is replaced by another one, with a file of its own.

    Args:
        directory: where the event file is made.
        resume_after_step: tells TensorBoard to forget points past this many env steps; None for a new run.
    """

    def __init__(self, directory: Path, *, resume_after_step: int | None = None) -> None:
        self._directory, self._resume_after_step = directory, resume_after_step
        self._writer: Any = None

    def write(self, result: Mapping[str, Any]) -> None:
        """Record a result.

        Raises: OSError when it can't be stored.
        """
        import tensorflow as tf  # loaded already where there are results

        values = {name: value for name, value in numbers_of(result).items() if name != "timestamp"}
        v1 = tf.compat.v1
        event = v1.Event(
            wall_time=float(result.get("timestamp") or time.time()),
            step=int(result.get("timesteps_total", 0)),
            summary=v1.Summary(value=[v1.Summary.Value(tag=name, simple_value=one) for name, one in values.items()]),
        )
        try:
            if self._writer is None:
                self._open(tf)
            self._append(event)
        except tf.errors.OpError as error:
            self._writer = None
            raise OSError(error.message) from error

    def close(self) -> None:
        """Close the file, which holds all that was written already."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, tf: Any) -> None:
        event, now = tf.compat.v1.Event, time.time()
        self._writer = tf.io.TFRecordWriter(str(self._directory / f"events.out.tfevents.{now:.6f}.v2"))
        self._append(event(wall_time=now, file_version="brain.Event:2"))
        if self._resume_after_step is not None:
            start = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
            self._append(event(wall_time=now, step=self._resume_after_step + 1, session_log=start))
            self._resume_after_step = None

    def _append(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()


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

    def _say_once(self, name: str, error: Exception, follows: str) -> None:
        if name not in self._failing:
            self._failing.add(name)
            _log.error("%s can't be written (%s)%s", name, getattr(error, "strerror", None) or error, follows)


class BackgroundLogger:
    """Writes with another logger, in a thread of its own: in order, and at once unless the disk is slow.

    What the other logger raises comes out of the next call of any method.
    """

    def __init__(self, logger: Logger) -> None:
        """Take a logger over; no thread is started before the first result."""
        self._logger = logger
        self._thread = ThreadPoolExecutor(1, "aiorl-results")
        self._waiting: deque[Future[None]] = deque()

    def write(self, result: Mapping[str, Any]) -> None:
        """Have a result written as it is now; wait only where very many are still to be."""
        while self._waiting and (self._waiting[0].done() or len(self._waiting) >= _MAX_WAITING):
            self._waiting.popleft().result()
        copy = _copied(result)
        try:
            self._waiting.append(self._thread.submit(self._logger.write, copy))
        except RuntimeError:  # Python is ending, and has no threads any more
            self._logger.write(copy)

    def flush(self) -> None:
        """Wait until all is written."""
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        """Write what is still to be written, end the thread and close the other logger."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._logger.close)
            stack.callback(self._thread.shutdown)
            self.flush()


def _copied(value: Any) -> Any:
    """The same plain data, whatever its owner does with it from now on."""
    if isinstance(value, Mapping):
        return {name: _copied(inner) for name, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


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
        made.append(found if callable(found) else lambda run_dir, config, logger=found: logger)
    return made


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
        tensorboard: also write event files, where there is TensorFlow.
    Raises: ConfigError when a file can't be written.
    """
    try:
        named: dict[str, Logger] = {
            str(run_dir / JSONL_FILE): JsonlLogger(run_dir / JSONL_FILE, resume_after=resume_iteration),
            str(run_dir / CSV_FILE): CsvLogger(run_dir / CSV_FILE),
        }
        if tensorboard and not missing(["tensorflow"]):
            named["the TensorBoard event file"] = TensorBoardLogger(run_dir, resume_after_step=resume_step)
    except OSError as error:
        raise ConfigError(
            f"The run directory {run_dir} can't be written: {error.strerror or error}.",
            key="run_dir",
            value=str(run_dir),
            hint="Give another one with --run-dir DIR.",
        ) from error
    return Loggers(named)


def each_result(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The results of a run so far, one at a time; of very many about a thousand, evenly spread.

    Lines that a crash damaged are left out. One that is longer than any may be is named and ends them.

    Raises: OSError when there is no result.jsonl to read.
    """
    path = run_dir / JSONL_FILE
    size = path.stat().st_size
    return (result for _, result in _results(path, size // _SAMPLES if size > _READ_WHOLE_BYTES else 0))


def read_results(run_dir: Path) -> list[dict[str, Any]]:
    """The results of a run so far, as `each_result` gives them.

    Raises: OSError when there is no result.jsonl to read.
    """
    return list(each_result(run_dir))


def flatten(result: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The scalars of a result, each with its path joined by /; lists and empty dicts are left out."""
    for name, value in result.items():
        if value is None or isinstance(value, str | int | float | np.number):
            yield f"{prefix}{name}", value.item() if isinstance(value, np.number) else value
        elif isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}/")


def numbers_of(result: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a result, nested names joined by a slash."""
    return {name: float(value) for name, value in flatten(result) if type(value) in (int, float)}


def to_json(value: Any) -> Any:
    """`value` as strict JSON can hold it: NaN and infinities become None, arrays lists, NumPy scalars numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return to_json(value.tolist())
    if isinstance(value, Mapping):
        return {str(name): to_json(inner) for name, inner in value.items()}
    return [to_json(inner) for inner in value] if isinstance(value, list | tuple) else str(value)


def _results(path: Path, skipped_bytes: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the end of each line of a result.jsonl and its result, without those that are damaged.

    A last line without its end is none: its writer was killed, or writes it now.

    Args:
        path: the file.
        skipped_bytes: between two results.
    """
    with open_regular(path) as file:
        end = 0
        while line := file.readline(MAX_LINE_BYTES):
            if not line.endswith(b"\n"):
                if len(line) == MAX_LINE_BYTES:
                    _log.warning("%s is damaged: a line at byte %d never ends; what follows is left out", path, end)
                return
            end += len(line)
            if isinstance(result := _json(line), dict):
                yield end, result
            if skipped_bytes:
                file.seek(end + skipped_bytes)
                file.readline(MAX_LINE_BYTES)  # the rest of one
                end = file.tell()


def _json(line: bytes) -> Any:  # Any: whatever JSON holds
    """Return the content of a line; None if it is no JSON."""
    try:
        return orjson.loads(line)
    except ValueError:
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(line)  # half a pair of surrogates is text to it
    return None
