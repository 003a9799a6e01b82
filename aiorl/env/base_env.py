"""BaseEnv: environments that act out of lockstep; the general sampler drives nothing else.

A sampler repeats: ``poll`` what has happened, decide, ``send_actions``. Everything is keyed by environment id
and then by agent id; a single-agent environment shows one agent, ``DEFAULT_AGENT_ID``. Flags also have the
key ``ALL_AGENTS``, true when the episode is over for everybody.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from aiorl.data.columns import DEFAULT_AGENT_ID
from aiorl.errors import EnvContractError, EnvError

if TYPE_CHECKING:
    from aiorl.env.lockstep import LockstepEnv

__all__ = [
    "ALL_AGENTS",
    "ASYNC_RESET_RETURN",
    "AgentId",
    "BaseEnv",
    "EnvId",
    "FinishedGame",
    "Poll",
    "as_poll",
    "opening_poll",
    "stepped_poll",
]

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
        infos: info dicts; only observed agents have one.
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
        {index: {agent: flag, ALL_AGENTS: flag} for index, flag in enumerate(terminateds)},
        {index: {agent: flag, ALL_AGENTS: flag} for index, flag in enumerate(truncateds)},
        {index: {agent: info or {}} for index, info in enumerate(infos)},
        {},
    )
