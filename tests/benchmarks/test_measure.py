"""Rates of learners, measured from their results."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.measure import rate_of_command, rate_when_warm

LEARNER = """
import json, sys, time
first_s, path = float(sys.argv[1]), sys.argv[2]
with open(path, "w") as file:
    for number in range(100):
        row = {"time_total_s": first_s + number / 2, "env_steps_trained_total": 100 * number}
        file.write(json.dumps(row) + chr(10))
time.sleep(60 if sys.argv[3] == "stay" else 0)
"""


def rows(first_s: float, count: int, every_s: float = 0.5) -> list[dict[str, float]]:
    """Return results after a start of ``first_s`` seconds; the first one is without an update."""
    return [
        {"time_total_s": first_s + every_s * number, "env_steps_trained_total": 100 * number}
        for number in range(count)
    ]


@pytest.mark.parametrize("first_s", [0.5, 8.0, 60.0])
def test_the_measured_time_begins_with_the_first_update_however_long_the_start_takes(
    first_s: float,
) -> None:
    results = rows(first_s, 100)
    assert [rate_when_warm(results[:count], 4.0) is None for count in (0, 1, 10, 17, 18, 30)] == [
        True
    ] * 4 + [False] * 2
    for count in (18, 30, 100):
        assert rate_when_warm(results[:count], 4.0) == pytest.approx(200.0)


def test_few_results_in_the_measured_time_lengthen_it() -> None:
    results = rows(3.0, 8, every_s=5.0)
    assert rate_when_warm(results[:6], 4.0) is None
    assert rate_when_warm(results[:7], 4.0) == pytest.approx(20.0)


def test_a_learner_is_stopped_once_its_rate_is_known(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEARNER, "8.0", str(tmp_path / "rows"), "stay"]
    assert rate_of_command(command, tmp_path / "rows", 4.0) == pytest.approx(200.0)


def test_a_learner_that_ends_without_enough_results_is_an_error_with_its_output(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such environment')"]
    with pytest.raises(RuntimeError, match="no such environment"):
        rate_of_command(command, tmp_path / "rows", 4.0)
