"""Parquet files and the headers of their pages: batches of bounded size, or reported faults."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from aiorl.errors import DataError
from aiorl.offline.parquet import Parquet, decoded_bytes
from fuzz_targets.folder import Rewritten, check_reading, make_folder
from fuzz_targets.source import Source

PATH = make_folder() / "a.parquet"
FILE = Rewritten(PATH)
INT64 = SimpleNamespace(physical_type="INT64", max_repetition_level=1, length=0)
COLUMNS: list[Any] = [
    pa.array([1.5, 2.5]),
    pa.array([[1, 2], [3, 4]]),
    pa.array([[1, 2], [3, 4]], pa.list_(pa.int16(), 2)),
    pa.array([[[1], [2]], [[3], [4]]]),
    pa.array([True, False]),
    pa.array([b"abcd", b"efgh"], pa.binary(4)),
    pa.array(['{"a": 1}', "[2]"]),
    pa.array([1, None]),
]
NOTES: list[Any] = [
    None,
    {"dtype": "float32", "shape": []},
    {"dtype": "uint8", "shape": [2, 2]},
    {"dtype": "json"},
    {"dtype": "int64"},
    {"dtype": "float16", "shape": [2]},
    [],
    {"dtype": "O", "shape": [-1]},
]


def _file(columns: Iterable[tuple[Any, Any]], **options: Any) -> bytes:
    fields, arrays = [], []
    for number, (array, note) in enumerate(columns):
        metadata = None if note is None else {b"aiorl": json.dumps(note).encode()}
        fields.append(pa.field(f"x{number}", array.type, metadata=metadata))
        arrays.append(array)
    sink = io.BytesIO()
    pq.write_table(pa.table(arrays, schema=pa.schema(fields)), sink, **options)
    return sink.getvalue()


def seeds() -> Iterable[bytes]:
    for number in range(len(COLUMNS)):
        yield bytes([1, 1, number, number, 0, 0, 0, 0])
        yield bytes([1, 2, number, 0, 0, 1, 1, 1, number, 200, 1])
    content = _file([(COLUMNS[1], None)], compression="none")
    yield b"\0" + content[4:200]
    yield b"\0" + _file([(COLUMNS[6], None)])[4:200]


def run(data: bytes) -> None:
    source = Source(data)
    if source.below(2) == 0:
        _check_pages(source.rest())
        return
    columns = [(source.choice(COLUMNS), source.choice(NOTES)) for _ in range(source.below(4))]
    compression = source.choice(["none", "lz4", "zstd"])
    content = bytearray(
        _file(columns, compression=compression, use_dictionary=bool(source.below(2)))
    )
    while not source.is_empty:  # the footer more often than the pages
        at = int.from_bytes(source.take(2), "little") % len(content)
        content[at] = source.byte()
    FILE.write(bytes(content))
    check_reading(Parquet(), str(PATH))


def _check_pages(content: bytes) -> None:
    with contextlib.suppress(DataError):
        assert (
            decoded_bytes(io.BytesIO(content), {(5, 6): 0, (7, 6): len(content), (9, 6): 0}, INT64)
            >= 0
        )
