"""Bounds of the calls that wait for their answers, and of streams."""

from __future__ import annotations

from typing import Final

MAX_CREDIT: Final = 1 << 16
"""Most items of one stream that may be under way."""


class CallWindow:
    """Calls that have not been answered, by number, within bounds; one of any size is let through
    if it is the only one.

    Args:
        max_calls: most calls at a time.
        max_bytes: most bytes of memory that their arguments take, together.

    Attributes:
        num_bytes: bytes that they take now.
    """

    __slots__ = ("_max_bytes", "_max_calls", "_sizes", "num_bytes")

    def __init__(self, max_calls: int, max_bytes: int) -> None:
        self._max_calls = max_calls
        self._max_bytes = max_bytes
        self._sizes: dict[int, int] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        """Return the number of calls."""
        return len(self._sizes)

    def __contains__(self, call_id: int) -> bool:
        """Return whether a call has not been answered."""
        return call_id in self._sizes

    def has_room(self, num_bytes: int) -> bool:
        """Return whether one more call is within the bounds.

        Args:
            num_bytes: memory that its arguments take.
        """
        if not self._sizes:
            return True
        is_small = self.num_bytes + num_bytes <= self._max_bytes
        return is_small and len(self._sizes) < self._max_calls

    def add(self, call_id: int, num_bytes: int) -> None:
        """Add a call."""
        self._sizes[call_id] = num_bytes
        self.num_bytes += num_bytes

    def remove(self, call_id: int) -> None:
        """Remove a call that has ended; an unknown one changes nothing."""
        self.num_bytes -= self._sizes.pop(call_id, 0)

    def clear(self) -> None:
        """Remove all calls."""
        self._sizes.clear()
        self.num_bytes = 0
