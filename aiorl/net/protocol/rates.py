"""Rate limits for peers, and a bounded memory of them.

Times are passed in, in seconds of any monotonic clock.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Newest(OrderedDict[K, V]):
    """Dict of the ``max_entries`` entries set last; setting an entry again makes it the newest."""

    def __init__(self, max_entries: int) -> None:
        super().__init__()
        self._max_entries = max_entries

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._max_entries:
            self.popitem(last=False)


class Allowance:
    """Token bucket:

    ``at_once`` tokens, refilled at ``per_s`` a second; it starts with ``at_first`` if that is more.
    """

    __slots__ = ("_at", "_at_once", "_left", "_per_s")

    def __init__(self, at_once: float, per_s: float, *, at_first: float = 0.0) -> None:
        self._at_once = at_once
        self._left = max(at_once, at_first)
        self._per_s = per_s
        self._at = float("inf")

    def take(self, now: float, cost: float = 1.0) -> bool:
        """Take ``cost`` tokens and return True, or return False if there are too few."""
        regained = min(self._at_once, self._left + max(0.0, now - self._at) * self._per_s)
        self._left = max(self._left, regained)
        self._at = now
        if self._left < cost:
            return False
        self._left -= cost
        return True
