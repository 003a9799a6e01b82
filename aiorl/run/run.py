"""One run of the command line: shows what training yields, writes it down, saves it in passing, and ends it in time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from aiorl.acting.run_dir import RunDirectory
from aiorl.config.schema import CommonConfig
from aiorl.errors import CheckpointError, ConfigError
from aiorl.process.event_loop import tell_of_stray_errors
from aiorl.process.tasks import Tasks, end_in_time
from aiorl.run.build import LearningPlan
from aiorl.run.end import End, Ended
from aiorl.run.evaluations import BEST, Evaluations, Play
from aiorl.run.flow import Counters, Flow
from aiorl.run.iterations import Iteration, report
from aiorl.run.report.console import Display, DisplayHandler, Headline, PlainDisplay, Summary, make_display
from aiorl.run.report.plot import plot_learning_curve
from aiorl.run.report.results import Results
from aiorl.run.restoring import Restored, checkpoint_to_resume
from aiorl.run.run_files import RunFiles
from aiorl.run.saving import Saver
from aiorl.run.setup import TrainingSetup
from aiorl.run.training import Training
from aiorl.sampling.callbacks import DefaultCallbacks
from aiorl.text import indented, many_lines

__all__ = ["Outcome", "Run"]

logger = logging.getLogger(__name__)

_SAY_WAITING_S = 10.0
_PACE_S, _PACE_SHARE = 1.0, 0.02
_MAX_EVENT = 24_000  # characters: a failure's sentence and its traceback


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        ok: a stop criterion was met or the user ended it.
        reason: one plain sentence.
        result: the last result, empty if there is none.
    """

    ok: bool
    reason: str
    result: dict[str, Any]


class _Training(Protocol):
    """What a run shows, writes down and ends: `Training`, which says what each of these is.

    All of it is called on the loop.
    """

    @property
    def end(self) -> End: ...

    @property
    def results(self) -> Results: ...

    @property
    def counters(self) -> Counters: ...

    @property
    def iteration(self) -> Iteration: ...

    @property
    def flow(self) -> Flow: ...

    @property
    def saver(self) -> Saver: ...

    @property
    def callbacks(self) -> DefaultCallbacks | None: ...

    @property
    def is_misconfigured(self) -> bool: ...

    @property
    def newest_checkpoint(self) -> str: ...

    @property
    def join_command(self) -> str: ...

    @property
    def status(self) -> str: ...

    @property
    def silent_s(self) -> float: ...

    @property
    def play(self) -> Play | None: ...

    async def start(self) -> None: ...

    async def ready(self) -> None: ...

    async def compiled(self) -> None: ...

    def __aiter__(self) -> AsyncIterator[Counters]: ...

    def go_on(self) -> None: ...

    def finish_iteration(self) -> dict[str, Any]: ...

    def waiting_for(self) -> str: ...

    def stop(self, reason: str, *, hurry: bool = False) -> None: ...

    def fail(self, error: BaseException) -> None: ...

    async def await_last_update(self) -> None: ...

    async def close(self, reason: str, *, final: bool) -> None: ...


class Run:
    """Runs once. ``request_stop`` may be called at any time on the event loop.

    Attributes:
        on_release: called when what was started begins to be ended, which takes half a minute at most.
        training: what is trained; None before ``run`` listens.
    """

    def __init__(
        self,
        config: CommonConfig,
        directory: RunDirectory,
        display: Callable[[Headline], Display] = make_display,
        plan: LearningPlan | None = None,
        make_training: Callable[[TrainingSetup], _Training] = Training,
    ) -> None:
        """Take an open run directory.

        Args:
            config: the effective configuration.
            directory: where the run's files go.
            display: makes what shows the run; a live panel, or plain lines, on stdout unless said otherwise.
            plan: what was made of the config before, if that was done.
            make_training: makes what trains, on the running loop.
        """
        self.on_release: Callable[[], None] = lambda: None
        self.training: _Training | None = None
        self._config = config if plan is None else plan.config
        self._plan = plan
        self._make_training = make_training
        self._directory = directory
        self._headline = Headline(
            config.algo,
            config.env or "",
            config.num_workers,
            config.stop_return,
            config.stop_timesteps,
            config.stop_time_s,
            is_alone=config.is_alone,
        )
        self._display = display(self._headline)
        self._is_watched = False
        self._display_logs = DisplayHandler()
        self._display_logs.addFilter(lambda record: not hasattr(record, "shown"))
        self._files = RunFiles(self._config, directory, self._tell)
        self._began = self._checkpointed = time.monotonic()
        self._status = self._picture = ""
        self._result: dict[str, Any] = {}
        self._evaluations: Evaluations | None = None

    @property
    def is_misconfigured(self) -> bool:
        """Whether it failed at a setting that turned out impossible before anything was trained."""
        return self.training is not None and self.training.is_misconfigured

    # The way through ------------------------------------------------------------------------------------------

    async def run(self) -> Outcome:
        """Train until the end; everything started is ended, whatever happens.

        Raises:
            ConfigError: a setting turns out impossible.
            AiorlError: training cannot go on; the newest checkpoint is saved first where there is something to save.
        """
        final, reason = False, "the learner failed"
        tasks = Tasks(self._fail)
        drawing: asyncio.Task[None] | None = None
        try:
            self._display.start(time.monotonic())
            logging.getLogger().addHandler(self._display_logs)
            restored = checkpoint_to_resume(self._config, self._directory, self._tell)
            training = self.training = self._make_training(
                TrainingSetup(
                    self._config,
                    self._directory,
                    self._tell,
                    plan=self._plan,
                    restored=restored,
                    before_saving=self._files.before_checkpoint,
                )
            )
            tell_of_stray_errors(self._fail)
            self._stop_in_time(training)
            tasks.start(self._tick(training), "display")
            await training.start()
            if training.join_command:
                logger.info("more workers join with: %s", training.join_command)
                self._display.join(training.join_command, time.monotonic())
            else:
                self._tell(
                    "this process samples by itself (num_workers: 0 without bind); no worker can join", logging.INFO
                )
            self._open_files(restored)
            await training.ready()
            evaluations = self._evaluations = self._make_evaluations(training)
            if evaluations is not None:
                await training.compiled()  # until then others use the policies
                await self._evaluate(training, evaluations, training.results.training_iteration)
            try:
                async for _ in training:
                    await self._after_update(training)
            except Exception:
                await self._save_what_was_learned(training)
                raise
            final, reason = True, training.end.reason
            outcome = await self._finish(training, reason)
            if outcome.result:  # the picture takes a second, and so do the goodbyes
                drawing = tasks.start(asyncio.to_thread(self._draw), "picture")
            return outcome
        except Ended as ended:  # before there was anything to save
            final, reason = True, ended.reason
            return Outcome(True, f"{ended.reason} Nothing was trained yet, so there is nothing to save.", {})
        finally:
            self.on_release()
            if self._evaluations is not None:
                await end_in_time("the evaluations", self._evaluations.close)
            if self.training is not None:
                await self.training.close(reason, final=final)
            if drawing is not None:
                await end_in_time("the picture", lambda: drawing)
            await end_in_time("the run's tasks", tasks.close)
            await end_in_time("the files", self._files.close)
            await end_in_time("the display", self._close_display)
            if self.is_misconfigured:
                self._directory.abandon()

    def request_stop(self, reason: str) -> None:
        """End the run in an orderly way, within seconds: checkpoint, goodbye, exit status 0."""
        if self.training is not None:
            self.training.stop(reason, hurry=True)

    def make_way(self) -> None:
        """Leave the terminal to somebody else who talks to the user there, such as a debugger; plain lines follow."""
        self._is_watched = True
        if not isinstance(self._display, PlainDisplay):
            self._display.close()
            self._display = PlainDisplay(self._headline, sys.stdout)
            self._display.start(time.monotonic())

    def _stop_in_time(self, training: _Training) -> None:
        """See that the time to stop is kept, whatever goes on then."""
        stop_time_s = self._config.stop_time_s
        if stop_time_s is not None:
            left_s = max(0.0, self._began + stop_time_s - time.monotonic())
            loop = asyncio.get_running_loop()
            loop.call_later(left_s, training.stop, f"Done: {stop_time_s:g} s have passed.")

    def _fail(self, error: BaseException) -> None:
        if self.training is not None:
            self.training.fail(error)

    def _open_files(self, restored: Restored | None) -> None:
        if restored is None:
            self._files.open()
        else:
            run = restored.run
            iteration, steps = int(run.results["training_iteration"]), run.counters.env_steps_sampled
            self._files.open(resume_iteration=iteration, resume_step=steps)

    # While it goes --------------------------------------------------------------------------------------------

    async def _after_update(self, training: _Training) -> None:
        now, config = time.monotonic(), self._config
        reason = self._stop_reason(training)
        if reason:  # the last result is of all updates, those under way included
            training.stop(reason)
            return
        if self._is_due(training):
            if self._evaluations is not None and self._evaluations.is_due(self._next_iteration(training)):
                if not (self._evaluations.is_beside or training.flow.is_still):
                    return  # the next update is followed by it
                await self._evaluate(training, self._evaluations, self._next_iteration(training))
            self._finish_iteration(training)
            training.go_on()
        if config.checkpoint_interval_s and now - self._checkpointed >= config.checkpoint_interval_s:
            self._checkpointed = now
            training.saver.save_in_passing()

    def _is_due(self, training: _Training) -> bool:
        """Whether the iteration may end.

        Left to itself a run reports often at first and once a second later: curves are fine where they are steep, and
        the files of long runs stay small.
        """
        is_first = not self._result  # at once: it shows that all is well
        return is_first or training.iteration.is_due(min(_PACE_S, _PACE_SHARE * (time.monotonic() - self._began)))

    def _next_iteration(self, training: _Training) -> int:
        return training.results.training_iteration + 1

    def _make_evaluations(self, training: _Training) -> Evaluations | None:
        """Evaluations as configured; where none is beside training, that stands still for each."""
        if not self._config.evaluation_interval:
            return None
        save, run_dir = partial(training.saver.save_last, with_experience=False), self._directory.path
        made = Evaluations(self._config, run_dir, save, tell=self._tell, play=training.play)
        if not made.is_beside:
            training.flow.is_enough = lambda: made.is_due(self._next_iteration(training)) and self._is_due(training)
        return made

    async def _evaluate(self, training: _Training, evaluations: Evaluations, iteration: int) -> None:
        if evaluations.is_beside:
            evaluations.begin(iteration)
        else:
            with contextlib.suppress(Ended):  # whoever looks next sees that
                await training.end.before(evaluations.run(iteration))

    def _stop_reason(self, training: _Training) -> str:
        """Why training is to end now, but for its time; "" if it is not."""
        config, results, trained = self._config, training.results, training.counters.env_steps_trained
        if config.stop_return is not None and results.has_reached(config.stop_return):
            return f"Solved: mean return {results.mean_last():.1f} over the last 100 episodes."
        evaluations, wanted = self._evaluations, config.stop_evaluation_return
        if evaluations is not None and wanted is not None and evaluations.mean_return >= wanted:
            return f"Done: an evaluation gave a mean return of {evaluations.mean_return:,.1f}."
        if config.stop_timesteps is not None and trained >= config.stop_timesteps:
            return f"Done: {trained:,} env steps were trained on."
        return ""

    def _finish_iteration(self, training: _Training) -> None:
        result = training.finish_iteration()
        if self._evaluations is not None:
            result |= self._evaluations.take()
        report(result, training.callbacks, self, self._files.write)
        self._result = result
        self._display.update(result, time.monotonic())

    def _tell(self, text: str, level: int) -> None:
        text = indented(many_lines(text, _MAX_EVENT))  # parts of it may come from a peer or a file
        logger.log(level, "%s", text, extra={"shown": True})
        self._display.event(text, time.monotonic(), level)

    async def _tick(self, training: _Training) -> None:
        said = 0.0
        while True:
            now = time.monotonic()
            if not self._result and training.status != self._status:
                self._status = training.status
                self._display.status(self._status, now)
            self._display_logs.drain(self._display, now)
            self._display.tick(now)
            if training.silent_s > _SAY_WAITING_S and now - said > 3 * _SAY_WAITING_S and not self._is_watched:
                said = now
                waiting = (self._evaluations and self._evaluations.holds_up) or training.waiting_for()
                self._tell(f"no update for {training.silent_s:.0f} s: {waiting}", logging.WARNING)
            await asyncio.sleep(0.5)

    # End ------------------------------------------------------------------------------------------------------

    async def _finish(self, training: _Training, reason: str) -> Outcome:
        ok = True
        await training.await_last_update()
        if self._evaluations is not None and not training.end.hurry.is_set():
            await self._evaluations.finish()
        if training.iteration.has_trained:
            try:
                self._finish_iteration(training)
            except ConfigError as error:
                logger.exception("the last iteration is not reported")
                ok, reason = False, str(error)
        saver = training.saver
        if not saver.has_news:
            since = "since the resume" if training.counters.updates else "yet"
            return Outcome(ok, f"{reason} Nothing was trained {since}, so there is nothing to save.", {})
        try:
            await saver.save_last()
        except CheckpointError as error:
            ok, reason = False, str(error)
        return Outcome(ok, reason, self._result)

    async def _save_what_was_learned(self, training: _Training) -> None:
        """Write a checkpoint although the run has failed; it does so by its own error, not by one of this."""
        training.end.hurry.set()
        await training.await_last_update()
        if training.saver.has_news:
            try:
                await training.saver.save_last()
            except CheckpointError as error:
                self._tell(str(error), logging.ERROR)

    def _draw(self) -> None:
        """Draw the learning curve, if any episode has ended."""
        self._files.flush()
        config = self._config
        try:
            picture = plot_learning_curve(
                self._directory.path, title=f"{config.algo} on {config.env}", stop_return=config.stop_return
            )
        except Exception:
            # no picture is worth a run, whatever matplotlib stumbles over
            logger.exception("the learning curve could not be drawn")
        else:
            self._picture = "" if picture is None else str(picture)

    def _close_display(self) -> None:
        logging.getLogger().removeHandler(self._display_logs)
        try:
            self._display_logs.drain(self._display, time.monotonic())
        finally:
            self._display.close()

    def summary(self, outcome: Outcome) -> Summary:
        """What to show at the end."""
        where = self._directory

        def shown(path: str) -> str:
            return path and str(where.shown / Path(path).relative_to(where.path))

        directory = shlex.quote(str(where.shown))
        if self.training is None or (outcome.ok and not outcome.result):
            return Summary(f"{outcome.reason} (run directory: {directory})", "")
        checkpoint = self.training.newest_checkpoint
        steps = []
        if checkpoint:
            steps.append(("see how well it does", f"python -m aiorl.evaluate {directory}"))
            if (where.path / BEST).is_dir():
                best = shlex.quote(str(where.shown / BEST))
                steps.append(("the one that did best in an evaluation", f"python -m aiorl.evaluate {best}"))
            steps.append(("go on training from here", f"python -m aiorl.learner --resume {directory}"))
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
