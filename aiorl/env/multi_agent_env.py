"""MultiAgentEnv: several agents in one environment, each with its own observation, action and reward."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aiorl.env.base_env import ALL_AGENTS, BaseEnv, Poll
from aiorl.env.checks import as_rewards, raise_env_fault
from aiorl.env.gym_like import check_seedable, seed_env
from aiorl.env.lockstep import env_seeds
from aiorl.errors import BadObservationError, EnvContractError, UnsupportedEnvError

__all__ = ["AgentResults", "MultiAgentBaseEnv", "MultiAgentCopy", "MultiAgentEnv"]

AgentDict = dict[Any, Any]


class MultiAgentEnv(ABC):
    """An environment with several agents; all that goes in or out is a dict keyed by agent id.

    An agent exists from its first observation in an episode. One that is absent from an observation dict gets
    no action. One whose own flag is true gets no further action and must not be observed again in the episode.
    The key ``"__all__"`` ends the episode for everybody; every agent still alive then needs an observation.

    Attributes:
        observation_space: space of one agent, where all have the same; None if they differ.
        action_space: likewise.
        observation_spaces: spaces by agent id, where they are known; else None.
        action_spaces: likewise.
    """

    observation_space: Any = None
    action_space: Any = None
    observation_spaces: Mapping[Any, Any] | None = None
    action_spaces: Mapping[Any, Any] | None = None

    @abstractmethod
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode.

        Returns:
            observations and infos, both by agent; the observations alone will do.
        """

    @abstractmethod
    def step(self, action_dict: AgentDict) -> tuple[AgentDict, ...]:
        """Act.

        Args:
            action_dict: one action per agent that was observed last and is not done.
        Returns: observations, rewards, terminateds, truncateds and infos by agent, the flags with ``"__all__"``;
            or, the old form, observations, rewards, dones and infos.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release everything; may be called more than once."""


class AgentResults:
    """What one step of one environment gave, checked and complete.

    Attributes:
        obs, rewards, terminateds, truncateds, infos: by agent id.
    """

    __slots__ = ("infos", "obs", "rewards", "terminateds", "truncateds")

    def __init__(
        self, obs: AgentDict, rewards: AgentDict, terminateds: AgentDict, truncateds: AgentDict, infos: AgentDict
    ) -> None:
        """Hold the five results."""
        self.obs = obs
        self.rewards = rewards
        self.terminateds = terminateds
        self.truncateds = truncateds
        self.infos = infos


class MultiAgentCopy:
    """One copy of a MultiAgentEnv, and the rules its results must keep to."""

    def __init__(self, env: Any, env_id: str, index: int = 0, seed: int | None = None) -> None:
        """Take over a copy.

        Args:
            env: the copy.
            env_id: name for messages.
            index: which copy.
            seed: seed of its first episode; None for none.

        Raises:
            UnsupportedEnvError: it has no ``reset`` and ``step``.
            ConfigError: a seed, for an environment that cannot be seeded.
        """
        if not (callable(getattr(env, "reset", None)) and callable(getattr(env, "step", None))):
            raise UnsupportedEnvError(
                f"environment {env_id!r} made a {type(env).__name__}, which has no reset and step"
            )
        if seed is not None:
            check_seedable(env, env_id)
        self.env = env
        self._env_id = env_id
        self._index = index
        self._seed = seed
        self._step = 0
        self._gone: set[Any] = set()
        self._ended = True

    def reset(self) -> AgentDict:
        """First observations of a new episode.

        Raises:
            EnvError: the environment raised, or broke a rule.
        """
        self._step = 0
        self._gone = set()
        try:
            keywords = {} if self._seed is None else seed_env(self.env, self._seed)
            result = self.env.reset(**keywords)
        except Exception as error:
            raise_env_fault(self._env_id, "reset", error, self._index, 0)
        self._seed = None
        obs = result[0] if isinstance(result, tuple) and len(result) == 2 else result
        if not isinstance(obs, Mapping):
            raise self._broken(f"reset returned {type(obs).__name__}, expected observations by agent")
        self._check_finite(obs)
        self._ended = False
        return dict(obs)

    def step(self, actions: Mapping[Any, Any]) -> AgentResults:
        """Act; see MultiAgentEnv.

        Raises:
            EnvError: the environment raised, or broke a rule.
        """
        if self._ended:
            raise self._broken("it was stepped although its episode has ended; reset it first")
        self._step += 1
        try:
            result = self.env.step(dict(actions))
        except Exception as error:
            raise_env_fault(self._env_id, "step", error, self._index, self._step)
        is_plain = type(result) is tuple and len(result) == 5 and set(map(type, result)) == {dict}
        if not is_plain and (
            not isinstance(result, tuple)
            or len(result) not in (4, 5)
            or not all(isinstance(x, Mapping) for x in result)
        ):
            raise self._broken("step returned no tuple of five dicts (or four, the old form)")
        if len(result) == 4:
            obs, rewards, dones, infos = result
            if ALL_AGENTS not in dones:
                raise self._broken(f"dones have no key {ALL_AGENTS!r}; got {_keys(dones)}")
            terminateds, truncateds = _split_dones(dones, infos)
        else:
            obs, rewards, terminateds, truncateds, infos = result
        if ALL_AGENTS not in terminateds or ALL_AGENTS not in truncateds:
            name, flags = ("truncateds", truncateds) if ALL_AGENTS in terminateds else ("terminateds", terminateds)
            raise self._broken(f"{name} have no key {ALL_AGENTS!r}; got {_keys(flags)}")
        if ALL_AGENTS in obs or ALL_AGENTS in rewards:
            name = "observations" if ALL_AGENTS in obs else "rewards"
            raise self._broken(f"{name} have the key {ALL_AGENTS!r}, which only flags have")
        if not infos.keys() <= obs.keys():
            unobserved = [agent_id for agent_id in infos if agent_id not in obs]
            raise self._broken(f"there are infos for agents that were not observed: {_keys(unobserved)}")
        if self._gone:
            back = [agent_id for agent_id in obs if agent_id in self._gone]
            if back:
                raise self._broken(f"agents that were done have been observed again: {_keys(back)}")
        self._check_finite(obs)
        checked = as_rewards(rewards, self._env_id, self._index, self._step)
        for flags in (terminateds, truncateds):
            if any(flags.values()):
                self._gone.update(agent_id for agent_id, flag in flags.items() if flag and agent_id != ALL_AGENTS)
        self._ended = bool(terminateds[ALL_AGENTS]) or bool(truncateds[ALL_AGENTS])
        return AgentResults(obs, checked, terminateds, truncateds, {agent: infos.get(agent) or {} for agent in obs})

    def close(self) -> None:
        """Close the copy."""
        close = getattr(self.env, "close", None)
        if callable(close):
            close()

    def _check_finite(self, obs: Mapping[Any, Any]) -> None:
        with np.errstate(over="ignore"):
            suspects = [
                agent_id
                for agent_id, value in obs.items()
                # A product with itself is finite unless an entry is not (or it overflows: look closer then).
                if type(value) is np.ndarray
                and value.dtype.kind == "f"
                and not (value.dot(value) if value.ndim == 1 else np.vdot(value, value)) < math.inf
            ]
        for agent_id in suspects:
            if not np.isfinite(obs[agent_id]).all():
                message = f"observation of agent {agent_id!r} holds NaN or infinity"
                raise BadObservationError(self._env_id, message, vector_index=self._index, step=self._step)

    def _broken(self, message: str) -> EnvContractError:
        return EnvContractError(self._env_id, message, vector_index=self._index, step=self._step)


class MultiAgentBaseEnv(BaseEnv):
    """Copies of a MultiAgentEnv as a BaseEnv; a poll returns those that were acted on."""

    def __init__(self, envs: Sequence[Any], *, env_id: str = "environment", seed: int | None = None) -> None:
        """Take over the copies; they are closed with this object.

        Args:
            envs: copies.
            env_id: name for messages.
            seed: the worker's seed; copy ``v`` is seeded with ``seed + SEED_STRIDE * v`` before its first episode.
        """
        if not envs:
            raise UnsupportedEnvError(f"environment {env_id!r}: no copies were given")
        seeds: list[int | None] = list(env_seeds(seed, len(envs))) if seed is not None else [None] * len(envs)
        self.num_envs = len(envs)
        self.observation_space = getattr(envs[0], "observation_space", None)
        self.action_space = getattr(envs[0], "action_space", None)
        self._copies = [MultiAgentCopy(env, env_id, index, seeds[index]) for index, env in enumerate(envs)]
        self._env_id = env_id
        self._fresh: dict[Any, AgentDict] = {}
        self._results: dict[Any, AgentResults] = {}
        self._started = False
        self._closed = False

    def poll(self) -> Poll:
        """Results of the environments that were acted on; the first poll resets them all."""
        if not self._started:
            self._fresh = {index: copy.reset() for index, copy in enumerate(self._copies)}
            self._started = True
        if not self._fresh and not self._results:
            raise EnvContractError(self._env_id, "it was polled twice, with no actions sent in between")
        results, self._results = self._results, {}
        poll = Poll(
            {index: result.obs for index, result in results.items()},
            {index: result.rewards for index, result in results.items()},
            {index: result.terminateds for index, result in results.items()},
            {index: result.truncateds for index, result in results.items()},
            {index: result.infos for index, result in results.items()},
            {},
        )
        fresh, self._fresh = self._fresh, {}
        for index, obs in fresh.items():
            poll.obs[index] = obs
            poll.rewards[index] = dict.fromkeys(obs)
            poll.terminateds[index] = {**dict.fromkeys(obs, False), ALL_AGENTS: False}
            poll.truncateds[index] = {**dict.fromkeys(obs, False), ALL_AGENTS: False}
            poll.infos[index] = {agent_id: {} for agent_id in obs}
        return poll

    def send_actions(self, action_dict: Mapping[Any, Mapping[Any, Any]]) -> None:
        """Step the environments that actions are given for; see BaseEnv."""
        for index, actions in action_dict.items():
            self._results[index] = self._copies[index].step(actions)

    def try_reset(self, env_id: Any) -> AgentDict:
        """Reset one environment at once."""
        copy: MultiAgentCopy = self._copies[env_id]
        return copy.reset()

    def get_unwrapped(self) -> Sequence[Any]:
        """The copies."""
        return [copy.env for copy in self._copies]

    def stop(self) -> None:
        """Close the copies."""
        if not self._closed:
            self._closed = True
            with contextlib.ExitStack() as last_first:  # all of them, also if one raises
                for copy in reversed(self._copies):
                    last_first.callback(copy.close)


def _split_dones(dones: Mapping[Any, Any], infos: Mapping[Any, Any]) -> tuple[AgentDict, AgentDict]:
    """Terminated and truncated flags from the old form's dones, told apart by the infos' ``TimeLimit.truncated``."""
    cut = {agent_id for agent_id, info in infos.items() if (info or {}).get("TimeLimit.truncated")}
    ended = [agent_id for agent_id, done in dones.items() if done and agent_id != ALL_AGENTS]
    all_cut = bool(dones.get(ALL_AGENTS)) and bool(cut) and all(agent_id in cut for agent_id in ended or infos)
    truncateds = {
        agent_id: bool(done) and (all_cut if agent_id == ALL_AGENTS else agent_id in cut)
        for agent_id, done in dones.items()
    }
    terminateds = {agent_id: bool(done) and not truncateds[agent_id] for agent_id, done in dones.items()}
    return terminateds, truncateds


def _keys(keys: Any) -> str:
    return ", ".join(repr(key) for key in keys) or "none"
