"""A whole run in one process: `InProcessTraining` as `aiorl.run.run.Run` drives it.

What samples and learns is called in the thread that waits for the run, step by step; all else of the run is on the
event loop, as it is with workers: accounts, results, checkpoints, display.
"""

from __future__ import annotations

import asyncio
import bdb
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from aiorl.errors import AiorlError, ConfigError, EndOfData, EvaluationError, InternalError
from aiorl.process.memory_quota import keep_within
from aiorl.process.tasks import Tasks
from aiorl.run.end import End, Ended
from aiorl.run.evaluation import evaluate
from aiorl.run.evaluations import Play
from aiorl.run.flow import Counters, Flow
from aiorl.run.iterations import Iteration
from aiorl.run.report.results import Results
from aiorl.run.saving import Saver
from aiorl.run.setup import TrainingSetup
from aiorl.run.trainer.caller_thread import BrokenOff, CallerThread
from aiorl.run.trainer.in_process import InProcessTraining
from aiorl.run.update_thread import LastUpdate
from aiorl.run.worker.apply import StopSampling
from aiorl.sampling.callbacks import DefaultCallbacks

__all__ = ["AloneTraining"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TOLD_S = 0.2
_UPDATE_WAIT_S, _STEP_IN_HURRY_S = 2.0, 0.5
_CLOSE_S, _CLOSE_IN_HURRY_S = 10.0, 1.0
_UPDATING = "making an update"


class AloneTraining:
    """Trains one run without workers. Iterating gives the counters after each update, to the end.

    Attributes:
        end: whether and why it ends.
        is_misconfigured: a setting turned out impossible before anything was trained.
    """

    def __init__(self, setup: TrainingSetup, here: CallerThread) -> None:
        """Nothing is built yet; to be called on the running loop.

        Args:
            setup: what it is made from.
            here: the thread that samples and learns.
        """
        self.end = End()
        self.is_misconfigured = False
        self._setup = setup
        self._here = here
        self._tasks = Tasks(self.fail)
        self._built: InProcessTraining | None = None
        self._doing = "loading TensorFlow and building the model"
        self._last_heard = time.monotonic()
        self._news = asyncio.Event()
        self._step: asyncio.Task[None] | None = None
        self._last_step = LastUpdate(lambda: None)

    # What others look at --------------------------------------------------------------------------------------

    @property
    def _training(self) -> InProcessTraining:
        if self._built is None:
            raise InternalError("nothing is built yet")
        return self._built

    @property
    def results(self) -> Results:
        """Episodes and rates; from `ready` on, as are the next five."""
        return self._training.results

    @property
    def counters(self) -> Counters:
        """Totals of the run."""
        return self._training.counters

    @property
    def iteration(self) -> Iteration:
        """The one that goes on."""
        return self._training.iteration

    @property
    def flow(self) -> Flow:
        """What becomes of fragments."""
        return self._training.flow

    @property
    def saver(self) -> Saver:
        """Writes checkpoints."""
        return self._training.saver

    @property
    def callbacks(self) -> DefaultCallbacks | None:
        """The user's hooks on the learner."""
        return self._training.callbacks

    @property
    def newest_checkpoint(self) -> str:
        """Path of the newest checkpoint of this session, empty without one."""
        return "" if self._built is None else self._built.saver.newest

    @property
    def join_command(self) -> str:
        """Nobody can join."""
        return ""

    @property
    def status(self) -> str:
        """What is done, before the first update."""
        return self._doing

    @property
    def silent_s(self) -> float:
        """How long there has been no update, from the moment on that updates are compiled."""
        return time.monotonic() - self._last_heard if self._step is not None else 0.0

    @property
    def play(self) -> Play | None:
        """Plays a checkpoint for an evaluation, in the thread that samples."""
        return self._play

    def waiting_for(self) -> str:
        """Why nothing happens, in plain words."""
        unit = None if self._built is None else self._built.sampler
        in_env_s = 0.0 if unit is None else unit.in_env_s
        said = f" ({in_env_s:.0f} s in one step)" if in_env_s > 1 else ""
        return f"this process is {self._doing}{said}"

    # The way through ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Keep within the quota of memory."""
        self._tasks.start(keep_within(self._setup.config.memory, "memory"), "memory quota")

    async def ready(self) -> None:
        """Load TensorFlow, build the model, make the environments and compile the update.

        Raises:
            Ended: the end came before.
            ConfigError: a setting turns out impossible.
            CheckpointError: the checkpoint is of another run.
            EnvError: the environment's constructor failed.
        """
        setup, began = self._setup, time.monotonic()
        try:
            training = await self.end.before(self._call(lambda: InProcessTraining(setup, self._tasks)))
            self._built = training
            self._doing = "making the environments and compiling the update"
            await self.end.before(self._call(training.begin))
        except ConfigError:
            self.is_misconfigured = True
            raise
        if setup.config.resume:
            setup.directory.save_config(setup.config)
        spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in training.learning.seconds.items())
        logger.info("built: %s; ready after %.1f s", spent, time.monotonic() - began)
        self._doing, self._last_heard = "sampling the first train batch", time.monotonic()

    async def compiled(self) -> None:
        """Updates are compiled as soon as it is ready."""

    def go_on(self) -> None:
        """Begin to sample and train, or go on after `Flow.is_enough` has said to stand still."""
        self.flow.go_on()

    async def __aiter__(self) -> AsyncIterator[Counters]:
        """The counters after each update, until the end has come.

        Raises: what training failed with.
        """
        self.go_on()
        while not self.end.has_come:
            self._news.clear()
            self._step = self._tasks.start(self._advance(), "training")
            await self._news.wait()
            if not self.end.has_come:
                yield self.counters
        _ = self.end.reason

    def stop(self, reason: str, *, hurry: bool = False) -> None:
        """End training in an orderly way: sampling is left at its next step, an update is finished.

        Args:
            reason: one plain sentence.
            hurry: there is no time to wait for a long update.
        """
        self.end.come(reason, hurry=hurry)
        if self._built is not None:
            self._built.flow.stop()
            if hurry:
                self._built.learning.group.hurry()
            if self._built.sampler is not None:
                self._built.sampler.stop()
        self._news.set()

    def fail(self, error: BaseException) -> None:
        """End training with an error."""
        self.end.fail(error)
        self._news.set()

    def finish_iteration(self) -> dict[str, Any]:
        """The result of the iteration that ends now; the next one begins."""
        return self._training.finish_iteration()

    async def await_last_update(self) -> None:
        """Wait for the running update, which is the last: in a hurry a little while, otherwise to its end."""
        if self._built is not None:
            self._built.flow.stop()
        if self._step is None or self._step.done():
            return
        if self._doing != _UPDATING:  # an environment may never return
            await asyncio.wait([self._step], timeout=_STEP_IN_HURRY_S if self.end.hurry.is_set() else _UPDATE_WAIT_S)
            return
        await self._last_step.wait(
            _UPDATE_WAIT_S,
            self.end.hurry,
            lambda: self._tell(
                "waiting for the last update to end, then its checkpoint is written "
                "(Ctrl-C: that of the update before it, at once)"
            ),
        )

    async def close(self, reason: str, *, final: bool) -> None:
        """Close the environments, unless their thread is at what nothing breaks off."""
        if self._built is not None and (self._step is None or self._step.done()):
            closing = self._tasks.start(
                self._here.call(self._built.close, is_breakable=True), "end of the environments"
            )
            await asyncio.wait([closing], timeout=_CLOSE_IN_HURRY_S if self.end.hurry.is_set() else _CLOSE_S)
        await self._tasks.close()

    # Steps ------------------------------------------------------------------------------------------------------

    async def _advance(self) -> None:
        """Sample a train batch and make an update of it."""
        try:
            await self._sample_and_update()
        except Ended:
            pass
        except EndOfData:
            self.stop("Done: all stored experience was read.")
        except Exception as error:  # whatever an environment, a policy or an update raised
            if self.end.has_come:
                logger.warning("what was under way at the end failed, and is left out", exc_info=error)
            elif _is_of_debugger(error):
                self.stop("Ended in the debugger.")
            else:
                self.fail(error)
        finally:
            self._last_heard = time.monotonic()
            if self.end.has_come:
                self._last_step.come()
            self._news.set()

    async def _sample_and_update(self) -> None:
        training = self._training
        while training.wants_fragments:
            training.take(await self._call(training.sample, is_breakable=True))
            if self.end.has_come:
                return
        batch = training.next_batch()
        self._doing = _UPDATING
        try:
            done = await self._call(lambda: training.update(batch))
        except BaseException:
            training.flow.drop_batch(batch)
            raise
        self._doing = "sampling"
        training.take_update(done)

    async def _play(self, path: Path, request: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return await self._call(lambda: evaluate(path, **request).to_dict(), is_breakable=True)
        except (AiorlError, Ended):
            raise
        except Exception as error:  # whatever an environment or a callback raises, as in a process of its own
            raise EvaluationError(f"{type(error).__name__}: {error}") from error

    async def _call(self, step: Callable[[], T], *, is_breakable: bool = False) -> T:
        """See `CallerThread.call`.

        Raises:
            Ended: it was left in its middle since the run ends.
        """
        try:
            return await self._here.call(step, is_breakable=is_breakable)
        except BrokenOff as error:
            if isinstance(error.__cause__, KeyboardInterrupt):
                await asyncio.sleep(_TOLD_S)  # the signal may be heard of later than what it broke off
                self.stop("Ended by Ctrl-C.", hurry=True)
            elif not isinstance(error.__cause__, StopSampling):
                raise
            raise Ended(self.end.reason) from None

    def _tell(self, text: str) -> None:
        self._setup.tell(text, logging.INFO)


def _is_of_debugger(error: BaseException | None) -> bool:
    """Whether the user has left a debugger, which the environment's code was stopped in."""
    while error is not None and not isinstance(error, bdb.BdbQuit):
        error = error.__cause__
    return error is not None
