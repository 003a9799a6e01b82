"""Observers of a training: stop criteria, periodic checkpoints and files of results."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NamedTuple, Self

from aiorl.acting.run_dir import RunDirectory
from aiorl.config.parts import FilesPart
from aiorl.errors import CheckpointError, ConfigError, nearest
from aiorl.process.machine import is_still_at
from aiorl.run.ports import TrainingView
from aiorl.run.report.loggers import BackgroundLogger, Loggers, make_loggers, open_loggers
from aiorl.run.restoring import RunState
from aiorl.text import return_text
from aiorl.web.ports import Ports


class StopFigures(NamedTuple):
    """Progress of a training, for its stop criteria.

    Attributes:
        mean_return: mean return of the last 100 episodes; NaN before 100 have ended.
        env_steps: env steps trained on in all.
        evaluation_return: mean return of the newest evaluation; NaN before the first.
        took_s: seconds since the start.
        iterations: iterations since the start.
    """

    mean_return: float = math.nan
    env_steps: int = 0
    evaluation_return: float = math.nan
    took_s: float = 0.0
    iterations: int = 0


def _return_reached(goal: float, now: StopFigures) -> str | None:
    rounding = 1e-6 * max(1.0, abs(goal))
    if now.mean_return >= goal - rounding:
        return f"Solved: mean return {return_text(now.mean_return)} over the last 100 episodes."
    return None


def _evaluation_return_reached(goal: float, now: StopFigures) -> str | None:
    if now.evaluation_return >= goal:
        return f"Done: an evaluation gave a mean return of {return_text(now.evaluation_return)}."
    return None


def _steps_reached(most: float, now: StopFigures) -> str | None:
    if now.env_steps >= most:
        return f"Done: {now.env_steps:,} env steps were trained on."
    return None


def _time_reached(most: float, now: StopFigures) -> str | None:
    if now.took_s >= most:
        return f"Done: {most:g} s have passed."
    return None


def _iterations_reached(most: float, now: StopFigures) -> str | None:
    if now.iterations >= most:
        return f"Done: {now.iterations:,} iterations have ended."
    return None


STOP_CRITERIA: dict[str, Callable[[float, StopFigures], str | None]] = {
    "stop_return": _return_reached,
    "stop_evaluation_return": _evaluation_return_reached,
    "stop_timesteps": _steps_reached,
    "stop_time_s": _time_reached,
    "stop_iterations": _iterations_reached,
}
"""Stop criterion -> function of its value and the progress, which returns why the training ends, or
None to continue.

All but ``stop_iterations``, which only `Trainer.iterate` has, are keys of the configuration.
"""


class Observer:
    """Observer of a training: stop criteria, checkpoints, evaluations, files or a display.

    A subclass overrides the methods that it needs. All of them are called on the event loop.
    """

    def on_start(self, training: TrainingView) -> None:
        """React to the start, when training listens but has no model yet."""

    def env_settings(self) -> Mapping[str, Any]:
        """Return additions to the settings of environments, once training has started."""
        return {}

    async def on_begin(self, training: TrainingView) -> None:
        """Act before the first update of this session."""

    def on_update(self, training: TrainingView) -> None:
        """React to one or several new updates."""

    def needs_standstill(self, iteration: int) -> bool:
        """Return True to pause training at the end of an iteration until `after_iteration`
        returns.
        """
        return False

    async def after_iteration(self, training: TrainingView, result: dict[str, Any]) -> None:
        """Add to the result of an iteration."""

    def before_checkpoint(self) -> None:
        """Act just before a checkpoint is written."""


class StopCriteria(dict[str, float]):
    """Bounds by the names in `STOP_CRITERIA`; training ends as soon as one is reached."""

    @classmethod
    def of(cls, bounds: Mapping[str, float | None], *, has_evaluations: bool) -> Self:
        """Return the criteria with these bounds, without those that are None.

        Raises:
            ConfigError: a name is not a criterion, a value is not a number, or a criterion needs
                evaluations and there are none.
        """
        for name, value in bounds.items():
            if name not in STOP_CRITERIA:
                raise ConfigError(
                    f"{name} is no stop criterion.{nearest(name, STOP_CRITERIA)}",
                    key=name,
                    value=value,
                )
            if not isinstance(value, Real | None):
                raise ConfigError(
                    f"{name} is {value!r:.50}, expected a number.", key=name, value=value
                )
        criteria = cls({name: bound for name, bound in bounds.items() if bound is not None})
        if "stop_evaluation_return" in criteria and not has_evaluations:
            raise ConfigError(
                "stop_evaluation_return needs evaluations, but there are none.",
                key="stop_evaluation_return",
                value=criteria["stop_evaluation_return"],
                hint="Set evaluation_interval in the trainer's config.",
            )
        return criteria

    def reason(self, now: StopFigures) -> str:
        """Return the reason to end training now, in one sentence; empty if it continues."""
        return next(
            filter(None, (STOP_CRITERIA[name](bound, now) for name, bound in self.items())), ""
        )


class StopAt(Observer):
    """Ends training as soon as a criterion is met."""

    def __init__(self, criteria: StopCriteria, evaluation_return: Callable[[], float]) -> None:
        """Start the clock.

        Args:
            criteria: the criteria.
            evaluation_return: returns the mean return of the newest evaluation.
        """
        self._criteria = criteria
        self._evaluation_return = evaluation_return
        self._began = time.monotonic()

    def on_start(self, training: TrainingView) -> None:
        """Schedule the end after ``stop_time_s``, so that it comes in time even during a long
        update.
        """
        stop_time_s = self._criteria.get("stop_time_s")
        if stop_time_s is not None:
            left_s = max(0.0, self._began + stop_time_s - time.monotonic())
            asyncio.get_running_loop().call_later(
                left_s, training.stop, f"Done: {stop_time_s:g} s have passed."
            )

    def on_update(self, training: TrainingView) -> None:
        """End training if its newest figures meet a criterion."""
        env_steps = training.counters.env_steps_trained
        time_s = time.monotonic() - self._began
        now = StopFigures(
            training.results.newest_return, env_steps, self._evaluation_return(), time_s
        )
        reason = self._criteria.reason(now)
        if reason:  # the last result covers all updates, including those in progress
            training.stop(reason)


class Checkpoints(Observer):
    """Writes a checkpoint every ``interval_s`` seconds while training continues; never if that is
    zero.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._saved = time.monotonic()

    def on_update(self, training: TrainingView) -> None:
        """Begin a checkpoint if it is time."""
        now = time.monotonic()
        if self._interval_s and now - self._saved >= self._interval_s:
            self._saved = now
            training.saver.save_in_passing()


class RunFiles(Observer):
    """Writes the results of a run to its directory, as long as that exists, and opens its ports for
    others.

    Attributes:
        ports: the ports.
    """

    def __init__(self, files: FilesPart, directory: RunDirectory) -> None:
        """Prepare without opening files yet.

        Args:
            files: the user's loggers and ports.
            directory: the run's directory.
        """
        self._settings = files
        self._directory = directory
        self._results: BackgroundLogger | None = None
        self._loggers: list[BackgroundLogger | Loggers] = []
        self.ports = Ports()

    def open(self, resumed: RunState | None = None) -> None:
        """Open the files of results, remove results from after the checkpoint that is resumed, and
        open the ports.

        Raises:
            ConfigError: a file cannot be written, one of the user's loggers cannot be made, or a
                port is taken.
        """
        iteration = step = None
        if resumed is not None:
            iteration = int(resumed.results["training_iteration"])
            step = resumed.counters.env_steps_sampled
        path = self._directory.path
        self._results = BackgroundLogger(
            open_loggers(path, resume_iteration=iteration, resume_step=step)
        )
        self._loggers.append(self._results)
        settings = self._settings
        users = make_loggers(settings.loggers, path.absolute(), settings.config)
        self._loggers.append(users)
        self.ports.open(
            path,
            page=settings.web,
            clients=settings.client_port,
            allow_origins=settings.allow_origin,
            advertise=settings.advertise,
        )

    def env_settings(self) -> Mapping[str, Any]:
        """Tell environments where clients come in."""
        return self.ports.gate

    def write(self, result: Mapping[str, Any]) -> None:
        """Queue a result to be written, shortly afterwards and at the latest when `flush` returns.

        Raises:
            CheckpointError: the directory is gone.
        """
        self._check_directory()
        for loggers in self._loggers:
            loggers.write(result)

    def flush(self) -> None:
        """Wait until all results are written."""
        if self._results is not None:
            self._results.flush()

    def before_checkpoint(self) -> None:
        """Write all results from before the checkpoint.

        Raises:
            CheckpointError: the directory is gone.
        """
        self._check_directory()
        self.flush()

    def close(self) -> None:
        """Close the files and the ports."""
        for part in [*self._loggers, self.ports]:
            part.close()

    def _check_directory(self) -> None:
        """Check that the directory is still the one that was opened.

        Raises:
            CheckpointError: it was removed, renamed or replaced.
        """
        lock = self._directory.lock
        if not is_still_at(lock.descriptor, lock.path):
            raise CheckpointError(
                self._directory.path,
                "the run directory was removed, renamed or replaced while the run continued;"
                " nothing more can be saved",
            )
