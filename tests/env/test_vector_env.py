from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from aiorl.data.columns import DEFAULT_AGENT_ID as AGENT
from aiorl.env.base_env import ALL_AGENTS, SEED_STRIDE
from aiorl.env.vector_env import Copies, SerialEnv, VectorBaseEnv, VectorEnv
from aiorl.errors import EnvContractError, EnvError, UnsupportedEnvError
from aiorl.testing.envs import CountingEnv


def copies(*envs, seed=None) -> VectorBaseEnv:
    return VectorBaseEnv(Copies(envs, env_id="counting", seed=seed))


def act(*actions) -> dict:
    return {index: {AGENT: action} for index, action in enumerate(actions)}


def values(by_env) -> list:
    return [np.asarray(by_agent[AGENT]).tolist() for by_agent in by_env.values()]


def test_r162_all_copies_step_with_one_send_and_each_gets_its_own_action():
    envs = [CountingEnv(9, index=index) for index in range(3)]
    base = copies(*envs)
    base.poll()
    base.send_actions(act(0, 1, 0))
    poll = base.poll()
    assert values(poll.obs) == [[0, 1, 0], [0, 1, 1], [0, 1, 2]]
    assert values(poll.rewards) == [1.0, 1.0, 1.0]
    assert [env.last_actions for env in envs] == [[0], [1], [0]]
    assert list(base.get_unwrapped()) == envs


def test_observations_are_kept_although_the_environment_reuses_its_array():
    class Reusing(CountingEnv):
        def __init__(self):
            super().__init__(9)
            self.array = np.zeros(3, np.float32)

        def reset(self, **kwargs):
            self.array[:] = super().reset(**kwargs)[0]
            return self.array, {}

        def step(self, action):
            obs, *rest = super().step(action)
            self.array[:] = obs
            return self.array, *rest

    base = copies(Reusing())
    observed = [base.poll().obs[0][AGENT]]
    for _ in range(2):
        base.send_actions(act(0))
        observed.append(base.poll().obs[0][AGENT])
    assert [int(obs[1]) for obs in observed] == [0, 1, 2]


def test_polling_twice_or_leaving_out_an_action_is_an_error():
    base = copies(CountingEnv(), CountingEnv())
    base.poll()
    with pytest.raises(EnvContractError):
        base.poll()
    with pytest.raises(EnvContractError):
        base.send_actions({0: {AGENT: 0}})
    base.send_actions(act(0, 0))
    base.poll()
    with pytest.raises(EnvContractError):
        base.poll()


class Unready(CountingEnv):
    """Environment whose first resets fail."""

    def __init__(self, failures, **options):
        super().__init__(**options)
        self.failures = failures
        self.tried = []

    def reset(self, *, seed=None, options=None):
        self.tried.append(seed)
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no server yet")
        return super().reset(seed=seed, options=options)


def test_r29_after_a_failed_first_reset_the_next_poll_resets_again_with_the_same_seed():
    env = Unready(2)
    base = copies(CountingEnv(), env, seed=7)
    for _ in range(2):
        with pytest.raises(EnvError, match="no server yet"):
            base.poll()
    assert values(base.poll().obs) == [[2, 0, 0], [0, 0, 0]]
    base.try_reset(1)
    assert env.tried == [7 + SEED_STRIDE] * 3 + [None]


class OldGymnasiumEnv(CountingEnv):
    """Subclass of gymnasium.Env in the form of old Gym."""

    def __init__(self, with_none=False):
        super().__init__(3, "truncate")
        self.with_none = with_none

    def reset(self, **keywords):
        obs, _ = super().reset(**keywords)
        return (obs, None) if self.with_none else obs

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated or truncated, {"TimeLimit.truncated": truncated}


@pytest.mark.parametrize("with_none", [False, True])
def test_r165_both_samplers_accept_the_old_form_even_from_gymnasiums_own_class(with_none):
    general, columnar = (
        copies(OldGymnasiumEnv(with_none)),
        SerialEnv([OldGymnasiumEnv(with_none)], env_id="old"),
    )
    assert values(general.poll().obs) == columnar.reset([0]).tolist() == [[0, 0, 0]]
    for number in (1, 2, 3):
        general.send_actions(act(0))
        poll, step = general.poll(), columnar.step(np.zeros(1, np.int64))
        assert values(poll.rewards) == step.rewards.tolist() == [number]
        assert poll.truncateds[0][ALL_AGENTS] == step.truncateds[0] == (number == 3)
        assert poll.terminateds[0][ALL_AGENTS] == step.terminateds[0] == False  # noqa: E712
    assert values(poll.obs) == step.final_obs.tolist() == [[0, 3, 0]]


class UserVectorEnv(VectorEnv):
    """Two counters, in the old form or the new one."""

    num_envs = 2
    observation_space = spaces.Discrete(100)
    action_space = spaces.Discrete(2)

    def __init__(self, form="old", fault=""):
        self.form, self.fault = form, fault
        self.counts = [0, 0]
        self.closed = 0

    def vector_reset(self):
        self.counts = [0, 10]
        return list(self.counts) if self.form == "old" else (list(self.counts), [{}, {}])

    def reset_at(self, index):
        self.counts[index] = 10 * index
        return self.counts[index]

    def vector_step(self, actions):
        if self.fault == "raise":
            raise RuntimeError("no more")
        self.counts = [count + 1 for count in self.counts]
        obs, rewards = list(self.counts), [float(action) for action in actions]
        if self.fault == "short":
            return obs, rewards[:1], [False, False], [{}, {}]
        if self.fault == "three":
            return obs, rewards, [False, False]
        if self.fault == "nothing":
            return None
        if self.fault in ("one_info", "no_infos"):
            return obs, rewards, [False, False], {} if self.fault == "one_info" else None
        if self.form == "old":
            return obs, rewards, [True, True], [{}, {"TimeLimit.truncated": True}]
        return obs, rewards, [True, False], [False, True], [None, {}]

    def close(self):
        self.closed += 1


@pytest.mark.parametrize("form", ["old", "new"])
def test_r161_a_users_vector_env_is_driven_in_either_form(form):
    env = UserVectorEnv(form)
    base = VectorBaseEnv(env)
    assert values(base.poll().obs) == [0, 10]
    base.send_actions(act(0, 1))
    poll = base.poll()
    assert (values(poll.obs), values(poll.rewards)) == ([1, 11], [0.0, 1.0])
    assert [flags[ALL_AGENTS] for flags in poll.terminateds.values()] == [True, False]
    assert [flags[ALL_AGENTS] for flags in poll.truncateds.values()] == [False, True]
    assert base.try_reset(1) == {AGENT: 10}
    assert base.get_unwrapped() == []
    base.stop()
    base.stop()
    assert env.closed == 1


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("raise", EnvError, "RuntimeError: no more"),
        ("short", EnvContractError, r"\[0\.0\]"),
        ("three", EnvContractError, "3"),
        ("nothing", EnvContractError, "None"),
        ("one_info", EnvContractError, r"\{\}"),
        ("no_infos", EnvContractError, "None"),
    ],
)
def test_a_rule_that_a_users_vector_env_breaks_is_named(fault, error, text):
    base = VectorBaseEnv(UserVectorEnv(fault=fault))
    base.poll()
    with pytest.raises(error, match=text):
        base.send_actions(act(0, 0))


@pytest.mark.parametrize("number", [None, 0, -1, 1.5])
def test_a_users_vector_env_must_have_a_number_of_environments(number):
    class Unnumbered(UserVectorEnv):
        num_envs = number

    with pytest.raises(UnsupportedEnvError, match=f"num_envs.*Unnumbered.*{number}"):
        VectorBaseEnv(Unnumbered())


def test_copies_take_no_actions_until_those_that_have_ended_are_reset():
    env = copies(CountingEnv(1), CountingEnv(5))
    actions = act(0, 0)
    env.poll()
    env.send_actions(actions)
    assert env.poll().dones[0][ALL_AGENTS]
    with pytest.raises(EnvContractError) as caught:
        env.send_actions(actions)
    assert caught.value.vector_index == 0
    env.try_reset(0)
    env.send_actions(actions)
