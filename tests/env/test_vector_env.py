from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from aiorl.data.columns import DEFAULT_AGENT_ID as AGENT
from aiorl.env.base_env import ALL_AGENTS
from aiorl.env.vector_env import VectorBaseEnv, VectorEnv
from aiorl.errors import (
    EnvContractError,
    EnvError,
    UnsupportedEnvError,
)


def act(*actions) -> dict:
    return {index: {AGENT: action} for index, action in enumerate(actions)}


def values(by_env) -> list:
    return [np.asarray(by_agent[AGENT]).tolist() for by_agent in by_env.values()]


class UserVectorEnv(VectorEnv):
    """Two counters, in the old form or the new."""

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
def test_r161_a_users_vector_env_is_driven_as_it_is_in_either_form(form):
    env = UserVectorEnv(form)
    base = VectorBaseEnv(env)
    assert values(base.poll().obs) == [0, 10]
    base.send_actions(act(0, 1))
    poll = base.poll()
    assert (values(poll.obs), values(poll.rewards)) == ([1, 11], [0.0, 1.0])
    assert [flags[ALL_AGENTS] for flags in poll.terminateds.values()] == [True, False]
    assert [flags[ALL_AGENTS] for flags in poll.truncateds.values()] == [False, True]
    assert poll.infos[0] == {AGENT: {}}
    assert base.try_reset(1) == {AGENT: 10}
    assert base.get_unwrapped() == []
    base.stop()
    base.stop()
    assert env.closed == 1


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("raise", EnvError, "vector_step raised RuntimeError: no more"),
        ("short", EnvContractError, "1 rewards, expected 2"),
        ("three", EnvContractError, "3 values"),
        ("nothing", EnvContractError, "returned None, expected 5"),
        ("one_info", EnvContractError, r"\{\} as infos, expected a sequence of 2"),
        ("no_infos", EnvContractError, "None as infos, expected a sequence of 2"),
    ],
)
def test_a_users_vector_env_that_breaks_a_rule_is_told_so(fault, error, text):
    base = VectorBaseEnv(UserVectorEnv(fault=fault))
    base.poll()
    with pytest.raises(error, match=text):
        base.send_actions(act(0, 0))


@pytest.mark.parametrize("number", [None, 0, -1, 1.5])
def test_a_users_vector_env_has_to_say_how_many_environments_it_has(number):
    class Unnumbered(UserVectorEnv):
        num_envs = number

    with pytest.raises(UnsupportedEnvError, match=f"num_envs of Unnumbered is {number}"):
        VectorBaseEnv(Unnumbered())
