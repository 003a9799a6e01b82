"""What parents and their worker processes agree on."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from aiorl.process.children import FAILED, HOPELESS, RUN_IS_OVER, STOPPED, WRONG_USAGE, Restarts, status_text


def test_failures_in_a_row_are_followed_by_growing_pauses_and_then_by_none() -> None:
    restarts = Restarts(8)
    pauses = [restarts.pause_after(FAILED, 1.0) for _ in range(9)]
    assert pauses == [0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 10.0, 10.0, None]


def test_a_minute_of_health_gives_the_allowance_back() -> None:
    restarts = Restarts(2)
    assert [restarts.pause_after(FAILED, 50.0) for _ in range(2)] == [0.2, 0.5]
    assert restarts.pause_after(FAILED, 61.0) == 0.2
    assert restarts.in_a_row == 1


@pytest.mark.parametrize("status", [-signal.SIGABRT, -signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGKILL, STOPPED])
def test_who_is_ended_by_a_signal_now_and_then_is_always_started_again(status: int) -> None:
    restarts = Restarts(3)
    assert [restarts.pause_after(status, 12.0) for _ in range(100)] == [0.2] * 100


def test_who_is_ended_by_a_signal_at_once_every_time_is_given_up() -> None:
    restarts = Restarts(3)
    assert [restarts.pause_after(-signal.SIGSEGV, 2.0) for _ in range(4)] == [0.2, 0.5, 1.0, None]


@pytest.mark.parametrize("status", [RUN_IS_OVER, HOPELESS, WRONG_USAGE])
def test_a_worker_that_says_so_is_not_started_again(status: int) -> None:
    assert Restarts(3).pause_after(status, 100.0) is None


def test_where_no_restart_is_allowed_there_is_none_whatever_ended_the_child() -> None:
    assert Restarts(0).pause_after(-signal.SIGKILL, 100.0) is None


def test_a_status_is_told_with_the_name_of_its_signal() -> None:
    assert [status_text(number) for number in (1, -9, -6)] == ["status 1", "status -9 (SIGKILL)", "status -6 (SIGABRT)"]


@pytest.mark.parametrize("status", [FAILED, -signal.SIGKILL])
def test_who_lives_long_but_does_no_work_is_given_up(status: int) -> None:
    restarts = Restarts(2)
    assert [restarts.pause_after(status, 500.0, has_worked=False) for _ in range(3)] == [0.2, 0.5, None]


CODE = """
import time
from aiorl.process.children import watch_parent
watch_parent(lambda: print("lost", flush=True), on_line=lambda line: print(line, end="", flush=True), grace_s=0.05)
print("ready", flush=True)
time.sleep(30)
"""
EVALUATES = """
import sys, time
from aiorl.run import evaluation

def evaluate(checkpoint):
    print("evaluating", file=sys.stderr, flush=True)
    time.sleep(60)

evaluation.evaluate = evaluate
sys.exit(evaluation.main())
"""


def test_the_end_of_standard_input_is_told_and_ends_the_process() -> None:
    process = subprocess.Popen([sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert process.poll() is None
    process.stdin.write("a request\n")
    process.stdin.flush()
    assert process.stdout.readline() == "a request\n"
    process.stdin.close()
    assert process.stdout.readline() == "lost\n"
    assert process.wait(10) == 3
    process.stdout.close()


def test_the_process_that_evaluates_ends_with_its_parent_also_during_an_evaluation() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", EVALUATES], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write('{"checkpoint": "here"}\n')
    process.stdin.flush()
    assert process.stderr.readline() == "evaluating\n"
    process.stdin.close()
    assert process.wait(20) == 3
    process.stderr.close()
