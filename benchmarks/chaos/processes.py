"""Starting processes of a run, finding those that they start, and looking at how all of them end.

Every process bears a mark in its environment, which its children inherit, so that one that outlives its parent is
found all the same.
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
_ROOT = Path(__file__).parents[2]  # where this package can be imported by name
_CRASH = re.compile(r"^.*(?:Fatal Python error|Assertion failed|Segmentation fault).*$", re.MULTILINE)
_ENDED = re.compile(r"^.*worker (?:process )?\d+(?: of \d+)? ended (?:with status |\()(-?\d+).*$", re.MULTILINE)
_CAUSED = frozenset({0, -signal.SIGKILL, -signal.SIGTERM, signal.SIGTERM + 128, signal.SIGKILL + 128})
_CRASH_SIGNALS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_MAX_LINE = 300
_CRASHED = frozenset(status for number in _CRASH_SIGNALS for status in (-number, number + 128))


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that ended without having been told to.

    Attributes:
        who: which one.
        status: its exit status.
        said: its last words, or those of its supervisor.
        at: when that was seen; 0 if it was only read of.
    """

    who: str
    status: int
    said: str
    at: float = 0.0

    def __str__(self) -> str:
        return f"{self.who} ended with status {self.status}: {self.said}"


class Started:
    """A process in a session of its own, whose output is appended to a file."""

    def __init__(self, command: list[str], *, mark: str, output: Path, environment: Mapping[str, str]) -> None:
        """Start it.

        Args:
            command: the program and its arguments.
            mark: what ``marked`` finds it and its children by.
            output: file for both of its streams.
            environment: variables added to this process's own.
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
        """Its process id."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status, None while it runs."""
        return self._process.poll()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it still runs."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float | None = None) -> int:
        """Its exit status, as soon as it has ended.

        Raises:
            TimeoutError: it has not after so many seconds.
        """
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"it runs on after {timeout_s} s") from None

    def last_words(self) -> str:
        """The last line it has written; of one that crashed, the one that says so."""
        lines = [line.strip() for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines()]
        crashes = crashes_in("\n".join(lines)) if self.status in _CRASHED else []
        return next((line[:_MAX_LINE] for line in [*reversed(crashes), *reversed(lines)] if line), "")


def send(process: psutil.Process, number: signal.Signals) -> None:
    """Send a process a signal, if it is still the same and runs."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def worker_leaves(pid: int) -> list[psutil.Process]:
    """The processes that sample below a process, itself included: workers that have started no other workers."""
    try:
        top = psutil.Process(pid)
        family = [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
    workers = [process for process in family if _is_worker(process)]
    parents = {_parent_id(process) for process in workers}
    return [process for process in workers if process.pid not in parents]


def marked(mark: str) -> list[psutil.Process]:
    """All processes that bear the mark and have not ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_all(processes: Iterable[psutil.Process]) -> None:
    """Kill processes and wait until they are gone."""
    left = list(processes)
    for process in left:
        send(process, signal.SIGKILL)
    psutil.wait_procs(left, timeout=5)


def memory_of(process: psutil.Process) -> int | None:
    """Memory that a process has written to and shares with no other, in bytes; None if it has ended.

    Pages of libraries that it only reads are none of it: they are private or shared as other processes come and go.
    """
    with contextlib.suppress(psutil.Error):
        return sum(int(part.private_dirty) for part in process.memory_maps())
    return None


def crashes_in(text: str) -> list[str]:
    """Lines by which a process says that it is being aborted, one for each time.

    An assertion of a library and Python's word on the signal that follows are one.
    """
    lines = [match.strip() for match in _CRASH.findall(text)]
    words = [line for line in lines if "Fatal Python error" not in line]
    fatal = [line for line in lines if "Fatal Python error" in line]
    return words + fatal[len(words) :]


def ended_in(who: str, text: str) -> list[Ended]:
    """Workers that ended otherwise than by a signal of ours, as their supervisor tells."""
    found = [Ended(who, int(match[1]), match[0].strip()) for match in _ENDED.finditer(text)]
    return [each for each in found if each.status not in _CAUSED]


def aborted(crashes: Sequence[str], ended: Sequence[Ended]) -> list[str]:
    """Every process that ended by itself, once: what they said while crashing, and what was seen of their ends."""
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
