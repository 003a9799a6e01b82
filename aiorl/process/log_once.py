"""Reports of data flow that appear once, or once a minute, and not at every step.

Process-wide, as logging itself is: worker 1 and the learner report once, at DEBUG again and again; further
workers keep quiet.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from aiorl.text import shortened

logger = logging.getLogger(__name__)

PERIOD_S = 60.0
"""In periodic mode a message may come again after so many seconds."""

_STAGES = {
    "sample_start": "Sampling %s environment steps",
    "raw_obs": "Raw observations from the environment: %s",
    "infos": "Infos from the environment: %s",
    "preprocessed_obs": "Preprocessed observations of %s: %s",
    "filtered_obs": "Filtered observations of %s: %s",
    "compute_actions_input": "Inputs to policy %s: %s",
    "compute_actions_result": "Outputs of policy %s: %s",
    "sample_end": "Sampled: %s",
    "compute_gradients": "Gradients are computed on: %s",
    "gradients_out": "Gradients computed: %s",
    "apply_gradients": "Gradients are applied: %s",
    "learn_on_batch": "Policies learn on: %s",
    "learn_output": "Learning gave: %s",
}


class LogOnce:
    """Says of each message whether it is to be logged now: ``if log_once("raw_obs"): logger.info(...)``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing logged yet; each message once."""
        self._clock = clock
        self._logged: dict[str, float] = {}
        self._disabled = False
        self._periodic = False

    def __call__(self, key: str) -> bool:
        """True the first time a key is asked for; in periodic mode again after PERIOD_S."""
        if self._disabled:
            return False
        last = self._logged.get(key)
        if last is None:
            self._logged[key] = self._clock()
            return True
        if self._periodic and (now := self._clock()) - last >= PERIOD_S:
            self._logged[key] = now
            return True
        return False

    def set_up(self, worker_index: int, log_level: str | None) -> None:
        """As a worker does it: workers 0 and 1 report, at DEBUG again and again; others keep quiet, also at DEBUG."""
        self._disabled = self._disabled or worker_index > 1
        self._periodic = self._periodic or (worker_index <= 1 and log_level == "DEBUG")

    def reset(self) -> None:
        """Back to the start: each message once."""
        self._logged.clear()
        self._disabled = self._periodic = False


log_once = LogOnce()
"""The one that this process's samplers and workers ask."""


def report(stage: str, *values: Any) -> None:
    """Log a summary of what a stage of the data flow has, if that is due; a function gives its value only then."""
    if log_once(stage):
        logger.info(_STAGES[stage], *(summarize(value() if callable(value) else value) for value in values))


def warn_of_long_episode(rows: int, env_id: Any, env_steps: int) -> None:
    """Warn, once, that very many rows wait for an episode's end.

    Args:
        rows: more than so many wait.
        env_id: the environment.
        env_steps: steps of it that they stand for.
    """
    if log_once("large_batch_warning"):
        logger.warning(
            "More than %d rows of environment %r wait for their episode's end (%d environment steps). "
            "If its episodes never end, set horizon, the number of steps after which they are cut.",
            rows,
            env_id,
            env_steps,
        )


def summarize(value: Any, *, depth: int = 4, width: int = 4) -> str:
    """A short text about nested data: shapes, dtypes and ranges instead of numbers."""
    if isinstance(value, np.ndarray):
        return _summarize_array(value)
    if isinstance(value, Mapping):
        entries = len(value.keys())  # the length of a batch is its number of rows
        if depth == 0:
            return f"{{{entries} entries}}"
        parts = [f"{key!r}: {summarize(item, depth=depth - 1)}" for key, item in list(value.items())[:width]]
        return "{" + ", ".join(parts) + (f", ... {entries} entries" if entries > width else "") + "}"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if depth == 0:
            return f"[{len(value)} items]"
        parts = [summarize(item, depth=depth - 1) for item in value[:width]]
        return "[" + ", ".join(parts) + (f", ... {len(value)} items" if len(value) > width else "") + "]"
    return shortened(repr(value), 200)


def _summarize_array(array: np.ndarray[Any, Any]) -> str:
    head = f"array({array.dtype}, {list(array.shape)}"
    if array.size == 0 or array.dtype.kind not in "biuf":
        return head + ")"
    return f"{head}, min {array.min():.4g}, max {array.max():.4g}, mean {array.mean():.4g})"
