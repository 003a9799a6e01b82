"""Size of a replay: known beforehand, refused if there is no room, and spilled to files on
request.
"""

from __future__ import annotations

import errno
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_worlds import insert

from aiorl.data import columns as c
from aiorl.data.columns import ColumnSpec
from aiorl.errors import ConfigError
from aiorl.learning.replay import spec as memory
from aiorl.learning.replay.priorities import Prioritised
from aiorl.learning.replay.replay import Replay
from aiorl.learning.replay.spec import ReplaySpec, check_fits

COLUMNS = (
    ColumnSpec(c.OBS, (64,)),
    ColumnSpec(c.NEW_OBS, (64,)),
    ColumnSpec(c.ACTIONS, (), "int32"),
)


def spec(capacity: int, *, stack: int = 0, spill_dir: Path | None = None) -> ReplaySpec:
    return ReplaySpec(
        COLUMNS, capacity, Prioritised(), stack, None if spill_dir is None else str(spill_dir)
    )


@pytest.mark.parametrize("stack", [0, 1])
def test_a_replay_takes_the_size_that_was_computed_before(stack: int) -> None:
    wanted = spec(20_000, stack=stack)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        replay = Replay(wanted, seed=0)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(replay) == 0
    assert wanted.bytes_needed <= taken < wanted.bytes_needed + 100_000


def test_a_replay_too_large_for_memory_is_refused_with_figures_and_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 5 * 10**9)
    check_fits([spec(1_000_000), spec(5_000_000)])
    with pytest.raises(ConfigError) as refused:
        check_fits([spec(1_000_000), spec(10_000_000)])
    for figure in ("1,000,000", "10,000,000", "516", "5.96 GB", "5.00 GB"):
        assert f"{figure} " in str(refused.value)
    assert refused.value.key == "replay_capacity"


def test_a_replay_too_large_for_the_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 10**9)
    check_fits([spec(10_000, spill_dir=tmp_path)])
    with pytest.raises(ConfigError, match=str(tmp_path)) as refused:
        check_fits([ReplaySpec(COLUMNS, 10**14, None, 0, str(tmp_path))])
    assert refused.value.key == "replay_spill_dir"


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    missing = spec(100, spill_dir=tmp_path / "missing")
    with pytest.raises(ConfigError, match=os.strerror(errno.ENOENT)):
        check_fits([missing])
    with pytest.raises(ConfigError, match=os.strerror(errno.ENOENT)):
        Replay(missing, seed=0)


@pytest.mark.parametrize("stack", [0, 1])
def test_rows_in_files_are_drawn_like_rows_in_memory_and_no_file_is_left_behind(
    tmp_path: Path, stack: int
) -> None:
    spilled = spec(200, stack=stack, spill_dir=tmp_path)
    assert spilled.bytes_needed - spilled.bytes_of_rows == 8 * 512
    replays = [Replay(spec(200, stack=stack), seed=3), Replay(spilled, seed=3)]
    # the files are unnamed: a killed process leaves none behind
    assert list(tmp_path.iterdir()) == []
    rng = np.random.default_rng(0)
    for _ in range(5):
        rows: dict[str, Any] = {
            c.OBS: rng.normal(size=(70, 64)).astype(np.float32),
            c.NEW_OBS: rng.normal(size=(70, 64)).astype(np.float32),
            c.ACTIONS: rng.integers(0, 9, 70),
        }
        samples = []
        for replay in replays:
            insert(replay, rows)
            samples.append(replay.sample(30, beta=0.5))
        assert all(
            (samples[0].columns[name] == samples[1].columns[name]).all()
            for name in samples[0].columns
        )


def test_a_full_disk_is_an_error_before_the_run_and_not_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(memory.os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=os.strerror(errno.ENOSPC)):
        Replay(spec(100, spill_dir=tmp_path), seed=0)


def test_a_failed_allocation_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(ConfigError) as refused:
        memory.allocate(2**40, np.dtype([("x", np.float64, (2**18,))]), None)
    assert refused.value.key == "replay_capacity"
