"""LockstepBaseEnv: an environment that resets itself (Gymnasium's vector environments) as a BaseEnv."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import MultiDiscrete
from numpy.typing import NDArray

from aiorl.data.columns import DEFAULT_AGENT_ID
from aiorl.env.base_env import ALL_AGENTS, ASYNC_RESET_RETURN, BaseEnv, FinishedGame, Poll, opening_poll
from aiorl.env.lockstep import LockstepEnv
from aiorl.env.vector_infos import step_infos
from aiorl.errors import EnvContractError

__all__ = ["LockstepBaseEnv"]


class LockstepBaseEnv(BaseEnv):
    """A LockstepEnv as a BaseEnv; every poll returns all copies, but for those that are just being reset.

    A copy can be reset only after its episode has ended, since it does so itself: ``try_reset`` at any other time
    gives None.
    """

    def __init__(self, env: LockstepEnv, *, seed: int | None = None) -> None:
        """Take over the copies; they are closed with this object.

        Args:
            env: the copies.
            seed: the worker's seed.
        """
        self.lockstep_env = env
        self._env_id = env.env_id
        self.num_envs = env.num_envs
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        if seed is not None:
            env.seed(seed)
        space = env.action_space
        blank = np.asarray(space.start) if isinstance(space, MultiDiscrete) else getattr(space, "start", 0)
        self._actions: NDArray[Any] = np.zeros((env.num_envs, *(space.shape or ())), space.dtype)
        self._actions[...] = blank
        self._blank = blank
        self._poll: Poll | None = None
        self._first_obs: dict[int, Any] = {}
        self._resetting: set[int] = set()
        self._started = False

    def poll(self) -> Poll:
        """The last step of every copy; the first poll resets them all."""
        if not self._started:
            first = opening_poll(_by_index(self.lockstep_env.reset(), range(self.num_envs)))
            self._started = True
            return first
        if self._poll is None:
            raise EnvContractError(self.lockstep_env.env_id, "it was polled twice, with no actions sent in between")
        poll, self._poll = self._poll, None
        return poll

    def send_actions(self, action_dict: Mapping[Any, Mapping[Any, Any]]) -> None:
        """Step all copies; see BaseEnv."""
        self._actions[...] = self._blank
        for index, by_agent in action_dict.items():
            if DEFAULT_AGENT_ID in by_agent:
                self._actions[index] = by_agent[DEFAULT_AGENT_ID]
        self._poll = self._step()

    def _step(self) -> Poll:
        step = self.lockstep_env.step(self._actions)
        ended = step.terminateds | step.truncateds
        finals = (
            {}
            if step.final_index is None or step.final_obs is None
            else dict(zip(step.final_index.tolist(), step.final_obs, strict=True))
        )
        obs = np.array(step.obs)
        self._first_obs = {index: obs[index] for index in finals}
        fresh = [] if step.valid is None else np.flatnonzero(~step.valid).tolist()
        self._resetting = set(np.flatnonzero(ended).tolist()) - finals.keys()
        stepped = [index for index in range(self.num_envs) if index not in fresh]
        opening = opening_poll(_by_index(obs, fresh))
        flags = []
        for column, values in ((step.terminateds, opening.terminateds), (step.truncateds, opening.truncateds)):
            whole = column.tolist()
            flags.append({**values, **{i: {DEFAULT_AGENT_ID: whole[i], ALL_AGENTS: whole[i]} for i in stepped}})
        rewards = step.rewards.tolist()
        infos = step_infos(step, self.num_envs) if step.infos else None
        return Poll(
            {**opening.obs, **{i: {DEFAULT_AGENT_ID: finals.get(i, obs[i])} for i in stepped}},
            {**opening.rewards, **{i: {DEFAULT_AGENT_ID: rewards[i]} for i in stepped}},
            flags[0],
            flags[1],
            {**opening.infos, **{i: {DEFAULT_AGENT_ID: {} if infos is None else infos[i]} for i in stepped}},
            {},
        )

    def try_reset(self, env_id: Any) -> dict[Any, Any] | str | None:
        """The first observation of the episode that the copy began by itself."""
        if env_id in self._first_obs:
            return {DEFAULT_AGENT_ID: self._first_obs.pop(env_id)}
        return ASYNC_RESET_RETURN if env_id in self._resetting else None

    def in_lockstep(self, horizon: int | None = None) -> LockstepEnv:
        """See BaseEnv."""
        self.lockstep_env.limit_episodes(horizon)
        return self.lockstep_env

    def get_unwrapped(self) -> Sequence[Any]:
        """The environment objects, where they live in this process."""
        return self.lockstep_env.unwrapped

    def take_finished_games(self) -> list[FinishedGame] | None:
        """See BaseEnv."""
        return self.lockstep_env.take_finished_games()

    def stop(self) -> None:
        """Close the copies."""
        self.lockstep_env.close()


def _by_index(obs: NDArray[Any], indices: Sequence[int] | range) -> dict[Any, dict[Any, Any]]:
    rows = np.array(obs)
    return {index: {DEFAULT_AGENT_ID: rows[index]} for index in indices}
