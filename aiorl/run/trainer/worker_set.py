"""WorkerSet: who samples for a trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from aiorl.run.training import Training
from aiorl.sampling.worker import Worker

__all__ = ["RemoteWorker", "WorkerSet"]


@dataclass(frozen=True, slots=True)
class RemoteWorker:
    """A worker process that is registered.

    Attributes:
        index: its slot, from 1.
        incarnation: its registration life.
        state: what it said last that it does.
        in_env_s: seconds that its environment's running step takes already.
    """

    index: int
    incarnation: str
    state: str
    in_env_s: float


class WorkerSet:
    """The workers of a trainer: one in this process, and those in processes of their own, here or elsewhere."""

    def __init__(
        self,
        local: Callable[[], Worker],
        do: Callable[[Callable[[], list[RemoteWorker]]], list[RemoteWorker]],
        training: Training | None,
        stop: Callable[[], None],
    ) -> None:
        """Take how each is reached.

        Args:
            local: gives the worker of this process.
            do: calls a function on the event loop.
            training: has the processes; None without any.
            stop: ends all of them.
        """
        self._local = local
        self._do = do
        self._training = training
        self._stop = stop

    def local_worker(self) -> Worker:
        """Return the worker of this process, index 0, with the newest weights and filter statistics.

        Where all is sampled in this process, it is the one that samples; else one that is made when it is asked for.
        """
        return self._local()

    def remote_workers(self) -> list[RemoteWorker]:
        """Return the worker processes that are registered now, by index."""
        return self._do(self._registered)

    def reset(self, healthy: Iterable[RemoteWorker]) -> None:
        """Go on with these workers only: others are told to leave, and what they had in flight is counted lost."""
        kept = {worker.incarnation for worker in healthy}

        def drop() -> list[RemoteWorker]:
            found = self._registered()
            for worker in found:
                if worker.incarnation not in kept and self._training is not None:
                    self._training.service.session.lose(
                        worker.index, "the trainer goes on without it", time.monotonic()
                    )
            return found

        self._do(drop)

    def stop(self) -> None:
        """End all workers, and the trainer with them."""
        self._stop()

    def _registered(self) -> list[RemoteWorker]:
        if self._training is None:
            return []
        found = self._training.service.session.workers
        return [RemoteWorker(info.slot, info.incarnation, info.state, info.in_env_s) for info in found]
