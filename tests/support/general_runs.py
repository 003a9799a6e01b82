"""Parts of runs on the general path: environments, mapping functions, callbacks, a plain policy.

They are named by import path ("general_runs:Poles"), so that learner and worker processes find
them.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from aiorl import DefaultCallbacks, MultiAgentEnv
from aiorl.acting.policy import Policy


class Poles(MultiAgentEnv):
    """A CartPole for each of several agents, called left0, right1, left2, ..."""

    def __init__(self, config: dict[str, Any]) -> None:
        names = [
            f"{('left', 'right')[index % 2]}{index}" for index in range(config.get("agents", 2))
        ]
        self.envs = {name: gymnasium.make("CartPole-v1") for name in names}
        first = self.envs["left0"]
        if not config.get("nameless"):
            self.observation_space, self.action_space = first.observation_space, first.action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.alive = set(self.envs)
        seeds = {
            name: None if seed is None else seed + index for index, name in enumerate(self.envs)
        }
        return {name: env.reset(seed=seeds[name])[0] for name, env in self.envs.items()}, {}

    def step(self, action_dict: dict[str, Any]) -> Any:
        obs, rewards, terminateds, truncateds = {}, {}, {}, {}
        for name, action in action_dict.items():
            obs[name], rewards[name], terminateds[name], truncateds[name], _ = self.envs[name].step(
                action
            )
            if terminateds[name] or truncateds[name]:
                self.alive.discard(name)
        terminateds["__all__"], truncateds["__all__"] = not self.alive, False
        return obs, rewards, terminateds, truncateds, {}


class Bits(gymnasium.Env[Any, Any]):
    """Environment that shows three bits and rewards their repetition; actions in any form but
    NumPy's are an error.
    """

    observation_space = spaces.MultiBinary(3)
    action_space = spaces.MultiBinary(3)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._draw(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self.action_space.contains(action):
            raise RuntimeError(f"{action!r} is no action")
        reward = float((action == self._bits).mean())
        self._steps += 1
        return self._draw(), reward, self._steps >= 20, False, {}

    def _draw(self) -> Any:
        self._bits = self.np_random.integers(0, 2, 3, dtype=np.int8)
        return self._bits


class Bytes(gymnasium.Env[Any, Any]):
    """Images of bytes."""

    observation_space = spaces.Box(0, 255, (42, 42, 1), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._image(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return self._image(), 1.0, self._steps >= 20, False, {}

    def _image(self) -> Any:
        return self.np_random.integers(0, 256, (42, 42, 1)).astype(np.uint8)


def side(agent_id: str) -> str:
    return agent_id.rstrip("0123456789")


def stranger(agent_id: str) -> str:
    return "stranger"


class Pusher(Policy):
    """Policy that always pushes in the direction of its settings."""

    def compute_actions(
        self, obs_batch: Any, state_batches: Any = (), *args: Any, **kwargs: Any
    ) -> Any:
        return np.full(len(obs_batch), self.config["way"], np.int64), [], {}

    def get_weights(self) -> dict[str, Any]:
        return {}

    def set_weights(self, weights: Any) -> None:
        raise AssertionError("there are no weights for it")


class Nested(gymnasium.Env[Any, Any]):
    """Dict observations and Tuple actions; the reward is for naming the place and pushing by half
    the level.
    """

    observation_space = spaces.Dict(
        {"place": spaces.Discrete(3), "level": spaces.Box(-1.0, 1.0, (1,))}
    )
    action_space = spaces.Tuple([spaces.Discrete(3), spaces.Box(-1.0, 1.0, (1,))])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        choice, push = action
        reward = float(choice == self.place) - abs(float(push[0]) - 0.5 * float(self.level[0]))
        self.steps += 1
        return self._obs(), reward, self.steps >= 10, False, {}

    def _obs(self) -> Any:
        self.place = int(self.np_random.integers(3))
        self.level = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return {"place": self.place, "level": self.level}


class LastMove(gymnasium.Env[Any, Any]):
    """Environment without information in observations; it rewards a change of action, which needs
    memory to do well.
    """

    observation_space = spaces.Box(-1.0, 1.0, (1,))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps, self.last = 0, -1
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        reward = float(self.last >= 0 and action != self.last)
        self.last = int(action)
        self.steps += 1
        return np.zeros(1, np.float32), reward, False, self.steps >= 16, {}


class Watching(DefaultCallbacks):
    """Callbacks that count and measure, and add to the result."""

    def on_episode_step(self, *, episode: Any, **kwargs: Any) -> None:
        episode.user_data["polls"] = episode.user_data.get("polls", 0) + 1

    def on_episode_end(self, *, episode: Any, **kwargs: Any) -> None:
        episode.custom_metrics["polls_per_step"] = episode.user_data["polls"] / episode.length
        episode.hist_data["lengths"] = [float(episode.length)]

    def on_train_result(self, *, trainer: Any, result: dict[str, Any], **kwargs: Any) -> None:
        result["seen"] = f"iteration {result['training_iteration']}"


class Failing(DefaultCallbacks):
    def on_train_result(self, *, trainer: Any, result: dict[str, Any], **kwargs: Any) -> None:
        raise RuntimeError("the hook fails on purpose")


class Slipping(DefaultCallbacks):
    def on_episode_end(self, *, episode: Any, **kwargs: Any) -> None:
        episode.custom_metrics["speed"] = episode.user_data["speed"]
