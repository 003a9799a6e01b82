"""A custom environment: any class with Gymnasium's interface, named by its import path.

    aiorl train --env examples.custom_env:Corridor --env-config "{length: 8}" --stop-return 0.25

The best return is 1 - 0.1 * (length - 1). For 8 fields that is 0.3, so the run ends once every walk
is straight. Learner and workers import `examples.custom_env` from the working directory. Your own
module can also be installed, or its folder can be on PYTHONPATH. To check an environment step by
step before training:

    python -m examples.custom_env
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env


class Corridor(gymnasium.Env):
    """Corridor with a reward of 1 at its right end and -0.1 for each step on the way."""

    def __init__(self, length: int = 10, longest_walk: int = 100) -> None:
        """Take the keyword arguments from `--env-config`."""
        self.observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.length = length
        self.longest_walk = longest_walk

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict]:
        """Return to the left end."""
        super().reset(seed=seed)
        self.position = 0
        self.steps = 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Move left (0) or right (1)."""
        self.position = max(0, self.position + (1 if action == 1 else -1))
        self.steps += 1
        at_end = self.position == self.length
        # terminated: the goal is reached. truncated: time is up, but the walk could have continued.
        return (
            self._observation(),
            1.0 if at_end else -0.1,
            at_end,
            self.steps >= self.longest_walk,
            {},
        )

    def _observation(self) -> np.ndarray:
        return np.array([self.position / self.length], np.float32)


def main() -> None:
    corridor = Corridor(length=3)
    check_env(corridor)  # Gymnasium's own test of the interface
    corridor.reset(seed=1)
    rewards = []
    over = False
    while not over:
        _, reward, terminated, truncated, _ = corridor.step(1)
        rewards.append(reward)
        over = terminated or truncated
    print(
        f"The interface is valid. Always moving right takes {len(rewards)} steps and returns"
        f" {sum(rewards):.1f}."
    )


if __name__ == "__main__":
    main()
