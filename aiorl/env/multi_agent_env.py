"""MultiAgentEnv: several agents in one environment, each with its own observation, action and
reward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from aiorl.data.gym_spaces import gymnasium_space
from aiorl.env.base_env import (
    ALL_AGENTS,
    ByAgent,
    Poll,
    SettingsChange,
    SteppedBaseEnv,
    already_ended,
    env_seeds,
)
from aiorl.env.checks import as_rewards, check_flags, raise_env_fault
from aiorl.env.gym_like import check_seedable, close_all, is_pair, seed_env, with_settings
from aiorl.errors import EnvContractError

AgentDict = dict[Any, Any]
AgentResults = tuple[ByAgent, ByAgent, ByAgent, ByAgent, AgentDict]
"""Observations, rewards, terminateds, truncateds and infos by agent id, checked. Infos may be left
out."""


class MultiAgentEnv(ABC):
    """Environment with several agents; its arguments and results are dicts keyed by agent id.

    An agent exists from its first observation in an episode. An agent that is absent from the
    observations gets no action. An agent whose own flag is true gets no further action and must not
    be observed again in the episode. The key ``"__all__"`` ends the episode for all agents; every
    agent still alive then needs an observation.

    Attributes:
        observation_space: space of one agent, if all have the same; else None.
        action_space: space of one agent's actions, if all have the same; else None.
        observation_spaces: observation spaces by agent id if they are known; else None.
        action_spaces: action spaces by agent id if they are known; else None.
    """

    observation_space: Any = None
    action_space: Any = None
    observation_spaces: ByAgent | None = None
    action_spaces: ByAgent | None = None

    @abstractmethod
    def reset(
        self,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> Any:
        """Begin an episode.

        Args:
            seed: seed of the environment's random numbers; None continues with its random state.
            options: options of your own; samplers pass none.

        Returns:
            Observations and infos, both by agent; or only the observations.
        """

    @abstractmethod
    def step(self, action_dict: AgentDict) -> tuple[AgentDict, ...]:
        """Step once.

        Args:
            action_dict: one action per agent that was observed last and is not done.

        Returns:
            Observations, rewards, terminateds, truncateds and infos by agent, where both flags also
            have the key ``"__all__"``; or, in the old form, observations, rewards, dones and infos.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release all resources; can be called more than once."""


class MultiAgentCopy:
    """Copy of a MultiAgentEnv, with checks of the rules for its results.

    Attributes:
        env: the environment.
        change: other settings for it, from its next episode on; None for none.
    """

    def __init__(self, env: Any, env_id: str, index: int = 0, seed: int | None = None) -> None:
        """Take over a copy.

        Args:
            env: the copy.
            env_id: name for messages.
            index: index of the copy.
            seed: seed of its first episode; None for none.

        Raises:
            ConfigError: a seed is given, but the environment cannot be seeded.
        """
        if seed is not None:
            check_seedable(env, env_id)
        self.env = env
        self.change: SettingsChange | None = None
        self._env_id = env_id
        self._index = index
        self._seed = seed
        self._step = 0
        self._is_over = False

    def reset(self) -> AgentDict:
        """Begin a new episode and return its first observations.

        Raises:
            EnvError: the environment raised or broke a rule.
        """
        self._step = 0
        self._is_over = False
        try:
            self._take_settings()
            result = self.env.reset(**seed_env(self.env, self._seed))
        except Exception as error:
            raise_env_fault(self._env_id, "reset", error, index=self._index, step=0)
        self._seed = None
        obs = result[0] if is_pair(result) else result
        if not isinstance(obs, Mapping):
            raise self._broken(
                f"reset returned {type(obs).__name__}, expected observations by agent"
            )
        return dict(obs)

    def _take_settings(self) -> None:
        change = self.change
        self.change = None
        if change is None:
            return
        before = self.env
        self.env = with_settings(before, change, self._index)
        seed = change.seed_of(self._index)
        if self.env is not before and seed is not None:
            self._seed = seed

    def step(self, actions: ByAgent) -> AgentResults:
        """Step once, see MultiAgentEnv. Samplers check the observations and their agents.

        Raises:
            EnvError: the environment raised or broke a rule, or its episode has ended.
        """
        if self._is_over:
            raise already_ended(self._env_id, self._index, self._step)
        self._step += 1
        try:
            result = self.env.step(actions)
        except Exception as error:
            raise_env_fault(self._env_id, "step", error, index=self._index, step=self._step)
        if type(result) is not tuple or len(result) != 5:
            result = self._as_five(result)
        obs, rewards, terminateds, truncateds, infos = result
        are_dicts = (
            type(obs)
            is type(rewards)
            is type(terminateds)
            is type(truncateds)
            is type(infos)
            is dict
        )
        if not are_dicts:
            self._as_five(result)  # they may be other mappings
        # Each test by itself, because a loop over them would take a tenth of this method's time.
        if ALL_AGENTS not in terminateds:
            raise self._broken(f"terminateds have no key {ALL_AGENTS!r}; got {_keys(terminateds)}")
        if ALL_AGENTS not in truncateds:
            raise self._broken(f"truncateds have no key {ALL_AGENTS!r}; got {_keys(truncateds)}")
        if ALL_AGENTS in obs:
            raise self._broken(
                f"observations have the key {ALL_AGENTS!r}, which only flags can have"
            )
        if ALL_AGENTS in rewards:
            raise self._broken(f"rewards have the key {ALL_AGENTS!r}, which only flags can have")
        if infos and not infos.keys() <= obs.keys():
            unobserved = [agent_id for agent_id in infos if agent_id not in obs]
            raise self._broken(
                f"there are infos of agents that were not observed: {_keys(unobserved)}"
            )
        rewards = as_rewards(rewards, self._env_id, self._index, self._step)
        if any(terminateds.values()) or any(truncateds.values()):
            flags = (*terminateds.values(), *truncateds.values())
            check_flags(flags, self._env_id, self._index, self._step)
            self._is_over = bool(terminateds[ALL_AGENTS] or truncateds[ALL_AGENTS])
        return obs, rewards, terminateds, truncateds, infos

    def _as_five(self, result: Any) -> tuple[Any, ...]:
        """Convert a step's result that is not a tuple of five dicts: other mappings, or the old
        form.
        """
        is_whole = isinstance(result, tuple) and len(result) in (4, 5)
        if not is_whole or not all(isinstance(part, Mapping) for part in result):
            raise self._broken("step did not return a tuple of five dicts (or four, the old form)")
        if len(result) == 5:
            return tuple(result)
        obs, rewards, dones, infos = result
        return obs, rewards, *_split_dones(dones, infos), infos

    def _broken(self, message: str) -> EnvContractError:
        return EnvContractError(self._env_id, message, vector_index=self._index, step=self._step)


class MultiAgentBaseEnv(SteppedBaseEnv):
    """Copies of a MultiAgentEnv as a BaseEnv; a poll returns the copies that got actions."""

    def __init__(
        self,
        envs: Sequence[Any],
        *,
        env_id: str = "environment",
        seed: int | None = None,
    ) -> None:
        """Take over the copies; they are closed with this object.

        Args:
            envs: the copies.
            env_id: name for messages.
            seed: the worker's seed; copy ``v`` is seeded with ``seed + SEED_STRIDE * v`` before its
                first episode.
        """
        seeds: Sequence[int | None] = [None] * len(envs)
        if seed is not None:
            seeds = env_seeds(seed, len(envs))
        self.num_envs = len(envs)
        self.observation_space = gymnasium_space(getattr(envs[0], "observation_space", None))
        self.action_space = gymnasium_space(getattr(envs[0], "action_space", None))
        self._copies = [
            MultiAgentCopy(env, env_id, index, seeds[index]) for index, env in enumerate(envs)
        ]
        self._env_id = env_id
        self._closed = False

    def _reset_all(self) -> dict[Any, AgentDict]:
        return {index: copy.reset() for index, copy in enumerate(self._copies)}

    def send_actions(self, action_dict: Mapping[Any, ByAgent]) -> None:
        """Step the environments that have actions; see BaseEnv."""
        if self._stepped is None:
            self._stepped = Poll.empty()
        for index, actions in action_dict.items():
            self._stepped.add(index, self._copies[index].step(actions))

    def try_reset(self, env_id: Any) -> AgentDict:
        """Reset one environment immediately."""
        copy: MultiAgentCopy = self._copies[env_id]
        return copy.reset()

    def change_settings(self, change: SettingsChange) -> None:
        """See `BaseEnv.change_settings`."""
        for copy in self._copies:
            copy.change = change

    def get_unwrapped(self) -> Sequence[Any]:
        """Return the copies."""
        return [copy.env for copy in self._copies]

    def stop(self) -> None:
        """Close the copies."""
        if not self._closed:
            self._closed = True
            close_all([copy.env for copy in self._copies])


def _split_dones(dones: ByAgent, infos: ByAgent) -> tuple[AgentDict, AgentDict]:
    """Split the old form's dones into terminated and truncated flags, using ``TimeLimit.truncated``
    of the infos.
    """
    cut = {agent_id for agent_id, info in infos.items() if (info or {}).get("TimeLimit.truncated")}
    truncateds = {
        agent_id: bool(is_over) and agent_id in cut for agent_id, is_over in dones.items()
    }
    if dones.get(ALL_AGENTS):
        ended = [agent_id for agent_id, is_over in dones.items() if is_over]
        ended.remove(ALL_AGENTS)
        # The end is a truncation if it is one for all agents that end, or for all if none is named.
        truncateds[ALL_AGENTS] = bool(cut) and all(agent_id in cut for agent_id in ended or infos)
    terminateds = {
        agent_id: bool(is_over) and not truncateds[agent_id] for agent_id, is_over in dones.items()
    }
    return terminateds, truncateds


def _keys(keys: Any) -> str:
    return ", ".join(repr(key) for key in keys) or "none"
