from __future__ import annotations

from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from aiorl.env.base_env import TrainingDisabled
from aiorl.env.gym_like import episode_limit
from aiorl.env.vector_env import SerialEnv
from aiorl.errors import (
    BadObservationError,
    BadRewardError,
    ConfigError,
    EnvContractError,
    EnvError,
)
from aiorl.testing.envs import CountingEnv, FaultyEnv, counting_obs


def serial(*envs, horizon=None) -> SerialEnv:
    return SerialEnv(envs, env_id="counting", horizon=horizon)


NO_ACTION = np.zeros(2, np.int64)


@pytest.mark.parametrize("end", ["terminate", "never"])
def test_a_horizon_is_a_truncation_but_a_real_end_on_it_is_a_real_end(end):
    """R82, R83."""
    env = serial(CountingEnv(3, end), CountingEnv(7, end, index=1), horizon=3)
    env.reset()
    for _ in range(2):
        step = env.step(NO_ACTION)
        assert step.final_index is None
    step = env.step(NO_ACTION)
    assert step.terminateds.tolist() == [end == "terminate", False]
    assert step.truncateds.tolist() == [end != "terminate", True]
    assert step.final_obs.tolist() == [
        counting_obs(0, 3, 0).tolist(),
        counting_obs(0, 3, 1).tolist(),
    ]
    assert step.obs.tolist() == [[1, 0, 0], [1, 0, 1]]
    assert env.max_episode_steps == 3


class Limited(CountingEnv):
    """Environment that ignores its own limit."""

    spec = EnvSpec("Limited-v0", max_episode_steps=5)


@pytest.mark.parametrize("horizon", [None, 0, 5, 4])
def test_a_limit_that_the_environment_ignores_is_enforced(horizon):
    """R81; a limit equal to the horizon is valid (R80). The copies reach it at different times."""
    env = serial(Limited(100), Limited(3, index=1), Limited(7, index=2), horizon=horizon)
    env.reset()
    length = horizon or 5
    ends = [[], [], []]
    for step in range(1, 41):
        result = env.step(np.zeros(3, np.int64))
        for index in range(3):
            if result.truncateds[index] or result.terminateds[index]:
                ends[index].append((step, bool(result.truncateds[index])))
        if result.final_index is not None:
            assert result.final_obs[:, 1].tolist() == [
                3 if index == 1 else length for index in result.final_index
            ]
    assert ends[0] == ends[2] == [(step, True) for step in range(length, 41, length)]
    assert ends[1] == [(step, False) for step in range(3, 41, 3)]
    env.reset()
    assert not any(env.step(np.zeros(3, np.int64)).truncateds.any() for _ in range(length - 1))
    assert env.step(np.zeros(3, np.int64)).truncateds.tolist() == [True, False, True]


class Told(CountingEnv):
    """Environment whose infos say if a step can be trained on."""

    def __init__(self, *enabled, index=0):
        super().__init__(100, index=index)
        self.enabled = list(enabled)

    def step(self, action):
        return (
            *super().step(action)[:4],
            {"step": self._step, "training_enabled": self.enabled.pop(0)},
        )


@pytest.mark.parametrize("off", [False, 0, np.False_])
def test_a_step_that_must_not_be_trained_on_ends_lockstep(off):
    """R102: lockstep can neither leave out the row nor train on it."""
    env = serial(Told(True, True), Told(1, off, index=1))
    env.reset()
    env.step(NO_ACTION)
    with pytest.raises(TrainingDisabled, match="'counting'"):
        env.step(NO_ACTION)


def test_r80_r81_the_episode_limit_is_found_in_specs_and_wrappers_and_can_be_a_numpy_number():
    assert episode_limit(CountingEnv()) is None
    wrapped = gymnasium.wrappers.TimeLimit(CountingEnv(), 17)
    assert episode_limit(gymnasium.wrappers.OrderEnforcing(wrapped)) == 17
    env = CountingEnv(50)
    env.spec = SimpleNamespace(max_episode_steps=np.int64(5))
    assert episode_limit(env) == serial(env).max_episode_steps == 5
    with pytest.raises(ConfigError, match=r"\b5\b") as caught:
        serial(env, horizon=10)
    assert caught.value.key == "horizon"


@pytest.mark.parametrize(
    ("fault", "error", "value"),
    [
        ("step", EnvError, "RuntimeError"),
        ("nan_obs", BadObservationError, "NaN"),
        ("nan_reward", BadRewardError, "nan"),
    ],
)
def test_a_fault_in_step_names_environment_copy_and_step(fault, error, value):
    env = serial(CountingEnv(2), FaultyEnv(fault, at_step=4))
    env.reset()
    for _ in range(3):
        env.step(NO_ACTION)
    with pytest.raises(error, match=value) as caught:
        env.step(NO_ACTION)
    fault_found = caught.value
    assert (fault_found.env_id, fault_found.vector_index, fault_found.step) == ("counting", 1, 4)


@pytest.mark.parametrize("reward", ["1", None, [1.0], b"2"])
def test_text_none_and_lists_are_refused_as_a_reward(reward):
    class Paying(CountingEnv):
        def step(self, action):
            obs, _, *rest = super().step(action)
            return obs, reward, *rest

    env = serial(CountingEnv(2), Paying(2))
    env.reset()
    with pytest.raises(BadRewardError) as caught:
        env.step(NO_ACTION)
    assert (caught.value.vector_index, caught.value.step) == (1, 1)


@pytest.mark.parametrize("at", [2, 3])
def test_text_is_refused_as_a_flag(at):
    class Telling(CountingEnv):
        def step(self, action):
            result = [*super().step(action)]
            result[at] = "False"
            return tuple(result)

    env = serial(CountingEnv(2), Telling(9))
    env.reset()
    with pytest.raises(EnvContractError, match="'False'") as caught:
        env.step(NO_ACTION)
    assert (caught.value.vector_index, caught.value.step) == (1, 1)


class ShowsEnv(gymnasium.Env):
    """Environment that returns the given observation, regardless of its space."""

    def __init__(self, space, *obs):
        self.observation_space = space
        self.action_space = spaces.Discrete(2)
        self.obs = list(obs)

    def reset(self, *, seed=None, options=None):
        return self.obs.pop(0), {}

    def step(self, action):
        return self.obs.pop(0), 0.0, False, False, {}


@pytest.mark.parametrize(
    ("space", "obs"),
    [
        (spaces.Discrete(3), 2),
        (spaces.Discrete(3, start=5), np.int64(6)),
        (spaces.Box(-1, 1, (2,), np.float32), np.array([0.5, 1.0])),
        (spaces.Box(-1, 1, (2,), np.float32), [0, 1]),
        (spaces.Box(-1, 1, (), np.float32), 0.25),
        (spaces.MultiDiscrete([2, 3]), np.array([1, 2], np.int32)),
        (spaces.MultiBinary(2), np.array([True, False])),
        (spaces.Box(0, 255, (2, 2), np.uint8), np.full((2, 2), 255)),
    ],
)
def test_values_that_convert_safely_are_accepted(space, obs):
    env = serial(ShowsEnv(space, obs, obs))
    np.testing.assert_array_equal(env.reset()[0], np.asarray(obs))
    np.testing.assert_array_equal(env.step(NO_ACTION[:1]).obs[0], np.asarray(obs))


@pytest.mark.parametrize(
    ("space", "obs"),
    [
        (spaces.Discrete(3), 3),
        (spaces.Discrete(3), 1.5),
        (spaces.Discrete(3, start=5), 4),
        (spaces.MultiDiscrete([2, 3]), np.array([1, 3])),
        (spaces.MultiBinary(2), np.array([0, 2])),
        (spaces.Box(0, 255, (2, 2), np.uint8), np.full((2, 2), 256)),
        (spaces.Box(0, 255, (2, 2), np.uint8), np.full((2, 2), 0.5)),
        (spaces.Box(-1, 1, (2,), np.float32), None),
        (spaces.Box(-1, 1, (2,), np.float32), [[1], [2, 3]]),
        (spaces.Box(-1, 1, (2,), np.float32), np.zeros((1, 2), np.float32)),
    ],
)
def test_values_outside_the_space_are_refused(space, obs):
    with pytest.raises(BadObservationError):
        serial(ShowsEnv(space, obs)).reset()
