"""Stored experience from files to train batches and from batches to files, against bare pyarrow and
orjson loops.

Each benchmark runs on one core in a separate process. Files are in memory (``/dev/shm`` if it
exists), because the disk is not the subject. A bare loop makes or takes the same arrays with the
library alone.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from aiorl.data.sample_batch import SampleBatch
from aiorl.offline.formats import WriteOptions
from aiorl.offline.readers import FileReader, ReaderOptions
from aiorl.offline.registry import format_named
from benchmarks.measure import alternate, pin_to_one_core, run_fresh
from benchmarks.result import Figure

__all__ = ["offline_frames", "offline_json", "offline_parquet"]

ROUNDS = 5
ROWS = 400_000
JSON_ROWS = 40_000
FRAMES = 4_000
FRAGMENT = 4_000
BATCH = 32_768
"""Rows of a train batch."""


def offline_parquet() -> list[Figure]:
    """Measure CartPole's rows in Parquet, read into train batches and written from fragments."""
    read, bare = _by_turns("read", "parquet")
    written, bare_written = _by_turns("write", "parquet")
    return [
        Figure("offline, Parquet to train batches", read, "rows/s", bare, target_ratio=0.6),
        Figure("offline, Parquet written", written, "rows/s", bare_written, target_ratio=0.6),
    ]


def offline_frames() -> list[Figure]:
    """Measure Atari frames in Parquet, 84x84x4 bytes."""
    read, bare = _by_turns("read", "frames")
    written, bare_written = _by_turns("write", "frames")
    return [
        Figure("offline, frames to train batches", read, "MB/s", bare, target_ratio=0.6),
        Figure("offline, frames written", written, "MB/s", bare_written, target_ratio=0.6),
    ]


def offline_json() -> list[Figure]:
    """Measure CartPole's rows as JSON lines without compression."""
    read, bare = _by_turns("read", "json")
    written, bare_written = _by_turns("write", "json")
    return [
        Figure("offline, JSON to train batches", read, "rows/s", bare, target_ratio=0.6),
        Figure("offline, JSON written", written, "rows/s", bare_written, target_ratio=0.6),
    ]


def _by_turns(way: str, kind: str) -> tuple[float, float]:
    return alternate(lambda: _rate(way, kind, "ours"), lambda: _rate(way, kind, "bare"), ROUNDS)


def _rate(way: str, kind: str, whose: str) -> float:
    return float(run_fresh("benchmarks.offline", way, kind, whose))


def _rows(count: int, seed: int = 0) -> SampleBatch:
    """Return rows of CartPole with the columns that PPO records, in episodes of 200."""
    rng = np.random.default_rng(seed)
    ends = np.arange(1, count + 1) % 200 == 0
    return SampleBatch(
        obs=rng.normal(size=(count, 4)).astype(np.float32),
        new_obs=rng.normal(size=(count, 4)).astype(np.float32),
        actions=rng.integers(0, 2, count),
        rewards=np.ones(count, np.float32),
        action_logp=rng.normal(size=count).astype(np.float32),
        terminateds=ends,
        truncateds=np.zeros(count, bool),
        dones=ends,
        eps_id=np.arange(count) // 200,
        t=(np.arange(count) % 200).astype(np.int32),
    )


def _frames(count: int, seed: int = 0) -> SampleBatch:
    """Return stacks of four frames that are mostly one colour, as in games."""
    rng = np.random.default_rng(seed)
    obs = np.full((count, 84, 84, 4), 87, np.uint8)
    obs[:, :20, :, :] = rng.integers(0, 4, (count, 20, 84, 1), np.uint8) * 60
    return SampleBatch(
        obs=obs,
        actions=rng.integers(0, 6, count),
        rewards=np.zeros(count, np.float32),
        dones=np.arange(1, count + 1) % 1000 == 0,
        eps_id=np.arange(count) // 1000,
    )


def _batches(kind: str) -> list[SampleBatch]:
    make, count, size = {
        "parquet": (_rows, ROWS, FRAGMENT),
        "json": (_rows, JSON_ROWS, FRAGMENT // 4),
        "frames": (_frames, FRAMES, 500),
    }[kind]
    whole = make(count)
    return [whole.slice(at, at + size).copy() for at in range(0, count, size)]


def _amount(kind: str, batches: list[SampleBatch]) -> float:
    """Return the number of rows, or megabytes of frames."""
    if kind == "frames":
        return sum(batch["obs"].nbytes for batch in batches) / 1e6
    return sum(batch.count for batch in batches)


def _read_ours(directory: Path, kind: str) -> int:
    reader = FileReader(str(directory), ReaderOptions(epochs=1))
    rows, batches = 0, []
    for batch in reader:
        assert isinstance(batch, SampleBatch)
        batches.append(batch)
        if sum(part.count for part in batches) >= (BATCH if kind != "frames" else 512):
            rows += SampleBatch.concat(batches).count
            batches = []
    return rows + sum(part.count for part in batches)


def _read_bare(directory: Path, kind: str) -> int:
    import orjson
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = 0
    waiting: list[dict[str, Any]] = []

    def take(columns: dict[str, Any]) -> None:
        nonlocal rows, waiting
        waiting.append(columns)
        if sum(len(part["eps_id"]) for part in waiting) >= (BATCH if kind != "frames" else 512):
            joined = {name: np.concatenate([part[name] for part in waiting]) for name in columns}
            rows += len(joined["eps_id"])
            waiting = []

    for path in sorted(directory.iterdir()):
        if path.suffix == ".json":
            with path.open("rb") as lines:
                for line in lines:
                    found = orjson.loads(line)["columns"]
                    take(
                        {
                            name: np.asarray(column["rows"], column["dtype"])
                            for name, column in found.items()
                        }
                    )
            continue
        with pq.ParquetFile(path) as file:
            for number in range(file.num_row_groups):
                table = file.read_row_group(number, use_threads=False)
                columns = {}
                for name in table.column_names:
                    array = table.column(name).combine_chunks()
                    if pa.types.is_fixed_size_list(array.type):
                        columns[name] = array.flatten().to_numpy().reshape(len(array), -1)
                    elif pa.types.is_fixed_size_binary(array.type):
                        columns[name] = np.frombuffer(array.buffers()[1], np.uint8).reshape(
                            len(array), -1
                        )
                    else:
                        columns[name] = array.to_numpy(zero_copy_only=False)
                take(columns)
    return rows + sum(len(part["eps_id"]) for part in waiting)


def _write_ours(directory: Path, kind: str, batches: list[SampleBatch]) -> None:
    name = "json" if kind == "json" else "parquet"
    with format_named(name).create(str(directory / f"ours.{name}"), WriteOptions()) as file:
        for batch in batches:
            file.write(batch)


def _write_bare(directory: Path, kind: str, batches: list[SampleBatch]) -> None:
    import orjson
    import pyarrow as pa
    import pyarrow.parquet as pq

    if kind == "json":
        with (directory / "bare.json").open("wb") as lines:
            for batch in batches:
                lines.write(
                    orjson.dumps(
                        dict(batch), option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
                    )
                )
        return
    writer = None
    group = 65_536 if kind == "parquet" else 500
    whole = {name: [batch[name] for batch in batches] for name in batches[0]}
    per_group = max(1, group // batches[0].count)
    for at in range(0, len(batches), per_group):
        arrays: dict[str, Any] = {}
        for name, parts in whole.items():
            column = np.concatenate(parts[at : at + per_group])
            if column.ndim == 1:
                arrays[name] = pa.array(column)
            elif kind == "frames":
                width = column[0].nbytes
                buffers = [None, pa.py_buffer(column)]
                arrays[name] = pa.FixedSizeBinaryArray.from_buffers(
                    pa.binary(width), len(column), buffers
                )
            else:
                arrays[name] = pa.FixedSizeListArray.from_arrays(
                    pa.array(column.reshape(-1)), column.shape[1]
                )
        table = pa.table(arrays)
        if writer is None:
            writer = pq.ParquetWriter(
                directory / "bare.parquet",
                table.schema,
                compression="lz4",
                use_dictionary=False,
                write_statistics=False,
            )
        writer.write_table(table)
    if writer is not None:
        writer.close()


def _measure(way: str, kind: str, whose: str) -> float:
    """Return rows or megabytes per second, the best of three passes."""
    batches = _batches(kind)
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        directory = Path(name) / "files"
        act: Callable[[], object]
        if way == "read":
            directory.mkdir()
            _write_ours(directory, kind, batches)
            read = _read_ours if whose == "ours" else _read_bare
            rows = sum(batch.count for batch in batches)
            assert read(directory, kind) == rows
            act = lambda: read(directory, kind)  # noqa: E731
        else:
            write = _write_ours if whose == "ours" else _write_bare
            act = lambda: write(directory, kind, batches)  # noqa: E731
        best = float("inf")
        for _ in range(3):
            if way == "write":
                shutil.rmtree(directory, ignore_errors=True)
                directory.mkdir()
            started = time.perf_counter()
            act()
            best = min(best, time.perf_counter() - started)
    return _amount(kind, batches) / best


if __name__ == "__main__":
    pin_to_one_core()
    sys.stdout.write(json.dumps(_measure(*sys.argv[1:])))
