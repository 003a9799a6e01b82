"""A run of the command line: showing and writing results, saving checkpoints and ending in time."""

from __future__ import annotations

import asyncio
import logging
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from aiorl.acting.run_dir import RunDirectory
from aiorl.config.schema import CommonConfig
from aiorl.errors import CheckpointError
from aiorl.process.tasks import Tasks, end_in_time, report_stray_errors
from aiorl.run.build import LearningPlan
from aiorl.run.core import LearnerCore
from aiorl.run.end import Ended
from aiorl.run.evaluations import BEST, Evaluations
from aiorl.run.local_source import LocalSource, is_of_debugger
from aiorl.run.observers import Checkpoints, RunFiles, StopAt, StopCriteria
from aiorl.run.ports import TrainingView
from aiorl.run.remote_source import RemoteSource
from aiorl.run.report.console import Display, DisplayHandler, PlainDisplay, make_display
from aiorl.run.report.figures import Headline, Summary
from aiorl.run.report.plot import plot_learning_curve
from aiorl.run.restoring import checkpoint_to_resume
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
        here: LoopThread | None = None,
    ) -> None:
        """Prepare a run in an open run directory.

        Args:
            config: the effective configuration.
            directory: directory for the run's files.
            display: makes the display, by default a live panel or plain lines on stdout.
            plan: result of `plan_learning` for this config, if it has been called before.
            here: the loop's thread, which makes the caller's thread sample and learn; needed in a
                run without workers.
        """
        self.on_release: Callable[[], None] = lambda: None
        self.training: Training | None = None
        config = self._config = config if plan is None else plan.config
        self._plan = plan
        self._make_source = source_for(config, here)
        self._directory = directory
        criteria = StopCriteria.of(config)
        self._headline = Headline(config, criteria)
        self._display = display(self._headline)
        self._is_watched = False
        self._display_logs = DisplayHandler()
        self._display_logs.addFilter(lambda record: not hasattr(record, "shown"))
        self._files = RunFiles(config, directory)
        self._evaluations = Evaluations(
            config, directory.path, self._tell, can_play_here=config.is_alone
        )
        self._stop = StopAt(criteria, lambda: self._evaluations.mean_return)
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
            if command := training.source.join_command:
                logger.info("more workers join with: %s", command)
                self._display.way("join", command, time.monotonic())
            else:
                text = (
                    "this process samples by itself (num_workers: 0 without bind); no worker can"
                    " join"
                )
                self._tell(text, logging.INFO)
            await training.ready()
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
            if (made := self.training) is not None:
                await end_in_time(
                    "the account", lambda: made.source.overview.keep(made, end=reason)
                )
            await end_in_time("the files", self._files.close)
            await end_in_time("the display", self._close_display)
            if self.is_misconfigured:
                self._directory.abandon()

    def _make_training(self) -> Training:
        restored = checkpoint_to_resume(self._config, self._directory, self._tell)
        saving = Checkpoints(self._config.checkpoint_interval_s)
        training = Training(
            self._config,
            self._directory,
            self._tell,
            self._make_source,
            plan=self._plan,
            restored=restored,
            observers=[self._stop, saving, self._files, self._evaluations],
        )
        self._files.open(None if restored is None else restored.run)
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
            report(result, training.callbacks, self, self._files.write)
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
        said = 0.0
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
                and now - said > 3 * _SAY_WAITING_S
                and not self._is_watched
            ):
                said = now
                waiting = self._evaluations.holds_up or training.source.waiting_for()
                self._tell(f"no update for {training.silent_s:.0f} s: {waiting}", logging.WARNING)
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
        config = self._config
        try:
            picture = plot_learning_curve(
                self._directory.path,
                title=f"{config.algo} on {config.env}",
                stop_return=config.stop_return,
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
        if checkpoint:
            steps.append(("evaluate the policy", f"python -m aiorl.evaluate {directory}"))
            if (where.path / BEST).is_dir():
                best = shlex.quote(str(where.shown / BEST))
                steps.append(
                    (
                        "evaluate the checkpoint with the best evaluation",
                        f"python -m aiorl.evaluate {best}",
                    )
                )
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
    config: CommonConfig, here: LoopThread | None
) -> Callable[[TrainingView, LearnerCore], Source]:
    """Return the factory of a run's source: workers, or the caller's thread if the run has no
    workers.
    """
    if not config.is_alone:
        return RemoteSource
    assert here is not None, "a run without workers needs a thread that samples"
    return partial(LocalSource, here=here)


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
