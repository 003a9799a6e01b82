"""Killed workers, killed learners, broken environments, hostile peers: training continues or ends
with a reason.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import time

import psutil
import pytest
from processes import free_address


def test_r8_a_killed_worker_is_back_within_5_s_and_training_never_stops(
    processes, ledger_balances
) -> None:
    learner = processes.learner("--seed=1", "--stop-time-s=90", "--min-iter-time-s=0.2")
    learner.wait_for_result(lambda result: result["updates_total"] >= 5)
    workers = learner.worker_pids()
    os.kill(workers[0], signal.SIGKILL)
    killed = time.monotonic()
    updates = learner.results()[-1]["updates_total"]
    learner.wait_for_joined(*workers, timeout_s=5.0)
    assert time.monotonic() - killed < 5
    learner.wait_for_result(lambda result: result["updates_total"] > updates + 5)
    learner.wait_for_result(
        lambda result: result["num_healthy_workers"] == 2 and result["updates_total"] > updates
    )
    learner.send(signal.SIGINT)
    assert learner.wait() == 0, learner.text
    for result in learner.results():
        ledger_balances(result)
    times = [result["time_total_s"] for result in learner.results()]
    assert max(later - earlier for earlier, later in itertools.pairwise(times[2:])) < 5


@pytest.mark.slow
@pytest.mark.parametrize("ignores", [False, True])
def test_r8_a_killed_worker_that_is_not_restarted_ends_the_run_unless_failures_are_ignored(
    processes, ledger_balances, ignores
) -> None:
    flags = ["--max-worker-restarts=0", "--stop-time-s=90", "--min-iter-time-s=0.2"]
    learner = processes.learner(
        "--seed=1", *flags, *(["--ignore-worker-failures"] if ignores else [])
    )
    learner.wait_for_result(
        lambda result: result["updates_total"] >= 3 and result["num_healthy_workers"] == 2
    )
    updates = learner.results()[-1]["updates_total"]
    os.kill(learner.worker_pids()[0], signal.SIGKILL)
    learner.wait_for("SIGKILL", 10.0)
    if ignores:
        learner.wait_for_result(
            lambda result: (
                result["num_healthy_workers"] == 1 and result["updates_total"] > updates + 3
            )
        )
        learner.send(signal.SIGINT)
        assert learner.wait() == 0, learner.text
        ledger_balances(learner.results()[-1])
    else:
        assert learner.wait(15) == 1, learner.text


@pytest.mark.slow
def test_workers_end_within_10_s_of_the_learners_sigkill(processes, until) -> None:
    learner = processes.learner("--seed=1")
    learner.wait_for_result(lambda result: result["updates_total"] >= 1)
    workers = [psutil.Process(pid) for pid in learner.worker_pids()]
    learner.send(signal.SIGKILL)
    until(
        lambda: not any(worker.is_running() for worker in workers), 10.0, "the end of the workers"
    )


@pytest.mark.slow
def test_external_workers_rejoin_a_resumed_learner_by_themselves(
    processes, ledger_balances
) -> None:
    options = (
        "--num-workers=0",
        f"--bind={free_address()}",
        "--min-iter-time-s=0.2",
        "--checkpoint-interval-s=1",
    )
    learner = processes.learner("--seed=1", *options)
    worker = processes.worker(learner.address)
    learner.wait_for_result(
        lambda result: result["time_this_iter_s"] > 0 and result["updates_total"] >= 20
    )
    checkpoint = re.compile(r"checkpoint-(\d+)")
    deadline = time.monotonic() + 20
    while not checkpoint.search(learner.log) and time.monotonic() < deadline:
        time.sleep(0.05)
    (child,) = psutil.Process(worker.pid).children()
    learner.send(signal.SIGKILL)
    learner.wait()
    saved = int(checkpoint.findall(learner.log)[-1])
    resumed = processes.learner(resume=True)
    resumed.wait_for(rf"\b{child.pid}\b", 40.0)
    resumed.wait_for_result(lambda result: result["updates_total"] > saved + 3)
    assert worker.process.poll() is None
    resumed.send(signal.SIGINT)
    assert resumed.wait() == 0, resumed.text
    for result in resumed.results():
        ledger_balances(result)
    assert worker.wait(15) == 0, worker.text  # they learn that the run is over


@pytest.mark.slow
def test_a_worker_waits_for_a_learner_and_says_so(processes) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    worker = processes.worker(f"tcp://127.0.0.1:{port}")
    names_learner = worker.wait_for(f":{port}")
    worker.wait_for(f":{port}|:{port + 1}", 20.0, after=names_learner)
    worker.send(signal.SIGTERM)
    assert worker.wait(5) == 143


@pytest.mark.parametrize(
    ("env_config", "restarts"),
    [
        pytest.param("{fault: step, at_step: 70}", True, marks=pytest.mark.slow),
        ("{fault: reset}", False),
    ],
)
def test_a_broken_environment_ends_the_run_after_restarts_only_if_it_had_sampled(
    processes, env_config, restarts
) -> None:
    env = "aiorl.testing.envs:FaultyEnv"
    learner = processes.learner(
        f"--env={env}",
        f"--env-config={env_config}",
        "--num-workers=1",
        "--max-worker-restarts=1",
        "--num-envs-per-worker=1",
        "--train-batch-size=64",
        "--rollout-fragment-length=64",
        "--stop-time-s=60",
    )
    assert learner.wait(90) == 1, learner.text
    # the end of a process can be seen before the failure that it sent is read, so that the end of
    # the run calls its restart off
    if restarts:
        assert re.search(r" 1 \w+ 1 \w+ 0\.2 s", learner.text), (
            "restart 1 of 1, and the wait before it"
        )
    assert len(re.findall(r"\bChildStarted\(slot=1\b", learner.log)) == 1 + restarts
    assert env in learner.text


@pytest.mark.slow
def test_garbage_on_both_ports_costs_the_run_nothing(processes, ledger_balances) -> None:
    learner = processes.learner(
        "--insecure", "--seed=1", "--min-iter-time-s=0.2", "--stop-time-s=60"
    )
    learner.wait_for_result(lambda result: result["updates_total"] >= 2)
    workers = learner.worker_pids()
    port = int(learner.address.rpartition(":")[2])
    for target in (port, port + 1):
        for junk in (
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            os.urandom(4096),
            b"\xff" + bytes(7) + b"\x01\x7f",
        ):
            with socket.create_connection(("127.0.0.1", target)) as connection:
                connection.sendall(junk)
    updates = learner.results()[-1]["updates_total"]
    learner.wait_for_result(lambda result: result["updates_total"] > updates + 5)
    learner.send(signal.SIGINT)
    assert learner.wait() == 0, learner.text
    assert learner.results()[-1]["num_healthy_workers"] == 2
    ledger_balances(learner.results()[-1])
    for pid in workers:
        assert len(re.findall(rf"\b{pid}\b", learner.text)) == 1, "it joined once"


def test_a_port_in_use_and_an_unusable_run_directory_end_in_one_sentence(
    processes, tmp_path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        learner = processes.learner(f"--bind=tcp://127.0.0.1:{port}")
        assert learner.wait(30) == 1
    assert str(port) in learner.text
    assert "Traceback" not in learner.text
    (tmp_path / "file").write_text("not a directory")
    learner = processes.learner(run="file")
    assert learner.wait(30) == 1
    assert str(tmp_path / "file") in learner.text
    assert "Traceback" not in learner.text
