"""Training: the only loop there is, whoever samples and whoever looks on.

    training = Training(config, directory, tell, RemoteSource)   # or partial(LocalSource, here=loop_thread)
    try:
        await training.start()                        # listens, starts workers
        await training.ready()                        # TensorFlow, model, first workers or environments
        await training.begin()                        # an evaluation before the first update
        while (result := await training.train_iteration()) is not None:
            await training.after_iteration(result)    # evaluations, checkpoints
            report(result, training.callbacks, ...)   # the user's hook, files, display
    finally:
        await training.close(reason, final=True)

A source samples fragments and makes the updates, `Flow` turns fragments into train batches, and observers look on.
All of it is called on the event loop.
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
from aiorl.run.policy_group import UpdateDone
from aiorl.run.report.results import Progress, Results, SystemUsage
from aiorl.run.restoring import Restored, give_back
from aiorl.run.saving import Saver
from aiorl.sampling.callbacks import DefaultCallbacks

logger = logging.getLogger(__name__)

T = TypeVar("T")

Play = Callable[[Path, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Plays a checkpoint by the arguments of `aiorl.evaluate`, and returns `Evaluation.to_dict()`."""

_MANY_STEPS = 3000
"""Env steps of each environment after which a quarter of them should have finished an episode."""
_PACE_S, _PACE_SHARE = 1.0, 0.02


class Ended(Exception):
    """The way out of a start-up that was ended; no error.

    Attributes:
        reason: one plain sentence.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class End:
    """Whether and why training ends; the first reason counts. Made on the running loop.

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
        """End training in an orderly way."""
        if hurry:
            self.hurry.set()
        if not self.has_come:
            self._reason.set_result(reason)

    def fail(self, error: BaseException) -> None:
        """End training with an error."""
        if not self.has_come:
            self._reason.set_exception(error)
            self._reason.exception()  # nobody may come to ask for it

    async def before(self, step: Coroutine[Any, Any, T]) -> T:
        """Return the result of a step, which is cancelled when the end comes first.

        Raises:
            Ended: it does.
        """
        done = await first_of(step, self._reason)
        if done is None:
            raise Ended(self.reason)
        return done.result()


async def wait_for_last(
    update: asyncio.Future[None], wait_s: float, hurry: asyncio.Event, on_wait: Callable[[], None]
) -> None:
    """Wait until the running update, which is the last, has ended; in a hurry, no longer than a little while.

    Args:
        update: done when it has ended.
        wait_s: the little while.
        hurry: set when, or as soon as, there is no time.
        on_wait: called when it takes longer.
    """
    await asyncio.wait([update], timeout=wait_s)
    if not update.done() and not hurry.is_set():
        on_wait()
        await first_of(hurry.wait(), update)


class Observer:
    """Looks on at a training: stop criteria, checkpoints, evaluations, files, a display.

    A subclass overrides what it needs. All of it is called on the event loop.
    """

    def on_start(self, training: Training) -> None:
        """Training has begun to listen; there is no model yet."""

    async def on_begin(self, training: Training) -> None:
        """Training can begin, or go on after a resume."""

    def on_update(self, training: Training) -> None:
        """One or several updates have been made."""

    def needs_standstill(self, iteration: int) -> bool:
        """Return whether training is to stand still at the end of an iteration, until `after_iteration` returns."""
        return False

    async def after_iteration(self, training: Training, result: dict[str, Any]) -> None:
        """Add to the result of an iteration."""

    def before_checkpoint(self) -> None:
        """A checkpoint is about to be written."""


class Iteration:
    """The iteration that is going on."""

    def __init__(self, config: CommonConfig, counters: Counters, *, is_paced: bool = False) -> None:
        """Begin.

        Args:
            config: the effective configuration.
            counters: totals of the run.
            is_paced: it is due after the first update, and then in step with the age of the run, up to a second.
        """
        self._config = config
        self._counters = counters
        self._is_paced = self._is_first = is_paced
        self._first_began = time.monotonic()
        self._steps_before = counters.env_steps_trained
        self._asks_for_horizon = config.horizon is None and config.input == "sampler"
        self.begin()

    def begin(self) -> None:
        """Begin the next one."""
        self._is_first = self._is_first and not self.has_trained
        self._began = time.monotonic()
        self._steps_before = self._counters.env_steps_trained

    def look_at_episodes(self, count: int) -> None:
        """Warn, once, if hardly any episode ends and no horizon is set.

        Args:
            count: episodes that have finished so far.
        """
        config = self._config
        num_envs = max(1, config.num_workers) * config.samplers_per_worker * config.num_envs_per_worker
        env_steps = self._counters.env_steps_sampled
        if not self._asks_for_horizon or env_steps < _MANY_STEPS * num_envs:
            return
        self._asks_for_horizon = False
        if 4 * count < num_envs:
            logger.warning(
                "only %d episodes ended in %s env steps. If episodes may go on for ever, set horizon, the number of "
                "steps after which they are cut: --horizon 1000",
                count, f"{env_steps:,}",
            )  # fmt: skip

    @property
    def has_trained(self) -> bool:
        """Whether anything was trained on in it."""
        return self._counters.env_steps_trained > self._steps_before

    def is_due(self) -> bool:
        """Return whether it may end: after ``min_iter_time_s``, or else its pace, and ``timesteps_per_iteration``."""
        if self._is_first:
            return self.has_trained
        now = time.monotonic()
        pace_s = min(_PACE_S, _PACE_SHARE * (now - self._first_began)) if self._is_paced else 0.0
        took_s, grown = now - self._began, self._counters.env_steps_trained - self._steps_before
        return took_s >= (self._config.min_iter_time_s or pace_s) and grown >= self._config.timesteps_per_iteration


class Source:
    """Samples for a training and makes its updates: `LocalSource` in one thread, `RemoteSource` with workers.

    It calls `Training.compiled_in` once, `Training.take_update` after each update, and `Training.stop` when all stored
    experience is read.

    Attributes:
        play: plays a checkpoint for an evaluation; None leaves that to processes of their own.
    """

    play: Play | None = None

    def __init__(self, training: Training) -> None:
        """Take the training that is sampled for; build nothing yet."""
        self._config = training.config
        self._tell = training.tell
        self._training = training
        self._flow: Flow | None = None
        self._news = asyncio.Event()
        self._status = ""

    @property
    def flow(self) -> Flow:
        """Takes fragments and makes train batches of them; from `begin` on."""
        assert self._flow is not None, "training has not begun"
        return self._flow

    @property
    def join_command(self) -> str:
        """The command with which a worker joins from any host; empty where none can."""
        return ""

    @property
    def status(self) -> str:
        """The present work or wait, before the first update."""
        return self._status

    def waiting_for(self) -> str:
        """Return why nothing happens, in plain words."""
        raise NotImplementedError

    async def start(self) -> None:
        """Start what does not need the model."""
        raise NotImplementedError

    async def build(self, step: Callable[[], T]) -> T:
        """Return the result of a step that loads TensorFlow and builds the model."""
        raise NotImplementedError

    async def begin(self, learning: Learning) -> None:
        """Give the first snapshot out, and return when it can be sampled with.

        Raises:
            ConfigError: a setting turns out impossible.
        """
        raise NotImplementedError

    async def compiled(self) -> None:
        """Return when the updates are compiled."""

    def go_on(self) -> None:
        """Begin to sample, or go on after training stood still."""
        self.flow.go_on()

    async def advance(self) -> None:
        """Return after an update, or after `wake`; may return sooner.

        Raises: the error of sampling or an update in the caller's thread.
        """
        raise NotImplementedError

    def wake(self) -> None:
        """Have `advance` return."""
        self._news.set()

    def stop(self, *, hurry: bool) -> None:
        """Take nothing more into updates and results."""
        raise NotImplementedError

    async def finish_update(self) -> None:
        """Wait for the running update, which is the last: in a hurry a little while, otherwise to its end."""
        raise NotImplementedError

    async def settle(self) -> None:
        """Return when nobody else uses the policies."""

    def set_weights(self, weights: PolicyArrays) -> None:
        """Sample with other weights than an update led to, while no update is made; training stands still then."""
        self.flow.set_weights(weights)

    def begin_episodes_anew(self) -> None:
        """After a checkpoint, sample like a run that is restored from it, as far as that can be."""

    def ask_for_experience(self) -> None:
        """Have the next update tell what is stored after it."""
        raise NotImplementedError

    def progress(self, perf: dict[str, float] | None) -> Progress:
        """Return where the learner stands now."""
        return progress_of(self._training.counters, self._training.ledger, self._flow, perf)

    async def close(self, reason: str, *, final: bool) -> None:
        """End all that samples and learns."""
        raise NotImplementedError


class Training:
    """Trains one run.

    Attributes:
        config: the effective configuration.
        directory: the run's.
        tell: told (text, logging level) what users want to know.
        end: whether and why it ends.
        counters: totals of the run.
        results: episodes and rates.
        ledger: the account of env steps.
        iteration: the one that goes on.
        source: samples and makes the updates.
        tasks: of the run.
        is_misconfigured: a setting turned out impossible before anything was trained.
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
        """Make the source, which listens for workers if it has any; to be called on the running loop.

        Args:
            config: the effective configuration.
            directory: the run's.
            tell: called with (text, logging level) of news for users.
            make_source: makes the source of this training.
            plan: made of the config before, if that was done.
            restored: to go on from; None begins a new run.
            observers: look on, each after the one before it.
            stands_still: training stands still after each iteration until the next one is asked for. Otherwise it goes
                on, and iterations are short at first and a second long later, so that curves are fine where they are
                steep.

        Raises:
            ConfigError: the source can't be made.
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

    # What others look at --------------------------------------------------------------------------------------

    @property
    def learning(self) -> Learning:
        """Policies, algorithms and filters; from `ready` on."""
        assert self._learning is not None, "nothing is built yet"
        return self._learning

    @property
    def saver(self) -> Saver:
        """Writes checkpoints; from `ready` on."""
        assert self._saver is not None, "nothing is built yet"
        return self._saver

    @property
    def flow(self) -> Flow:
        """Takes fragments and makes train batches of them; from `ready` on."""
        return self.source.flow

    @property
    def callbacks(self) -> DefaultCallbacks | None:
        """The user's hooks on the learner; None for none, and before `ready`."""
        return None if self._learning is None else self._learning.callbacks

    @property
    def newest_checkpoint(self) -> str:
        """Path of the newest checkpoint of this session, empty without one."""
        return "" if self._saver is None else self._saver.newest

    @property
    def status(self) -> str:
        """What is done or waited for, before the first update."""
        return "loading TensorFlow and building the model" if self._learning is None else self.source.status

    @property
    def silent_s(self) -> float:
        """How long there has been no update, from the moment on that updates are compiled."""
        return 0.0 if self._last_heard is None else time.monotonic() - self._last_heard

    # The way through ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the workers, if any; their processes load while the model is built.

        Raises:
            ConfigError: the run directory can't be written.
            OSError: a worker can't be started.
        """
        for observer in self._observers:
            observer.on_start(self)
        await self.source.start()

    async def ready(self) -> None:
        """Load TensorFlow, build the model, and return when workers or environments are there.

        Raises:
            Ended: the end came before.
            ConfigError: a setting turns out impossible.
            CheckpointError: the checkpoint is of another run.
            EnvError: the environment's constructor failed, in this process.
        """
        began = time.monotonic()
        try:
            learning = self._learning = await self.end.before(self.source.build(self._build))
            if self.config.resume:
                self.directory.save_config(self.config)
            logger.info("TensorFlow is loaded and the model is built, in %.1f s", time.monotonic() - began)
            await self.end.before(self.source.begin(learning))
        except ConfigError:
            self.is_misconfigured = True
            raise
        self._begin_rates()
        self.flow.is_enough = lambda: self.iteration.is_due() and self._needs_standstill()
        self.iteration.begin()

    async def begin(self) -> None:
        """Have observers do what comes before the first update; to be called after `ready`."""
        for observer in self._observers:
            await observer.on_begin(self)

    def _build(self) -> Learning:
        """Load TensorFlow and build; in the thread that the source has for it."""
        restored, self._restored = self._restored, None  # it may hold a whole replay
        learning = build_learning(self.config, self.directory.path, self._plan)
        give_back(restored, self.config, learning)
        return learning

    def begin_saving(self, learning: Learning) -> None:
        """Keep the state that training begins with; called by the source before the first update."""
        self._saver = Saver(self, learning)
        self._saver.keep(learning.group.hold_state())

    async def next_update(self) -> bool:
        """Wait for the next update, or several that come together; False once the end has come.

        Raises: what training failed with.
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
        """Make updates until the iteration is over; its result, None if the end has come and nothing was trained on.

        Raises: what training failed with, such as WorkerError.
        """
        if not self.flow.is_granting:  # the caller's pause is no part of it
            self.results.leave_out_pause(time.monotonic())
            self.iteration.begin()
        self.source.go_on()
        try:
            while await self.next_update():
                if self._is_iteration_over():
                    return self.finish_iteration()
        except asyncio.CancelledError:  # Ctrl-C: between two calls training stands still
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
        return self._stands_still or any(observer.needs_standstill(number) for observer in self._observers)

    def finish_iteration(self) -> dict[str, Any]:
        """Return the result of the iteration that ends now; the next one begins."""
        perf = self._usage.look() if self._usage is not None else None
        result = self.results.finish_iteration(time.monotonic(), self.source.progress(perf), timestamp=time.time())
        result["run_id"] = self.directory.run_id
        self.iteration.look_at_episodes(self.results.episodes_total)
        self.iteration.begin()
        return result

    async def after_iteration(self, result: dict[str, Any]) -> None:
        """Have observers add to a result: evaluations."""
        for observer in self._observers:
            await observer.after_iteration(self, result)

    def before_checkpoint(self) -> None:
        """Tell observers that a checkpoint is about to be written."""
        for observer in self._observers:
            observer.before_checkpoint()

    def set_weights(self, weights: PolicyArrays) -> None:
        """Sample with other weights than an update led to, and keep what the policies are now."""
        self.source.set_weights(weights)
        self.saver.keep(self.learning.group.hold_state())

    def stop(self, reason: str, *, hurry: bool = False) -> None:
        """End training in an orderly way; from now on nothing more gets into updates and results.

        Args:
            reason: one plain sentence.
            hurry: there is no time to wait for a long update.
        """
        self.end.come(reason, hurry=hurry)
        if hurry and self._learning is not None:
            self._learning.group.hurry()
        self.source.stop(hurry=hurry)
        self.source.wake()

    def fail(self, error: BaseException) -> None:
        """End training with an error."""
        self.end.fail(error)
        self.source.wake()

    async def close(self, reason: str, *, final: bool) -> None:
        """End all that was started: each step within its time, whatever becomes of the others.

        Args:
            reason: told to the workers.
            final: else workers from elsewhere are to come back, since training goes on where it listens now.
        """
        await self.source.close(reason, final=final)
        await self.tasks.close()
        _seal_compiled()  # that for batches of other sizes

    # What the source tells ------------------------------------------------------------------------------------

    def compiled_in(self, took_s: float) -> None:
        """The updates are compiled."""
        self._last_heard = time.monotonic()
        self._begin_rates()
        logger.info("the update is compiled, in %.1f s", took_s)
        _seal_compiled()

    def take_update(self, done: UpdateDone) -> None:
        """Account for an update that has ended, and keep what it led to."""
        self._last_heard = time.monotonic()
        self.flow.take_update(done)
        self.saver.keep(done.state, done.experience)

    def waits_for_update(self) -> None:
        """The last update takes longer than a moment."""
        self.tell(
            "waiting for the last update to end, then its checkpoint is written "
            "(Ctrl-C: that of the update before it, at once)",
            logging.INFO,
        )

    def _begin_rates(self) -> None:
        """Loading and compiling is no work that a rate is about."""
        self.results.begin_rates(time.monotonic(), self.source.progress(None))


def _seal_compiled() -> None:
    """Let later runs use what was compiled."""
    cache = compilation_cache()
    if cache is not None:
        cache.seal()


def report(
    result: dict[str, Any],
    hooks: DefaultCallbacks | None,
    trainer: object,
    *takers: Callable[[Mapping[str, Any]], None],
) -> None:
    """Show a result to the user's hook, which may change it, then hand it on.

    Args:
        result: of an iteration that is over.
        hooks: the user's; None for none.
        trainer: given to the hook.
        takers: take the result: files, a display.

    Raises:
        ConfigError: the hook failed.
    """
    if hooks is not None:
        what = f"callbacks {type(hooks).__qualname__!r}: on_train_result"
        named_failures(hooks.on_train_result, what, "callbacks")(trainer=trainer, result=result)
    for take in takers:
        take(result)
