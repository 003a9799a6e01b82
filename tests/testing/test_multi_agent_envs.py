from __future__ import annotations

import pytest

from aiorl.env.base_env import ALL_AGENTS
from aiorl.testing.multi_agent_envs import CountingMultiAgentEnv


def test_agents_count_earn_the_number_of_the_step_and_leave_one_by_one():
    env = CountingMultiAgentEnv((1, 2))
    obs, infos = env.reset(seed=3)
    assert ({agent: value.tolist() for agent, value in obs.items()}, infos) == ({"a0": [0, 0, 0], "a1": [0, 0, 1]}, {})
    obs, rewards, terminateds, truncateds, infos = env.step({"a0": 0, "a1": 1})
    assert rewards == {"a0": 1.0, "a1": 1.0}
    assert terminateds == {"a0": True, "a1": False, ALL_AGENTS: False}
    assert truncateds == dict.fromkeys(terminateds, False)
    assert infos == {"a0": {"step": 1}, "a1": {"step": 1}}
    obs, rewards, terminateds, *_ = env.step({"a1": 1})
    assert (list(obs), rewards, terminateds) == (["a1"], {"a1": 2.0}, {"a1": True, ALL_AGENTS: True})
    assert (env.seeds, env.last_actions) == ([3], [{"a0": 0, "a1": 1}, {"a1": 1}])
    assert env.reset()[0]["a0"].tolist() == [1, 0, 0]


def test_the_old_form_has_one_value_resets_and_four_value_steps():
    env = CountingMultiAgentEnv((1,), form="old")
    assert list(env.reset()) == ["a0"]
    assert len(env.step({"a0": 0})) == 4


@pytest.mark.parametrize(("fault", "where"), [("no_all", 2), ("stray_info", 4), ("comes_back", 0)])
def test_a_fault_shows_at_its_step_only(fault, where):
    env = CountingMultiAgentEnv((1, 4), fault, at_step=2)
    sound = CountingMultiAgentEnv((1, 4))
    for subject in (env, sound):
        subject.reset()
    for step in (1, 2, 3):
        got, expected = env.step({})[where], sound.step({})[where]
        assert (set(got) == set(expected)) == (step != 2)
