"""The program that `aiorl launch ssh` runs on hosts, started here: however it ends, no process and
no key is left.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import wait_until

from aiorl.launch import ssh_host
from aiorl.launch.shipment import archive

SLEEPS = "import os, time; print('begun', os.getpid(), flush=True); time.sleep(600)"


class Program:
    """The program on a host with the home directory `home`, and the process that it has started."""

    def __init__(self, home: Path, command: str = SLEEPS) -> None:
        self.place = home / ".aiorl/runs/mine-1/host+ab"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "aiorl.launch.ssh_host"],
            env={**os.environ, "HOME": str(home)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.send(
            json.dumps({"place": "~/.aiorl/runs/mine-1/host+ab", "modules": []}).encode() + b"\n"
        )
        self.facts: dict[str, Any] = json.loads(self.line().removeprefix(ssh_host.GREETING))
        packed = archive({"keys/worker.key_secret": b"secret", "code/a.py": b""})
        wanted = {
            "command": [sys.executable, "-c", command],
            "leave_s": 5,
            "archives": [len(packed)],
        }
        self.send(json.dumps(wanted).encode() + b"\n" + packed)

    def send(self, content: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(content)
        self._process.stdin.flush()

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode()

    def started(self) -> psutil.Process:
        return psutil.Process(int(self.line().split()[1]))

    def end(self, how: Callable[[subprocess.Popen[bytes]], object]) -> int:
        with self._process as process:
            how(process)
        return self._process.returncode


def _is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("how", ["killed", "terminated", "cut off"])
def test_however_the_program_ends_its_process_ends_and_its_key_is_removed(
    tmp_path: Path, how: str
) -> None:
    program = Program(tmp_path)
    child = program.started()
    assert (program.place / "keys/worker.key_secret").exists()
    numbers = {"killed": signal.SIGKILL, "terminated": signal.SIGTERM}
    if how in numbers:
        program.end(lambda process: process.send_signal(numbers[how]))
    else:
        program.end(lambda process: process.stdin.close() if process.stdin else None)
    wait_until(lambda: _is_gone(child), 30, "that the process has ended")
    wait_until(lambda: not program.place.parent.exists(), 30, "that the directory is removed")


def test_the_port_of_a_learner_is_told_once_it_listens(tmp_path: Path) -> None:
    listens = (
        "import os; os.makedirs('../run'); open('../run/run.json', 'w').write('{\"port\": 5557}')"
    )
    program = Program(tmp_path, f"{listens}; {SLEEPS}")
    lines = {program.line(), program.line()}
    assert f"{ssh_host.PORT_IS}5557\n" in lines
    program.end(lambda process: process.terminate())


def test_a_run_stays_if_the_program_is_killed(tmp_path: Path) -> None:
    program = Program(tmp_path, f"import os; os.makedirs('../run'); {SLEEPS}")
    child = program.started()
    program.end(lambda process: process.kill())
    wait_until(lambda: _is_gone(child), 30, "that the process has ended")
    wait_until(
        lambda: [path.name for path in program.place.iterdir()] == ["run"],
        30,
        "that only the run is left",
    )


def test_the_next_launch_removes_what_a_crash_of_the_host_left(tmp_path: Path) -> None:
    runs = tmp_path / ".aiorl/runs"
    for name in (
        "old-1/host+zz",
        "old-2/learner-host+zz",
        "unrelated/host+zz",
        "mine-2/other+zz",
        "mine-3/new+zz",
    ):
        (runs / name / "keys").mkdir(parents=True)
        (runs / name / "keys/worker.key_secret").write_text("secret")
    for name in ("old-1/host+zz", "old-2/learner-host+zz"):
        (runs / name / "lock").write_text(socket.gethostname())
    (runs / "mine-2/other+zz/lock").write_text(f"{socket.gethostname()}2")
    (runs / "mine-3/new+zz/lock").touch()
    (runs / "old-2/learner-host+zz/run").mkdir()
    program = Program(tmp_path)
    program.started()
    try:
        assert not (runs / "old-1").exists()
        assert [path.name for path in (runs / "old-2/learner-host+zz").iterdir()] == ["run"]
        assert (runs / "unrelated/host+zz/keys").exists(), "no program has made it"
        assert (runs / "mine-2/other+zz/keys").exists(), (
            "it is that of another host with the same home directory"
        )
        assert (runs / "mine-3/new+zz/keys").exists(), "its host has just made it"
        assert (program.place / "lock").read_text() == socket.gethostname()
        assert (program.place / "keys/worker.key_secret").exists(), "its program runs"
    finally:
        program.end(lambda process: process.terminate())
