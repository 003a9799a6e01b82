"""Runs with workers that read stored experience: the end of the data, and killed readers."""

from __future__ import annotations

import os
import re
import signal

import pytest
from recorded import record

READS = (
    "--algo=bc",
    "--rollout-fragment-length=64",
    "--num-envs-per-worker=1",
    "--train-batch-size=256",
    "--min-iter-time-s=0.1",
)


@pytest.mark.slow
def test_a_run_ends_when_its_workers_have_read_all_passes(
    processes, ledger_balances, tmp_path
) -> None:
    rows = record(tmp_path / "data", 4) + record(tmp_path / "data", 4)
    learner = processes.learner(*READS, f"--input={tmp_path / 'data'}", "--input-epochs=2")
    assert learner.wait(60) == 0, learner.text
    last = learner.results()[-1]
    ledger_balances(last)
    assert last["ledger"]["sampled"] == 2 * rows
    assert 2 * rows - 256 <= last["env_steps_trained_total"] <= 2 * rows
    assert "ERROR" not in learner.log


@pytest.mark.slow
def test_a_killed_reader_costs_only_its_own_rows_and_training_continues(
    processes, ledger_balances, tmp_path
) -> None:
    record(tmp_path / "data", 4)
    record(tmp_path / "data", 4)
    learner = processes.learner(*READS, f"--input={tmp_path / 'data'}", "--stop-time-s=90")
    learner.wait_for_result(
        lambda result: result["updates_total"] >= 5 and result["num_healthy_workers"] == 2
    )
    before, workers = learner.results()[-1], learner.worker_pids()
    os.kill(workers[0], signal.SIGKILL)
    lost_at = learner.results()[-1]["updates_total"]
    learner.wait_for_result(lambda result: result["updates_total"] > lost_at + 3)
    learner.wait_for_joined(*workers)
    joined_at = learner.results()[-1]["updates_total"]
    learner.wait_for_result(
        lambda result: (
            result["num_healthy_workers"] == 2 and result["updates_total"] > joined_at + 10
        )
    )
    learner.send(signal.SIGINT)
    assert learner.wait() == 0, learner.text
    for result in learner.results():
        ledger_balances(result)
    ledger = learner.results()[-1]["ledger"]
    assert not before["ledger"]["lost"]
    assert len(ledger["lost"]) <= 1, "what the killed worker had read and not sent"
    assert sum(ledger["lost"].values()) <= 8 * 2 * 64, (
        "no more than it owed, each at most two fragments long"
    )
    assert not ledger["discarded"]
    assert len(re.findall(rf"\b{workers[1]}\b", learner.text)) == 1, "it joined once"
