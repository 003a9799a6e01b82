"""Processes of a run: start them, find their children, and see how all of them end.

Every process carries a mark in its environment, which its children inherit. So a child that
outlives its parent can still be found.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = [
    "Ended",
    "Started",
    "aborted",
    "crashes_in",
    "end_all",
    "ended_in",
    "marked",
    "memory_of",
    "send",
    "worker_leaves",
]

_MARK = "AIORL_CHAOS"
_ROOT = Path(__file__).parents[2]  # the directory from which this package can be imported
_CRASH = re.compile(
    r"^.*(?:Fatal Python error|Assertion failed|Segmentation fault).*$", re.MULTILINE
)
_ENDED = re.compile(
    r"^.*worker (?:process )?\d+(?: of \d+)? ended (?:with status |\()(-?\d+).*$", re.MULTILINE
)
_CAUSED = frozenset(
    {0, -signal.SIGKILL, -signal.SIGTERM, signal.SIGTERM + 128, signal.SIGKILL + 128}
)
_CRASH_SIGNALS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_MAX_LINE = 300
_CRASHED = frozenset(status for number in _CRASH_SIGNALS for status in (-number, number + 128))


@dataclass(frozen=True, slots=True)
class Ended:
    """Process that ended without orders.

    Attributes:
        who: name of the process.
        status: exit status.
        said: its last words, or those of its supervisor.
        at: time at which its end was seen; 0 if a log reports it.
    """

    who: str
    status: int
    said: str
    at: float = 0.0

    def __str__(self) -> str:
        return f"{self.who} ended with status {self.status}: {self.said}"


class Started:
    """Process in a session of its own that appends its output to a file."""

    def __init__(
        self, command: list[str], *, mark: str, output: Path, environment: Mapping[str, str]
    ) -> None:
        """Start the process.

        Args:
            command: the program and its arguments.
            mark: mark by which ``marked`` finds it and its children.
            output: file for both of its streams.
            environment: variables to add to those of this process.
        """
        self._log = output
        with output.open("ab") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=_ROOT,
                env={**os.environ, **environment, _MARK: mark},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, None while it runs."""
        return self._process.poll()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal if it still runs."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end; return the exit status.

        Raises:
            TimeoutError: it still runs after ``timeout_s`` seconds.
        """
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the process still runs after {timeout_s} s") from None

    def last_words(self) -> str:
        """Return the last line it has written, or, after a crash, the line that reports it."""
        lines = [
            line.strip()
            for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        ]
        crashes = crashes_in("\n".join(lines)) if self.status in _CRASHED else []
        return next(
            (line[:_MAX_LINE] for line in [*reversed(crashes), *reversed(lines)] if line), ""
        )


def send(process: psutil.Process, number: signal.Signals) -> None:
    """Send a process a signal if it is still the same process and runs."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def worker_leaves(pid: int) -> list[psutil.Process]:
    """Return the processes that sample below a process, including itself: workers without workers
    of their own.
    """
    try:
        top = psutil.Process(pid)
        family = [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
    workers = [process for process in family if _is_worker(process)]
    parents = {_parent_id(process) for process in workers}
    return [process for process in workers if process.pid not in parents]


def marked(mark: str) -> list[psutil.Process]:
    """Return all live processes with the mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_all(processes: Iterable[psutil.Process]) -> None:
    """Kill processes and wait until they have ended."""
    left = list(processes)
    for process in left:
        send(process, signal.SIGKILL)
    psutil.wait_procs(left, timeout=5)


def memory_of(process: psutil.Process) -> int | None:
    """Return the memory that a process has written to and does not share, in bytes; None if it has
    ended.

    Pages of libraries that are only read do not count: they become private or shared as other
    processes come and go.
    """
    with contextlib.suppress(psutil.Error):
        return sum(int(part.private_dirty) for part in process.memory_maps())
    return None


def crashes_in(text: str) -> list[str]:
    """Return the lines that report an abort, one for each abort.

    A library's failed assertion and Python's message about the resulting signal count as one.
    """
    lines = [match.strip() for match in _CRASH.findall(text)]
    words = [line for line in lines if "Fatal Python error" not in line]
    fatal = [line for line in lines if "Fatal Python error" in line]
    return words + fatal[len(words) :]


def ended_in(who: str, text: str) -> list[Ended]:
    """Return the workers that ended otherwise than by a signal from here, as their supervisor
    reports.
    """
    found = [Ended(who, int(match[1]), match[0].strip()) for match in _ENDED.finditer(text)]
    return [each for each in found if each.status not in _CAUSED]


def aborted(crashes: Sequence[str], ended: Sequence[Ended]) -> list[str]:
    """Return every process that ended by itself, once: from their crash messages and from ends that
    were observed.
    """
    by_crash = [each for each in ended if each.status in _CRASHED]
    others = [str(each) for each in ended if each.status not in _CRASHED]
    return [*crashes, *map(str, by_crash[len(crashes) :]), *others]


def _is_worker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "aiorl.worker" in process.cmdline()
    return False


def _parent_id(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return process.ppid()
    return 0
