from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from aiorl.env.gym_like import (
    AsGymnasium,
    check_seedable,
    picture_of,
    reset_env,
    seed_env,
    to_five_values,
)
from aiorl.errors import ConfigError
from aiorl.testing.envs import CountingEnv


class OldEnv:
    """Environment in the form before Gymnasium: one-value reset, four-value step, a seed method."""

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


def test_r165_step_gives_five_values_from_either_form():
    assert to_five_values((1, 2.0, True, False, {})) == (1, 2.0, True, False, {})
    assert to_five_values((1, 2.0, True, {})) == (1, 2.0, True, False, {})
    assert to_five_values((1, 2.0, True, {"TimeLimit.truncated": True}))[2:4] == (False, True)
    assert to_five_values((1, 2.0, False, {"TimeLimit.truncated": True}))[2:4] == (False, False)
    assert to_five_values((1, 2.0, True, None))[2:4] == (True, False)
    with pytest.raises(ValueError, match="'False'"):
        to_five_values((1, 2.0, "False", {}))
    with pytest.raises(ValueError, match=r"\(1, 2\.0, True\)"):
        to_five_values((1, 2.0, True))


def test_r28_a_seed_for_an_environment_that_cannot_be_seeded_is_refused():
    check_seedable(CountingEnv(), "e")
    check_seedable(OldEnv(), "e")
    with pytest.raises(ConfigError, match="Unseedable"):
        check_seedable(Unseedable(), "e")


def test_r26_gymnasium_wrappers_work_with_any_dialect():
    old = OldEnv()
    env = gymnasium.wrappers.RecordEpisodeStatistics(AsGymnasium(old))
    assert env.unwrapped is old
    assert reset_env(env, seed_env(env, 5)) == ((1, {"x": 0}), {})
    assert old.seeded_with == [5]
    for _ in range(2):
        assert env.reset() == ((1, {"x": 0}), {})
        *result, info = env.step(0)
        assert result == [(2, {"x": 1}), 1.0, True, False]
        assert (info["episode"]["r"], info["episode"]["l"]) == (1.0, 1)
    assert old.seeded_with == [5], "only if a seed is given"
    env.close()


def test_r28_wrappers_do_not_make_an_environment_seedable():
    check_seedable(gymnasium.wrappers.RecordEpisodeStatistics(AsGymnasium(OldEnv())), "old")
    with pytest.raises(ConfigError, match=r"'odd' \(Unseedable\)"):
        check_seedable(gymnasium.wrappers.RecordEpisodeStatistics(AsGymnasium(Unseedable())), "odd")


class Drawn(OldEnv):
    """Environment that opens a window unless it is asked for a picture."""

    metadata = {"render.modes": ["human", "rgb_array"], "video.frames_per_second": 7}

    def render(self, mode="human"):
        if mode != "rgb_array":
            raise OSError("there is no screen")
        return np.zeros((2, 2, 3), np.uint8)


def test_a_render_that_takes_a_mode_is_asked_for_a_picture():
    env = AsGymnasium(Drawn())
    assert (env.render_mode, env.metadata["render_fps"]) == ("rgb_array", 7)
    for picture in (env.render(), picture_of(Drawn()), picture_of(env)):
        assert picture.shape == (2, 2, 3)


def test_a_picture_that_fails_ends_the_recording_and_not_the_run():
    class Screenless(Drawn):
        def render(self, mode="human"):
            raise OSError("there is no screen")

    assert AsGymnasium(Screenless()).render() is None
