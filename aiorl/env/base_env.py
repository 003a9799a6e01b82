"""The two interfaces that samplers drive: BaseEnv, one environment at a time, and LockstepEnv, all copies at once.

A sampler of a BaseEnv repeats: ``poll`` what has happened, decide, ``send_actions``. Everything is keyed by environment
id and then by agent id; a single-agent environment shows one agent, ``DEFAULT_AGENT_ID``. Flags also have the key
``ALL_AGENTS``, true when the episode is over for everybody.

The observations, rewards and flags of a LockstepEnv are whole arrays. Implementations reset a copy in one of two ways,
and a ``VectorStep`` says which happened:

* The same call resets the copy: ``obs`` holds the new episode's first observation, and ``final_index`` and
  ``final_obs`` list the true final one.
* The next call resets the copy (Gymnasium's NEXT_STEP): ``obs`` holds the true final observation; the next call ignores
  that copy's action, returns its first observation and marks the row ``valid == False``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from aiorl.data.columns import DEFAULT_AGENT_ID
from aiorl.errors import ConfigError, EnvContractError, EnvError

EnvId = Hashable
AgentId = Hashable
MultiEnvDict = dict[Any, dict[Any, Any]]
"""Environment id -> agent id -> value."""

ALL_AGENTS: Final = "__all__"
"""Key of the flag that speaks for all agents of an environment."""

ASYNC_RESET_RETURN: Final = "async_reset_return"
"""What ``try_reset`` gives when the first observation will come by a later poll."""


class FinishedGame(NamedTuple):
    """A real game that ended, where lives or other means end episodes earlier."""

    reward: float
    length: int


class Poll(NamedTuple):
    """What has happened since the actions were sent, for the environments that are ready.

    In the poll that opens an episode rewards are None, flags False and infos empty.

    Attributes:
        obs: observations of the agents that were observed.
        rewards: rewards of any agents, raw; None in an opening poll.
        terminateds: flags by agent, and for ALL_AGENTS: ended in a terminal state.
        truncateds: flags by agent, and for ALL_AGENTS: cut from outside.
        infos: info dicts, of observed agents only; empty ones may be left out.
        off_policy_actions: actions that were taken instead of the policy's.
        faults: environments that broke down and were restarted: their episodes are over without a last
            observation, and a later poll opens new ones.
    """

    obs: MultiEnvDict
    rewards: MultiEnvDict
    terminateds: MultiEnvDict
    truncateds: MultiEnvDict
    infos: MultiEnvDict
    off_policy_actions: MultiEnvDict
    faults: Mapping[Any, EnvError] = {}

    @property
    def dones(self) -> MultiEnvDict:
        """Flags that are either terminated or truncated."""
        return {
            env_id: {
                agent_id: bool(self.terminateds[env_id].get(agent_id)) or bool(self.truncateds[env_id].get(agent_id))
                for agent_id in {**self.terminateds[env_id], **self.truncateds[env_id]}
            }
            for env_id in self.terminateds
        }


def as_poll(result: Any) -> Poll:
    """Return what a BaseEnv returned as a Poll.

    Args:
        result: a Poll, or a tuple of five dicts (obs, rewards, dones, infos, off_policy_actions); such dones
            are taken for terminal states.

    Raises:
        EnvContractError: neither of the two.
    """
    if isinstance(result, Poll):
        return result
    is_whole = isinstance(result, tuple) and len(result) in (5, 6)
    if not is_whole or not all(isinstance(part, Mapping) for part in result):
        given = f"({', '.join(type(part).__name__ for part in result)})" if is_whole else f"{result!r:.200}"
        raise EnvContractError("BaseEnv", f"poll returned {given}, expected a Poll or a tuple of five dicts", step=-1)
    if len(result) == 6:
        return Poll(*result)
    obs, rewards, dones, infos, off_policy_actions = result
    truncateds = {env_id: dict.fromkeys(flags, False) for env_id, flags in dones.items()}
    return Poll(obs, rewards, dones, truncateds, infos, off_policy_actions)


class BaseEnv(ABC):
    """Some environments, each with some agents, that report when they are ready.

    Attributes:
        observation_space: space of one agent, where all have the same; else None.
        action_space: space of one agent, where all have the same; else None.
    """

    observation_space: Any = None
    action_space: Any = None

    @abstractmethod
    def poll(self) -> Poll:
        """What has happened; waits until at least one environment is ready.

        Raises:
            EnvError: an environment failed.
        """

    @abstractmethod
    def send_actions(self, action_dict: Mapping[Any, Mapping[Any, Any]]) -> None:
        """Hand over actions: environment id -> agent id -> action.

        Every environment of the last poll whose episode goes on is in it, if only with an empty dict.

        Raises:
            EnvError: an environment failed.
        """

    def try_reset(self, env_id: Any) -> dict[Any, Any] | str | None:
        """Begin a new episode in one environment.

        Returns:
            observations by agent; None if this kind cannot be reset; ASYNC_RESET_RETURN if they come by a
            later poll.
        """
        return None

    @property
    def can_reset(self) -> bool:
        """Whether its environments can be told to begin a new episode, so that a horizon can be honoured."""
        return type(self).try_reset is not BaseEnv.try_reset

    def in_lockstep(self, horizon: int | None = None) -> LockstepEnv | None:
        """The same environments, stepped together as whole arrays; None where that cannot be.

        Called at most once, and before anything else; whoever drives one of the two leaves the other alone. The first
        ``reset`` applies the seed that this object was made with.

        Args:
            horizon: truncate episodes at this many steps; None or 0 = the environments' own limit.

        Raises:
            ConfigError: a horizon that they cannot have.
        """
        return None

    def get_unwrapped(self) -> Sequence[Any]:
        """The environment objects behind this one, with the wrappers they were made with; may be empty."""
        return []

    def take_finished_games(self) -> list[FinishedGame] | None:
        """Real games that ended since the last call; None when not every environment keeps count of them."""
        return None

    def place_of(self, env_id: Any) -> tuple[str, int]:
        """Name of an environment, and which copy it is, for messages."""
        if type(env_id) is int:
            return getattr(self, "_env_id", "") or type(self).__name__, env_id
        return str(env_id), 0

    def interrupt(self) -> None:
        """Let a ``poll`` that waits for others raise, and every later one, where polls wait; before ``stop``.

        Any thread may call; it never waits itself.
        """
        return

    def stop(self) -> None:
        """Release everything; may be called more than once."""
        for env in self.get_unwrapped():
            close = getattr(env, "close", None)
            if callable(close):
                close()


class SteppedBaseEnv(BaseEnv):
    """A BaseEnv that steps in ``send_actions``, in the calling thread; the next poll returns what the steps gave."""

    _env_id: str
    _stepped: Poll | None = None
    _is_started = False

    @abstractmethod
    def _reset_all(self) -> MultiEnvDict:
        """First observations of every environment."""

    def poll(self) -> Poll:
        """Results of the environments that were acted on; the first poll resets them all."""
        if not self._is_started:
            first = opening_poll(self._reset_all())
            self._is_started = True
            return first
        poll, self._stepped = self._stepped, None
        if poll is None:
            raise EnvContractError(self._env_id, "it was polled twice, with no actions sent in between")
        return poll


def opening_poll(obs: MultiEnvDict) -> Poll:
    """The poll that opens episodes with these observations."""
    flags = {env_id: {**dict.fromkeys(agents, False), ALL_AGENTS: False} for env_id, agents in obs.items()}
    return Poll(
        obs,
        {env_id: dict.fromkeys(agents) for env_id, agents in obs.items()},
        flags,
        {env_id: dict(by_agent) for env_id, by_agent in flags.items()},
        {env_id: {agent_id: {} for agent_id in agents} for env_id, agents in obs.items()},
        {},
    )


def add_step(
    poll: Poll, index: Any, obs: Any, reward: float, terminated: bool, truncated: bool, info: dict[str, Any]
) -> None:
    """Add the step of an environment with one agent."""
    agent = DEFAULT_AGENT_ID
    poll.obs[index] = {agent: obs}
    poll.rewards[index] = {agent: reward}
    poll.terminateds[index] = {agent: terminated, ALL_AGENTS: terminated}
    poll.truncateds[index] = {agent: truncated, ALL_AGENTS: truncated}
    poll.infos[index] = {agent: info}


_FLAGS = [{DEFAULT_AGENT_ID: flag, ALL_AGENTS: flag} for flag in (False, True)]
"""Of an environment with one agent; most are False, so they are not made anew."""


def stepped_poll(
    obs: Sequence[Any],
    rewards: Sequence[float],
    terminateds: Sequence[bool],
    truncateds: Sequence[bool],
    infos: Sequence[Any],
) -> Poll:
    """The poll of environments 0, 1, ... with one agent each that stepped together."""
    agent = DEFAULT_AGENT_ID
    return Poll(
        {index: {agent: value} for index, value in enumerate(obs)},
        {index: {agent: value} for index, value in enumerate(rewards)},
        {index: _FLAGS[flag] for index, flag in enumerate(terminateds)},
        {index: _FLAGS[flag] for index, flag in enumerate(truncateds)},
        {index: {agent: info} for index, info in enumerate(infos) if info},
        {},
    )


SEED_STRIDE = 1_000_000
"""Copy ``v`` of a worker's environment is seeded with ``worker_seed + SEED_STRIDE * v``."""


def env_seeds(seed: int, num_envs: int) -> list[int]:
    """The seed of each copy, for a worker's seed."""
    return [seed + SEED_STRIDE * index for index in range(num_envs)]


def checked_horizon(horizon: int | None, limit: int | None) -> int | None:
    """Length at which episodes are cut: the horizon if given (0 counts as not given), else the limit.

    Raises:
        ConfigError: the horizon is negative or above the environment's own limit.
    """
    if not horizon:
        return limit
    if horizon < 0 or (limit is not None and horizon > limit):
        raise ConfigError(
            f"horizon is {horizon}, but the environment ends its episodes after {limit} steps."
            if horizon > 0
            else f"horizon is {horizon}, expected a number of steps > 0.",
            key="horizon",
            value=horizon,
            hint="Give a smaller horizon, or none to use the environment's own limit.",
        )
    return horizon


class TrainingDisabled(Exception):
    """A step's info has a ``training_enabled`` that is false: its row is to be left out, which lockstep cannot do."""

    def __init__(self, env_id: str) -> None:
        """Name the environment."""
        super().__init__(f"a step of environment {env_id!r} is not to be trained on")


@dataclass(slots=True)
class VectorStep:
    """What one step of all copies brought. The arrays may be reused by the next step: copy what must last.

    Attributes:
        obs: [N, ...] what to act on next.
        rewards: [N] float, raw.
        terminateds: [N] bool, ended in a terminal state.
        truncateds: [N] bool, cut by a time limit or horizon.
        final_index: [K] int64 copies that were reset inside this step, ascending; None when there are none.
        final_obs: [K, ...] their true final observations.
        valid: [N] bool, False where the row was only the reset of a copy; None when all are transitions.
        infos: what the copies said, all in one dict (see ``native_vector_env``); None or empty where nothing is known.
    """

    obs: NDArray[Any]
    rewards: NDArray[Any]
    terminateds: NDArray[np.bool_]
    truncateds: NDArray[np.bool_]
    final_index: NDArray[np.int64] | None = None
    final_obs: NDArray[Any] | None = None
    valid: NDArray[np.bool_] | None = None
    infos: Mapping[str, Any] | None = None


class LockstepEnv(ABC):
    """N copies of an environment, stepped together.

    Attributes:
        env_id: the environment's name, for messages.
        num_envs: number of copies N.
        observation_space: space of one copy.
        action_space: space of one copy.
        max_episode_steps: length at which an episode is truncated, None = never as far as is known.
        first_seeds: seeds of a first ``reset`` that is given none; None for none.
        can_cut: it truncates episodes at whatever length is asked for.
        can_begin: some copies can step while the actions of others are not known yet, see ``begin``.
    """

    env_id: str
    num_envs: int
    observation_space: Space[Any]
    action_space: Space[Any]
    max_episode_steps: int | None
    first_seeds: Sequence[int] | None = None
    can_cut: bool = False
    can_begin: bool = False

    @abstractmethod
    def reset(self, seeds: Sequence[int] | None = None) -> NDArray[Any]:
        """First observations [N, ...] of new episodes in all copies.

        Args:
            seeds: one seed per copy; None lets each go on with its random state.

        Raises:
            EnvError: the environment raised, or returned what does not fit its space.
        """

    @abstractmethod
    def step(self, actions: NDArray[Any]) -> VectorStep:
        """Step every copy once.

        Args:
            actions: [N, ...] one action per copy.

        Raises:
            EnvError: the environment raised, or returned what does not fit (BadObservationError,
                BadRewardError).
        """

    def begin(self, copies: slice, actions: NDArray[Any]) -> None:
        """Begin the step of some copies; the ``step`` that follows is given all actions and waits for it.

        Args:
            copies: which ones.
            actions: [K, ...] one action for each of them.

        Raises:
            NotImplementedError: there is no ``can_begin``.
        """
        raise NotImplementedError(f"{type(self).__name__} steps all copies at once")

    def seed(self, seed: int) -> None:
        """Seed the first ``reset`` that is given no seeds with a worker's seed."""
        self.first_seeds = env_seeds(seed, self.num_envs)

    def limit_episodes(self, horizon: int | None) -> None:
        """Cut episodes at this many steps; before the first reset.

        Args:
            horizon: steps; None or 0 = the environment's own limit.

        Raises:
            ConfigError: a horizon above the environment's own limit, or other than that where it cannot cut.
        """
        length = checked_horizon(horizon, self.max_episode_steps)
        if length != self.max_episode_steps and not self.can_cut:
            raise ConfigError(
                f"horizon is {horizon}, but {self.env_id!r} cannot cut its episodes there.",
                key="horizon",
                value=horizon,
                hint="Leave horizon out, or use vectorize: serial.",
            )
        self.max_episode_steps = length

    @abstractmethod
    def close(self) -> None:
        """Release everything; may be called more than once."""

    def take_finished_games(self) -> list[FinishedGame] | None:
        """Real games that ended since the last call; None when not every copy keeps count of them."""
        return None

    @property
    def unwrapped(self) -> list[Any]:
        """The environment objects behind the copies, where they live in this process; else empty."""
        return []
