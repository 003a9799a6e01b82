"""PettingZoo environments as MultiAgentEnv: parallel ones, and turn-based (AEC) ones turn by turn.

Action masks in the infos move into the observations, as ``{"observation": ..., "action_mask":
...}``.

``pettingzoo:MODULE`` names a module with a ``parallel_env`` or an ``env`` function, inside the
pettingzoo package (``pettingzoo:classic.tictactoe_v3``) or elsewhere
(``pettingzoo:mpe2.simple_spread_v3``).
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from gymnasium import spaces

from aiorl.data.gym_spaces import gymnasium_space
from aiorl.data.obs_layout import ACTION_MASK, is_masked
from aiorl.env.action_mask import InfoMask
from aiorl.env.base_env import ALL_AGENTS
from aiorl.env.multi_agent_env import MultiAgentEnv
from aiorl.errors import ConfigError, UnknownEnvError
from aiorl.process.imports import needed_by

AgentDict = dict[Any, Any]
Results = tuple[AgentDict, AgentDict, AgentDict, AgentDict, AgentDict]


def pettingzoo_creator(name: str) -> Callable[[Mapping[str, Any]], MultiAgentEnv]:
    """Return the function that makes the environment of ``pettingzoo:MODULE``, in its parallel form
    if it has one.

    Raises:
        UnknownEnvError: there is no such module, or it has no environment.
        ConfigError: pettingzoo is not installed, or the import of the module fails.
    """
    module = _module(name, name.removeprefix("pettingzoo:"))
    if callable(parallel := getattr(module, "parallel_env", None)):
        return lambda config: ParallelEnv(parallel(**config))
    if callable(turn_based := getattr(module, "env", None)):
        return lambda config: AECEnv(turn_based(**config))
    raise UnknownEnvError(
        f"environment {name!r}: module {module.__name__!r} has neither parallel_env nor env.",
        key="env",
        value=name,
    )


def _module(name: str, path: str) -> ModuleType:
    with needed_by(
        f"environment {name!r}", "the pettingzoo package", "pettingzoo", key="env", value=name
    ):
        importlib.import_module("pettingzoo")
    for candidate in (f"pettingzoo.{path}", path):
        try:
            with warnings.catch_warnings():
                # Newer releases prefer ids of their registry; modules work in all releases.
                warnings.simplefilter("ignore", DeprecationWarning)
                return importlib.import_module(candidate)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and f"{candidate}.".startswith(
                f"{error.name}."
            ):
                continue
            raise ConfigError(
                f"environment {name!r}: importing {candidate!r} failed: {error}.", key="env"
            ) from error
    raise UnknownEnvError(
        f"environment {name!r}: there is neither a module 'pettingzoo.{path}' nor {path!r}.",
        key="env",
        value=name,
        hint="An example of a valid name is pettingzoo:classic.tictactoe_v3.",
    )


class _PettingZooEnv(MultiAgentEnv):
    """Base of both forms: the spaces, and the masks that come in infos."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self._masks: dict[Any, InfoMask] = {}
        possible = getattr(env, "possible_agents", None)
        if possible is None:  # agents are created during the game
            return
        self.observation_spaces = {
            agent: gymnasium_space(env.observation_space(agent)) for agent in possible
        }
        self.action_spaces = {agent: gymnasium_space(env.action_space(agent)) for agent in possible}
        if not any(map(is_masked, self.observation_spaces.values())) and self._has_mask_in_info():
            self._masks = {
                agent: InfoMask(self.observation_spaces[agent], space)
                for agent, space in self.action_spaces.items()
                if not isinstance(space, spaces.Box)
            }
            self.observation_spaces |= {agent: mask.space for agent, mask in self._masks.items()}
        self.observation_space = _shared(self.observation_spaces)
        self.action_space = _shared(self.action_spaces)

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def _has_mask_in_info(self) -> bool:
        """Return True if infos contain masks, which shows only in an episode; the caller must reset
        the environment.
        """
        if all(isinstance(space, spaces.Box) for space in (self.action_spaces or {}).values()):
            return False
        begun = self.env.reset()
        infos = begun[1] if isinstance(begun, tuple) else getattr(self.env, "infos", {})
        return any(ACTION_MASK in (info or {}) for info in infos.values())

    def _shown(self, agent: Any, obs: Any, info: Mapping[str, Any] | None) -> Any:
        mask = self._masks.get(agent)
        return obs if mask is None else mask(obs, info or {})


class ParallelEnv(_PettingZooEnv):
    """Parallel environment: all agents act at the same time."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """See `MultiAgentEnv.reset`."""
        obs, infos = self.env.reset(seed=seed, options=options)
        return {
            agent: self._shown(agent, own, infos.get(agent)) for agent, own in obs.items()
        }, infos

    def step(self, action_dict: AgentDict) -> Results:
        """See `MultiAgentEnv.step`."""
        obs, rewards, terminateds, truncateds, infos = self.env.step(action_dict)
        # Some environments keep listing agents that have been cut off.
        over = all(terminateds.get(agent) or truncateds.get(agent) for agent in self.env.agents)
        shown = {agent: self._shown(agent, own, infos.get(agent)) for agent, own in obs.items()}
        return (
            shown,
            rewards,
            *_with_all(terminateds, truncateds, over),
            {agent: infos.get(agent, {}) for agent in obs},
        )


class AECEnv(_PettingZooEnv):
    """Turn-based environment: each step shows the agent whose turn it is, and the agents that are
    out.

    An agent's reward is the sum since its last turn.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode and show the first agent."""
        self.env.reset(seed=seed, options=options)
        obs, _, _, _, infos = self._next_turn()
        return obs, infos

    def step(self, action_dict: AgentDict) -> Results:
        """Step with the action of the agent whose turn it is."""
        self.env.step(action_dict[self.env.agent_selection])
        return self._next_turn()

    def _next_turn(self) -> Results:
        obs: AgentDict = {}
        rewards: AgentDict = {}
        terminateds: AgentDict = {}
        truncateds: AgentDict = {}
        infos: AgentDict = {}
        while self.env.agents:
            agent = self.env.agent_selection
            obs[agent], rewards[agent], terminateds[agent], truncateds[agent], infos[agent] = (
                self.env.last()
            )
            obs[agent] = self._shown(agent, obs[agent], infos[agent])
            if not (terminateds[agent] or truncateds[agent]):
                break
            self.env.step(None)  # removes an agent that is out
        return obs, rewards, *_with_all(terminateds, truncateds, not self.env.agents), infos


def _with_all(
    terminateds: AgentDict, truncateds: AgentDict, over: bool
) -> tuple[AgentDict, AgentDict]:
    """Return the flags with ALL_AGENTS: the end is a truncation if an agent was cut off rather than
    terminated.
    """
    cut = over and any(truncateds[agent] and not terminateds[agent] for agent in truncateds)
    return {**terminateds, ALL_AGENTS: over and not cut}, {**truncateds, ALL_AGENTS: cut}


def _shared(spaces: Mapping[Any, Any]) -> Any:
    """Return the common space of all agents, or None if they differ."""
    different = list(spaces.values())
    return different[0] if different and all(space == different[0] for space in different) else None
