"""Files with one JSON object per line: lines read one by one and within bounds, written in one go each."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Generator, Mapping
from typing import Any

import numpy as np
import orjson

from aiorl.config.files import parsed_bytes
from aiorl.data.concat import Batch
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import DataError
from aiorl.offline.files import create, open_unpacked
from aiorl.offline.formats import BatchFile, Share, Stored
from aiorl.offline.stored_columns import MAX_BATCH_BYTES, NUMBER_KINDS
from aiorl.process.log_once import log_once
from aiorl.text import one_line

__all__ = ["MAX_LINE_BYTES", "JsonFile", "encoded", "jsonable", "parsed", "raw_lines", "read_lines"]

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 1 << 28
_LARGE_LINE = 1 << 24
_MAX_PARSED_BYTES = 2 * MAX_BATCH_BYTES
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
_NOT_IN_JSON = (b"NaN", b"Infinity")  # Python's json writes them, and JSON doesn't know them


def read_lines(
    path: str, share: Share, to_batch: Callable[[Mapping[str, Any]], Batch]
) -> Generator[Stored | DataError, None, None]:
    """Yield the batch of each line, or the error that says why there is none; empty lines are passed over.

    A last line without an end that is no JSON is what a writer left that was killed; its error says so.

    Raises:
        DataError: a line too long, or a compressed file that is damaged.
        OSError: the file cannot be read.
    """
    for taken, (place, line) in enumerate(raw_lines(path)):
        if share.has(taken):
            try:
                yield Stored(place, to_batch(parsed(line)))
            except DataError as error:
                yield DataError(error.reason, path=path, place=place)


def raw_lines(path: str) -> Generator[tuple[str, bytes], None, None]:
    """Yield each line that is not empty, behind its place.

    Raises: as `read_lines`.
    """
    with open_unpacked(path) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES):
            number += 1
            if not line.endswith(b"\n") and len(line) == MAX_LINE_BYTES:
                raise DataError(f"a line of more than {MAX_LINE_BYTES:,} bytes", path=path, place=f"line {number}")
            if not line.isspace():
                yield f"line {number}", line


def parsed(line: bytes) -> Mapping[str, Any]:
    """The object that a line holds.

    Raises:
        DataError: it is no JSON object, or one whose values take too much memory.
    """
    if len(line) > _LARGE_LINE and parsed_bytes(line) > _MAX_PARSED_BYTES:
        raise DataError("a line whose values take too much memory; write smaller batches")
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        if not any(word in line for word in _NOT_IN_JSON):
            raise _no_json(line, str(error)) from error
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as again:
            raise _no_json(line, str(again)) from again
    if not isinstance(found, dict):
        raise DataError("a line must be a JSON object with the columns of a batch")
    return found


def _no_json(line: bytes, why: str) -> DataError:
    if not line.endswith(b"\n"):
        return DataError("the last line is cut short, as by a writer that was killed")
    return DataError(f"no JSON: {one_line(why, 120)}")


def jsonable(batch: SampleBatch) -> dict[str, Any]:
    """Columns as orjson writes them; those with objects that are no JSON are left out, which is logged once."""
    return {name: column for name, value in batch.items() if (column := _writable(name, value)) is not None}


def _writable(name: str, column: np.ndarray[Any, Any]) -> Any:
    if column.dtype.kind in NUMBER_KINDS:
        return np.ascontiguousarray(column, column.dtype.newbyteorder("="))
    values = column.tolist()
    try:
        orjson.dumps(values, default=_to_list, option=_OPTIONS)
    except orjson.JSONEncodeError as error:
        if log_once(f"unwritten column {name}"):
            logger.warning("Column %r is not written: %s", name, one_line(str(error), 200))
        return None
    return values


def encoded(value: object, options: int = 0) -> bytes:
    """JSON of a value.

    Raises:
        DataError: it holds what JSON cannot.
    """
    try:
        return orjson.dumps(value, default=_to_list, option=_OPTIONS | options)
    except orjson.JSONEncodeError as error:
        raise DataError(f"a batch can't be written as JSON: {one_line(str(error), 200)}") from error


def _to_list(value: object) -> object:
    """What orjson asks of what it doesn't know: arrays that are no block of native numbers, and tuples' kin."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"a {type(value).__name__} is no JSON")


class JsonFile(BatchFile):
    """A file of lines, each of them written in one go, so that a crash tears the last one at most."""

    def __init__(self, path: str, to_line: Callable[[Batch], Mapping[str, Any]]) -> None:
        """Begin a new file."""
        self._to_line = to_line
        self._file = create(path)

    def write(self, batch: Batch) -> int:
        """See BatchFile."""
        line = encoded(self._to_line(batch), orjson.OPT_APPEND_NEWLINE)
        rest = memoryview(line)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._file.flush()
        return len(line)

    def close(self) -> None:
        """See BatchFile."""
        self._file.close()

    def abandon(self) -> None:
        """See BatchFile; the lines there are stay."""
        with contextlib.suppress(OSError):
            self._file.close()
