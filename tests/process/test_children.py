"""Exit statuses of worker processes, and restarts by their parents."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from aiorl.process import children
from aiorl.process.children import (
    FAILED,
    HOPELESS,
    RUN_IS_OVER,
    STOPPED,
    WRONG_USAGE,
    ChildEvent,
    ChildGaveUp,
    ChildKilled,
    Children,
    ChildRestarting,
    ChildStarted,
    Restarts,
    start_process,
    status_text,
)

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


def test_failures_in_a_row_are_followed_by_growing_pauses_and_then_by_none() -> None:
    restarts = Restarts(8)
    pauses = [restarts.pause_after(FAILED, 1.0) for _ in range(9)]
    assert pauses == [0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 10.0, 10.0, None]


def test_a_healthy_minute_restores_the_allowance() -> None:
    restarts = Restarts(2)
    assert [restarts.pause_after(FAILED, 50.0) for _ in range(2)] == [0.2, 0.5]
    assert restarts.pause_after(FAILED, 61.0) == 0.2
    assert restarts.in_a_row == 1


@pytest.mark.parametrize(
    "status", [-signal.SIGABRT, -signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGKILL, STOPPED]
)
def test_a_child_ended_by_occasional_signals_is_always_restarted(status: int) -> None:
    restarts = Restarts(3)
    assert [restarts.pause_after(status, 12.0) for _ in range(100)] == [0.2] * 100


@pytest.mark.parametrize("status", [RUN_IS_OVER, HOPELESS, WRONG_USAGE])
def test_a_worker_with_a_final_status_is_not_restarted(status: int) -> None:
    assert Restarts(3).pause_after(status, 100.0) is None


def test_a_status_text_names_the_signal() -> None:
    assert [status_text(number) for number in (1, -9, -6)] == [
        "status 1",
        "status -9 (SIGKILL)",
        "status -6 (SIGABRT)",
    ]


@pytest.mark.parametrize("status", [FAILED, -signal.SIGKILL])
def test_a_child_that_lives_long_without_working_is_given_up(status: int) -> None:
    restarts = Restarts(2)
    assert [restarts.pause_after(status, 500.0, has_worked=False) for _ in range(3)] == [
        0.2,
        0.5,
        None,
    ]


# Restarts of children
# --------------------------------------------------------------------------------------------------


def exits_with(status: int) -> list[str]:
    return [sys.executable, "-S", "-c", f"import sys; sys.exit({status})"]


class Watched:
    """Children, their events, and a loop that looks after them."""

    def __init__(
        self, command: list[str] | Callable[[int], list[str]], slots: list[int], **options: Any
    ) -> None:
        self.events: list[ChildEvent] = []
        options = {"max_restarts": 2, **options}
        commands = command if callable(command) else lambda slot: command
        self.children = Children(commands, slots, on_event=self.events.append, **options)

    def until(self, condition: Callable[[], object] | None = None) -> list[type]:
        """Look until a condition holds or all have ended, and return the kinds of events."""
        deadline = time.monotonic() + 15
        while not (self.children.is_over if condition is None else condition()):
            assert time.monotonic() < deadline, self.events
            self.children.poll()
            time.sleep(0.005)
        return [type(event) for event in self.events]

    def count(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self.events)


@pytest.fixture
def watch() -> Iterator[Callable[..., Watched]]:
    started: list[Watched] = []

    def make(*args: Any, **options: Any) -> Watched:
        started.append(Watched(*args, **options))
        started[-1].children.start()
        return started[-1]

    yield make
    for watched in started:
        watched.children.stop(signal.SIGKILL)
        watched.until()


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (RUN_IS_OVER, [ChildStarted]),
        (HOPELESS, [ChildStarted, ChildGaveUp]),
        (0, [ChildStarted, ChildRestarting, ChildStarted, ChildGaveUp]),  # for an unknown reason
        (7, [ChildStarted, ChildRestarting, ChildStarted, ChildGaveUp]),
    ],
)
def test_the_status_decides_how_often_a_child_is_started(
    watch: Callable[..., Watched], status: int, expected: list[type]
) -> None:
    watched = watch(exits_with(status), [3], max_restarts=1)
    assert watched.until() == expected
    assert watched.children.statuses == {status}
    assert not watched.children.pids
    if expected[-1] is ChildGaveUp:
        assert watched.events[-1] == ChildGaveUp(3, status, expected.count(ChildRestarting))


def test_a_useless_child_can_be_killed_and_is_restarted(watch: Callable[..., Watched]) -> None:
    watched = watch(SLEEP, [1], max_restarts=1)
    watched.children.kill(1)
    watched.until(lambda: watched.count(ChildRestarting))
    watched.children.kill(1)  # no process runs between two
    watched.until(lambda: watched.count(ChildStarted) == 2)
    started, killed, restarting, again = watched.events
    assert (killed, restarting) == (ChildKilled(1), ChildRestarting(1, -9, 1, 0.2))
    assert isinstance(started, ChildStarted)
    assert isinstance(again, ChildStarted)
    assert started.pid != again.pid == watched.children.pids[1]


def test_a_program_that_is_gone_for_a_while_counts_as_a_failure(
    watch: Callable[..., Watched],
) -> None:
    commands = iter([exits_with(1), ["/nowhere/program"], exits_with(RUN_IS_OVER)])
    watched = watch(lambda slot: next(commands), [1])
    assert watched.until() == [ChildStarted, ChildRestarting, ChildRestarting, ChildStarted]


def test_a_start_without_resources_is_tried_again_until_it_succeeds(
    watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spawn, errors = (
        subprocess.Popen,
        [OSError(number, os.strerror(number)) for number in [errno.EAGAIN] * 5],
    )
    errors.append(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    monkeypatch.setattr(children, "_TRY_AGAIN_S", 0.01)
    watched = watch(exits_with(1), [1], max_restarts=1)

    def lacking(*args: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return spawn(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", lacking)
    with caplog.at_level(logging.WARNING, "aiorl"):
        assert watched.until() == [ChildStarted, ChildRestarting, ChildStarted, ChildGaveUp]
    (message,) = caplog.messages
    assert os.strerror(errno.EMFILE) in message


def test_after_stop_no_child_is_restarted(watch: Callable[..., Watched]) -> None:
    watched = watch(SLEEP, [1, 2])
    watched.children.stop()
    watched.children.kill(1)
    watched.until(lambda: 1 not in watched.children.pids)
    watched.children.stop(signal.SIGTERM)
    assert watched.until() == [ChildStarted, ChildStarted, ChildKilled]


def test_output_goes_to_the_slots_log_and_the_environment_is_extended(
    watch: Callable[..., Watched], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", "import os, sys; print(os.environ['GREETING']); sys.exit(32)"]
    watched = watch(
        command,
        [4],
        environment={"GREETING": "hello"},
        log_path=lambda slot: tmp_path / f"logs/{slot}.txt",
    )
    watched.until()
    assert (tmp_path / "logs" / "4.txt").read_text() == "hello\n"


def test_a_program_that_cannot_be_started_is_an_error_and_leaves_no_others_behind(
    watch: Callable[..., Watched],
) -> None:
    watched = Watched(lambda slot: SLEEP if slot == 1 else ["/nowhere/program"], [1, 2])
    with pytest.raises(OSError, match="nowhere"):
        watched.children.start()
    watched.until()


# Watch of the parent
# --------------------------------------------------------------------------------------------------

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


def test_the_end_of_standard_input_is_reported_and_ends_the_process() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
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


def test_input_and_breakpoints_in_a_watched_process_end_at_once() -> None:
    code = (
        "from aiorl.process.children import watch_parent\nwatch_parent()\ntry:\n    input()\n"
        "except EOFError:\n    breakpoint()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stderr is not None
        assert process.wait(10) == 1
        assert b"BdbQuit" in process.stderr.read()


@pytest.mark.slow
def test_the_evaluation_process_ends_with_its_parent_even_during_an_evaluation() -> None:
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


def test_a_child_whose_parent_is_killed_ends(tmp_path: Path) -> None:
    child = (
        "from aiorl.process.children import watch_parent; import time; watch_parent(grace_s=0.1);"
        " time.sleep(60)"
    )
    parent = (
        "import sys, time\nfrom aiorl.process.children import Children\ncommand = [sys.executable,"
        f" '-c', {child!r}]\nchildren = Children(lambda slot: command, [1], max_restarts=0,"
        " on_event=lambda event: None)\nchildren.start()\nprint(children.pids[1],"
        " flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        orphan = psutil.Process(int(process.stdout.readline()))
        process.kill()
    assert orphan.wait(10) in (3, None)


# The kernel's watch of the parent
# --------------------------------------------------------------------------------------------------

STUCK = """
import ctypes
from aiorl.process.children import watch_parent
watch_parent(grace_s=0.1)
print("stuck", flush=True)
ctypes.PyDLL(None).sleep(60)  # unlike CDLL, it keeps Python's lock
"""
ALARMED = """
import signal, time
from aiorl.process.children import watch_parent
watch_parent(on_line=lambda line: print(signal.getitimer(signal.ITIMER_REAL)[0], flush=True))
print("ready", flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys, threading, time
from aiorl.process.children import start_process

def start():
    global child
    child = start_process([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()

thread = threading.Thread(target=start)
thread.start()
while str(thread.native_id) in os.listdir("/proc/self/task"):
    time.sleep(0.001)
print(child.pid, flush=True)
sys.stdin.readline()
child.stdin.write(b"tell\\n")
child.stdin.flush()
print(child.stdout.readline().decode(), flush=True)
"""


def test_a_child_stuck_with_pythons_lock_ends_with_its_parent() -> None:
    command = [sys.executable, "-c", PARENT, STUCK]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.is_running()
        parent.kill()
    assert child.wait(20) is None


def test_the_end_of_the_thread_that_started_a_child_is_not_the_end_of_its_parent() -> None:
    command = [sys.executable, "-c", PARENT, ALARMED]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        answer, _ = parent.communicate("\n")
    assert answer.split()[1] == "0.0", "the kernel has set the alarm"


def test_a_child_whose_parent_was_gone_before_it_asked_the_kernel_ends_too() -> None:
    code = STUCK.replace("grace_s=0.1", "lambda: time.sleep(60)").replace(
        "import ctypes", "import ctypes, time"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(20) == -signal.SIGALRM


def test_threads_start_processes_and_get_their_errors() -> None:
    with ThreadPoolExecutor(2) as pool:
        starts = [pool.submit(start_process, exits_with(status)) for status in range(4)]
        assert [start.result().wait() for start in starts] == [0, 1, 2, 3]
        with pytest.raises(FileNotFoundError, match="nowhere"):
            pool.submit(start_process, ["/nowhere/program"]).result()
