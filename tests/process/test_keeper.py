"""Parent of workers started by hand: restarts, signals and statuses, with plain Python children."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

from aiorl.process.children import FAILED, HOPELESS, RUN_IS_OVER, WRONG_USAGE

PARENT = """
import logging, os, sys
from aiorl.process.keeper import Keeper
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
logging.getLogger().handlers[0].flush = sys.stdout.flush
child, number, restarts, leave_s = sys.argv[1:]
command = [sys.executable, "-S", "-c", child]
status = Keeper(lambda slot: command, range(1, int(number) + 1), int(restarts), leave_s=float(leave_s)).run()
os._exit(status)
"""
# one write: a pipe has many writers
SAY = "import os, sys; say = lambda text: os.write(1, f'{text}\\n'.encode())"
WAITS = f"{SAY}; say(f'child {{os.getpid()}}'); sys.stdin.read(); say('orphan')"


class Kept:
    def __init__(self, child: str, number: int, max_restarts: int, leave_s: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PARENT, child, str(number), str(max_restarts), str(leave_s)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def output(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def child(self) -> int:
        """Return the process id of the next child that has started."""
        for line in self.output:
            if line.startswith("child"):
                return int(line.split()[-1])
        raise AssertionError("no child has started")

    def end(self) -> tuple[int, list[str]]:
        lines = self.output.read().splitlines()
        return self.process.wait(10), lines


@pytest.fixture
def keep() -> Iterator[Callable[..., Kept]]:
    started: list[Kept] = []

    def start(
        child: str = WAITS, number: int = 1, max_restarts: int = 3, leave_s: float = 5.0
    ) -> Kept:
        started.append(Kept(child, number, max_restarts, leave_s))
        return started[-1]

    yield start
    for keeper in started:
        keeper.process.kill()
        keeper.process.wait(10)
        keeper.output.close()


@pytest.mark.parametrize(
    ("number", "ends_with"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)]
)
def test_a_signal_ends_the_children_in_an_orderly_way(
    keep: Callable[..., Kept], number: int, ends_with: int
) -> None:
    leaves = f"""
{SAY}
import signal
def leave(number, frame):
    say(f"goodbye {{number}}")
    os._exit(143)
signal.signal(signal.SIGTERM, leave)
say("child")
while True:
    signal.pause()
"""
    keeper = keep(leaves, 2)
    for _ in range(4):  # lines of both children and their parent
        keeper.output.readline()
    keeper.process.send_signal(number)
    status, lines = keeper.end()
    assert status == ends_with
    assert lines == ["goodbye 15", "goodbye 15"]


def test_children_that_do_not_leave_are_killed(keep: Callable[..., Kept]) -> None:
    ignores = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAITS}"
    keeper = keep(ignores, leave_s=0.2)
    child = keeper.child()
    keeper.process.send_signal(signal.SIGTERM)
    assert keeper.end() == (143, [])
    assert not psutil.pid_exists(child)


def test_children_see_the_end_of_their_input_when_the_parent_is_killed(
    keep: Callable[..., Kept],
) -> None:
    keeper = keep()
    keeper.child()
    keeper.process.kill()
    assert keeper.end() == (-signal.SIGKILL, ["orphan"])


@pytest.mark.parametrize(
    ("status", "ends_with", "starts"),
    [(RUN_IS_OVER, 0, 1), (HOPELESS, 2, 1), (WRONG_USAGE, 2, 1), (FAILED, 1, 2), (0, 1, 2)],
)
def test_the_status_decides_how_often_a_child_is_started(
    keep: Callable[..., Kept], status: int, ends_with: int, starts: int
) -> None:
    keeper = keep(f"{SAY}; say('child'); os._exit({status})", max_restarts=1)
    ended_with, lines = keeper.end()
    assert ended_with == ends_with
    assert lines.count("child") == starts
    assert sum("0.2 s" in line for line in lines) == starts - 1


def test_one_child_that_is_given_up_does_not_end_the_others(
    keep: Callable[..., Kept], tmp_path: Path
) -> None:
    flag = tmp_path / "first"
    one_fails = f"""
import os
try:
    os.close(os.open({str(flag)!r}, os.O_CREAT | os.O_EXCL))
except FileExistsError:
    {WAITS}
os._exit(1)
"""
    keeper = keep(one_fails, 2, max_restarts=0)
    waited_for = {"child ", " 0 "}  # the second one is given up after 0 restarts
    while waited_for:  # in any order
        line = keeper.output.readline()
        assert line
        waited_for = {text for text in waited_for if text not in line}
    assert keeper.process.poll() is None
    keeper.process.send_signal(signal.SIGINT)
    assert keeper.end()[0] == 130
