"""Training: the loop that all trainers share, with any source of samples and any observers.

    training = Training(parts, directory, tell, make_source, build=build)
    try:
        await training.start()                                   # listens, starts workers
        await training.ready()              # TensorFlow, model, first workers or environments
        await training.begin()                                   # an evaluation before the first update
        while (result := await training.train_iteration()) is not None:
            await training.after_iteration(result)               # evaluations, checkpoints
            report(result, training.callbacks, ...)              # the user's hook, files, display
    finally:
        await training.close(reason, final=True)

The learner's core turns fragments into train batches and new weights into versions and leases; a
source drives it; observers react to progress. All of them are called on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from aiorl.acting.run_dir import RunDirectory
from aiorl.config.code import named_failures
from aiorl.config.parts import ReportPart, RunParts
from aiorl.errors import ConfigError
from aiorl.learning.tf_runtime import compilation_cache, prepare_environment
from aiorl.net.protocol.ledger import Ledger
from aiorl.net.wire.messages import PolicyArrays, Snapshot
from aiorl.run.build import Learning
from aiorl.run.core import LearnerCore
from aiorl.run.counters import Counters
from aiorl.run.end import End, Ended
from aiorl.run.health import Health
from aiorl.run.observers import Observer
from aiorl.run.policy_changes import change_policies, for_snapshot, take_planned
from aiorl.run.policy_group import UpdateDone
from aiorl.run.ports import Play, Tell, TrainingView
from aiorl.run.report.results import Progress, Results, SystemUsage
from aiorl.run.restoring import RunState
from aiorl.run.saving import Saver
from aiorl.run.source import Source
from aiorl.sampling.callbacks import DefaultCallbacks

logger = logging.getLogger(__name__)

_PACE_S = 1.0
_PACE_SHARE = 0.02
_LATE_SHARE = 1 / 3600
"""Shares of the age of a run: an iteration takes the first up to `_PACE_S`, and at least the second,
which is more after an hour. So a week has 22,000 results, not 600,000."""


class Iteration:
    """Current iteration of a training."""

    def __init__(
        self,
        report: ReportPart,
        counters: Counters,
        *,
        is_paced: bool = False,
        age_s: float = 0.0,
    ) -> None:
        """Begin the first iteration.

        Args:
            report: least length of an iteration, and whether it reports the use of the system.
            counters: totals of the run.
            is_paced: end the first iteration after one update, and later ones at intervals that
                grow with the age of the run: up to a second, and after an hour beyond that.
            age_s: seconds that the run has been trained before this session.
        """
        self._report = report
        self._counters = counters
        self._is_paced = self._is_first = is_paced
        self._first_began = time.monotonic() - age_s
        self._steps_before = counters.env_steps_trained
        self._usage = SystemUsage() if report.log_sys_usage else None
        self.begin()

    def begin(self) -> None:
        """Begin the next iteration."""
        self._is_first = self._is_first and not self.has_trained
        self._began = time.monotonic()
        self._steps_before = self._counters.env_steps_trained

    def usage(self) -> dict[str, float] | None:
        """Return the CPU and memory use since the last call; None if the run does not report it."""
        return None if self._usage is None else self._usage.measure()

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
        min_time_s = self._report.min_iter_time_s
        if self._is_paced and not min_time_s:
            age_s = now - self._first_began
            min_time_s = max(min(_PACE_S, _PACE_SHARE * age_s), _LATE_SHARE * age_s)
        is_long_enough = now - self._began >= min_time_s
        env_steps = self._counters.env_steps_trained - self._steps_before
        return is_long_enough and env_steps >= self._report.timesteps_per_iteration


class Training:
    """Trains one run.

    Attributes:
        directory: the run's directory.
        tell: called with (text, logging level) of news for the user.
        end: end of the training and its reason.
        core: the learner's core: fragments, versions, account.
        iteration: the current iteration.
        source: drives the core.
        is_misconfigured: True if a setting turned out impossible before anything was trained.
    """

    def __init__(
        self,
        parts: RunParts,
        directory: RunDirectory,
        tell: Tell,
        make_source: Callable[[TrainingView, LearnerCore], Source],
        *,
        build: Callable[[], Learning],
        resumed: RunState | None = None,
        observers: Sequence[Observer] = (),
        stands_still: bool = False,
    ) -> None:
        """Make the source, which listens if it has workers; call this on the running loop.

        Args:
            parts: the run's settings.
            directory: the run's directory.
            tell: called with (text, logging level) of news for the user.
            make_source: makes the source of this training.
            build: loads TensorFlow and builds the model, in a thread chosen by the source.
            resumed: totals and results to continue; None begins a new run.
            observers: observers, called in this order.
            stands_still: True pauses training after each iteration until the next one is asked for.
                Otherwise training continues, and iterations are short at first and later a second
                long, so that curves have many points where they are steep.

        Raises:
            ConfigError: the source cannot be made.
        """
        prepare_environment(parts.runtime)
        self.directory = directory
        self.tell = tell
        self.end = End()
        counters = Counters()
        results = Results(parts.report.metrics_smoothing_episodes, time.monotonic())
        ledger = Ledger()
        age_s = 0.0
        if resumed is not None:
            age_s = float(resumed.results["time_total_s"])
            counters = resumed.counters
            ledger = Ledger.from_dict(resumed.ledger)
        self.core = LearnerCore.of(
            directory.run_id,
            parts.transport.limits,
            parts.sample,
            counters=counters,
            results=results,
            ledger=ledger,
        )
        self.iteration = Iteration(parts.report, counters, is_paced=not stands_still, age_s=age_s)
        self.is_misconfigured = False
        self._health = Health(tell, results.courses, parts.sample)
        self._save = parts.save
        self._build: Callable[[], Learning] | None = build
        self._observers = observers
        self._stands_still = stands_still
        self._learning: Learning | None = None
        self._saver: Saver | None = None
        self._last_heard: float | None = None
        self._num_observed = counters.updates
        self.source = make_source(self, self.core)
        if resumed is not None:
            results.from_state(resumed.results, time.monotonic(), progress_of(self.source))

    # State
    # ----------------------------------------------------------------------------------------------

    @property
    def counters(self) -> Counters:
        """Totals of the run."""
        return self.core.counters

    @property
    def results(self) -> Results:
        """Episodes and rates."""
        return self.core.results

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
    def callbacks(self) -> DefaultCallbacks | None:
        """Hooks of the user on the learner; None if there are none, and before `ready`."""
        return None if self._learning is None else self._learning.callbacks

    @property
    def newest_checkpoint(self) -> str:
        """Path of the newest checkpoint of this session; empty if there is none."""
        return "" if self._saver is None else self._saver.newest

    @property
    def play(self) -> Play | None:
        """Function that plays evaluations in this process; None leaves that to processes."""
        return self.source.play

    @property
    def status(self) -> str:
        """Current work or wait, before the first update."""
        if self._learning is None:
            return "loading TensorFlow and building the model"
        return self.source.status

    @property
    def silent_s(self) -> float:
        """Seconds since the last update, or since updates were compiled; 0 before."""
        return 0.0 if self._last_heard is None else time.monotonic() - self._last_heard

    # From the start to the first update
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
            building = self.source.build(self._build_learning)
            learning = self._learning = await self.end.before(building)
            logger.info(
                "TensorFlow is loaded and the model is built, in %.1f s", time.monotonic() - began
            )
            self.results.policies_removed(learning.changes.removed)
            self._health.knows_start = learning.is_fresh or bool(self.results.courses)
            await self.end.before(self.source.begin(learning))
        except ConfigError:
            self.is_misconfigured = True
            raise
        if any(observer.env_settings() for observer in self._observers):
            # or clients would wait for actions while the first update is compiled
            await self.compiled()
        # from here on workers sample, also while the update is compiled
        self.results.begin_rates(time.monotonic())
        self.core.is_enough = lambda: self.iteration.is_due() and self._needs_standstill()
        self.iteration.begin()

    def _build_learning(self) -> Learning:
        """Load TensorFlow and build the model, in a thread chosen by the source."""
        build = self._build
        self._build = None  # it may hold a whole replay
        assert build is not None, "it is built once"
        learning = build()
        settings = dict(learning.worker_part.env_config)
        for observer in self._observers:
            settings |= observer.env_settings()
        learning.worker_part = learning.worker_part.model_copy(update={"env_config": settings})
        return learning

    def begin_saving(self, learning: Learning) -> None:
        """Keep the state that training begins with, before the first update."""
        self._saver = Saver(
            self, self.core, learning, self.source.ask_for_experience, save=self._save
        )
        self._saver.keep(learning.group.hold_state())

    async def begin(self) -> None:
        """Notify observers before the first update; call this after `ready`."""
        for observer in self._observers:
            await observer.on_begin(self)

    # Iterations
    # ----------------------------------------------------------------------------------------------

    async def train_iteration(self) -> dict[str, Any] | None:
        """Make updates until the iteration is over and return its result.

        Returns:
            The result; None if the end has come and the iteration has trained on nothing.

        Raises:
            BaseException: the error that training failed with, such as WorkerError.
        """
        await self.change_policies()
        await self.change_env_config()
        if not self.core.is_granting:  # the caller's pause does not count
            self.results.leave_out_pause(time.monotonic())
            self.iteration.begin()
        self.core.go_on()
        self.source.pump()
        try:
            while await self._next_update():
                if self._is_iteration_over():
                    return self.finish_iteration()
        except asyncio.CancelledError:  # Ctrl-C: training is paused between two calls
            self.core.stand_still()
            raise
        await self.source.finish_update()
        await self.change_policies()  # for the last checkpoint
        await self.change_env_config()
        if not self.iteration.has_trained:
            return None
        return self.finish_iteration()

    async def _next_update(self) -> bool:
        """Wait for the next update, or several at the same time; return False once the end has
        come.

        Raises:
            BaseException: the error that training failed with.
        """
        while not self.end.has_come:
            if self.counters.updates > self._num_observed:
                self._num_observed = self.counters.updates
                for observer in self._observers:
                    observer.on_update(self)
                return True
            try:
                await self.source.advance()
            except Ended:
                break
        _ = self.end.reason  # raises the error, if there is one
        return False

    def _is_iteration_over(self) -> bool:
        if self.end.has_come:
            return False
        return self.core.is_still or (self.iteration.is_due() and not self._needs_standstill())

    def _needs_standstill(self) -> bool:
        number = self.results.training_iteration + 1
        return self._stands_still or any(
            observer.needs_standstill(number) for observer in self._observers
        )

    def finish_iteration(self) -> dict[str, Any]:
        """End the current iteration, begin the next one and return the result."""
        progress = progress_of(self.source, self.iteration.usage())
        now = time.monotonic()
        result = self.results.finish_iteration(now, progress, timestamp=time.time())
        result["run_id"] = self.directory.run_id
        result["health"] = self._health.look(result, self._action_spaces())
        self._health.look_at_episodes(self.counters.env_steps_sampled, self.results.episodes_total)
        self.source.overview.result = result
        self.iteration.begin()
        return result

    def _action_spaces(self) -> dict[str, list[Mapping[str, Any]]]:
        """Return the action spaces of each learner's policies."""
        group = self.learning.group
        spaces = self.learning.spaces
        return {
            name: [
                spaces[policy_id]["action"]
                for policy_id in group.policies_of(name)
                if policy_id in spaces
            ]
            for name in group.learners
        }

    async def after_iteration(self, result: dict[str, Any]) -> None:
        """Let observers add to a result, such as evaluations."""
        for observer in self._observers:
            await observer.after_iteration(self, result)

    # Between updates
    # ----------------------------------------------------------------------------------------------

    async def compiled(self) -> None:
        """Wait until the updates are compiled."""
        await self.source.compiled()

    async def settle(self) -> None:
        """Wait until no one else uses the policies, even if the iteration was interrupted."""
        await self.source.compiled()
        self.source.hold()
        while not self.core.is_idle:
            if not await self._next_update():
                return

    def set_weights(self, weights: PolicyArrays) -> None:
        """Sample with weights that do not come from an update, and keep the current state of the
        policies.
        """
        self.source.set_weights(weights)
        self.saver.keep(self.learning.group.hold_state())

    async def change_policies(self) -> None:
        """Add and remove policies as planned (`aiorl.run.policy_changes`), once no update is in
        work.

        Raises:
            ConfigError: a message has no room for all policies.
        """
        learning = self.learning
        changes = learning.changes
        if not changes.to_add and not changes.to_remove:
            return
        if not self.end.has_come:
            await self.settle()
        if not self.core.is_idle:  # the end came before the update ended
            return
        added, removed = take_planned(learning, self.counters.env_steps_sampled)
        newest = self.core.session.start_data.snapshot
        assert newest is not None, "training has begun"
        snapshot = Snapshot(
            version=newest.version + 1,
            since=newest.version,
            weights={policy_id: policy.weights for policy_id, policy in added.items()},
            filters={policy_id: policy.filter.state() for policy_id, policy in added.items()},
            filter_acks={},
            global_vars={},
            policies=for_snapshot(added, removed),
        )
        self.source.check_room(snapshot.after(newest))
        change_policies(learning, added, removed)
        self.results.policies_removed(removed)
        self.source.change_policies(snapshot.policies, snapshot.weights, learning.filters)
        self.saver.policies_changed()
        self.saver.keep(learning.group.hold_state())

    def take_result(self, result: Mapping[str, Any]) -> None:
        """Plan the settings of environments that follow from a result, if the user has a function
        for them.

        Raises:
            ConfigError: the function failed, or returned something else.
        """
        changes = self.learning.env_changes
        if changes.function is not None:
            changes.plan_by(changes.function, result)

    async def change_env_config(self) -> None:
        """Change settings of environments as planned (`aiorl.run.env_changes`).

        Workers get them with the next weights, and at once while training is paused.
        """
        learning = self.learning
        changes = learning.env_changes
        if not changes.planned:
            return
        env_config = changes.make(learning.worker_part.env_config)
        learning.worker_part = learning.worker_part.model_copy(update={"env_config": env_config})
        publisher = self.core.publisher
        publisher.env_config = learning.worker_part.to_dict()["env_config"]
        publisher.env_changes = changes.number
        self.saver.policies_changed()
        if self.core.is_granting:
            return
        if not self.end.has_come:
            await self.settle()
        if self.core.is_idle:
            self.set_weights({})

    def before_checkpoint(self) -> None:
        """Notify observers that a checkpoint will be written."""
        for observer in self._observers:
            observer.before_checkpoint()

    def compiled_in(self, took_s: float) -> None:
        """Take note that the updates are compiled."""
        self._last_heard = time.monotonic()
        logger.info("the update is compiled, in %.1f s", took_s)
        _seal_compiled()

    def update_ended(self, update: UpdateDone) -> None:
        """Keep the state after an update that the core has accounted for."""
        self._last_heard = time.monotonic()
        self.saver.keep(update.state, update.experience)

    # End
    # ----------------------------------------------------------------------------------------------

    def stop(self, reason: str, *, hurry: bool = False, final: bool = True) -> None:
        """End training in an orderly way; no updates are started and no results added afterwards.

        Args:
            reason: reason for the end, one plain sentence.
            hurry: True if there is no time to wait for a long update.
            final: False if the run is to be continued.
        """
        self.end.set(reason, hurry=hurry, final=final)
        if hurry and self._learning is not None:
            self._learning.group.hurry()
        self.source.stop()
        self.source.news.set()

    def fail(self, error: BaseException) -> None:
        """End training with an error."""
        self.end.fail(error)
        self.source.news.set()

    async def close(self, reason: str, *, final: bool) -> None:
        """End everything that was started, each part within its own time and even if others fail.

        Args:
            reason: reason sent to the workers.
            final: False asks workers of other hosts to come back, since training will continue,
                here or elsewhere.
        """
        await self.source.close(reason, final=final)
        if self._saver is not None:
            await self._saver.close()
        _seal_compiled()  # functions compiled for batches of other sizes


def progress_of(source: Source, perf: Mapping[str, float] | None = None) -> Progress:
    """Return the learner's progress, with its CPU and memory use."""
    core = source.core
    traffic = source.traffic()
    return Progress(
        **asdict(core.counters),
        num_healthy_workers=len(source.workers()),
        ledger=core.session.ledger.as_dict(),
        transport={
            "queued_fragments": core.queued_fragments,
            "queued_messages_out": traffic.queued_messages,
            "rejected_messages": traffic.rejected,
            "refused_connections": traffic.refused,
            "dropped_peers": traffic.dropped,
        },
        bytes_in=traffic.bytes_in,
        bytes_out=traffic.bytes_out,
        learner=core.metrics,
        perf=perf,
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
