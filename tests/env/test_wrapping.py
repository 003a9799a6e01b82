from __future__ import annotations

import dataclasses
import json
import logging
import sys
import types
from dataclasses import asdict

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from aiorl.config.worker import WorkerConfig
from aiorl.data.obs_layout import is_masked
from aiorl.env.action_mask import MaskFromInfo
from aiorl.env.env_maker import EnvMaker, to_base_env
from aiorl.env.gym_like import game_counters, reset_env
from aiorl.env.registry import EnvContext, resolve_env
from aiorl.env.remote_env import RemoteEnv
from aiorl.env.wrapping import STATS_FILE, EnvPlan, StatsFile, Wrapping, monitor_env
from aiorl.errors import BadRewardError, ConfigError
from aiorl.testing.envs import CountingEnv, CountingVectorEnv
from aiorl.testing.multi_agent_envs import CountingMultiAgentEnv


def test_r26_the_monitor_has_a_folder_per_environment_and_is_the_outermost_wrapper(tmp_path):
    env = Wrapping(monitor_path=str(tmp_path)).wrap(CountingEnv(), EnvContext({}, 3, 4))
    assert isinstance(env, StatsFile)
    assert (tmp_path / "worker-3-env-4" / STATS_FILE).exists()
    env.close()


class OldDialect:
    """Environment that is gym-like but not a gymnasium.Env."""

    observation_space, action_space = spaces.Box(0, 1, (1,)), spaces.Discrete(2)

    def reset(self):
        return np.zeros(1, np.float32)

    def step(self, action):
        return np.zeros(1, np.float32), 2.0, True, {}


def test_r26_gym_like_environments_of_any_dialect_are_monitored(tmp_path):
    env = Wrapping(monitor_path=str(tmp_path)).wrap(OldDialect(), EnvContext({}, 1, 0))
    reset_env(env)
    env.step(0)
    env.close()
    (line,) = (tmp_path / "worker-1-env-0" / STATS_FILE).read_text().splitlines()
    assert json.loads(line)["reward"] == 2.0
    plain = OldDialect()
    assert Wrapping(deepmind=True).wrap(plain, EnvContext()) is plain, (
        "it is unchanged without a monitor"
    )


def test_r22_an_environment_of_several_agents_that_looks_like_one_is_never_wrapped(tmp_path):
    class Both(CountingMultiAgentEnv, gymnasium.Env):
        pass

    env = Both()
    assert Wrapping(monitor_path=str(tmp_path)).wrap(env, EnvContext()) is env
    vector = CountingVectorEnv()
    assert Wrapping(monitor_path=str(tmp_path)).wrap(vector, EnvContext()) is vector


def test_r23_r26_atari_games_are_preprocessed_then_monitored(tmp_path):
    pytest.importorskip("ale_py")
    wrapping = Wrapping(deepmind=True, dim=42, framestack=False, monitor_path=str(tmp_path))
    game = resolve_env("ALE/Pong-v5")(EnvContext())
    assert wrapping.wraps_atari(game)
    assert not Wrapping().wraps_atari(game)
    env = wrapping.wrap(game, EnvContext())
    assert env.observation_space.shape == (42, 42, 1)
    assert game_counters([env])
    assert isinstance(env, StatsFile)
    env.close()


def test_the_monitor_sets_a_render_mode_for_videos_if_there_is_one():
    monitored = Wrapping(monitor_path="/tmp/monitor")
    cart_pole = resolve_env("CartPole-v1")
    assert monitored.env_config(cart_pole, {"a": 1}) == {"a": 1, "render_mode": "rgb_array"}
    assert monitored.env_config(cart_pole, {"render_mode": None}) == {"render_mode": None}
    assert monitored.env_config(resolve_env("aiorl.testing.envs:CountingEnv"), {}) == {}
    assert Wrapping().env_config(cart_pole, {}) == {}


@pytest.mark.parametrize("obs_type", ["ram", "grayscale"])
def test_r23_a_game_that_is_not_preprocessed_keeps_its_own_frame_skip(obs_type):
    pytest.importorskip("ale_py")
    pong, wrapping = resolve_env("ALE/Pong-v5"), Wrapping(deepmind=True)
    config = wrapping.env_config(pong, {"obs_type": obs_type})
    game = pong(EnvContext(config))
    _, info = game.reset()
    *_, info_of_step = game.step(0)
    assert info_of_step["episode_frame_number"] - info["episode_frame_number"] == 4
    assert wrapping.wrap(game, EnvContext(config)) is game
    assert wrapping.env_config(pong, {"obs_type": "rgb"}) == {"obs_type": "rgb", "frameskip": 1}
    game.close()


def test_r23_a_game_with_continuous_actions_cannot_be_preprocessed():
    pytest.importorskip("ale_py")
    game = resolve_env("ALE/Pong-v5")(EnvContext({"continuous": True}))
    with pytest.raises(ConfigError, match="preprocessor_pref: rllib"):
        Wrapping(deepmind=True).wrap(game, EnvContext())
    game.close()


def test_r23_atari_preprocessing_follows_the_settings_and_a_users_own_replaces_it():
    wrapping = Wrapping.of(
        WorkerConfig.model_validate({"model": {"dim": 42, "framestack": False}}), "/m"
    )
    assert wrapping == Wrapping(deepmind=True, dim=42, framestack=False, monitor_path="/m")
    assert not Wrapping.of(WorkerConfig(preprocessor_pref="rllib")).deepmind
    assert not Wrapping.of(
        WorkerConfig.model_validate({"model": {"custom_preprocessor": "a:B"}})
    ).deepmind


class Scaled(gymnasium.RewardWrapper):
    def __init__(self, env, by=2.0):
        super().__init__(env)
        self.by = by

    def reward(self, reward):
        return reward * self.by


SCALED = f"{__name__}:Scaled"


def settings_with(*wrappers):
    return WorkerConfig.model_validate({"wrappers": list(wrappers)})


@pytest.mark.parametrize("kind", [CountingEnv, OldDialect])
def test_a_users_wrappers_apply_to_each_environment_innermost_first(kind):
    wrapping = Wrapping.of(settings_with(Scaled, {"class": SCALED, "kwargs": {"by": 5.0}}))
    env = Wrapping(**json.loads(json.dumps(asdict(wrapping)))).wrap(kind(), EnvContext())
    assert (env.by, env.env.by) == (5.0, 2.0)
    env.reset()
    assert env.step(0)[1] == {CountingEnv: 10.0, OldDialect: 20.0}[kind]


class Weighted(gymnasium.RewardWrapper):
    def __init__(
        self,
        env,
        weights: np.ndarray,
        shape: tuple[int, ...] | None = None,
        steps: list[int] | None = None,
    ):
        super().__init__(env)
        self.got = (weights, shape, steps)


def test_wrappers_get_tuples_and_arrays_for_the_lists_of_files_where_they_ask_for_them():
    kwargs = {"weights": [0.5, 0.5], "shape": [2, 3], "steps": [1]}
    env = Wrapping.of(settings_with({"class": f"{__name__}:Weighted", "kwargs": kwargs})).wrap(
        CountingEnv(), EnvContext()
    )
    weights, shape, steps = env.got
    assert weights.tolist() == [0.5, 0.5]
    assert (shape, steps) == ((2, 3), [1])


def test_gymnasiums_wrappers_take_functions_types_and_shapes():
    users = [
        {"class": gymnasium.wrappers.TransformReward, "kwargs": {"func": lambda reward: -reward}},
        {"class": gymnasium.wrappers.ReshapeObservation, "kwargs": {"shape": [2, 2]}},
        {"class": gymnasium.wrappers.DtypeObservation, "kwargs": {"dtype": np.float64}},
    ]
    env = Wrapping.of(settings_with(*users)).wrap(gymnasium.make("CartPole-v1"), EnvContext())
    observation, _ = env.reset(seed=1)
    assert (observation.shape, observation.dtype) == ((2, 2), np.float64)
    assert env.step(0)[1] == -1.0


def test_names_of_objects_that_are_gone_are_refused_where_environments_are_made():
    gone = "this-program:Gone"
    with pytest.raises(ConfigError) as caught:
        EnvMaker(EnvPlan(env="CartPole-v1", env_config={"data": {"table": gone}}))
    assert caught.value.key == "env_config.data.table"
    wrapper = {"class": SCALED, "kwargs": {"by": gone}}
    with pytest.raises(ConfigError) as caught:
        Wrapping(users=(wrapper,)).wrap(CountingEnv(), EnvContext())
    assert caught.value.key == "wrappers[0].kwargs.by"


def test_objects_are_refused_by_key_if_each_environment_has_a_process():
    for settings, key in (
        ({"env_config": {"table": np.zeros(3)}}, "env_config.table"),
        (
            {"wrapping": Wrapping(users=({"class": SCALED, "kwargs": {"by": np.zeros(1)}},))},
            "wrappers[0].kwargs.by",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            RemoteEnv(EnvPlan(env="CartPole-v1", vectorize="remote", **settings))
        assert caught.value.key == key


def test_wrapped_environments_step_one_by_one():
    plan = EnvPlan(
        env="CartPole-v1", num_envs=3, vectorize="auto", wrapping=Wrapping(users=(SCALED,))
    )
    env = EnvMaker(plan).make_first()
    assert isinstance(env, Scaled)
    env.close()
    with pytest.raises(ConfigError) as caught:
        EnvMaker(dataclasses.replace(plan, vectorize="native")).make_first()
    assert caught.value.key == "vectorize"


@pytest.mark.parametrize(
    ("wrapper", "env"),
    [
        (SCALED, CountingVectorEnv(2)),
        (SCALED, CountingMultiAgentEnv()),
        ("collections:OrderedDict", CountingEnv()),
        ({"class": SCALED, "kwargs": {"at": 3}}, CountingEnv()),
        ({"class": SCALED, "kwarg": {"by": 3}}, CountingEnv()),
        ({"kwargs": {}}, CountingEnv()),
        (f"{__name__}:settings_with", CountingEnv()),
    ],
)
def test_an_invalid_wrapper_is_refused_with_its_key(wrapper, env):
    with pytest.raises(ConfigError) as caught:
        Wrapping(users=(wrapper,)).wrap(env, EnvContext())
    assert caught.value.key == "wrappers[0]"


class Filmed(CountingEnv):
    render_mode = "rgb_array"
    metadata = {"render_fps": 10}

    def render(self):
        return np.full((64, 64, 3), 40 * self._step, np.uint8)


def play(env: gymnasium.Env, episodes: int) -> None:
    for _ in range(episodes):
        env.reset()
        while not any(env.step(0)[2:4]):
            pass


def lines(folder) -> list:
    return [json.loads(line) for line in (folder / STATS_FILE).read_text().splitlines()]


def test_each_episode_immediately_writes_a_line_and_a_second_run_appends(tmp_path, caplog):
    folder = tmp_path / "deep" / "worker-1-env-0"
    with caplog.at_level(logging.INFO):
        env = monitor_env(CountingEnv(3), folder)
    assert "rgb_array" in caplog.text
    play(env, 2)
    assert [(line["length"], line["reward"]) for line in lines(folder)] == [(3, 6.0), (3, 6.0)]
    assert all(line["seconds"] >= 0 and line["ended_at"] > 1e9 for line in lines(folder))
    env.close()
    env = monitor_env(CountingEnv(2, "truncate"), folder)
    play(env, 1)
    env.close()
    assert [line["length"] for line in lines(folder)] == [3, 3, 2]


def test_without_moviepy_statistics_are_written_and_the_log_says_what_to_install(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setitem(sys.modules, "moviepy", None)
    env = monitor_env(Filmed(2), tmp_path)
    assert "[video]" in caplog.text
    play(env, 1)
    assert len(lines(tmp_path)) == 1
    env.close()


def test_videos_of_rendered_images_get_a_folder_per_start(tmp_path):
    pytest.importorskip("moviepy")
    for run in (1, 2):
        env = monitor_env(Filmed(4), tmp_path)
        play(env, 2)
        env.close()
        videos = sorted(path.name for path in (tmp_path / f"videos-{run}").iterdir())
        assert videos == ["video-episode-0.mp4", "video-episode-1.mp4"]
    assert len(lines(tmp_path)) == 4


def test_a_gymnasium_environments_mask_is_taken_from_its_info():
    """Taxi-v4 comes with Gymnasium."""
    env = MaskFromInfo(gymnasium.make("Taxi-v4"))
    plain = gymnasium.make("Taxi-v4")
    assert is_masked(env.observation_space)
    (obs, info), (plain_obs, _) = env.reset(seed=3), plain.reset(seed=3)
    for _ in range(20):
        assert env.observation_space.contains(obs)
        assert obs["observation"] == plain_obs
        np.testing.assert_array_equal(obs["action_mask"], info["action_mask"])
        action = int(np.flatnonzero(obs["action_mask"])[0])
        obs, reward, terminated, truncated, info = env.step(action)
        plain_obs, *same, _ = plain.step(action)
        assert [reward, terminated, truncated] == same


def test_it_can_be_named_in_a_config_with_the_environments_settings():
    env = resolve_env("aiorl.env.action_mask:MaskFromInfo")(
        EnvContext({"env": "Taxi-v4", "is_rainy": True})
    )
    assert env.spec.max_episode_steps == 200
    assert env.spec.kwargs["is_rainy"]
    assert is_masked(env.observation_space)


class Weighed(gymnasium.RewardWrapper):
    """Weighs the parts of a reward; the weights must be an array."""

    def __init__(self, env, weight: np.ndarray, names: list[str] = ()):
        super().__init__(env)
        assert weight.shape == (2,)
        self.weight, self.names = weight, names

    def reward(self, reward):
        return float(self.weight @ reward)


class TwoRewards(CountingEnv):
    def step(self, action):
        obs, _, terminated, truncated, info = super().step(action)
        return obs, np.array([1.0, 10.0]), terminated, truncated, info


def test_a_list_reaches_a_wrapper_as_the_array_that_its_parameter_asks_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "users_wrappers", types.SimpleNamespace(Weighed=Weighed))
    wrapper = {
        "class": "users_wrappers:Weighed",
        "kwargs": {"weight": [0.5, 0.25], "names": ["time", "gold"]},
    }
    env = Wrapping(users=[wrapper]).wrap(TwoRewards(), EnvContext())
    env.reset()
    assert env.step(0)[1] == 3.0
    assert env.names == ["time", "gold"]


def test_a_vector_of_rewards_is_refused_with_the_wrapper_that_helps():
    env = to_base_env(TwoRewards())
    env.poll()
    with pytest.raises(BadRewardError, match="LinearReward"):
        env.send_actions({0: {"agent0": 0}})
