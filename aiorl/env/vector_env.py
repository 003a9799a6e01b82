"""SerialEnv: plain Gymnasium environments stepped in turn, each reset at once when its episode ends."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.env.atari import game_counters
from aiorl.env.base_env import FinishedGame
from aiorl.env.checks import ObservationCheck, check_rewards, raise_env_fault
from aiorl.env.gym_like import reset_env, to_five_values
from aiorl.env.lockstep import LockstepEnv, VectorStep, checked_horizon, training_disabled_error
from aiorl.errors import BadRewardError, UnsupportedEnvError
from aiorl.log_once import log_once, summarize

__all__ = ["SerialEnv", "episode_limit"]

logger = logging.getLogger(__name__)

_NEVER = sys.maxsize


def episode_limit(env: Any) -> int | None:
    """Steps after which the environment truncates an episode, from its spec or wrappers; None when unknown."""
    limit = getattr(getattr(env, "spec", None), "max_episode_steps", None)
    while limit is None and isinstance(env, gymnasium.Wrapper):
        if isinstance(env, gymnasium.wrappers.TimeLimit):
            limit = env._max_episode_steps  # the wrapper has no public name for it
        env = env.env
    return int(limit) if isinstance(limit, Integral) else None


class SerialEnv(LockstepEnv):
    """N Gymnasium environments, stepped one after the other in the calling thread.

    Infos go no further, but for one: ``step`` refuses a ``training_enabled`` that is false.
    """

    def __init__(self, envs: Sequence[gymnasium.Env[Any, Any]], *, env_id: str, horizon: int | None = None) -> None:
        """Take over the environments; they are closed with this object.

        Args:
            envs: copies with equal spaces.
            env_id: name for messages.
            horizon: truncate episodes at this many steps; None or 0 = the environment's own limit, whether the
                environment keeps to it or not.

        Raises:
            ConfigError: a horizon above the environment's own limit.
            UnsupportedEnvError: no environments, or something that is none.
            UnsupportedSpaceError: an observation space without a single array per observation.
        """
        if not envs:
            raise UnsupportedEnvError(f"environment {env_id!r}: no copies were given")
        for env in envs:
            if not (hasattr(env, "reset") and hasattr(env, "step") and hasattr(env, "action_space")):
                raise UnsupportedEnvError(
                    f"environment {env_id!r} made a {type(env).__name__}, which has no reset, step and spaces"
                )
        self.env_id = env_id
        self.num_envs = len(envs)
        self.observation_space = envs[0].observation_space
        self.action_space = envs[0].action_space
        self.max_episode_steps = checked_horizon(horizon, episode_limit(envs[0]))
        self._first_cut = _NEVER  # no episode gets as long as max_episode_steps before this step
        self._envs = list(envs)
        self._steps = [env.step for env in envs]
        self._games = game_counters(envs)
        self._check = ObservationCheck(env_id, self.observation_space)
        self._actions_as_list = isinstance(self.action_space, spaces.Discrete)
        self._obs = np.zeros((self.num_envs, *self._check.shape), self._check.dtype)
        self._rewards = np.zeros(self.num_envs, np.float64)
        self._terminateds = np.zeros(self.num_envs, np.bool_)
        self._truncateds = np.zeros(self.num_envs, np.bool_)
        self._result = VectorStep(self._obs, self._rewards, self._terminateds, self._truncateds)
        self._flags_dirty = False
        self._training_disabled = False
        self._step = 0
        self._started_at = np.zeros(self.num_envs, np.int64)

    def reset(self, seeds: Sequence[int] | None = None) -> NDArray[Any]:
        """First observations of new episodes; see LockstepEnv."""
        self._started_at[:] = self._step
        if self.max_episode_steps:
            self._first_cut = self._step + self.max_episode_steps
        for index in range(self.num_envs):
            self._reset_at(index, None if seeds is None else int(seeds[index]))
        self._check.check_values(self._obs, self._step_of)
        return self._obs

    def step(self, actions: NDArray[Any]) -> VectorStep:
        """Step every copy in turn; see LockstepEnv."""
        result = self._result
        obs_rows, rewards, shape, dtype = self._obs, self._rewards, self._check.shape, self._check.dtype
        if self._flags_dirty:
            self._terminateds.fill(False)
            self._truncateds.fill(False)
            result.final_index = result.final_obs = None
            self._flags_dirty = False
        self._step += 1
        index = 0
        ended = False
        try:
            for index, (step, action) in enumerate(
                zip(self._steps, actions.tolist() if self._actions_as_list else actions, strict=True)
            ):
                returned = step(action)
                try:
                    obs, reward, terminated, truncated, info = returned
                except (TypeError, ValueError):
                    obs, reward, terminated, truncated, info = to_five_values(returned)
                if type(obs) is not np.ndarray or obs.shape != shape or obs.dtype is not dtype:
                    obs = self._check.coerce(obs, index, self._step_of(index))
                obs_rows[index] = obs
                try:
                    rewards[index] = reward
                except (TypeError, ValueError) as error:
                    raise self._bad_reward(reward, index) from error
                if terminated or truncated:
                    self._terminateds[index] = terminated
                    self._truncateds[index] = truncated
                    ended = True
                if info and "training_enabled" in info and not info["training_enabled"]:
                    self._training_disabled = True
                    ended = True  # looked at there, off the path of every step
        except Exception as error:
            raise_env_fault(self.env_id, "step", error, index, self._step_of(index))
        check_rewards(self.env_id, rewards, self._step_of)
        self._check.check_values(obs_rows, self._step_of)
        if self._step >= self._first_cut:
            ended |= self._cut_at_limit(self.max_episode_steps or _NEVER)
        if ended:
            if self._training_disabled:
                raise training_disabled_error(self.env_id)
            self._flags_dirty = True
            if log_once("infos"):
                logger.info("Infos from the environment (copy %d): %s", index, summarize(info))
            done = np.flatnonzero(self._terminateds | self._truncateds)
            result.final_index = done
            result.final_obs = obs_rows[done]
            for row in done.tolist():
                self._started_at[row] = self._step
                self._reset_at(row, None)
            self._check.check_values(obs_rows, self._step_of)
        return result

    def _cut_at_limit(self, limit: int) -> bool:
        """Cut the episodes that have come to the limit, and find out when the next one does at the earliest."""
        ended = self._terminateds | self._truncateds
        cut = (self._step - self._started_at >= limit) & ~ended
        self._truncateds |= cut
        self._first_cut = int(np.where(ended | cut, self._step, self._started_at).min()) + limit
        return bool(cut.any())

    def _reset_at(self, index: int, seed: int | None) -> None:
        try:
            obs, _ = reset_env(self._envs[index], None if seed is None else {"seed": seed})
            self._obs[index] = self._check.coerce(obs, index, 0)
        except Exception as error:
            raise_env_fault(self.env_id, "reset", error, index, 0)

    def _step_of(self, index: int) -> int:
        return int(self._step - self._started_at[index])

    def _bad_reward(self, reward: Any, index: int) -> BadRewardError:
        return BadRewardError(
            self.env_id,
            f"reward is {reward!r} ({type(reward).__name__}), expected a number",
            vector_index=index,
            step=self._step_of(index),
        )

    def take_finished_games(self) -> list[FinishedGame] | None:
        """Real games that ended since the last call; see LockstepEnv."""
        return None if self._games is None else [game for games in self._games for game in games.take_finished()]

    def close(self) -> None:
        """Close every copy."""
        for env in self._envs:
            env.close()

    @property
    def unwrapped(self) -> list[Any]:
        """The copies without their wrappers."""
        return [env.unwrapped for env in self._envs]
