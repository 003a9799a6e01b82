"""Small parent process that keeps workers running that were started by hand.

It loads almost nothing. Events that end a worker (an abort in a C library, a kill, a lack of
memory) do not reach it, and it costs little compared with the worker. `asyncio` alone would double
its size.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from aiorl.process.children import (
    FAILED,
    HOPELESS,
    RUN_IS_OVER,
    WRONG_USAGE,
    ChildEvent,
    Children,
    ChildStarted,
    log_end,
)
from aiorl.process.program import REPEATED_S, status_after, stop_signals

logger = logging.getLogger(__name__)


class Keeper:
    """Runs workers, and restarts those that end too early."""

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        slots: range,
        max_restarts: int,
        *,
        leave_s: float = 6.0,
        log_path: Callable[[int], Path | None] | None = None,
    ) -> None:
        """Prepare without starting any child yet.

        Args:
            command: slot -> argument vector, the program first.
            slots: a worker in each from 1 on. In slot 0, a process that serves them, and ends when
                this one does.
            max_restarts: restarts in a row after which a child stays down.
            leave_s: seconds that children get for an orderly end before they are killed.
            log_path: slot -> file to which its output is appended; None uses this process's output.
        """
        self._children = Children(
            command, slots, max_restarts=max_restarts, on_event=self._log_event, log_path=log_path
        )
        self._is_single = len(slots) == 1
        self._leave_s = leave_s
        self._signals: list[int] = []
        self._stopped_at: float | None = None
        self._status = 0

    def run(self) -> int:
        """Keep the children running until all have ended for good or a stop signal arrives.

        Takes over this process's signals; call it once, in the main thread.

        Returns:
            The exit status: 0 the run is over; 1 every child failed; 2 wrong usage, or no child
            could ever succeed; 128 plus the number of the signal that ended the children.

        Raises:
            OSError: the program could not be started.
        """
        # Python writes to this pipe at each signal; one that comes just before `select` would not
        # end it otherwise.
        reader, writer = os.pipe()
        for end in (reader, writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (*stop_signals(), signal.SIGCHLD):
            signal.signal(number, self._note_signal)
        self._children.start()
        while True:
            now = time.monotonic()
            self._obey_signals(now)
            self._children.poll()
            if self._children.is_over:
                return self._end_status()
            select.select([reader], [], [], self._wait_s(now))
            with contextlib.suppress(BlockingIOError):
                os.read(reader, 4096)

    def _note_signal(self, number: int, frame: object) -> None:
        if number != signal.SIGCHLD:
            self._signals.append(number)

    def _obey_signals(self, now: float) -> None:
        """Ask the children to leave at the first signal; kill them at a later one or when their
        time is over.
        """
        while self._signals:
            number = self._signals.pop(0)
            if self._stopped_at is None:
                self._stopped_at = now
                self._status = status_after(number)
                self._children.stop(signal.SIGTERM)
            elif now - self._stopped_at > REPEATED_S:
                self._status = status_after(number)
                self._children.stop(signal.SIGKILL)
        if self._stopped_at is not None and now - self._stopped_at >= self._leave_s:
            self._children.stop(signal.SIGKILL)

    def _wait_s(self, now: float) -> float | None:
        if self._stopped_at is not None:
            return max(self._stopped_at + self._leave_s - now, 0.1)
        due = self._children.next_start
        return None if due is None else max(0.0, due - now)

    def _log_event(self, event: ChildEvent) -> None:
        name = "relay"
        if self._is_single:
            name = "worker process"
        elif event.slot:
            name = f"worker process {event.slot}"
        if isinstance(event, ChildStarted) and not self._is_single:
            logger.info("%s runs (pid %d)", name, event.pid)
        log_end(name, event)

    def _end_status(self) -> int:
        statuses = self._children.statuses
        if RUN_IS_OVER in statuses:
            return 0
        if self._stopped_at is not None:
            return self._status
        return WRONG_USAGE if statuses <= {WRONG_USAGE, HOPELESS} else FAILED
