from __future__ import annotations

import functools

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from aiorl.env.native_vector_env import NativeVectorEnv
from aiorl.env.vector_env import SerialEnv
from aiorl.errors import BadObservationError, BadRewardError, EnvError, UnsupportedEnvError
from aiorl.testing.envs import CountingEnv, CountingVectorEnv, FaultyEnv

MODES = [mode.value for mode in AutoresetMode]


def native(mode, lengths=(2, 3), end="terminate") -> NativeVectorEnv:
    return NativeVectorEnv(CountingVectorEnv(2, lengths, end, mode), env_id="counting")


NO_ACTION = np.zeros(2, np.int64)


@pytest.mark.parametrize("mode", ["SameStep", "Disabled"])
def test_copies_reset_inside_a_step_list_their_final_observations(mode):
    env = native(mode)
    env.reset()
    assert env.step(NO_ACTION).final_index is None
    step = env.step(NO_ACTION)
    assert step.obs.tolist() == [[1, 0, 0], [0, 2, 1]]
    assert (step.final_index.tolist(), step.final_obs.tolist(), step.valid) == ([0], [[0, 2, 0]], None)
    step = env.step(NO_ACTION)
    assert (step.final_index.tolist(), step.final_obs.tolist()) == ([1], [[0, 3, 1]])
    assert step.obs.tolist() == [[1, 1, 0], [1, 0, 1]]


def test_copies_reset_by_the_next_step_show_their_final_observation_and_a_row_that_is_none():
    env = native("NextStep", end="truncate")
    env.reset()
    env.step(NO_ACTION)
    step = env.step(NO_ACTION)
    assert step.obs.tolist() == [[0, 2, 0], [0, 2, 1]]
    assert (step.truncateds.tolist(), step.valid, step.final_index) == ([True, False], None, None)
    step = env.step(NO_ACTION)
    assert step.obs.tolist() == [[1, 0, 0], [0, 3, 1]]
    assert (step.rewards.tolist(), step.valid.tolist()) == ([0.0, 3.0], [False, True])
    assert step.truncateds.tolist() == [False, True]


def test_a_reward_or_flag_in_a_row_that_only_resets_is_dropped():
    class Careless(CountingVectorEnv):
        def step(self, actions):
            obs, _, terminateds, truncateds, infos = super().step(actions)
            return obs, np.full(2, 9.0), terminateds | self._steps.__eq__(0), truncateds, infos

    env = NativeVectorEnv(Careless(), env_id="careless")
    env.reset()
    for _ in range(3):
        env.step(NO_ACTION)
    step = env.step(NO_ACTION)
    assert step.valid.tolist() == [False, True]
    assert step.rewards.tolist() == [0.0, 9.0]
    assert step.terminateds.tolist() == [False, False]


@pytest.mark.parametrize("mode", MODES)
def test_gymnasiums_own_sync_vector_env_gives_the_transitions_of_plain_copies(mode):
    lengths = (2, 5, 3)
    copies = [functools.partial(CountingEnv, length, index=i) for i, length in enumerate(lengths)]
    env = NativeVectorEnv(SyncVectorEnv(copies, autoreset_mode=AutoresetMode(mode)), env_id="sync")
    plain = SerialEnv([make() for make in copies], env_id="plain")

    def transitions(lockstep):
        rows = {0: [], 1: [], 2: []}
        obs = lockstep.reset([1, 2, 3]).copy()
        for _ in range(20):
            step = lockstep.step(np.zeros(3, np.int64))
            new_obs = step.obs.copy()
            if step.final_index is not None:
                new_obs[step.final_index] = step.final_obs
            for n in range(3):
                if step.valid is None or step.valid[n]:
                    row = [obs[n], new_obs[n], step.rewards[n], step.terminateds[n], step.truncateds[n]]
                    rows[n].append([np.asarray(part).tolist() for part in row])
            obs = step.obs.copy()
        return rows

    expected, got = transitions(plain), transitions(env)
    for n in range(3):
        assert len(got[n]) >= 13
        assert got[n] == expected[n][: len(got[n])]
    env.close()


def test_seed_makes_the_vector_reproducible():
    def run(seed):
        inner = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="vector_entry_point")
        env = NativeVectorEnv(inner, env_id="CartPole-v1")
        env.reset([seed, 0, 0])
        return np.concatenate([env.step(np.array([0, 1, t % 2], np.int32)).obs for t in range(40)])

    np.testing.assert_array_equal(run(5), run(5))
    assert not np.array_equal(run(5), run(6))


def test_an_unknown_autoreset_mode_is_refused():
    inner = CountingVectorEnv()
    inner.metadata = {}
    with pytest.raises(UnsupportedEnvError, match="autoreset_mode"):
        NativeVectorEnv(inner, env_id="old")


def test_a_same_step_environment_without_final_observations_is_refused():
    class Forgetful(CountingVectorEnv):
        def step(self, actions):
            return (*super().step(actions)[:4], {})

    env = NativeVectorEnv(Forgetful(mode="SameStep"), env_id="forgetful")
    env.reset()
    env.step(NO_ACTION)
    env.step(NO_ACTION)
    with pytest.raises(EnvError, match="final_obs") as caught:
        env.step(NO_ACTION)
    assert (caught.value.vector_index, caught.value.step) == (0, 3)


@pytest.mark.parametrize(
    ("fault", "error"), [("nan_obs", BadObservationError), ("nan_reward", BadRewardError), ("step", EnvError)]
)
def test_faults_name_the_copy_and_its_step(fault, error):
    inner = SyncVectorEnv([lambda: CountingEnv(2), lambda: FaultyEnv(fault, 3)], autoreset_mode=AutoresetMode.SAME_STEP)
    env = NativeVectorEnv(inner, env_id="faulty")
    env.reset()
    env.step(NO_ACTION)
    env.step(NO_ACTION)
    with pytest.raises(error) as caught:
        env.step(NO_ACTION)
    assert caught.value.step == 3
    if fault != "step":
        assert caught.value.vector_index == 1


@pytest.mark.parametrize("mode", MODES)
def test_the_step_an_error_names_is_counted_anew_in_each_episode(mode):
    class FailsLater(CountingVectorEnv):
        def step(self, actions):
            obs, *rest = super().step(actions)
            return np.where(self._episodes[:, None] * self._steps[:, None] == 2, np.nan, obs), *rest

    env = NativeVectorEnv(FailsLater(1, (3,), mode=mode), env_id="later")
    env.reset()
    for _ in range(5 if mode == "NextStep" else 4):
        env.step(NO_ACTION[:1])
    with pytest.raises(BadObservationError, match="at step 2 of its episode"):
        env.step(NO_ACTION[:1])


def test_a_final_observation_that_is_not_finite_is_refused():
    class BadEnd(CountingEnv):
        def step(self, action):
            obs, reward, terminated, truncated, info = super().step(action)
            return (obs * np.nan if terminated else obs), reward, terminated, truncated, info

    copies = [lambda: CountingEnv(9), lambda: BadEnd(2)]
    for env in (
        NativeVectorEnv(SyncVectorEnv(copies, autoreset_mode=AutoresetMode.SAME_STEP), env_id="bad"),
        SerialEnv([make() for make in copies], env_id="bad"),
    ):
        env.reset()
        env.step(NO_ACTION)
        with pytest.raises(BadObservationError) as caught:
            env.step(NO_ACTION)
        assert (caught.value.vector_index, caught.value.step) == (1, 2)


@pytest.mark.parametrize("part", [0, 1, 2, 3])
def test_arrays_of_the_wrong_shape_are_refused(part):
    class Short(CountingVectorEnv):
        def step(self, actions):
            parts = list(super().step(actions))
            parts[part] = parts[part][:1]
            return tuple(parts)

    env = NativeVectorEnv(Short(), env_id="short")
    env.reset()
    with pytest.raises(EnvError, match="shape"):
        env.step(NO_ACTION)
