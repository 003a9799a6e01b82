"""One run of the command line: shows what training yields, writes it down, saves it in passing, and ends it in time."""

from __future__ import annotations

import asyncio
import logging
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiorl.config.schema import CommonConfig
from aiorl.errors import CheckpointError, ConfigError
from aiorl.learner.build import LearningPlan
from aiorl.learner.run_dir import RunDirectory
from aiorl.learner.run_files import RunFiles
from aiorl.learner.training import Ended, Training
from aiorl.process.tasks import Tasks, end_in_time
from aiorl.report.console import Display, DisplayHandler, Headline, Summary, make_display
from aiorl.report.plot import plot_learning_curve
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
        display: Display | None = None,
        plan: LearningPlan | None = None,
    ) -> None:
        """Take an open run directory.

        Args:
            config: the effective configuration.
            directory: where the run's files go.
            display: shows the run; None is a live panel, or plain lines, on stdout.
            plan: what was made of the config before, if that was done.
        """
        self.on_release: Callable[[], None] = lambda: None
        self.training: Training | None = None
        self._config = config if plan is None else plan.config
        self._plan = plan
        self._directory = directory
        self._display = display or make_display(
            Headline(
                config.algo,
                config.env or "",
                config.num_workers,
                config.stop_return,
                config.stop_timesteps,
                config.stop_time_s,
            )
        )
        self._display_logs = DisplayHandler()
        self._display_logs.addFilter(lambda record: not hasattr(record, "shown"))
        self._files = RunFiles(self._config, directory, self._tell)
        self._began = self._iteration_began = self._checkpointed = time.monotonic()
        self._steps_at_iteration = 0
        self._status = self._picture = ""
        self._result: dict[str, Any] = {}

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
            training = self.training = Training(
                self._config, self._directory, self._plan, tell=self._tell, before_saving=self._files.keep
            )
            asyncio.get_running_loop().set_exception_handler(self._on_stray_error)
            self._stop_in_time(training)
            tasks.start(self._tick(training), "display")
            await training.start()
            logger.info("more workers join with: %s", training.join_command)
            self._display.join(training.join_command, time.monotonic())
            self._open_files(training)
            await training.ready()
            try:
                async for _ in training:
                    self._after_update(training)
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
            if self.training is not None:
                await self.training.close(reason, final=final)
            if drawing is not None:
                await end_in_time("the picture", lambda: drawing)
            await end_in_time("the run's tasks", tasks.close)
            await end_in_time("the files", self._files.close)
            await end_in_time("the display", self._close_display)

    def request_stop(self, reason: str) -> None:
        """End the run in an orderly way, within seconds: checkpoint, goodbye, exit status 0."""
        if self.training is not None:
            self.training.stop(reason, hurry=True)

    def _stop_in_time(self, training: Training) -> None:
        """See that the time to stop is kept, whatever goes on then."""
        stop_time_s = self._config.stop_time_s
        if stop_time_s is not None:
            left_s = max(0.0, self._began + stop_time_s - time.monotonic())
            loop = asyncio.get_running_loop()
            loop.call_later(left_s, training.stop, f"Done: {stop_time_s:g} s have passed.")

    def _on_stray_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error in a callback has nobody to tell: without this the run would go on as if nothing had happened."""
        loop.default_exception_handler(context)
        error = context.get("exception")
        if error is not None and "handle" in context:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self.training is not None:
            self.training.fail(error)

    def _open_files(self, training: Training) -> None:
        steps = training.restored_steps
        iteration = None if steps is None else training.results.training_iteration
        self._files.open(resume_iteration=iteration, resume_step=steps)

    # While it goes --------------------------------------------------------------------------------------------

    def _after_update(self, training: Training) -> None:
        now, config, counters = time.monotonic(), self._config, training.service.counters
        reason = self._stop_reason(training)
        if reason:  # the last result is of all updates, those under way included
            training.stop(reason)
            return
        grown = counters.env_steps_trained - self._steps_at_iteration
        # Left to itself a run reports often at first and once a second later: curves are fine where they are steep,
        # and the files of long runs stay small
        pace_s = config.min_iter_time_s or min(_PACE_S, _PACE_SHARE * (now - self._began))
        is_due = now - self._iteration_began >= pace_s and grown >= config.timesteps_per_iteration
        if is_due or not self._result:  # the first at once: it shows that all is well
            self._finish_iteration(training)
        if config.checkpoint_interval_s and now - self._checkpointed >= config.checkpoint_interval_s:
            self._checkpointed = now
            training.learner.saver.save_in_passing()

    def _stop_reason(self, training: Training) -> str:
        """Why training is to end now, but for its time; "" if it is not."""
        config, results, trained = self._config, training.results, training.service.counters.env_steps_trained
        if config.stop_return is not None and results.has_reached(config.stop_return):
            return f"Solved: mean return {results.mean_last():.1f} over the last 100 episodes."
        if config.stop_timesteps is not None and trained >= config.stop_timesteps:
            return f"Done: {trained:,} env steps were trained on."
        return ""

    def _finish_iteration(self, training: Training) -> None:
        result = training.finish_iteration()
        self._iteration_began = time.monotonic()
        self._steps_at_iteration = training.service.counters.env_steps_trained
        self._tell_callbacks(training, result)
        self._result = result
        self._files.write(result)
        self._display.update(result, time.monotonic())

    def _tell_callbacks(self, training: Training, result: dict[str, Any]) -> None:
        """Let the user's hook see the result and change it.

        Raises:
            ConfigError: it raised.
        """
        if training.callbacks is None:
            return
        try:
            training.callbacks.on_train_result(trainer=self, result=result)
        except Exception as error:
            # whatever a user's hook raises
            raise ConfigError(
                f"callbacks {self._config.callbacks!r}: on_train_result failed: {error!r:.500}", key="callbacks"
            ) from error

    def _tell(self, text: str, level: int) -> None:
        text = indented(many_lines(text, _MAX_EVENT))  # parts of it may come from a peer or a file
        logger.log(level, "%s", text, extra={"shown": True})
        self._display.event(text, time.monotonic(), level)

    async def _tick(self, training: Training) -> None:
        said = 0.0
        while True:
            now = time.monotonic()
            if not self._result and training.status != self._status:
                self._status = training.status
                self._display.status(self._status, now)
            self._display_logs.drain(self._display, now)
            self._display.tick(now)
            if training.silent_s > _SAY_WAITING_S and now - said > 3 * _SAY_WAITING_S:
                said = now
                waiting = training.service.waiting_for(now)
                self._tell(f"no update for {training.silent_s:.0f} s: {waiting}", logging.WARNING)
            await asyncio.sleep(0.5)

    # End ------------------------------------------------------------------------------------------------------

    async def _finish(self, training: Training, reason: str) -> Outcome:
        ok = True
        await training.await_last_update()
        if training.service.counters.env_steps_trained > self._steps_at_iteration:
            try:
                self._finish_iteration(training)
            except ConfigError as error:
                logger.exception("the last iteration is not reported")
                ok, reason = False, str(error)
        saver = training.learner.saver
        if not saver.has_news:
            since = "since the resume" if training.service.counters.updates else "yet"
            return Outcome(ok, f"{reason} Nothing was trained {since}, so there is nothing to save.", {})
        try:
            await saver.save_last()
        except CheckpointError as error:
            ok, reason = False, str(error)
        return Outcome(ok, reason, self._result)

    async def _save_what_was_learned(self, training: Training) -> None:
        """Write a checkpoint although the run has failed; it does so by its own error, not by one of this."""
        training.end.hurry.set()
        await training.await_last_update()
        if training.learner.saver.has_news:
            try:
                await training.learner.saver.save_last()
            except CheckpointError as error:
                self._tell(str(error), logging.ERROR)

    def _draw(self) -> None:
        """Draw the learning curve, if any episode has ended."""
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
        directory = shlex.quote(str(self._directory.path))
        if self.training is None or (outcome.ok and not outcome.result):
            return Summary(f"{outcome.reason} (run directory: {directory})", "")
        checkpoint = self.training.newest_checkpoint
        steps = [("go on training from here", f"python -m aiorl.learner --resume {directory}")] if checkpoint else []
        steps.append(("draw the learning curve again", f"python -m aiorl.report.plot {directory}"))
        steps.append(("look at all figures", f"tensorboard --logdir {directory}"))
        steps.append(("add workers while it trains, from any host", self.training.join_command))
        return Summary(
            reason=outcome.reason,
            run_dir=str(self._directory.path),
            ok=outcome.ok,
            checkpoint=checkpoint,
            picture=self._picture,
            next_steps=steps,
        )

    def show(self, summary: Summary) -> None:
        """Show the summary after ``run`` has returned."""
        self._display.finish(summary, time.monotonic())
