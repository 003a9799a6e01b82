from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from aiorl.data.obs_layout import is_masked
from aiorl.env.base_env import ALL_AGENTS
from aiorl.env.env_maker import to_base_env
from aiorl.env.pettingzoo import AECEnv, ParallelEnv, pettingzoo_creator
from aiorl.env.registry import EnvContext, resolve_env
from aiorl.errors import ConfigError, UnknownEnvError

GENERATED = "pettingzoo:test.example_envs.generated_agents_parallel_v0"


@pytest.fixture(autouse=True)
def needs_pettingzoo():
    pytest.importorskip("pettingzoo")


class FakeParallel:
    """Two agents; "short" is terminated after one step, "long" is cut after two."""

    possible_agents = ("short", "long")

    def __init__(self):
        self.agents = []
        self.steps = 0
        self.closed = False

    def observation_space(self, agent):
        return "same"

    def action_space(self, agent):
        return f"space of {agent}"

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        self.steps = 0
        return dict.fromkeys(self.agents, 0), {}

    def step(self, actions):
        self.steps += 1
        agents = list(self.agents)
        self.agents = [agent for agent in agents if agent == "long" and self.steps < 2]
        terminateds = {agent: agent == "short" for agent in agents}
        truncateds = {agent: self.steps == 2 for agent in agents}
        return (
            dict.fromkeys(agents, self.steps),
            dict.fromkeys(agents, 1.0),
            terminateds,
            truncateds,
            {"gone": {}},
        )

    def close(self):
        self.closed = True


def test_parallel_environments_end_when_no_agent_is_left():
    env = ParallelEnv(FakeParallel())
    assert env.observation_space == "same"
    assert env.action_space is None
    assert env.action_spaces == {"short": "space of short", "long": "space of long"}
    assert env.reset(seed=1)[0] == {"short": 0, "long": 0}
    obs, rewards, terminateds, truncateds, infos = env.step({"short": 0, "long": 0})
    assert obs == {"short": 1, "long": 1}
    assert terminateds == {"short": True, "long": False, ALL_AGENTS: False}
    assert truncateds == {"short": False, "long": False, ALL_AGENTS: False}
    assert infos == {"short": {}, "long": {}}
    obs, rewards, terminateds, truncateds, infos = env.step({"long": 0})
    assert (obs, rewards) == ({"long": 2}, {"long": 1.0})
    assert terminateds == {"long": False, ALL_AGENTS: False}
    assert truncateds == {"long": True, ALL_AGENTS: True}
    env.close()
    assert env.env.closed


class FakeTurns:
    """Players x and o alternate; each move earns the mover 1 and costs the other 1; the game lasts
    three moves.
    """

    possible_agents = ("x", "o")

    def observation_space(self, agent):
        return "same"

    action_space = observation_space

    def reset(self, seed=None, options=None):
        self.agents = ["x", "o"]
        self.agent_selection = "x"
        self.moves = []
        self.owed = {"x": 0.0, "o": 0.0}

    def last(self):
        agent = self.agent_selection
        return len(self.moves), self.owed[agent], len(self.moves) >= 3, False, {"turn": agent}

    def step(self, action):
        agent = self.agent_selection
        other = "o" if agent == "x" else "x"
        if action is None:
            self.agents.remove(agent)
        else:
            self.moves.append((agent, action))
            self.owed[agent] = 1.0
            self.owed[other] -= 1.0
        self.agent_selection = other

    def close(self):
        pass


def test_turn_based_environments_show_the_agent_whose_turn_it_is_and_all_agents_at_the_end():
    env = AECEnv(FakeTurns())
    assert env.reset() == ({"x": 0}, {"x": {"turn": "x"}})
    obs, rewards, terminateds, _, _ = env.step({"x": 5})
    assert (obs, rewards, terminateds) == ({"o": 1}, {"o": -1.0}, {"o": False, ALL_AGENTS: False})
    obs, rewards, _, _, _ = env.step({"o": 6})
    assert (obs, rewards) == ({"x": 2}, {"x": 0.0})
    obs, rewards, terminateds, truncateds, infos = env.step({"x": 7})
    assert (obs, rewards) == ({"o": 3, "x": 3}, {"o": 0.0, "x": 1.0})
    assert terminateds == {"o": True, "x": True, ALL_AGENTS: True}
    assert truncateds == {"o": False, "x": False, ALL_AGENTS: False}
    assert infos == {"o": {"turn": "o"}, "x": {"turn": "x"}}
    assert env.env.moves == [("x", 5), ("o", 6), ("x", 7)]


class MaskedTurns(FakeTurns):
    """Environment whose infos have the mask of the agent whose turn it is; an agent that leaves has
    none.
    """

    def __init__(self):
        self.resets = 0

    def observation_space(self, agent):
        return spaces.Discrete(9)

    def action_space(self, agent):
        return spaces.Discrete(3)

    @property
    def infos(self):
        return {"x": self.last()[4], "o": {}}

    def reset(self, seed=None, options=None):
        self.resets += 1
        super().reset()

    def last(self):
        obs, reward, over, cut, info = super().last()
        return (
            obs,
            reward,
            over,
            cut,
            info if over else info | {"action_mask": np.array([0, 1, len(self.moves) % 2])},
        )


def test_a_mask_in_the_infos_of_a_turn_based_environment_moves_into_its_observations():
    env = AECEnv(MaskedTurns())
    assert env.env.resets == 1
    assert is_masked(env.observation_space)
    obs, _ = env.reset()
    assert obs["x"]["observation"] == 0
    assert obs["x"]["action_mask"].tolist() == [0, 1, 0]
    assert env.observation_space.contains(obs["x"])
    obs, *_ = env.step({"x": 1})
    assert obs["o"]["action_mask"].tolist() == [0, 1, 1]
    env.step({"o": 1})
    obs, *_ = env.step({"x": 1})
    assert {agent: obs_of_agent["action_mask"].tolist() for agent, obs_of_agent in obs.items()} == {
        "o": [1] * 3,
        "x": [1] * 3,
    }


def play(base, act, steps=400) -> dict:
    """Play on; return agent steps, ended episodes and agents seen."""
    rewards, episodes, agents = 0, 0, set()
    poll = base.poll()
    for _ in range(steps):
        flags = poll.dones[0]
        agents |= set(poll.obs[0])
        rewards += sum(reward is not None for reward in poll.rewards[0].values())
        obs = poll.obs[0]
        if flags[ALL_AGENTS]:
            episodes += 1
            obs, flags = base.try_reset(0), {}
        base.send_actions(
            {0: {agent: act(agent, value) for agent, value in obs.items() if not flags.get(agent)}}
        )
        poll = base.poll()
    return {"rewards": rewards, "episodes": episodes, "agents": agents}


def test_r126_r161_agents_that_come_and_go_in_a_real_parallel_environment():
    env = resolve_env(GENERATED)(EnvContext())
    assert isinstance(env, ParallelEnv)
    played = play(to_base_env(env, seed=1), lambda agent, obs: env.env.action_space(agent).sample())
    assert env.observation_spaces is None
    assert len(played["agents"]) > 10
    assert played["rewards"] > 1000


def test_modules_that_are_missing_or_have_no_environment_are_named(tmp_path, monkeypatch):
    (tmp_path / "empty_module.py").write_text("")
    (tmp_path / "failing_module.py").write_text("import not_installed_anywhere")
    (tmp_path / "raising_module.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnknownEnvError, match=r"nothing\.like_this"):
        pettingzoo_creator("pettingzoo:nothing.like_this")
    with pytest.raises(UnknownEnvError, match="parallel_env"):
        pettingzoo_creator("pettingzoo:empty_module")
    with pytest.raises(ConfigError, match="not_installed_anywhere"):
        pettingzoo_creator("pettingzoo:failing_module")
    with pytest.raises(ConfigError) as caught:
        pettingzoo_creator("pettingzoo:raising_module")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
