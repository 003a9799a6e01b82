"""Real learner and worker processes for tests."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from forked_children import is_child, start_program
from learner_server import LEARNER, ForkedLearner, can_fork

CARTPOLE = "--env=CartPole-v1"
SMALL = (
    "--num-envs-per-worker=4",
    "--rollout-fragment-length=32",
    "--train-batch-size=512",
    "--num-sgd-iter=2",
    "--model.fcnet-hiddens=[16]",
    "--xla=off",
)
"""Settings for batches that are sampled and trained on in a few milliseconds."""


PORTS = range(12_000, 32_000)
"""Ports that the system gives to no connection by itself, so that a free one stays free."""


def free_address() -> str:
    """Return a free address of this host; a learner that binds to an address waits for workers from
    elsewhere.
    """
    while True:
        port = random.choice(PORTS)
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError):
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return f"tcp://127.0.0.1:{port}"


class Started:
    """Process with output that is read continuously; it finds the modules next to this one."""

    def __init__(self, command: list[str], environment: dict[str, str] | None = None) -> None:
        path = os.pathsep.join(
            filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
        )
        self.process = self._start(
            command,
            {**os.environ, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", **(environment or {})},
        )
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _start(
        self, command: list[str], environment: dict[str, str]
    ) -> subprocess.Popen[str] | ForkedLearner:
        if is_child(command):
            return start_program(command, environment)
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def text(self) -> str:
        with self._news:
            return "".join(self.lines)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line)
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def wait_for(self, pattern: str, timeout_s: float = 60.0, *, after: int = 0) -> int:
        """Wait for a line that matches, from line ``after`` on, and return the number of the next
        line.
        """
        deadline = time.monotonic() + timeout_s
        number = after
        with self._news:
            while True:
                while number < len(self.lines):
                    if re.search(pattern, self.lines[number]):
                        return number + 1
                    number += 1
                left = deadline - time.monotonic()
                if left <= 0 or (not self._reader.is_alive() and number >= len(self.lines)):
                    raise AssertionError(f"no line matches {pattern!r} in:\n{''.join(self.lines)}")
                self._news.wait(min(left, 0.5))

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 30.0) -> int:
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.send(signal.SIGABRT)  # Python writes the stacks of all threads
            self._reader.join(5.0)
            raise AssertionError(f"it still ran after {timeout_s} s:\n{self.text}") from None
        self._reader.join(5.0)
        return status

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(5.0)
        assert self.process.stdout is not None
        self.process.stdout.close()


class StartedLearner(Started):
    """A learner and its run directory: forked from a process with TensorFlow, or started normally.

    A forked learner can work in another directory than this process.
    """

    def __init__(
        self,
        run_dir: Path,
        *options: str,
        environment: dict[str, str] | None = None,
        is_forked: bool = True,
        directory: str = "",
        module: str = LEARNER,
        script: str = "",
    ) -> None:
        self.run_dir = run_dir
        self._options, self._script, self._directory = list(options), script, directory
        self._module = module
        self._is_forked = is_forked and can_fork
        program = [script] if script else ["-m", module]
        super().__init__([sys.executable, *program, *options], environment)

    def _start(
        self, command: list[str], environment: dict[str, str]
    ) -> subprocess.Popen[str] | ForkedLearner:
        if self._is_forked:
            return ForkedLearner(
                self._options,
                environment,
                module=self._module,
                script=self._script,
                directory=self._directory,
            )
        return super()._start(command, environment)

    @property
    def address(self) -> str:
        wait_until((self.run_dir / "run.json").exists)
        return str(json.loads((self.run_dir / "run.json").read_text())["address"])

    def results(self) -> list[dict[str, Any]]:
        path = self.run_dir / "result.jsonl"
        if not path.exists():
            return []
        return [
            json.loads(line)
            for line in path.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]

    def wait_for_result(
        self, condition: Callable[[dict[str, Any]], bool], timeout_s: float = 60.0
    ) -> dict[str, Any]:
        """Return the first result that meets the condition, and wait for it if necessary."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for result in reversed(self.results()):
                if condition(result):
                    return result
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError(f"no such result in {timeout_s} s:\n{self.text}\n{self.log}")

    @property
    def log(self) -> str:
        path = self.run_dir / "log.txt"
        return path.read_text() if path.exists() else ""

    @property
    def worker_log(self) -> str:
        """Return the first worker's log."""
        return (self.run_dir / "logs" / "worker-1.txt").read_text()

    def worker_pids(self) -> list[int]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return [
                child.pid
                for child in psutil.Process(self.pid).children()
                if "aiorl.worker" in child.cmdline()
            ]
        return []

    def wait_for_joined(self, *former: int, timeout_s: float = 40.0) -> int:
        """Wait until a local worker other than the former ones has joined, and return its process
        id.
        """
        wait_until(lambda: {*self.worker_pids()} - {*former}, timeout_s)
        (pid,) = {*self.worker_pids()} - {*former}
        self.wait_for(rf"\b{pid}\b", timeout_s)
        return pid


def wait_until(
    condition: Callable[[], object], timeout_s: float = 30.0, what: str = "the condition"
) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come about within {timeout_s:g} s")
        time.sleep(0.02)


def check_ledger(result: dict[str, Any]) -> None:
    """Check the sum: sampled = trained + queued + in flight + discarded + lost."""
    ledger = result["ledger"]
    parts = ledger["trained"] + ledger["queued"] + ledger["in_flight"]
    parts += sum(ledger["discarded"].values()) + sum(ledger["lost"].values())
    assert ledger["sampled"] == parts, ledger
    assert all(value >= 0 for value in (ledger["queued"], ledger["in_flight"]))


class Processes:
    """Starter of learners and workers that ends the remaining ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[Started] = []

    def learner(
        self,
        *options: str,
        run: str = "run",
        resume: bool = False,
        environment: dict[str, str] | None = None,
        is_forked: bool = True,
        script: str = "",
    ) -> StartedLearner:
        """Start a learner, by default of CartPole-v1 with small batches, and without XLA, which
        takes seconds.

        Args:
            *options: command-line options.
            run: name of its run directory.
            resume: True to resume that run.
            environment: variables in addition to those of this process.
            is_forked: True to save the time to load TensorFlow; otherwise it starts as for users,
                with their defaults.
            script: path of a program to run instead of ``python -m aiorl.learner``.
        """
        run_dir = self._folder / run
        place = [f"--resume={run_dir}"] if resume else [f"--run-dir={run_dir}"]
        for default in () if resume else (CARTPOLE, *SMALL) if is_forked else (CARTPOLE,):
            if not any(option.partition("=")[0] == default.partition("=")[0] for option in options):
                place.append(default)
        learner = StartedLearner(
            run_dir, *place, *options, environment=environment, is_forked=is_forked, script=script
        )
        self._started.append(learner)
        return learner

    def command(self, command: list[str]) -> Started:
        started = Started(command)
        self._started.append(started)
        return started

    def worker(self, address: str, *options: str) -> Started:
        return self.command(
            [sys.executable, "-P", "-m", "aiorl.worker", f"--connect={address}", *options]
        )

    def end(self) -> None:
        for started in self._started:
            children: list[psutil.Process] = []
            with contextlib.suppress(psutil.NoSuchProcess):
                children = psutil.Process(started.pid).children(recursive=True)
            started.end()
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.wait(10)  # they end by themselves after their parent
