"""DeepMind's Atari preprocessing, on a fake game with an emulator and on a real one."""

from __future__ import annotations

import logging

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import AtariPreprocessing

from aiorl.env.atari import (
    AtariCopies,
    EpisodicLife,
    FireAtReset,
    PreprocessedGame,
    StackFrames,
    UndrawnFrames,
    is_atari,
    wrap_deepmind,
)
from aiorl.env.base_env import FinishedGame
from aiorl.env.gym_like import RealGames, game_counters
from aiorl.env.registry import EnvContext, resolve_env
from aiorl.env.vector_env import SerialEnv
from aiorl.env.wrapping import Wrapping
from aiorl.errors import ConfigError
from aiorl.testing.envs import CountingEnv
from benchmarks.sampler import make_lockstep_env


class LivesEnv(gymnasium.Env):
    """Game with an emulator: a life is lost every ``per_life`` steps; each step earns 1.

    Frames show the step.
    """

    def __init__(self, lives=3, per_life=2, shape=(4, 4), meanings=("NOOP", "FIRE", "UP")):
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)
        self.action_space = spaces.Discrete(3)
        self.ale = self
        self.actions = []
        self.resets = []
        self._all_lives, self._per_life, self._meanings = lives, per_life, list(meanings)
        self._step = 0

    def lives(self):
        return max(0, self._all_lives - self._step // self._per_life)

    def get_action_meanings(self):
        return self._meanings

    def _frame(self):
        return np.full(self.observation_space.shape, self._step, np.uint8)

    def reset(self, *, seed=None, options=None):
        self.resets.append(seed)
        self._step = 0
        return self._frame(), {}

    def step(self, action):
        self.actions.append(int(action))
        self._step += 1
        return self._frame(), 1.0, self.lives() == 0, False, {}


def test_an_atari_game_has_an_emulator_and_shows_pictures():
    assert is_atari(LivesEnv(shape=(210, 160, 3)))
    assert is_atari(gymnasium.wrappers.TimeLimit(LivesEnv(shape=(210, 160, 3)), 5))
    assert not is_atari(LivesEnv(shape=(128,)))
    assert not is_atari(CountingEnv())
    assert not is_atari(object())


def test_a_lost_life_ends_the_episode_and_a_reset_continues_the_game():
    game = LivesEnv(lives=3, per_life=2)
    env = EpisodicLife(game)
    env.reset()
    assert [env.step(2)[2] for _ in range(2)] == [False, True]
    obs, _ = env.reset()
    assert int(obs[0, 0]) == 3
    assert (game.resets, game.actions) == ([None], [2, 2, 0])
    assert env.step(2)[2]
    env.reset()
    assert env.step(2)[2]
    assert game.lives() == 0
    assert int(env.reset()[0][0, 0]) == 0
    env.step(2)
    assert int(env.reset(seed=4)[0][0, 0]) == 0, "a seed begins a game even if lives are left"
    assert game.resets == [None, None, 4]


def test_r124_whole_games_are_counted_for_any_number_of_lives():
    games = RealGames(LivesEnv(lives=2, per_life=2))
    env = EpisodicLife(games)
    env.reset()
    ends = 0
    while ends < 3:
        if env.step(2)[2]:
            ends += 1
            env.reset()
    assert games.take_finished() == [FinishedGame(4.0, 4)]
    assert games.take_finished() == []
    # The no-op that begins a life counts as a step of the game; an abandoned game is not counted.
    env.reset(seed=1)
    assert games.take_finished() == []


def test_r124_game_counters_are_found_inside_other_wrappers_if_every_copy_has_one():
    games = RealGames(LivesEnv())
    wrapped = gymnasium.wrappers.TimeLimit(EpisodicLife(games), 5)
    assert game_counters([wrapped, games]) == [games, games]
    assert game_counters([wrapped, CountingEnv()]) is None
    assert game_counters([]) is None


def test_fire_is_pressed_after_each_reset():
    game = LivesEnv()
    obs, _ = FireAtReset(game).reset()
    assert (game.actions, int(obs[0, 0])) == ([1], 1)
    short = LivesEnv(lives=1, per_life=1)
    assert int(FireAtReset(short).reset()[0][0, 0]) == 0
    assert short.resets == [None, None]


def test_frames_are_stacked_as_channels_oldest_first():
    env = StackFrames(LivesEnv(), 4)
    assert env.observation_space == spaces.Box(0, 255, (4, 4, 4), np.uint8)
    first = env.reset()[0]
    assert first[0, 0].tolist() == [0, 0, 0, 0]
    stacks = [env.step(0)[0] for _ in range(5)]
    assert stacks[1][0, 0].tolist() == [0, 0, 1, 2]
    assert stacks[4][0, 0].tolist() == [2, 3, 4, 5]
    assert stacks[4].flags.c_contiguous
    assert first[0, 0].tolist() == [0, 0, 0, 0]


def test_a_missing_opencv_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cv2", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[atari\]"):
        wrap_deepmind(LivesEnv(shape=(210, 160, 3)))


def real_game(name, **config):
    pytest.importorskip("ale_py")
    return resolve_env(name)(EnvContext(config))


@pytest.mark.parametrize("name", ["ALE/Pong-v5", "PongNoFrameskip-v4", "ale_py:ALE/Pong-v5"])
def test_a_real_game_is_made_by_id_and_recognised(name):
    env = real_game(name)
    assert is_atari(env)
    assert not is_atari(real_game("ALE/Pong-v5", obs_type="ram"))
    env.close()


@pytest.mark.slow
def test_undrawn_frames_change_only_the_time_per_step():
    """Oracle: Gymnasium's preprocessing around ale-py's plain environment, with the same seeds and
    actions.
    """
    config = {"frameskip": 1}
    fast = wrap_deepmind(real_game("ALE/Breakout-v5", **config))
    assert isinstance(fast.env.env.env.env.env, UndrawnFrames)
    slow = AtariPreprocessing(real_game("ALE/Breakout-v5", **config))
    slow = StackFrames(FireAtReset(EpisodicLife(RealGames(slow))), 4)
    rng = np.random.default_rng(0)
    outcomes = [env.reset(seed=3) for env in (fast, slow)]
    rewards = ends = 0
    for _ in range(300):
        action = rng.integers(4)
        outcomes = [env.step(action) for env in (fast, slow)]
        np.testing.assert_array_equal(outcomes[0][0], outcomes[1][0])
        assert outcomes[0][1:] == outcomes[1][1:]
        rewards += outcomes[0][1]
        if outcomes[0][2]:
            ends += 1
            np.testing.assert_array_equal(fast.reset()[0], slow.reset()[0])
    assert rewards > 0
    assert ends > 3
    fast.close()
    slow.close()


DEEPMIND = Wrapping(deepmind=True)
FIXED = {"repeat_action_probability": 0.0, "frameskip": 1}  # no randomness


def plain(name, num_envs, noop_max=0, **settings) -> SerialEnv:
    creator = resolve_env(name)
    games = [creator(EnvContext({**FIXED, **settings})) for _ in range(num_envs)]
    return SerialEnv([wrap_deepmind(game, noop_max=noop_max) for game in games], env_id=name)


def vector(name, num_envs, noop_max=0, **settings) -> SerialEnv:
    kwargs = {**resolve_env(name).gym_spec.kwargs, **FIXED, **settings}
    return SerialEnv(AtariCopies(kwargs, num_envs, env_id=name, noop_max=noop_max))


def is_vector(env) -> bool:
    return all(isinstance(game, PreprocessedGame) for game in env.unwrapped)


@pytest.mark.parametrize(
    ("name", "steps", "settings"),
    [
        ("ALE/Breakout-v5", 120, {}),  # lives, and FIRE at the start of each
        # No FIRE; games are cut.
        pytest.param(
            "ALE/MsPacman-v5", 60, {"max_num_frames_per_episode": 100}, marks=pytest.mark.slow
        ),
        pytest.param("ALE/Freeway-v5", 20, {"full_action_space": True}, marks=pytest.mark.slow),
    ],
)
def test_r161_rows_lives_and_games_equal_those_of_plain_games(name, steps, settings):
    ours, theirs = vector(name, 2, **settings), plain(name, 2, **settings)
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    np.testing.assert_array_equal(ours.reset([1, 2]), theirs.reset([1, 2]))
    rng = np.random.default_rng(0)
    ends = 0
    for _ in range(steps):
        actions = rng.integers(0, ours.action_space.n, 2)
        mine, other = ours.step(actions), theirs.step(actions)
        for field in ("obs", "rewards", "terminateds", "truncateds", "final_index", "final_obs"):
            np.testing.assert_array_equal(getattr(mine, field), getattr(other, field))
        ends += np.count_nonzero(mine.terminateds | mine.truncateds)
    assert ends or name == "ALE/Freeway-v5"
    assert ours.take_finished_games() == theirs.take_finished_games()
    ours.close(), theirs.close()


def test_auto_uses_it_for_several_games_with_deepmind_preprocessing():
    env = make_lockstep_env(
        "ALE/Pong-v5", {}, 2, wrapping=Wrapping(deepmind=True, dim=42, framestack=False), horizon=50
    )
    assert is_vector(env)
    assert env.observation_space.shape == (42, 42, 1)
    assert env.max_episode_steps == 50
    assert all(map(is_atari, env.unwrapped))  # so that rewards are clipped
    env.close()
    for num_envs, wrapping in ((1, DEEPMIND), (2, Wrapping())):
        env = make_lockstep_env("ALE/Pong-v5", {}, num_envs, wrapping=wrapping)
        assert not is_vector(env)
        env.close()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"frameskip": 2}, "frameskip"),
        ({"mode": 1}, "mode: 1"),
        ({"render_mode": "rgb_array"}, "render_mode"),
    ],
)
def test_unsupported_settings_use_single_games_and_the_log_says_why(settings, why, caplog):
    with caplog.at_level(logging.INFO):
        env = make_lockstep_env("ALE/Pong-v5", settings, 2, wrapping=DEEPMIND)
    assert not is_vector(env)
    assert why in caplog.text
    env.close()
    with pytest.raises(ConfigError, match=why):
        make_lockstep_env("ALE/Pong-v5", settings, 2, "native", wrapping=DEEPMIND)
