"""Writes checkpoints while the run goes on: a state between two updates, the filters, the counters and the ledger."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from aiorl.config.schema import CommonConfig
from aiorl.errors import CheckpointError
from aiorl.learner.build import Learning
from aiorl.learner.checkpoint import save_checkpoint
from aiorl.learner.run_dir import RunDirectory
from aiorl.learner.service import LearnerService
from aiorl.learner.state import RunState
from aiorl.learner.update_thread import StateTaken, UpdateThread
from aiorl.process.tasks import Tasks
from aiorl.report.results import Results

__all__ = ["Saver", "identity_of"]

logger = logging.getLogger(__name__)


def identity_of(config: CommonConfig, learning: Learning) -> dict[str, Any]:
    """What a checkpoint has to have in common with the run that resumes from it."""
    return {"env": config.env, "algo": config.algo, "spaces": learning.spaces}


class Saver:
    """Saves one run, one checkpoint at a time.

    Attributes:
        newest: path of the newest checkpoint of this session, empty without one.
    """

    def __init__(
        self,
        config: CommonConfig,
        directory: RunDirectory,
        learning: Learning,
        updates: UpdateThread,
        service: LearnerService,
        results: Results,
        tasks: Tasks,
        *,
        on_error: Callable[[CheckpointError], None],
    ) -> None:
        """Nothing is written yet.

        Args:
            config: the run's configuration.
            directory: gets the checkpoints.
            learning: what is trained.
            updates: where its state is taken between two updates; `state_taken` is to be called with the answer.
            service: has the filters, the counters and the ledger.
            results: has the episodes.
            tasks: of the run, for checkpoints in passing.
            on_error: hears of a checkpoint in passing that could not be written.
        """
        self._config = config
        self._directory = directory
        self._learning = learning
        self._updates = updates
        self._service = service
        self._results = results
        self._tasks = tasks
        self._on_error = on_error
        self._one_at_a_time = asyncio.Lock()
        self._wanted: asyncio.Future[StateTaken] | None = None
        self._passing: asyncio.Task[None] | None = None
        self.newest = ""

    def state_taken(self, event: StateTaken) -> None:
        """The update thread's answer."""
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(event)

    def save_in_passing(self) -> None:
        """Begin a checkpoint while training goes on, unless one is being written."""
        if self._passing is None or self._passing.done():
            self._passing = self._tasks.start(self._save_in_passing(), "checkpoint")

    async def finish(self, timeout_s: float) -> None:
        """Wait for a checkpoint begun in passing, but no longer than ``timeout_s`` seconds."""
        if self._passing is not None and not self._passing.done():
            await asyncio.wait([self._passing], timeout=timeout_s)

    async def save(self, timeout_s: float | None) -> None:
        """Write a checkpoint of the state between two updates.

        Raises:
            CheckpointError: it cannot be written.
            TimeoutError: a running update, or the checkpoint before, did not end within ``timeout_s`` seconds.
        """
        async with asyncio.timeout(timeout_s):
            await self._one_at_a_time.acquire()
        try:
            await self._save(timeout_s)
        finally:
            self._one_at_a_time.release()

    async def _save(self, timeout_s: float | None) -> None:
        self._wanted = asyncio.get_running_loop().create_future()
        self._updates.request_state()
        async with asyncio.timeout(timeout_s):
            taken = await self._wanted
        service = self._service
        assert service.publisher is not None
        state = RunState(
            counters=service.counters,
            results=self._results.to_state(),
            ledger=service.session.ledger.to_state(),
        )
        tensors = {f"algorithm/{name}": array for name, array in taken.state.tensors.items()}
        for policy_id, own in service.publisher.filter_states().items():
            tensors.update({f"filter/{policy_id}/{name}": array for name, array in own.items()})
        meta = {
            **identity_of(self._config, self._learning),
            "run_id": self._directory.run_id,
            "algorithm": taken.state.values,
            **state.to_meta(),
        }
        folder, keep = self._directory.checkpoints, self._config.checkpoint_keep
        path = await asyncio.to_thread(save_checkpoint, folder, service.counters.updates, tensors, meta, keep=keep)
        self.newest = str(path)
        logger.info("checkpoint %s", path)

    async def _save_in_passing(self) -> None:
        try:
            await self.save(None)
        except CheckpointError as error:
            self._on_error(error)
