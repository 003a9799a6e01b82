"""Keeps worker processes running that were started by hand: the small parent of each.

It loads next to nothing: what ends a worker (an abort in a C library, a kill, a lack of memory) does not reach it, and
it costs little beside the worker. There is no event loop here, since `asyncio` alone would double its size. For the
learner's own workers, see `supervisor`.

Children are in sessions of their own, so that a terminal's Ctrl-C reaches only the parent, and have a pipe as standard
input that ends when the parent does: see ``parent_watch``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence

from aiorl.process.children import (
    FAILED,
    HOPELESS,
    RUN_IS_OVER,
    TRY_AGAIN_S,
    WRONG_USAGE,
    Restarts,
    may_pass,
    status_text,
)

logger = logging.getLogger(__name__)

_TWICE_S = 0.5


class _Child:
    """One worker process after the other.

    Attributes:
        process: the one that runs, None between two and at the end.
        due: when the next one is to be started; None if there is none to come.
        status: exit status of the last one.
        is_lacking: the next one could not be started for a lack that may pass, which was told.
    """

    def __init__(self, number: int, restarts: Restarts) -> None:
        self.number = number
        self.restarts = restarts
        self.process: subprocess.Popen[bytes] | None = None
        self.due: float | None = 0.0
        self.began = 0.0
        self.status = 0
        self.is_lacking = False

    @property
    def is_over(self) -> bool:
        return self.process is None and self.due is None


class Keeper:
    """Runs copies of one command, and starts again those that end before they should."""

    def __init__(
        self,
        command: Sequence[str],
        num_children: int,
        max_restarts: int,
        *,
        leave_s: float = 6.0,
        try_again_s: float = TRY_AGAIN_S,
    ) -> None:
        """Nothing is started yet.

        Args:
            command: argument vector, the program first.
            num_children: how many copies of it.
            max_restarts: restarts in a row after which one stays down.
            leave_s: seconds that children get for an orderly end before they are killed.
            try_again_s: seconds after which a start is tried again that failed for a lack of processes or the like.
        """
        self._command = list(command)
        self._children = [_Child(number, Restarts(max_restarts)) for number in range(1, num_children + 1)]
        self._leave_s = leave_s
        self._try_again_s = try_again_s
        self._signals: list[int] = []
        self._stopped_at: float | None = None
        self._status = 0

    def run(self) -> int:
        """Keep the children running until all have ended for good or SIGINT or SIGTERM comes.

        Takes over this process's signals; to be called in its main thread, once.

        Returns: the exit status: 0 the run is over or a signal came, 1 every child failed, 2 wrong usage.

        Raises:
            OSError: the program cannot be started.
        """
        wake, self._wake = os.pipe()
        for end in (wake, self._wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, self._note_signal)
        while True:
            now = time.monotonic()
            self._heed_signals(now)
            for child in self._children:
                self._look_after(child, now)
            if all(child.is_over for child in self._children):
                return self._end_status()
            select.select([wake], [], [], self._wait_s(now))
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)

    # Signals --------------------------------------------------------------------------------------------------

    def _note_signal(self, number: int, frame: object) -> None:
        if number != signal.SIGCHLD:
            self._signals.append(number)

    def _heed_signals(self, now: float) -> None:
        """The first asks the children to leave, a later one kills them, and so does time."""
        while self._signals:
            number = self._signals.pop(0)
            if self._stopped_at is None:
                self._stopped_at = now
                self._tell_all(signal.SIGTERM)
            elif now - self._stopped_at > _TWICE_S:  # `timeout` sends it to a process and again to its group
                self._status = 128 + number
                self._tell_all(signal.SIGKILL)
        if self._stopped_at is not None and now - self._stopped_at >= self._leave_s:
            self._tell_all(signal.SIGKILL)

    def _tell_all(self, number: int) -> None:
        for child in self._children:
            child.due = None
            if child.process is not None:
                child.process.send_signal(number)

    def _wait_s(self, now: float) -> float | None:
        dues = [child.due for child in self._children if child.due is not None]
        if self._stopped_at is not None:
            dues.append(max(self._stopped_at + self._leave_s, now + 0.1))
        return max(0.0, min(dues) - now) if dues else None

    # Children -------------------------------------------------------------------------------------------------

    def _look_after(self, child: _Child, now: float) -> None:
        if child.process is not None:
            status = child.process.poll()
            if status is None:
                return
            assert child.process.stdin is not None
            child.process.stdin.close()
            child.process, child.status = None, status
            if self._stopped_at is None:
                self._plan_restart(child, now)
        elif child.due is not None and now >= child.due:
            self._start(child, now)

    def _start(self, child: _Child, now: float) -> None:
        is_first, child.began, child.due = child.began == 0.0, now, None
        try:
            child.process = subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True)
        except OSError as error:
            if is_first:
                self._tell_all(signal.SIGKILL)
                raise
            self._plan_start_after(error, child, now)
            return
        child.is_lacking = False
        if len(self._children) > 1:
            logger.info("worker process %d of %d runs (pid %d)", child.number, len(self._children), child.process.pid)

    def _plan_start_after(self, error: OSError, child: _Child, now: float) -> None:
        if not may_pass(error):
            logger.warning("worker process%s could not be started: %s", self._name(child), error)
            child.status = FAILED
            self._plan_restart(child, now)
            return
        child.due = now + self._try_again_s
        if not child.is_lacking:
            child.is_lacking = True
            text = "worker process%s can't be started for now (%s); tried again every %g s"
            logger.warning(text, self._name(child), error.strerror, self._try_again_s)

    def _plan_restart(self, child: _Child, now: float) -> None:
        pause_s = child.restarts.pause_after(child.status, now - child.began)
        if pause_s is not None:
            child.due = now + pause_s
            logger.warning(
                "worker process%s ended with %s; restart %d in %g s",
                self._name(child), status_text(child.status), child.restarts.in_a_row, pause_s,
            )  # fmt: skip
        elif child.status not in (RUN_IS_OVER, WRONG_USAGE, HOPELESS):  # which have been explained already
            logger.error(
                "worker process%s ended with %s after %d restarts: given up",
                self._name(child), status_text(child.status), child.restarts.in_a_row,
            )  # fmt: skip

    def _name(self, child: _Child) -> str:
        return f" {child.number}" if len(self._children) > 1 else ""

    def _end_status(self) -> int:
        if self._stopped_at is not None:
            return self._status
        statuses = {child.status for child in self._children}
        if RUN_IS_OVER in statuses:
            return 0
        return WRONG_USAGE if statuses == {WRONG_USAGE} else FAILED
