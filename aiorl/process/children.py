"""Worker processes and their parent: exit statuses that both know, and restarts by the parent.

The parent restarts a worker whatever ended it, unless the worker's exit status says that this would
be useless. A status of 0 means nothing, since an environment may have called ``exit``. If a start
fails for lack of processes, memory or file descriptors, it is tried again every ten seconds and
does not count. A worker ends when its parent does, since its standard input is a pipe that closes
then; should the worker be stuck in code that keeps Python's lock, the kernel ends it
(`end_with_parent`). It has its own session, so that Ctrl-C in a terminal reaches only the parent.

The parent can be a learner or a process that loads almost nothing (`keeper`). This module therefore
uses neither an event loop nor `dataclasses`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

logger = logging.getLogger(__name__)

FAILED = 1
"""Exit status: the worker failed, but another one may succeed."""
WRONG_USAGE = 2
"""Exit status: the command line is invalid."""
RUN_IS_OVER = 32
"""Exit status: the learner has said that the run is over."""
HOPELESS = 33
"""Exit status: the worker failed and would fail again; the learner refused it for good, or its keys
are unusable."""
STOPPED = 128 + signal.SIGTERM
"""Exit status: the worker left in an orderly way after a signal."""
DEFAULT_MAX_RESTARTS = 3
WORKERS_TOGETHER = "AIORL_WORKERS_TOGETHER"
"""Environment variable with the number of workers that were started together on this host."""
FORMER_END = "AIORL_FORMER_END"
"""Environment variable of a worker that was started again: how its former process ended without
reporting a failure."""
WORKER_ID = "AIORL_WORKER_ID"
"""Environment variable with the name of a process that is a secret: arguments can be read by other
users."""
RELAY = "AIORL_RELAY"
"""Environment variable with the name of the relay's socket (see `aiorl.net.transport.relay`); empty
without a relay."""
_TRY_AGAIN_S = 10.0
"""Seconds to wait before another try if a start failed for a temporary lack of resources."""
_LACKS = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a start that failed for lack of resources, not because of the child."""
_BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_HEALTHY_S = 60.0
_HEALTHY_BEFORE_A_SIGNAL_S = 10.0
_PR_SET_PDEATHSIG = 1
_SOON = signal.SIGQUIT
"""Signal 3, so `end_with_parent` ends a process after 3 seconds: later than any orderly end of 2
seconds."""
_LATER = getattr(signal, "SIGSTKFLT", None)
"""Signal 16, which nothing sends, for an orderly end that takes longer; there is none on some
systems."""


def status_text(status: int) -> str:
    """Return a readable exit status; signals have their names."""
    with contextlib.suppress(ValueError):
        return f"status {status} ({signal.Signals(-status).name})"
    return f"status {status}"


class Restarts:
    """Counts the restarts of one child.

    At most ``max_restarts`` in a row are allowed, after growing pauses. A child that has worked and
    run for a minute gets its full allowance again. If a signal ended it (a kill, a lack of memory,
    an abort in a C library), ten seconds are enough, since that says little about the child.

    Attributes:
        in_a_row: restarts since the child last ran healthily.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self.in_a_row = 0

    def pause_after(self, status: int, lived_s: float, *, has_worked: bool = True) -> float | None:
        """Count a restart and return the seconds to wait before it; None if the child must stay
        down.

        Args:
            status: exit status of the ended child; negative for a signal.
            lived_s: seconds that it ran.
            has_worked: False if the parent knows that it has done no useful work.
        """
        by_signal = status < 0 or status > 128
        healthy_s = _HEALTHY_BEFORE_A_SIGNAL_S if by_signal else _HEALTHY_S
        if has_worked and lived_s > healthy_s:
            self.in_a_row = 0
        if status in (RUN_IS_OVER, HOPELESS, WRONG_USAGE) or self.in_a_row >= self._max_restarts:
            return None
        pause_s = _BACKOFF_S[min(self.in_a_row, len(_BACKOFF_S) - 1)]
        self.in_a_row += 1
        return pause_s


class _Starter:
    """Thread that starts processes for other threads, because the kernel takes a thread's end for
    that of the parent.

    It lasts as long as this process. A fork of this process gets its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = (
            queue.SimpleQueue()
        )
        self._pid = 0

    def run(self, call: Callable[[], None]) -> None:
        """Run a call, which raises nothing, in the thread, and wait for its end.

        Raises:
            OSError: the thread cannot be started for lack of resources.
        """
        with self._lock:
            if self._pid != os.getpid():
                self._calls = queue.SimpleQueue()
                thread = threading.Thread(
                    target=self._serve, args=(self._calls,), name="aiorl-starter", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as error:
                    raise OSError(errno.EAGAIN, str(error)) from error
                self._pid = os.getpid()
            is_done = threading.Event()
            self._calls.put((call, is_done))
        is_done.wait()

    @staticmethod
    def _serve(calls: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]]) -> None:
        while True:
            call, is_done = calls.get()
            call()
            is_done.set()
            del call


_starter = _Starter()


def start_process(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that may `end_with_parent`: from a thread that lasts as long as this process.

    Args:
        command: argument vector, the program first.
        options: further arguments of `subprocess.Popen`.

    Raises:
        OSError: it cannot be started.
    """
    if threading.current_thread() is threading.main_thread():
        return subprocess.Popen(command, **options)
    started: list[subprocess.Popen[bytes]] = []
    errors: list[BaseException] = []

    def start() -> None:
        try:
            started.append(subprocess.Popen(command, **options))
        except BaseException as error:
            errors.append(error)

    _starter.run(start)
    if errors:
        raise errors[0]
    return started[0]


class ChildStarted(NamedTuple):
    """Event: the child has been started."""

    slot: int
    pid: int


class ChildRestarting(NamedTuple):
    """Event: the child has ended and will be started again after ``wait_s`` seconds."""

    slot: int
    status: int
    restarts: int
    wait_s: float


class ChildGaveUp(NamedTuple):
    """Event: the child has ended, for good or more often than allowed, and stays down."""

    slot: int
    status: int
    restarts: int


class ChildKilled(NamedTuple):
    """Event: the child was useless and has been killed; ChildRestarting or ChildGaveUp follows."""

    slot: int


ChildEvent: TypeAlias = ChildStarted | ChildRestarting | ChildGaveUp | ChildKilled


def log_end(name: str, event: ChildEvent) -> None:
    """Log that a child has ended, unless it has explained that itself.

    Args:
        name: the child, for the message.
        event: any event of it.
    """
    match event:
        case ChildRestarting(_, status, restarts, wait_s):
            logger.warning(
                "%s ended with %s; restart %d in %g s", name, status_text(status), restarts, wait_s
            )
        case ChildGaveUp(_, status, restarts) if status not in (WRONG_USAGE, HOPELESS):
            logger.error(
                "%s ended with %s after %d restarts: given up", name, status_text(status), restarts
            )


class _Child:
    """Successive processes of one slot.

    Attributes:
        process: the running process; None between two and at the end.
        due: time of the next start, by the monotonic clock; None if no start is planned.
        began: time when the last process was started.
        status: exit status of the last process.
        lacks_resources: True if the last start failed for a temporary lack of resources, which has been
            logged.
    """

    def __init__(self, restarts: Restarts) -> None:
        self.restarts = restarts
        self.process: subprocess.Popen[bytes] | None = None
        self.due: float | None = None
        self.began = 0.0
        self.status = 0
        self.lacks_resources = False


class Children:
    """Child processes, one for each slot. The owner calls `poll` repeatedly, and `stop` at the end.

    A child in slot 0 serves the others: it decides neither when they are over nor their statuses.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        slots: Iterable[int],
        *,
        max_restarts: int,
        on_event: Callable[[ChildEvent], None],
        log_path: Callable[[int], Path | None] | None = None,
        environment: Mapping[str, str] | None = None,
        has_worked: Callable[[int], bool] = lambda slot: True,
        connect: Callable[[int], socket.socket] | None = None,
        disconnect: Callable[[int], None] = lambda slot: None,
    ) -> None:
        """Prepare without starting any child yet.

        Args:
            command: slot -> argument vector, the program first; called before each start.
            slots: slots, with one child each.
            max_restarts: restarts in a row after which a child stays down.
            on_event: called with each event of a child.
            log_path: slot -> file to which its output is appended; None uses this process's output.
            environment: variables added to this process's environment.
            has_worked: slot -> False if its ended child has done no useful work.
            connect: slot -> socket that the next child of the slot inherits, whose descriptor is
                the last argument of its command; called before each start, closed here after it.
            disconnect: called with the slot of a child that has ended, before any event of its end.
        """
        self._command = command
        self._on_event = on_event
        self._log_path = log_path or (lambda slot: None)
        self._environment = environment or {}
        self._has_worked = has_worked
        self._connect = connect
        self._disconnect = disconnect
        self._max_restarts = max_restarts
        self._children = {slot: _Child(Restarts(max_restarts)) for slot in slots}
        self._is_stopping = False

    @property
    def pids(self) -> dict[int, int]:
        """Process id of every running child by slot."""
        return {slot: process.pid for slot, process in self._running().items()}

    @property
    def next_start(self) -> float | None:
        """Time of the next start, by the monotonic clock; None if no start is planned."""
        return min(
            (child.due for child in self._children.values() if child.due is not None), default=None
        )

    @property
    def is_over(self) -> bool:
        """True if no child runs and none will be started again, except in slot 0."""
        return all(
            child.due is None and child.process is None
            for slot, child in self._children.items()
            if slot
        )

    @property
    def statuses(self) -> set[int]:
        """Last exit statuses of all children, except in slot 0."""
        return {child.status for slot, child in self._children.items() if slot}

    def start(self) -> None:
        """Start every child.

        Raises:
            OSError: a child could not be started; those already running are killed.
        """
        try:
            for slot, child in self._children.items():
                self._start(slot, child)
        except OSError:
            self.stop(signal.SIGKILL)
            raise

    def add(self, slot: int) -> None:
        """Start a child in another slot.

        Raises:
            OSError: it could not be started.
        """
        child = _Child(Restarts(self._max_restarts))
        self._start(slot, child)
        self._children[slot] = child

    def poll(self) -> None:
        """Take note of children that have ended, and restart them when due."""
        for slot, child in self._children.items():
            if child.process is not None:
                status = child.process.poll()
                if status is None:
                    continue
                assert child.process.stdin is not None
                child.process.stdin.close()
                child.process = None
                child.status = status
                self._disconnect(slot)
                self._plan_restart(slot, child)
            elif child.due is not None and time.monotonic() >= child.due:
                self._start_again(slot, child)

    def kill(self, slot: int) -> None:
        """Kill a running but useless child; it is restarted like any child that a signal has
        ended.
        """
        process = self._running().get(slot)
        if process is not None:
            self._on_event(ChildKilled(slot))
            process.kill()

    def stop(self, number: int | None = None) -> None:
        """Start no child from now on, and send a signal to the running ones."""
        self._is_stopping = True
        for child in self._children.values():
            child.due = None
        if number is not None:
            for process in self._running().values():
                process.send_signal(number)

    def _running(self) -> dict[int, subprocess.Popen[bytes]]:
        processes = {slot: child.process for slot, child in self._children.items()}
        return {
            slot: process
            for slot, process in processes.items()
            if process is not None and process.poll() is None
        }

    def _start(self, slot: int, child: _Child) -> None:
        child.began = time.monotonic()
        child.due = None
        variables = {**os.environ, **self._environment}
        # A child that failed has reported that itself.
        if child.restarts.in_a_row and child.status != FAILED:
            variables[FORMER_END] = status_text(child.status)
        path = self._log_path(slot)
        with contextlib.ExitStack() as stack:
            output = None
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)  # it may have been removed meanwhile
                output = stack.enter_context(path.open("ab"))
            command = [*self._command(slot)]
            inherited = []
            if self._connect is not None:
                connection = stack.enter_context(self._connect(slot))
                inherited.append(connection.fileno())
                command.append(str(connection.fileno()))
            child.process = start_process(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=variables,
                start_new_session=True,
                pass_fds=inherited,
            )
        child.lacks_resources = False
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
            if not child.lacks_resources:
                child.lacks_resources = True
                logger.warning(
                    "worker process %d cannot be started for now (%s); trying again every %g s",
                    slot,
                    error.strerror,
                    _TRY_AGAIN_S,
                )

    def _plan_restart(self, slot: int, child: _Child) -> None:
        if self._is_stopping or child.status == RUN_IS_OVER:
            return
        now = time.monotonic()
        wait_s = child.restarts.pause_after(
            child.status, now - child.began, has_worked=self._has_worked(slot)
        )
        if wait_s is None:
            self._on_event(ChildGaveUp(slot, child.status, child.restarts.in_a_row))
        else:
            child.due = now + wait_s
            self._on_event(ChildRestarting(slot, child.status, child.restarts.in_a_row, wait_s))


def end_with_parent(*, life: int, grace_s: float = 0.0) -> None:
    """Let the kernel end this process when its parent is gone, even if a thread is stuck and keeps
    Python's lock.

    Call it in the main thread; the parent must have started this process with `start_process`.
    Without Linux, it does nothing, and only a thread of this process can notice the parent's end.

    Args:
        life: descriptor of a pipe of which the parent holds the other end.
        grace_s: seconds that an orderly end may take; the process is killed at once if there are
            none. SIGALRM ends it after more than them, so code that handles SIGALRM must not be
            stuck.
    """
    if sys.platform != "linux":
        return
    import ctypes  # the parent needs none

    number = signal.SIGKILL
    if grace_s:
        later = [signum for signum in (_SOON, _LATER) if signum is not None and signum > grace_s]
        if not later:
            return
        number = later[0]
    libc = ctypes.CDLL(None)
    if grace_s:
        # A handler of Python's would wait for the lock. The C library's `alarm` can be the handler
        # itself: it is called with the number of the signal, and so lets SIGALRM end this process
        # after that many seconds.
        libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        libc.signal.restype = ctypes.c_void_p
        libc.signal(number, ctypes.cast(libc.alarm, ctypes.c_void_p))
    libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number), 0, 0, 0)
    poll = select.poll()
    poll.register(life, select.POLLHUP)
    # The parent may have gone before the kernel knew which signal to send.
    if any(events & select.POLLHUP for _, events in poll.poll(0)):
        os.kill(os.getpid(), number)


def watch_parent(
    on_lost: Callable[[], object] = lambda: None,
    *,
    on_line: Callable[[str], object] = lambda line: None,
    grace_s: float = 2.0,
) -> threading.Thread:
    """Start a thread that ends this process when its parent is gone; if it cannot, the kernel does
    a little later.

    Standard input belongs to that thread. Other readers of `sys.stdin`, such as `input` and
    `breakpoint`, find it empty instead of waiting for the parent's end.

    Args:
        on_lost: called once in that thread when the parent is gone, for an orderly end.
        on_line: called in that thread with each line that the parent writes.
        grace_s: seconds for `on_lost` before the process ends with status 3.
    """
    life = sys.stdin.fileno()

    def wait_for_end() -> None:
        # A separate reader, because a daemon thread must not hold the lock of sys.stdin when Python
        # shuts down.
        with open(life, encoding="utf-8", errors="replace", closefd=False) as lines:
            for line in lines:
                on_line(line)
        try:
            on_lost()
        finally:
            threading.Event().wait(grace_s)
            os._exit(3)

    end_with_parent(life=life, grace_s=grace_s)
    thread = threading.Thread(target=wait_for_end, name="parent-watch", daemon=True)
    thread.start()
    sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))
    return thread
