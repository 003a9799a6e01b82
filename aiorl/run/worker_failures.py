"""What it means for a run that a worker fails: it is told, training goes on without it, or the run ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container
from pathlib import Path

from aiorl.config.schema import CommonConfig
from aiorl.errors import WorkerError
from aiorl.net.protocol.events import WorkerFailed
from aiorl.net.protocol.rates import EventRates
from aiorl.process.restarts import FAILED, status_text
from aiorl.process.supervisor import ChildEvent, ChildGaveUp, ChildKilled, ChildRestarting
from aiorl.text import without_numbers

__all__ = ["HINT", "WorkerFailures"]

logger = logging.getLogger(__name__)

HINT = "with ignore_worker_failures (--ignore-worker-failures) a run goes on with its other workers"
"""What an error that a failure of workers ends a run with tells beside."""


class WorkerFailures:
    """Judges what workers say of failures of their own, and the ends of the processes of local ones."""

    def __init__(
        self,
        config: CommonConfig,
        worker_log: Callable[[int], Path],
        *,
        tell: Callable[[str, int], None],
        fail: Callable[[BaseException], None],
        has_others: Callable[[Container[int]], bool],
        has_sampled: Callable[[], bool],
    ) -> None:
        """No worker has failed yet.

        Args:
            config: the run's configuration.
            worker_log: slot -> log file of a local worker.
            tell: told (text, logging level) what users want to know.
            fail: ends the run with an error.
            has_others: whether any worker of another slot than these is registered or runs.
            has_sampled: whether any worker has brought a fragment.
        """
        self._ignores = config.ignore_worker_failures
        self._max_restarts = config.max_worker_restarts
        self._local = range(1, config.num_workers + 1)
        self._worker_log = worker_log
        self._tell = tell
        self._fail = fail
        self._has_others = has_others
        self._has_sampled = has_sampled
        self._said: dict[int, str] = {}  # of local workers: what each reported last
        self._rates = EventRates()

    def on_failed(self, failed: WorkerFailed) -> None:
        """A worker reports a failure of its own, which is told already.

        What would fail the same way again ends the run at once: a worker of this host that could not be set up, or an
        environment that has failed in every worker before anything was sampled.
        """
        slot = failed.slot
        if slot not in self._local:  # others may be there only by mistake
            return
        self._said[slot] = failed.message  # its process may be gone when this is heard
        if failed.kind == "setup" and not self._ignores:
            self._end(slot, failed.message, failed.traceback)
            return
        said = {without_numbers(self._said[other]) if other in self._said else None for other in self._local}
        if len(said) == 1 and not self._has_sampled() and not self._has_others(self._local):
            every = "the only worker" if len(self._local) == 1 else f"each of the {len(self._local)} workers"
            message = f"{failed.message} ({every} failed so before anything was sampled; log: {self._worker_log(slot)})"
            self._fail(WorkerError(slot, message, failed.traceback))

    def on_child(self, event: ChildEvent) -> None:
        """The process of a local worker has started, ended or was given up."""
        match event:
            case ChildRestarting(slot, status, restarts, wait_s):
                text = (
                    f"local worker {slot} ended with {status_text(status)}; restart {restarts} of "
                    f"{self._max_restarts} in {wait_s:g} s"
                )
                # who fails has said so before it ended, and many do so alike
                what = without_numbers(self._said.get(slot, "")) if status == FAILED else None
                if self._rates.allow("restarts", slot, time.monotonic(), what=what):
                    self._tell(text, logging.WARNING)
                else:
                    logger.warning("%s", text, extra={"shown": True})
            case ChildGaveUp(slot, status, restarts):
                text = f"local worker {slot} ended with {status_text(status)} after {restarts} restarts and stays down"
                text += f"; it last reported: {self._said[slot]}" if slot in self._said else ""
                if self._ignores and self._has_others({slot}):
                    text = f"{text}; training goes on with the others (log: {self._worker_log(slot)})"
                    self._tell(text, logging.ERROR)
                else:
                    self._end(slot, text)
            case ChildKilled(slot):
                self._tell(f"local worker {slot} is lost, but its process runs: it is killed", logging.WARNING)
            case _:
                logger.info("%s", event)

    def _end(self, slot: int, message: str, traceback: str = "") -> None:
        hint = "" if self._ignores else f"; {HINT}"
        self._fail(WorkerError(slot, f"{message} (log: {self._worker_log(slot)}){hint}", traceback))
