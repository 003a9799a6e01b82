"""Log messages that appear only once or once a minute: about the data flow, and about events of
peers.

The state is process-wide, like logging itself. Worker 1 and the learner report once, at DEBUG once
a minute; further workers are silent.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from aiorl.text import shortened

logger = logging.getLogger(__name__)

PERIOD_S = 60.0
"""Seconds after which a message can appear again in periodic mode."""

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
    """Decides if a message is due: ``if log_once("raw_obs"): logger.info(...)``.

    Attributes:
        is_disabled: True if no message is due.
        is_periodic: True if messages appear again after PERIOD_S.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with no message logged, and with each allowed once."""
        self._clock = clock
        self._logged: dict[str, float] = {}
        self.is_disabled = False
        self.is_periodic = False

    def __call__(self, key: str) -> bool:
        """Return True the first time for a key; in periodic mode again after PERIOD_S."""
        if self.is_disabled:
            return False
        last = self._logged.get(key)
        if last is not None and not self.is_periodic:
            return False
        now = self._clock()
        if last is not None and now - last < PERIOD_S:
            return False
        self._logged[key] = now
        return True

    def set_up(self, worker_index: int, log_level: str | None) -> None:
        """Set the mode for a worker: workers 0 and 1 report, periodically at DEBUG; all others are
        silent.
        """
        self.is_disabled = self.is_disabled or worker_index > 1
        self.is_periodic = self.is_periodic or (worker_index <= 1 and log_level == "DEBUG")

    def reset(self) -> None:
        """Return to the initial state, with each message allowed once."""
        self._logged.clear()
        self.is_disabled = False
        self.is_periodic = False


log_once = LogOnce()
"""Instance shared by the samplers and workers of this process."""


def report(stage: str, *values: Any) -> None:
    """Log a summary of a stage's data if it is due; values given as functions are called only
    then.
    """
    if log_once(stage):
        data = [value() if callable(value) else value for value in values]
        logger.info(_STAGES[stage], *map(summarize, data))


def warn_of_long_episode(rows: int, env_id: Any, env_steps: int) -> None:
    """Warn once that very many rows wait for an episode's end.

    Args:
        rows: number of rows that is exceeded.
        env_id: id of the environment.
        env_steps: env steps that the rows come from.
    """
    if log_once("large_batch_warning"):
        logger.warning(
            "More than %s rows of environment %r wait for their episode's end (%s env steps). If"
            " its episodes never end, set horizon, the number of steps that ends one.",
            rows,
            env_id,
            env_steps,
        )


def summarize(value: Any, *, depth: int = 4, width: int = 4) -> str:
    """Return a short description of nested data: shapes, dtypes and ranges instead of values."""
    if isinstance(value, np.ndarray):
        return _summarize_array(value)
    if isinstance(value, Mapping):
        entries = len(value.keys())  # the length of a batch is its number of rows
        if depth == 0:
            return f"{{{entries} entries}}"
        parts = [
            f"{key!r}: {summarize(item, depth=depth - 1)}"
            for key, item in list(value.items())[:width]
        ]
        if entries > width:
            parts.append(f"... {entries} entries")
        return f"{{{', '.join(parts)}}}"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if depth == 0:
            return f"[{len(value)} items]"
        parts = [summarize(item, depth=depth - 1) for item in value[:width]]
        if len(value) > width:
            parts.append(f"... {len(value)} items")
        return f"[{', '.join(parts)}]"
    return shortened(repr(value), 200)


def _summarize_array(array: np.ndarray[Any, Any]) -> str:
    head = f"array({array.dtype}, {list(array.shape)}"
    if array.size == 0 or array.dtype.kind not in "biuf":
        return head + ")"
    return f"{head}, min {array.min():.4g}, max {array.max():.4g}, mean {array.mean():.4g})"


class EventRates:
    """Decides which events of peers are reported individually; the others are counted by kind.

    There are few kinds, all chosen by aiorl. Sources and texts can be anything that a peer chooses.
    At most ``per_kind`` of them are remembered for each kind, and all are forgotten when the window
    ends.
    """

    def __init__(self, per_source: int = 10, per_kind: int = 60, window_s: float = 60.0) -> None:
        """Set the limits of a window.

        Args:
            per_source: events of one kind from one source.
            per_kind: events of one kind in total.
            window_s: length of a window in seconds; it begins with the first event after the
                previous window.
        """
        self._per_source = per_source
        self._per_kind = per_kind
        self._window_s = window_s
        self._ends = float("-inf")
        self._reported: Counter[str] = Counter()
        self._reported_from: Counter[tuple[object, ...]] = Counter()
        self._left_out: Counter[str] = Counter()

    def allow(
        self,
        kind: str,
        source: object,
        now: float,
        *,
        at_most: int | None = None,
        what: str | None = None,
    ) -> bool:
        """Return True if this event must be reported; otherwise count it.

        Args:
            kind: kind of the event.
            source: peer that caused it.
            now: the time in seconds.
            at_most: limit for this kind and source, instead of ``per_source``.
            what: content that is reported once in a window, whatever its source.
        """
        most = self._per_source if at_most is None else at_most
        if now >= self._ends:
            self._ends = now + self._window_s
            self._reported.clear()
            self._reported_from.clear()
        is_repeated = what is not None and self._reported_from[kind, "what", what] > 0
        is_over_limit = (
            self._reported[kind] >= self._per_kind or self._reported_from[kind, source] >= most
        )
        if is_repeated or is_over_limit:
            self._left_out[kind] += 1
            return False
        self._reported[kind] += 1
        self._reported_from[kind, source] += 1
        if what is not None:
            self._reported_from[kind, "what", what] = 1
        return True

    def take_left_out(self, now: float) -> dict[str, int]:
        """Return kind -> number of events not reported, once their window is over, and reset the
        counts.
        """
        if not self._left_out or now < self._ends:
            return {}
        left_out = dict(self._left_out)
        self._left_out.clear()
        return left_out
