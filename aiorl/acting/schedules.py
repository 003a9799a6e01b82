"""Schedules: settings that change with the number of env steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from aiorl.errors import ConfigError

__all__ = ["Schedule"]


class Schedule:
    """A value over env steps: straight lines between given points, constant before the first and after the last.

    It has no state: the value depends on the step alone, so a run that is resumed goes on where it was.
    """

    __slots__ = ("_points",)

    def __init__(self, points: float | Sequence[Sequence[float]], *, key: str = "schedule") -> None:
        """Take a constant, or points as [env step, value] in rising order of steps.

        Args:
            points: the constant or the points.
            key: dotted name of the setting, for errors.
        Raises: ConfigError if there are no points, one isn't a pair of finite numbers, or the steps don't rise.
        """
        pairs = [(0.0, float(points))] if isinstance(points, int | float) else [_pair(p, key) for p in points]
        if not pairs:
            raise ConfigError(f"{key} has no points.", key=key, value=points, hint="Give [[env step, value], ...].")
        steps = [step for step, _ in pairs]
        if any(a >= b for a, b in pairwise(steps)):
            raise ConfigError(f"The env steps of {key} must rise: {steps}.", key=key, value=points)
        self._points = pairs

    def value(self, env_steps: int) -> float:
        """The value after so many env steps."""
        before = self._points[0]
        for after in self._points:
            if env_steps < after[0]:
                if after is before:
                    return after[1]
                share = (env_steps - before[0]) / (after[0] - before[0])
                return before[1] + share * (after[1] - before[1])
            before = after
        return before[1]

    @property
    def end(self) -> float:
        """Env steps from which on the value stays the same."""
        return self._points[-1][0]

    @classmethod
    def of(cls, constant: float, points: Sequence[Sequence[float]] | None, *, key: str) -> Schedule:
        """The schedule of a setting: its points if it has any, else its constant."""
        return cls(constant if points is None else points, key=key)


def _pair(point: Sequence[float], key: str) -> tuple[float, float]:
    if len(point) != 2 or point[0] < 0 or not all(map(math.isfinite, point)):
        raise ConfigError(f"A point of {key} is [env step, value], not {list(point)!r}.", key=key, value=point)
    return float(point[0]), float(point[1])
