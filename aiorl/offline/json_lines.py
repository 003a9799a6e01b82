"""Files of JSON lines: our own format, and the two kinds that RLlib writes. Lines are read one by
one, within limits.

Our format has one JSON object for a batch, with the dtype of every column, so that it reads back
equal:

    {"aiorl": 1, "env_steps": 3,
     "columns": {"rewards": {"dtype": "float32", "rows": [1.0, 1.0, 0.5]},
                 "obs": {"dtype": "uint8", "shape": [3, 84, 84, 4], "lz4": "BCJN..."}}}
    {"aiorl": 1, "env_steps": 3, "policies": {"left": {"rewards": {...}}, "right": {...}}}

A column has ``rows``, nested lists; or ``lz4``, base64 of an LZ4 frame of its bytes (little-endian,
C order); or ``base64`` of the bytes themselves, if some of its numbers can't be written in JSON
(NaN, infinities). The dtype ``json`` is for columns of objects, such as infos; NaN and infinities
in them are null.

RLlib's batch format is one JSON object, too. Its columns are plain lists, or text that holds a
compressed array:

    {"type": "SampleBatch", "obs": [[...], ...] or "BCJNGGh...", "actions": [...], ...}
    {"type": "MultiAgentBatch", "count": 4, "policy_batches": {"policy": {"obs": ...}}}

Either can be the only entry of another object, ``{"value": {...}}``. The text is base64 of an LZ4
frame of a pickled array (`aiorl.offline.pickled_array`). RLlib's newer lines are single rows,
objects without a type:

    {"eps_id": 3, "obs": [0.1, -0.2], "actions": 1, "rewards": 1.0, "new_obs": [...], ...}

Rows of one episode that follow each other become one batch. The text id of an episode becomes a
number; other text, such as the ids of agents and modules, and objects are left out.
"""

from __future__ import annotations

import binascii
import contextlib
import json
import logging
import math
import re
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import lz4.frame
import numpy as np
import orjson

from aiorl.config.files import parsed_bytes
from aiorl.data import columns as c
from aiorl.data.columns import NUMBER_KINDS, Array
from aiorl.data.sample_batch import Batch, MultiAgentBatch, SampleBatch, rows_by_policy
from aiorl.errors import DataError
from aiorl.offline.column_names import with_known_names
from aiorl.offline.files import create, open_unpacked, packed
from aiorl.offline.formats import WHOLE, BatchFile, Format, Share, Stored, WriteOptions, placed
from aiorl.offline.pickled_array import read_pickled_array
from aiorl.offline.stored_columns import (
    KNOWN,
    MAX_BATCH_BYTES,
    WHOLE_NUMBERS,
    Room,
    check_names,
    check_policies,
    episode_numbers,
    from_bytes,
    in_dtype,
    numbers_of,
    object_column,
    read_batch,
)
from aiorl.process.log_once import log_once
from aiorl.text import one_line

logger = logging.getLogger(__name__)
Line = bytes | Mapping[str, Any]
"""Line of a file, as it is or parsed."""
VERSION = 1
MAX_LINE_BYTES = 1 << 28
_LARGE_LINE = 1 << 24
_MAX_PARSED_BYTES = 2 * MAX_BATCH_BYTES
_MAX_ROWS = 1000
_MAX_ROWS_BYTES = 1 << 24
"""Largest number of single rows in a batch, and of their bytes, unless the first row alone has
more."""
_MAX_FIRST_ROW = 1 << 20
_BLOCK_BYTES = 1 << 18
_SPACES = re.compile(rb"\s*")
_MAX_EXPANSION = 255
"""Bytes that one byte of an LZ4 block can stand for, at most."""
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
_NOT_IN_JSON = (b"NaN", b"Infinity")  # Python's json writes these words, which are not JSON
_OBJECTS = "json"
DTYPES = {np.dtype(code).name: np.dtype(code) for code in "?bhiqBHIQefd"}
"""Dtypes of columns by name: bool, int8 to int64, uint8 to uint64, float16 to float64."""


class JsonLines(Format):
    """Our JSON lines; lines of RLlib can be read as well."""

    name = "json"
    suffixes: tuple[str, ...] = (".json", ".jsonl", ".ndjson")
    about = "JSON lines with dtypes (our own; RLlib's are read too)"
    can_be_wrapped = True

    def read(self, path: str, share: Share = WHOLE) -> Generator[Stored | DataError, None, None]:
        """See `Format.read`.

        If the last line has no newline and is not JSON, its error says that it is cut short, as by
        a killed writer.
        """
        for number, (place, lines) in enumerate(_groups(path)):
            if share.has(number):
                try:
                    parsed = [_parsed(line) if isinstance(line, bytes) else line for line in lines]
                    yield Stored(place, _batch(parsed))
                except DataError as error:
                    yield placed(error, path, place)

    def create(self, path: str, options: WriteOptions) -> BatchFile:
        """See `Format.create`."""
        return _JsonFile(path, self, options.compress_columns)

    def line(self, batch: Batch, compress: frozenset[str]) -> dict[str, Any]:
        """Return a batch as one JSON object, with some columns compressed."""
        line: dict[str, Any] = {"aiorl": VERSION, "env_steps": batch.env_steps}
        if isinstance(batch, SampleBatch):
            line["columns"] = _described(batch, compress)
        else:
            line["policies"] = {
                policy_id: _described(rows, compress)
                for policy_id, rows in batch.policy_batches.items()
                if rows.count
            }
        return line


class RllibJson(JsonLines):
    """RLlib's JSON lines; written without compression, which would require a pickle."""

    name = "rllib"
    suffixes = ()
    about = "JSON lines as RLlib writes and reads them (written with plain columns)"

    def line(self, batch: Batch, compress: frozenset[str]) -> dict[str, Any]:
        """See `JsonLines.line`."""
        if isinstance(batch, SampleBatch):
            return {"type": "SampleBatch", **jsonable(batch)}
        policies = {
            policy_id: jsonable(rows)
            for policy_id, rows in batch.policy_batches.items()
            if rows.count
        }
        return {"type": "MultiAgentBatch", "count": batch.count, "policy_batches": policies}


# --- lines ---


def _groups(path: str) -> Iterator[tuple[str, list[Line]]]:
    """Yield the lines of each batch, parsed or raw, and the place of the first.

    If the first line of the file is a row, consecutive rows of an episode form a batch; otherwise
    each line does.
    """
    group: list[Line] = []
    first = ""
    episode = object()
    num_bytes = 0
    has_rows = None
    for place, line in _lines(path):
        if has_rows is None:
            has_rows = _is_row(line)
        if not has_rows:
            yield place, [line]
            continue
        row: Line
        try:
            row = with_known_names(_parsed(line))
            row_episode = row.get(c.EPS_ID)
        except DataError:
            # a batch of its own, which raises the error
            row = line
            row_episode = object()
        num_bytes += len(line)
        is_full = len(group) == _MAX_ROWS or num_bytes > _MAX_ROWS_BYTES
        if group and (is_full or row_episode != episode):
            yield first, group
            group = []
        if not group:
            first = place
            episode = row_episode
            num_bytes = len(line)
        group.append(row)
    if group:
        yield first, group


def _lines(path: str) -> Iterator[tuple[str, bytes]]:
    """Yield each line that is not empty, and its place.

    Raises:
        DataError: a line is too long, or a compressed file is damaged.
        OSError: the file cannot be read.
    """
    with open_unpacked(path) as file:
        # after a damaged place, read1 has returned everything before it
        read = getattr(file, "read1", file.read)
        number = 1
        parts: list[bytes] = []
        size = 0
        while block := read(_BLOCK_BYTES):
            at = 0
            while at < len(block):
                if not parts:
                    # a small compressed file can have millions of empty lines
                    spaces = _SPACES.match(block, at)
                    assert spaces is not None, "it matches no space, too"
                    number += block.count(b"\n", at, spaces.end())
                    at = spaces.end()
                    if at == len(block):
                        break
                newline = block.find(b"\n", at)
                end = len(block) if newline < 0 else newline + 1
                parts.append(block[at:end])
                size += end - at
                at = end
                if size > MAX_LINE_BYTES:
                    reason = f"a line of more than {MAX_LINE_BYTES:,} bytes"
                    raise DataError(reason, path=path, place=f"line {number}")
                if newline >= 0:
                    yield f"line {number}", b"".join(parts)
                    number += 1
                    parts = []
                    size = 0
        if parts:
            yield f"line {number}", b"".join(parts)


def _is_row(line: bytes) -> bool:
    if len(line) > _MAX_FIRST_ROW or b'"aiorl"' in line or b'"type"' in line:
        return False
    try:
        row = with_known_names(_parsed(line))
    except DataError:
        return False
    has_columns = c.OBS in row and c.ACTIONS in row
    return has_columns and isinstance(row.get(c.REWARDS), int | float | None)


def _parsed(line: bytes) -> Mapping[str, Any]:
    """Return the object in a line.

    Raises:
        DataError: it is not a JSON object, or its values take too much memory.
    """
    if len(line) > _LARGE_LINE and parsed_bytes(line) > _MAX_PARSED_BYTES:
        raise DataError("the values of the line take too much memory; write smaller batches")
    try:
        try:
            values = orjson.loads(line)
        except orjson.JSONDecodeError:
            if not any(word in line for word in _NOT_IN_JSON):
                raise
            values = json.loads(line)
    except (ValueError, RecursionError) as error:
        if not line.endswith(b"\n"):
            raise DataError("the last line is cut short, as by a writer that was killed") from error
        raise DataError(f"not JSON: {one_line(str(error), 120)}") from error
    if not isinstance(values, dict):
        raise DataError("a line must be a JSON object with the columns of a batch")
    return values


# --- batches ---


def _batch(lines: list[Mapping[str, Any]]) -> Batch:
    """Return the batch of one line, or of several lines with one row each."""
    line = lines[0]
    if "aiorl" in line:
        return _own_batch(line)
    if "type" in line or line.keys() == {"value"}:
        return _rllib_batch(line)
    columns = with_known_names(line)
    if {c.OBS, c.ACTIONS, c.REWARDS} <= columns.keys():
        if isinstance(columns[c.REWARDS], list):
            return _rllib_rows(columns, Room())
        return _batch_of_rows(lines)
    raise DataError("it has neither 'aiorl' nor RLlib's 'type', so it is not a stored batch")


def _own_batch(line: Mapping[str, Any]) -> Batch:
    if line["aiorl"] != VERSION:
        raise DataError("it was written by a newer version of aiorl; this one reads version 1")
    count = _count(line.get("env_steps"))
    room = Room()
    if "columns" not in line:
        policies = {
            policy_id: read_batch(columns, _column, room)
            for policy_id, columns in check_policies(line.get("policies")).items()
        }
        return MultiAgentBatch(policies, count)
    batch = read_batch(line["columns"], _column, room)
    if count != batch.count:
        batch.env_steps = count
    return batch


def _rllib_batch(line: Mapping[str, Any]) -> Batch:
    if line.keys() == {"value"} and isinstance(line["value"], dict):
        line = line["value"]
    if line.get("type") == "SampleBatch":
        return _rllib_rows(line, Room())
    if line.get("type") != "MultiAgentBatch":
        raise DataError("its type is neither SampleBatch nor MultiAgentBatch")
    room = Room()
    policies = {
        policy_id: _rllib_rows(rows, room)
        for policy_id, rows in check_policies(line.get("policy_batches")).items()
    }
    return MultiAgentBatch(policies, _count(line.get("count")))


def _rllib_rows(rows: Any, room: Room) -> SampleBatch:
    if isinstance(rows, dict):
        # type and count can be columns as well
        columns = {
            name: column
            for name, column in rows.items()
            if name not in ("type", "count") or isinstance(column, list)
        }
        rows = with_known_names(columns)
        names = rows.get(c.EPS_ID)
        if isinstance(names, list) and any(isinstance(name, str) for name in names):
            rows[c.EPS_ID] = episode_numbers(names).tolist()
    return read_batch(rows, _rllib_column, room)


def _count(steps: object) -> int:
    if type(steps) is not int or not 0 <= steps < 2**53:
        raise DataError("a batch needs a number of env steps")
    return steps


def _batch_of_rows(rows: list[Mapping[str, Any]]) -> Batch:
    if any(row.keys() != rows[0].keys() for row in rows):
        raise DataError("rows of one episode have different columns")
    columns = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        first = next((value for value in values if value is not None), None)
        if name in KNOWN or not isinstance(first, str | dict | None):
            columns[name] = values
    return _rllib_rows(columns, Room())


# --- columns ---


def _column(name: str, column: object, room: Room) -> Array:
    """Return a column of one of our lines."""
    match column:
        case {"dtype": "json", "rows": list() as rows}:
            return object_column(rows)
        case {"dtype": str() as dtype, "rows": rows} if dtype in DTYPES:
            return numbers_of(rows, DTYPES[dtype])
        case {"dtype": str() as dtype, "shape": list() as shape, "lz4": str() as text} if (
            dtype in DTYPES
        ):
            return from_bytes(_unpacked(text, room.left), DTYPES[dtype].newbyteorder("<"), shape)
        case {"dtype": str() as dtype, "shape": list() as shape, "base64": str() as text} if (
            dtype in DTYPES
        ):
            return from_bytes(_base64(text), DTYPES[dtype].newbyteorder("<"), shape)
    raise DataError("it has no known dtype with rows, lz4 or base64")


def _rllib_column(name: str, column: object, room: Room) -> Array:
    """Return a column of one of RLlib's lines; null becomes NaN, lists of mappings are kept."""
    if isinstance(column, str):
        return read_pickled_array(_unpacked(column, room.left))
    if isinstance(column, list) and column and isinstance(column[0], str):
        return _rows_of_texts(column, room.left)
    if isinstance(column, list) and column and isinstance(column[0], dict):
        return object_column(column)
    numbers = numbers_of(column)
    # float32 would make one number of several large ones
    if numbers.dtype == np.float64 and name not in WHOLE_NUMBERS:
        return in_dtype(numbers, np.dtype(np.float32))
    return numbers


def _rows_of_texts(texts: list[Any], max_bytes: int) -> Array:
    """Return a column of which each row was compressed on its own."""
    rows: list[Array] = []
    for text in texts:
        if not isinstance(text, str):
            raise DataError("compressed and uncompressed rows in one column")
        rows.append(read_pickled_array(_unpacked(text, max_bytes)))
        max_bytes -= rows[-1].nbytes
    try:
        return np.stack(rows)
    except ValueError as error:
        raise DataError("rows that differ in shape") from error


def _base64(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:  # also raised for text that is not ASCII
        raise DataError(f"text that is not base64 ({error})") from error


def _unpacked(text: str, max_bytes: int) -> bytes:
    """Return the bytes of an LZ4 frame in base64.

    Raises:
        DataError: it is damaged, or too large, which is checked before memory is allocated.
    """
    frame = _base64(text)
    most = min(len(frame) * _MAX_EXPANSION, max_bytes)
    try:
        size = int(lz4.frame.get_frame_info(frame)["content_size"])
        unpacker = lz4.frame.LZ4FrameDecompressor()
        raw = b""
        if size <= most:
            raw = unpacker.decompress(frame, max_length=(size or most) + 1)
    except (RuntimeError, EOFError, ValueError) as error:
        raise DataError(f"damaged compressed data ({error})") from error
    if size > most:
        raise DataError(
            f"compressed data of {size:,} bytes in {len(frame):,}, more than is possible or allowed"
        )
    if not unpacker.eof or unpacker.unused_data:
        raise DataError("compressed data that are cut short, too large or followed by other data")
    return raw


# --- writing ---


class _JsonFile(BatchFile):
    """File of lines, each written in one call, so that a crash damages only the last one."""

    def __init__(self, path: str, form: JsonLines, compress: frozenset[str]) -> None:
        """Create the file."""
        self._path = path
        self._form = form
        self._compress = compress
        self._plain = create(path)
        self._file = packed(path, self._plain)

    def write(self, batch: Batch) -> int:
        """See `BatchFile.write`."""
        policies = rows_by_policy(batch)
        check_names(policies, "policy", self._path)
        for rows in policies.values():
            check_names(rows, path=self._path)
        line = encoded(self._form.line(batch, self._compress), orjson.OPT_APPEND_NEWLINE)
        rest = memoryview(line)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._file.flush()
        return len(line)

    def close(self) -> None:
        """See `BatchFile.close`."""
        self._file.close()
        self._plain.close()

    def abandon(self) -> None:
        """See `BatchFile.abandon`; lines already written are kept."""
        with contextlib.suppress(OSError):
            self.close()


def jsonable(batch: SampleBatch) -> dict[str, Any]:
    """Return columns that orjson can write.

    Columns of other objects are left out, and NaN and infinities in objects become null. Either is
    logged once.
    """
    columns = {name: _writable(name, column) for name, column in batch.items()}
    return {name: column for name, column in columns.items() if column is not None}


def _writable(name: str, column: Array) -> Any:
    if column.dtype.kind in NUMBER_KINDS:
        return np.ascontiguousarray(column, column.dtype.newbyteorder("="))
    values = column.tolist()
    try:
        text = encoded(values)
    except DataError as error:
        if log_once(f"unwritten column {name}"):
            logger.warning("Column %r is not written: %s", name, error)
        return None
    if b"null" in text and _is_not_finite(values) and log_once(f"not finite in column {name}"):
        logger.warning(
            "Column %r holds objects with NaN or infinities, which are written as null, because"
            " JSON has no such numbers",
            name,
        )
    return values


def _is_not_finite(value: object) -> bool:
    """Return whether a value is a float that JSON doesn't have, or an object with one."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(map(_is_not_finite, value))
    return isinstance(value, float) and not math.isfinite(value)


def encoded(value: object, options: int = 0) -> bytes:
    """Return JSON of a value.

    Raises:
        DataError: it contains objects that JSON can't represent.
    """
    try:
        return orjson.dumps(value, default=_to_list, option=_OPTIONS | options)
    except orjson.JSONEncodeError as error:
        raise DataError(f"a batch can't be written as JSON: {one_line(str(error), 200)}") from error


def _to_list(value: object) -> object:
    """Return lists for objects that orjson can't write: arrays that are not native and contiguous,
    and sets.
    """
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"a {type(value).__name__} can't be written as JSON")


def _described(batch: SampleBatch, compress: frozenset[str]) -> dict[str, Any]:
    return {
        name: _described_column(column, name in compress)
        for name, column in jsonable(batch).items()
    }


def _described_column(column: Any, is_compressed: bool) -> dict[str, Any]:
    if not isinstance(column, np.ndarray):
        return {"dtype": _OBJECTS, "rows": column}
    dtype = column.dtype.name
    # JSON can't give the shape of a column of empty rows or NaN, and NumPy reads large numbers
    # badly
    is_json = (
        column.size
        and dtype != "uint64"
        and (column.dtype.kind != "f" or np.isfinite(column).all())
    )
    if is_json and not is_compressed:
        return {"dtype": dtype, "rows": column}
    raw = column.astype(column.dtype.newbyteorder("<"), copy=False).tobytes()
    if is_compressed:
        raw = lz4.frame.compress(raw)
    text = binascii.b2a_base64(raw, newline=False).decode()
    return {"dtype": dtype, "shape": [*column.shape], "lz4" if is_compressed else "base64": text}
