"""Settings of PPO runs that take a moment, all in one process, and their environment.

Their updates are one step each, and not traced: tracing takes as long as ten of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

SMALL: dict[str, Any] = {
    "num_workers": 0,
    "num_envs_per_worker": 2,
    "rollout_fragment_length": 16,
    "train_batch_size": 64,
    "sgd_minibatch_size": 64,
    "num_sgd_iter": 1,
    "eager": True,
    "seed": 1,
    "model": {"fcnet_hiddens": [8]},
    "compilation_cache": "off",
    "lr": 0.01,
}


class Played(gymnasium.Env[Any, Any]):
    """Episodes of four steps; all copies count their steps, note their threads, and call functions
    at given steps.

    Attributes:
        at_step: functions to call, by number of the step.
    """

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)
    steps = 0
    threads: ClassVar[set[int]] = set()
    at_step: ClassVar[dict[int, Callable[[], Any]]] = {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        Played.threads.add(threading.get_ident())
        Played.steps += 1
        Played.at_step.pop(Played.steps, lambda: None)()
        self.t += 1
        return np.zeros(2, np.float32), 1.0, self.t == 4, False, {}


def raising(error: BaseException) -> Callable[[], Any]:
    """Make a function that raises an error."""

    def fail() -> None:
        raise error

    return fail
