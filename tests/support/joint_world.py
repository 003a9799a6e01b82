"""Two agents that act at the same time, by import path "joint_world:Signals"."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from aiorl import MultiAgentEnv


class Signals(MultiAgentEnv):
    """Each agent sees a bit, in a vector of its own width, and should repeat it as its action.

    Both get the number of agents that do. The agent "left" leaves after `left_stays` steps.
    """

    observation_spaces: ClassVar[dict[str, Any]] = {
        "left": spaces.Box(0.0, 1.0, (2,)),
        "right": spaces.Box(0.0, 1.0, (3,)),
    }
    action_spaces: ClassVar[dict[str, Any]] = {
        "left": spaces.Discrete(2),
        "right": spaces.Discrete(2),
    }

    def __init__(self, config: dict[str, Any]) -> None:
        self.length = config.get("length", 8)
        self.left_stays = config.get("left_stays", self.length)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None or not hasattr(self, "rng"):
            self.rng = np.random.default_rng(seed)
        self.steps = 0
        return self.observe(["left", "right"]), {}

    def observe(self, agents: list[str]) -> dict[str, Any]:
        self.bits = {name: int(self.rng.integers(2)) for name in agents}
        obs = {name: np.zeros(self.observation_spaces[name].shape, np.float32) for name in agents}
        for name, bit in self.bits.items():
            obs[name][bit] = 1.0
        return obs

    def step(self, action_dict: dict[str, Any]) -> Any:
        agents = list(action_dict)
        reward = float(sum(action_dict[name] == self.bits[name] for name in agents))
        self.steps += 1
        obs = self.observe(agents)
        is_over = self.steps == self.length
        terminateds = dict.fromkeys([*agents, "__all__"], is_over)
        if self.steps == self.left_stays:
            terminateds["left"] = True
        truncateds = {"__all__": False}
        return obs, dict.fromkeys(agents, reward), terminateds, truncateds, {}
