from __future__ import annotations

import pytest

from aiorl.env.base_env import ALL_AGENTS
from aiorl.env.multi_agent_env import MultiAgentBaseEnv, MultiAgentEnv
from aiorl.errors import (
    BadRewardError,
    ConfigError,
    EnvContractError,
    EnvError,
)
from aiorl.testing.multi_agent_envs import CountingMultiAgentEnv


def base(*envs, seed=None) -> MultiAgentBaseEnv:
    return MultiAgentBaseEnv(envs, env_id="pair", seed=seed)


def lists(by_agent) -> dict:
    return {agent: value.tolist() for agent, value in by_agent.items()}


def run(env: MultiAgentBaseEnv, steps: int):
    poll = env.poll()
    for _ in range(steps):
        env.send_actions({index: {agent: 0 for agent in obs} for index, obs in poll.obs.items()})
        poll = env.poll()
    return poll


@pytest.mark.parametrize("form", ["new", "old"])
def test_r163_r165_the_first_poll_opens_episodes_in_either_form(form):
    poll = base(CountingMultiAgentEnv(form=form), CountingMultiAgentEnv(form=form)).poll()
    assert list(poll.obs) == [0, 1]
    assert lists(poll.obs[0]) == {"a0": [0, 0, 0], "a1": [0, 0, 1]}
    assert poll.rewards[0] == {"a0": None, "a1": None}
    assert poll.dones[0] == {"a0": False, "a1": False, ALL_AGENTS: False}
    assert poll.infos[0] == {"a0": {}, "a1": {}}


@pytest.mark.parametrize("form", ["new", "old"])
def test_r126_agents_leave_when_they_are_done_and_the_last_one_ends_the_episode(form):
    env = CountingMultiAgentEnv((1, 3), form=form)
    subject = base(env)
    poll = run(subject, 1)
    assert poll.terminateds[0] == {"a0": True, "a1": False, ALL_AGENTS: False}
    assert poll.rewards[0] == {"a0": 1.0, "a1": 1.0}
    assert poll.infos[0] == {"a0": {"step": 1}, "a1": {"step": 1}}
    for _ in range(2):
        subject.send_actions({0: {"a1": 1}})
        poll = subject.poll()
        assert list(poll.obs[0]) == ["a1"]
    assert poll.terminateds[0] == {"a1": True, ALL_AGENTS: True}
    assert not any(poll.truncateds[0].values())
    assert env.last_actions == [{"a0": 0, "a1": 0}, {"a1": 1}, {"a1": 1}]
    assert lists(subject.try_reset(0)) == {"a0": [1, 0, 0], "a1": [1, 0, 1]}


class Broken(CountingMultiAgentEnv):
    """Environment that breaks a rule in its second step."""

    def __init__(self, spoil):
        super().__init__((1, 9))
        self.spoil = spoil

    def step(self, action_dict):
        result = super().step(action_dict)
        if len(self.last_actions) == 2:
            self.spoil(*result)
        return result


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (
            lambda obs, rewards, ends, cuts, infos: ends.pop(ALL_AGENTS),
            EnvContractError,
            "'__all__'",
        ),
        (
            lambda obs, rewards, ends, cuts, infos: obs.update(__all__=0),
            EnvContractError,
            "'__all__'",
        ),
        (
            lambda obs, rewards, ends, cuts, infos: rewards.update(__all__=0),
            EnvContractError,
            "'__all__'",
        ),
        (
            lambda obs, rewards, ends, cuts, infos: infos.update(nobody={}),
            EnvContractError,
            "'nobody'",
        ),
        (
            lambda obs, rewards, ends, cuts, infos: rewards.update(a1=float("nan")),
            BadRewardError,
            "nan",
        ),
        (lambda *results: 1 / 0, EnvError, "ZeroDivisionError"),
    ],
)
def test_r127_r128_a_broken_rule_is_named_with_copy_and_step(spoil, error, text):
    with pytest.raises(error, match=text) as caught:
        run(base(CountingMultiAgentEnv(), Broken(spoil)), 2)
    assert (caught.value.env_id, caught.value.vector_index, caught.value.step) == ("pair", 1, 2)
    assert isinstance(caught.value, ValueError) == (error is not EnvError)


def test_a_reward_of_none_counts_as_0():
    """SPEC 4.5."""

    class Unrewarded(CountingMultiAgentEnv):
        def step(self, action_dict):
            obs, _, terminateds, truncateds, infos = super().step(action_dict)
            return obs, {"a0": None, "a1": 2}, terminateds, truncateds, infos

    assert run(base(Unrewarded()), 1).rewards[0] == {"a0": 0.0, "a1": 2.0}


class CutEnv(MultiAgentEnv):
    """Agents a and b, with steps in the old form; infos say which of them a time limit cut."""

    def __init__(self, cut, over=True):
        self.cut, self.over = cut, over

    def reset(self):
        return {"a": 0, "b": 0}

    def step(self, action_dict):
        infos = {agent: {"TimeLimit.truncated": agent in self.cut} for agent in ("a", "b")}
        return {"a": 1, "b": 1}, {}, {"a": True, "b": True, ALL_AGENTS: self.over}, infos


@pytest.mark.parametrize(("cut", "all_truncated"), [("ab", True), ("a", False), ("", False)])
def test_r165_old_dones_are_truncations_if_the_infos_say_so(cut, all_truncated):
    poll = run(base(CutEnv(cut)), 1)
    assert poll.truncateds[0] == {"a": "a" in cut, "b": "b" in cut, ALL_AGENTS: all_truncated}
    assert poll.terminateds[0] == {
        "a": "a" not in cut,
        "b": "b" not in cut,
        ALL_AGENTS: not all_truncated,
    }
    assert poll.rewards[0] == {}


def test_r29_each_copy_is_seeded_once_and_an_unseedable_one_is_refused():
    envs = [CountingMultiAgentEnv((1, 1)), CountingMultiAgentEnv((1, 1))]
    subject = base(*envs, seed=3)
    run(subject, 1)
    subject.try_reset(0)
    assert [env.seeds for env in envs] == [[3, None], [1_000_003]]
    with pytest.raises(ConfigError, match="CutEnv"):
        base(CutEnv(""), seed=3)


@pytest.mark.parametrize("result", [None, ({}, {}, {}), ([], {}, {}, {}, {})])
def test_a_step_with_another_result_is_an_error_that_names_it(result):
    class Odd(CountingMultiAgentEnv):
        def step(self, action_dict):
            return result

    with pytest.raises(EnvContractError):
        run(base(Odd()), 1)


@pytest.mark.parametrize("form", ["new", "old"])
def test_a_copy_whose_episode_has_ended_takes_no_actions_until_it_is_reset(form):
    env = base(CountingMultiAgentEnv((2, 2), form=form), CountingMultiAgentEnv((3, 3), form=form))
    both = {"a0": 0, "a1": 0}
    env.poll()
    for _ in range(2):
        env.send_actions({0: both, 1: both})
        poll = env.poll()
    assert (poll.dones[0][ALL_AGENTS], poll.dones[1][ALL_AGENTS]) == (True, False)
    with pytest.raises(ValueError) as caught:
        env.send_actions({0: both})
    assert isinstance(caught.value, EnvContractError)
    assert (caught.value.vector_index, caught.value.step) == (0, 2)
    assert env.try_reset(0).keys() == both.keys()
    env.send_actions({0: both, 1: both})
    assert list(env.poll().obs) == [0, 1]
