"""Workers of the learner's own: started here, watched, restarted and ended; what their failures mean to a run."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from aiorl.config.schema import CommonConfig
from aiorl.errors import WorkerError
from aiorl.net.protocol.events import WorkerFailed
from aiorl.net.protocol.learner_session import LearnerSession
from aiorl.process.children import (
    FAILED,
    ChildEvent,
    ChildGaveUp,
    ChildKilled,
    Children,
    ChildRestarting,
    ChildStarted,
    status_text,
)
from aiorl.process.imports import child_python
from aiorl.process.tasks import Tasks
from aiorl.run.service import EventRates
from aiorl.text import without_numbers

if TYPE_CHECKING:
    from aiorl.run.remote_source import RemoteSource

logger = logging.getLogger(__name__)

HINT = "with ignore_worker_failures (--ignore-worker-failures) a run goes on with its other workers"
"""Advice in an error with which failures of workers end a run."""

_JOIN_WITHIN_S = 120.0
_LOOK_EVERY_S, _END_EVERY_S = 0.1, 0.02


class LocalWorkers:
    """Worker processes of slots 1 to ``num_workers``.

    One that runs but is not among the registered workers any more, since it was stopped or is stuck, is killed and
    started again.

    Attributes:
        given_up: slots whose worker failed too often and stays down.
        may_be_lost: workers can be registered now, so that one that is not is lost.
    """

    def __init__(
        self,
        num_workers: int,
        address: str,
        session: LearnerSession,
        *,
        max_restarts: int,
        environment: dict[str, str],
        log_path: Callable[[int], Path],
        on_event: Callable[[ChildEvent], None],
        on_failure: Callable[[BaseException], None],
        come_back_s: float = 5.0,
    ) -> None:
        """Get ready to start them.

        Args:
            num_workers: how many.
            address: where they connect to.
            session: keeps slots for them, and knows who is registered.
            max_restarts: restarts in a row after which a worker is given up.
            environment: variables added to theirs.
            log_path: slot -> log file.
            on_event: told of starts, restarts and surrenders.
            on_failure: told of an error of ours, after which workers may not be looked after any more.
            come_back_s: seconds in which a worker that was lost may register again, or end, before it is killed; one
                whose process is stopped gets none.
        """
        self.given_up: dict[int, int] = {}
        self.may_be_lost = False
        self._address = address
        self._session = session
        self._on_event = on_event
        self._come_back_s = come_back_s
        self._worker_ids: dict[int, str] = {}
        self._absent: dict[int, tuple[int, float]] = {}
        self._has_joined: dict[int, int] = {}
        self._worked: set[int] = set()
        self._tasks = Tasks(on_failure)
        self._children = Children(
            self._command,
            range(1, num_workers + 1),
            max_restarts=max_restarts,
            log_path=log_path,
            on_event=self._handle,
            environment=environment,
            has_worked=self.has_worked,
        )

    @property
    def pids(self) -> dict[int, int]:
        """Process id of every running worker by slot."""
        return self._children.pids

    def has_worked(self, slot: int) -> bool:
        """Whether the process of a slot that was started last has brought a fragment."""
        return slot in self._worked

    async def start(self) -> None:
        """Start every worker.

        Raises:
            OSError: a process cannot be started.
        """
        self._children.start()
        self._tasks.start(self._look_after(), "local-workers")

    async def stop(self, grace_s: float) -> None:
        """End every worker: those that do not leave by themselves within ``grace_s`` by signal.

        From the call on, none is started again.
        """
        self._children.stop()
        try:
            for wait_s, number in ((grace_s, signal.SIGTERM), (min(1.0, grace_s), signal.SIGKILL), (5.0, None)):
                for _ in range(round(wait_s / _END_EVERY_S)):
                    self._children.look()
                    if not self._children.pids:
                        return
                    await asyncio.sleep(_END_EVERY_S)
                self._children.stop(number)
        finally:
            await self._tasks.close()

    def _command(self, slot: int) -> list[str]:
        worker_id = self._worker_ids[slot] = secrets.token_hex(8)
        self._session.reserve_slot(slot, worker_id)
        command = [*child_python("aiorl.worker"), "--connect", self._address]
        return [*command, "--slot", str(slot), "--worker-id", worker_id, "--exit-with-parent"]

    def _handle(self, event: ChildEvent) -> None:
        match event:
            case ChildRestarting(slot, status) | ChildGaveUp(slot, status):
                reason = f"its process ended with {status_text(status)}"
                self._session.lose_worker_id(self._worker_ids[slot], reason, time.monotonic())
                if isinstance(event, ChildGaveUp):
                    self.given_up[slot] = status
            case ChildStarted(slot):
                self.given_up.pop(slot, None)
                self._worked.discard(slot)
        self._on_event(event)

    async def _look_after(self) -> None:
        looked_s = 0.0  # only time in which we looked counts: nobody can register while this process stands still
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self._children.look()
            looked_s += _LOOK_EVERY_S
            if self.may_be_lost:
                self._kill_lost(self._session.slots, looked_s)

    def _kill_lost(self, registered: Container[int], now: float) -> None:
        """Kill who was here and does not come back, or has not come for long after its start."""
        for slot, pid in self.pids.items():
            if slot in registered:
                self._has_joined[slot] = pid
                self._absent.pop(slot, None)
                if self._session.has_brought(slot):
                    self._worked.add(slot)
                continue
            if self._absent.get(slot, (0, 0.0))[0] != pid:
                self._absent[slot] = (pid, now)
            within_s = _JOIN_WITHIN_S
            if self._has_joined.get(slot) == pid:
                within_s = 0.0 if _is_stopped(pid) else self._come_back_s
            if now - self._absent[slot][1] > within_s:
                del self._absent[slot]
                self._children.kill(slot)


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except (psutil.Error, OSError):  # it has ended, or there are no descriptors left to look
        return False


class WorkerFailures:
    """Judges what workers say of failures of their own, and the ends of the processes of local ones."""

    def __init__(
        self,
        config: CommonConfig,
        worker_log: Callable[[int], Path],
        *,
        tell: Callable[[str, int], None],
        source: RemoteSource,
    ) -> None:
        """No worker has failed yet.

        Args:
            config: the run's configuration.
            worker_log: slot -> log file of a local worker.
            tell: told (text, logging level) what users want to know.
            source: knows all workers, and ends the run where it can't go on.
        """
        self._ignores = config.ignore_worker_failures
        self._max_restarts = config.max_worker_restarts
        self._local = range(1, config.num_workers + 1)
        self._worker_log = worker_log
        self._tell = tell
        self._source = source
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
        if len(said) == 1 and not self._source.has_sampled() and not self._source.has_others(self._local):
            every = "the only worker" if len(self._local) == 1 else f"each of the {len(self._local)} workers"
            message = f"{failed.message} ({every} failed so before anything was sampled; log: {self._worker_log(slot)})"
            self._source.fail(WorkerError(slot, message, failed.traceback))

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
                if self._ignores and self._source.has_others({slot}):
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
        self._source.fail(WorkerError(slot, f"{message} (log: {self._worker_log(slot)}){hint}", traceback))
