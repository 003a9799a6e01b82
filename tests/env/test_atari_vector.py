"""ale-py's vector environment beside Gymnasium's wrappers around ale-py's single one."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from aiorl.data.columns import DEFAULT_AGENT_ID as AGENT
from aiorl.env.atari import AtariCopies, PreprocessedGame, is_atari, why_not_atari_vector, wrap_deepmind
from aiorl.env.base_env import env_seeds
from aiorl.env.env_maker import EnvMaker, EnvPlan, make_lockstep_env
from aiorl.env.registry import EnvContext, resolve_env
from aiorl.env.vector_env import SerialEnv
from aiorl.env.wrapping import Wrapping
from aiorl.errors import ConfigError

DEEPMIND = Wrapping(deepmind=True)
FIXED = {"repeat_action_probability": 0.0, "frameskip": 1}  # nothing is left to random numbers


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
        ("ALE/MsPacman-v5", 60, {"max_num_frames_per_episode": 100}),  # no FIRE; games are cut
        ("ALE/Freeway-v5", 20, {"full_action_space": True}),
    ],
)
def test_r161_rows_lives_and_games_are_those_of_the_plain_games(name, steps, settings):
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


@pytest.mark.nightly
def test_r161_random_starts_and_sticky_actions_give_the_plain_games_statistics():
    """Lives of Breakout last equally long: some 60 of each, to within four standard errors."""
    lengths = []
    for make in (vector, plain):
        env = make("ALE/Breakout-v5", 4, noop_max=30, repeat_action_probability=0.25)
        env.reset([5, 6, 7, 8])
        rng = np.random.default_rng(1)
        began, found = np.zeros(4, int), []
        for step in range(1, 520):
            result = env.step(rng.integers(0, 4, 4))
            for index in np.flatnonzero(result.terminateds):
                found.append(step - began[index])
                began[index] = step
        env.close()
        lengths.append(found)
    mine, theirs = (np.array(found) for found in lengths)
    error = np.sqrt(mine.var() / len(mine) + theirs.var() / len(theirs))
    assert min(len(mine), len(theirs)) > 50
    assert abs(mine.mean() - theirs.mean()) < 4 * error


def test_the_same_seeds_give_the_same_games_and_each_game_has_its_own():
    first, second = (vector("ALE/Breakout-v5", 2, noop_max=30, repeat_action_probability=0.25) for _ in range(2))
    np.testing.assert_array_equal(first.reset([3, 1 << 40]), second.reset([3, 1 << 40]))
    for step in range(40):
        actions = np.full(2, 2 + step // 2 % 2)
        obs = first.step(actions).obs
        np.testing.assert_array_equal(obs, second.step(actions).obs)
    assert not np.array_equal(obs[0], obs[1])
    first.close(), second.close()


def test_auto_takes_it_for_several_games_with_deepminds_preprocessing():
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
    [({"frameskip": 2}, "frameskip is 2"), ({"mode": 1}, "mode: 1"), ({"render_mode": "rgb_array"}, "render_mode")],
)
def test_what_it_cannot_do_is_left_to_single_games_with_a_note(settings, why, caplog):
    with caplog.at_level(logging.INFO):
        env = make_lockstep_env("ALE/Pong-v5", settings, 2, wrapping=DEEPMIND)
    assert not is_vector(env)
    assert why in caplog.text
    env.close()
    with pytest.raises(ConfigError, match=why):
        make_lockstep_env("ALE/Pong-v5", settings, 2, "native", wrapping=DEEPMIND)


def test_r29_the_general_path_gets_the_same_games_from_the_same_seed():
    maker = EnvMaker(EnvPlan(env="ALE/Breakout-v5", num_envs=2, vectorize="auto", wrapping=DEEPMIND, seed=3))
    env = maker.make_first()
    maker.check_seedable(env)
    assert maker.is_deepmind
    polled = maker.to_base_env(env)
    lockstep = make_lockstep_env("ALE/Breakout-v5", {}, 2, wrapping=DEEPMIND)
    first = polled.poll().obs
    np.testing.assert_array_equal([first[0][AGENT], first[1][AGENT]], lockstep.reset(env_seeds(3, 2)))
    for step in range(30):
        polled.send_actions({index: {AGENT: step % 4} for index in (0, 1)})
        poll, result = polled.poll(), lockstep.step(np.full(2, step % 4))
        np.testing.assert_array_equal([poll.rewards[0][AGENT], poll.rewards[1][AGENT]], result.rewards)
    np.testing.assert_array_equal(poll.obs[1][AGENT], result.obs[1])
    assert polled.take_finished_games() == []
    polled.stop(), lockstep.close()


def test_the_monitor_goes_around_single_games(tmp_path):
    env = make_lockstep_env("ALE/Pong-v5", {}, 2, wrapping=Wrapping(deepmind=True, monitor_path=str(tmp_path)))
    assert not is_vector(env)
    env.close()


def test_an_ale_py_without_vector_environments_is_passed_over(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ale_py.vector_env" else object())
    assert "no vector environment" in why_not_atari_vector({})
