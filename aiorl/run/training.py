"""Training: the loop that all trainers share, with any source of samples and any observers.

    training = Training(config, directory, tell, RemoteSource)   # or partial(LocalSource,
    here=loop_thread) try:
        await training.start()                        # listens, starts workers await
        training.ready()                        # TensorFlow, model, first workers or environments
        await training.begin()                        # an evaluation before the first update while
        (result := await training.train_iteration()) is not None:
            await training.after_iteration(result)    # evaluations, checkpoints
            report(result, training.callbacks, ...)   # the user's hook, files, display
    finally:
        await training.close(reason, final=True)

A source samples fragments and makes the updates, `Flow` turns fragments into train batches, and
observers react to progress. All of them are called on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from aiorl.acting.run_dir import RunDirectory
from aiorl.config.code import named_failures
from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError
from aiorl.learning.tf_runtime import compilation_cache, prepare_environment
from aiorl.net.protocol.ledger import Ledger
from aiorl.net.wire.messages import PolicyArrays
from aiorl.process.tasks import Tasks, first_of
from aiorl.run.build import Learning, LearningPlan, build_learning
from aiorl.run.flow import Counters, Flow, progress_of
from aiorl.run.overview import Overview
from aiorl.run.policy_group import UpdateDone
from aiorl.run.report.results import Progress, Results, SystemUsage
from aiorl.run.restoring import Restored, give_back
from aiorl.run.saving import Saver
from aiorl.sampling.callbacks import DefaultCallbacks

logger = logging.getLogger(__name__)

T = TypeVar("T")

Play = Callable[[Path, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Function that plays a checkpoint with the arguments of `aiorl.evaluate` and returns
`Evaluation.to_dict()`."""

_MANY_STEPS = 3000
"""Env steps per environment after which a quarter of the environments should have finished an
episode."""
_PACE_S = 1.0
_PACE_SHARE = 0.02


class Ended(Exception):
    """Exit from a start-up that the user ended; not an error.

    Attributes:
        reason: reason for the end, one plain sentence.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class End:
    """End of training and its reason; the first reason counts. Must be created on the running loop.

    Attributes:
        hurry: set as soon as there is no time to wait for a running update.
        is_final: False if the run is to be continued, here or on another host.
    """

    def __init__(self) -> None:
        self.hurry = asyncio.Event()
        self.is_final = True
        self._reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def has_come(self) -> bool:
        """True once there is a reason to end."""
        return self._reason.done()

    @property
    def reason(self) -> str:
        """Reason for the end, one plain sentence.

        Raises:
            BaseException: the error that training failed with.
        """
        return self._reason.result()

    def come(self, reason: str, *, hurry: bool = False, final: bool = True) -> None:
        """End training in an orderly way."""
        if hurry:
            self.hurry.set()
        if not self.has_come:
            self.is_final = final
            self._reason.set_result(reason)

    def fail(self, error: BaseException) -> None:
        """End training with an error."""
        if not self.has_come:
            self._reason.set_exception(error)
            self._reason.exception()  # marks it as retrieved, since no one may ask for it

    async def before(self, step: Coroutine[Any, Any, T]) -> T:
        """Return the result of a step, which is cancelled if the end comes first.

        Raises:
            Ended: the end came first.
        """
        done = await first_of(step, self._reason)
        if done is None:
            raise Ended(self.reason)
        return done.result()


async def wait_for_last(
    update: asyncio.Future[None], wait_s: float, hurry: asyncio.Event, on_wait: Callable[[], None]
) -> None:
    """Wait until the running update, the last one, has ended; in a hurry, wait ``wait_s`` seconds
    at most.

    Args:
        update: done when the update has ended.
        wait_s: seconds to wait in a hurry.
        hurry: set when there is no time; can also be set during the wait.
        on_wait: called when the update takes longer than ``wait_s``.
    """
    await asyncio.wait([update], timeout=wait_s)
    if not update.done() and not hurry.is_set():
        on_wait()
        await first_of(hurry.wait(), update)


class Observer:
    """Observer of a training: stop criteria, checkpoints, evaluations, files or a display.

    A subclass overrides the methods that it needs. All of them are called on the event loop.
    """

    def on_start(self, training: Training) -> None:
        """React to the start, when training listens but has no model yet."""

    async def on_begin(self, training: Training) -> None:
        """Act before the first update of this session."""

    def on_update(self, training: Training) -> None:
        """React to one or several new updates."""

    def needs_standstill(self, iteration: int) -> bool:
        """Return True to pause training at the end of an iteration until `after_iteration`
        returns.
        """
        return False

    async def after_iteration(self, training: Training, result: dict[str, Any]) -> None:
        """Add to the result of an iteration."""

    def before_checkpoint(self) -> None:
        """Act just before a checkpoint is written."""


class Iteration:
    """Current iteration of a training."""

    def __init__(self, config: CommonConfig, counters: Counters, *, is_paced: bool = False) -> None:
        """Begin the first iteration.

        Args:
            config: the effective configuration.
            counters: totals of the run.
            is_paced: end the first iteration after one update, and later ones at intervals that
                grow with the age of the run, up to a second.
        """
        self._config = config
        self._counters = counters
        self._is_paced = self._is_first = is_paced
        self._first_began = time.monotonic()
        self._steps_before = counters.env_steps_trained
        self._asks_for_horizon = config.horizon is None and config.input == "sampler"
        self.begin()

    def begin(self) -> None:
        """Begin the next iteration."""
        self._is_first = self._is_first and not self.has_trained
        self._began = time.monotonic()
        self._steps_before = self._counters.env_steps_trained

    def look_at_episodes(self, count: int) -> None:
        """Warn once if hardly any episode ends and no horizon is set.

        Args:
            count: episodes that have finished so far.
        """
        config = self._config
        num_envs = (
            max(1, config.num_workers) * config.samplers_per_worker * config.num_envs_per_worker
        )
        env_steps = self._counters.env_steps_sampled
        if not self._asks_for_horizon or env_steps < _MANY_STEPS * num_envs:
            return
        self._asks_for_horizon = False
        if 4 * count < num_envs:
            logger.warning(
                "only %d episodes ended in %s env steps. If episodes may never end, set horizon,"
                " the number of steps after which they are cut: --horizon 1000",
                count,
                f"{env_steps:,}",
            )

    @property
    def has_trained(self) -> bool:
        """True once this iteration has trained on any env steps."""
        return self._counters.env_steps_trained > self._steps_before

    def is_due(self) -> bool:
        """Return True if it can end: after ``min_iter_time_s`` (or its own pace) and
        ``timesteps_per_iteration``.
        """
        if self._is_first:
            return self.has_trained
        now = time.monotonic()
        pace_s = min(_PACE_S, _PACE_SHARE * (now - self._first_began)) if self._is_paced else 0.0
        took_s = now - self._began
        grown = self._counters.env_steps_trained - self._steps_before
        return (
            took_s >= (self._config.min_iter_time_s or pace_s)
            and grown >= self._config.timesteps_per_iteration
        )


class Source:
    """Samples for a training and makes its updates: `LocalSource` in one thread, `RemoteSource`
    with workers.

    It calls `Training.compiled_in` once, `Training.take_update` after each update, and
    `Training.stop` when all stored experience has been read.

    Attributes:
        play: plays a checkpoint for an evaluation; None leaves that to separate processes.
        addresses: addresses at which workers on other hosts reach the learner, best first; none if
            no worker can join.
        overview: the account of the run.
    """

    play: Play | None = None
    addresses: Sequence[str] = ()

    def __init__(self, training: Training) -> None:
        """Prepare for the given training without building anything yet."""
        self._config = training.config
        self._tell = training.tell
        self._training = training
        self._flow: Flow | None = None
        self.overview = Overview()
        self._news = asyncio.Event()
        self._status = ""

    @property
    def flow(self) -> Flow:
        """Flow that turns fragments into train batches; available after `begin`."""
        assert self._flow is not None, "training has not begun"
        return self._flow

    @property
    def join_command(self) -> str:
        """Command with which a worker joins from any host; empty if no worker can join."""
        return ""

    @property
    def status(self) -> str:
        """Current work or wait, before the first update."""
        return self._status

    def waiting_for(self) -> str:
        """Return the reason why nothing happens, in plain words."""
        raise NotImplementedError

    async def start(self) -> None:
        """Start everything that does not need the model."""
        raise NotImplementedError

    async def build(self, step: Callable[[], T]) -> T:
        """Return the result of a step that loads TensorFlow and builds the model."""
        raise NotImplementedError

    async def begin(self, learning: Learning) -> None:
        """Publish the first snapshot, and return when sampling can begin.

        Raises:
            ConfigError: a setting turns out impossible.
        """
        raise NotImplementedError

    async def compiled(self) -> None:
        """Wait until the updates are compiled."""

    def go_on(self) -> None:
        """Start sampling, or continue after a pause."""
        self.flow.go_on()

    async def advance(self) -> None:
        """Wait for an update or for `wake`; can return sooner.

        Raises:
            Exception: sampling or an update in the caller's thread failed.
        """
        raise NotImplementedError

    def wake(self) -> None:
        """Make `advance` return."""
        self._news.set()

    def stop(self, *, hurry: bool) -> None:
        """Stop for good: start no updates and add nothing to results."""
        raise NotImplementedError

    async def finish_update(self) -> None:
        """Wait for the running update, the last one: in a hurry for a short while, otherwise until
        it ends.
        """
        raise NotImplementedError

    async def settle(self) -> None:
        """Wait until no one else uses the policies."""

    def set_weights(self, weights: PolicyArrays) -> None:
        """Sample with weights that do not come from an update.

        Training must be idle and is paused afterwards.
        """
        self.flow.set_weights(weights)

    def begin_episodes_anew(self) -> None:
        """Continue after a checkpoint like a run restored from it, as far as possible."""

    def ask_for_experience(self) -> None:
        """Ask for the stored experience with the next update."""
        raise NotImplementedError

    def progress(self, perf: dict[str, float] | None) -> Progress:
        """Return the learner's current progress."""
        return progress_of(self._training.counters, self._training.ledger, self._flow, perf)

    async def close(self, reason: str, *, final: bool) -> None:
        """End everything that samples and learns."""
        raise NotImplementedError


class Training:
    """Trains one run.

    Attributes:
        config: the effective configuration.
        directory: the run's directory.
        tell: called with (text, logging level) of news for the user.
        end: end of the training and its reason.
        counters: totals of the run.
        results: episodes and rates.
        ledger: the account of env steps.
        iteration: the current iteration.
        source: samples and makes the updates.
        tasks: background tasks of the run.
        is_misconfigured: True if a setting turned out impossible before anything was trained.
        gate: settings by which environments reach the port for clients; {} if there is none.
    """

    def __init__(
        self,
        config: CommonConfig,
        directory: RunDirectory,
        tell: Callable[[str, int], None],
        make_source: Callable[[Training], Source],
        *,
        plan: LearningPlan | None = None,
        restored: Restored | None = None,
        observers: Sequence[Observer] = (),
        stands_still: bool = False,
    ) -> None:
        """Make the source, which listens if it has workers; call this on the running loop.

        Args:
            config: the effective configuration.
            directory: the run's directory.
            tell: called with (text, logging level) of news for the user.
            make_source: makes the source of this training.
            plan: result of `plan_learning` for this config, if it has been called before.
            restored: checkpoint to resume from; None begins a new run.
            observers: observers, called in this order.
            stands_still: True pauses training after each iteration until the next one is asked for.
                Otherwise training continues, and iterations are short at first and later a second
                long, so that curves have many points where they are steep.

        Raises:
            ConfigError: the source cannot be made.
        """
        prepare_environment(config)
        run = None if restored is None else restored.run
        self.end = End()
        self.counters = Counters() if run is None else run.counters
        self.ledger = Ledger() if run is None else Ledger.from_dict(run.ledger)
        self.results = Results(config.metrics_smoothing_episodes, time.monotonic())
        self.iteration = Iteration(config, self.counters, is_paced=not stands_still)
        self.tasks = Tasks(self.fail)
        self.is_misconfigured = False
        self.gate: dict[str, Any] = {}
        self.config = config
        self.directory = directory
        self.tell = tell
        self._plan = plan
        self._restored = restored
        self._observers = observers
        self._stands_still = stands_still
        self._learning: Learning | None = None
        self._saver: Saver | None = None
        self._usage = SystemUsage() if config.log_sys_usage else None
        self._last_heard: float | None = None
        self._num_told = self.counters.updates
        self.source = make_source(self)
        if run is not None:
            self.results.from_state(run.results, time.monotonic(), self.source.progress(None))

    # State --------------------------------------------------------------------------------------

    @property
    def learning(self) -> Learning:
        """Policies, algorithms and filters; available after `ready`."""
        assert self._learning is not None, "nothing is built yet"
        return self._learning

    @property
    def saver(self) -> Saver:
        """Writer of checkpoints; available after `ready`."""
        assert self._saver is not None, "nothing is built yet"
        return self._saver

    @property
    def flow(self) -> Flow:
        """Flow that turns fragments into train batches; available after `ready`."""
        return self.source.flow

    @property
    def callbacks(self) -> DefaultCallbacks | None:
        """Hooks of the user on the learner; None if there are none, and before `ready`."""
        return None if self._learning is None else self._learning.callbacks

    @property
    def newest_checkpoint(self) -> str:
        """Path of the newest checkpoint of this session; empty if there is none."""
        return "" if self._saver is None else self._saver.newest

    @property
    def status(self) -> str:
        """Current work or wait, before the first update."""
        return (
            "loading TensorFlow and building the model"
            if self._learning is None
            else self.source.status
        )

    @property
    def silent_s(self) -> float:
        """Seconds since the last update, or since updates were compiled; 0 before."""
        return 0.0 if self._last_heard is None else time.monotonic() - self._last_heard

    # The way through
    # ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the workers, if any; their processes load while the model is built.

        Raises:
            ConfigError: the run directory cannot be written.
            OSError: a worker could not be started.
        """
        for observer in self._observers:
            observer.on_start(self)
        await self.source.start()

    async def ready(self) -> None:
        """Load TensorFlow, build the model, and return when workers or environments are ready.

        Raises:
            Ended: the end came first.
            ConfigError: a setting turns out impossible.
            CheckpointError: the checkpoint belongs to another run.
            EnvError: the environment's constructor failed in this process.
        """
        began = time.monotonic()
        try:
            learning = self._learning = await self.end.before(self.source.build(self._build))
            if self.config.resume:
                self.directory.save_config(self.config)
            logger.info(
                "TensorFlow is loaded and the model is built, in %.1f s", time.monotonic() - began
            )
            await self.end.before(self.source.begin(learning))
        except ConfigError:
            self.is_misconfigured = True
            raise
        # from here on workers sample, also while the update is compiled
        self.results.begin_rates(time.monotonic())
        self.flow.is_enough = lambda: self.iteration.is_due() and self._needs_standstill()
        self.iteration.begin()

    async def begin(self) -> None:
        """Notify observers before the first update; call this after `ready`."""
        for observer in self._observers:
            await observer.on_begin(self)

    def _build(self) -> Learning:
        """Load TensorFlow and build the model, in a thread chosen by the source."""
        # it may hold a whole replay
        restored = self._restored
        self._restored = None
        resumed = None if restored is None else restored.checkpoint
        learning = build_learning(self.config, self.directory.path, self._plan, resumed=resumed)
        give_back(restored, self.config, learning)
        settings = {**self.config.env_config, **self.gate}
        learning.worker_part = learning.worker_part.model_copy(update={"env_config": settings})
        return learning

    def begin_saving(self, learning: Learning) -> None:
        """Keep the state that training begins with; the source calls this before the first
        update.
        """
        self._saver = Saver(self, learning)
        self._saver.keep(learning.group.hold_state())

    async def next_update(self) -> bool:
        """Wait for the next update, or several at the same time; return False once the end has
        come.

        Raises:
            BaseException: the error that training failed with.
        """
        while not self.end.has_come:
            if self.counters.updates > self._num_told:
                self._num_told = self.counters.updates
                for observer in self._observers:
                    observer.on_update(self)
                return True
            try:
                await self.source.advance()
            except Ended:
                break
        _ = self.end.reason
        return False

    async def train_iteration(self) -> dict[str, Any] | None:
        """Make updates until the iteration is over and return its result.

        Returns:
            The result; None if the end has come and the iteration has trained on nothing.

        Raises:
            BaseException: the error that training failed with, such as WorkerError.
        """
        if not self.flow.is_granting:  # the caller's pause does not count
            self.results.leave_out_pause(time.monotonic())
            self.iteration.begin()
        self.source.go_on()
        try:
            while await self.next_update():
                if self._is_iteration_over():
                    return self.finish_iteration()
        except asyncio.CancelledError:  # Ctrl-C: training is paused between two calls
            self.flow.stand_still()
            raise
        await self.source.finish_update()
        return self.finish_iteration() if self.iteration.has_trained else None

    def _is_iteration_over(self) -> bool:
        if self.end.has_come:
            return False
        return self.flow.is_still or (self.iteration.is_due() and not self._needs_standstill())

    def _needs_standstill(self) -> bool:
        number = self.results.training_iteration + 1
        return self._stands_still or any(
            observer.needs_standstill(number) for observer in self._observers
        )

    def finish_iteration(self) -> dict[str, Any]:
        """End the current iteration, begin the next one and return the result."""
        perf = self._usage.look() if self._usage is not None else None
        result = self.results.finish_iteration(
            time.monotonic(), self.source.progress(perf), timestamp=time.time()
        )
        result["run_id"] = self.directory.run_id
        self.source.overview.result = result
        self.iteration.look_at_episodes(self.results.episodes_total)
        self.iteration.begin()
        return result

    async def after_iteration(self, result: dict[str, Any]) -> None:
        """Let observers add to a result, such as evaluations."""
        for observer in self._observers:
            await observer.after_iteration(self, result)

    def before_checkpoint(self) -> None:
        """Notify observers that a checkpoint will be written."""
        for observer in self._observers:
            observer.before_checkpoint()

    def set_weights(self, weights: PolicyArrays) -> None:
        """Sample with weights that do not come from an update, and keep the current state of the
        policies.
        """
        self.source.set_weights(weights)
        self.saver.keep(self.learning.group.hold_state())

    def stop(self, reason: str, *, hurry: bool = False, final: bool = True) -> None:
        """End training in an orderly way; no updates are started and no results added afterwards.

        Args:
            reason: reason for the end, one plain sentence.
            hurry: True if there is no time to wait for a long update.
            final: False if the run is to be continued.
        """
        self.end.come(reason, hurry=hurry, final=final)
        if hurry and self._learning is not None:
            self._learning.group.hurry()
        self.source.stop(hurry=hurry)
        self.source.wake()

    def fail(self, error: BaseException) -> None:
        """End training with an error."""
        self.end.fail(error)
        self.source.wake()

    async def close(self, reason: str, *, final: bool) -> None:
        """End everything that was started, each part within its own time and even if others fail.

        Args:
            reason: reason sent to the workers.
            final: False asks workers of other hosts to come back, since training will continue,
                here or elsewhere.
        """
        await self.source.close(reason, final=final)
        await self.tasks.close()
        _seal_compiled()  # functions compiled for batches of other sizes

    # Called by the source
    # ----------------------------------------------------------------------------------------------

    def compiled_in(self, took_s: float) -> None:
        """Take note that the updates are compiled."""
        self._last_heard = time.monotonic()
        logger.info("the update is compiled, in %.1f s", took_s)
        _seal_compiled()

    def take_update(self, done: UpdateDone) -> None:
        """Account for an update that has ended and keep its state."""
        self._last_heard = time.monotonic()
        self.flow.take_update(done)
        self.saver.keep(done.state, done.experience)

    def waits_for_update(self) -> None:
        """Report that the last update takes longer than a moment."""
        self.tell(
            "waiting for the last update to end before its checkpoint is written "
            "(Ctrl-C writes a checkpoint of the update before it, without waiting)",
            logging.INFO,
        )


def _seal_compiled() -> None:
    """Make compiled functions available to later runs."""
    cache = compilation_cache()
    if cache is not None:
        cache.seal()


def report(
    result: dict[str, Any],
    hooks: DefaultCallbacks | None,
    trainer: object,
    *takers: Callable[[Mapping[str, Any]], None],
) -> None:
    """Pass a result to the user's hook, which can change it, and then to the takers.

    Args:
        result: result of an iteration that is over.
        hooks: the user's hooks, or None.
        trainer: argument of the hook.
        takers: functions that take the result, such as files and a display.

    Raises:
        ConfigError: the hook failed.
    """
    if hooks is not None:
        what = f"callbacks {type(hooks).__qualname__!r}: on_train_result"
        named_failures(hooks.on_train_result, what, "callbacks")(trainer=trainer, result=result)
    for take in takers:
        take(result)
