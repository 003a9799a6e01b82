r"""Several agents in one environment, and two policies that learn side by side.

    aiorl train --env examples.multi_agent_cartpole:CartPoles --env-config "{agents: 4}" \
        --multiagent.policies "{even: null, odd: null}" \
        --multiagent.policy-mapping-fn examples.multi_agent_cartpole:policy_for \
        --run-dir runs/cartpoles --stop-return 800

Four agents balance a pole each; agents 0 and 2 act with the policy `even`, 1 and 3 with `odd`. An
episode's return is the sum over its agents: 800 means 200 steps for each of the four. To see each
policy's final return per agent:

    grep -o '"policy_reward_mean":{[^}]*}' runs/cartpoles/result.jsonl | tail -n 1
"""

from __future__ import annotations

from typing import Any

import gymnasium

from aiorl import MultiAgentEnv


class CartPoles(MultiAgentEnv):
    """One CartPole per agent.

    An agent is done when its pole has fallen; the episode ends with the last one.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        """Take `--env-config`: a first parameter called `config` gets the whole mapping."""
        self.envs = {
            f"agent_{index}": gymnasium.make("CartPole-v1")
            for index in range(config.get("agents", 4))
        }
        first = self.envs["agent_0"]
        self.observation_space = first.observation_space  # for each agent
        self.action_space = first.action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Return the first observations and infos by agent."""
        self.balancing = set(self.envs)
        seeds = {
            agent: None if seed is None else seed + index for index, agent in enumerate(self.envs)
        }
        first = {agent: env.reset(seed=seeds[agent]) for agent, env in self.envs.items()}
        return {agent: obs for agent, (obs, _) in first.items()}, {
            agent: info for agent, (_, info) in first.items()
        }

    def step(self, action_dict: dict[str, Any]) -> Any:
        """Return results by agent for those that act; the flags also say if the episode is over for
        all.
        """
        obs, rewards, terminateds, truncateds, infos = {}, {}, {}, {}, {}
        for agent, action in action_dict.items():
            results = self.envs[agent].step(action)
            obs[agent], rewards[agent], terminateds[agent], truncateds[agent], infos[agent] = (
                results
            )
            if terminateds[agent] or truncateds[agent]:
                self.balancing.remove(agent)
        terminateds["__all__"] = not self.balancing
        truncateds["__all__"] = False
        return obs, rewards, terminateds, truncateds, infos


def policy_for(agent_id: str) -> str:
    """Return the policy of an agent; called once per agent and episode."""
    return "even" if int(agent_id.removeprefix("agent_")) % 2 == 0 else "odd"
