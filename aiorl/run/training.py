"""Training from the first worker to the last goodbye; what shows it, writes it down and ends it stands outside.

training = Training(setup)                            # listens
try:
    await training.start()                            # workers
    await training.ready()                            # TensorFlow, model
    async for counters in training:                   # after each update
        ...                                           # iterations, saver, end
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
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from aiorl.errors import ConfigError, InternalError
from aiorl.learning.tf_runtime import compilation_cache, prepare_environment
from aiorl.net.protocol.ledger import Ledger
from aiorl.net.transport.security import reachable_from_elsewhere, reachable_from_here
from aiorl.process.python_path import python_path
from aiorl.process.tasks import Tasks, end_in_time
from aiorl.run.build import Learning, build_learning
from aiorl.run.end import End
from aiorl.run.evaluations import Play
from aiorl.run.flow import Counters, Flow
from aiorl.run.iterations import Iteration
from aiorl.run.listen import listen
from aiorl.run.report.results import Results
from aiorl.run.report.system import SystemUsage
from aiorl.run.restoring import give_back
from aiorl.run.saving import Saver
from aiorl.run.setup import TrainingSetup
from aiorl.run.update_thread import (
    LastUpdate,
    UpdateDone,
    UpdateEvent,
    UpdateFailed,
    UpdatesEnded,
    UpdateThread,
    WarmUpDone,
)
from aiorl.run.worker_failures import WorkerFailures
from aiorl.run.worker_set import LocalWorkers
from aiorl.sampling.callbacks import DefaultCallbacks

__all__ = ["Learner", "Training"]

logger = logging.getLogger(__name__)

_JOIN_WAIT_S = 60.0
_SAY_WAITING_S = 10.0
_UPDATE_WAIT_S = 2.0
_GOODBYE_S = 1.5


@dataclass(frozen=True, slots=True)
class Learner:
    """What there is from the moment on that TensorFlow is loaded."""

    learning: Learning
    updates: UpdateThread
    last_update: LastUpdate
    saver: Saver


class Training:
    """Trains one run. Iterating gives the counters after each update, or after several that came together, to the end.

    Attributes:
        end: whether and why it ends.
        results: episodes and rates.
        iteration: the one that goes on.
        service: sessions with the workers.
        workers: the local ones.
        is_misconfigured: a setting turned out impossible before anything was trained.
    """

    def __init__(self, setup: TrainingSetup) -> None:
        """Listen for workers; to be called on the running loop.

        Raises:
            ConfigError: the address can't be bound.
        """
        config, directory, tell = setup.config, setup.directory, setup.tell
        prepare_environment(config)
        self.end = End()
        self.results = Results(config.metrics_smoothing_episodes, time.monotonic())
        self.is_misconfigured = False
        self._config = config
        self._directory = directory
        self._plan = setup.plan
        self._tell = tell
        self._before_saving = setup.before_saving
        self._loop = asyncio.get_running_loop()
        self._tasks = Tasks(self.fail)
        self._restored = setup.restored
        restored = None if setup.restored is None else setup.restored.run
        self.service, worker_keys = listen(
            config,
            directory,
            self.results,
            None if restored is None else Ledger.from_dict(restored.ledger),
            tell=tell,
            fail=self.fail,
            on_worker_failed=lambda failed: self._failures.on_failed(failed),
            on_out_of_data=self._on_out_of_data,
        )
        if restored is not None:
            self.service.counters = restored.counters
            self.results.from_state(restored.results, time.monotonic(), self.service.progress(None))
        self.iteration = Iteration(config, self.service.counters)
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
            environment={
                **python_path(),
                "OMP_NUM_THREADS": str(config.num_cpus_per_worker),
                **config.extra_python_environs_for_worker,
            },
            log_path=directory.worker_log,
            reserve=session.reserve_slot,
            on_ended=lambda worker_id, reason: session.lose_worker_id(worker_id, reason, time.monotonic()),
            on_event=self._failures.on_child,
            on_failure=self.fail,
            registered=lambda: None if self._is_over or self._learner is None else session.slots,
            has_brought=session.has_brought,
        )
        self._learner: Learner | None = None
        self._usage = SystemUsage() if config.log_sys_usage else None
        self._compiled = asyncio.Event()
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
    def counters(self) -> Counters:
        """Totals of the run."""
        return self.service.counters

    @property
    def flow(self) -> Flow:
        """What becomes of fragments."""
        return self.service.flow

    @property
    def saver(self) -> Saver:
        """Writes checkpoints; from `ready` on."""
        return self.learner.saver

    @property
    def callbacks(self) -> DefaultCallbacks | None:
        """The user's hooks on the learner; None for none, and before `ready`."""
        return None if self._learner is None else self._learner.learning.callbacks

    @property
    def newest_checkpoint(self) -> str:
        """Path of the newest checkpoint of this session, empty without one."""
        return "" if self._learner is None else self._learner.saver.newest

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
        if not self._compiled.is_set():
            return "compiling the update"
        if self.service.flow.is_granting:
            return "sampling the first train batch"
        present, wanted = len(self.service.session.slots), max(1, self._config.num_workers)
        return f"the update is compiled; waiting for workers: {present} of {wanted} are here"

    @property
    def silent_s(self) -> float:
        """How long there has been no update, from the moment on that updates are compiled."""
        return time.monotonic() - self._last_heard if self._compiled.is_set() else 0.0

    @property
    def play(self) -> Play | None:
        """Plays a checkpoint for an evaluation; None leaves that to processes of their own."""
        return None

    def waiting_for(self) -> str:
        """Why nothing happens, in plain words."""
        said = self.service.waiting_for(self.join_command)
        if self.service.session.slots or self._config.num_workers:
            return said
        return f"{said} (with num_workers: 0 and bind, this run starts none; without bind, this process samples)"

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
        """Load TensorFlow, build the model, and return when workers are there; they sample once it goes on.

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
            publish_every=learning.lease_plan.publish_every,
            publish_interval_s=learning.lease_plan.publish_interval_s,
        )
        saver = Saver(
            self._config,
            self._directory,
            learning,
            self.service,
            self._tasks,
            before_writing=self._before_saving,
            on_error=lambda error: self._tell(f"{error}; training goes on", logging.ERROR),
            ask_for_experience=updates.ask_for_experience,
        )
        self._learner = Learner(learning, updates, LastUpdate(updates.stop), saver)
        cache = compilation_cache()
        if cache is not None:
            cache.begin()
        self.service.begin(learning, updates)
        saver.keep(learning.group.hold_state())
        updates.start()
        await self.end.before(self._first_workers())
        self._begin_rates()

    async def compiled(self) -> None:
        """Wait until the updates are compiled: from then on, and between updates, others may use the policies.

        Raises: what training failed with.
        """
        await self.end.before(self._compiled.wait())

    def go_on(self) -> None:
        """Begin to sample and train, or go on after `Flow.is_enough` has said to stand still."""
        self.service.go_on()

    async def __aiter__(self) -> AsyncIterator[Counters]:
        """The counters after each update, until the end has come.

        Raises: what training failed with.
        """
        self.go_on()
        while not self.end.has_come:
            if await self.next_update():
                yield self.service.counters
        _ = self.end.reason

    async def next_update(self) -> bool:
        """Wait for the next update, or several that come together; False once the end has come.

        Raises: what training failed with.
        """
        while True:
            await self._news.wait()
            self._news.clear()
            if self.end.has_come:
                self._news.set()  # for whoever asks again
                _ = self.end.reason
                return False
            if self.service.counters.updates > self._num_told:
                self._num_told = self.service.counters.updates
                return True

    def stop(self, reason: str, *, hurry: bool = False) -> None:
        """End training in an orderly way; from now on nothing more gets into updates and results.

        Args:
            reason: one plain sentence.
            hurry: there is no time to wait for a long update.
        """
        self.end.come(reason, hurry=hurry)
        self.service.stop_training()
        if hurry and self._learner is not None:
            self._learner.learning.group.hurry()
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
        self.iteration.look_at_episodes(self.results.episodes_total)
        self.iteration.begin()
        return result

    async def await_last_update(self) -> None:
        """Wait for the running update, which is the last: in a hurry a little while, otherwise to its end."""
        self.service.stop_training()
        if not self._compiled.is_set() or self._learner is None:
            return
        await self._learner.last_update.wait(
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
        self._seal_compiled()  # that for batches of other sizes

    def _seal_compiled(self) -> None:
        """Let later runs use what was compiled."""
        cache = compilation_cache()
        if cache is not None:
            cache.seal()

    # Start ----------------------------------------------------------------------------------------------------

    async def _build(self) -> Learning:
        """Load TensorFlow and build, in a daemon thread: a stop during the import need not wait for it."""
        done: asyncio.Future[Learning] = self._loop.create_future()
        restored, self._restored = self._restored, None  # it may hold a whole replay

        def tell(set_it: Callable[[Any], None], value: object) -> None:
            if not done.done():
                set_it(value)

        def build() -> None:
            try:
                learning = build_learning(self._config, self._directory.path, self._plan)
                give_back(restored, self._config, learning)
            except BaseException as error:
                self._call_soon(tell, done.set_exception, error)
            else:
                self._call_soon(tell, done.set_result, learning)

        threading.Thread(target=build, name="build", daemon=True).start()
        learning = await done
        if self._config.resume:
            self._directory.save_config(self._config)
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
                self._tell(self.waiting_for(), logging.INFO)
            else:
                self._tell(f"waiting for workers: {present} of {wanted} are here", logging.INFO)

    # While it goes --------------------------------------------------------------------------------------------

    def _on_out_of_data(self) -> None:
        """End, unless a local worker is to come (again), which has its share still to read."""
        here = {*self.service.session.slots, *self.workers.given_up}
        if here.issuperset(range(1, self._config.num_workers + 1)):
            self.stop("Done: all stored experience was read.")

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
                self._compiled.set()
                self._begin_rates()
                logger.info("the update is compiled, in %.1f s", took_s)
                self._seal_compiled()
            case UpdateDone():
                self.service.take_update(event)
                saver.keep(event.state, event.experience)
                self._news.set()
            case UpdatesEnded(num_left):
                self.service.flow.leave_batches(num_left)
                self.learner.last_update.come()
            case UpdateFailed(error, batch):
                if batch is not None:
                    self.service.flow.drop_batch(batch)
                if self.end.has_come:
                    self._tell(f"the last update failed, and is left out: {error}", logging.ERROR)
                self.learner.last_update.come()
                self.fail(error)
