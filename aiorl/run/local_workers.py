"""Workers of the learner's own: started here, watched, restarted and ended; what their failures mean to a run."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import time
from collections.abc import Container
from typing import TYPE_CHECKING

import psutil

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
from aiorl.process.imports import child_python, python_path
from aiorl.process.log_once import EventRates
from aiorl.process.tasks import Tasks
from aiorl.text import without_numbers

if TYPE_CHECKING:
    from aiorl.run.training import Training

logger = logging.getLogger(__name__)

HINT = "with ignore_worker_failures (--ignore-worker-failures) a run goes on with its other workers"
"""Advice in an error with which failures of workers end a run."""

_JOIN_WITHIN_S = 120.0
_LOOK_EVERY_S, _END_EVERY_S = 0.1, 0.02


class LocalWorkers:
    """Worker processes of slots 1 to ``num_workers``.

    One that runs but is not among the registered workers any more, since it was stopped or is stuck, is killed and
    started again. One that would fail the same way again, or is given up, ends the training.

    Attributes:
        given_up: slots whose worker failed too often and stays down.
        may_be_lost: workers can be registered now, so that one that is not is lost.
        come_back_s: seconds in which a worker that was lost may register again, or end, before it is killed; one whose
            process is stopped gets none.
    """

    def __init__(self, training: Training, session: LearnerSession, address: str) -> None:
        """Get ready to start them.

        Args:
            training: the training that they sample for; its config says how many.
            session: keeps slots for them, and knows who is registered.
            address: where they connect to.
        """
        config = training.config
        self.given_up: set[int] = set()
        self.may_be_lost = False
        self.come_back_s = 5.0
        self._training = training
        self._config = config
        self._session = session
        self._address = address
        self._slots = range(1, config.num_workers + 1)
        self._steps_before = training.counters.env_steps_sampled
        self._worker_ids: dict[int, str] = {}
        self._absent: dict[int, tuple[int, float]] = {}
        self._has_joined: dict[int, int] = {}
        self._worked: set[int] = set()
        self._said: dict[int, str] = {}  # what each reported last
        self._rates = EventRates()
        self._tasks = Tasks(training.fail)
        self._children = Children(
            self._command,
            self._slots,
            max_restarts=config.max_worker_restarts,
            log_path=training.directory.worker_log,
            on_event=self.on_child,
            environment={
                **python_path(),
                "OMP_NUM_THREADS": str(config.num_cpus_per_worker),
                **config.extra_python_environs_for_worker,
            },
            has_worked=self._worked.__contains__,  # the process that was started last has brought a fragment
        )

    @property
    def pids(self) -> dict[int, int]:
        """Process id of every running worker by slot."""
        return self._children.pids

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
                    if self._children.is_over:
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

    async def _look_after(self) -> None:
        looked_s = 0.0  # only time in which we looked counts: nobody can register while this process stands still
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            looked_s += _LOOK_EVERY_S
            self.look(looked_s)

    def look(self, now: float) -> None:
        """Take note of workers that have ended.

        Kill who was registered and doesn't come back, or hasn't come for long after its start.
        """
        self._children.look()
        if not self.may_be_lost:
            return
        registered = self._session.slots
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
                within_s = 0.0 if _is_stopped(pid) else self.come_back_s
            if now - self._absent[slot][1] > within_s:
                del self._absent[slot]
                self._children.kill(slot)

    def on_failed(self, failed: WorkerFailed) -> None:
        """A worker reports a failure of its own, which is told already.

        What would fail the same way again ends the run at once: a worker of this host that could not be set up, or an
        environment that has failed in every worker before anything was sampled.
        """
        slot = failed.slot
        if slot not in self._slots:  # others may be there only by mistake
            return
        self._said[slot] = failed.message  # its process may be gone when this is heard
        if failed.kind == "setup" and not self._config.ignore_worker_failures:
            self._end(slot, failed.message, failed.traceback)
            return
        said = {without_numbers(self._said[other]) if other in self._said else None for other in self._slots}
        has_sampled = self._training.counters.env_steps_sampled > self._steps_before
        if len(said) == 1 and not has_sampled and not self._has_others(self._slots):
            every = "the only worker" if len(self._slots) == 1 else f"each of the {len(self._slots)} workers"
            log = self._training.directory.worker_log(slot)
            message = f"{failed.message} ({every} failed so before anything was sampled; log: {log})"
            self._training.fail(WorkerError(slot, message, failed.traceback))

    def on_child(self, event: ChildEvent) -> None:
        """The process of a worker has started, ended, was killed or given up."""
        tell, slot = self._training.tell, event.slot
        if isinstance(event, ChildRestarting | ChildGaveUp):
            reason = f"its process ended with {status_text(event.status)}"
            self._session.lose_worker_id(self._worker_ids[slot], reason, time.monotonic())
        match event:
            case ChildStarted():
                self.given_up.discard(slot)
                self._worked.discard(slot)
                logger.info("%s", event)
            case ChildRestarting(_, status, restarts, wait_s):
                restart = f"restart {restarts} of {self._config.max_worker_restarts} in {wait_s:g} s"
                text = f"local worker {slot} ended with {status_text(status)}; {restart}"
                # who fails has said so before it ended, and many do so alike
                what = without_numbers(self._said.get(slot, "")) if status == FAILED else None
                if self._rates.allow("restarts", slot, time.monotonic(), what=what):
                    tell(text, logging.WARNING)
                else:
                    logger.warning("%s", text, extra={"shown": True})
            case ChildGaveUp(_, status, restarts):
                self.given_up.add(slot)
                text = f"local worker {slot} ended with {status_text(status)} after {restarts} restarts and stays down"
                text += f"; it last reported: {self._said[slot]}" if slot in self._said else ""
                if self._config.ignore_worker_failures and self._has_others({slot}):
                    log = self._training.directory.worker_log(slot)
                    tell(f"{text}; training goes on with the others (log: {log})", logging.ERROR)
                else:
                    self._end(slot, text)
            case ChildKilled():
                tell(f"local worker {slot} is lost, but its process runs: it is killed", logging.WARNING)

    def _has_others(self, slots: Container[int]) -> bool:
        """Return whether any worker of another slot than these is registered or runs."""
        return any(slot not in slots for slot in (*self._session.slots, *self.pids))

    def _end(self, slot: int, message: str, traceback: str = "") -> None:
        hint = "" if self._config.ignore_worker_failures else f"; {HINT}"
        log = self._training.directory.worker_log(slot)
        self._training.fail(WorkerError(slot, f"{message} (log: {log}){hint}", traceback))


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except (psutil.Error, OSError):  # it has ended, or there are no descriptors left to look
        return False
