"""RemoteEnv: each copy of an environment in a process of its own, all stepped at the same time.

Worth it when a step takes milliseconds: the waits of the copies overlap. The children are fresh Python
processes (nothing is forked or pickled), so the environment must be known by id or import path. A child ends
with its parent, however that ends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.data.spaces import space_from_dict
from aiorl.env import remote_child as wire
from aiorl.env.base_env import FinishedGame
from aiorl.env.checks import ObservationCheck
from aiorl.env.child_process import ChildProcess
from aiorl.env.lockstep import LockstepEnv, VectorStep
from aiorl.env.wrapping import Wrapping

__all__ = ["RemoteEnv"]


class RemoteEnv(LockstepEnv):
    """N environments in N child processes."""

    def __init__(
        self,
        env: str,
        env_config: Mapping[str, Any] | None = None,
        num_envs: int = 1,
        *,
        worker_index: int = 0,
        horizon: int | None = None,
        timeout_s: float = 600.0,
        wrapping: Wrapping | None = None,
    ) -> None:
        """Start the processes and wait until each has made its environment.

        Args:
            env: id or import path; names given to ``register_env`` exist only in the process that gave them.
            env_config: the environment's own settings; must be expressible in JSON.
            num_envs: number of copies N.
            worker_index: slot of the worker, for the environments' EnvContext.
            horizon: truncate episodes at this many steps; None or 0 = the environment's own limit.
            timeout_s: longest wait for one answer of a child.
            wrapping: wrappers put around each copy in its process; None for none.

        Raises:
            ConfigError: the children refuse the name, config or horizon.
            EnvError: an environment's constructor raised, or a child died.
        """
        self.env_id = env
        self.num_envs = num_envs
        self._children: list[ChildProcess] = []
        self._closed = False
        try:
            for index in range(num_envs):
                settings = {
                    "env": env,
                    "env_config": dict(env_config or {}),
                    "worker_index": worker_index,
                    "vector_index": index,
                    "horizon": horizon,
                    "wrapping": (wrapping or Wrapping()).to_dict(),
                }
                self._children.append(ChildProcess(env, index, settings, timeout_s))
            ready = [json.loads(child.receive(wire.READY)) for child in self._children]
        except BaseException:
            self.close()
            raise
        self.observation_space = space_from_dict(ready[0]["observation_space"])
        self.action_space = space_from_dict(ready[0]["action_space"])
        self.max_episode_steps = ready[0]["max_episode_steps"]
        check = ObservationCheck(env, self.observation_space)
        self._counts_games = all(facts["counts_games"] for facts in ready)
        self._games: list[FinishedGame] = []
        self._action_dtype = np.dtype(self.action_space.dtype)
        self._obs: NDArray[Any] = np.zeros((num_envs, *check.shape), check.dtype)
        self._obs_bytes = self._obs[0].nbytes
        self._rewards = np.zeros(num_envs, np.float64)
        self._terminateds = np.zeros(num_envs, np.bool_)
        self._truncateds = np.zeros(num_envs, np.bool_)

    @property
    def pids(self) -> list[int]:
        """Process ids of the children."""
        return [child.process.pid for child in self._children]

    def reset(self, seeds: Sequence[int] | None = None) -> NDArray[Any]:
        """First observations of new episodes; see LockstepEnv."""
        for index, child in enumerate(self._children):
            seed = 0 if seeds is None else int(seeds[index])
            child.send(wire.RESET, wire.SEED.pack(seeds is not None, seed))
        for index, child in enumerate(self._children):
            self._obs[index] = self._to_obs(child.receive(wire.RESULT), 0)
        return self._obs

    def step(self, actions: NDArray[Any]) -> VectorStep:
        """Step every copy at the same time; see LockstepEnv."""
        actions = np.ascontiguousarray(actions, self._action_dtype)
        for child, action in zip(self._children, actions, strict=True):
            child.send(wire.STEP, action.tobytes())
        finals: list[NDArray[Any]] = []
        final_index: list[int] = []
        for index, child in enumerate(self._children):
            payload = child.receive(wire.RESULT)
            self._rewards[index], flags, num_games = wire.STEP_HEAD.unpack_from(payload)
            self._terminateds[index] = bool(flags & wire.TERMINATED)
            self._truncateds[index] = bool(flags & wire.TRUNCATED)
            self._obs[index] = self._to_obs(payload, wire.STEP_HEAD.size)
            if flags & wire.FINAL:
                child.steps = 0
                final_index.append(index)
                finals.append(self._to_obs(payload, wire.STEP_HEAD.size + self._obs_bytes))
            for number in range(num_games):
                offset = len(payload) - wire.GAME.size * (num_games - number)
                self._games.append(FinishedGame(*wire.GAME.unpack_from(payload, offset)))
        result = VectorStep(self._obs, self._rewards, self._terminateds, self._truncateds)
        if finals:
            result.final_index = np.array(final_index, np.int64)
            result.final_obs = np.stack(finals)
        return result

    def _to_obs(self, payload: bytearray, offset: int) -> NDArray[Any]:
        count = self._obs[0].size
        return np.frombuffer(payload, self._obs.dtype, count, offset).reshape(self._obs.shape[1:])

    def take_finished_games(self) -> list[FinishedGame] | None:
        """Real games that ended since the last call; see LockstepEnv."""
        if not self._counts_games:
            return None
        games, self._games = self._games, []
        return games

    def close(self) -> None:
        """End the children; one that does not end by itself within 2 s is killed."""
        if self._closed:
            return
        self._closed = True
        for child in self._children:
            child.hang_up()
        for child in self._children:
            child.wait()
