"""Commands that are interrupted while they load, or are started without standard streams or with
SIGHUP ignored.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aiorl.process.early import is_command

INTERRUPT = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ.get("INTERRUPT_AT"):
            sys.meta_path.remove(self)
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))

sys.meta_path.insert(0, Interrupts())
"""
"""Module that Python loads at its start; it sends a signal when a certain module is about to be
imported."""
SCRIPT = "import sys; sys.argv[0] = '/usr/bin/aiorl'; from aiorl.__main__ import command; command()"


def started(place: Path, at: str, number: int, *words: str) -> subprocess.CompletedProcess[str]:
    (place / "sitecustomize.py").write_text(INTERRUPT)
    variables = {"PYTHONPATH": str(place), "INTERRUPT_AT": at, "SIGNAL": str(int(number))}
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, **variables},
        cwd=place,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )


# the ways to start a command differ in how it is recognised, and not in how far it has loaded
@pytest.mark.parametrize(
    ("words", "at"),
    [
        (["-m", "aiorl", "status"], "aiorl.config"),
        (["-m", "aiorl", "status"], "aiorl.config.command_line"),
        (["-m", "aiorl", "status"], "aiorl.acting.run_lock"),
        (["-m", "aiorl", "status"], "psutil"),
        (["-m", "aiorl.status"], "psutil"),
        (["-c", SCRIPT, "status"], "psutil"),
    ],
)
def test_ctrl_c_while_a_command_loads_gives_one_line(
    tmp_path: Path, words: list[str], at: str
) -> None:
    process = started(tmp_path, at, signal.SIGINT, *words, "nowhere")
    assert process.returncode == 130, process.stderr
    assert process.stderr.count("\n") == 1
    assert "Ctrl-C" in process.stderr


@pytest.mark.parametrize("at", ["aiorl.config.layers", "pydantic"])
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, {0, 130}), (signal.SIGHUP, {143, -signal.SIGHUP})]
)
def test_signals_before_a_run_begins_give_at_most_one_line(
    tmp_path: Path, at: str, number: int, status: set[int]
) -> None:
    process = started(tmp_path, at, number, "-m", "aiorl", "train", "--env", "CartPole-v1")
    assert process.returncode in status, process.stderr
    assert process.stderr.count("\n") <= 1
    assert not (tmp_path / "runs").exists()


def test_programs_of_users_are_left_alone() -> None:
    code = (
        "import signal, aiorl; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert process.stdout == "True\n"
    assert not is_command()


COMMANDS = [
    ("aiorl --help", 0),
    ("aiorl status nowhere", 2),
    ("aiorl.keys keys", 0),
    ("aiorl worker --help", 0),
    ("aiorl launch slurm status nowhere", 2),
    ("aiorl train --nonsense 3", 2),
]
"""Commands of each kind, how they end, and statuses."""


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-"])
def test_commands_work_without_standard_streams(tmp_path: Path, closed: str) -> None:
    for words, status in COMMANDS:
        command = f"exec {shlex.quote(sys.executable)} -m {words} {closed}"
        process = subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, check=False, timeout=60, stdin=subprocess.DEVNULL
        )
        assert process.returncode == status, words


def test_nothing_else_gets_the_numbers_of_closed_streams() -> None:
    code = "import sys; sys.orig_argv = ['python', '-m', 'aiorl']; import aiorl, os; "
    code += "file = open(os.devnull); print('dropped'); sys.exit(file.fileno())"
    process = subprocess.run(
        ["sh", "-c", f'exec {sys.executable} -c "{code}" <&- >&- 2>&-'], check=False, timeout=60
    )
    assert process.returncode > 2
