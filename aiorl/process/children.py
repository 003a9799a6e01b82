"""Worker processes and their parent: what they agree on, and how the parent keeps them running.

Whatever ends a worker, its parent starts it again, unless the worker says with its exit status that this would be of no
use. A status of 0 says nothing: an environment may have called ``exit``. A start that fails for a lack of processes,
memory or descriptors is tried again every ten seconds, and does not count. A worker ends when its parent does, however
that ended: its standard input is a pipe that ends then. It is in a session of its own, so that a terminal's Ctrl-C
reaches only the parent.

The parent may be a learner or a process that loads next to nothing (`keeper`), so there is no event loop here, nor
`dataclasses`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

logger = logging.getLogger(__name__)

FAILED = 1
"""The worker failed; another one may do better."""
WRONG_USAGE = 2
"""The command line cannot be understood."""
RUN_IS_OVER = 32
"""The learner said goodbye for good."""
HOPELESS = 33
"""The worker failed, and would fail the same way again: the learner refused it for good, or its keys are unusable."""
STOPPED = 128 + signal.SIGTERM
"""The worker left in an orderly way because somebody asked it to, by a signal."""
DEFAULT_MAX_RESTARTS = 3
_TRY_AGAIN_S = 10.0
"""How long to wait before a start is tried again that failed for a lack which may pass."""
_LACKS = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT)
"""Why a start may fail that says nothing of the child."""
_BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_HEALTHY_S, _HEALTHY_BEFORE_A_SIGNAL_S = 60.0, 10.0


def status_text(status: int) -> str:
    """An exit status for people: a signal by its name."""
    with contextlib.suppress(ValueError):
        return f"status {status} ({signal.Signals(-status).name})"
    return f"status {status}"


class Restarts:
    """Counts the restarts of one child.

    At most ``max_restarts`` in a row, after pauses that grow. A child that has worked, and run for a minute, gets its
    allowance back. If a signal ended it (a kill, a lack of memory, an abort in a C library), ten seconds are
    enough: that says little about the child.

    Attributes:
        in_a_row: restarts since the child last ran healthily.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self.in_a_row = 0

    def pause_after(self, status: int, lived_s: float, *, has_worked: bool = True) -> float | None:
        """Seconds to wait before the next start, which counts as made; None if there shall be none.

        Args:
            status: exit status of the child that has ended, negative for a signal.
            lived_s: how long it ran, seconds.
            has_worked: whether it has done anything of what it is there for, as far as its parent knows.
        """
        by_signal = status < 0 or status > 128
        if has_worked and lived_s > (_HEALTHY_BEFORE_A_SIGNAL_S if by_signal else _HEALTHY_S):
            self.in_a_row = 0
        if status in (RUN_IS_OVER, HOPELESS, WRONG_USAGE) or self.in_a_row >= self._max_restarts:
            return None
        pause_s = _BACKOFF_S[min(self.in_a_row, len(_BACKOFF_S) - 1)]
        self.in_a_row += 1
        return pause_s


class ChildStarted(NamedTuple):
    """The child runs."""

    slot: int
    pid: int


class ChildRestarting(NamedTuple):
    """The child has ended and will be started again after ``wait_s`` seconds."""

    slot: int
    status: int
    restarts: int
    wait_s: float


class ChildGaveUp(NamedTuple):
    """The child has ended, more often than allowed or for good, and stays down."""

    slot: int
    status: int
    restarts: int


class ChildKilled(NamedTuple):
    """The child runs but is of no use: it was killed, ChildRestarting or ChildGaveUp follows."""

    slot: int


ChildEvent: TypeAlias = ChildStarted | ChildRestarting | ChildGaveUp | ChildKilled


class _Child:
    """One process after the other.

    Attributes:
        process: the one that runs, None between two and at the end.
        due: when the next one is to be started; None if there is none to come.
        began: when the last one was started.
        status: exit status of the last one.
        is_lacking: the next one could not be started for a lack that may pass, which was told.
    """

    def __init__(self, restarts: Restarts) -> None:
        self.restarts = restarts
        self.process: subprocess.Popen[bytes] | None = None
        self.due: float | None = None
        self.began = 0.0
        self.status = 0
        self.is_lacking = False


class Children:
    """One child process for each slot. Whoever has them calls `look` again and again, and `stop` at the end."""

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        slots: Iterable[int],
        *,
        max_restarts: int,
        on_event: Callable[[ChildEvent], None],
        log_path: Callable[[int], Path] | None = None,
        environment: Mapping[str, str] | None = None,
        has_worked: Callable[[int], bool] = lambda slot: True,
    ) -> None:
        """Start nothing yet.

        Args:
            command: slot -> argument vector, the program first; asked before each start.
            slots: one child each.
            max_restarts: restarts in a row after which a child stays down.
            on_event: told of every start, restart and surrender.
            log_path: slot -> file its output is appended to; None = this process's own output.
            environment: variables added to this process's own.
            has_worked: slot -> whether its child has done anything of what it is there for, asked when it has ended.
        """
        self._command = command
        self._on_event = on_event
        self._log_path = log_path
        self._environment = environment or {}
        self._has_worked = has_worked
        self._children = {slot: _Child(Restarts(max_restarts)) for slot in slots}
        self._is_stopping = False

    @property
    def pids(self) -> dict[int, int]:
        """Process id of every running child by slot."""
        return {slot: process.pid for slot, process in self._running().items()}

    @property
    def next_start(self) -> float | None:
        """When the next start is due, by the monotonic clock; None if none is."""
        return min((child.due for child in self._children.values() if child.due is not None), default=None)

    @property
    def is_over(self) -> bool:
        """True if none runs and none will be started again."""
        return self.next_start is None and all(child.process is None for child in self._children.values())

    @property
    def statuses(self) -> set[int]:
        """The last exit statuses of all."""
        return {child.status for child in self._children.values()}

    def start(self) -> None:
        """Start every child.

        Raises: OSError if one cannot be started; those that run are killed then.
        """
        try:
            for slot, child in self._children.items():
                self._start(slot, child)
        except OSError:
            self.stop(signal.SIGKILL)
            raise

    def look(self) -> None:
        """Take note of children that have ended, and start them again when that is due."""
        for slot, child in self._children.items():
            if child.process is not None:
                status = child.process.poll()
                if status is None:
                    continue
                assert child.process.stdin is not None
                child.process.stdin.close()
                child.process, child.status = None, status
                self._plan_restart(slot, child)
            elif child.due is not None and time.monotonic() >= child.due:
                self._start_again(slot, child)

    def kill(self, slot: int) -> None:
        """End a child that runs but is of no use; it is started again like any other that a signal has ended."""
        process = self._running().get(slot)
        if process is not None:
            self._on_event(ChildKilled(slot))
            process.kill()

    def stop(self, number: int | None = None) -> None:
        """Start none again from now on, and send a signal to those that run."""
        self._is_stopping = True
        for child in self._children.values():
            child.due = None
        if number is not None:
            for process in self._running().values():
                process.send_signal(number)

    def _running(self) -> dict[int, subprocess.Popen[bytes]]:
        processes = {slot: child.process for slot, child in self._children.items()}
        return {slot: process for slot, process in processes.items() if process is not None and process.poll() is None}

    def _start(self, slot: int, child: _Child) -> None:
        child.began, child.due = time.monotonic(), None
        command = self._command(slot)
        path = self._log_path(slot) if self._log_path else None
        with contextlib.ExitStack() as stack:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have removed it while we run
            output = stack.enter_context(path.open("ab")) if path else None
            child.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **self._environment},
                start_new_session=True,
            )
        child.is_lacking = False
        self._on_event(ChildStarted(slot, child.process.pid))

    def _start_again(self, slot: int, child: _Child) -> None:
        try:
            self._start(slot, child)
        except OSError as error:
            if error.errno not in _LACKS:
                logger.warning("worker process %d could not be started: %s", slot, error)
                child.status = FAILED
                self._plan_restart(slot, child)
                return
            child.due = time.monotonic() + _TRY_AGAIN_S
            if not child.is_lacking:
                child.is_lacking = True
                text = "worker process %d can't be started for now (%s); tried again every %g s"
                logger.warning(text, slot, error.strerror, _TRY_AGAIN_S)

    def _plan_restart(self, slot: int, child: _Child) -> None:
        if self._is_stopping or child.status == RUN_IS_OVER:
            return
        now = time.monotonic()
        wait_s = child.restarts.pause_after(child.status, now - child.began, has_worked=self._has_worked(slot))
        if wait_s is None:
            self._on_event(ChildGaveUp(slot, child.status, child.restarts.in_a_row))
        else:
            child.due = now + wait_s
            self._on_event(ChildRestarting(slot, child.status, child.restarts.in_a_row, wait_s))


def watch_parent(
    on_lost: Callable[[], object] = lambda: None,
    *,
    on_line: Callable[[str], object] = lambda line: None,
    grace_s: float = 2.0,
) -> threading.Thread:
    """Start the watching thread.

    Args:
        on_lost: called once in the watching thread when the parent is gone, to end in an orderly way.
        on_line: called in the watching thread with each line that the parent writes.
        grace_s: seconds given to `on_lost` before the process is ended with status 3.
    """

    def wait_for_end() -> None:
        # a reader of its own: at the end of Python, sys.stdin must not be locked by a daemon thread
        with open(sys.stdin.fileno(), encoding="utf-8", errors="replace", closefd=False) as lines:
            for line in lines:
                on_line(line)
        try:
            on_lost()
        finally:
            threading.Event().wait(grace_s)
            os._exit(3)

    thread = threading.Thread(target=wait_for_end, name="parent-watch", daemon=True)
    thread.start()
    return thread
