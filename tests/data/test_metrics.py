from __future__ import annotations

from aiorl.data.metrics import EpisodeColumns, PerfStats, RolloutMetrics


def test_r93_rollout_metrics_has_the_six_fields_in_order_with_empty_defaults() -> None:
    assert RolloutMetrics._fields == (
        "episode_length", "episode_reward", "agent_rewards", "custom_metrics", "perf_stats", "hist_data",
    )  # fmt: skip
    assert RolloutMetrics(3, 1.5)[2:] == ({}, {}, {}, {})


def test_r78_perf_stats_are_means_in_ms_and_never_divide_by_zero() -> None:
    stats = PerfStats()
    assert stats.get() == {"mean_env_wait_ms": 0.0, "mean_processing_ms": 0.0, "mean_inference_ms": 0.0}
    stats.iters, stats.env_wait_time, stats.processing_time, stats.inference_time = 4, 0.2, 0.1, 0.4
    assert stats.get() == {"mean_env_wait_ms": 50.0, "mean_processing_ms": 25.0, "mean_inference_ms": 100.0}


def test_episode_columns_travel_as_arrays() -> None:
    assert {name: a.dtype.name for name, a in EpisodeColumns.empty().to_arrays().items()} == {
        "lengths": "int32",
        "rewards": "float64",
    }
