"""The learner's own workers: started on this host, watched, restarted, ended with the run."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from pathlib import Path

from aiorl.process.supervisor import ChildEvent, ChildGaveUp, ChildRestarting, ChildStarted, Supervisor
from aiorl.transport.run_keys import KEYS_VARIABLE, WORKER_ID_VARIABLE, to_variable
from aiorl.transport.security import WorkerKeys

__all__ = ["LocalWorkers"]


class LocalWorkers:
    """Worker processes of slots 1 to ``num_workers``.

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
        """
        self.given_up: dict[int, int] = {}
        self._address = address
        self._keys = keys
        self._reserve = reserve
        self._on_ended = on_ended
        self._on_event = on_event
        self._worker_ids: dict[int, str] = {}
        self._supervisor = Supervisor(
            self._command,
            range(1, num_workers + 1),
            max_restarts=max_restarts,
            environment=environment,
            log_path=log_path,
            on_event=self._handle,
            environment_of=self._handed_over,
        )

    @property
    def pids(self) -> dict[int, int]:
        """Process id of every running worker by slot."""
        return self._supervisor.pids

    async def start(self) -> None:
        """Start every worker.

        Raises:
            OSError: a process cannot be started.
        """
        await self._supervisor.start()

    async def stop(self, grace_s: float) -> None:
        """End every worker: those that do not leave by themselves within ``grace_s`` by signal."""
        await self._supervisor.stop(grace_s)

    def _command(self, slot: int) -> list[str]:
        worker_id = self._worker_ids[slot] = secrets.token_hex(8)
        self._reserve(slot, worker_id)
        command = [sys.executable, "-m", "aiorl.worker", "--connect", self._address]
        return [*command, "--slot", str(slot), "--exit-with-parent"]

    def _handed_over(self, slot: int) -> dict[str, str]:
        """What only the worker is to know: other users can read a process's arguments, but not its environment."""
        keys = {} if self._keys is None else {KEYS_VARIABLE: to_variable(self._keys)}
        return {WORKER_ID_VARIABLE: self._worker_ids[slot], **keys}

    def _handle(self, event: ChildEvent) -> None:
        match event:
            case ChildRestarting(slot, status) | ChildGaveUp(slot, status):
                self._on_ended(self._worker_ids[slot], f"its process ended with status {status}")
                if isinstance(event, ChildGaveUp):
                    self.given_up[slot] = status
            case ChildStarted(slot):
                self.given_up.pop(slot, None)
        self._on_event(event)
