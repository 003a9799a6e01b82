"""A run of the command line: showing and writing results, saving checkpoints and ending in time."""

from __future__ import annotations

import asyncio
import logging
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from aiorl.acting.run_dir import RunDirectory
from aiorl.config.parts import RunParts
from aiorl.config.schema import CommonConfig
from aiorl.env.registry import CLIENT_ENV
from aiorl.errors import CheckpointError
from aiorl.process.tasks import Tasks, end_in_time, report_stray_errors
from aiorl.run.build import Learning, LearningPlan, build_learning
from aiorl.run.core import LearnerCore
from aiorl.run.end import Ended
from aiorl.run.evaluations import BEST, Evaluations
from aiorl.run.local_source import LocalSource, is_of_debugger
from aiorl.run.observers import STOP_CRITERIA, Checkpoints, RunFiles, StopAt, StopCriteria
from aiorl.run.policy_changes import plan_addition, plan_removal, policy_ids_of
from aiorl.run.ports import TrainingView
from aiorl.run.remote_source import RemoteSource
from aiorl.run.report.console import Display, DisplayHandler, PlainDisplay, make_display
from aiorl.run.report.figures import Headline, Summary
from aiorl.run.report.plot import plot_learning_curve
from aiorl.run.restoring import Restored, checkpoint_to_resume, give_back
from aiorl.run.source import Source
from aiorl.run.threads import BrokenOff, LoopThread
from aiorl.run.training import Training, report
from aiorl.text import indented, many_lines

logger = logging.getLogger(__name__)

_SAY_WAITING_S = 10.0
_TOLD_S = 0.2
_MAX_EVENT = 24_000  # characters: a failure's sentence and its traceback


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a run.

    Attributes:
        ok: True if a stop criterion was met or the user ended the run.
        reason: reason for the end, one plain sentence.
        result: the last result; empty if there is none.
    """

    ok: bool
    reason: str
    result: dict[str, Any]


class Run:
    """Run of the command line, which can run once. ``request_stop`` can be called at any time on
    the event loop.

    Attributes:
        on_release: called when the run begins to end everything that it started, which takes half a
            minute at most.
        training: the training; None before ``run`` listens.
    """

    def __init__(
        self,
        config: CommonConfig,
        directory: RunDirectory,
        display: Callable[[Headline], Display] = make_display,
        plan: LearningPlan | None = None,
        caller: LoopThread | None = None,
    ) -> None:
        """Prepare a run in an open run directory.

        Args:
            config: the effective configuration.
            directory: directory for the run's files.
            display: makes the display, by default a live panel or plain lines on stdout.
            plan: result of `plan_learning` for this config, if it has been called before.
            caller: the loop's thread, which makes the caller's thread sample and learn; needed in
                a run without workers.
        """
        self.on_release: Callable[[], None] = lambda: None
        self.training: Training | None = None
        config = self._config = config if plan is None else plan.config
        parts = RunParts.of(config)
        self._plan = plan
        self._directory = directory
        criteria = criteria_of(config)
        self._headline = headline_of(config, criteria)
        self._display = display(self._headline)
        self._is_watched = False
        self._display_logs = DisplayHandler()
        self._display_logs.addFilter(lambda record: not hasattr(record, "shown"))
        self._files = RunFiles(parts.files, directory)
        self._evaluations = Evaluations(
            parts.evaluation, directory.path, self._tell, can_play_here=config.is_alone
        )
        observers = [
            StopAt(criteria, lambda: self._evaluations.mean_return),
            Checkpoints(parts.save.interval_s),
            self._files,
            self._evaluations,
        ]
        self._new_training = partial(
            Training,
            parts,
            directory,
            self._tell,
            make_source=source_for(parts, caller),
            observers=observers,
        )
        self._picture = ""
        self._result: dict[str, Any] = {}

    @property
    def is_misconfigured(self) -> bool:
        """True if the run failed because of an impossible setting before anything was trained."""
        return self.training is not None and self.training.is_misconfigured

    @property
    def is_final(self) -> bool:
        """False if the run was stopped to be continued later."""
        return self.training is None or self.training.end.is_final

    # For callbacks
    # ----------------------------------------------------------------------------------------------

    @property
    def policy_ids(self) -> list[str]:
        """Ids of the policies, in order, with those that join before the next update and without
        those that leave.
        """
        return policy_ids_of(self._learning)

    def add_policy(
        self, policy_id: str, *, like: str, weights: Mapping[str, NDArray[Any]] | None = None
    ) -> None:
        """Add a policy before the next update; see `AlgorithmTrainer.add_policy`."""
        plan_addition(self._learning, policy_id, like, weights)

    def remove_policy(self, policy_id: str) -> None:
        """Remove a policy before the next update; see `AlgorithmTrainer.remove_policy`."""
        plan_removal(self._learning, policy_id)

    def set_env_config(self, changes: Mapping[str, Any]) -> None:
        """Change settings of the environments; see `AlgorithmTrainer.set_env_config`."""
        self._learning.env_changes.plan(changes)

    @property
    def _learning(self) -> Learning:
        assert self.training is not None, "callbacks are called while the run trains"
        return self.training.learning

    # The way through
    # ----------------------------------------------------------------------------------------------

    async def run(self) -> Outcome:
        """Train until the end; everything started is ended, whatever happens.

        Raises:
            ConfigError: a setting turns out impossible.
            AiorlError: training cannot continue; a checkpoint is saved first if there is anything
                new to save.
        """
        final = False
        reason = "the learner failed"
        tasks = Tasks(self._fail)
        drawing: asyncio.Task[None] | None = None
        try:
            self._display.start(time.monotonic())
            logging.getLogger().addHandler(self._display_logs)
            training = self.training = self._make_training()
            for name, address in self._files.ports.ways.items():
                self._display.way(name, address, time.monotonic())
            report_stray_errors(self._fail)
            tasks.start(self._tick(training), "display")
            tasks.start(training.source.overview.keep(training), "account")
            await training.start()
            command = training.source.join_command
            if command:
                logger.info("more workers join with: %s", command)
                self._display.way("join", command, time.monotonic())
            else:
                text = (
                    "this process samples by itself (num_workers: 0 without bind); no worker can"
                    " join"
                )
                self._tell(text, logging.INFO)
            await training.ready()
            if not self._directory.is_new:
                self._directory.save_config(self._config)
            await self._train(training)
            final = self.is_final
            reason = training.end.reason
            outcome = await self._finish(training, reason)
            if outcome.result:  # the picture takes a second, and so do the goodbyes
                drawing = tasks.start(asyncio.to_thread(self._draw), "picture")
            return outcome
        except Ended as ended:  # before there was anything to save
            final = self.is_final
            reason = ended.reason
            return Outcome(
                True,
                f"{ended.reason} Nothing has been trained yet, so there is nothing to save.",
                {},
            )
        finally:
            self.on_release()
            await end_in_time("the evaluations", self._evaluations.close)
            if self.training is not None:
                await self.training.close(reason, final=final)
            if drawing is not None:
                await end_in_time("the picture", lambda: drawing)
            await end_in_time("the run's tasks", tasks.close)
            await end_in_time("the account", lambda: self._end_account(reason))
            await end_in_time("the files", self._files.close)
            await end_in_time("the display", self._close_display)
            if self.is_misconfigured:
                self._directory.abandon()

    async def _end_account(self, reason: str) -> None:
        if self.training is not None:
            await self.training.source.overview.keep(self.training, end=reason)

    def _make_training(self) -> Training:
        restored = checkpoint_to_resume(self._directory, self._tell)
        resumed = None if restored is None else restored.run

        def build() -> Learning:
            return build_or_restore(self._config, self._directory, self._plan, restored)

        training = self._new_training(build=build, resumed=resumed)
        self._files.open(resumed)
        return training

    async def _train(self, training: Training) -> None:
        """Train to the end.

        Raises:
            Exception: training failed; a checkpoint is saved first.
        """
        try:
            await training.begin()
            await self._take_results(training)
        except Exception as error:
            try:
                if not await _is_users_end(training, error):
                    raise
                await self._take_results(training)  # the result of the updates before
            except Exception:
                await self._save_what_was_learned(training)
                raise

    async def _take_results(self, training: Training) -> None:
        while (result := await training.train_iteration()) is not None:
            await training.after_iteration(result)
            report(result, training.callbacks, self, self._files.write, training.take_result)
            self._result = result
            self._display.update(result, time.monotonic())
        # one may still run, of the last iteration
        await self._evaluations.finish(training, training.end.hurry)

    async def _finish(self, training: Training, reason: str) -> Outcome:
        """Save a last checkpoint and return the outcome."""
        saver = training.saver
        if not saver.has_news:
            since = "since the resume" if training.counters.updates else "yet"
            return Outcome(
                True, f"{reason} Nothing has been trained {since}, so there is nothing to save.", {}
            )
        try:
            await saver.save_all()
        except CheckpointError as error:
            return Outcome(False, str(error), self._result)
        return Outcome(True, reason, self._result)

    async def _save_what_was_learned(self, training: Training) -> None:
        """Write a checkpoint although the run has failed; errors here are only reported."""
        training.end.hurry.set()
        await training.source.finish_update()
        if training.saver.has_news:
            try:
                await training.saver.save_last()
            except CheckpointError as error:
                self._tell(str(error), logging.ERROR)

    def request_stop(self, reason: str, *, final: bool = True) -> None:
        """End the run in an orderly way within seconds: checkpoint and goodbyes.

        Unless ``final``, workers of other hosts wait for the learner that continues the run.
        """
        if self.training is not None:
            self.training.stop(reason, hurry=True, final=final)

    def _fail(self, error: BaseException) -> None:
        if self.training is not None:
            self.training.fail(error)

    # Display
    # ----------------------------------------------------------------------------------------------

    def make_way(self) -> None:
        """Release the terminal for another program, such as a debugger; later output consists of
        plain lines.
        """
        self._is_watched = True
        if not isinstance(self._display, PlainDisplay):
            self._display.close()
            self._display = PlainDisplay(self._headline, sys.stdout)
            self._display.start(time.monotonic())

    def _tell(self, text: str, level: int) -> None:
        # parts of the text may come from a peer or a file
        text = indented(many_lines(text, _MAX_EVENT))
        logger.log(level, "%s", text, extra={"shown": True})
        self._display.event(text, time.monotonic(), level)

    async def _tick(self, training: Training) -> None:
        warned_at = 0.0
        status = ""
        while True:
            now = time.monotonic()
            if not self._result and training.status != status:
                status = training.status
                self._display.status(status, now)
            self._display_logs.drain(self._display, now)
            self._display.tick(now)
            if (
                training.silent_s > _SAY_WAITING_S
                and now - warned_at > 3 * _SAY_WAITING_S
                and not self._is_watched
            ):
                warned_at = now
                waiting = self._evaluations.holds_up or training.source.waiting_for()
                level = logging.INFO if training.source.waits_for_others() else logging.WARNING
                self._tell(f"no update for {training.silent_s:.0f} s: {waiting}", level)
            await asyncio.sleep(0.5)

    def _close_display(self) -> None:
        logging.getLogger().removeHandler(self._display_logs)
        try:
            self._display_logs.drain(self._display, time.monotonic())
        finally:
            self._display.close()

    def _draw(self) -> None:
        """Draw the learning curve, if any episode has ended."""
        self._files.flush()
        headline = self._headline
        try:
            picture = plot_learning_curve(
                self._directory.path,
                title=f"{headline.algo} on {headline.env}",
                stop_return=headline.goals.get("stop_return"),
            )
        except Exception:
            # a run must not fail because matplotlib does
            logger.exception("the learning curve could not be drawn")
        else:
            self._picture = "" if picture is None else str(picture)

    def summary(self, outcome: Outcome) -> Summary:
        """Return the summary to show at the end."""
        where = self._directory

        def shown(path: str) -> str:
            return path and str(where.shown / Path(path).relative_to(where.path))

        directory = shlex.quote(str(where.shown))
        if self.training is None or (outcome.ok and not outcome.result):
            return Summary(f"{outcome.reason} (run directory: {directory})", "")
        checkpoint = self.training.newest_checkpoint
        steps = []
        if checkpoint and self._headline.env == CLIENT_ENV:
            steps.append(("answer clients by the policy", f"python -m aiorl.serve {directory}"))
        elif checkpoint:
            steps.append(("evaluate the policy", f"python -m aiorl.evaluate {directory}"))
            if (where.path / BEST).is_dir():
                best = shlex.quote(str(where.shown / BEST))
                steps.append(
                    (
                        "evaluate the checkpoint with the best evaluation",
                        f"python -m aiorl.evaluate {best}",
                    )
                )
        if checkpoint:
            steps.append(
                ("continue training from here", f"python -m aiorl.learner --resume {directory}")
            )
        steps.append(("draw the learning curve again", f"python -m aiorl.plot {directory}"))
        steps.append(("look at all figures", f"tensorboard --logdir {directory}"))
        return Summary(
            reason=outcome.reason,
            run_dir=str(where.shown),
            ok=outcome.ok,
            checkpoint=shown(checkpoint),
            picture=shown(self._picture),
            next_steps=steps,
        )

    def show(self, summary: Summary) -> None:
        """Show the summary after ``run`` has returned."""
        self._display.finish(summary, time.monotonic())


def source_for(
    parts: RunParts, caller: LoopThread | None
) -> Callable[[TrainingView, LearnerCore], Source]:
    """Return the factory of a run's source: workers, or the caller's thread if the run has no
    workers.
    """
    sample = parts.sample
    if not sample.is_alone:
        return partial(RemoteSource, transport=parts.transport, sample=sample)
    assert caller is not None, "a run without workers needs a thread that samples"
    return partial(LocalSource, sample=sample, bind=parts.transport.bind, loop=caller)


def build_or_restore(
    config: CommonConfig,
    directory: RunDirectory,
    plan: LearningPlan | None,
    restored: Restored | None,
) -> Learning:
    """Load TensorFlow and build a run's model, with the state of its checkpoint if it is resumed.

    Raises:
        AiorlError: as `build_learning` and `give_back`.
    """
    resumed = None if restored is None else restored.checkpoint
    learning = build_learning(config, directory.path, plan, resumed=resumed)
    give_back(restored, learning, init_from=config.init_from)
    return learning


def criteria_of(config: CommonConfig, **overrides: float | None) -> StopCriteria:
    """Return the stop criteria of a config, overridden by those that are not None.

    Raises:
        ConfigError: as `StopCriteria.of`.
    """
    bounds = {name: getattr(config, name, None) for name in STOP_CRITERIA}
    for name, bound in overrides.items():
        if bound is not None or name not in bounds:
            bounds[name] = bound
    return StopCriteria.of(bounds, has_evaluations=bool(config.evaluation_interval))


def headline_of(config: CommonConfig, goals: Mapping[str, float]) -> Headline:
    """Return what displays say of a run."""
    return Headline(
        algo=config.algo,
        env=str(config.env),
        num_workers=None if config.is_alone else config.num_workers,
        goals=goals,
    )


async def _is_users_end(training: Training, error: Exception) -> bool:
    """End training in an orderly way if the user pressed Ctrl-C or quit a debugger; return True in
    that case.
    """
    if isinstance(error, BrokenOff) and isinstance(error.__cause__, KeyboardInterrupt):
        # the signal may be handled later than the step that it interrupted
        await asyncio.sleep(_TOLD_S)
        training.stop("Ended by Ctrl-C.", hurry=True)
        return True
    if is_of_debugger(error):
        training.stop("Ended in the debugger.")
        return True
    return False
