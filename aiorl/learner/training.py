"""Training from the first worker to the last goodbye; what shows it, writes it down and ends it stands outside.

training = Training(config, directory, tell=...)      # listens
try:
    await training.start()                            # workers
    await training.ready()                            # TensorFlow, model
    async for counters in training:                   # after each update
        ...                                           # finish_iteration, saver, end
    await training.await_last_update()
finally:
    await training.close(reason, final=True)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from aiorl.callbacks import DefaultCallbacks
from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError, InternalError
from aiorl.learner.build import Learning, LearningPlan, build_learning
from aiorl.learner.checkpoint import Checkpoint, list_checkpoints, load_newest_valid
from aiorl.learner.listen import listen
from aiorl.learner.publish import Publisher
from aiorl.learner.run_dir import RunDirectory
from aiorl.learner.saving import RunState, Saver, take_up
from aiorl.learner.service import Counters
from aiorl.learner.tf_runtime import prepare_environment
from aiorl.learner.update_thread import (
    StateTaken,
    UpdateDone,
    UpdateEvent,
    UpdateFailed,
    UpdateThread,
    WarmUpDone,
)
from aiorl.learner.worker_failures import WorkerFailures
from aiorl.learner.worker_set import LocalWorkers
from aiorl.process.tasks import Tasks, end_in_time, first_of
from aiorl.protocol.ledger import Ledger
from aiorl.report.results import Results
from aiorl.report.system import SystemUsage
from aiorl.transport.security import reachable_from_elsewhere, reachable_from_here

__all__ = ["End", "Ended", "Learner", "Training"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_JOIN_WAIT_S = 60.0
_SAY_WAITING_S = 10.0
_UPDATE_WAIT_S = 2.0
_GOODBYE_S = 1.5


class Ended(Exception):
    """The way out of a start-up that was ended; no error.

    Attributes:
        reason: one plain sentence.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class End:
    """Whether and why training ends; the first reason counts. To be made on the running loop.

    Attributes:
        hurry: set as soon as there is no time to wait for a running update.
    """

    def __init__(self) -> None:
        self.hurry = asyncio.Event()
        self._reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def has_come(self) -> bool:
        """Whether there is a reason."""
        return self._reason.done()

    @property
    def reason(self) -> str:
        """One plain sentence.

        Raises: the error that training failed with.
        """
        return self._reason.result()

    def come(self, reason: str, *, hurry: bool = False) -> None:
        """Training is to end in an orderly way."""
        if hurry:
            self.hurry.set()
        if not self.has_come:
            self._reason.set_result(reason)

    def fail(self, error: BaseException) -> None:
        """Training cannot go on."""
        if not self.has_come:
            self._reason.set_exception(error)
            self._reason.exception()  # nobody may come to ask for it

    async def before(self, step: Coroutine[Any, Any, T]) -> T:
        """The result of a step, which is cancelled when the end comes before.

        Raises:
            Ended: it does.
        """
        done = await first_of(step, self._reason)
        if done is None:
            raise Ended(self.reason)
        return done.result()


@dataclass(frozen=True, slots=True)
class Learner:
    """What there is from the moment on that TensorFlow is loaded."""

    learning: Learning
    updates: UpdateThread
    saver: Saver


class Training:
    """Trains one run. Iterating gives the counters after each update, or after several that came together, to the end.

    Attributes:
        end: whether and why it ends.
        results: episodes and rates.
        service: sessions with the workers.
        workers: the local ones.
        is_misconfigured: a setting turned out impossible before anything was trained.
    """

    def __init__(
        self,
        config: CommonConfig,
        directory: RunDirectory,
        plan: LearningPlan | None = None,
        *,
        tell: Callable[[str, int], None],
        before_saving: Callable[[], None] = lambda: None,
    ) -> None:
        """Listen for workers; to be called on the running loop.

        Args:
            config: the effective configuration.
            directory: the run's.
            plan: what was made of the config before, if that was done.
            tell: told (text, logging level) what users want to know.
            before_saving: called before each checkpoint, such as to make a directory again that is gone.

        Raises:
            ConfigError: the address can't be bound.
            CheckpointError: there is none to resume from that can be used.
        """
        prepare_environment(config)
        self.end = End()
        self.results = Results(config.metrics_smoothing_episodes, time.monotonic())
        self.is_misconfigured = False
        self._config = config
        self._directory = directory
        self._plan = plan
        self._tell = tell
        self._before_saving = before_saving
        self._loop = asyncio.get_running_loop()
        self._tasks = Tasks(self.fail)
        self._checkpoint = _checkpoint_to_resume(config, directory, tell)
        restored = self._restored = None if self._checkpoint is None else RunState.from_meta(self._checkpoint)
        self.service, worker_keys = listen(
            config,
            directory,
            self.results,
            None if restored is None else Ledger.from_state(restored.ledger),
            tell=tell,
            fail=self.fail,
            on_worker_failed=lambda failed: self._failures.on_failed(failed),
        )
        if restored is not None:
            self.service.counters = restored.counters
            self.results.from_state(restored.results, time.monotonic(), self.service.progress(None))
        self._steps_before = self.service.counters.env_steps_sampled
        session = self.service.session
        self._failures = WorkerFailures(
            config,
            directory.worker_log,
            tell=tell,
            fail=self.fail,
            has_others=lambda slots: any(slot not in slots for slot in (*session.slots, *self.workers.pids)),
            has_sampled=lambda: self.service.counters.env_steps_sampled > self._steps_before,
        )
        self.workers = LocalWorkers(
            config.num_workers,
            reachable_from_here(self.service.address),
            max_restarts=config.max_worker_restarts,
            keys=worker_keys,
            environment={"OMP_NUM_THREADS": str(config.num_cpus_per_worker), **config.extra_python_environs_for_worker},
            log_path=directory.worker_log,
            reserve=session.reserve_slot,
            on_ended=lambda worker_id, reason: session.lose_worker_id(worker_id, reason, time.monotonic()),
            on_event=self._failures.on_child,
            on_failure=self.fail,
            registered=lambda: None if self._is_over or self.service.publisher is None else session.slots,
            has_brought=session.has_brought,
        )
        self._learner: Learner | None = None
        self._usage = SystemUsage() if config.log_sys_usage else None
        self._warm = False
        self._is_over = False
        self._began = self._last_heard = time.monotonic()
        self._news = asyncio.Event()
        self._num_told = self.service.counters.updates

    # What others look at --------------------------------------------------------------------------------------

    @property
    def learner(self) -> Learner:
        """Model, update thread and saver; from `ready` on.

        Raises:
            InternalError: it was asked for before.
        """
        if self._learner is None:
            raise InternalError("nothing is built yet")
        return self._learner

    @property
    def callbacks(self) -> DefaultCallbacks | None:
        """The user's hooks on the learner; None for none, and before `ready`."""
        return None if self._learner is None else self._learner.learning.callbacks

    @property
    def newest_checkpoint(self) -> str:
        """Path of the newest checkpoint of this session, empty without one."""
        return "" if self._learner is None else self._learner.saver.newest

    @property
    def restored_steps(self) -> int | None:
        """Env steps sampled before the resume; None for a new run."""
        return None if self._restored is None else self._restored.counters.env_steps_sampled

    @property
    def join_command(self) -> str:
        """What to type on any host so that a worker joins."""
        keys = "" if self._config.keys is None else f" --keys {shlex.quote(self._config.keys)}"
        return f"python -m aiorl.worker --connect {reachable_from_elsewhere(self.service.address)}{keys}"

    @property
    def status(self) -> str:
        """What is done or waited for, before the first update."""
        if self._learner is None:
            return "loading TensorFlow and building the model"
        if not self._warm:
            return "compiling the update"
        if self.service.is_granting:
            return "sampling the first train batch"
        present, wanted = len(self.service.session.slots), max(1, self._config.num_workers)
        return f"the update is compiled; waiting for workers: {present} of {wanted} are here"

    @property
    def silent_s(self) -> float:
        """How long there has been no update, from the moment on that updates are compiled."""
        return time.monotonic() - self._last_heard if self._warm else 0.0

    # The way through ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the workers; their processes load while the model is built.

        Raises:
            ConfigError: the run directory can't be written.
            OSError: a worker can't be started.
        """
        self._directory.save_address(self.service.address)
        await self.workers.start()

    async def ready(self) -> None:
        """Load TensorFlow, build the model, and return when workers sample.

        Raises:
            Ended: the end came before.
            ConfigError: a setting turns out impossible.
            CheckpointError: the checkpoint is of another run.
        """
        try:
            learning = await self.end.before(self._build())
        except ConfigError:
            self.is_misconfigured = True
            raise
        updates = UpdateThread(
            learning.group,
            self._on_update_thread,
            env_steps_total=self.service.counters.env_steps_trained,
            max_queued=1,
        )
        saver = Saver(
            self._config,
            self._directory,
            learning,
            updates,
            self.service,
            self.results,
            self._tasks,
            before_writing=self._before_saving,
            on_error=lambda error: self._tell(f"{error}; training goes on", logging.ERROR),
        )
        self._learner = Learner(learning, updates, saver)
        updates.start()
        self.service.begin(learning, updates, Publisher(learning.filters))
        await self.end.before(self._first_workers())
        self.service.grant_leases()
        self._begin_rates()

    async def __aiter__(self) -> AsyncIterator[Counters]:
        """The counters after each update, until the end has come.

        Raises: what training failed with.
        """
        while True:
            await self._news.wait()
            self._news.clear()
            if self.end.has_come:
                _ = self.end.reason
                return
            if self.service.counters.updates > self._num_told:
                self._num_told = self.service.counters.updates
                yield self.service.counters

    def stop(self, reason: str, *, hurry: bool = False) -> None:
        """End training in an orderly way; from now on nothing more gets into updates and results.

        Args:
            reason: one plain sentence.
            hurry: there is no time to wait for a long update.
        """
        self.end.come(reason, hurry=hurry)
        self.service.stop_training()
        self._news.set()

    def fail(self, error: BaseException) -> None:
        """End training with an error."""
        self.end.fail(error)
        self._news.set()

    def finish_iteration(self) -> dict[str, Any]:
        """The result of the iteration that ends now; the next one begins."""
        perf = self._usage.look() if self._usage is not None else None
        result = self.results.finish_iteration(time.monotonic(), self.service.progress(perf), timestamp=time.time())
        result["run_id"] = self._directory.run_id
        return result

    async def await_last_update(self) -> None:
        """Wait for the running update: in a hurry a little, otherwise to its end."""
        self.service.stop_training()
        if self._warm and self._learner is not None:
            await self._learner.saver.await_last_update(
                _UPDATE_WAIT_S,
                self.end.hurry,
                lambda: self._tell(
                    "waiting for the last update to end, then its checkpoint is written "
                    "(Ctrl-C: that of the update before it, at once)",
                    logging.INFO,
                ),
            )

    async def close(self, reason: str, *, final: bool) -> None:
        """End all that was started: each step within its time, whatever becomes of the others.

        What the update thread or the workers still have to say comes too late from now on.
        """
        self._is_over = True
        if self._learner is not None:
            self._learner.updates.stop()
        await asyncio.gather(  # who leaves now is not started again
            end_in_time("the connections", lambda: self.service.close(reason, final=final)),
            end_in_time("the workers", lambda: self.workers.stop(grace_s=_GOODBYE_S)),
        )
        await end_in_time("the training's tasks", self._tasks.close)

    # Start ----------------------------------------------------------------------------------------------------

    async def _build(self) -> Learning:
        """Load TensorFlow and build, in a daemon thread: a stop during the import need not wait for it."""
        done: asyncio.Future[Learning] = self._loop.create_future()

        def tell(set_it: Callable[[Any], None], value: object) -> None:
            if not done.done():
                set_it(value)

        def build() -> None:
            try:
                learning = build_learning(self._config, self._directory.log, self._directory.path, self._plan)
                if self._checkpoint is not None:
                    take_up(self._checkpoint, self._config, learning)
            except BaseException as error:
                self._call_soon(tell, done.set_exception, error)
            else:
                self._call_soon(tell, done.set_result, learning)

        threading.Thread(target=build, name="build", daemon=True).start()
        learning = await done
        if self._config.resume:
            self._directory.save_config(self._config)
        if learning.general_reason:
            self._tell(f"workers sample generally: {learning.general_reason}", logging.INFO)
        spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in learning.seconds.items())
        logger.info("built: %s", spent)
        return learning

    async def _first_workers(self) -> None:
        """Wait for the workers started here, so that a run with a seed always begins with the same ones."""
        wanted = max(1, self._config.num_workers)
        while not await self.service.wait_for_workers(wanted, _SAY_WAITING_S):
            present = len(self.service.session.slots)
            down = len(self.workers.given_up)
            if present and (present + down >= wanted or time.monotonic() - self._began > _JOIN_WAIT_S):
                break
            if not present and self._config.num_workers == 0:
                self._tell(self.service.waiting_for(time.monotonic()), logging.INFO)
            else:
                self._tell(f"waiting for workers: {present} of {wanted} are here", logging.INFO)

    # While it goes --------------------------------------------------------------------------------------------

    def _begin_rates(self) -> None:
        """Loading and compiling is no work that a rate is about."""
        self.results.begin_rates(time.monotonic(), self.service.progress(None))

    def _on_update_thread(self, event: UpdateEvent) -> None:
        self._call_soon(self._handle_update, event)

    def _call_soon(self, call: Callable[..., None], *arguments: object) -> None:
        """Have the event loop call something, from another thread; not any more once the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)

    def _handle_update(self, event: UpdateEvent) -> None:
        if self._is_over:
            return  # too late: what was trained is saved, and the workers have heard goodbye
        saver = self.learner.saver
        self._last_heard = time.monotonic()
        match event:
            case WarmUpDone(took_s):
                self._warm = True
                self._begin_rates()
                logger.info("the update is compiled, in %.1f s", took_s)
            case UpdateDone():
                self.service.take_update(event)
                saver.keep(event.state)
                self._news.set()
            case StateTaken():
                saver.state_taken(event)
            case UpdateFailed(error, batch):
                if batch is not None:
                    self.service.drop_batch(batch)
                if self.end.has_come:
                    self._tell(f"the last update failed, and is left out: {error}", logging.ERROR)
                saver.updates_failed()
                self.fail(error)


def _checkpoint_to_resume(
    config: CommonConfig, directory: RunDirectory, tell: Callable[[str, int], None]
) -> Checkpoint | None:
    if not config.resume:
        return None
    if not list_checkpoints(directory.checkpoints):
        tell("the run has no checkpoint yet: it starts from the beginning", logging.WARNING)
        return None
    checkpoint = load_newest_valid(directory.checkpoints, RunState.from_meta)
    tell(f"going on from {checkpoint.path}", logging.INFO)
    return checkpoint
