"""Gymnasium's own vectorised environments, in each of its autoreset modes: as a LockstepEnv and as
a BaseEnv.

Their infos are one dict of arrays for all copies. Next to an entry ``key``, a mask ``_key`` marks
the copies that have it. Nested dicts have the same form. If a step resets a copy, the infos of the
step are under ``final_info``, and the infos of the reset take their usual places.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.connection
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from gymnasium.vector import AutoresetMode

from aiorl.data.columns import DEFAULT_AGENT_ID, I64, Array, Bools
from aiorl.data.gym_spaces import gymnasium_space
from aiorl.env.base_env import (
    ASYNC_RESET_RETURN,
    ByAgent,
    FinishedGame,
    LockstepEnv,
    MultiEnvDict,
    SettingsChange,
    SteppedBaseEnv,
    VectorStep,
    add_step,
    opening_poll,
    pass_settings,
)
from aiorl.env.checks import ObservationCheck, check_rewards, hint_for_vector, raise_env_fault
from aiorl.errors import EnvError, UnsupportedEnvError

logger = logging.getLogger(__name__)

_CLOSE_WAIT_S = 5.0
_EXIT_WAIT_S = 0.5
_FLAG = np.dtype(np.bool_)
_TRAINING = "training_enabled"
_FINAL_INFO = "final_info"
_OF_THE_STEP = (_FINAL_INFO, "_" + _FINAL_INFO, "final_obs", "_final_obs")


class NativeVectorEnv(LockstepEnv):
    """``gymnasium.vector.VectorEnv`` as a LockstepEnv."""

    def __init__(self, env: Any, *, env_id: str, max_episode_steps: int | None = None) -> None:
        """Take over the environment; it is closed with this object.

        Args:
            env: a vector environment whose metadata names its autoreset mode.
            env_id: name for messages.
            max_episode_steps: length at which it truncates episodes, if known.

        Raises:
            UnsupportedEnvError: the metadata does not name the autoreset mode.
            UnsupportedSpaceError: observations are not single arrays.
        """
        mode = (env.metadata or {}).get("autoreset_mode")
        try:
            self._mode = AutoresetMode(mode)
        except ValueError as error:
            raise UnsupportedEnvError(
                f"vector environment {env_id!r} has metadata['autoreset_mode'] = {mode!r}; expected"
                f" one of {[member.name for member in AutoresetMode]}"
                " (gymnasium.vector.AutoresetMode). Use vectorize: serial instead."
            ) from error
        self.env_id = env_id
        self.num_envs = int(env.num_envs)
        self.observation_space = gymnasium_space(env.single_observation_space)
        self.action_space = gymnasium_space(env.single_action_space)
        self.max_episode_steps = max_episode_steps
        self._env = env
        self._processes = _Processes(env)
        self._check = ObservationCheck(env_id, self.observation_space)
        self._action_dtype = env.action_space.dtype
        self._step_count = 0
        self._started_at = np.zeros(self.num_envs, np.int64)
        self._ended = np.zeros(self.num_envs, np.bool_)
        self._any_ended = False

    def reset(self, seeds: Sequence[int] | None = None) -> Array:
        """Begin new episodes; the first seed seeds the whole vector (see LockstepEnv)."""
        try:
            obs = self._reset_all(self.first_seeds if seeds is None else seeds)
        except Exception as error:
            self._raise_fault("reset", error, index=0, step=0)
        self.first_seeds = None
        self._started_at.fill(self._step_count)
        self._ended = np.zeros(self.num_envs, np.bool_)
        self._any_ended = False
        obs = self._check.check_batch_shape(obs, self.num_envs)
        self._check.check_values(obs, self._step_of)
        return obs

    def _reset_all(self, seeds: Sequence[int] | None) -> Any:
        obs, _ = self._env.reset(seed=int(seeds[0])) if seeds else self._env.reset()
        return obs

    def step(self, actions: Array) -> VectorStep:
        """Step all copies; see LockstepEnv."""
        if actions.dtype != self._action_dtype:
            actions = actions.astype(self._action_dtype)
        self._step_count += 1
        try:
            obs, rewards, terminateds, truncateds, infos = self._env.step(actions)
        except Exception as error:
            longest = int(self._step_count - self._started_at.min())
            self._raise_fault("step", error, index=0, step=longest)
        obs = self._check.check_batch_shape(obs, self.num_envs)
        rewards, terminateds, truncateds = self._checked_flags(rewards, terminateds, truncateds)
        valid: Bools | None = None
        if self._mode is AutoresetMode.NEXT_STEP and self._any_ended:
            # For copies that ended in the last step, this one was only the reset.
            valid = ~self._ended
            rewards = rewards.copy()
            rewards[self._ended] = 0
            terminateds = terminateds & valid
            truncateds = truncateds & valid
            self._started_at[self._ended] = self._step_count
        check_rewards(self.env_id, rewards, self._step_of)
        self._check.check_values(obs, self._step_of)
        ended = terminateds | truncateds
        self._any_ended = bool(np.count_nonzero(ended))
        self._ended = ended
        result = VectorStep(
            obs=obs,
            rewards=rewards,
            terminateds=terminateds,
            truncateds=truncateds,
            valid=valid,
            infos=infos,
        )
        if self._any_ended and self._mode is not AutoresetMode.NEXT_STEP:
            self._add_finals(result, np.flatnonzero(ended))
            self._started_at[ended] = self._step_count
        return result

    def _add_finals(self, result: VectorStep, ended: I64) -> None:
        """Add the last observations of the copies that ended, and see that these are reset."""
        result.final_index = ended
        if self._mode is AutoresetMode.SAME_STEP:
            result.final_obs = self._final_obs(result.infos or {}, ended.tolist())
            return
        # The mode DISABLED: copies are reset on request.
        result.final_obs = result.obs[ended]
        try:
            fresh, _ = self._env.reset(options={"reset_mask": self._ended.copy()})
        except Exception as error:
            self._raise_fault("reset", error, index=int(ended[0]), step=0)
        fresh = self._check.check_batch_shape(fresh, self.num_envs)
        obs = result.obs.copy()
        obs[ended] = fresh[ended]
        self._check.check_values(obs, self._step_of)
        result.obs = obs

    def _final_obs(self, infos: Mapping[str, Any], ended: list[int]) -> Array:
        """Return the last observations [K, ...] of copies that the step itself has reset."""
        finals = infos.get("final_obs")
        if finals is None:
            raise EnvError(
                self.env_id,
                "resets in the same step, but has no infos['final_obs']",
                vector_index=ended[0],
                step=self._step_of(ended[0]),
            )
        rows = [self._check.coerce(finals[copy], copy, self._step_of(copy)) for copy in ended]
        final_obs = np.stack(rows).astype(self._check.dtype, copy=False)
        self._check.check_values(
            final_obs,
            lambda row: self._step_of(ended[row]),
            lambda row: ended[row],
        )
        return final_obs

    def _checked_flags(
        self,
        rewards: Any,
        terminateds: Any,
        truncateds: Any,
    ) -> tuple[Array, Bools, Bools]:
        shape = (self.num_envs,)
        if (
            type(rewards) is type(terminateds) is type(truncateds) is np.ndarray
            and rewards.shape == terminateds.shape == truncateds.shape == shape
            and terminateds.dtype is truncateds.dtype is _FLAG
        ):
            return rewards, terminateds, truncateds  # the usual case, on every step
        arrays = [np.asarray(values) for values in (rewards, terminateds, truncateds)]
        for name, array in zip(("rewards", "terminations", "truncations"), arrays, strict=True):
            if array.shape != shape:
                hint = hint_for_vector(array, self.num_envs) if name == "rewards" else ""
                raise EnvError(
                    self.env_id,
                    f"{name} have shape {array.shape}, expected {shape}{hint}",
                    step=self._step_of(0),
                )
        rewards, terminateds, truncateds = arrays
        return (
            rewards,
            terminateds.astype(np.bool_, copy=False),
            truncateds.astype(np.bool_, copy=False),
        )

    def _step_of(self, index: int) -> int:
        return int(self._step_count - self._started_at[index])

    def _raise_fault(self, doing: str, error: Exception, *, index: int, step: int) -> NoReturn:
        """Raise the error for a failed call, which names the copy whose process has ended, if there
        is one.
        """
        self._processes.have_failed = True
        dead = None
        # After an error in its environment, a process ends, too, but not before it has reported the
        # error.
        if isinstance(error, EOFError | OSError):
            dead = self._processes.dead(wait_s=_EXIT_WAIT_S)
        if dead is None:
            raise_env_fault(self.env_id, doing, error, index=index, step=step)
        index, status = dead
        raise EnvError(
            self.env_id,
            f"{doing} failed, because its process has ended with status {status}",
            vector_index=index,
            step=step,
        ) from error

    def close(self) -> None:
        """Close the vector environment; processes that do not end by themselves within 5 s are
        killed.
        """
        self._processes.close(self._env)

    @property
    def unwrapped(self) -> list[Any]:
        """Vector environment without its wrappers."""
        return [self._env.unwrapped]


class _Processes:
    """Processes of a vector environment that gives each copy one; empty for all others.

    Gymnasium's own ``close`` reads an answer of each process, and waits forever if a process is
    stuck, or if a call failed in between and the answers of some copies have been read already.

    Attributes:
        have_failed: True if a call of the vector environment failed.
    """

    def __init__(self, env: Any) -> None:
        inner = getattr(env, "unwrapped", env)
        inner = getattr(inner, "original", inner)  # that of an environment of gym
        self._inner = inner
        has_pipes = bool(getattr(inner, "parent_pipes", None))
        self._processes: Sequence[Any] = getattr(inner, "processes", ()) if has_pipes else ()
        self.have_failed = False

    def dead(self, wait_s: float = 0.0) -> tuple[int, int] | None:
        """Return the index and the exit status of the first process that has ended; None if all are
        alive.

        Args:
            wait_s: longest wait for a process to end.
        """
        ended = multiprocessing.connection.wait(
            [process.sentinel for process in self._processes], wait_s
        )
        for index, process in enumerate(self._processes):
            if process.sentinel in ended:
                process.join(_EXIT_WAIT_S)  # its files are closed a moment before it is gone
            if not process.is_alive():
                return index, process.exitcode
        return None

    def close(self, env: Any) -> None:
        """Close a vector environment and end its processes."""
        if not self._processes:
            env.close()
            return
        if getattr(self._inner, "closed", False):
            return
        if self.have_failed or self.dead() is not None:
            self._ask_to_close()
            self._end()
        else:
            watch = threading.Timer(_CLOSE_WAIT_S, self._end)
            watch.daemon = True
            watch.start()
            try:
                env.close()
            except (OSError, EOFError) as error:
                logger.warning(
                    "the processes of %s did not close: %r", type(self._inner).__name__, error
                )
            finally:
                watch.cancel()
                watch.join()  # it may be waiting for the processes, too, and only one gets their ends
                self._end()
        for pipe in self._inner.parent_pipes:
            if pipe is not None:
                pipe.close()
        self._inner.closed = True  # else it is closed again when it is garbage collected

    def _ask_to_close(self) -> None:
        """Ask the processes that are left to close their environments, and give them some time."""
        for pipe in self._inner.parent_pipes:
            # None is the pipe of a copy that failed.
            with contextlib.suppress(OSError, AttributeError):
                pipe.send(("close", None))
        until = time.monotonic() + _CLOSE_WAIT_S
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))

    def _end(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()  # it may have inherited a handler of SIGTERM
        for process in self._processes:
            process.join()


class LockstepBaseEnv(SteppedBaseEnv):
    """LockstepEnv as a BaseEnv; every poll returns all copies except those that are being reset.

    A copy resets itself when its episode has ended. At any other time it cannot be reset, and
    ``try_reset`` returns None.
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
        self.observation_space = gymnasium_space(env.observation_space)
        self.action_space = gymnasium_space(env.action_space)
        if seed is not None:
            env.seed(seed)
        space = self.action_space
        # A copy that is being reset ignores its action and keeps the previous one.
        self._actions: Array = np.zeros((env.num_envs, *(space.shape or ())), space.dtype)
        self._first_obs: dict[int, Any] = {}
        self._resetting: set[int] = set()

    def change_settings(self, change: SettingsChange) -> None:
        """See `BaseEnv.change_settings`."""
        pass_settings(self.lockstep_env, change)

    def _reset_all(self) -> MultiEnvDict:
        return {
            index: {DEFAULT_AGENT_ID: row}
            for index, row in enumerate(np.array(self.lockstep_env.reset()))
        }

    def send_actions(self, action_dict: Mapping[Any, ByAgent]) -> None:
        """Step all copies; see BaseEnv."""
        for index, by_agent in action_dict.items():
            if DEFAULT_AGENT_ID in by_agent:
                self._actions[index] = by_agent[DEFAULT_AGENT_ID]
        step = self.lockstep_env.step(self._actions)
        ended = step.terminateds | step.truncateds
        finals: dict[int, Array] = {}
        if step.final_index is not None and step.final_obs is not None:
            finals = dict(zip(step.final_index.tolist(), step.final_obs, strict=True))
        obs = np.array(step.obs)
        self._first_obs = {index: obs[index] for index in finals}
        fresh = set() if step.valid is None else set(np.flatnonzero(~step.valid).tolist())
        self._resetting = set(np.flatnonzero(ended).tolist()) - finals.keys()
        rewards = step.rewards.tolist()
        terminateds = step.terminateds.tolist()
        truncateds = step.truncateds.tolist()
        infos = step_infos(step, self.num_envs)
        poll = opening_poll({index: {DEFAULT_AGENT_ID: obs[index]} for index in fresh})
        for index in range(self.num_envs):
            if index not in fresh:
                add_step(
                    poll,
                    index,
                    obs=finals.get(index, obs[index]),
                    reward=rewards[index],
                    terminated=terminateds[index],
                    truncated=truncateds[index],
                    info=infos[index],
                )
        self._stepped = poll

    def try_reset(self, env_id: Any) -> dict[Any, Any] | str | None:
        """Return the first observation of the episode that the copy began by itself."""
        if env_id in self._first_obs:
            return {DEFAULT_AGENT_ID: self._first_obs.pop(env_id)}
        return ASYNC_RESET_RETURN if env_id in self._resetting else None

    def in_lockstep(self, horizon: int | None = None) -> LockstepEnv:
        """See `BaseEnv.in_lockstep`."""
        self.lockstep_env.limit_episodes(horizon)
        return self.lockstep_env

    def get_unwrapped(self) -> Sequence[Any]:
        """Return the environment objects if they live in this process."""
        return self.lockstep_env.unwrapped

    def take_finished_games(self) -> list[FinishedGame] | None:
        """See `BaseEnv.take_finished_games`."""
        return self.lockstep_env.take_finished_games()

    def stop(self) -> None:
        """Close the copies."""
        self.lockstep_env.close()


def split_infos(infos: Mapping[str, Any], num_envs: int) -> list[dict[str, Any]]:
    """Return each copy's own info.

    An entry without a mask is for all copies: an array, list or tuple of length N has a value per
    copy; any other value is shared.
    """
    rows: list[dict[str, Any]] = [{} for _ in range(num_envs)]
    for key, value in infos.items():
        if isinstance(key, str) and key.startswith("_") and key[1:] in infos:
            continue
        mask = infos.get(f"_{key}")
        indices = range(num_envs) if mask is None else np.flatnonzero(mask).tolist()
        if isinstance(value, Mapping):
            values: Any = split_infos(value, num_envs)
        elif isinstance(value, np.ndarray) and value.ndim and len(value) == num_envs:
            # Copied, because the environment may overwrite its arrays.
            values = value.tolist() if value.ndim == 1 else [np.array(row) for row in value]
        elif isinstance(value, list | tuple) and len(value) == num_envs:
            values = value
        else:
            values = [value] * num_envs
        for index in indices:
            rows[index][key] = values[index]
    return rows


def step_infos(step: VectorStep, num_envs: int) -> list[dict[str, Any]]:
    """Return the info of each copy's step, even if the copy was reset within that step."""
    infos = step.infos or {}
    rows = split_infos(
        {key: value for key, value in infos.items() if key not in _OF_THE_STEP}, num_envs
    )
    finals = infos.get(_FINAL_INFO)
    if finals is not None and step.final_index is not None:
        final_rows = split_infos(finals, num_envs)
        for index in step.final_index.tolist():
            rows[index] = final_rows[index]
    return rows


def training_disabled(step: VectorStep, num_envs: int) -> list[int]:
    """Return the copies whose step must not be trained on: its info has a false
    ``training_enabled``.
    """
    infos = step.infos or {}
    if _TRAINING not in infos and _TRAINING not in infos.get(_FINAL_INFO, ()):
        return []
    rows = step_infos(step, num_envs)
    return [
        index
        for index, info in enumerate(rows)
        if not info.get(_TRAINING, True) and (step.valid is None or step.valid[index])
    ]
