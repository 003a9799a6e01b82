"""How often peers may do what costs us something, and how much is remembered of them.

Times are passed in, seconds of any monotonic clock.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Newest(OrderedDict[K, V]):
    """A dict that holds the ``max_entries`` set last; setting an entry anew makes it the newest."""

    def __init__(self, max_entries: int) -> None:
        super().__init__()
        self._max_entries = max_entries

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._max_entries:
            self.popitem(last=False)


class Allowance:
    """So many at once, and so many a second in the long run; ``at_first``: so many at once the first time."""

    __slots__ = ("_at", "_at_once", "_left", "_per_s")

    def __init__(self, at_once: float, per_s: float, *, at_first: float = 0.0) -> None:
        self._at_once = at_once
        self._left = max(at_once, at_first)
        self._per_s = per_s
        self._at = float("inf")

    def take(self, now: float, cost: float = 1.0) -> bool:
        """Use up this much, if it is still allowed; returns whether it was."""
        regained = min(self._at_once, self._left + max(0.0, now - self._at) * self._per_s)
        self._left = max(self._left, regained)
        self._at = now
        if self._left < cost:
            return False
        self._left -= cost
        return True
