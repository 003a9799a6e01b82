"""VectorEnv: several environments stepped by one call but reset one by one, and its form as a BaseEnv."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from aiorl.data.columns import DEFAULT_AGENT_ID
from aiorl.env.atari import finished_games, game_counters
from aiorl.env.base_env import BaseEnv, FinishedGame, Poll, opening_poll, stepped_poll
from aiorl.env.checks import raise_env_fault
from aiorl.env.gym_like import to_five_values
from aiorl.env.lockstep import LockstepEnv
from aiorl.errors import EnvContractError, UnsupportedEnvError

__all__ = ["VectorBaseEnv", "VectorEnv"]

_UNKNOWN_STEP = -1  # a VectorEnv's environments are at different ones
_NAMES = ("observations", "rewards", "terminateds", "truncateds", "infos")
_OLD_NAMES = ("observations", "rewards", "dones", "infos")


class VectorEnv(ABC):
    """Environments that step together; subclass it to vectorise an environment yourself.

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
        """First observations of new episodes in all N environments."""

    @abstractmethod
    def reset_at(self, index: int) -> Any:
        """First observation of a new episode in one environment."""

    @abstractmethod
    def vector_step(self, actions: Sequence[Any]) -> tuple[Sequence[Any], ...]:
        """Step every environment.

        Args:
            actions: N actions.
        Returns: observations, rewards, terminateds, truncateds and infos, N of each; or, the old form,
            observations, rewards, dones and infos.
        """

    def get_unwrapped(self) -> Sequence[Any]:
        """The environment objects behind this one; may be empty."""
        return []

    def in_lockstep(self, horizon: int | None = None) -> LockstepEnv | None:
        """The same environments as whole arrays; see BaseEnv."""
        return None

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release everything; may be called more than once."""


class VectorBaseEnv(BaseEnv):
    """A VectorEnv as a BaseEnv: every poll returns all of its environments."""

    def __init__(self, vector_env: VectorEnv, *, env_id: str = "vector environment") -> None:
        """Take over the environments; they are closed with this object.

        Raises:
            UnsupportedEnvError: it does not say how many environments it has.
        """
        self.vector_env = vector_env
        num_envs = getattr(vector_env, "num_envs", None)
        if not isinstance(num_envs, Integral) or num_envs < 1:
            raise UnsupportedEnvError(
                f"num_envs of {type(vector_env).__name__} is {num_envs!r}, expected a whole number of at least 1"
            )
        self.num_envs = int(num_envs)
        self.observation_space = vector_env.observation_space
        self.action_space = vector_env.action_space
        self._env_id = getattr(vector_env, "env_id", env_id)
        self._started = False
        self._closed = False
        self._result: tuple[Sequence[Any], ...] | None = None
        self._games = game_counters(vector_env.get_unwrapped())

    def poll(self) -> Poll:
        """The last step of every environment; the first poll resets them all."""
        if not self._started:
            obs = self._guarded("vector_reset", self.vector_env.vector_reset)
            if isinstance(obs, tuple) and len(obs) == 2 and self._are_infos(obs[1]):
                obs = obs[0]
            self._check_length("observations", obs)
            self._started = True
            return opening_poll({index: {DEFAULT_AGENT_ID: value} for index, value in enumerate(obs)})
        if self._result is None:
            raise EnvContractError(self._env_id, "it was polled twice, with no actions sent in between")
        obs, rewards, terminateds, truncateds, infos = self._result
        self._result = None
        return stepped_poll(obs, rewards, terminateds, truncateds, infos)

    def send_actions(self, action_dict: Mapping[Any, Mapping[Any, Any]]) -> None:
        """Step all environments; see BaseEnv.

        Raises:
            EnvContractError: an environment has no action, or the step returned what is no result.
        """
        agent = DEFAULT_AGENT_ID
        try:
            actions = [action_dict[index][agent] for index in range(self.num_envs)]
        except KeyError as error:
            raise EnvContractError(
                self._env_id, f"all {self.num_envs} environments step together, but there are no actions for all"
            ) from error
        result = self._guarded("vector_step", self.vector_env.vector_step, actions)
        if not isinstance(result, tuple | list) or len(result) not in (4, 5):
            given = f"{len(result)} values" if isinstance(result, tuple | list) else f"{result!r:.200}"
            message = f"vector_step returned {given}, expected 5 sequences (or 4)"
            raise EnvContractError(self._env_id, message, step=_UNKNOWN_STEP)
        for name, values in zip(_NAMES if len(result) == 5 else _OLD_NAMES, result, strict=True):
            self._check_length(name, values)
        if len(result) == 4:
            obs, rewards, dones, infos = result
            five = [to_five_values((None, None, done, info)) for done, info in zip(dones, infos, strict=True)]
            result = (obs, rewards, [values[2] for values in five], [values[3] for values in five], infos)
        self._result = tuple(result)

    def try_reset(self, env_id: Any) -> dict[Any, Any]:
        """Reset one environment at once."""
        return {DEFAULT_AGENT_ID: self._guarded("reset_at", self.vector_env.reset_at, env_id)}

    def get_unwrapped(self) -> Sequence[Any]:
        """See BaseEnv."""
        return self.vector_env.get_unwrapped()

    def in_lockstep(self, horizon: int | None = None) -> LockstepEnv | None:
        """See BaseEnv."""
        return self.vector_env.in_lockstep(horizon)

    def take_finished_games(self) -> list[FinishedGame] | None:
        """See BaseEnv."""
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
            raise_env_fault(self._env_id, doing, error, 0, _UNKNOWN_STEP)

    def _check_length(self, name: str, values: Any) -> None:
        if type(values) is not list and (isinstance(values, Mapping) or not hasattr(values, "__len__")):
            message = f"it returned {values!r:.200} as {name}, expected a sequence of {self.num_envs}"
            raise EnvContractError(self._env_id, message, step=_UNKNOWN_STEP)
        if len(values) != self.num_envs:
            message = f"it returned {len(values)} {name}, expected {self.num_envs}"
            raise EnvContractError(self._env_id, message, step=_UNKNOWN_STEP)

    def _are_infos(self, value: Any) -> bool:
        return (
            isinstance(value, Sequence)
            and len(value) == self.num_envs
            and all(isinstance(info, Mapping) for info in value)
        )
