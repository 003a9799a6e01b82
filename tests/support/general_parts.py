"""Environments, mappings and callbacks that a general worker imports by path."""

from __future__ import annotations

import sys
import threading
from importlib.abc import MetaPathFinder
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from aiorl.env.external_env import ExternalEnv
from aiorl.sampling.callbacks import DefaultCallbacks
from aiorl.testing.envs import CountingEnv

VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float32)


def by_number(agent_id: Any) -> str:
    """Map even agents to red and odd agents to blue."""
    return "red" if int(str(agent_id)[-1]) % 2 == 0 else "blue"


def doubled(agent_obs: Any, **kwargs: Any) -> Any:
    """Double observations; an observation_fn."""
    return {agent: 2 * obs for agent, obs in agent_obs.items()}


class Noting(DefaultCallbacks):
    """Callbacks that add a custom metric and a history to every episode."""

    def on_episode_end(self, *, episode: Any, **kwargs: Any) -> None:
        episode.custom_metrics["height"] = 7.0
        episode.hist_data["steps"] = [1.0, float(episode.length)]


class Watching(DefaultCallbacks):
    """Callbacks without an effect, except that environments are polled turn by turn."""

    def on_sample_end(self, **kwargs: Any) -> None:
        return


class Failing(DefaultCallbacks):
    """Callbacks that fail at the first step."""

    def on_episode_step(self, **kwargs: Any) -> None:
        raise RuntimeError("this callback fails on purpose")


class SometimesUntrained(CountingEnv):
    """Environment in which the fourth step of each episode must not be trained on."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, {"training_enabled": int(obs[1]) != 4}


class Silent(ExternalEnv):
    """External environment with a client that plays one episode of three steps and then is
    silent.
    """

    def __init__(self, size: int = 3) -> None:
        super().__init__(spaces.Discrete(2), spaces.Box(-np.inf, np.inf, (size,), np.float32))
        self.size = size
        self.over = threading.Event()

    def run(self) -> None:
        episode = self.start_episode()
        for step in range(3):
            self.get_action(episode, np.full(self.size, step, np.float32))
            self.log_returns(episode, 1.0)
        self.end_episode(episode, np.full(self.size, 3, np.float32))
        self.over.wait(60)

    def close(self) -> None:
        self.over.set()


class Broken(ExternalEnv):
    """External environment with a client that fails."""

    def __init__(self, size: int = 3) -> None:
        super().__init__(spaces.Discrete(2), spaces.Box(-np.inf, np.inf, (size,), np.float32))

    def run(self) -> None:
        raise RuntimeError("this client fails on purpose")


class Talkative(ExternalEnv):
    """External environment with a client that plays CountingEnv forever."""

    def __init__(self) -> None:
        super().__init__(spaces.Discrete(2), VECTOR)

    def run(self) -> None:
        env = CountingEnv()
        while True:
            episode = self.start_episode()
            obs, _ = env.reset()
            over = False
            while not over:
                obs, reward, over, _, _ = env.step(self.get_action(episode, obs))
                self.log_returns(episode, reward)
            self.end_episode(episode, obs)


class NoTensorFlow(MetaPathFinder):
    """Import finder that hides TensorFlow; it goes first in `sys.meta_path`."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname == "tensorflow":
            raise ModuleNotFoundError("No module named 'tensorflow'", name=fullname)


def without_tensorflow(config: Any) -> gymnasium.Env[Any, Any]:
    """Make a CartPole; its worker process then can't import TensorFlow, as if it were not
    installed.
    """
    if config.worker_index:
        sys.meta_path.insert(0, NoTensorFlow())
    return gymnasium.make("CartPole-v1")
