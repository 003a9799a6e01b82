"""Files of stored experience: each line is read as a batch of numbers or refused, and no pickle in
it is loaded.
"""

from __future__ import annotations

import binascii
import contextlib
import json
import pickle
from collections.abc import Iterable
from typing import Any

import lz4.frame
import numpy as np

from aiorl.data.sample_batch import SampleBatch, rows_by_policy
from aiorl.errors import DataError
from aiorl.offline.formats import Stored
from aiorl.offline.inspection import inspect_file, validate_file
from aiorl.offline.json_lines import JsonLines
from aiorl.offline.pickled_array import read_pickled_array
from fuzz_targets.folder import Rewritten, make_folder
from fuzz_targets.source import Source, as_json

PATH = make_folder() / "a.json"
FILE = Rewritten(PATH)
ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)
NAMES = [
    "obs",
    "actions",
    "rewards",
    "dones",
    "terminateds",
    "truncateds",
    "eps_id",
    "t",
    "infos",
    "count",
    "x",
]
WORDS = [
    b"cnumpy.core.multiarray\n_reconstruct\n",
    b"cposix\nsystem\n",
    b"numpy._core.numeric",
    b"_frombuffer",
    b"latin1",
]


def _pickles() -> list[bytes]:
    views = (
        ARRAY,
        np.asfortranarray(ARRAY),
        ARRAY[:, ::2],
        ARRAY > 2,
        np.zeros((0, 2)),
        np.float32(1),
    )
    return [pickle.dumps(array, protocol) for array in views for protocol in (2, 4, 5)]


def seeds() -> Iterable[bytes]:
    for data in _pickles():
        yield b"\0" + data
        yield b"\2" + data
        yield b"\0" + data.replace(b"numpy._core.", b"numpy.core.")
    rows = {"dtype": "float32", "rows": [[1.0, 2.0]]}
    packed = {"dtype": "uint8", "shape": [2, 2], "base64": "AAECAw=="}
    for line in (
        {"aiorl": 1, "env_steps": 1, "columns": {"obs": rows}},
        {
            "aiorl": 1,
            "env_steps": 2,
            "policies": {"a": {"obs": packed}, "b": {"infos": {"dtype": "json", "rows": [{}]}}},
        },
        {
            "type": "SampleBatch",
            "obs": [[1, 2]],
            "dones": [True],
            "eps_id": [3],
            "t": [0],
            "infos": [{}],
        },
        {"type": "MultiAgentBatch", "count": 1, "policy_batches": {"a": {"obs": [1.5]}}},
        {"value": {"type": "SampleBatch", "rewards": [None, 1.0]}},
    ):
        yield b"\1" + json.dumps(line).encode()
    for number in range(len(NAMES)):
        yield bytes([3, number, 3, 1, number, 2, 0, 7, 5, 4, number + 1, 9, 9])


def run(data: bytes) -> None:
    source = Source(data)
    match source.below(4):
        case 0:
            _read_pickle(source.rest())
        case 1:
            _read_line(source.rest())
        case 2:
            text = binascii.b2a_base64(lz4.frame.compress(source.rest()), newline=False).decode()
            _read_line(json.dumps({"type": "SampleBatch", "obs": text, "t": [0, 1]}).encode())
        case _:
            try:
                columns = {
                    source.choice(NAMES): _values(source) for _ in range(1 + source.below(4))
                }
                line = json.dumps({"type": "SampleBatch", **columns}).encode()
            except RecursionError:
                return
            _read_line(line)


def _values(source: Source) -> Any:
    return [as_json(source.plain()) for _ in range(source.below(4))]


def _read_pickle(data: bytes) -> None:
    with contextlib.suppress(DataError):
        found = read_pickled_array(data)
        assert found.dtype.kind in "biuf"
        assert found.nbytes <= len(data)


def _read_line(line: bytes) -> None:
    FILE.write(line.replace(b"\n", b" "))
    for stored in JsonLines().read(str(PATH)):
        if isinstance(stored, Stored):
            title = inspect_file(str(PATH))[0][0]
            assert ", 1 " in title or ", 0 " in title, title  # rows without numbers are left out
            assert all(fault.isprintable() for fault in validate_file(str(PATH)))
            for rows in rows_by_policy(stored.batch).values():
                _check(rows)
        else:
            assert str(stored).isprintable()


def _check(rows: SampleBatch) -> None:
    assert rows.count > 0
    for name, column in rows.items():
        assert len(column) == rows.count
        assert name.isprintable()
        assert column.dtype.kind in "biuf" or column.dtype == object
