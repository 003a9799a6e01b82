from __future__ import annotations

import json
import logging
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, strategies as st

from aiorl.config.schema import CommonConfig
from aiorl.data.metrics import EpisodeColumns
from aiorl.run.observers import StopFigures
from aiorl.run.report.loggers import to_json
from aiorl.run.report.results import Progress, Results
from aiorl.run.run import criteria_of

episodes = st.lists(st.tuples(st.integers(1, 500), st.floats(-1e3, 1e3)), max_size=12)


def add(results: Results, finished: list[tuple[int, float]]) -> None:
    results.add_episodes(
        EpisodeColumns(
            np.array([length for length, _ in finished], np.int32),
            np.array([reward for _, reward in finished], np.float64),
        )
    )


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


@given(st.integers(1, 20), st.lists(st.lists(episodes, max_size=3), min_size=1, max_size=6))
def test_averages_take_all_new_episodes_and_the_newest_earlier_ones_up_to_the_window(
    window: int, iterations: list[list[list[tuple[int, float]]]]
) -> None:
    """R193, compared with plain lists."""
    results = Results(window, now=0.0)
    history: list[tuple[int, float]] = []
    for number, arrivals in enumerate(iterations, start=1):
        for finished in arrivals:
            add(results, finished)
        new = [episode for finished in arrivals for episode in finished]
        history += new
        shown = history[-max(len(new), window) :] if history else []
        result = results.finish_iteration(float(number), Progress(0, 0))
        assert result["episodes_this_iter"] == len(new)
        assert result["episodes_total"] == len(history)
        wanted = [reward for _, reward in shown]
        np.testing.assert_allclose(
            result["episode_reward_mean"], mean(wanted), rtol=1e-9, atol=1e-9
        )
        np.testing.assert_array_equal(result["episode_reward_min"], min(wanted, default=math.nan))
        np.testing.assert_array_equal(result["episode_reward_max"], max(wanted, default=math.nan))
        np.testing.assert_allclose(
            result["episode_len_mean"], mean([float(length) for length, _ in shown])
        )
        last_100 = [reward for _, reward in history[-100:]]
        np.testing.assert_allclose(
            result["episode_reward_mean_last_100"], mean(last_100), rtol=1e-9, atol=1e-9
        )
        assert result["hist_stats"]["episode_reward"] == wanted[-window:]


@given(st.integers(1, 150), st.lists(episodes, min_size=2, max_size=8), st.data())
def test_a_resumed_run_reports_as_if_it_had_not_stopped(
    window: int, iterations: list, data: st.DataObject
) -> None:
    stop = data.draw(st.integers(0, len(iterations) - 1))
    straight, first = Results(window, now=0.0), Results(window, now=0.0)
    for number, finished in enumerate(iterations[: stop + 1], start=1):
        add(straight, finished)
        add(first, finished)
        straight.finish_iteration(float(number), Progress(number, number))
        first.finish_iteration(float(number), Progress(number, number))
    second = Results(window, now=0.0)
    state = json.loads(json.dumps(first.to_state()))
    second.from_state(state, 1000.0, Progress(stop + 1, stop + 1))
    for number, finished in enumerate(iterations[stop + 1 :], start=1):
        add(straight, finished)
        add(second, finished)
        one = straight.finish_iteration(
            stop + 1.0 + number, Progress(stop + 1 + number, stop + 1 + number)
        )
        other = second.finish_iteration(
            1000.0 + number, Progress(stop + 1 + number, stop + 1 + number)
        )
        np.testing.assert_equal(other, one)


def test_the_newest_return_needs_100_episodes() -> None:
    results = Results(5, now=0.0)
    add(results, [(1, 500.0)] * 99)
    assert math.isnan(results.newest_return)
    add(results, [(1, 0.0)])
    assert results.mean_last() == results.newest_return == 495.0
    results.finish_iteration(1.0, Progress(0, 0))
    add(results, [(1, 500.0)] * 50)
    assert results.newest_return == 495.0
    add(results, [(1, 500.0)] * 50)
    assert results.newest_return == 500.0


@pytest.mark.parametrize(
    ("mean", "goal"), [(0.29999999, 0.3), (-0.30000001, -0.3), (474.9996, 475.0), (-1e-7, 0.0)]
)
def test_rounding_of_rewards_does_not_delay_the_end_of_a_run(mean: float, goal: float) -> None:
    config = CommonConfig(env="x")
    assert criteria_of(config, stop_return=goal).reason(StopFigures(mean))
    assert not criteria_of(config, stop_return=goal + 1e-3).reason(StopFigures(mean))


def test_rates_are_those_of_the_iteration() -> None:
    results = Results(100, now=10.0)
    results.finish_iteration(11.0, Progress(1000, 800, bytes_in=5000, bytes_out=100))
    result = results.finish_iteration(
        13.0,
        Progress(
            5000, 2800, updates=7, bytes_in=25_000, bytes_out=300, transport={"queue_depth": 3}
        ),
    )
    assert (result["sampled_steps_per_s"], result["trained_steps_per_s"]) == (2000.0, 1000.0)
    assert result["transport"] == {
        "bytes_in_per_s": 10_000.0,
        "bytes_out_per_s": 100.0,
        "queue_depth": 3,
    }
    assert (result["training_iteration"], result["time_this_iter_s"], result["time_total_s"]) == (
        2,
        2.0,
        3.0,
    )
    assert (
        result["timesteps_total"],
        result["timesteps_this_iter"],
        result["updates_this_iter"],
    ) == (5000, 4000, 7)


def test_policy_lag_is_weighted_by_env_steps_and_reset_each_iteration() -> None:
    results = Results(100, now=0.0)
    results.add_lag(0, 300)
    results.add_lag(4, 100)
    assert results.finish_iteration(1.0, Progress(0, 0))["policy_lag"] == {
        "min": 0.0,
        "mean": 1.0,
        "max": 4.0,
    }
    assert math.isnan(results.finish_iteration(2.0, Progress(0, 0))["policy_lag"]["mean"])


def test_sampler_times_are_means_per_turn_in_milliseconds() -> None:
    results = Results(100, now=0.0)
    results.add_perf(
        {"iters": 10, "env_wait_time": 0.5, "processing_time": 0.1, "inference_time": 0.2}
    )
    results.add_perf(
        {"iters": 30, "env_wait_time": 0.3, "processing_time": 0.1, "inference_time": 0.2}
    )
    perf = results.finish_iteration(1.0, Progress(0, 0))["sampler_perf"]
    assert perf == pytest.approx(
        {"mean_env_wait_ms": 20.0, "mean_processing_ms": 5.0, "mean_inference_ms": 10.0}
    )
    assert set(results.finish_iteration(2.0, Progress(0, 0))["sampler_perf"].values()) == {0.0}


def episode(**series: dict[str, list[float]]) -> EpisodeColumns:
    arrays = {
        kind: {name: np.array(values) for name, values in named.items()}
        for kind, named in series.items()
    }
    return EpisodeColumns(np.array([1], np.int32), np.array([1.0]), **arrays)


def test_custom_metrics_give_mean_min_and_max_and_earlier_ones_fill_the_window() -> None:
    """R90, R193."""
    results = Results(4, now=0.0)
    results.add_episodes(episode(custom={"height": [1.0, 2.0]}))
    results.add_episodes(episode(custom={"height": [6.0]}))
    custom = results.finish_iteration(1.0, Progress(0, 0))["custom_metrics"]
    assert custom == {"height_mean": 3.0, "height_min": 1.0, "height_max": 6.0}
    results.add_episodes(episode(custom={"height": [7.0, 5.0], "width": [1.0]}))
    custom = results.finish_iteration(2.0, Progress(0, 0))["custom_metrics"]
    assert custom["height_mean"] == (2 + 6 + 7 + 5) / 4
    assert custom["width_max"] == 1.0
    results.add_episodes(episode(custom={"height": [9.0, 9.0, 9.0, 9.0, 4.0]}))
    custom = results.finish_iteration(3.0, Progress(0, 0))["custom_metrics"]
    assert (custom["height_mean"], custom["height_min"]) == (8.0, 4.0), (
        "all new values count, not only the window"
    )


def test_rewards_by_policy_and_histories_survive_a_resume() -> None:
    """SPEC 11: policy_reward_* and hist_stats."""
    results, resumed = Results(100, now=0.0), Results(100, now=0.0)
    series = {
        "policy_rewards": {"a": [1.0, 3.0], "b": [-1.0]},
        "custom": {"x": [2.0]},
        "hist": {"speed": [1.0, 2.0]},
    }
    results.add_episodes(episode(**series))
    resumed.from_state(json.loads(json.dumps(results.to_state())), 0.0, Progress(0, 0))
    for each in (results, resumed):
        result = each.finish_iteration(1.0, Progress(0, 0))
        assert result["policy_reward_mean"] == {"a": 2.0, "b": -1.0}
        assert result["policy_reward_min"] == {"a": 1.0, "b": -1.0}
        assert result["policy_reward_max"] == {"a": 3.0, "b": -1.0}
        assert result["custom_metrics"]["x_mean"] == 2.0
        assert result["hist_stats"]["speed"] == [1.0, 2.0]
        assert result["hist_stats"]["episode_reward"] == [1.0]


def line(result: dict) -> int:
    """Return a result as bytes in result.jsonl."""
    return len(json.dumps(to_json(result)))


def finish(results: Results, now: float) -> dict:
    return results.finish_iteration(now, Progress(0, 0))


@pytest.mark.parametrize("series", ["custom", "hist", "policy_rewards", "estimates"])
def test_what_metrics_of_peers_cost_is_bounded_and_passes_when_they_are_gone(series: str) -> None:
    """D13: 990 names with 1,000 values each once took 96 % of the training rate permanently."""
    results = Results(100, now=0.0)
    for _ in range(300):
        results.add_episodes(episode(custom={"own": [1.0]}))
    usual = finish(results, 1.0)
    names = {f"junk{number}".ljust(190, "x"): np.linspace(0.1, 0.9, 1000) for number in range(990)}
    for _ in range(3):
        results.add_episodes(
            EpisodeColumns(np.array([1], np.int32), np.array([1.0]), **{series: names})
        )
    during = finish(results, 3.0)
    assert during["custom_metrics"]["own_mean"] == 1.0
    assert line(during) < 250_000
    assert len(json.dumps(results.to_state())) < 1_500_000
    for number in range(10):
        for _ in range(200):
            results.add_episodes(episode(custom={"own": [1.0]}))
        after = finish(results, 6.0 + 10 * number)
    assert line(after) < 1.1 * line(usual)
    assert after["custom_metrics"] == usual["custom_metrics"]


def test_a_policy_that_has_left_is_reported_until_an_iteration_has_no_episode_of_it() -> None:
    results = Results(100, now=0.0)
    results.add_episodes(episode(policy_rewards={"stays": [1.0], "leaves": [2.0]}))
    finish(results, 1.0)
    results.policies_removed({"leaves"})
    results.add_episodes(episode(policy_rewards={"leaves": [4.0]}))  # it ran until now
    assert finish(results, 2.0)["policy_reward_mean"] == {"stays": 1.0, "leaves": 3.0}
    state = json.loads(json.dumps(results.to_state()))
    resumed = Results(100, now=0.0)
    resumed.from_state(state, 0.0, Progress(0, 0))
    resumed.policies_removed({"leaves"})
    for continued in (results, resumed):
        assert finish(continued, 3.0)["policy_reward_mean"] == {"stays": 1.0}


def test_estimates_are_averaged_by_estimator_and_separate_from_episodes() -> None:
    """SPEC 11: off_policy_estimator."""
    results = Results(2, now=0.0)
    assert finish(results, 1.0)["off_policy_estimator"] == {}
    none = np.zeros(0, np.int32), np.zeros(0)
    said = {
        "is/V_prev": np.array([1.0, 3.0, 5.0]),
        "is/V_step_IS": np.array([4.0]),
        "wis/V_prev": np.array([7.0]),
    }
    results.add_episodes(EpisodeColumns(*none, estimates=said))
    result = finish(results, 2.0)
    expected = {"is": {"V_prev": 3.0, "V_step_IS": 4.0}, "wis": {"V_prev": 7.0}}
    assert result["off_policy_estimator"] == expected
    assert (result["episodes_this_iter"], result["episodes_total"]) == (0, 0)
    assert math.isnan(result["episode_reward_mean"])
    resumed = Results(2, now=0.0)
    resumed.from_state(json.loads(json.dumps(results.to_state())), 0.0, Progress(0, 0))
    newest = {"is": {"V_prev": 4.0, "V_step_IS": 4.0}, "wis": {"V_prev": 7.0}}
    assert finish(resumed, 1.0)["off_policy_estimator"] == newest, "the window of episodes"
    results.add_episodes(
        EpisodeColumns(*none, estimates={f"x/{number}": np.ones(1) for number in range(60)})
    )
    assert len(finish(results, 3.0)["off_policy_estimator"]["x"]) == 47, "50 names in total"


def test_values_of_one_iteration_are_summed_and_not_stored() -> None:
    results = Results(100, now=0.0)
    everything = np.random.default_rng(0).normal(size=(100, 5000))
    tracemalloc.start()
    try:
        for values in everything:
            columns = EpisodeColumns(
                np.ones(5000, np.int32),
                values.copy(),
                {},
                {"x": values.copy()},
                {"h": values.copy()},
            )
            results.add_episodes(columns)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 400_000
    assert len(json.dumps(results.to_state())) < 100_000
    result = finish(results, 1.0)
    assert result["episodes_this_iter"] == everything.size
    for mean, least, most in (
        (result["episode_reward_mean"], result["episode_reward_min"], result["episode_reward_max"]),
        tuple(result["custom_metrics"][f"x_{kind}"] for kind in ("mean", "min", "max")),
    ):
        assert mean == pytest.approx(everything.mean())
        assert (least, most) == (everything.min(), everything.max())
    assert result["hist_stats"]["h"] == everything[-1, -1000:].tolist()


def test_a_wide_window_has_its_usual_size_again_without_new_values() -> None:
    results = Results(2, now=0.0)
    results.add_episodes(episode(custom={"x": [9.0, 1.0, 2.0]}))
    assert finish(results, 1.0)["custom_metrics"]["x_mean"] == 4.0
    for now in (2.0, 3.0):
        assert finish(results, now)["custom_metrics"] == {"x_mean": 1.5, "x_min": 1.0, "x_max": 2.0}


def test_names_that_never_repeat_do_not_fill_the_memory_and_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    results = Results(100, now=0.0)
    with caplog.at_level(logging.WARNING, "aiorl"):
        for _ in range(2):
            for number in range(1500):
                results.add_episodes(episode(custom={f"m{number}": [1.0]}))
        results.add_episodes(episode(custom={"m0": [3.0]}))
        result = finish(results, 1.0)
    assert len(result["custom_metrics"]) == 3 * 300
    assert result["custom_metrics"]["m0_mean"] == pytest.approx(5 / 3)
    assert result["metrics_left_out"] == 2 * 1200
    (told,) = [record.getMessage() for record in caplog.records]
    assert "'m300'" in told
    assert "metrics_left_out" in told


def test_a_name_is_kept_while_it_can_be_reported_again() -> None:
    """Episodes can be rare or long:

    R193 holds for a metric in one of 1,000 episodes or one per half hour.
    """
    results = Results(4, now=0.0)
    results.add_episodes(episode(custom={"rare": [1.0]}))
    finish(results, 1.0)
    add(results, [(1, 1.0)] * 5000)
    assert "rare_mean" in finish(results, 10.0)["custom_metrics"], (
        "ten seconds, regardless of the number of episodes"
    )
    assert "rare_mean" not in finish(results, 12.0)["custom_metrics"]
    results.add_episodes(episode(custom={"slow": [1.0]}))
    finish(results, 100.0)
    add(results, [(1, 1.0)] * 900)
    assert "slow_mean" in finish(results, 1800.0)["custom_metrics"]
    assert "slow_mean" not in finish(results, 1901.0)["custom_metrics"]
    results.add_episodes(episode(custom={"rare": [2.0]}))
    assert finish(results, 1902.0)["custom_metrics"]["rare_mean"] == 2.0


def test_huge_numbers_are_no_error() -> None:
    results = Results(2, now=0.0)
    results.add_episodes(episode(custom={"x": [1.7e308] * 300}))
    add(results, [(2**31 - 1, 1.7e308)] * 300)
    result = finish(results, 1.0)
    assert result["custom_metrics"]["x_max"] == 1.7e308
    assert to_json(result)["episode_reward_mean"] is None
    assert result["hist_stats"]["episode_lengths"] == [2**31 - 1] * 2
    finish(results, 2.0)


def test_learner_metrics_are_in_the_result_and_perf_on_request() -> None:
    """R195."""
    results = Results(100, now=0.0)
    ledger = {"sampled": 10, "trained": 8, "queued": 2}
    result = results.finish_iteration(
        1.0,
        Progress(10, 8, num_healthy_workers=2, ledger=ledger, learner={"kl": 0.1}),
        timestamp=123.0,
    )
    assert (result["ledger"], result["learner"], result["num_healthy_workers"]) == (
        ledger,
        {"kl": 0.1},
        2,
    )
    assert result["timestamp"] == 123.0
    assert "perf" not in result
    result = results.finish_iteration(2.0, Progress(10, 8, perf={"cpu_util_percent": 50.0}))
    assert result["perf"] == {"cpu_util_percent": 50.0}


def test_rates_cover_at_least_a_second_even_for_an_iteration_of_two_milliseconds() -> None:
    results = Results(100, now=0.0)
    rates = []
    for now in (0.5, 1.0, 1.5, 3.0, 3.002):
        steps = round(1000 * now) + (5000 if now == 3.002 else 0)
        result = results.finish_iteration(now, Progress(steps, steps, bytes_in=2 * steps))
        assert result["transport"]["bytes_in_per_s"] == pytest.approx(
            2 * result["trained_steps_per_s"]
        )
        rates.append(result["sampled_steps_per_s"])
    assert rates == pytest.approx([1000.0, 1000.0, 1000.0, 1000.0, 1000.0 + 5000 / 1.502])
    assert result["time_this_iter_s"] == pytest.approx(0.002)
    results.begin_rates(7.0)  # as after a slow start-up
    assert results.finish_iteration(7.5, Progress(steps + 500, 0))[
        "sampled_steps_per_s"
    ] == pytest.approx(1000.0)
    steps += 500
    results.begin_rates(8.0)
    results.leave_out_pause(8.1)  # mostly before work began
    assert results.finish_iteration(8.6, Progress(steps + 500, 0))[
        "sampled_steps_per_s"
    ] == pytest.approx(1000.0)
    steps += 500
    results.from_state(results.to_state(), 10.0, Progress(steps, steps))
    assert results.finish_iteration(10.5, Progress(steps + 500, steps))[
        "sampled_steps_per_s"
    ] == pytest.approx(1000.0)
