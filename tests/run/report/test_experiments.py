"""Runs of one experiment are found, distinguished from others, and combined."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from aiorl.config.layers import save_config
from aiorl.errors import ConfigError
from aiorl.learning.algorithms.ppo import PPOConfig
from aiorl.learning.algorithms.registry import config_class
from aiorl.plot import draw_experiments, main
from aiorl.run.report.comparison import probability_of_improvement
from aiorl.run.report.plot import (
    PLOT_FILE,
    RunCurve,
    band_of,
    find_runs,
    group_runs,
    interquartile_mean,
)


def write_run(path: Path, points: list[tuple[float, float, float]], **settings: object) -> Path:
    """Make a run directory with results (env steps, seconds, mean return)."""
    path.mkdir(parents=True)
    lines = [
        json.dumps(
            {"timesteps_total": steps, "time_total_s": seconds, "episode_reward_mean": value}
        )
        for steps, seconds, value in points
    ]
    (path / "result.jsonl").write_text("\n".join(lines) + "\n")
    config = config_class(str(settings.get("algo", "ppo")))
    save_config(config.from_mapping({"env": "CartPole-v1", **settings}), path)
    return path


def test_runs_that_differ_only_in_their_seed_are_one_experiment(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(
            tmp_path / f"a{seed}", [(0, 0, 1.0), (10, 1, 2.0)], seed=seed, stop_timesteps=seed + 10
        )
        write_run(tmp_path / f"b{seed}", [(0, 0, 1.0), (10, 1, 2.0)], seed=seed, lr=1e-3)
    experiments = group_runs([RunCurve.read(path) for path in find_runs([tmp_path])])
    assert [(one.name, one.env, len(one.runs)) for one in experiments] == [
        (f"ppo, lr={PPOConfig().lr:g}", "CartPole-v1", 3),
        ("ppo, lr=0.001", "CartPole-v1", 3),
    ]


def test_the_run_directory_does_not_distinguish_experiments() -> None:
    runs = [
        curve("0", output="data/0", replay_spill_dir="spill/0"),
        curve("1", output="data/1", replay_spill_dir="spill/1", output_max_file_size=2**20),
        curve("2", loggers=["my_code:Logger"], output="data/2", output_compress_columns=[]),
    ]
    (experiment,) = group_runs(runs)
    assert (experiment.name, len(experiment.runs)) == ("ppo", 3)


POINTS = np.linspace(0.0, 9.0, 4)


def curve(name: str, **config: object) -> RunCurve:
    return RunCurve(Path(name), {"algo": "ppo", "env": "E", **config}, POINTS, POINTS, POINTS)


def test_names_of_different_algorithms_or_environments_have_no_settings() -> None:
    runs = [
        curve("1", lr=1e-3, clip_param=0.1),
        curve("2", algo="impala", lr=1e-4, rho_bar=1.0),
        curve("3", algo="dqn", env="F", lr=1e-2),
    ]
    assert [(one.name, one.env) for one in group_runs(runs)] == [
        ("ppo", "E"),
        ("impala", "E"),
        ("dqn", "F"),
    ]


def test_names_have_only_the_few_settings_that_distinguish_experiments() -> None:
    runs = [
        curve(
            str(lr),
            preset=None,
            lr=lr,
            gamma=0.9 + lr,
            env_config={"size": lr},
            model={"fcnet_hiddens": [lr] * 40},
        )
        for lr in (1e-4, 1e-3)
    ]
    assert [one.name for one in group_runs(runs)] == ["ppo, lr=0.0001", "ppo, lr=0.001"]


def test_settings_that_only_some_runs_have_are_named_for_those() -> None:
    runs = [curve("1", env_config={}), curve("2", env_config={"size": 3})]
    assert [one.name for one in group_runs(runs)] == ["ppo", "ppo, size=3"]


def test_names_have_the_directory_if_three_settings_do_not_distinguish_experiments() -> None:
    bits = [[number >> place & 1 for place in range(4)] for number in range(16)]
    runs = [
        curve(f"run-{n}", lr=a, gamma=b, clip_param=c, lambda_=d)
        for n, (a, b, c, d) in enumerate(bits)
    ]
    names = [one.name for one in group_runs(runs)]
    assert len({*names}) == 16
    assert all(name.count("=") == 3 and "run-" in name for name in names)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([3.0], 3.0), ([1.0, 5.0], 3.0), ([0, 1, 2, 3, 94], 2.0), ([0, 1, 2, 3, 4, 5, 6, 79], 3.5)],
)
def test_the_interquartile_mean_is_that_of_the_middle_half(
    values: list[float], expected: float
) -> None:
    assert interquartile_mean(np.array(values, float)) == pytest.approx(expected)


def test_a_band_lies_between_the_runs_that_cover_its_points(tmp_path: Path) -> None:
    for seed, (last, value) in enumerate([(100, 0.0), (100, 10.0), (50, 20.0)]):
        write_run(tmp_path / str(seed), [(0, 0, value), (last, last / 10, value)], seed=seed)
    runs = [RunCurve.read(path) for path in find_runs([tmp_path])]
    for by, end in (("steps", 50), ("seconds", 5)):
        band = band_of(runs, by=by, rng=np.random.default_rng(0))
        early, late = band.at < end * 0.99, band.at > end * 1.01
        assert np.allclose(band.mean[early], 10.0)
        assert np.allclose(band.mean[late], 5.0)
        assert set(band.num_runs[early]) == {3}
        assert set(band.num_runs[late]) == {2}
        assert ((band.low <= band.mean) & (band.mean <= band.high)).all()
        assert np.allclose((band.low[late], band.high[late]), [[0.0], [10.0]])


def test_the_command_draws_and_prints_the_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(2):
        write_run(tmp_path / f"a{seed}", [(0, 0, 1.0), (10, 1, 2.0 + seed)], seed=seed)
    write_run(tmp_path / "b", [(0, 0, 1.0), (20, 1, 9.0)], lr=1e-3)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "result.jsonl").write_text("")
    picture = tmp_path / "curves.png"
    assert main([str(tmp_path), "--out", str(picture), "--goal", "5"]) == 0
    shown = capsys.readouterr()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert re.search(r"\b2 .*\b2\.5\b", shown.out)
    assert re.search(r"\b1 .*\b9\.0\b", shown.out)
    assert str(tmp_path / "empty") in shown.err
    assert [file.name for file in tmp_path.glob("*curves*")] == ["curves.png"]


def test_curves_over_training_time_end_where_the_fastest_run_ends(tmp_path: Path) -> None:
    """The rest would be the mean of the slow runs, which looks like a collapse of learning."""
    for seed, (seconds, last) in enumerate([(10, 9.0), (20, 1.0)]):
        write_run(tmp_path / str(seed), [(0, 0, 0.0), (100, seconds, last)], seed=seed)
    experiments = group_runs([RunCurve.read(path) for path in find_runs([tmp_path])])
    over_steps, over_time = draw_experiments(experiments).axes
    ends = [
        max(np.nanmax(line.get_xdata()) for line in axes.get_lines())
        for axes in (over_steps, over_time)
    ]
    assert ends[0] == 100
    assert 9.9 < ends[1] <= 10


def test_runs_that_share_no_training_time_are_drawn_one_by_one(tmp_path: Path) -> None:
    """Their mean would jump where one of them begins or ends."""
    for seed, (first, last) in enumerate([(1, 4), (2, 5), (9, 12)]):
        write_run(tmp_path / str(seed), [(0, first, -5.0), (100, last, 1.0)], seed=seed)
    experiments = group_runs([RunCurve.read(path) for path in find_runs([tmp_path])])
    _, over_time = draw_experiments(experiments).axes
    lines = [tuple(line.get_xdata()) for line in over_time.get_lines()]
    assert sorted(lines) == [(1, 4), (2, 5), (9, 12)]


def test_the_picture_of_one_run_is_its_learning_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", [(0, 0, 1.0), (10, 1, 2.0)])
    assert main([str(run)]) == 0
    assert (run / PLOT_FILE).read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.endswith(f"{run / PLOT_FILE}\n")
    assert main([str(run), "--out", str(tmp_path / "own.svg")]) == 0
    assert b"<svg" in (tmp_path / "own.svg").read_bytes()


def test_curves_have_the_names_that_the_user_gives_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for algo in ("ppo", "impala"):
        write_run(tmp_path / algo, [(0, 0, 1.0), (10, 1, 2.0)], algo=algo)
    words = [
        str(tmp_path / "ppo"),
        str(tmp_path / "impala"),
        "--out",
        str(tmp_path / "x.png"),
        "--label",
        "mine",
    ]
    assert main(words) == 2
    assert "ppo; impala" in capsys.readouterr().err
    assert main([*words, "--label", "theirs"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[:2]] == ["mine", "theirs"]


@pytest.mark.parametrize(
    "words", [["--out=folder"], ["--out=none/x.png"], ["--out=curves"], ["--goal=nan"]]
)
def test_what_cannot_be_drawn_is_refused_by_its_option(
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    write_run(tmp_path / "run", [(0, 0, 1.0), (10, 1, 2.0)])
    option, _, value = words[0].partition("=")
    with contextlib.suppress(SystemExit):
        assert main(["run", *words]) == 2
    shown = capsys.readouterr().err
    assert option in shown
    assert repr(value) in shown


def test_a_run_without_episodes_has_no_curve(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [(10, 1, float("nan"))])
    with pytest.raises(ConfigError) as caught:
        RunCurve.read(path)
    assert (caught.value.key, caught.value.value) == ("run", str(path))


def test_a_pipe_in_place_of_a_config_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path / "run", [(0, 0, 1.0), (10, 1, 2.0)])
    (path / "config.yaml").unlink()
    os.mkfifo(path / "config.yaml")
    assert main([str(path), "--out", str(tmp_path / "x.png")]) != 0
    assert str(path / "config.yaml") in capsys.readouterr().err


def test_the_interval_of_hundreds_of_runs_takes_little_memory() -> None:
    rng = np.random.default_rng(1)
    steps = np.linspace(0.0, 100.0, 300)
    returns = rng.normal(size=(100, 300))
    runs = [RunCurve(Path(str(index)), {}, steps, steps, one) for index, one in enumerate(returns)]
    tracemalloc.start()
    band = band_of(runs, by="steps", rng=np.random.default_rng(0))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 150 << 20
    drawn = np.random.default_rng(0).integers(100, size=(100, 2000))
    expected = np.quantile(interquartile_mean(returns[:, 299][drawn]), (0.025, 0.975))
    np.testing.assert_allclose((band.low[299], band.high[299]), expected)


def test_the_probability_counts_pairs_of_runs_and_ties_half_as_rliable_does() -> None:
    """By hand: 1 + 2.5 + 2.5 + 3 and 1 + 2.5 + 3 + 3 of 12 pairs. The interval is that of rliable
    1.2 with 2,000 resamples, from 0.5 to 0.979.
    """
    tasks = [
        (np.array([3.0, 5.0, 5.0, 9.0]), np.array([1.0, 4.0, 5.0])),
        (np.array([-2.0, 0.0, 1.0, 1.5]), np.array([-3.0, -1.0, 0.0])),
    ]
    probability, low, high = probability_of_improvement(tasks, np.random.default_rng(0))
    assert probability == pytest.approx((9.0 + 9.5) / 24)
    assert (low, high) == pytest.approx((0.5, 0.979), abs=0.03)


def test_equal_scores_have_probability_one_half_and_distinct_ones_certainty() -> None:
    same = np.ones(4)
    rng = np.random.default_rng(0)
    assert probability_of_improvement([(same, same)], rng) == pytest.approx((0.5, 0.5, 0.5))
    assert probability_of_improvement([(same + 1, same)], rng) == pytest.approx((1.0, 1.0, 1.0))


def test_the_command_compares_experiments_with_several_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, (ppo, impala) in enumerate([(1.0, 4.0), (5.0, 6.0), (3.0, 7.0)]):
        for algo, value in (("ppo", ppo), ("impala", impala)):
            path = tmp_path / f"{algo}{seed}"
            write_run(path, [(0, 0, 0.0), (10, 1, value)], algo=algo, seed=seed)
    write_run(tmp_path / "alone", [(0, 0, 0.0), (10, 1, 9.0)], algo="a2c")
    assert main([str(tmp_path), "--out", str(tmp_path / "curves.png")]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "probability" in line]
    # of nine pairs, 4 < 5 alone is lost; one run of a2c is no sample of seeds
    assert line.startswith("impala ends better than ppo with probability 0.89 (95 % interval ")


@pytest.mark.slow
def test_the_command_scores_experiments_over_environments_that_have_a_range(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = {
        ("ppo", "CartPole-v1"): (20, 260, 500),  # scores 0, 0.5, 1
        ("ppo", "Pendulum-v1"): (-1200, -675, -150),  # likewise
        ("ppo", "Acrobot-v1"): (-500, -80, -90),  # without a range
        ("a2c", "CartPole-v1"): (260, 260, 260),
    }
    for (algo, env), values in ends.items():
        for seed, value in enumerate(values):
            path = tmp_path / f"{algo}-{env}-{seed}"
            write_run(path, [(0, 0, 0.0), (10, 1, value)], algo=algo, env=env, seed=seed)
    ranges = ["--normalize", "CartPole-v1=20:500", "--normalize", "Pendulum-v1=-1200:-150"]
    assert main([str(tmp_path), "--out", str(tmp_path / "curves.png"), *ranges]) == 0
    of_a2c, of_ppo = [
        line for line in capsys.readouterr().out.splitlines() if line.find(" scores ") > 0
    ]
    # of 0, 0, 0.5, 0.5, 1, 1, the middle four remain
    assert of_ppo.startswith("ppo scores 0.50 (interquartile mean of 6 runs in 2 environments;")
    low, high = map(float, re.findall(r"\d\.\d+", of_ppo)[1:])
    assert 0 <= low < 0.5 < high <= 1
    assert of_a2c.startswith("a2c scores 0.50 (interquartile mean of 3 runs in 1 environment;")
    assert of_a2c.endswith("0.50 to 0.50)")


@pytest.mark.parametrize(
    "text",
    ["CartPole-v1", "CartPole-v1=20", "CartPole-v1=20:20", "CartPole-v1=20:inf", "Pong-v5=0:1"],
)
def test_a_range_that_can_not_be_used_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    write_run(tmp_path / "run", [(0, 0, 0.0), (10, 1, 9.0)])
    assert main([str(tmp_path / "run"), "--normalize", text]) == 2
    assert text.partition("=")[0] in capsys.readouterr().err
