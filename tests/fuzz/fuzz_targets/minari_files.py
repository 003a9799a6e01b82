"""Minari datasets, metadata and HDF5: episodes of bounded size from this file alone, or reported
faults.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from typing import Any

import h5py
import numpy as np

from aiorl.offline.minari_data import MinariDataset
from fuzz_targets.folder import Rewritten, check_reading, make_folder
from fuzz_targets.source import Source

FOLDER = make_folder()
DATA = FOLDER / "a-v0" / "data"
DATA.mkdir(parents=True)
METADATA_FILE = Rewritten(DATA / "metadata.json")
OTHER = FOLDER / "other.hdf5"
with h5py.File(OTHER, "w") as _file:
    _file["x"] = np.full(4, 77.0)
BOX = {
    "type": "Box",
    "shape": [2],
    "dtype": "float32",
    "low": [-1.0, float("-inf")],
    "high": [1.0, 2.0],
}
SPACES: list[Any] = [
    BOX,
    {"type": "Discrete", "dtype": "int64", "start": 0, "n": 3},
    {"type": "Dict", "subspaces": {"a": BOX, "b": {"type": "Discrete", "start": 0, "n": 3}}},
    {"type": "Tuple", "subspaces": [BOX, BOX]},
    {"type": "Box", "shape": [40, 40], "dtype": "uint8", "low": 0, "high": 255},
]
NAMES = ["observations", "actions", "rewards", "terminations", "truncations"]
DTYPES = ["f4", "f8", "i8", "u1", "?", "S4", "c8"]


def seeds() -> Iterable[bytes]:
    for number in range(len(SPACES)):
        yield bytes([number, 1, 0, 0])
        yield bytes([number, number, 1, number, 3, 1, 1, 0, 0, 0, 1, 1, 1, 1])
    for kind in range(8):
        yield bytes([0, 0, 0, 1, 2, kind, 0, 3, 1, 1])


def run(data: bytes) -> None:
    source = Source(data)
    spaces: list[Any] = [json.loads(json.dumps(source.choice(SPACES))) for _ in range(2)]
    if source.below(2):
        key = source.choice(["type", "shape", "n", "low", "subspaces", "dtype"])
        source.choice(spaces)[key] = source.plain()
    try:
        texts = [json.dumps(space, default=bytes.hex) for space in spaces]
        metadata = {"observation_space": texts[0], "action_space": texts[1], "data_format": "hdf5"}
        if source.below(8) == 7:
            metadata[source.choice(list(metadata))] = source.plain()
        METADATA_FILE.write(json.dumps(metadata, default=bytes.hex).encode())
    except RecursionError:
        return
    with (
        h5py.File(DATA / "main_data.hdf5", "w") as file,
        contextlib.suppress(ValueError, TypeError, OSError),
    ):
        episode = file.create_group("episode_0")  # as far as h5py accepts it
        for name, space, rows in zip(
            NAMES, (*spaces, None, None, None), (4, 3, 3, 3, 3), strict=True
        ):
            _fill(episode, name, space, rows)
        while not source.is_empty:
            with contextlib.suppress(ValueError, TypeError, OSError):
                _edit(episode, source)
    os.environ["MINARI_DATASETS_PATH"] = str(FOLDER)
    for batch in check_reading(MinariDataset(), "minari:a-v0"):
        for name, column in batch.items():
            assert column.dtype != object
            assert not (column == 77.0).any(), f"{name} is of another file"


def _fill(group: h5py.Group, name: str, space: Any, rows: int) -> None:
    """Write data that fits a space, if it is one."""
    parts = space.get("subspaces") if isinstance(space, dict) else None
    if isinstance(parts, dict | list):
        inner = group.create_group(name)
        for number, part in parts.items() if isinstance(parts, dict) else enumerate(parts):
            _fill(inner, number if isinstance(parts, dict) else f"_index_{number}", part, rows)
        return
    shape = space.get("shape") if isinstance(space, dict) else None
    small = shape if isinstance(shape, list) and all(size in range(50) for size in shape) else []
    group.create_dataset(name, data=np.zeros((rows, *small), "f4" if small else "i8"))


def _edit(group: h5py.Group, source: Source) -> None:
    """Replace one of the arrays by something else."""
    name = source.choice(NAMES)
    if name in group:
        del group[name]
    shape = tuple(
        source.choice([0, 1, 2, 3, 4, 40, 10**6, 10**10]) for _ in range(1 + source.below(3))
    )
    dtype, count = source.choice(DTYPES), source.below(5)
    match source.below(8):
        case 0:
            group.create_dataset(name, data=np.zeros(count, dtype))
        case 1:
            group.create_dataset(
                name, shape, dtype, chunks=tuple(min(max(size, 1), 1000) for size in shape)
            )
        case 2:
            group.create_dataset(name, (4,), "f8", external=[(str(OTHER), 0, 32)])
        case 3:
            group[name] = h5py.ExternalLink(str(OTHER), "x")
        case 4:
            group[name] = h5py.SoftLink(
                source.choice(["/episode_0", "/episode_0/rewards", "nowhere"])
            )
        case 5:
            layout = h5py.VirtualLayout((4,), "f8")
            layout[:] = h5py.VirtualSource(str(OTHER), "x", (4,))
            group.create_virtual_dataset(name, layout)
        case 6:
            group.create_group(name)
        case _:
            rows = [np.frombuffer(source.take(source.below(20)), np.uint8) for _ in range(count)]
            made = group.create_dataset(name, (count,), h5py.vlen_dtype(np.uint8))
            for number, row in enumerate(rows):
                made[number] = row
