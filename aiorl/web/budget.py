"""Budget: bytes that the connections of a server may hold together, each counted in what it costs
this process.
"""

from __future__ import annotations


class Budget:
    """Bytes that many holders may have together.

    Attributes:
        max_bytes: the limit.
        num_bytes: what all holders have now.
    """

    __slots__ = ("max_bytes", "num_bytes")

    def __init__(self, max_bytes: int) -> None:
        """Begin without holders."""
        self.max_bytes = max_bytes
        self.num_bytes = 0


class Share:
    """Part of a budget that one holder has.

    Attributes:
        num_bytes: what it has now.
    """

    __slots__ = ("_budget", "num_bytes")

    def __init__(self, budget: Budget) -> None:
        """Begin with nothing."""
        self._budget = budget
        self.num_bytes = 0

    def resize(self, num_bytes: int) -> bool:
        """Have this many bytes from now on; return False, and change nothing, if that exceeds the
        budget.
        """
        growth = num_bytes - self.num_bytes
        if growth > 0 and self._budget.num_bytes + growth > self._budget.max_bytes:
            return False
        self._budget.num_bytes += growth
        self.num_bytes = num_bytes
        return True

    def move_to(self, budget: Budget) -> None:
        """Have the same bytes of another budget, even if that exceeds it."""
        self._budget.num_bytes -= self.num_bytes
        budget.num_bytes += self.num_bytes
        self._budget = budget
