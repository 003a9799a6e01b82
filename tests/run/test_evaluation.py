"""Evaluation: whole episodes played with the policies of a checkpoint."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from saved_runs import save_run

import aiorl
from aiorl.env.registry import register_env
from aiorl.errors import ConfigError
from aiorl.evaluate import main
from aiorl.offline.readers import FileReader, ReaderOptions

BOX, THREE = spaces.Box(-2.0, 2.0, (3,)), spaces.Discrete(3)


class Drifting(gymnasium.Env[Any, Any]):
    """Environment where rewards depend on the action; episodes have 5 to 9 steps at random."""

    observation_space, action_space = BOX, THREE
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(5, 10))
        self.at = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return self.at, {}

    def step(self, action: Any) -> Any:
        self.at = np.roll(np.clip(self.at * 1.5, -1, 1), int(action)).astype(np.float32)
        self.left -= 1
        return self.at, float(self.at[0]), self.left == 0, False, {}

    def render(self) -> Any:
        return np.full((31, 41, 3), 20 * self.left, np.uint8)


class Noted(aiorl.DefaultCallbacks):
    def on_episode_end(self, *, episode: Any, **kwargs: Any) -> None:
        episode.custom_metrics["twice"] = 2 * episode.length


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run; do not change it."""
    directory = tmp_path_factory.mktemp("saved")
    register_env("drifting", lambda context: Drifting(**context))
    seen = np.random.default_rng(1).normal(0.3, 2.0, (40, 3)).astype(np.float32)
    save_run(
        directory,
        {aiorl.DEFAULT_POLICY_ID: seen},
        env="drifting",
        observation_filter="MeanStdFilter",
        num_envs_per_worker=4,
        callbacks=f"{__name__}:Noted" if __name__ in sys.modules else None,
    )
    return directory


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    register_env("drifting", lambda context: Drifting(**context))
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_episodes_equal_those_played_step_by_step_with_the_loaded_policy(run: Path) -> None:
    result = aiorl.evaluate(run, episodes=6, seed=11)
    policy = aiorl.load_policy(run)
    env = Drifting()
    returns, lengths = [], []
    obs, _ = env.reset(seed=11)
    for _ in range(6):
        total, length, over = 0.0, 0, False
        while not over:
            obs, reward, over, _, _ = env.step(policy.compute_single_action(obs))
            total, length = total + reward, length + 1
        returns.append(total)
        lengths.append(length)
        obs, _ = env.reset()
    assert result.lengths == lengths
    assert result.returns == pytest.approx(returns)
    assert result.mean == pytest.approx(np.mean(returns))
    assert result.std == pytest.approx(np.std(returns))
    assert (result.env, result.env_steps, result.seed, result.algo) == ("drifting", 1400, 11, "ppo")


def test_a_given_or_drawn_seed_repeats_an_evaluation(run: Path) -> None:
    first = aiorl.evaluate(run, episodes=4, explore=True)
    assert aiorl.evaluate(run, episodes=4, explore=True, seed=first.seed).returns == first.returns
    others = {tuple(aiorl.evaluate(run, episodes=4, seed=seed).returns) for seed in range(3)}
    assert len(others) == 3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 3),
        ("num_envs_per_worker", 4),
        ("vectorize", "remote"),
        ("extra_python_environs_for_worker", {"A": "1"}),
    ],
)
def test_keys_that_an_evaluation_sets_itself_are_refused(run: Path, key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        aiorl.evaluate(run, episodes=1, config={key: value})
    assert caught.value.key == key


def test_the_command_prints_each_episode_and_writes_the_result(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main([str(run), "--episodes", "3", "--seed", "2", "--json", str(run / "found.json")]) == 0
    )
    shown = capsys.readouterr().out
    expected = aiorl.evaluate(run, episodes=3, seed=2)
    found = json.loads((run / "found.json").read_text())
    assert found["returns"] == expected.returns
    assert found["mean"] == pytest.approx(expected.mean)
    assert all(f" {value:,.2f} " in shown for value in expected.returns)
    assert f"{expected.mean:,.2f} ± {expected.std:,.2f}" in shown
    assert "1,400" in shown


def test_a_file_for_the_result_that_is_a_directory_is_refused_before_an_episode(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), "--json", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert "--json" in shown.err
    assert str(tmp_path) in shown.err


def test_a_horizon_cuts_endless_episodes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main([str(run), "--episodes", "2", "--horizon", "3", "--json", str(run / "found.json")])
        == 0
    )
    assert json.loads((run / "found.json").read_text())["lengths"] == [3, 3]
    capsys.readouterr()


def test_episodes_are_stored_if_output_is_set(run: Path, tmp_path: Path) -> None:
    assert (
        main(
            [
                str(run),
                "--episodes",
                "4",
                "--seed",
                "5",
                "--explore",
                "--output",
                str(tmp_path / "data"),
            ]
        )
        == 0
    )
    batches = list(FileReader(str(tmp_path / "data"), ReaderOptions(epochs=1)))
    played = aiorl.evaluate(run, episodes=4, seed=5, explore=True)
    assert [batch.count for batch in batches] == played.lengths
    np.testing.assert_allclose(
        [batch["rewards"].sum() for batch in batches], played.returns, rtol=1e-4, atol=1e-6
    )
    assert all((batch["action_logp"] < 0).all() for batch in batches)


def test_a_video_shows_the_first_three_episodes(run: Path) -> None:
    cv2 = pytest.importorskip("cv2")
    pytest.importorskip("moviepy")
    result = aiorl.evaluate(run, episodes=5, seed=1, video=run / "film.mp4")
    film = cv2.VideoCapture(str(run / "film.mp4"))
    frames = 0
    while film.read()[0]:
        frames += 1
    # a picture after each step, and one of the first observation
    assert frames == sum(result.lengths[:3]) + 3
    assert not list(run.glob(".film*"))


def test_an_environment_without_pictures_is_not_filmed_and_leaves_no_file(run: Path) -> None:
    pytest.importorskip("moviepy")
    register_env("drifting", lambda context: Drifting())
    Drifting.render, kept = lambda self: None, Drifting.render  # type: ignore[method-assign]
    try:
        with pytest.raises(ConfigError) as caught:
            aiorl.evaluate(run, episodes=1, video=run / "film.mp4")
        assert caught.value.key == "video"
    finally:
        Drifting.render = kept  # type: ignore[method-assign]
    assert not list(run.glob("*film*"))


def test_the_name_is_both_a_function_and_an_importable_module(run: Path) -> None:
    import aiorl.evaluate as module

    assert (
        aiorl.evaluate(run, episodes=1, seed=1).returns == module(run, episodes=1, seed=1).returns
    )


def test_an_environment_that_clients_play_is_not_evaluated(tmp_path: Path) -> None:
    spaces_of_game = {
        "observation_space": {"kind": "Box", "shape": [3], "low": -1, "high": 1},
        "action_space": {"kind": "Discrete", "n": 2},
    }
    save_run(tmp_path, env="external", env_config=spaces_of_game, client_port=0, seed=None)
    with pytest.raises(ConfigError) as caught:
        aiorl.evaluate(tmp_path, episodes=1)
    assert (caught.value.key, caught.value.value) == ("env", "external")
