"""Files of JSON lines: ours, and the two kinds that RLlib writes. Lines are read one by one and within bounds.

Ours is a batch as one JSON object, every column with its dtype, so that what was written reads back equal:

    {"aiorl": 1, "env_steps": 3, "columns": {"rewards": {"dtype": "float32", "rows": [1.0, 1.0, 0.5]},
                                             "obs": {"dtype": "uint8", "shape": [3, 84, 84, 4], "lz4": "BCJN..."}}}
    {"aiorl": 1, "env_steps": 3, "policies": {"left": {"rewards": {...}}, "right": {...}}}

A column has ``rows``, nested lists; or ``lz4``, base64 of an LZ4 frame of its bytes (little-endian, C order); or
``base64`` of the bytes themselves, where numbers that JSON doesn't know (NaN, infinities) are among them. The dtype
``json`` is of columns of objects, such as infos.

RLlib's is a batch as one JSON object too, its columns plain lists or text that holds a compressed array:

    {"type": "SampleBatch", "obs": [[...], ...] or "BCJNGGh...", "actions": [...], ...}
    {"type": "MultiAgentBatch", "count": 4, "policy_batches": {"policy": {"obs": ...}}}

either of them perhaps as the only entry, ``{"value": {...}}``. The text is base64 of an LZ4 frame of a pickled array
(`aiorl.offline.pickled_array`). Newer lines of RLlib's are one row each, an object without a type:

    {"eps_id": 3, "obs": [0.1, -0.2], "actions": 1, "rewards": 1.0, "new_obs": [...], "terminateds": false, ...}

Rows of one episode that follow each other become one batch. An episode may be named by text, which becomes a number;
other text, such as the ids of agents and modules, and objects are left out.
"""

from __future__ import annotations

import binascii
import contextlib
import hashlib
import json
import logging
import math
from collections.abc import Callable, Generator, Mapping
from typing import Any

import lz4.frame
import numpy as np
import orjson
from numpy.typing import NDArray

from aiorl.config.files import parsed_bytes
from aiorl.data import columns as c
from aiorl.data.arrays import Batch
from aiorl.data.sample_batch import MultiAgentBatch, SampleBatch
from aiorl.errors import DataError
from aiorl.offline.files import create, open_unpacked
from aiorl.offline.formats import WHOLE, BatchFile, Format, Share, Stored, WriteOptions
from aiorl.offline.pickled_array import MAX_DIMS, read_pickled_array
from aiorl.offline.stored_columns import (
    MAX_BATCH_BYTES,
    NUMBER_KINDS,
    Room,
    check_policies,
    numbers_of,
    object_column,
    plain_column,
    to_batch,
)
from aiorl.process.log_once import log_once
from aiorl.text import one_line

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


_NO_COLUMNS = frozenset({"type", "count"})
_MAX_EXPANSION = 255  # an LZ4 block cannot hold more than this many bytes per byte


class RllibJson(Format):
    """JSON lines as RLlib writes them; written without compression, since that would take a pickle."""

    name = "rllib"
    suffixes = ()
    about = "JSON lines as RLlib writes and reads them (written with plain columns)"
    can_be_wrapped = True

    def read(self, path: str, share: Share = WHOLE) -> Generator[Stored | DataError, None, None]:
        """See Format."""
        return read_lines(path, share, rllib_batch)

    def create(self, path: str, options: WriteOptions) -> BatchFile:
        """See Format."""
        return JsonFile(path, _to_rllib)


def is_rllib(line: Mapping[str, object]) -> bool:
    """Whether a line is one of RLlib's."""
    return "type" in line or line.keys() == {"value"}


def rllib_batch(line: Mapping[str, Any]) -> Batch:
    """The batch of one line.

    Raises:
        DataError: it holds no batch, or one that cannot be read.
    """
    if line.keys() == {"value"} and isinstance(line["value"], dict):
        line = line["value"]
    kind = line.get("type")
    room = Room()
    if kind == "SampleBatch":
        return _rllib_sample_batch(line, room)
    if kind != "MultiAgentBatch":
        raise DataError("its type is neither SampleBatch nor MultiAgentBatch")
    count, policies = line.get("count"), check_policies(line.get("policy_batches"))
    if type(count) is not int or not 0 <= count < 2**53:
        raise DataError("a MultiAgentBatch needs a count of steps")
    if not all(isinstance(rows, dict) for rows in policies.values()):
        raise DataError("policy_batches must be columns by policy id")
    return MultiAgentBatch({policy_id: _rllib_sample_batch(rows, room) for policy_id, rows in policies.items()}, count)


def _rllib_sample_batch(columns: Mapping[str, Any], room: Room) -> SampleBatch:
    made: dict[str, NDArray[Any]] = {}
    for name, value in columns.items():
        if name in _NO_COLUMNS and not isinstance(value, list):
            continue
        made[name] = _rllib_column(name, value, room.left)
        room.take(made[name].nbytes)
    return to_batch(made)


def _rllib_column(name: str, value: object, room: int) -> NDArray[Any]:
    if isinstance(value, str):
        return _unpacked(name, value, room)
    if isinstance(value, list) and value and isinstance(value[0], str):  # each row on its own
        rows: list[NDArray[Any]] = []
        for text in value:
            if not isinstance(text, str):
                raise DataError(f"column {name!r} has compressed rows and others")
            rows.append(_unpacked(name, text, room))
            room -= rows[-1].nbytes
        try:
            return np.stack(rows)
        except ValueError as error:
            raise DataError(f"column {name!r} has rows that differ in shape") from error
    return plain_column(name, value)


def _unpacked(name: str, text: str, room: int) -> NDArray[Any]:
    try:
        frame = binascii.a2b_base64(text, strict_mode=True)
        return read_pickled_array(unpack_lz4(frame, room), max_bytes=room)
    except binascii.Error as error:
        raise DataError(f"column {name!r} is text that is no compressed array ({error})") from error
    except ValueError as error:
        if isinstance(error, DataError):
            raise DataError(f"column {name!r}: {error.reason}") from error
        raise DataError(f"column {name!r} is text that is no compressed array") from error


def unpack_lz4(frame: bytes, max_bytes: int) -> bytes:
    """What an LZ4 frame holds.

    Raises:
        DataError: it is damaged, or holds more than allowed; found before memory is taken.
    """
    try:
        size = int(lz4.frame.get_frame_info(frame)["content_size"])
        most = size or min(len(frame) * _MAX_EXPANSION, max_bytes)
        if size > max_bytes or size > len(frame) * _MAX_EXPANSION:
            raise DataError(f"compressed data of {size:,} bytes in {len(frame):,}, more than there can or may be")
        unpacker = lz4.frame.LZ4FrameDecompressor()
        raw: bytes = unpacker.decompress(frame, max_length=most + 1)
    except (RuntimeError, EOFError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"damaged compressed data ({error})") from error
    if not unpacker.eof or unpacker.unused_data:
        raise DataError("compressed data that are cut short, too large or followed by others")
    return raw


def _to_rllib(batch: Batch) -> dict[str, Any]:
    if isinstance(batch, SampleBatch):
        return {"type": "SampleBatch", **jsonable(batch)}
    policies = {policy_id: jsonable(rows) for policy_id, rows in batch.policy_batches.items() if rows.count}
    return {"type": "MultiAgentBatch", "count": batch.count, "policy_batches": policies}


_MAX_ROWS = 1000
_MAX_BYTES = 1 << 24
"""Of the lines of one batch, unless the first alone has more."""
_MAX_LINE = 1 << 20
"""Bytes of the first line of a file of rows."""


def read_batches_or_rows(
    path: str, share: Share, to_batch: Callable[[Mapping[str, Any]], Batch]
) -> Generator[Stored | DataError, None, None]:
    """Yield the batches of a file as `read_lines` does, also of a file that has a row in each line."""
    if not _has_rows(path):
        yield from read_lines(path, share, to_batch)
        return
    taken = 0
    for found in _joined(path):
        is_wanted = share.has(taken)
        if isinstance(found, DataError):  # reported by the one reader whose batch it is in
            if is_wanted:
                yield found
            continue
        if is_wanted:
            try:
                yield Stored(found[0], _batch_of_rows(found[1]))
            except DataError as error:
                yield DataError(error.reason, path=path, place=found[0])
        taken += 1


def _has_rows(path: str) -> bool:
    """Return whether the first line of a file is a row."""
    with open_unpacked(path) as file:
        line = file.readline(_MAX_LINE)
        while line.isspace():
            line = file.readline(_MAX_LINE)
    if b'"aiorl"' in line or b'"type"' in line or not line.startswith(b"{"):
        return False
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return c.OBS in row and c.ACTIONS in row and isinstance(row.get(c.REWARDS), int | float)


def _joined(path: str) -> Generator[tuple[str, list[Mapping[str, Any]]] | DataError, None, None]:
    """Rows that follow each other in an episode, and the place of the first."""
    rows: list[Mapping[str, Any]] = []
    first, num_bytes = "", 0
    for place, line in raw_lines(path):
        try:
            row = parsed(line)
        except DataError as error:
            yield DataError(error.reason, path=path, place=place)
            continue
        num_bytes += len(line)
        is_full = len(rows) == _MAX_ROWS or num_bytes > _MAX_BYTES
        if rows and (is_full or row.get(c.EPS_ID) != rows[-1].get(c.EPS_ID)):
            yield first, rows
            rows = []
        if not rows:
            first, num_bytes = place, len(line)
        rows.append(row)
    if rows:
        yield first, rows


def _batch_of_rows(rows: list[Mapping[str, Any]]) -> Batch:
    if any(row.keys() != rows[0].keys() for row in rows):
        raise DataError("rows of one episode have different columns")
    columns = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if name == c.EPS_ID and isinstance(values[0], str):
            values = [_number(str(value)) for value in values]
        if not isinstance(values[0], str | dict | None):
            columns[name] = plain_column(name, values)
    return to_batch(columns)


def _number(text: str) -> int:
    """A number for an episode's name, the same for the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


Array = NDArray[Any]
VERSION = 1
DTYPES = {
    name: np.dtype(name)
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
        "float64",
    )
}  # fmt: skip
_OBJECTS = "json"


class JsonLines(Format):
    """Our JSON lines; reading, lines of RLlib's are understood too."""

    name = "json"
    suffixes = (".json", ".jsonl", ".ndjson")
    about = "JSON lines with dtypes (our own; RLlib's are read too)"
    can_be_wrapped = True

    def read(self, path: str, share: Share = WHOLE) -> Generator[Stored | DataError, None, None]:
        """See Format."""
        return read_batches_or_rows(path, share, _batch)

    def create(self, path: str, options: WriteOptions) -> BatchFile:
        """See Format."""
        return JsonFile(path, lambda batch: _line(batch, options.compress_columns))


def _batch(line: Mapping[str, Any]) -> Batch:
    if "aiorl" not in line:
        if is_rllib(line):
            return rllib_batch(line)
        raise DataError("it has neither 'aiorl' nor RLlib's 'type', so it is no stored batch")
    if line["aiorl"] != VERSION:
        raise DataError("it was written by a newer version of aiorl; this one reads version 1")
    env_steps = line.get("env_steps")
    if type(env_steps) is not int or not 0 <= env_steps < 2**53:
        raise DataError("env_steps must be a number of steps")
    room = Room()
    if "columns" in line:
        batch = _sample_batch(line["columns"], room)
        if env_steps != batch.count:
            batch.env_steps = env_steps
        return batch
    policies = check_policies(line.get("policies"))
    batches = {policy_id: _sample_batch(columns, room) for policy_id, columns in policies.items()}
    return MultiAgentBatch(batches, env_steps)


def _sample_batch(columns: object, room: Room) -> SampleBatch:
    if not isinstance(columns, dict):
        raise DataError("columns must be an object, name to column")
    made: dict[str, Array] = {}
    for name, column in columns.items():
        try:
            made[name] = _column(column, room.left)
            room.take(made[name].nbytes)
        except (DataError, binascii.Error) as error:
            raise DataError(f"column {name!r}: {error}") from error
    return to_batch(made)


def _column(column: object, room: int) -> Array:
    match column:
        case {"dtype": "json", "rows": list() as rows}:
            return object_column(rows)
        case {"dtype": str() as dtype, "rows": list() as rows} if dtype in DTYPES:
            return _from_lists(rows, DTYPES[dtype])
        case {"dtype": str() as dtype, "shape": list() as shape, "lz4": str() as text} if dtype in DTYPES:
            return _from_bytes(unpack_lz4(_base64(text), room), DTYPES[dtype], shape)
        case {"dtype": str() as dtype, "shape": list() as shape, "base64": str() as text} if dtype in DTYPES:
            return _from_bytes(_base64(text), DTYPES[dtype], shape)
    raise DataError("it has no known dtype with rows, lz4 or base64")


def _base64(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:  # also text that is no ASCII
        raise DataError(f"text that is no base64 ({error})") from error


def _from_lists(rows: list[Any], dtype: np.dtype[Any]) -> Array:
    try:
        found = numbers_of(rows) if rows else np.empty(0, dtype)
        if found.dtype == dtype:
            return found
        with np.errstate(all="ignore"):  # numbers that the dtype can't hold are looked for below
            made = found.astype(dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError("rows that differ in shape or are no numbers") from error
    if found.dtype.kind not in "biuf" or (dtype.kind != "f" and not np.array_equal(made, found)):
        raise DataError(f"numbers that are none of {dtype}")
    return made


def _from_bytes(raw: bytes, dtype: np.dtype[Any], shape: list[Any]) -> Array:
    if not 0 < len(shape) <= MAX_DIMS or not all(type(size) is int and 0 <= size < 2**28 for size in shape):
        raise DataError("an impossible shape")
    if math.prod(shape) * dtype.itemsize != len(raw):
        raise DataError(f"{len(raw):,} bytes, which are not those of its shape")
    if not raw:
        return np.empty((shape[0], 0), dtype).reshape(shape) if shape[0] else np.empty(0, dtype)
    array: Array = np.frombuffer(raw, dtype.newbyteorder("<")).astype(dtype, copy=False)
    if dtype.kind == "b" and array.view(np.uint8).max() > 1:
        raise DataError("booleans other than 0 and 1")
    return array.reshape(shape)


def _line(batch: Batch, compress: frozenset[str]) -> dict[str, Any]:
    head = {"aiorl": VERSION, "env_steps": batch.env_steps}
    if isinstance(batch, SampleBatch):
        return {**head, "columns": _described(batch, compress)}
    policies = {policy_id: _described(rows, compress) for policy_id, rows in batch.policy_batches.items() if rows.count}
    return {**head, "policies": policies}


def _described(batch: SampleBatch, compress: frozenset[str]) -> dict[str, Any]:
    return {name: _described_column(column, name in compress) for name, column in jsonable(batch).items()}


def _described_column(column: Any, is_compressed: bool) -> dict[str, Any]:
    if not isinstance(column, np.ndarray):
        return {"dtype": _OBJECTS, "rows": column}
    dtype = column.dtype.name
    if is_compressed:
        packed = lz4.frame.compress(_little_endian(column))
        return {"dtype": dtype, "shape": list(column.shape), "lz4": binascii.b2a_base64(packed, newline=False).decode()}
    # a column whose rows are empty says its shape only by bytes, JSON knows no NaN, and NumPy reads large numbers badly
    if column.size and dtype != "uint64" and (column.dtype.kind != "f" or np.isfinite(column).all()):
        return {"dtype": dtype, "rows": column}
    raw = binascii.b2a_base64(_little_endian(column), newline=False).decode()
    return {"dtype": dtype, "shape": list(column.shape), "base64": raw}


def _little_endian(column: Array) -> bytes:
    return column.astype(column.dtype.newbyteorder("<"), copy=False).tobytes()
