"""Interfaces that samplers drive: BaseEnv, one environment at a time, and LockstepEnv, all copies
together.

The sampler of a BaseEnv repeats three steps: ``poll`` the environments, decide, ``send_actions``.
Every dict is keyed by environment id and then by agent id. A single-agent environment has one
agent, ``DEFAULT_AGENT_ID``. Flags also have the key ``ALL_AGENTS``, which is true when the episode
is over for all agents.

The observations, rewards and flags of a LockstepEnv are whole arrays. Implementations reset a copy
in one of two ways, and a ``VectorStep`` shows which one:

* The same call resets the copy: ``obs`` holds the new episode's first observation. ``final_index``
  and ``final_obs`` list the true final observation.
* The next call resets the copy (Gymnasium's NEXT_STEP): ``obs`` holds the true final observation.
  The next call ignores that copy's action, returns its first observation and marks the row ``valid
  == False``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from gymnasium.spaces import Space

from aiorl.data.columns import DEFAULT_AGENT_ID, I64, Array, Bools
from aiorl.errors import ConfigError, EnvContractError, EnvError

ByAgent = Mapping[Any, Any]
"""Agent id -> value."""

MultiEnvDict = dict[Any, dict[Any, Any]]
"""Environment id -> agent id -> value."""

ALL_AGENTS: Final = "__all__"
"""Key of the flag for all agents of an environment."""

MAX_GONE_AGENTS: Final = 1000
"""Number of agents that have left an episode whose ids it remembers, or as many as are present if
these are more."""

ASYNC_RESET_RETURN: Final = "async_reset_return"
"""Result of ``try_reset`` if the first observation arrives with a later poll."""


class FinishedGame(NamedTuple):
    """Real game that ended; episodes can be shorter, for example one per life.

    Attributes:
        reward: sum of its rewards.
        length: its length in steps.
    """

    reward: float
    length: int


class Poll(NamedTuple):
    """Results since the actions were sent, for the environments that are ready.

    In the poll that opens an episode, rewards are None, flags False and infos empty.

    Attributes:
        obs: observations of the agents that were observed.
        rewards: rewards of any agents, raw; None in an opening poll.
        terminateds: flags by agent, and for ALL_AGENTS: ended in a terminal state.
        truncateds: flags by agent, and for ALL_AGENTS: cut off from outside.
        infos: info dicts, only of observed agents; empty ones can be left out.
        off_policy_actions: actions taken instead of the policy's.
        faults: environments that failed and were restarted. Their episodes end without a last
            observation, and a later poll opens new ones.
    """

    obs: MultiEnvDict
    rewards: MultiEnvDict
    terminateds: MultiEnvDict
    truncateds: MultiEnvDict
    infos: MultiEnvDict
    off_policy_actions: MultiEnvDict
    faults: Mapping[Any, EnvError] = {}

    @classmethod
    def empty(cls) -> Poll:
        """Return a poll without results, to add them to."""
        return cls(
            obs={},
            rewards={},
            terminateds={},
            truncateds={},
            infos={},
            off_policy_actions={},
        )

    def add(self, env_id: Any, results: Sequence[Any]) -> None:
        """Add the results of one environment.

        Args:
            env_id: id of the environment.
            results: observations, rewards, terminateds, truncateds and infos by agent.
        """
        # written out, since it is called for each step of each environment
        obs, rewards, terminateds, truncateds, infos = results
        self.obs[env_id] = obs
        self.rewards[env_id] = rewards
        self.terminateds[env_id] = terminateds
        self.truncateds[env_id] = truncateds
        self.infos[env_id] = infos

    @property
    def dones(self) -> MultiEnvDict:
        """Flags that are true if an agent is terminated or truncated."""
        dones: MultiEnvDict = {}
        for env_id, terminateds in self.terminateds.items():
            truncateds = self.truncateds[env_id]
            dones[env_id] = {
                agent_id: bool(terminateds.get(agent_id)) or bool(truncateds.get(agent_id))
                for agent_id in {**terminateds, **truncateds}
            }
        return dones


def as_poll(result: Any) -> Poll:
    """Convert the result of a BaseEnv's ``poll`` to a Poll.

    Args:
        result: a Poll, or a tuple of five dicts (obs, rewards, dones, infos, off_policy_actions),
            where each done counts as a terminal state.

    Raises:
        EnvContractError: the result is neither.
    """
    if isinstance(result, Poll):
        return result
    is_whole = isinstance(result, tuple) and len(result) in (5, 6)
    if not is_whole or not all(isinstance(part, Mapping) for part in result):
        form = f"{result!r:.200}"
        if is_whole:
            form = f"({', '.join(type(part).__name__ for part in result)})"
        raise EnvContractError(
            "BaseEnv",
            f"poll returned {form}, expected a Poll or a tuple of five dicts",
            step=-1,
        )
    if len(result) == 6:
        return Poll(*result)
    obs, rewards, dones, infos, off_policy_actions = result
    return Poll(
        obs=obs,
        rewards=rewards,
        terminateds=dones,
        truncateds={env_id: dict.fromkeys(flags, False) for env_id, flags in dones.items()},
        infos=infos,
        off_policy_actions=off_policy_actions,
    )


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """New settings for the environments of a worker, which each gets before its next episode.

    Attributes:
        config: all of their settings, in the form that their creator gets.
        make: makes a copy with these settings, given its index.
        seed: seed of the copies that are made; None leaves them unseeded.
    """

    config: Mapping[str, Any]
    make: Callable[[int], Any]
    seed: int | None

    def seed_of(self, index: int) -> int | None:
        """Return the seed of the copy with this index that is made; None leaves it unseeded."""
        return None if self.seed is None else self.seed + SEED_STRIDE * index


def pass_settings(holder: Any, change: SettingsChange) -> None:
    """Pass new settings to an object that holds several environments.

    Raises:
        ConfigError: its class has no method for them.
    """
    if not has_settings_method(holder):
        raise ConfigError(
            f"settings of environments can't change while they run: {type(holder).__name__} holds"
            " several environments and has no method set_env_config.",
            key="env_config",
            hint="Give it a method set_env_config(config), or begin another run.",
        )
    holder.set_env_config(change.config)


def has_settings_method(env: Any) -> bool:
    """Return True if an object takes new settings by a method ``set_env_config``."""
    return callable(getattr(env, "set_env_config", None))


class BaseEnv(ABC):
    """Group of environments, each with one or more agents, that report when they are ready.

    Attributes:
        observation_space: space of one agent, if all have the same; else None.
        action_space: space of one agent, if all have the same; else None.
    """

    observation_space: Any = None
    action_space: Any = None

    @abstractmethod
    def poll(self) -> Poll:
        """Wait until at least one environment is ready, and return the results of those that are.

        Raises:
            EnvError: an environment failed.
        """

    @abstractmethod
    def send_actions(self, action_dict: Mapping[Any, ByAgent]) -> None:
        """Send actions to the environments.

        Args:
            action_dict: environment id -> agent id -> action. It contains each environment of the
                last poll whose episode has not ended, if only with an empty dict.

        Raises:
            EnvError: an environment failed.
        """

    def waits_for(self) -> str:
        """Return for whom ``poll`` waits now, if it may take any time, such as "clients"; "" if it
        doesn't wait, or waits for the environment itself.

        It is called in any thread.
        """
        return ""

    def try_reset(self, env_id: Any) -> dict[Any, Any] | str | None:
        """Begin a new episode in one environment.

        Args:
            env_id: id of the environment.

        Returns:
            Observations by agent; None if environments of this kind cannot be reset;
            ASYNC_RESET_RETURN if the observations arrive with a later poll.
        """
        return None

    @property
    def can_reset(self) -> bool:
        """True if the sampler can reset the environments, which a horizon requires."""
        return type(self).try_reset is not BaseEnv.try_reset

    def in_lockstep(self, horizon: int | None = None) -> LockstepEnv | None:
        """Return the same environments in lockstep, as whole arrays; None if they cannot step
        together.

        Call it at most once, before any other method, and then use only one of the two objects. The
        first ``reset`` applies the seed that this object was made with.

        Args:
            horizon: truncate episodes at this many steps; None or 0 = the environments' own limit.

        Raises:
            ConfigError: the environments cannot have this horizon.
        """
        return None

    def change_settings(self, change: SettingsChange) -> None:
        """Give the environments other settings, each before its next episode; called between two
        steps.

        A subclass of yours gets them by a method ``set_env_config(config)``.

        Args:
            change: the settings.

        Raises:
            ConfigError: it has none.
        """
        pass_settings(self, change)

    def get_unwrapped(self) -> Sequence[Any]:
        """Return the environment objects behind this one, including their wrappers; may be
        empty.
        """
        return []

    def take_finished_games(self) -> list[FinishedGame] | None:
        """Return the real games that ended since the last call; None unless every environment
        counts them.
        """
        return None

    def place_of(self, env_id: Any) -> tuple[str, int]:
        """Return the name of the environment with this ``env_id``, and the index of its copy, for
        messages.
        """
        if type(env_id) is int:
            return getattr(self, "_env_id", "") or type(self).__name__, env_id
        return str(env_id), 0

    def interrupt(self) -> None:
        """Make a waiting ``poll`` and all later ones raise, if polls of this kind wait; call before
        ``stop``.

        Any thread may call this method. It never waits.
        """
        return

    def stop(self) -> None:
        """Release all resources; can be called more than once."""
        for env in self.get_unwrapped():
            close = getattr(env, "close", None)
            if callable(close):
                close()


class SteppedBaseEnv(BaseEnv):
    """BaseEnv that steps in ``send_actions``, in the calling thread; the next poll returns the
    results.
    """

    _env_id: str
    _stepped: Poll | None = None
    _is_started = False

    @abstractmethod
    def _reset_all(self) -> MultiEnvDict:
        """Reset every environment and return the first observations."""

    def poll(self) -> Poll:
        """Return the results of the environments that got actions; the first poll resets all of
        them.
        """
        if not self._is_started:
            first = opening_poll(self._reset_all())
            self._is_started = True  # only now: after a failure, the next poll resets all again
            return first
        poll = self._stepped
        self._stepped = None
        if poll is None:
            raise EnvContractError(
                self._env_id, "it was polled twice without any actions in between"
            )
        return poll


def already_ended(env_id: str, index: int, step: int) -> EnvContractError:
    """Return the error for an action that is sent to a copy after its episode has ended.

    Args:
        env_id: name of the environment.
        index: index of the copy.
        step: number of steps of its episode; -1 if unknown.
    """
    return EnvContractError(
        env_id,
        "it got actions after its episode had ended; call try_reset first",
        vector_index=index,
        step=step,
    )


def opening_poll(obs: MultiEnvDict) -> Poll:
    """Return the poll that opens episodes with these observations."""
    flags = {
        env_id: {**dict.fromkeys(agents, False), ALL_AGENTS: False}
        for env_id, agents in obs.items()
    }
    return Poll(
        obs=obs,
        rewards={env_id: dict.fromkeys(agents) for env_id, agents in obs.items()},
        terminateds=flags,
        truncateds={env_id: dict(by_agent) for env_id, by_agent in flags.items()},
        infos={env_id: {agent_id: {} for agent_id in agents} for env_id, agents in obs.items()},
        off_policy_actions={},
    )


def add_step(
    poll: Poll,
    index: Any,
    *,
    obs: Any,
    reward: float,
    terminated: bool,
    truncated: bool,
    info: dict[str, Any],
) -> None:
    """Add the step of a single-agent environment to a poll."""
    agent = DEFAULT_AGENT_ID
    results = (
        {agent: obs},
        {agent: reward},
        {agent: terminated, ALL_AGENTS: terminated},
        {agent: truncated, ALL_AGENTS: truncated},
        {agent: info},
    )
    poll.add(index, results)


SEED_STRIDE = 1_000_000
"""Distance between the seeds of two copies: copy ``v`` gets ``worker_seed + SEED_STRIDE * v``."""


def env_seeds(seed: int, num_envs: int) -> list[int]:
    """Return the seed of each copy, given the worker's seed."""
    return [seed + SEED_STRIDE * index for index in range(num_envs)]


def checked_horizon(horizon: int | None, limit: int | None) -> int | None:
    """Return the maximum episode length: the horizon if given (0 means not given), else the limit.

    Raises:
        ConfigError: the horizon is negative or above the environment's own limit.
    """
    if not horizon:
        return limit
    if horizon < 0:
        fault = "expected a number of steps > 0."
    elif limit is not None and horizon > limit:
        fault = f"but the environment ends its episodes after {limit} steps."
    else:
        return horizon
    raise ConfigError(
        f"horizon is {horizon}, {fault}",
        key="horizon",
        value=horizon,
        hint="Set a smaller horizon, or leave it out to use the environment's own limit.",
    )


class TrainingDisabled(Exception):
    """Error for a step whose info has a false ``training_enabled``: lockstep sampling cannot leave
    out its row.
    """

    def __init__(self, env_id: str) -> None:
        """Name the environment."""
        super().__init__(f"a step of environment {env_id!r} must not be trained on")


@dataclass(slots=True)
class VectorStep:
    """Results of one step of all copies. The next step may reuse the arrays: copy those that must
    last.

    Attributes:
        obs: [N, ...] observations to act on next.
        rewards: [N] float, raw.
        terminateds: [N] bool, ended in a terminal state.
        truncateds: [N] bool, cut by a time limit or horizon.
        final_index: [K] int64 copies that were reset within this step, ascending; None if there are
            none.
        final_obs: [K, ...] their true final observations.
        valid: [N] bool, False if the row was only the reset of a copy; None if all rows are
            transitions.
        infos: infos of all copies in one dict (see ``native_vector_env``); None or empty if there
            are none.
    """

    obs: Array
    rewards: Array
    terminateds: Bools
    truncateds: Bools
    final_index: I64 | None = None
    final_obs: Array | None = None
    valid: Bools | None = None
    infos: Mapping[str, Any] | None = None


class LockstepEnv(ABC):
    """N copies of an environment, stepped together.

    Attributes:
        env_id: the environment's name, for messages.
        num_envs: number of copies N.
        observation_space: space of one copy.
        action_space: space of one copy.
        max_episode_steps: length at which an episode is truncated; None if there is no known limit.
        first_seeds: seeds for a first ``reset`` without seeds; None for none.
        can_cut: True if it can truncate episodes at any length.
        can_begin: True if some copies can step before the actions of the others are known, see
            ``begin``.
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
    def reset(self, seeds: Sequence[int] | None = None) -> Array:
        """Begin new episodes in all copies and return their first observations [N, ...].

        Args:
            seeds: one seed per copy; None lets each continue with its random state.

        Raises:
            EnvError: the environment raised, or returned a value that does not fit its space.
        """

    @abstractmethod
    def step(self, actions: Array) -> VectorStep:
        """Step every copy once.

        Args:
            actions: [N, ...] one action per copy.

        Raises:
            EnvError: the environment raised, or returned a value that does not fit
                (BadObservationError, BadRewardError).
        """

    def begin(self, copies: slice, actions: Array) -> None:
        """Begin the step of some copies; the ``step`` that follows gets all actions and waits for
        the results.

        Args:
            copies: the copies to step.
            actions: [K, ...] one action for each of them.

        Raises:
            NotImplementedError: ``can_begin`` is False.
        """
        raise NotImplementedError(f"{type(self).__name__} steps all copies at once")

    def seed(self, seed: int) -> None:
        """Derive the seeds of a first ``reset`` without seeds from a worker's seed."""
        self.first_seeds = env_seeds(seed, self.num_envs)

    def limit_episodes(self, horizon: int | None) -> None:
        """Set the number of steps after which episodes are cut; call before the first reset.

        Args:
            horizon: steps; None or 0 = the environment's own limit.

        Raises:
            ConfigError: the horizon is above the environment's own limit, or differs from it and
                ``can_cut`` is False.
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
        """Release all resources; can be called more than once."""

    def take_finished_games(self) -> list[FinishedGame] | None:
        """Return the real games that ended since the last call; None unless every copy counts
        them.
        """
        return None

    @property
    def unwrapped(self) -> list[Any]:
        """Environment objects behind the copies if they live in this process; else empty."""
        return []
