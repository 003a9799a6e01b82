"""Exit statuses that engines act on, and workers that follow a learner to another address."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Processes, free_address

from aiorl.acting.checkpoint import find_checkpoint


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.end()


def test_after_sigterm_workers_elsewhere_wait_for_the_resumed_learner_and_end_with_its_goodbye(
    processes: Processes,
) -> None:
    learner = processes.learner("--num-workers=1", f"--bind={free_address()}", "--min-iter-time-s=0.2")
    worker = processes.worker(learner.address, "--num-workers=2")
    learner.wait_for_result(lambda result: result["num_healthy_workers"] == 3)
    learner.send(signal.SIGTERM)
    assert learner.wait(15) == 143, learner.text
    saved = find_checkpoint(learner.run_dir).meta["counters"]["updates"]
    assert saved == learner.results()[-1]["updates_total"]
    worker.wait_for("said goodbye")
    resumed = processes.learner(resume=True)
    resumed.wait_for_result(lambda result: result["updates_total"] > saved and result["num_healthy_workers"] == 3)
    assert worker.process.poll() is None, worker.text
    resumed.send(signal.SIGINT)
    assert resumed.wait(15) == 0, resumed.text
    assert worker.wait(15) == 0, worker.text
