"""Training with worker processes, as a trainer sees it: the event loop is in a thread of its own."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from aiorl.errors import AiorlError, EndOfData
from aiorl.net.wire.messages import PolicyArrays
from aiorl.process.event_loop import tell_of_stray_errors
from aiorl.run.build import Learning
from aiorl.run.end import Ended
from aiorl.run.flow import Counters, Flow
from aiorl.run.iterations import Iteration
from aiorl.run.report.results import Results
from aiorl.run.saving import Saver
from aiorl.run.setup import TrainingSetup
from aiorl.run.trainer.loop_thread import LoopThread
from aiorl.run.training import Training
from aiorl.sampling.callbacks import DefaultCallbacks

__all__ = ["TrainingWithWorkers"]

_JOIN_S = 10.0


class TrainingWithWorkers:
    """Trains one run, while workers of this host and of others sample.

    Attributes:
        training: what is trained, on the loop.
    """

    def __init__(self, loop: LoopThread, setup: TrainingSetup) -> None:
        """Listen, start workers, load TensorFlow and build the model; then wait for workers.

        Args:
            loop: runs all of it.
            setup: what it is made from.

        Raises:
            ConfigError: a setting that cannot be honoured.
            CheckpointError: the checkpoint is of another run.
            WorkerError: no worker can be started.
        """
        self._loop = loop
        self.training: Training

        async def start() -> None:
            self.training = Training(setup)
            tell_of_stray_errors(self.training.fail)
            try:
                await self.training.start()
                await self.training.ready()
            except Ended:
                raise AiorlError("the trainer was stopped while it started") from None
            except BaseException:
                self.training.end.come("the trainer could not start")
                await asyncio.shield(self.training.close("the learner failed", final=False))
                raise

        loop.call(start())

    @property
    def counters(self) -> Counters:
        """Totals of the run."""
        return self.training.counters

    @property
    def results(self) -> Results:
        """Episodes and rates."""
        return self.training.results

    @property
    def iteration(self) -> Iteration:
        """The one that goes on."""
        return self.training.iteration

    @property
    def learning(self) -> Learning:
        """Policies, algorithms and filters."""
        return self.training.learner.learning

    @property
    def flow(self) -> Flow:
        """What becomes of fragments."""
        return self.training.service.flow

    @property
    def saver(self) -> Saver:
        """Writes checkpoints."""
        return self.training.learner.saver

    @property
    def callbacks(self) -> DefaultCallbacks | None:
        """The user's hooks on the learner."""
        return self.training.callbacks

    def train_iteration(self) -> dict[str, Any]:
        """Make updates until training stands still (`Flow.is_enough`); the iteration's result.

        All of it is asked of the loop at once, since each question costs the time of two threads.

        Raises:
            EndOfData: all stored experience is read, and nothing was trained on in this iteration.
            Exception: what training failed with, such as WorkerError.
        """

        async def train() -> dict[str, Any]:
            self.results.leave_out_pause(time.monotonic())  # the caller's
            self.iteration.begin()
            self.training.go_on()
            try:
                while not self.flow.is_still and await self.training.next_update():
                    pass
            except asyncio.CancelledError:  # Ctrl-C: between two calls training stands still
                self.flow.stand_still()
                raise
            if self.training.end.has_come and not self.iteration.has_trained:
                raise EndOfData(self.training.end.reason)
            return self.training.finish_iteration()

        return self._loop.call(train())

    def set_weights(self, weights: PolicyArrays) -> None:
        """Give workers other weights than an update led to, and keep what the policies are now."""
        state = self.learning.group.hold_state()

        def give() -> None:
            self.training.service.set_weights(weights)
            self.saver.keep(state)

        self._loop.do(give)

    def begin_episodes_anew(self) -> None:
        """Workers sample on, whatever is saved."""

    def settle(self) -> None:
        """Wait until nobody else uses the policies: training stands still, also after an iteration broken off."""

        async def stand_still() -> None:
            await self.training.compiled()
            self.flow.stand_still()
            while not self.flow.is_still:
                if not await self.training.next_update():
                    return

        self._loop.call(stand_still())

    def close(self, *, final: bool = True) -> None:
        """Save what was learned since the last checkpoint, and end workers and updates.

        Args:
            final: else workers from elsewhere are to come back, since training goes on where it listens now.

        Raises:
            CheckpointError: it can't be written; all else has ended.
            KeyboardInterrupt: Ctrl-C came meanwhile; an update under way was not waited for, and all has ended.
        """
        reason = "the trainer was stopped"

        async def close() -> None:
            training = self.training
            training.stop(reason)
            try:
                await training.await_last_update()
                if self.saver.has_unsaved:
                    await self.saver.save_last()
            finally:
                await training.close(reason, final=final)

        self._loop.end(close(), self.training.end.hurry.set)
        self.training.learner.updates.join(_JOIN_S)
