"""Schedules: values at, between and beyond the points."""

from __future__ import annotations

import math

import pytest

from aiorl.acting.exploration import Schedule
from aiorl.errors import ConfigError


@pytest.mark.parametrize(
    ("env_steps", "value"), [(0, 1.0), (100, 1.0), (150, 0.75), (200, 0.5), (300, 0.25), (400, 0.0), (10**9, 0.0)]
)
def test_values_lie_on_straight_lines_between_the_points_and_stay_beyond_them(env_steps: int, value: float) -> None:
    schedule = Schedule([[100, 1.0], [200, 0.5], [400, 0.0]])
    assert schedule.value(env_steps) == pytest.approx(value)


def test_a_constant_stays() -> None:
    assert Schedule(3e-4).value(0) == Schedule(3e-4).value(10**12) == 3e-4


def test_points_go_before_the_constant() -> None:
    assert Schedule.of(1.0, None, key="lr_schedule").value(5) == 1.0
    assert Schedule.of(1.0, [[0, 2.0]], key="lr_schedule").value(5) == 2.0


@pytest.mark.parametrize(
    ("points", "said"),
    [([], "no points"), ([[0, 1], [0, 2]], "must rise"), ([[5, 1], [3, 2]], "must rise"), ([[0, 1, 2]], "is \\["),
     ([[-1, 1.0]], "is \\["), ([[0, math.nan]], "is \\["), ([[math.inf, 1.0]], "is \\[")],
)  # fmt: skip
def test_bad_points_are_refused_by_the_name_of_the_setting(points: list[list[float]], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        Schedule(points, key="lr_schedule")
    assert caught.value.key == "lr_schedule"
    assert "lr_schedule" in str(caught.value)
