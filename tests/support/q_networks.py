"""A small network of Q values, for tests of what trains it."""

from __future__ import annotations

from gymnasium import spaces

from aiorl.data.obs_layout import ObsLayout
from aiorl.learning.algorithms.algorithm import Observations
from aiorl.learning.algorithms.dqn import DQN, DQNConfig
from aiorl.learning.models.q_network import QNetwork

NUM_ACTIONS, NUM_OBS, START = 3, 4, 5


def make_model(config: DQNConfig, seed: int = 1, num_mask: int = 0) -> QNetwork:
    layout = ObsLayout((NUM_OBS,), num_mask=num_mask)
    observations = Observations(layout.array_shape, "float32", layout)
    return DQN.build_model(config, observations, spaces.Discrete(NUM_ACTIONS, start=START), seed)  # type: ignore[return-value]
