"""Agents that come and go in an episode that never ends: what remains of them, and what user code
can still read.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium import spaces

import aiorl
from aiorl.env.base_env import MAX_GONE_AGENTS
from aiorl.errors import EnvContractError
from tests.support.plain_policies import PlainPolicy

SPACE = spaces.Box(0, 1e6, (4,), np.float32)
ACTIONS = spaces.Discrete(2)
PRESENT, STAY = 4, 3


class Name:
    """Agent id of which one can know whether something still holds it."""

    def __init__(self, number):
        self.number = number

    def __repr__(self):
        return f"car {self.number}"


class Road(aiorl.MultiAgentEnv):
    """Four cars; each is done after three steps, and a new one takes its place.

    The reward is the car's number.
    """

    observation_space, action_space = SPACE, ACTIONS

    def __init__(self, comes_back_at=0, ends_at=0):
        self.comes_back_at, self.ends_at = comes_back_at, ends_at
        self.names, self.observations = [], []
        self.steps = self.num_cars = 0

    def _obs(self):
        obs = np.full(4, self.steps, np.float32)
        self.observations.append(weakref.ref(obs))
        return obs

    def _new(self):
        name = Name(self.num_cars)
        self.num_cars += 1
        self.names.append(weakref.ref(name))
        return name

    def reset(self, *, seed=None, options=None):
        self.ages = {self._new(): -number for number in range(PRESENT)}
        self.first = next(iter(self.ages))
        return {name: self._obs() for name in self.ages}

    def step(self, action_dict):
        self.steps += 1
        obs, rewards, dones = {}, {}, {}
        for name in list(action_dict):
            self.ages[name] += 1
            obs[name], rewards[name], dones[name] = (
                self._obs(),
                float(name.number),
                self.ages[name] >= STAY,
            )
            if dones[name]:
                del self.ages[name]
        while len(self.ages) < PRESENT:
            name = self._new()
            self.ages[name] = 0
            obs[name] = self._obs()
        if self.steps == self.comes_back_at:
            obs[self.first] = self._obs()
        dones["__all__"] = self.steps == self.ends_at
        return obs, rewards, dones, {"__all__": False}, {name: {"step": self.steps} for name in obs}


class Clients(aiorl.ExternalMultiAgentEnv):
    """The same cars, from a client."""

    def __init__(self, road):
        super().__init__(ACTIONS, SPACE)
        self.road = road

    def run(self):
        episode = self.start_episode()
        obs = self.road.reset()
        while True:
            actions = self.get_action(episode, obs)
            obs, rewards, dones, _, infos = self.road.step(actions)
            del dones["__all__"]
            self.log_returns(episode, rewards, infos, dones)


class Readers(aiorl.DefaultCallbacks):
    """Reads all agents at the end of an episode."""

    def on_episode_end(self, *, episode, **kwargs):
        for agent in episode.get_agents():
            info = episode.last_info_for(agent)
            episode.user_data[agent] = info and info["step"]
        Readers.ended = episode


def made(road, **settings):
    return aiorl.RolloutWorker(
        env_creator=lambda context: road,
        policy={"p": (PlainPolicy, SPACE, ACTIONS, {})},
        policy_mapping_fn=lambda agent: "p",
        rollout_fragment_length=10,
        **settings,
    )


def alive(references):
    gc.collect()
    return sum(reference() is not None for reference in references)


@pytest.mark.rest_slow
@pytest.mark.parametrize("is_external", [False, True])
@pytest.mark.parametrize("callbacks", [aiorl.DefaultCallbacks, Readers])
def test_little_remains_of_agents_that_have_left(is_external, callbacks):
    road = Road()
    worker = made(Clients(road) if is_external else road, callbacks=callbacks)
    while road.num_cars < 100:
        worker.sample()
    worker.policy_map["p"].obs.clear()
    early = alive(road.observations)
    while road.num_cars < MAX_GONE_AGENTS + 200:
        worker.sample()
        worker.policy_map["p"].notes.clear()
        worker.policy_map["p"].obs.clear()
    try:
        assert alive(road.observations) <= early + 2 * PRESENT
        assert alive(road.names) <= MAX_GONE_AGENTS + 60, "ids of the latest agents only"
    finally:
        worker.stop()


def test_an_agent_that_was_done_long_ago_may_not_come_back():
    worker = made(Road(comes_back_at=150))
    for _ in range(14):
        worker.sample()
    with pytest.raises(EnvContractError, match="car 0"):
        worker.sample()
    worker.stop()


def test_an_episode_that_ends_reports_the_rewards_of_all_its_agents():
    road = Road(ends_at=60)
    worker = made(road, callbacks=Readers)
    metrics = []
    while not metrics:
        worker.sample()
        metrics = worker.get_metrics()
    rewards = {agent.number: reward for (agent, _), reward in metrics[0].agent_rewards.items()}
    assert list(rewards) == sorted(rewards), "in order of appearance"
    assert rewards[10] == STAY * 10
    assert sum(rewards.values()) == metrics[0].episode_reward
    worker.stop()


def test_callbacks_can_read_the_agents_that_left_last():
    road = Road(ends_at=60)
    worker = made(road, callbacks=Readers)
    Readers.ended = None
    while Readers.ended is None:
        worker.sample()
    steps = list(Readers.ended.user_data.values())
    assert len(steps) == len(Readers.ended.get_agents()) > 60
    assert None not in steps[-20:]
    assert steps[0] is None, "it left long ago"
    worker.stop()


class Crowd(aiorl.MultiAgentEnv):
    """Twenty agents that are all done in the fifth step."""

    observation_space, action_space = SPACE, ACTIONS

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return {number: np.zeros(4, np.float32) for number in range(20)}

    def step(self, action_dict):
        self.steps += 1
        is_over = self.steps == 5
        obs = {number: np.zeros(4, np.float32) for number in action_dict}
        dones = {**dict.fromkeys(action_dict, is_over), "__all__": is_over}
        return (
            obs,
            dict.fromkeys(action_dict, 1.0),
            dones,
            {number: {"score": number} for number in action_dict},
        )


class Scores(aiorl.DefaultCallbacks):
    at_the_end: ClassVar[list[Any]] = []

    def on_episode_end(self, *, episode, **others):
        Scores.at_the_end.append([episode.last_info_for(number) for number in range(20)])


def test_the_end_of_an_episode_sees_all_agents_that_are_done_in_its_last_step():
    worker = made(Crowd(), callbacks=Scores)
    worker.sample()
    worker.stop()
    assert Scores.at_the_end[0] == [{"score": number} for number in range(20)]
