"""The learner's own workers: started on this host, watched, restarted, ended with the run."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Container
from pathlib import Path

import psutil

from aiorl.net.transport.run_keys import to_variable
from aiorl.net.transport.security import WorkerKeys
from aiorl.process.handover import KEYS_VARIABLE, LOG_VARIABLE, WORKER_ID_VARIABLE
from aiorl.process.python_path import child_python
from aiorl.process.restarts import status_text
from aiorl.process.supervisor import ChildEvent, ChildGaveUp, ChildRestarting, ChildStarted, Supervisor
from aiorl.process.tasks import Tasks

__all__ = ["LocalWorkers"]

_JOIN_WITHIN_S = 120.0
_LOOK_EVERY_S = 0.2


class LocalWorkers:
    """Worker processes of slots 1 to ``num_workers``.

    One that runs but is not among the registered workers any more, since it was stopped or is stuck, is killed and
    started again.

    Attributes:
        given_up: slots whose worker failed too often and stays down.
    """

    def __init__(
        self,
        num_workers: int,
        address: str,
        *,
        max_restarts: int,
        keys: WorkerKeys | None,
        environment: dict[str, str],
        log_path: Callable[[int], Path],
        reserve: Callable[[int, str], None],
        on_ended: Callable[[str, str], None],
        on_event: Callable[[ChildEvent], None],
        on_failure: Callable[[BaseException], None],
        registered: Callable[[], Container[int] | None],
        has_brought: Callable[[int], bool] = lambda slot: True,
        come_back_s: float = 5.0,
    ) -> None:
        """Get ready to start them.

        Args:
            num_workers: how many.
            address: where the learner listens.
            max_restarts: restarts in a row after which a worker is given up.
            keys: what they prove, None without keys.
            environment: variables added to theirs.
            log_path: slot -> log file.
            reserve: told (slot, worker id) before a worker starts, so that it gets its slot.
            on_ended: told (worker id, reason) when a worker's process has ended.
            on_event: told of starts, restarts and surrenders.
            on_failure: told of an error of ours, after which workers may not be looked after any more.
            registered: the slots of the workers that are registered; None while none can be.
            has_brought: slot -> whether the worker that is registered has brought a fragment.
            come_back_s: seconds in which a worker that was lost may register again, or end, before it is killed; one
                whose process is stopped gets none.
        """
        self.given_up: dict[int, int] = {}
        self._address = address
        self._keys = keys
        self._log_path = log_path
        self._reserve = reserve
        self._on_ended = on_ended
        self._on_event = on_event
        self._registered = registered
        self._has_brought = has_brought
        self._come_back_s = come_back_s
        self._worker_ids: dict[int, str] = {}
        self._absent: dict[int, tuple[int, float]] = {}
        self._has_joined: dict[int, int] = {}
        self._worked: set[int] = set()
        self._tasks = Tasks(on_failure)
        self._supervisor = Supervisor(
            self._command,
            range(1, num_workers + 1),
            max_restarts=max_restarts,
            on_failure=on_failure,
            log_path=log_path,
            on_event=self._handle,
            environment_of=lambda slot: {**environment, **self._handed_over(slot)},
            has_worked=self.has_worked,
        )

    @property
    def pids(self) -> dict[int, int]:
        """Process id of every running worker by slot."""
        return self._supervisor.pids

    def has_worked(self, slot: int) -> bool:
        """Whether the process of a slot that was started last has brought a fragment."""
        return slot in self._worked

    async def start(self) -> None:
        """Start every worker.

        Raises:
            OSError: a process cannot be started.
        """
        await self._supervisor.start()
        self._tasks.start(self._look_for_lost(), "lost-workers")

    async def stop(self, grace_s: float) -> None:
        """End every worker: those that do not leave by themselves within ``grace_s`` by signal.

        From the call on, none is started again.
        """
        try:
            await self._supervisor.stop(grace_s)
        finally:
            await self._tasks.close()

    def _command(self, slot: int) -> list[str]:
        worker_id = self._worker_ids[slot] = secrets.token_hex(8)
        self._reserve(slot, worker_id)
        command = [*child_python("aiorl.worker"), "--connect", self._address]
        return [*command, "--slot", str(slot), "--exit-with-parent"]

    def _handed_over(self, slot: int) -> dict[str, str]:
        """What only the worker is to know: other users can read a process's arguments, but not its environment."""
        keys = {} if self._keys is None else {KEYS_VARIABLE: to_variable(self._keys)}
        return {WORKER_ID_VARIABLE: self._worker_ids[slot], LOG_VARIABLE: str(self._log_path(slot).absolute()), **keys}

    def _handle(self, event: ChildEvent) -> None:
        match event:
            case ChildRestarting(slot, status) | ChildGaveUp(slot, status):
                self._on_ended(self._worker_ids[slot], f"its process ended with {status_text(status)}")
                if isinstance(event, ChildGaveUp):
                    self.given_up[slot] = status
            case ChildStarted(slot):
                self.given_up.pop(slot, None)
                self._worked.discard(slot)
        self._on_event(event)

    async def _look_for_lost(self) -> None:
        looked_s = 0.0  # only time in which we looked counts: nobody can register while this process stands still
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            looked_s += _LOOK_EVERY_S
            registered = self._registered()
            if registered is not None:
                self._kill_lost(registered, looked_s)

    def _kill_lost(self, registered: Container[int], now: float) -> None:
        """Kill who was here and does not come back, or has not come for long after its start."""
        for slot, pid in self.pids.items():
            if slot in registered:
                self._has_joined[slot] = pid
                self._absent.pop(slot, None)
                if self._has_brought(slot):
                    self._worked.add(slot)
                continue
            if self._absent.get(slot, (0, 0.0))[0] != pid:
                self._absent[slot] = (pid, now)
            within_s = _JOIN_WITHIN_S
            if self._has_joined.get(slot) == pid:
                within_s = 0.0 if _is_stopped(pid) else self._come_back_s
            if now - self._absent[slot][1] > within_s:
                del self._absent[slot]
                self._supervisor.kill(slot)


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except (psutil.Error, OSError):  # it has ended, or there are no descriptors left to look
        return False
