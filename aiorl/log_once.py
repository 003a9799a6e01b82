"""Reports of data flow that appear once, or once a minute, and not at every step.

Process-wide, as logging itself is: worker 1 and the learner report once, at DEBUG again and again; further
workers keep quiet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["PERIOD_S", "LogOnce", "log_once", "summarize"]

PERIOD_S = 60.0
"""In periodic mode a message may come again after so many seconds."""


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
        if worker_index > 1:
            self.disable()
        elif log_level == "DEBUG":
            self.repeat_periodically()

    def disable(self) -> None:
        """No message any more, not even in periodic mode."""
        self._disabled = True

    def repeat_periodically(self) -> None:
        """From now on each message may come again after PERIOD_S."""
        self._periodic = True

    def reset(self) -> None:
        """Back to the start: each message once."""
        self._logged.clear()
        self._disabled = self._periodic = False


log_once = LogOnce()
"""The one that this process's samplers and workers ask."""


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
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


def _summarize_array(array: np.ndarray[Any, Any]) -> str:
    head = f"array({array.dtype}, {list(array.shape)}"
    if array.size == 0 or array.dtype.kind not in "biuf":
        return head + ")"
    return f"{head}, min {array.min():.4g}, max {array.max():.4g}, mean {array.mean():.4g})"
