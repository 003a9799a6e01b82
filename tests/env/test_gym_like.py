from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from aiorl.env.gym_like import check_gym_like, check_seedable, is_gym_like, reset_env, seed_env, to_five_values
from aiorl.errors import ConfigError, UnsupportedEnvError
from aiorl.testing.envs import CountingEnv


class OldEnv:
    """The dialect before Gymnasium: one-value reset, four-value step, a seed method."""

    observation_space = spaces.Tuple([spaces.Discrete(3), spaces.Dict({"x": spaces.Discrete(2)})])
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.seeded_with = []

    def seed(self, seed):
        self.seeded_with.append(seed)

    def reset(self, **kwargs):
        assert not kwargs
        return (np.int64(1), {"x": np.int64(0)})

    def step(self, action):
        return (np.int64(2), {"x": np.int64(1)}), 1.0, True, {}


class Unseedable(OldEnv):
    seed = None

    def reset(self):
        return 0


def test_r165_reset_gives_observation_and_info_from_either_form():
    obs, info = reset_env(CountingEnv())
    assert (obs.tolist(), info) == ([0, 0, 0], {})
    assert reset_env(OldEnv()) == ((1, {"x": 0}), {})
    assert reset_env(Unseedable()) == (0, {})


def test_r165_step_gives_five_values_from_either_form():
    assert to_five_values((1, 2.0, True, False, {})) == (1, 2.0, True, False, {})
    assert to_five_values((1, 2.0, True, {})) == (1, 2.0, True, False, {})
    assert to_five_values((1, 2.0, True, {"TimeLimit.truncated": True}))[2:4] == (False, True)
    assert to_five_values((1, 2.0, False, {"TimeLimit.truncated": True}))[2:4] == (False, False)
    assert to_five_values((1, 2.0, True, None))[2:4] == (True, False)
    with pytest.raises(ValueError, match="3 values"):
        to_five_values((1, 2.0, True))


def test_a_seed_goes_to_reset_where_it_is_taken_else_to_the_seed_method():
    assert seed_env(CountingEnv(), 5) == {"seed": 5}
    assert seed_env(gymnasium.make("CartPole-v1"), 5) == {"seed": 5}
    old = OldEnv()
    assert seed_env(old, 5) == {}
    assert old.seeded_with == [5]


def test_r28_an_environment_without_any_way_to_be_seeded_is_refused():
    check_seedable(CountingEnv(), "e")
    check_seedable(OldEnv(), "e")
    with pytest.raises(ConfigError, match="cannot be seeded"):
        check_seedable(Unseedable(), "e")


def test_gym_like_means_reset_step_and_both_spaces():
    assert is_gym_like(OldEnv())
    assert not is_gym_like(object())
    check_gym_like(CountingEnv(), "e")
    with pytest.raises(UnsupportedEnvError, match=r"'e' made a int"):
        check_gym_like(3, "e")
