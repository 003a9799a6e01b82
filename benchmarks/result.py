"""Measured figures with their baselines and targets, tables of them, and the console that prints
them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["Figure", "make_console", "make_table", "readable"]

_WORDS = ("name", "unit", "ok")
"""Columns of words; the others are columns of numbers."""

_WIDTH = 140
"""Width in columns if the output is no terminal, so that no name is cut short."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table that ``python -m benchmarks`` prints.

    Attributes:
        name: name of the figure.
        value: median of the rounds.
        unit: unit of value, baseline and target.
        baseline: the same measured without aiorl in the same rounds; None if there is none.
        target: bound on the value, for a unit that doesn't depend on the machine; None if there is
            none.
        target_ratio: bound on value / baseline; None if there is none.
        smaller_is_better: the bounds are upper ones.
        problem: reason why it could not be measured; the value is then NaN, and no bound holds.
    """

    name: str
    value: float
    unit: str
    baseline: float | None = None
    target: float | None = None
    target_ratio: float | None = None
    smaller_is_better: bool = False
    problem: str = ""

    @classmethod
    def unmeasured(cls, name: str, problem: str) -> Figure:
        """Return the row of a figure that could not be measured."""
        return cls(name, math.nan, "", problem=problem)

    @property
    def ratio(self) -> float | None:
        """Value over baseline."""
        return None if not self.baseline else self.value / self.baseline

    @property
    def ok(self) -> bool:
        """True if every bound holds."""
        pairs = ((self.value, self.target), (self.ratio, self.target_ratio))
        return not self.problem and all(
            got <= bound if self.smaller_is_better else got >= bound
            for got, bound in pairs
            if got is not None and bound is not None
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, with ratio and ok, for JSON."""
        return {**asdict(self), "ratio": self.ratio, "ok": self.ok}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Figure:
        """Return the figure that ``to_dict`` described."""
        return cls(**{key: value for key, value in data.items() if key not in ("ratio", "ok")})


def readable(value: float) -> str:
    """Format with three digits for a small number, thousands separators for a large one, a dash for
    NaN.
    """
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def make_console() -> Console:
    """Return a console on standard output, as wide as its terminal; a file is wide enough for a
    table.
    """
    return Console(width=None if sys.stdout.isatty() else _WIDTH)


def make_table(title: str, columns: Sequence[str]) -> Table:
    """Return a table without rows, with its numbers flush right."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in _WORDS else "right", overflow="fold")
    return table
