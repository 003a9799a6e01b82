"""A small multi-agent environment with known trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gymnasium import spaces

from aiorl.env.base_env import ALL_AGENTS
from aiorl.env.multi_agent_env import AgentDict, MultiAgentEnv
from aiorl.testing.envs import counting_obs, counting_space

__all__ = ["CountingMultiAgentEnv"]


class CountingMultiAgentEnv(MultiAgentEnv):
    """Environment of agents "a0", "a1", ... that see [episode, step, agent number]; rewards are the
    step numbers.

    Agent i terminates after ``lengths[i]`` steps, and the episode ends with the last agent. The
    first episode has the number 0.

    Attributes:
        last_actions: action dicts received, oldest first.
        seeds: seeds passed to ``reset``; None for calls without one.
    """

    def __init__(self, lengths: Sequence[int] = (3, 5), form: str = "new") -> None:
        """Make one copy.

        Args:
            lengths: number of steps of each agent.
            form: ``"new"`` for two values from ``reset`` and five from ``step``, ``"old"`` for one
                and four.
        """
        self.observation_space = counting_space()
        self.action_space = spaces.Discrete(2)
        self.last_actions: list[AgentDict] = []
        self.seeds: list[int | None] = []
        self._lengths = {f"a{number}": length for number, length in enumerate(lengths)}
        self._form = form
        self._episode = -1
        self._step = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin the next episode; see `MultiAgentEnv.reset`.

        The seed is recorded and has no other effect.
        """
        self.seeds.append(seed)
        self._episode += 1
        self._step = 0
        obs = self._obs(list(self._lengths))
        if self._form == "old":
            return obs
        return obs, {}

    def step(self, action_dict: AgentDict) -> tuple[AgentDict, ...]:
        """Record the actions and count the step; see `MultiAgentEnv.step`."""
        self.last_actions.append(action_dict)
        self._step += 1
        agents = [agent for agent, length in self._lengths.items() if length >= self._step]
        obs = self._obs(agents)
        rewards: AgentDict = dict.fromkeys(agents, float(self._step))
        terminateds: AgentDict = {agent: self._step == self._lengths[agent] for agent in agents}
        terminateds[ALL_AGENTS] = self._step >= max(self._lengths.values())
        infos: AgentDict = {agent: {"step": self._step} for agent in agents}
        if self._form == "old":
            return obs, rewards, terminateds, infos
        return obs, rewards, terminateds, dict.fromkeys(terminateds, False), infos

    def _obs(self, agents: list[str]) -> AgentDict:
        return {
            agent: counting_obs(self._episode, self._step, index=int(agent.removeprefix("a")))
            for agent in agents
        }
