"""Our JSON lines: a batch as one JSON object, every column with its dtype, so that what was written reads back equal.

    {"aiorl": 1, "env_steps": 3, "columns": {"rewards": {"dtype": "float32", "rows": [1.0, 1.0, 0.5]},
                                             "obs": {"dtype": "uint8", "shape": [3, 84, 84, 4], "lz4": "BCJN..."}}}
    {"aiorl": 1, "env_steps": 3, "policies": {"left": {"rewards": {...}}, "right": {...}}}

A column has ``rows``, nested lists; or ``lz4``, base64 of an LZ4 frame of its bytes (little-endian, C order); or
``base64`` of the bytes themselves, where numbers that JSON doesn't know (NaN, infinities) are among them. The dtype
``json`` is of columns of objects, such as infos.
"""

from __future__ import annotations

import binascii
import math
from collections.abc import Generator, Mapping
from typing import Any

import lz4.frame
import numpy as np
from numpy.typing import NDArray

from aiorl.data.concat import Batch
from aiorl.data.multi_agent_batch import MultiAgentBatch
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import DataError
from aiorl.offline.formats import WHOLE, BatchFile, Format, Share, Stored, WriteOptions
from aiorl.offline.json_file import JsonFile, jsonable
from aiorl.offline.pickled_array import MAX_DIMS
from aiorl.offline.rllib_json import is_rllib, rllib_batch, unpack_lz4
from aiorl.offline.rllib_rows import read_batches_or_rows
from aiorl.offline.stored_columns import Room, check_policies, numbers_of, object_column, to_batch

__all__ = ["DTYPES", "JsonLines"]

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
