"""VectorEnv: several environments that step in one call but reset one by one, and its form as a
BaseEnv.

``Copies`` is a VectorEnv of gym-like environments, which step in turn in the calling thread;
observations can be nested. ``SerialEnv`` is its LockstepEnv, for observations that are single
arrays.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from itertools import compress
from numbers import Integral
from typing import Any

import numpy as np
from gymnasium import spaces

from aiorl.data.actions import rows_of
from aiorl.data.columns import DEFAULT_AGENT_ID, Array, Bools
from aiorl.data.gym_spaces import gymnasium_space
from aiorl.env.base_env import (
    ALL_AGENTS,
    ByAgent,
    FinishedGame,
    LockstepEnv,
    MultiEnvDict,
    Poll,
    SettingsChange,
    SteppedBaseEnv,
    TrainingDisabled,
    VectorStep,
    already_ended,
    env_seeds,
    pass_settings,
)
from aiorl.env.checks import (
    NestedCheck,
    ObservationCheck,
    as_reward,
    check_flags,
    check_rewards,
    raise_env_fault,
)
from aiorl.env.gym_like import (
    check_gym_like,
    check_seedable,
    close_all,
    copied,
    episode_limit,
    finished_games,
    game_counters,
    innermost,
    is_pair,
    reset_env,
    seed_env,
    to_five_values,
    with_settings,
)
from aiorl.errors import EnvContractError, UnsupportedEnvError
from aiorl.process.log_once import report

_UNKNOWN_STEP = -1  # the environments of a VectorEnv are at different steps
_NAMES = ("observations", "rewards", "terminateds", "truncateds", "infos")
_OLD_NAMES = ("observations", "rewards", "dones", "infos")
_NEVER = sys.maxsize
_NUMBERS = (float, int, np.floating, np.integer)
_GOES_ON = {DEFAULT_AGENT_ID: False, ALL_AGENTS: False}
_HAS_ENDED = {DEFAULT_AGENT_ID: True, ALL_AGENTS: True}
"""Flags of a single-agent environment, shared by all polls."""


class VectorEnv(ABC):
    """Group of environments that step together; subclass it to vectorise an environment yourself.

    Attributes:
        num_envs: number of environments N.
        observation_space: space of one environment.
        action_space: space of one environment.
    """

    num_envs: int
    observation_space: Any = None
    action_space: Any = None

    @abstractmethod
    def vector_reset(self) -> Sequence[Any]:
        """Begin new episodes in all N environments and return their first observations."""

    @abstractmethod
    def reset_at(self, index: int) -> Any:
        """Begin a new episode in the environment with this index, and return its first
        observation.
        """

    @abstractmethod
    def vector_step(self, actions: Sequence[Any]) -> tuple[Sequence[Any], ...]:
        """Step every environment.

        Args:
            actions: N actions.

        Returns:
            Observations, rewards, terminateds, truncateds and infos, N of each; or, in the old
            form, observations, rewards, dones and infos.
        """

    def get_unwrapped(self) -> Sequence[Any]:
        """Return the environment objects behind this one; may be empty."""
        return []

    def in_lockstep(self, horizon: int | None = None) -> LockstepEnv | None:
        """Return the same environments in lockstep, as whole arrays; see `BaseEnv.in_lockstep`."""
        return None

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release all resources; can be called more than once."""


class VectorBaseEnv(SteppedBaseEnv):
    """VectorEnv as a BaseEnv: every poll returns all of its environments."""

    def __init__(self, vector_env: VectorEnv, *, env_id: str = "vector environment") -> None:
        """Take over the environments; they are closed with this object.

        Raises:
            UnsupportedEnvError: its ``num_envs`` is not a whole number of at least 1.
        """
        self.vector_env = vector_env
        num_envs = getattr(vector_env, "num_envs", None)
        if not isinstance(num_envs, Integral) or num_envs < 1:
            raise UnsupportedEnvError(
                f"num_envs of {type(vector_env).__name__} is {num_envs!r}, expected a whole number"
                " of at least 1"
            )
        self.num_envs = int(num_envs)
        self.observation_space = gymnasium_space(vector_env.observation_space)
        self.action_space = gymnasium_space(vector_env.action_space)
        self._env_id = getattr(vector_env, "env_id", env_id)
        self._closed = False
        self._ended: set[int] = set()
        if isinstance(vector_env, Copies):
            self._games = vector_env.games
        else:
            self._games = game_counters(vector_env.get_unwrapped())

    def _reset_all(self) -> MultiEnvDict:
        obs = self._guarded("vector_reset", self.vector_env.vector_reset)
        if is_pair(obs) and self._are_infos(obs[1]):
            obs = obs[0]
        self._check_length("observations", obs)
        return {index: {DEFAULT_AGENT_ID: value} for index, value in enumerate(obs)}

    def send_actions(self, action_dict: Mapping[Any, ByAgent]) -> None:
        """Step all environments; see BaseEnv.

        Raises:
            EnvContractError: an environment has no action, its episode has ended and it was not
                reset, or the step returned a value of the wrong form.
        """
        if self._ended:
            raise already_ended(self._env_id, min(self._ended), _UNKNOWN_STEP)
        agent = DEFAULT_AGENT_ID
        try:
            actions = [action_dict[index][agent] for index in range(self.num_envs)]
        except KeyError as error:
            raise EnvContractError(
                self._env_id,
                f"all {self.num_envs} environments step together, but some of them have no actions",
            ) from error
        result = self._guarded("vector_step", self.vector_env.vector_step, actions)
        if not isinstance(result, tuple | list) or len(result) not in (4, 5):
            form = f"{result!r:.200}"
            if isinstance(result, tuple | list):
                form = f"{len(result)} values"
            raise EnvContractError(
                self._env_id,
                f"vector_step returned {form}, expected 5 sequences (or 4)",
                step=_UNKNOWN_STEP,
            )
        names = _NAMES if len(result) == 5 else _OLD_NAMES
        for name, values in zip(names, result, strict=True):
            self._check_length(name, values)
        if len(result) == 4:
            rows = [to_five_values(row) for row in zip(*result, strict=True)]
            result = tuple(zip(*rows, strict=True))
        obs, rewards, terminateds, truncateds, infos = result
        self._stepped = Poll(
            obs={index: {agent: value} for index, value in enumerate(obs)},
            rewards={index: {agent: value} for index, value in enumerate(rewards)},
            terminateds=self._by_env(terminateds),
            truncateds=self._by_env(truncateds),
            infos={index: {agent: info} for index, info in compress(enumerate(infos), infos)},
            off_policy_actions={},
        )

    def try_reset(self, env_id: Any) -> dict[Any, Any]:
        """Reset one environment immediately."""
        self._ended.discard(env_id)
        return {DEFAULT_AGENT_ID: self._guarded("reset_at", self.vector_env.reset_at, env_id)}

    def get_unwrapped(self) -> Sequence[Any]:
        """See `BaseEnv.get_unwrapped`."""
        return self.vector_env.get_unwrapped()

    def in_lockstep(self, horizon: int | None = None) -> LockstepEnv | None:
        """See `BaseEnv.in_lockstep`."""
        return self.vector_env.in_lockstep(horizon)

    def change_settings(self, change: SettingsChange) -> None:
        """See `BaseEnv.change_settings`."""
        if isinstance(self.vector_env, Copies):
            self.vector_env.change_settings(change)
        else:
            pass_settings(self.vector_env, change)

    def take_finished_games(self) -> list[FinishedGame] | None:
        """See `BaseEnv.take_finished_games`."""
        return finished_games(self._games)

    def stop(self) -> None:
        """Close the environments."""
        if not self._closed:
            self._closed = True
            self.vector_env.close()

    def _guarded(self, doing: str, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            raise_env_fault(self._env_id, doing, error, index=0, step=_UNKNOWN_STEP)

    def _by_env(self, flags: Sequence[Any]) -> MultiEnvDict:
        by_env = dict.fromkeys(range(self.num_envs), _GOES_ON)
        for index, flag in compress(enumerate(flags), flags):
            check_flags((flag,), self._env_id, index, _UNKNOWN_STEP)
            by_env[index] = _HAS_ENDED
            self._ended.add(index)
        return by_env

    def _check_length(self, name: str, values: Any) -> None:
        # The first test is for speed: most values are lists, and the others take longer.
        is_sequence = type(values) is list or (
            hasattr(values, "__len__") and not isinstance(values, Mapping)
        )
        if not is_sequence or len(values) != self.num_envs:
            raise EnvContractError(
                self._env_id,
                f"it returned {values!r:.200} as {name}, expected a sequence of {self.num_envs}",
                step=_UNKNOWN_STEP,
            )

    def _are_infos(self, value: Any) -> bool:
        return (
            isinstance(value, Sequence)
            and len(value) == self.num_envs
            and all(isinstance(info, Mapping) for info in value)
        )


class StepResults:
    """Results of the last step of N copies, apart from their observations; each step fills the same
    arrays.

    Attributes:
        rewards: [N] float64.
        terminateds: [N] bool, ended in a terminal state.
        truncateds: [N] bool, cut by a time limit or horizon.
        infos: info of each copy; a copy without one has an empty dict.
        training_disabled: True once an info had a false ``training_enabled``.
        is_dirty: True if there are flags or infos to clear.
    """

    def __init__(self, num_envs: int) -> None:
        """Begin without rewards, ends and infos."""
        self.rewards = np.zeros(num_envs, np.float64)
        self.terminateds = np.zeros(num_envs, np.bool_)
        self.truncateds = np.zeros(num_envs, np.bool_)
        self.infos: list[Any] = [{}] * num_envs
        self.training_disabled = False
        self.is_dirty = False

    def clear(self) -> None:
        """Remove the flags and infos of the last step."""
        self.terminateds.fill(False)
        self.truncateds.fill(False)
        self.infos = [{}] * len(self.infos)
        self.is_dirty = False

    def truncate(self, cut: Bools) -> None:
        """Truncate the episodes of some copies.

        Args:
            cut: [N] True for each of them.
        """
        self.truncateds |= cut
        self.is_dirty = True


class Copies(VectorEnv):
    """N gym-like environments and the results of their last step.

    Attributes:
        env_id: name for messages.
        envs: the environments, including their wrappers.
        results: results of the last step.
        can_begin: True if some copies can step before the actions of the others are known, see
            ``begin``.
        senders: if ``can_begin``, objects with a method ``send`` that begins a copy's step unless
            it is under way.
        step_count: number of steps taken.
        started_at: [N] value of ``step_count`` when the copy's episode began.
        games: the copies' counters of real games; None unless all have one.
    """

    can_begin: bool = False
    senders: Sequence[Any] = ()

    def __init__(
        self,
        envs: Sequence[Any],
        *,
        env_id: str = "environment",
        seed: int | None = None,
    ) -> None:
        """Take over the copies; they are closed with this object.

        Args:
            envs: copies with equal spaces, in any of Gym's dialects.
            env_id: name for messages.
            seed: the worker's seed; copy ``v`` is seeded with ``seed + SEED_STRIDE * v`` before its
                first episode.

        Raises:
            UnsupportedEnvError: an object is not gym-like.
            ConfigError: a seed is given, but an environment cannot be seeded.
        """
        for env in envs:
            check_gym_like(env, env_id)
            if seed is not None:
                check_seedable(env, env_id)
        self.env_id = env_id
        self.envs = list(envs)
        self.num_envs = len(envs)
        self.observation_space = gymnasium_space(envs[0].observation_space)
        self.action_space = gymnasium_space(envs[0].action_space)
        self.seeds: list[int | None] = [None] * len(envs)
        if seed is not None:
            self.seed(seed)
        self.nested = NestedCheck(env_id, self.observation_space)
        self.results = StepResults(len(envs))
        self.step_count = 0
        self.started_at = np.zeros(len(envs), np.int64)
        self.games = game_counters(envs)
        self._steps = [env.step for env in envs]
        self._changes: dict[int, SettingsChange] = {}

    @property
    def check(self) -> ObservationCheck | None:
        """Check of an observation that is a single array; else None."""
        return self.nested.leaf

    def seed(self, seed: int) -> None:
        """Seed the copies as in the constructor; call it before their next episodes."""
        self.seeds = list(env_seeds(seed, self.num_envs))

    def change_settings(self, change: SettingsChange) -> None:
        """Give each copy other settings before its next episode."""
        self._changes = dict.fromkeys(range(self.num_envs), change)

    def _take_settings(self, index: int) -> None:
        """Give a copy the settings that wait for it; a new one takes its place if necessary."""
        change = self._changes.pop(index)
        env = with_settings(self.envs[index], change, index)
        if env is self.envs[index]:
            return
        check_gym_like(env, self.env_id)
        self.envs[index] = env
        self._steps[index] = env.step
        seed = change.seed_of(index)
        if seed is not None:
            self.seeds[index] = seed
        if self.games is not None:
            self.games[:] = game_counters(self.envs) or []

    def new_rows(self) -> Any:
        """Return storage for an observation of each copy: an array, or a list if observations are
        not single arrays.
        """
        if self.check is None:
            return [None] * len(self.envs)
        return np.empty((len(self.envs), *self.check.shape), self.check.dtype)

    def first_obs(self, index: int) -> Any:
        """Begin a new episode in one copy; return its first observation, in memory that the copy
        may reuse.

        Raises:
            EnvError: the environment raised, or its observation does not fit its space.
        """
        self.started_at[index] = self.step_count
        try:
            if index in self._changes:
                self._take_settings(index)
            env = self.envs[index]
            obs, _ = reset_env(env, seed_env(env, self.seeds[index]))
            obs = self.nested.coerce(obs, index, 0)
        except Exception as error:
            raise_env_fault(self.env_id, "reset", error, index=index, step=0)
        self.seeds[index] = None
        return obs

    def begin_episodes(self, rows: Array, indices: Sequence[int]) -> None:
        """Begin a new episode in some copies and write their first observations to ``rows``.

        See ``first_obs``.
        """
        for index in indices:
            rows[index] = self.first_obs(index)

    def begin(self, copies: slice, actions: Iterable[Any]) -> None:
        """Begin the step of some copies, if ``can_begin``; ``step_into`` gets all actions and waits
        for the results.
        """
        for sender, action in zip(self.senders[copies], actions, strict=True):
            sender.send(action)

    def step_into(self, rows: MutableSequence[Any] | Array, actions: Iterable[Any]) -> bool:
        """Step every copy; write the observations to ``rows`` and the rest to ``results``.

        Returns:
            True if an episode ended.

        Raises:
            EnvError: an environment raised, or returned a value that does not fit.
        """
        results = self.results
        if results.is_dirty:  # most steps have no flags and no infos
            results.clear()
        if self.can_begin:
            actions = list(actions)
            self.begin(slice(None), actions)
        self.step_count += 1
        # Local names, because the loop runs once for each environment step of a worker.
        rewards = results.rewards
        check = self.nested.leaf
        shape = getattr(check, "shape", None)
        dtype = getattr(check, "dtype", None)
        index = 0
        ended = False
        try:
            for index, (step, action) in enumerate(zip(self._steps, actions, strict=True)):
                returned = step(action)
                try:
                    obs, reward, terminated, truncated, info = returned
                except (TypeError, ValueError):
                    obs, reward, terminated, truncated, info = to_five_values(returned)
                if type(obs) is not np.ndarray or obs.shape != shape or obs.dtype is not dtype:
                    obs = (check or self.nested).coerce(obs, index, self.step_of(index))
                rows[index] = obs
                # An array would convert "1" to 1 and None to NaN.
                if type(reward) is not float and not isinstance(reward, _NUMBERS):
                    reward = as_reward(reward, self.env_id, index, self.step_of(index))
                rewards[index] = reward
                if terminated or truncated:
                    check_flags((terminated, truncated), self.env_id, index, self.step_of(index))
                    results.terminateds[index] = terminated
                    results.truncateds[index] = truncated
                    results.is_dirty = True
                    ended = True
                if info:
                    results.infos[index] = info
                    results.is_dirty = True
                    if "training_enabled" in info and not info["training_enabled"]:
                        results.training_disabled = True
        except Exception as error:
            raise_env_fault(self.env_id, "step", error, index=index, step=self.step_of(index))
        if not math.isfinite(sum(rewards.tolist())):  # large values can also overflow
            check_rewards(self.env_id, rewards, self.step_of)
        if check is not None:
            assert isinstance(rows, np.ndarray), "observations as arrays need rows in an array"
            check.check_values(rows, self.step_of)
        return ended

    def vector_reset(self) -> Sequence[Any]:
        """See `VectorEnv.vector_reset`."""
        return [self.reset_at(index) for index in range(self.num_envs)]

    def reset_at(self, index: int) -> Any:
        """See VectorEnv and ``first_obs``."""
        return copied(self.first_obs(index))

    def vector_step(self, actions: Sequence[Any]) -> tuple[Sequence[Any], ...]:
        """See VectorEnv and ``step_into``."""
        rows = self.new_rows()  # those of the previous step may still be in use
        self.step_into(rows, actions)
        results = self.results
        return (
            list(rows),
            results.rewards.tolist(),
            results.terminateds.tolist(),
            results.truncateds.tolist(),
            results.infos,
        )

    def in_lockstep(self, horizon: int | None = None) -> LockstepEnv | None:
        """See `VectorEnv.in_lockstep`."""
        return None if self.check is None else SerialEnv(self, horizon=horizon)

    def take_finished_games(self) -> list[FinishedGame] | None:
        """See `BaseEnv.take_finished_games`."""
        return finished_games(self.games)

    def get_unwrapped(self) -> Sequence[Any]:
        """Return the copies, including their wrappers."""
        return list(self.envs)

    def step_of(self, index: int) -> int:
        """Return the number of steps of a copy's episode so far."""
        return int(self.step_count - self.started_at[index])

    def close(self) -> None:
        """Close every copy, even if closing one of them raises."""
        close_all(self.envs)


class SerialEnv(LockstepEnv):
    """Copies as whole arrays, each reset as soon as its episode ends.

    Infos are dropped, except for a false ``training_enabled``: it makes ``step`` raise
    TrainingDisabled.
    """

    can_cut = True

    def __init__(
        self,
        envs: Sequence[Any] | Copies,
        *,
        env_id: str = "environment",
        horizon: int | None = None,
    ) -> None:
        """Take over the environments; they are closed with this object.

        Args:
            envs: copies with equal spaces; an observation is a single array.
            env_id: name for messages.
            horizon: truncate episodes at this many steps; None or 0 = the environment's own limit,
                which is enforced here, too.

        Raises:
            ConfigError: the horizon is above the environment's own limit.
            UnsupportedEnvError: an object is not gym-like.
        """
        copies = envs if isinstance(envs, Copies) else Copies(envs, env_id=env_id)
        self._copies = copies
        assert copies.check is not None, "observations are single arrays"
        self.env_id = copies.env_id
        self.num_envs = copies.num_envs
        self.observation_space = copies.observation_space
        self.action_space = copies.action_space
        self.can_begin = copies.can_begin
        self.max_episode_steps = episode_limit(copies.envs[0])
        self.limit_episodes(horizon)
        self._first_cut = _NEVER  # before this step, no episode reaches max_episode_steps
        # The rows of other spaces have the form that `sample` returns: NumPy integers or arrays.
        space = self.action_space
        self._has_scalar_actions = isinstance(space, spaces.Box) and space.shape == ()
        self._obs: Array = copies.new_rows()
        self._result = VectorStep(
            obs=self._obs,
            rewards=copies.results.rewards,
            terminateds=copies.results.terminateds,
            truncateds=copies.results.truncateds,
        )

    def reset(self, seeds: Sequence[int] | None = None) -> Array:
        """Begin new episodes and return their first observations; see LockstepEnv."""
        copies = self._copies
        if self.max_episode_steps:
            self._first_cut = copies.step_count + self.max_episode_steps
        if seeds is not None:
            copies.seeds = [int(seed) for seed in seeds]
        copies.begin_episodes(self._obs, range(self.num_envs))
        return self._obs

    def begin(self, copies: slice, actions: Array) -> None:
        """See `LockstepEnv.begin`."""
        self._copies.begin(copies, actions)

    def step(self, actions: Array) -> VectorStep:
        """Step every copy in turn; see LockstepEnv."""
        result = self._result
        copies = self._copies
        obs_rows = self._obs
        result.final_index = None
        result.final_obs = None
        action_rows: Iterable[Any] = actions
        if self._has_scalar_actions:
            action_rows = rows_of(actions)
        ended = copies.step_into(obs_rows, action_rows)
        if copies.results.training_disabled:
            raise TrainingDisabled(self.env_id)
        if copies.step_count >= self._first_cut:
            ended |= self._cut_at_limit(self.max_episode_steps or _NEVER)
        if ended:
            indices = np.flatnonzero(result.terminateds | result.truncateds)
            report("infos", copies.results.infos[indices[0]])
            result.final_index = indices
            result.final_obs = obs_rows[indices]
            copies.begin_episodes(obs_rows, indices.tolist())
        return result

    def _cut_at_limit(self, limit: int) -> bool:
        """Cut the episodes that have reached the limit, and compute the earliest step at which
        another one can.
        """
        copies = self._copies
        ended = self._result.terminateds | self._result.truncateds
        cut = (copies.step_count - copies.started_at >= limit) & ~ended
        copies.results.truncate(cut)
        next_start = np.where(ended | cut, copies.step_count, copies.started_at)
        self._first_cut = int(next_start.min()) + limit
        return bool(cut.any())

    def take_finished_games(self) -> list[FinishedGame] | None:
        """See `LockstepEnv.take_finished_games`."""
        return self._copies.take_finished_games()

    def close(self) -> None:
        """Close every copy."""
        self._copies.close()

    @property
    def unwrapped(self) -> list[Any]:
        """Copies without their wrappers."""
        return [innermost(env) for env in self._copies.envs]
