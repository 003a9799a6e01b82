"""PolledLockstep: environments in processes of their own, stepped together as whole arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.data.actions import ActionLayout
from aiorl.data.columns import DEFAULT_AGENT_ID
from aiorl.env.base_env import ALL_AGENTS, FinishedGame
from aiorl.env.checks import ObservationCheck
from aiorl.env.lockstep import LockstepEnv, VectorStep, checked_horizon, training_disabled_error
from aiorl.env.remote_env import RemoteEnv

__all__ = ["PolledLockstep"]


class PolledLockstep(LockstepEnv):
    """A RemoteEnv as a LockstepEnv; each copy is reset at once when its episode ends."""

    def __init__(self, env: RemoteEnv, *, horizon: int | None = None) -> None:
        """Take over the environments; they are closed with this object.

        Args:
            env: environments with one agent each.
            horizon: truncate episodes at this many steps; None or 0 = the environment's own limit.

        Raises:
            ConfigError: a horizon above the environment's own limit.
            UnsupportedSpaceError: an observation space without a single array per observation.
        """
        self.remote_env = env
        self.env_id = env.env_id
        self.num_envs = env.num_envs
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        self.max_episode_steps = env.max_episode_steps
        self.limit_episodes(horizon)
        check = ObservationCheck(self.env_id, env.observation_space)
        self._layout = ActionLayout(env.action_space)
        self._obs: NDArray[Any] = np.zeros((env.num_envs, *check.shape), check.dtype)
        self._rewards = np.zeros(env.num_envs, np.float64)
        self._terminateds = np.zeros(env.num_envs, np.bool_)
        self._truncateds = np.zeros(env.num_envs, np.bool_)
        self._lengths = np.zeros(env.num_envs, np.int64)

    def limit_episodes(self, horizon: int | None) -> None:
        """See LockstepEnv."""
        self.max_episode_steps = checked_horizon(horizon, self.max_episode_steps)

    def reset(self, seeds: Sequence[int] | None = None) -> NDArray[Any]:
        """First observations of new episodes; see LockstepEnv."""
        self._begin(range(self.num_envs), seeds)
        return self._obs

    def step(self, actions: NDArray[Any]) -> VectorStep:
        """Step every copy at the same time; see LockstepEnv."""
        rows = self._layout.to_env(np.asarray(actions))
        self.remote_env.send_actions({index: {DEFAULT_AGENT_ID: action} for index, action in enumerate(rows)})
        self._lengths += 1
        self._collect(self.num_envs)
        if self.max_episode_steps:
            self._truncateds |= (self._lengths >= self.max_episode_steps) & ~self._terminateds
        result = VectorStep(self._obs, self._rewards, self._terminateds, self._truncateds)
        ended = np.flatnonzero(self._terminateds | self._truncateds)
        if ended.size:
            result.final_index = ended
            result.final_obs = self._obs[ended]
            self._begin(ended.tolist(), None)
        return result

    def _begin(self, indices: Sequence[int], seeds: Sequence[int] | None) -> None:
        for index in indices:
            self.remote_env.begin(index, None if seeds is None else int(seeds[index]))
        self._lengths[list(indices)] = 0
        flags = self._terminateds.copy(), self._truncateds.copy(), self._rewards.copy()
        self._collect(len(indices))
        self._terminateds[:], self._truncateds[:], self._rewards[:] = flags

    def _collect(self, count: int) -> None:
        """Poll until so many copies have reported."""
        while count > 0:
            poll = self.remote_env.poll()
            for error in poll.faults.values():  # its episode is lost, and lockstep cannot leave it out
                raise error
            for index, obs in poll.obs.items():
                if not poll.infos[index][DEFAULT_AGENT_ID].get("training_enabled", True):
                    raise training_disabled_error(self.env_id)
                self._obs[index] = obs[DEFAULT_AGENT_ID]
                self._rewards[index] = poll.rewards[index][DEFAULT_AGENT_ID] or 0.0
                self._terminateds[index] = poll.terminateds[index][ALL_AGENTS]
                self._truncateds[index] = poll.truncateds[index][ALL_AGENTS]
            count -= len(poll.obs)

    def take_finished_games(self) -> list[FinishedGame] | None:
        """See LockstepEnv."""
        return self.remote_env.take_finished_games()

    def close(self) -> None:
        """End the processes."""
        self.remote_env.stop()
