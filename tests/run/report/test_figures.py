from __future__ import annotations

import math

import pytest

from aiorl.run.report.figures import (
    Headline,
    Summary,
    bytes_text,
    clock_text,
    lag_text,
    mean_return_text,
    policy_returns_text,
    rate_text,
    sparkline,
    steps_text,
    summary_lines,
)


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (rate_text(0), "0"), (rate_text(9999), "9,999"), (rate_text(349_123), "349 k"),
        (rate_text(1_345_000), "1.34 M"), (rate_text(math.nan), "-"),
        (bytes_text(0), "0 B"), (bytes_text(12_300), "12.3 kB"), (bytes_text(1.23e7), "12.3 MB"),
        (bytes_text(2e9), "2 GB"), (bytes_text(math.nan), "-"),
        (clock_text(0), "00:00"), (clock_text(61.9), "01:01"), (clock_text(3661), "1:01:01"),
        (clock_text(math.nan), "00:00"),
    ],
)  # fmt: skip
def test_rates_bytes_and_times_are_short(shown: str, text: str) -> None:
    assert shown == text


def test_the_mean_return_is_that_of_the_last_100_episodes_beside_its_goal() -> None:
    result = {"episode_reward_mean_last_100": 312.44, "episode_reward_mean": 1.0}
    assert mean_return_text(result, Headline("a", "e", 1, stop_return=475)) == "312.4, goal 475"
    assert mean_return_text(result, Headline("a", "e", 1)) == "312.4"
    assert mean_return_text({"episode_reward_mean_last_100": math.nan}, Headline("a", "e", 1)) == "no episode yet"


def test_steps_and_lag() -> None:
    assert steps_text({"timesteps_total": 12345}, Headline("a", "e", 1, stop_timesteps=10**6)) == "12 k of 1.00 M"
    assert steps_text({"timesteps_total": 12345}, Headline("a", "e", 1)) == "12,345"
    assert lag_text({"policy_lag": {"min": 0.0, "mean": 0.52, "max": 3.0}}) == "0/0.5/3"
    assert lag_text({}) == "-"


def test_a_sparkline_has_a_character_for_each_share() -> None:
    assert sparkline([], 5) == ""
    assert sparkline([2.0, 2.0], 5) == "▁▁"
    assert sparkline([0.0, 7.0], 5) == "▁█"
    assert sparkline([float(n) for n in range(16)], 8) == "▁▂▃▄▅▆▇█"
    assert len(sparkline([float(n) for n in range(1001)], 40)) == 40


def test_a_summary_says_where_things_are_and_what_to_type() -> None:
    summary = Summary(
        "Solved.", "runs/x", checkpoint="c", picture="p", next_steps=[("go on", "python -m aiorl.learner")]
    )
    assert summary_lines(summary) == [
        "", "Solved.", "", "  run directory   runs/x", "  learning curve  p", "  checkpoint      c", "",
        "What to type next:", "  # go on", "  python -m aiorl.learner",
    ]  # fmt: skip
    assert summary_lines(Summary("Ended.", "runs/x"))[-1] == "  run directory   runs/x"


def test_returns_by_policy_are_shown_where_there_are_several() -> None:
    assert policy_returns_text({}) == policy_returns_text({"policy_reward_mean": {"left": 1.0}}) == ""
    assert policy_returns_text({"policy_reward_mean": {"left": 1.04, "right": -1.0}}) == "left 1.0, right -1.0"
    many = policy_returns_text({"policy_reward_mean": {f"p{number}": 0.0 for number in range(9)}})
    assert many.endswith("p5 0.0 and 3 more")


def test_a_run_of_which_nothing_came_is_summed_up_in_one_line() -> None:
    assert summary_lines(Summary("Ended by Ctrl-C.", "")) == ["Ended by Ctrl-C."]
