"""How often peers may do what costs us something, and how much is remembered of them.

Times are passed in, seconds of any monotonic clock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
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

    def is_left(self, now: float, cost: float = 1.0) -> bool:
        """Whether this much is still allowed."""
        regained = min(self._at_once, self._left + max(0.0, now - self._at) * self._per_s)
        self._left = max(self._left, regained)
        self._at = now
        return self._left >= cost

    def take(self, now: float, cost: float = 1.0) -> bool:
        """Whether this much is still allowed; it is used up then."""
        if not self.is_left(now, cost):
            return False
        self._left -= cost
        return True


class EventRates:
    """Decides which of the things that peers do are told one by one; the others are counted by kind.

    Kinds are few and ours; sources, and what is said, may be anything a peer chooses. No more than ``per_kind`` of each
    are remembered for each kind, and all are forgotten when the window ends.
    """

    def __init__(self, per_source: int = 10, per_kind: int = 60, window_s: float = 60.0) -> None:
        """Allow so many in a window.

        Args:
            per_source: of one kind from one source.
            per_kind: of one kind in all.
            window_s: length of a window; it begins with the first event after the one before has ended.
        """
        self._per_source = per_source
        self._per_kind = per_kind
        self._window_s = window_s
        self._ends = float("-inf")
        self._told: Counter[str] = Counter()
        self._told_of: Counter[tuple[object, ...]] = Counter()
        self._left_out: Counter[str] = Counter()

    def allow(
        self, kind: str, source: object, now: float, *, at_most: int | None = None, what: str | None = None
    ) -> bool:
        """Whether this event is to be told; if not, it is counted.

        Args:
            kind: which of our kinds it is.
            source: who it is of.
            now: the time.
            at_most: of this kind from this source, where it is not ``per_source``.
            what: told once in a window, whoever it is of.
        """
        most = self._per_source if at_most is None else at_most
        if now >= self._ends:
            self._ends = now + self._window_s
            self._told.clear()
            self._told_of.clear()
        is_known = what is not None and self._told_of[kind, "what", what] > 0
        if is_known or self._told[kind] >= self._per_kind or self._told_of[kind, source] >= most:
            self._left_out[kind] += 1
            return False
        self._told[kind] += 1
        self._told_of[kind, source] += 1
        if what is not None:
            self._told_of[kind, "what", what] = 1
        return True

    def take_left_out(self, now: float) -> dict[str, int]:
        """Kind -> how many were left out, once their window is over; they are gone from here."""
        if not self._left_out or now < self._ends:
            return {}
        left_out = dict(self._left_out)
        self._left_out.clear()
        return left_out
