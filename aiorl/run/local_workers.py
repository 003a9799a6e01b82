"""Local workers of the learner: starting, watching, restarting and ending them, and handling their
failures.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Container
from functools import partial

import psutil

from aiorl.config.parts import SamplePart
from aiorl.errors import ConfigError, WorkerError
from aiorl.net.protocol.events import WorkerFailed
from aiorl.net.protocol.learner_session import LearnerSession
from aiorl.process.children import (
    FAILED,
    WORKERS_TOGETHER,
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
from aiorl.process.tasks import Tasks, end_children
from aiorl.run.ports import TrainingView
from aiorl.text import without_numbers

logger = logging.getLogger(__name__)

HINT = (
    "with ignore_worker_failures (--ignore-worker-failures) a run continues with its other workers"
)
"""Advice in the error that ends a run after worker failures."""

_JOIN_WITHIN_S = 120.0
_LOOK_EVERY_S = 0.1


class LocalWorkers:
    """Worker processes of slots 1 to ``num_workers``, and of those that are added.

    A worker that runs but is no longer registered, because it was stopped or is stuck, is killed
    and started again. A worker that would fail the same way again, or that failed too often, ends
    the training.

    Attributes:
        slots: slots of the workers.
        given_up: slots of workers that failed too often and stay down.
        may_be_lost: True once workers can register, so that an unregistered worker counts as lost.
        come_back_s: seconds in which a lost worker can register again or end before it is killed. A
            stopped process is killed immediately.
    """

    def __init__(
        self, training: TrainingView, session: LearnerSession, address: str, sample: SamplePart
    ) -> None:
        """Prepare to start the workers.

        Args:
            training: the training that they sample for.
            session: reserves slots for them and knows the registered workers.
            address: address that they connect to.
            sample: how many workers there are, and what follows from a failure.
        """
        self.slots = list(range(1, sample.num_workers + 1))
        self.given_up: set[int] = set()
        self.may_be_lost = False
        self.come_back_s = 5.0
        self._training = training
        self._session = session
        self._sample = sample
        self._steps_before = training.counters.env_steps_sampled
        self._worker_ids: dict[int, str] = {}
        self._absent: dict[int, tuple[int, float]] = {}
        self._has_joined: dict[int, int] = {}
        self._worked: set[int] = set()
        self._failures: dict[int, str] = {}  # slot -> last failure
        self._rates = EventRates()
        self._tasks = Tasks(training.fail)
        self._children = Children(
            partial(self._command, address),
            self.slots,
            max_restarts=sample.max_worker_restarts,
            log_path=training.directory.worker_log,
            on_event=self.on_child,
            environment={
                **python_path(),
                "OMP_NUM_THREADS": str(sample.num_cpus_per_worker),
                WORKERS_TOGETHER: str(sample.num_workers),
                **sample.worker_environ,
            },
            # slots where the newest process has sent a fragment
            has_worked=self._worked.__contains__,
        )

    @property
    def pids(self) -> dict[int, int]:
        """Process id of every running worker by slot."""
        return self._children.pids

    async def start(self) -> None:
        """Start every worker.

        Raises:
            OSError: a process could not be started.
        """
        self._children.start()
        self._tasks.start(self._look_after(), "local-workers")

    def add(self, count: int) -> set[int]:
        """Start more workers in free slots, which they keep like those of the start.

        Returns:
            Their slots.

        Raises:
            ConfigError: the run has no room for them.
            OSError: a process could not be started; those before it are.
        """
        added: set[int] = set()
        for _ in range(count):
            slot = self._session.free_slot()
            if not slot:
                most = self._session.settings.max_workers
                raise ConfigError(
                    f"no worker can be added: a run has at most {most}.", key="num_workers"
                )
            self.slots.append(slot)
            self._children.add(slot)
            added.add(slot)
        return added

    async def stop(self, grace_s: float) -> None:
        """End every worker; those that do not leave by themselves within ``grace_s`` seconds are
        ended by signal.

        No worker is started again after this call.
        """
        try:
            await end_children([self._children], grace_s)
        finally:
            await self._tasks.close()

    def _command(self, address: str, slot: int) -> list[str]:
        worker_id = self._worker_ids[slot] = secrets.token_hex(8)
        self._session.reserve_slot(slot, worker_id)
        command = [*child_python("aiorl.worker"), "--connect", address]
        return [*command, "--slot", str(slot), "--worker-id", worker_id, "--exit-with-parent"]

    async def _look_after(self) -> None:
        # counts only the time spent looking: no one can register while this process is stopped
        looked_s = 0.0
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            looked_s += _LOOK_EVERY_S
            self.look(looked_s)

    def look(self, now: float) -> None:
        """Take note of workers that have ended, and kill those that are lost.

        A worker is lost if it was registered and does not come back, or if it does not register
        long after its start.
        """
        self._children.poll()
        if not self.may_be_lost:
            return
        registered = self._session.slots
        for slot, pid in self.pids.items():
            if slot in registered:
                self._has_joined[slot] = pid
                self._absent.pop(slot, None)
                if self._session.has_sent(slot):
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
        """Handle a failure that a worker reports of itself and that the user has been informed of.

        A failure that would repeat ends the run immediately: a local worker could not be set up, or
        the environment failed in every worker before anything was sampled.
        """
        slot = failed.slot
        if slot not in self.slots:  # not a local worker
            return
        self._failures[slot] = failed.message  # its process may have ended already
        if failed.kind == "setup" and not self._sample.ignore_worker_failures:
            self._end(slot, failed.message, failed.traceback)
            return
        failures = {
            without_numbers(self._failures[other]) if other in self._failures else None
            for other in self.slots
        }
        has_sampled = self._training.counters.env_steps_sampled > self._steps_before
        if len(failures) == 1 and not has_sampled and not self._has_others(self.slots):
            every = f"each of the {len(self.slots)} workers"
            if len(self.slots) == 1:
                every = "the only worker"
            log = self._training.directory.worker_log(slot)
            message = (
                f"{failed.message} ({every} failed this way before anything was sampled; log:"
                f" {log})"
            )
            self._training.fail(WorkerError(slot, message, failed.traceback))

    def on_refused(self, slot: int, reason: str) -> None:
        """Take note of why a fragment of a worker was refused, which ends its process."""
        if slot in self.slots:
            self._failures[slot] = f"it sent a malformed fragment: {reason}"

    def on_child(self, event: ChildEvent) -> None:
        """Handle the start, end, kill or final failure of a worker's process."""
        tell = self._training.tell
        slot = event.slot
        if isinstance(event, ChildRestarting | ChildGaveUp):
            reason = f"its process ended with {status_text(event.status)}"
            self._session.mark_process_lost(self._worker_ids[slot], reason, time.monotonic())
        match event:
            case ChildStarted():
                self.given_up.discard(slot)
                self._worked.discard(slot)
                logger.info("%s", event)
            case ChildRestarting(_, status, restarts, wait_s):
                restart = (
                    f"restart {restarts} of {self._sample.max_worker_restarts} in {wait_s:g} s"
                )
                text = f"local worker {slot} ended with {status_text(status)}; {restart}"
                # a failing worker has reported its failure before, and many fail alike
                what = without_numbers(self._failures.get(slot, "")) if status == FAILED else None
                if self._rates.allow("restarts", slot, time.monotonic(), what=what):
                    tell(text, logging.WARNING)
                else:
                    logger.warning("%s", text, extra={"shown": True})
            case ChildGaveUp(_, status, restarts):
                self.given_up.add(slot)
                text = (
                    f"local worker {slot} ended with {status_text(status)} after {restarts}"
                    " restarts and stays down"
                )
                if slot in self._failures:
                    text += f"; its last failure: {self._failures[slot]}"
                if self._sample.ignore_worker_failures and self._has_others({slot}):
                    log = self._training.directory.worker_log(slot)
                    tell(f"{text}; training continues with the others (log: {log})", logging.ERROR)
                else:
                    self._end(slot, text)
            case ChildKilled():
                tell(
                    f"local worker {slot} is lost, but its process still runs: killing it",
                    logging.WARNING,
                )

    def _has_others(self, slots: Container[int]) -> bool:
        """Return True if a worker of any other slot is registered or runs."""
        return any(slot not in slots for slot in (*self._session.slots, *self.pids))

    def _end(self, slot: int, message: str, traceback: str = "") -> None:
        hint = "" if self._sample.ignore_worker_failures else f"; {HINT}"
        log = self._training.directory.worker_log(slot)
        self._training.fail(WorkerError(slot, f"{message} (log: {log}){hint}", traceback))


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except (psutil.Error, OSError):  # it has ended, or no file descriptors are left
        return False
