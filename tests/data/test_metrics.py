from __future__ import annotations

import logging

import numpy as np
import pytest

from aiorl.data.metrics import (
    MAX_HIST,
    MAX_NAME,
    MAX_NAMES,
    EpisodeColumns,
    PerfStats,
    RolloutMetrics,
)
from aiorl.process.log_once import log_once


def test_r93_rollout_metrics_has_the_six_fields_in_order_with_empty_defaults() -> None:
    assert RolloutMetrics._fields == (
        "episode_length",
        "episode_reward",
        "agent_rewards",
        "custom_metrics",
        "perf_stats",
        "hist_data",
    )
    assert RolloutMetrics(3, 1.5)[2:] == ({}, {}, {}, {})


def test_r78_perf_stats_are_means_in_ms_and_never_divide_by_zero() -> None:
    stats = PerfStats()
    assert stats.get() == {
        "mean_env_wait_ms": 0.0,
        "mean_processing_ms": 0.0,
        "mean_inference_ms": 0.0,
    }
    stats.iters, stats.env_wait_time, stats.processing_time, stats.inference_time = 4, 0.2, 0.1, 0.4
    assert stats.get() == {
        "mean_env_wait_ms": 50.0,
        "mean_processing_ms": 25.0,
        "mean_inference_ms": 100.0,
    }


def test_rewards_custom_metrics_and_histories_are_columns_by_name_and_are_read_back() -> None:
    """SPEC 11: policy rewards are per agent, not per episode; the default policy has none."""
    metrics = [
        RolloutMetrics(
            3,
            6.0,
            {("a", "red"): 1.0, ("b", "red"): 2.0, ("c", "blue"): 3.0},
            {"height": 1, "no": None},
        ),
        RolloutMetrics(
            2,
            5.0,
            {("a", "default_policy"): 5.0},
            {"height": np.float32(2.5)},
            {},
            {"steps": [1, 2.0]},
        ),
        RolloutMetrics(1, 1.0, {}, {"height": float("nan")}, {}, {"steps": [float("inf"), 4]}),
    ]
    episodes = EpisodeColumns.of(metrics)
    arrays = episodes.to_arrays()
    assert {name: (array.dtype.name, array.tolist()) for name, array in arrays.items()} == {
        "lengths": ("int32", [3, 2, 1]),
        "rewards": ("float64", [6.0, 5.0, 1.0]),
        "policy_reward/red": ("float64", [1.0, 2.0]),
        "policy_reward/blue": ("float64", [3.0]),
        "custom/height": ("float64", [1.0, 2.5]),
        "hist/steps": ("float64", [1.0, 2.0, 4.0]),
    }
    again = EpisodeColumns.from_arrays(
        {**arrays, "stray": arrays["lengths"], "custom/": arrays["lengths"]}
    )
    assert again.policy_rewards.keys() == {"red", "blue"}
    assert again.custom["height"].tolist() == [1.0, 2.5]
    assert again.hist["steps"].tolist() == [1.0, 2.0, 4.0]
    assert again.custom.keys() == {"height"}
    for none in (EpisodeColumns.of([]), EpisodeColumns.empty()):
        assert {name: (a.dtype.name, len(a)) for name, a in none.to_arrays().items()} == {
            "lengths": ("int32", 0),
            "rewards": ("float64", 0),
        }


def test_estimates_are_sent_with_episodes_by_estimator_and_metric() -> None:
    """SPEC 11: off_policy_estimator; values that are not finite numbers are left out."""
    by_estimator = [
        ("is", {"V_prev": 1.0, "V_step_IS": 2.0}),
        ("wis", {"V_prev": 1.0}),
        ("is", {"V_prev": np.inf}),
    ]
    arrays = EpisodeColumns.of([], by_estimator).to_arrays()
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "lengths": [],
        "rewards": [],
        "estimate/is/V_prev": [1.0],
        "estimate/is/V_step_IS": [2.0],
        "estimate/wis/V_prev": [1.0],
    }
    assert EpisodeColumns.from_arrays(arrays).estimates.keys() == {
        "is/V_prev",
        "is/V_step_IS",
        "wis/V_prev",
    }


def test_long_names_and_too_many_names_are_not_sent() -> None:
    episodes = EpisodeColumns.of(
        [RolloutMetrics(1, 1.0, {}, {f"m{i}" + "x" * 999: i for i in range(MAX_NAMES + 5)})]
    )
    arrays = episodes.to_arrays()
    assert len(arrays) == MAX_NAMES + 2
    assert max(map(len, arrays)) == MAX_NAME


def test_a_custom_metric_that_is_not_a_number_causes_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log_once.reset()
    metrics = [
        RolloutMetrics(
            1, 1.0, {}, {"colour": "red", "good": 1.0, "lost": float("nan")}, {}, {"steps": [None]}
        )
    ]
    with caplog.at_level(logging.WARNING, "aiorl"):
        EpisodeColumns.of(metrics)
        EpisodeColumns.of(metrics)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "'colour'" in messages[0]
    assert "'red'" in messages[0]
    assert "'steps'" in messages[1]


def test_wrong_series_and_too_large_numbers_are_left_out_and_the_others_stay() -> None:
    episodes = [
        RolloutMetrics(
            3, 1.0, custom_metrics={"huge": 10**400, "fine": 2}, hist_data={"one": 5, "none": None}
        ),
        RolloutMetrics(3, 1.0, hist_data={"one": np.array(6.0), "some": [1, 2]}),
    ]
    columns = EpisodeColumns.of(episodes)
    assert columns.custom["fine"].tolist() == [2.0]
    assert "huge" not in columns.custom
    assert columns.hist["one"].tolist() == [5.0, 6.0]
    assert columns.hist["some"].tolist() == [1.0, 2.0]
    assert "none" not in columns.hist


def test_the_newest_values_of_a_history_are_sent() -> None:
    numbers = [float(number) for number in range(MAX_HIST + 7)]
    episodes = [
        RolloutMetrics(1, 1.0, hist_data={"h": numbers, "short": [1]}),
        RolloutMetrics(1, 1.0, hist_data={"h": [-1.0], "short": [2]}),
    ]
    columns = EpisodeColumns.of(episodes)
    assert columns.hist["h"].tolist() == [*numbers[8:], -1.0]
    assert columns.hist["short"].tolist() == [1.0, 2.0]
