"""Workers that read stored experience, without TensorFlow: every row comes once per pass until the
data ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from in_process import FakeAlgorithm, InProcess
from stored_rows import cartpole_rows

from aiorl.data import columns as c
from aiorl.data.fragment import SamplePlan
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import WorkerError
from aiorl.net.wire.messages import OUT_OF_DATA
from aiorl.offline.writers import FileWriter

EPISODES, STEPS = 5, 4


class Reads(FakeAlgorithm):
    """Algorithm with streaming leases and batches of one fragment."""

    fragments_per_batch = 1
    mode: Literal["on_policy", "streaming"] = "streaming"

    @classmethod
    def sample_plan(cls, config: Any) -> SamplePlan:
        return SamplePlan("none", {}, (c.OBS, c.ACTIONS))

    def check_fragment(self, fragment: Any) -> None:
        pass


class ReadsInTurn(Reads):
    """The same algorithm with on-policy leases, under which a worker without data sends nothing."""

    mode: Literal["on_policy", "streaming"] = "on_policy"


def stored(directory: Path, num_files: int) -> list[float]:
    """Store rows with distinct numbers as observations, and return these numbers."""
    for number in range(num_files):
        rows = cartpole_rows(EPISODES, STEPS, first=number * EPISODES)
        rows["obs"] = (
            np.arange(rows.count * 4, dtype=np.float32).reshape(-1, 4) + 4 * rows.count * number
        )
        writer = FileWriter(str(directory), worker_index=number)
        for part in rows.split_by_episode():
            writer.write(SampleBatch(part))
        writer.close()
    return [4.0 * row for row in range(num_files * EPISODES * STEPS)]


def read_all(
    num_workers: int, algorithm: type[FakeAlgorithm] = Reads, **settings: Any
) -> InProcess:
    """Run workers until they are out of data or one has failed."""

    async def main() -> InProcess:
        both = InProcess(algorithm, num_workers=num_workers, input_evaluation=[], **settings)
        both.start(num_workers)
        await both.source.wait_for_workers(num_workers, 10)
        both.go_on()
        async with asyncio.timeout(20):
            while not (both.out_of_data.is_set() or both.failure):
                await asyncio.sleep(0.01)
        await both.close()
        return both

    return asyncio.run(main())


def rows_trained(both: InProcess) -> Counter[float]:
    """Return how often each row was trained on."""
    assert both.failure is None, both.events
    observations = [
        fragment[c.OBS].reshape(-1, 4) for batch in both.algorithm.batches for fragment in batch
    ]
    return Counter(np.concatenate(observations)[:, 0].tolist())


@pytest.mark.parametrize("algorithm", [Reads, ReadsInTurn])
@pytest.mark.parametrize(("num_workers", "num_files"), [(1, 2), (2, 3), (3, 1)])
def test_every_row_is_trained_on_once_per_pass(
    tmp_path: Path, num_workers: int, num_files: int, algorithm: type[FakeAlgorithm]
) -> None:
    rows = stored(tmp_path, num_files)
    both = read_all(num_workers, algorithm, input=str(tmp_path), input_epochs=2)
    assert rows_trained(both) == dict.fromkeys(rows, 2)
    ledger = both.ledger.as_dict()
    assert ledger["trained"] == ledger["sampled"] == 2 * len(rows)
    assert {worker.state for worker in both.source.session.workers} <= {OUT_OF_DATA}
    assert both.worst_level < logging.WARNING, "no one waits for a worker out of data"


@pytest.mark.parametrize("num_files", [1, 8])
def test_several_samplers_of_a_worker_share_the_files_with_all_others(
    tmp_path: Path, num_files: int
) -> None:
    rows = stored(tmp_path, num_files)
    both = read_all(2, input=str(tmp_path), input_epochs=1, samplers_per_worker=2)
    assert rows_trained(both) == dict.fromkeys(rows, 1)


def test_held_out_episodes_are_never_trained_on(tmp_path: Path) -> None:
    rows = stored(tmp_path, 8)
    seen = [
        rows_trained(read_all(n, input=str(tmp_path), input_epochs=1, input_hold_out=0.3))
        for n in (1, 2)
    ]
    assert seen[0] == seen[1], "the same episodes, whichever worker reads them"
    assert 0.4 < len(seen[0]) / len(rows) < 0.95
    assert set(seen[0].values()) == {1}


@pytest.mark.parametrize(("limit", "fails"), [(2, True), (3, False)])
def test_too_many_unreadable_lines_end_the_run_and_the_first_is_named(
    tmp_path: Path, limit: int, fails: bool
) -> None:
    rows = stored(tmp_path, 1)
    (path,) = tmp_path.iterdir()
    with path.open("a") as file:
        file.write("{nothing\n" * 3)
    both = read_all(1, input=str(tmp_path), input_epochs=1, input_max_corrupt=limit)
    if fails:
        assert isinstance(both.failure, WorkerError), "another worker would fail the same way"
        assert path.name in str(both.failure)
    else:
        assert rows_trained(both) == dict.fromkeys(rows, 1)
