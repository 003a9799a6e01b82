"""Observers of a training: the keys that begin with ``stop_``, the time for a checkpoint, files of results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from numbers import Real
from typing import Any, Self

from aiorl.acting.run_dir import RunDirectory
from aiorl.config.layers import without_secrets
from aiorl.config.schema import STOP_CRITERIA, CommonConfig, StopFigures
from aiorl.errors import ConfigError, nearest
from aiorl.run.evaluations import Evaluations
from aiorl.run.report.loggers import BackgroundLogger, Loggers, make_loggers, open_loggers
from aiorl.run.restoring import RunState
from aiorl.run.training import Observer, Training


class StopCriteria(dict[str, float]):
    """Bounds that end training as soon as one is reached, by the names of `STOP_CRITERIA`."""

    @classmethod
    def of(cls, config: CommonConfig, **given: float | None) -> Self:
        """Return those of a config, but for those given.

        Raises:
            ConfigError: one of those given is no criterion or no number; or an evaluation is to end it, and there are
                none.
        """
        for name, value in given.items():
            if name not in STOP_CRITERIA:
                raise ConfigError(f"{name} is no stop criterion.{nearest(name, STOP_CRITERIA)}", key=name, value=value)
            if not isinstance(value, Real | None):
                raise ConfigError(f"{name} is {value!r:.50}, expected a number.", key=name, value=value)
        own = {name: getattr(config, name, None) for name in STOP_CRITERIA}
        own |= {name: value for name, value in given.items() if value is not None}
        found = cls({name: value for name, value in own.items() if value is not None})
        if "stop_evaluation_return" in found and not config.evaluation_interval:
            raise ConfigError(
                "stop_evaluation_return needs evaluations, and there are none.", key="stop_evaluation_return",
                value=found["stop_evaluation_return"], hint="Set evaluation_interval in the trainer's config.",
            )  # fmt: skip
        return found

    def reason(self, now: StopFigures) -> str:
        """Return why training is to end now, in one sentence; empty if it is to go on."""
        return next(filter(None, (STOP_CRITERIA[name](bound, now) for name, bound in self.items())), "")


class StopAt(Observer):
    """Ends training as soon as a criterion is met."""

    def __init__(self, criteria: StopCriteria, evaluations: Evaluations) -> None:
        """Begin to count the time.

        Args:
            criteria: the criteria.
            evaluations: of the training.
        """
        self._criteria = criteria
        self._evaluations = evaluations
        self._began = time.monotonic()

    def on_start(self, training: Training) -> None:
        """See that the time to stop is kept, whatever goes on then."""
        stop_time_s = self._criteria.get("stop_time_s")
        if stop_time_s is not None:
            left_s = max(0.0, self._began + stop_time_s - time.monotonic())
            asyncio.get_running_loop().call_later(left_s, training.stop, f"Done: {stop_time_s:g} s have passed.")

    def on_update(self, training: Training) -> None:
        """End training where its newest figures say so."""
        env_steps, time_s = training.counters.env_steps_trained, time.monotonic() - self._began
        now = StopFigures(training.results.newest_return, env_steps, self._evaluations.mean_return, time_s)
        reason = self._criteria.reason(now)
        if reason:  # the last result is of all updates, those under way included
            training.stop(reason)


class Checkpoints(Observer):
    """Has a checkpoint written every so many seconds, while training goes on; none where that is zero."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._saved = time.monotonic()

    def on_update(self, training: Training) -> None:
        """Begin a checkpoint if it is time."""
        now = time.monotonic()
        if self._interval_s and now - self._saved >= self._interval_s:
            self._saved = now
            training.saver.save_in_passing()


class RunFiles(Observer):
    """Writes the results of a run beside it, as long as its directory is there."""

    def __init__(self, config: CommonConfig, directory: RunDirectory) -> None:
        """Open nothing yet.

        Args:
            config: the effective configuration.
            directory: the run's.
        """
        self._config = config
        self._directory = directory
        self._own: BackgroundLogger | None = None
        self._loggers: list[BackgroundLogger | Loggers] = []

    def open(self, resumed: RunState | None = None) -> None:
        """Open the files of results, and take off the results that are later than a resume.

        Raises:
            ConfigError: one can't be written, or a logger of the user's can't be made.
        """
        iteration = step = None
        if resumed is not None:
            iteration, step = int(resumed.results["training_iteration"]), resumed.counters.env_steps_sampled
        path = self._directory.path
        self._own = BackgroundLogger(open_loggers(path, resume_iteration=iteration, resume_step=step))
        self._loggers.append(self._own)
        users = make_loggers(self._config.loggers, path.absolute(), without_secrets(self._config.to_dict()))
        self._loggers.append(users)

    def write(self, result: Mapping[str, Any]) -> None:
        """Have a result written; it is there in a moment, and at the latest when `flush` returns.

        Raises: CheckpointError if the directory is gone.
        """
        self._directory.check_there()
        for loggers in self._loggers:
            loggers.write(result)

    def flush(self) -> None:
        """Wait until all results are written."""
        if self._own is not None:
            self._own.flush()

    def before_checkpoint(self) -> None:
        """Write all results that come before the checkpoint.

        Raises: CheckpointError if the directory is gone.
        """
        self._directory.check_there()
        self.flush()

    def close(self) -> None:
        """Close the files."""
        for loggers in self._loggers:
            loggers.close()
