"""Parquet: one column for each of a batch, row groups that end where episodes do.

The metadata of a column's field describe its rows: ``aiorl`` = ``{"dtype": "float32", "shape":
[4]}``. Small tensors are fixed-size lists, which other programs can read; large ones are the bytes
of a row, because Parquet would store levels for every number, which take more space than the
numbers. Columns of objects, such as infos, are JSON text. Files of other programs can be read as
well: columns of numbers, and of lists with the same length in every row.

A file is written under another name and renamed when it is complete, because a Parquet file without
its end can't be read.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
from collections import Counter
from collections.abc import Generator, Sequence
from typing import IO, Any, NamedTuple

import numpy as np
import orjson

from aiorl.config.files import parsed_bytes
from aiorl.data import columns as c
from aiorl.data.columns import NUMBER_KINDS, Array
from aiorl.data.sample_batch import Batch, SampleBatch
from aiorl.errors import DataError
from aiorl.offline.column_names import with_known_names
from aiorl.offline.files import EXTRA, create, is_uri, open_plain, readable
from aiorl.offline.formats import WHOLE, BatchFile, Format, Share, Stored, WriteOptions, placed
from aiorl.offline.json_lines import encoded, jsonable
from aiorl.offline.stored_columns import (
    KNOWN,
    MAX_BATCH_BYTES,
    MAX_DIMS,
    Form,
    Room,
    check_booleans,
    check_names,
    episode_numbers,
    form_of,
    in_dtype,
    object_column,
    read_batch,
)
from aiorl.process.imports import needed_by
from aiorl.text import one_line

_I32 = 5
_I64 = 6
_LIST = 9
_STRUCT = 12
_DICTIONARY = 7
_PAGES = (5, _DICTIONARY, 8)
"""Fields of a page's header: with data, with a dictionary, and with data of version 2."""
_MAX_FOOTER_BYTES = 1 << 24
_MAX_VALUES = 1 << 22
_MAX_NESTED = 8
_MAX_NUMBER = 100
_DAMAGED = "a damaged footer or page"
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "BYTE_ARRAY": 4, "INT96": 12}
"""Bytes of a decoded value; texts are read as a dictionary, so for them the bytes of an entry's
number."""

_Fields = dict[tuple[int, int], Any]
"""Number and type of a struct's field -> its value."""


def read_row_groups(file: IO[bytes]) -> list[tuple[int, list[_Fields]]]:
    """Return for each row group of a file's footer the number of its rows and the metadata of each
    column.

    With some damaged footers pyarrow would end the process.

    Raises:
        DataError: the footer is missing or can't be read.
    """
    size = file.seek(0, 2)
    file.seek(max(0, size - 8))
    length = int.from_bytes(file.read(4), "little")
    if length > min(size - 8, _MAX_FOOTER_BYTES):
        raise DataError(f"a footer of {length:,} bytes")
    file.seek(size - 8 - length)
    footer = _Compact(io.BytesIO(file.read(length))).struct()
    groups = []
    for group in _structs(footer, 4):
        num_rows = _number(group, 3, _I64)
        chunks = [chunk.get((3, _STRUCT), {}) for chunk in _structs(group, 1)]
        groups.append((num_rows, chunks))
    return groups


def decoded_bytes(
    file: IO[bytes],
    chunk: _Fields,
    column: Any,
) -> int:
    """Return an upper bound of the decoded size of a row group's column in bytes.

    Args:
        file: the whole file.
        chunk: the column's metadata in the row group.
        column: the column's ColumnSchema of pyarrow.

    Raises:
        DataError: the header of a page can't be read.
    """
    width = _WIDTHS.get(column.physical_type, 8)
    if column.physical_type == "FIXED_LEN_BYTE_ARRAY":
        width = column.length
    # offsets of the lists within a row
    width += 4 * max(0, column.max_repetition_level - 1)
    at = _number(chunk, 9, _I64)
    first = chunk.get((11, _I64), 0)
    if 0 < first < at:
        at = first
    end = at + _number(chunk, 7, _I64)
    total = 0
    num_values = 0
    while at < end:
        file.seek(at)
        header = _Compact(file).struct()
        counts = {
            kind: _number(header[kind, _STRUCT], 1, _I32)
            for kind in _PAGES
            if (kind, _STRUCT) in header
        }
        num_in_page = sum(counts.values())
        total += max(_number(header, 2, _I32), width * num_in_page)
        num_values += num_in_page - counts.get(_DICTIONARY, 0)
        at = file.tell() + _number(header, 3, _I32)
    # a reader would look for the other pages after the last one
    if num_values < _number(chunk, 5, _I64):
        raise DataError("a column without all of its pages")
    return total


def _number(
    fields: _Fields,
    number: int,
    kind: int,
) -> int:
    value = fields.get((number, kind), -1)
    if value < 0:
        raise DataError(_DAMAGED)
    return int(value)


def _structs(fields: _Fields, number: int) -> list[_Fields]:
    items: list[_Fields] = fields.get((number, _LIST), [])
    if not all(isinstance(item, dict) for item in items):
        raise DataError(_DAMAGED)
    return items


class _Compact:
    """Reader of a struct in Thrift's compact protocol; only numbers, structs and lists are kept."""

    def __init__(self, file: IO[bytes]) -> None:
        """Start at the file's position."""
        self._file = file
        self._left = _MAX_VALUES

    def struct(self, depth: int = 0) -> _Fields:
        """Return the fields with their types, because a reader that knows a field ignores it if its
        type differs.

        Raises:
            DataError: the struct is ambiguous or has no end.
        """
        fields: _Fields = {}
        numbers: set[int] = set()
        number = 0
        while head := self._byte():
            step = head >> 4
            kind = head & 15
            number = number + step if step else self._integer()
            # other readers take numbers modulo 2^16
            if number in numbers or not 0 < number <= _MAX_NUMBER:
                raise DataError(_DAMAGED)
            numbers.add(number)
            fields[number, kind] = self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        self._left -= 1
        if depth > _MAX_NESTED or not self._left:
            raise DataError(_DAMAGED)
        match kind:
            case 1 | 2:  # true and false, in the head of a field
                return None
            case 4 | 5 | 6:
                return self._integer()
            case 9:
                return self._list(depth + 1)
            case 12:
                return self.struct(depth + 1)
            case 3 | 7 | 8:  # one byte, eight bytes, or a length and its bytes
                size = {3: 1, 7: 8}.get(kind) or self._varint()
                # a seek could pass the end
                if size <= _MAX_FOOTER_BYTES and len(self._file.read(size)) == size:
                    return None
        raise DataError(_DAMAGED)

    def _list(self, depth: int) -> list[Any]:
        head = self._byte()
        kind = head & 15
        size = head >> 4
        if size == 15:
            size = self._varint()
        if kind in (1, 2):
            kind = 3  # in a list, true and false have a byte each
        return [self._value(kind, depth) for _ in range(size)]

    def _byte(self) -> int:
        byte = self._file.read(1)
        if not byte:
            raise DataError(_DAMAGED)
        return byte[0]

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 63, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if not byte & 128:
                return value
        return value | self._byte() << 63

    def _integer(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)


_KEY = b"aiorl"
_OBJECTS = "json"
_MAX_LIST = 64
"""Largest number of values in a fixed-size list; larger rows are stored as bytes."""
_GROUP_ROWS = 1 << 16
_GROUP_BYTES = 1 << 24
_UNKNOWN_BYTES = 8


class Parquet(Format):
    """Parquet files, through pyarrow."""

    name = "parquet"
    suffixes = (".parquet", ".pq")
    about = "Parquet, the fastest to read"

    def read(
        self,
        path: str,
        share: Share = WHOLE,
    ) -> Generator[Stored | DataError, None, None]:
        """See `Format.read`; a batch is a row group, unless it has no rows."""
        with needed_by("Parquet", "pyarrow", EXTRA, key="input"):
            import pyarrow as pa
            import pyarrow.parquet as pq
        faults = pa.ArrowException, ValueError, OSError
        with open_plain(path) as plain, readable(path):
            try:
                plainly = pq.ParquetFile(plain)
                _check_distinct(plainly.schema_arrow.names)
                columns = [_Column.of(field) for field in plainly.schema_arrow]
                leaves = [plainly.schema.column(at) for at in range(len(plainly.schema.names))]
                groups = read_row_groups(plain)
                texts = [column.name for column in columns if column.is_objects or column.is_text]
                # pyarrow's own schema and Parquet's can name different columns
                if not {leaf.path for leaf in leaves}.issuperset(texts):
                    raise DataError(_DAMAGED)
                file = plainly
                if texts:
                    file = pq.ParquetFile(
                        plain,
                        metadata=plainly.metadata,
                        read_dictionary=texts,
                    )
            except faults as error:
                kind = "" if isinstance(error, DataError) else "not a readable Parquet file: "
                raise DataError(kind + placed(error, path).reason, path=path) from error
            for number, (num_rows, chunks) in enumerate(groups):
                if num_rows and share.has(number):
                    place = f"row group {number + 1}"
                    try:
                        num_bytes = num_rows * sum(column.row_bytes for column in columns)
                        decoded = 0
                        for chunk, leaf in zip(chunks, leaves, strict=True):
                            decoded += decoded_bytes(plain, chunk, leaf)
                        if max(num_bytes, decoded) > MAX_BATCH_BYTES:
                            raise DataError(
                                f"{num_rows:,} rows take too much memory; write smaller row groups"
                            )
                        table = file.read_row_group(number, use_threads=False)
                        pairs = zip(columns, table.columns, strict=True)
                        stored = {column.name: (column, values) for column, values in pairs}
                        yield Stored(place, read_batch(stored, _read_column, Room()))
                    except faults as error:
                        yield placed(error, path, place)

    def create(self, path: str, options: WriteOptions) -> BatchFile:
        """See `Format.create`."""
        return _ParquetFile(path)


def _check_distinct(names: Sequence[str]) -> None:
    """Refuse names of columns that no batch can have, and a name of several columns.

    Raises:
        DataError: there is one.
    """
    check_names(names)
    for name, count in Counter(names).items():
        if count > 1:
            raise DataError(f"{count} columns are called {name!r}; give each its own name")


class _Column(NamedTuple):
    """Facts about a column, from its field.

    Attributes:
        name: name of the column.
        dtype: dtype of its numbers; None = that of the stored numbers, or objects.
        shape: shape of a row; None = the shape that all rows have.
        is_objects: True if it holds JSON text.
        is_text: True if it holds other text, the names of episodes.
    """

    name: str
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] | None = None
    is_objects: bool = False
    is_text: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, as far as known."""
        item_bytes = self.dtype.itemsize if self.dtype else _UNKNOWN_BYTES
        return item_bytes * math.prod(self.shape or ())

    @classmethod
    def of(cls, field: Any) -> _Column:
        """Return the facts in a field of a file's schema.

        Raises:
            DataError: its metadata are damaged, or it can't be a column of a batch.
        """
        import pyarrow as pa

        name = field.name
        note = (field.metadata or {}).get(_KEY)
        column = cls(name) if note is None else cls._of_note(name, note)
        kind = field.type
        if column.is_objects:
            fits = pa.types.is_string(kind)
        elif note is None and with_known_names({name: None}).keys() == {c.EPS_ID}:
            is_text = bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
            column = column._replace(is_text=is_text)
            fits = is_text or _is_numeric(kind)
        else:
            is_bytes = column.dtype is not None and pa.types.is_fixed_size_binary(kind)
            fits = is_bytes or _is_numeric(kind)
        if not fits:
            text = one_line(str(kind), 100)
            raise DataError(f"column {name!r} is of type {text}, which is not a column of numbers")
        return column

    @classmethod
    def _of_note(cls, name: str, note: bytes) -> _Column:
        """Return the facts that a file of aiorl notes about a column.

        Raises:
            DataError: they are damaged.
        """
        try:
            facts = json.loads(note)
            is_objects = facts["dtype"] == _OBJECTS
            dtype = None if is_objects else np.dtype(facts["dtype"])
            shape = tuple(facts.get("shape", []))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DataError(f"the metadata of column {name!r} are damaged") from error
        are_sizes = all(type(size) is int and 0 < size < 2**31 for size in shape)
        are_numbers = dtype is None or dtype.kind in NUMBER_KINDS
        if not are_sizes or not are_numbers or len(shape) >= MAX_DIMS:
            raise DataError(f"the metadata of column {name!r} do not describe a column of numbers")
        return cls(
            name=name,
            dtype=dtype,
            shape=shape,
            is_objects=is_objects,
        )


def _read_column(name: str, stored: tuple[_Column, Any], room: Room) -> Array:
    """Return a column of a table as an array.

    Raises:
        DataError: it doesn't match its field's metadata, or its objects take more memory than is
            left.
    """
    import pyarrow as pa

    (name, dtype, shape, is_objects, _), column = stored
    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    kind = array.type
    rows = len(array)
    if is_objects:
        if not pa.types.is_dictionary(kind) or array.null_count:
            raise DataError("no text, or rows without text")
        texts = array.dictionary.to_pylist()
        numbers = array.indices.to_numpy()
        text_bytes = np.asarray([parsed_bytes(text.encode()) for text in texts] or [0])
        room.take(int(text_bytes[numbers].sum()))
        try:
            return object_column([orjson.loads(texts[number]) for number in numbers])
        except orjson.JSONDecodeError as error:
            raise DataError("text that is not JSON") from error
    if pa.types.is_dictionary(kind):
        return _episode_numbers(array)
    is_known = shape is None and bool(KNOWN.intersection(with_known_names({name: None})))
    if is_known and array.null_count:
        return _with_missing(array)  # rows without a value are left out one by one
    flat = _flat(array, can_be_missing=is_known)
    if shape is None:
        if pa.types.is_nested(kind):
            return flat.reshape(rows, -1)
        return flat
    if dtype is not None and pa.types.is_fixed_size_binary(kind):
        flat = flat.view(dtype)
    elif dtype is not None:  # another program can have changed the numbers
        flat = in_dtype(flat, dtype)
    check_booleans(flat)
    if flat.size != rows * math.prod(shape):
        raise DataError(f"{flat.size:,} numbers, not {rows:,} rows of {shape}")
    return flat.reshape(rows, *shape)


def _episode_numbers(array: Any) -> Array:
    """Return a number for each text of a dictionary-encoded Arrow array; NaN where there is none."""
    numbers = np.append(
        episode_numbers(array.dictionary.to_pylist()).astype(np.float64),
        np.nan,
    )
    places = array.indices.fill_null(len(numbers) - 1).to_numpy(zero_copy_only=False)
    return np.asarray(numbers[places])


def _with_missing(array: Any) -> Array:
    """Return an array of numbers, or of lists of them, as floats [rows, ...] with NaN in each row
    without a value.
    """
    import pyarrow as pa

    is_present = array.is_valid().to_numpy(zero_copy_only=False)
    if not is_present.any():
        raise DataError("no row with a value")
    present = _flat(array.drop_null(), can_be_missing=True)
    present = present.reshape(int(is_present.sum()), -1)
    column = np.full(
        (len(array), present.shape[1]),
        np.nan,
        np.result_type(present.dtype, np.float32),
    )
    column[is_present] = present
    return column if pa.types.is_nested(array.type) else column[:, 0]


def _flat(array: Any, *, can_be_missing: bool) -> Array:
    """Return all numbers of an Arrow array in one dimension; whole numbers as floats with NaN if
    some are missing.
    """
    import pyarrow as pa

    while True:
        kind = array.type
        is_float = pa.types.is_floating(kind)
        if array.null_count and not (is_float or (can_be_missing and pa.types.is_integer(kind))):
            raise DataError(f"{array.null_count:,} rows or numbers without a value")
        if pa.types.is_fixed_size_binary(kind):
            width = kind.byte_width
            return np.frombuffer(
                array.buffers()[1],
                np.uint8,
                len(array) * width,
                array.offset * width,
            )
        if not pa.types.is_nested(kind):
            numbers: Array = array.to_numpy(zero_copy_only=False)
            return numbers
        if not pa.types.is_fixed_size_list(kind):
            lengths = np.diff(array.offsets.to_numpy())
            if len(lengths) and (lengths != lengths[0]).any():
                raise DataError(
                    f"rows of {lengths.min()} to {lengths.max()} numbers, not all of the same"
                    " length"
                )
        array = array.flatten()


def _is_numeric(kind: Any) -> bool:
    """Return whether a type is a number, or a list of numbers."""
    import pyarrow as pa

    for _ in range(MAX_DIMS):
        is_variable = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        if is_variable or pa.types.is_fixed_size_list(kind):
            kind = kind.value_type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return bool(is_number or pa.types.is_boolean(kind))


class _ParquetFile(BatchFile):
    """Parquet file; rows are collected until they make a row group."""

    def __init__(self, path: str) -> None:
        """Create the file."""
        with needed_by("Parquet", "pyarrow", EXTRA, key="input"):
            import pyarrow.parquet  # noqa: F401
        self._path = self._written = path
        if not is_uri(path):
            if os.path.exists(path):
                raise FileExistsError(f"{path} exists already")
            folder, name = os.path.split(path)
            self._written = os.path.join(folder, f".{name}.part")
        self._sink: Any = None
        self._writer: Any = None
        self._form: Form = {}
        self._waiting: list[SampleBatch] = []
        self._num_rows = self._num_bytes = 0

    def write(self, batch: Batch) -> int:
        """See `BatchFile.write`."""
        if not isinstance(batch, SampleBatch):
            raise DataError(
                "a Parquet file holds the rows of one policy, but this is a batch of several; write"
                " JSON lines",
                path=self._path,
            )
        form = form_of(batch)
        check_names(form, path=self._path)
        self._form = self._form or form
        names = sorted(form.keys() | self._form.keys())
        differing = [name for name in names if form.get(name) != self._form.get(name)]
        if differing:
            raise DataError(
                "the batches of a file must have the same columns, shapes and dtypes;"
                f" {differing[0]!r}"
                " differs",
                path=self._path,
            )
        self._wait(batch)
        if self._num_rows >= _GROUP_ROWS or self._num_bytes >= _GROUP_BYTES:
            rows = SampleBatch.concat(self._waiting)
            end = _last_start(rows)  # the last episode may continue
            self._write_group(rows.slice(0, end))
            self._waiting = []
            self._num_rows = 0
            self._num_bytes = 0
            if end < rows.count:
                self._wait(rows.slice(end, rows.count))
        return batch.nbytes

    def _wait(self, rows: SampleBatch) -> None:
        self._waiting.append(rows)
        self._num_rows += rows.count
        self._num_bytes += rows.nbytes

    def close(self) -> None:
        """See `BatchFile.close`."""
        if self._waiting:
            self._write_group(SampleBatch.concat(self._waiting))
        self._waiting = []
        if self._writer is not None:
            self._writer.close()
            self._sink.close()
            self._writer = None
            if self._written != self._path:
                os.replace(self._written, self._path)

    def abandon(self) -> None:
        """See `BatchFile.abandon`."""
        self._waiting = []
        if self._writer is not None:
            with contextlib.suppress(OSError, ValueError):
                self._writer.close()
                self._sink.close()
            self._writer = None
            if self._written != self._path:
                os.unlink(self._written)

    def _write_group(self, rows: SampleBatch) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pairs = [_to_arrow(name, column) for name, column in jsonable(rows).items()]
        fields, arrays = zip(*pairs, strict=True)
        schema = pa.schema(fields)
        if self._writer is None:
            if self._written != self._path:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._written)
            self._sink = create(self._written)
            self._writer = pq.ParquetWriter(
                self._sink,
                schema,
                compression="lz4",
                use_dictionary=False,
                write_statistics=[
                    field.name for field in fields if pa.types.is_primitive(field.type)
                ],
            )
        self._writer.write_table(
            pa.table(list(arrays), schema=schema),
            row_group_size=rows.count,
        )


def _last_start(rows: SampleBatch) -> int:
    """Return the first row of the last episode, or the number of all rows if there are not several
    episodes.
    """
    episodes = rows.get(c.EPS_ID, np.zeros(0))
    starts = np.flatnonzero(episodes[1:] != episodes[:-1])
    return int(starts[-1]) + 1 if len(starts) else rows.count


def _to_arrow(name: str, column: Any) -> tuple[Any, Any]:
    """Return a field and its values."""
    import pyarrow as pa

    if not isinstance(column, np.ndarray):
        values = [encoded(value).decode() for value in column]
        return _field(name, pa.string(), {"dtype": _OBJECTS}), pa.array(values, pa.string())
    note = {"dtype": column.dtype.name, "shape": list(column.shape[1:])}
    size = math.prod(column.shape[1:])
    if not size:
        raise DataError(f"column {name!r} has rows without numbers, which Parquet can't hold")
    if column.dtype == np.float16 or size > _MAX_LIST:
        width = size * column.dtype.itemsize
        values = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(width),
            len(column),
            [None, pa.py_buffer(column)],
        )
        return _field(name, values.type, note), values
    values = pa.array(column.reshape(-1))
    if column.ndim > 1:
        values = pa.FixedSizeListArray.from_arrays(values, size)
    return _field(name, values.type, note), values


def _field(
    name: str,
    kind: Any,
    note: dict[str, Sequence[int] | str],
) -> Any:
    import pyarrow as pa

    return pa.field(
        name,
        kind,
        nullable=False,
        metadata={_KEY: json.dumps(note)},
    )
