from __future__ import annotations

import math
import re
from typing import Any

import pytest

from aiorl.run.report.figures import (
    Headline,
    Summary,
    bytes_text,
    clock_text,
    figures,
    policy_returns_text,
    rate_text,
    sparkline,
    summary_lines,
)


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (rate_text(0), "0"),
        (rate_text(9999), "9,999"),
        (rate_text(349_123), "349 k"),
        (rate_text(1_345_000), "1.34 M"),
        (rate_text(math.nan), "-"),
        (bytes_text(0), "0 B"),
        (bytes_text(12_300), "12.3 kB"),
        (bytes_text(1.23e7), "12.3 MB"),
        (bytes_text(2e9), "2 GB"),
        (bytes_text(math.nan), "-"),
        (clock_text(0), "00:00"),
        (clock_text(61.9), "01:01"),
        (clock_text(3661), "1:01:01"),
        (clock_text(math.nan), "00:00"),
    ],
)
def test_rates_bytes_and_times_are_short(shown: str, text: str) -> None:
    assert shown == text


@pytest.mark.parametrize(
    ("result", "goals", "name", "pattern"),
    [
        (
            {"episode_reward_mean_last_100": 312.44, "episode_reward_mean": 1.0},
            {},
            "mean return",
            "312.4",
        ),
        (
            {"episode_reward_mean_last_100": 312.44},
            {"stop_return": 475},
            "mean return",
            r"312.4\D+475",
        ),
        ({"episode_reward_mean_last_100": math.nan}, {"stop_return": 475}, "mean return", r"\D+"),
        ({"timesteps_total": 12345}, {"stop_timesteps": 10**6}, "env steps", r"12 k\D+1.00 M"),
        ({"timesteps_total": 12345}, {}, "env steps", "12,345"),
        ({"policy_lag": {"min": 0.0, "mean": 0.52, "max": 3.0}}, {}, "policy lag", "0/0.5/3"),
        ({}, {}, "policy lag", "-"),
        ({"num_healthy_workers": 1}, {}, "workers", r"1\D+2"),
        ({"num_healthy_workers": 5}, {}, "workers", "5"),
        ({}, {"num_workers": None}, "workers", r"\D+"),
    ],
)
def test_figures_show_their_goals(result: Any, goals: Any, name: str, pattern: str) -> None:
    headline = Headline("ppo", "CartPole-v1", num_workers=goals.pop("num_workers", 2), goals=goals)
    assert re.fullmatch(pattern, figures(result, headline)[name])


def test_a_sparkline_has_a_character_for_each_share() -> None:
    assert sparkline([], 5) == ""
    assert sparkline([2.0, 2.0], 5) == "▁▁"
    assert sparkline([0.0, 7.0], 5) == "▁█"
    assert sparkline([float(n) for n in range(16)], 8) == "▁▂▃▄▅▆▇█"
    assert len(sparkline([float(n) for n in range(1001)], 40)) == 40


def test_a_summary_shows_paths_and_next_commands() -> None:
    summary = Summary(
        "Solved.",
        "runs/x",
        checkpoint="c",
        picture="p",
        next_steps=[("continue", "python -m aiorl.learner")],
    )
    shown = summary_lines(summary)
    assert shown[1] == "Solved."
    assert [line.split()[-1] for line in shown[3:6]] == ["runs/x", "p", "c"]
    assert shown[-2:] == ["  # continue", "  aiorl train"]
    assert summary_lines(Summary("Ended by Ctrl-C.", "")) == ["Ended by Ctrl-C."], (
        "there is nothing to show"
    )


def test_returns_by_policy_are_shown_if_there_are_several() -> None:
    assert (
        policy_returns_text({}) == policy_returns_text({"policy_reward_mean": {"left": 1.0}}) == ""
    )
    assert (
        policy_returns_text({"policy_reward_mean": {"left": 1.04, "right": -1.0}})
        == "left 1.0, right -1.0"
    )
    many = policy_returns_text({"policy_reward_mean": {f"p{number}": 0.0 for number in range(9)}})
    assert re.search(r"p5 0\.0\D+3\D+$", many)
