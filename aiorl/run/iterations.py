"""Iterations of a training: when one is long enough, and what is done with its result."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from aiorl.config.code import named_failures
from aiorl.config.schema import CommonConfig
from aiorl.run.flow import Counters
from aiorl.sampling.callbacks import DefaultCallbacks

__all__ = ["Iteration", "report"]

_log = logging.getLogger(__name__)

_MANY_STEPS = 3000
"""Env steps of each environment after which a quarter of them should have finished an episode."""


class Iteration:
    """The one that is going on."""

    def __init__(self, config: CommonConfig, counters: Counters) -> None:
        """It begins.

        Args:
            config: the effective configuration.
            counters: totals of the run.
        """
        self._config = config
        self._counters = counters
        self._asks_for_horizon = config.horizon is None and config.input == "sampler"
        self.begin()

    def begin(self) -> None:
        """The next one begins."""
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
            _log.warning(
                "only %d episodes ended in %s env steps. If episodes may go on for ever, set horizon, the number of "
                "steps after which they are cut: --horizon 1000",
                count, f"{env_steps:,}",
            )  # fmt: skip

    @property
    def has_trained(self) -> bool:
        """Whether anything was trained in it."""
        return self._counters.env_steps_trained > self._steps_before

    def is_due(self, pace_s: float = 0.0) -> bool:
        """Whether it may end: after ``min_iter_time_s``, or else ``pace_s``, and ``timesteps_per_iteration``."""
        took_s, grown = time.monotonic() - self._began, self._counters.env_steps_trained - self._steps_before
        return took_s >= (self._config.min_iter_time_s or pace_s) and grown >= self._config.timesteps_per_iteration


def report(
    result: dict[str, Any],
    callbacks: DefaultCallbacks | None,
    trainer: object,
    write: Callable[[Mapping[str, Any]], None],
) -> None:
    """Show a result to the user's hook, which may change it, then write it down.

    Args:
        result: of an iteration that is over.
        callbacks: the user's hooks; None for none.
        trainer: what they get as ``trainer``.
        write: takes the result.

    Raises:
        ConfigError: the hook failed.
    """
    if callbacks is not None:
        what = f"callbacks {type(callbacks).__qualname__!r}: on_train_result"
        named_failures(callbacks.on_train_result, what, "callbacks")(trainer=trainer, result=result)
    write(result)
