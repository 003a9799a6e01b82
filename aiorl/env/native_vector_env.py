"""NativeVectorEnv: Gymnasium's own vectorised environments, in each of its autoreset modes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from aiorl.env.checks import ObservationCheck, check_rewards, raise_env_fault
from aiorl.env.lockstep import LockstepEnv, VectorStep
from aiorl.errors import EnvError, UnsupportedEnvError

__all__ = ["NativeVectorEnv"]

_FLAG = np.dtype(np.bool_)


class NativeVectorEnv(LockstepEnv):
    """A ``gymnasium.vector.VectorEnv`` as a LockstepEnv."""

    def __init__(self, env: Any, *, env_id: str, max_episode_steps: int | None = None) -> None:
        """Take over the environment; it is closed with this object.

        Args:
            env: a vector environment whose metadata names its autoreset mode.
            env_id: name for messages.
            max_episode_steps: length at which it truncates episodes, if known.

        Raises:
            UnsupportedEnvError: the autoreset mode is not stated.
            UnsupportedSpaceError: an observation space without a single array per observation.
        """
        mode = (env.metadata or {}).get("autoreset_mode")
        try:
            self._mode = AutoresetMode(mode)
        except ValueError as error:
            raise UnsupportedEnvError(
                f"vector environment {env_id!r} has metadata['autoreset_mode'] = {mode!r}; expected one of "
                f"{[known.name for known in AutoresetMode]} (gymnasium.vector.AutoresetMode). "
                "Use vectorize: serial instead."
            ) from error
        self.env_id = env_id
        self.num_envs = int(env.num_envs)
        self.observation_space = env.single_observation_space
        self.action_space = env.single_action_space
        self.max_episode_steps = max_episode_steps
        self._env = env
        self._check = ObservationCheck(env_id, self.observation_space)
        self._action_dtype = env.action_space.dtype
        self._lengths = np.zeros(self.num_envs, np.int64)
        self._ended = np.zeros(self.num_envs, np.bool_)
        self._any_ended = False

    def reset(self, seeds: Sequence[int] | None = None) -> NDArray[Any]:
        """First observations of new episodes; the first seed seeds the whole vector (see LockstepEnv)."""
        try:
            obs = self._reset_all(self.first_seeds if seeds is None else seeds)
        except Exception as error:
            raise_env_fault(self.env_id, "reset", error, 0, 0)
        self.first_seeds = None
        self._lengths.fill(0)
        self._ended = np.zeros(self.num_envs, np.bool_)
        self._any_ended = False
        obs = self._check.check_batch_shape(obs, self.num_envs)
        self._check.check_values(obs, self._step_of)
        return obs

    def _reset_all(self, seeds: Sequence[int] | None) -> Any:
        obs, _ = self._env.reset(seed=int(seeds[0])) if seeds else self._env.reset()
        return obs

    def step(self, actions: NDArray[Any]) -> VectorStep:
        """Step all copies; see LockstepEnv."""
        if actions.dtype != self._action_dtype:
            actions = actions.astype(self._action_dtype)
        self._lengths += 1
        try:
            obs, rewards, terminateds, truncateds, infos = self._env.step(actions)
        except Exception as error:
            raise_env_fault(self.env_id, "step", error, 0, int(self._lengths.max()))
        obs = self._check.check_batch_shape(obs, self.num_envs)
        rewards, terminateds, truncateds = self._checked_flags(rewards, terminateds, truncateds)
        valid: NDArray[np.bool_] | None = None
        if self._mode is AutoresetMode.NEXT_STEP and self._any_ended:
            valid = ~self._ended
            rewards = np.where(valid, rewards, 0)
            terminateds = terminateds & valid
            truncateds = truncateds & valid
            self._lengths *= valid
        check_rewards(self.env_id, rewards, self._step_of)
        self._check.check_values(obs, self._step_of)
        ended = terminateds | truncateds
        self._any_ended = bool(np.count_nonzero(ended))
        self._ended = ended
        result = VectorStep(obs, rewards, terminateds, truncateds, valid=valid, infos=infos)
        if self._any_ended and self._mode is not AutoresetMode.NEXT_STEP:
            self._add_finals(result, np.flatnonzero(ended), infos)
            self._lengths *= ~ended
        return result

    def _add_finals(self, result: VectorStep, index: NDArray[np.int64], infos: dict[str, Any]) -> None:
        if self._mode is AutoresetMode.SAME_STEP:
            finals = infos.get("final_obs", infos.get("final_observation"))
            if finals is None:
                raise EnvError(
                    self.env_id,
                    "resets in the same step, but gives no infos['final_obs']",
                    vector_index=int(index[0]),
                    step=self._step_of(int(index[0])),
                )
            rows = [self._check.coerce(finals[row], row, self._step_of(row)) for row in index.tolist()]
            final_obs = np.stack(rows).astype(self._check.dtype, copy=False)
            self._check.check_values(final_obs, lambda row: self._step_of(int(index[row])), lambda row: int(index[row]))
        else:
            final_obs = result.obs[index]
            try:
                fresh, _ = self._env.reset(options={"reset_mask": self._ended.copy()})
            except Exception as error:
                raise_env_fault(self.env_id, "reset", error, int(index[0]), 0)
            fresh = self._check.check_batch_shape(fresh, self.num_envs)
            obs = result.obs.copy()
            obs[index] = fresh[index]
            self._check.check_values(obs, self._step_of)
            result.obs = obs
        result.final_index = index
        result.final_obs = final_obs

    def _checked_flags(
        self, rewards: Any, terminateds: Any, truncateds: Any
    ) -> tuple[NDArray[Any], NDArray[np.bool_], NDArray[np.bool_]]:
        shape = (self.num_envs,)
        if (
            type(rewards) is type(terminateds) is type(truncateds) is np.ndarray
            and rewards.shape == terminateds.shape == truncateds.shape == shape
            and terminateds.dtype is truncateds.dtype is _FLAG
        ):
            return rewards, terminateds, truncateds  # as they nearly always are, and this is looked at in each step
        arrays = (np.asarray(rewards), np.asarray(terminateds), np.asarray(truncateds))
        for name, array in zip(("rewards", "terminations", "truncations"), arrays, strict=True):
            if array.shape != shape:
                message = f"{name} have shape {array.shape}, expected {shape}"
                raise EnvError(self.env_id, message, step=self._step_of(0))
        return arrays[0], arrays[1].astype(np.bool_, copy=False), arrays[2].astype(np.bool_, copy=False)

    def _step_of(self, index: int) -> int:
        return int(self._lengths[index])

    def close(self) -> None:
        """Close the vector environment."""
        self._env.close()

    @property
    def unwrapped(self) -> list[Any]:
        """The vector environment without its wrappers."""
        return [self._env.unwrapped]
