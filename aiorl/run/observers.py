"""What a training is watched for: the keys that begin with ``stop_``, and the time for a checkpoint."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from typing import Any, Self

from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError
from aiorl.run.evaluations import Evaluations
from aiorl.run.report.results import Results
from aiorl.run.training import Observer, Training


@dataclass(frozen=True, slots=True)
class StopCriteria:
    """Figures that end training as soon as one is reached; None never does.

    Attributes:
        stop_return: mean return of the last 100 episodes.
        stop_timesteps: env steps trained on in all.
        stop_time_s: seconds.
        stop_evaluation_return: mean return of an evaluation.
        stop_iterations: iterations.
    """

    stop_return: float | None = None
    stop_timesteps: int | None = None
    stop_time_s: float | None = None
    stop_evaluation_return: float | None = None
    stop_iterations: int | None = None

    @classmethod
    def of(cls, config: CommonConfig, **given: Any) -> Self:
        """Return those of a config, but for those given.

        Raises:
            ConfigError: an evaluation is to end it, and there are none.
        """
        names = ("stop_return", "stop_timesteps", "stop_time_s", "stop_evaluation_return")
        own = {name: getattr(config, name) for name in names}
        found = cls(**{**own, **{name: value for name, value in given.items() if value is not None}})
        if found.stop_evaluation_return is not None and not config.evaluation_interval:
            raise ConfigError(
                "stop_evaluation_return needs evaluations, and there are none.", key="stop_evaluation_return",
                value=found.stop_evaluation_return, hint="Set evaluation_interval in the trainer's config.",
            )  # fmt: skip
        return found

    def reason(
        self,
        results: Results | None,
        env_steps: int,
        *,
        evaluation_return: float = math.nan,
        took_s: float = 0.0,
        iterations: int = 0,
    ) -> str:
        """Return why training is to end now, in one sentence; empty if it is to go on.

        Args:
            results: has the returns of the newest episodes.
            env_steps: trained on in all.
            evaluation_return: mean return of the newest evaluation; NaN before the first.
            took_s: seconds since the beginning.
            iterations: how many there were.
        """
        if self.stop_return is not None and results is not None and results.has_reached(self.stop_return):
            return f"Solved: mean return {results.mean_last():.1f} over the last 100 episodes."
        if self.stop_evaluation_return is not None and evaluation_return >= self.stop_evaluation_return:
            return f"Done: an evaluation gave a mean return of {evaluation_return:,.1f}."
        if self.stop_timesteps is not None and env_steps >= self.stop_timesteps:
            return f"Done: {env_steps:,} env steps were trained on."
        if self.stop_time_s is not None and took_s >= self.stop_time_s:
            return f"Done: {self.stop_time_s:g} s have passed."
        if self.stop_iterations is not None and iterations >= self.stop_iterations:
            return f"Done: {iterations:,} iterations have ended."
        return ""


class StopAt(Observer):
    """Ends training as soon as a criterion is met."""

    def __init__(self, criteria: StopCriteria, evaluations: Evaluations | None) -> None:
        """Begin to count the time.

        Args:
            criteria: the criteria.
            evaluations: of the training; None without any.
        """
        self._criteria = criteria
        self._evaluations = evaluations
        self._began = time.monotonic()

    def on_start(self, training: Training) -> None:
        """See that the time to stop is kept, whatever goes on then."""
        stop_time_s = self._criteria.stop_time_s
        if stop_time_s is not None:
            left_s = max(0.0, self._began + stop_time_s - time.monotonic())
            asyncio.get_running_loop().call_later(left_s, training.stop, f"Done: {stop_time_s:g} s have passed.")

    def on_update(self, training: Training) -> None:
        """End training where its newest figures say so."""
        reason = self._criteria.reason(
            training.results,
            training.counters.env_steps_trained,
            evaluation_return=math.nan if self._evaluations is None else self._evaluations.mean_return,
        )
        if reason:  # the last result is of all updates, those under way included
            training.stop(reason)


class Checkpoints(Observer):
    """Has a checkpoint written every ``checkpoint_interval_s`` seconds, while training goes on."""

    def __init__(self, config: CommonConfig) -> None:
        self._interval_s = config.checkpoint_interval_s
        self._saved = time.monotonic()

    def on_update(self, training: Training) -> None:
        """Begin a checkpoint if it is time."""
        now = time.monotonic()
        if self._interval_s and now - self._saved >= self._interval_s:
            self._saved = now
            training.saver.save_in_passing()
