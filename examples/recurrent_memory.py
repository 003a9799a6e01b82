"""A recurrent policy in an environment that cannot be solved without memory.

    aiorl train --env examples.recurrent_memory:Remember --model.use-lstm true --stop-return 0.95

A symbol is shown once and must be named some steps later. A policy without memory can only guess,
for a mean return of 0.5. The LSTM gets beyond 0.95. For comparison, train one without memory:

    aiorl train --env examples.recurrent_memory:Remember --stop-return 0.95 --stop-timesteps 100000

`--model.use-gru true` uses a GRU instead, and `--model.lstm-cell-size` sets the width of either.
Training backpropagates through `--rollout-fragment-length` steps of an environment, starting from
the worker's recurrent state.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Remember(gymnasium.Env):
    """Shows -1 or 1, then nothing for a while, then asks for it: a correct last action earns 1."""

    def __init__(self, delay: int = 5) -> None:
        """Set `delay`, the steps between the symbol and the question."""
        # the symbol; 1 when it is asked for
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.delay = delay

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict]:
        """Draw a symbol and show it."""
        super().reset(seed=seed)
        self.answer = int(self.np_random.integers(2))
        self.steps = 0
        return np.array([2 * self.answer - 1, 0], np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Take a step; only the action at the question counts."""
        asked = self.steps == self.delay
        self.steps += 1
        asks_next = self.steps == self.delay
        reward = float(asked and action == self.answer)
        return np.array([0, asks_next], np.float32), reward, asked, False, {}
