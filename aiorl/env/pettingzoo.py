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
from aiorl.env.base_env import ALL_AGENTS, ByAgent
from aiorl.env.multi_agent_env import AgentDict, MultiAgentEnv
from aiorl.errors import ConfigError, UnknownEnvError
from aiorl.process.imports import needed_by

Results = tuple[AgentDict, AgentDict, AgentDict, AgentDict, AgentDict]


def pettingzoo_creator(name: str) -> Callable[[Mapping[str, Any]], MultiAgentEnv]:
    """Return the function that makes the environment of ``pettingzoo:MODULE``, in its parallel form
    if it has one.

    Raises:
        UnknownEnvError: there is no such module, or it has no environment.
        ConfigError: pettingzoo is not installed, or the import of the module fails.
    """
    module = _module(name, name.removeprefix("pettingzoo:"))
    parallel = getattr(module, "parallel_env", None)
    if callable(parallel):
        return lambda config: ParallelEnv(parallel(**config))
    turn_based = getattr(module, "env", None)
    if callable(turn_based):
        return lambda config: AECEnv(turn_based(**config))
    raise UnknownEnvError(
        f"environment {name!r}: module {module.__name__!r} has neither parallel_env nor env.",
        key="env",
        value=name,
    )


def _module(name: str, path: str) -> ModuleType:
    with needed_by(
        f"environment {name!r}",
        "the pettingzoo package",
        "pettingzoo",
        key="env",
        value=name,
    ):
        importlib.import_module("pettingzoo")
    for candidate in (f"pettingzoo.{path}", path):
        try:
            with warnings.catch_warnings():
                # Newer releases prefer ids of their registry; modules work in all releases.
                warnings.simplefilter("ignore", DeprecationWarning)
                return importlib.import_module(candidate)
        except Exception as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing and f"{candidate}.".startswith(f"{missing}."):
                continue  # the module itself is missing, not one that it imports
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
        result = self.env.reset()
        infos = result[1] if isinstance(result, tuple) else getattr(self.env, "infos", {})
        return any(ACTION_MASK in (info or {}) for info in infos.values())

    def _with_mask(self, agent: Any, obs: Any, info: Mapping[str, Any] | None) -> Any:
        """Return an observation, with the mask of its info if the agent has masks."""
        if agent not in self._masks:
            return obs
        return self._masks[agent](obs, info or {})

    def _with_masks(self, obs: ByAgent, infos: ByAgent) -> AgentDict:
        return {agent: self._with_mask(agent, obs[agent], infos.get(agent)) for agent in obs}


class ParallelEnv(_PettingZooEnv):
    """Parallel environment: all agents act at the same time."""

    def reset(
        self,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> Any:
        """See `MultiAgentEnv.reset`."""
        obs, infos = self.env.reset(seed=seed, options=options)
        return self._with_masks(obs, infos), infos

    def step(self, action_dict: AgentDict) -> Results:
        """See `MultiAgentEnv.step`."""
        obs, rewards, terminateds, truncateds, infos = self.env.step(action_dict)
        # Some environments keep listing agents that have been cut off.
        is_over = all(terminateds.get(agent) or truncateds.get(agent) for agent in self.env.agents)
        return (
            self._with_masks(obs, infos),
            rewards,
            *_with_all(terminateds, truncateds, is_over),
            {agent: infos.get(agent, {}) for agent in obs},
        )


class AECEnv(_PettingZooEnv):
    """Turn-based environment: each step shows the agent whose turn it is, and the agents that are
    out.

    An agent's reward is the sum since its last turn.
    """

    def reset(
        self,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> Any:
        """Begin an episode and show the first agent."""
        self.env.reset(seed=seed, options=options)
        obs, _, _, _, infos = self._next_turn()
        return obs, infos

    def step(self, action_dict: AgentDict) -> Results:
        """Step with the action of the agent whose turn it is."""
        self.env.step(action_dict[self.env.agent_selection])
        return self._next_turn()

    def _next_turn(self) -> Results:
        results: Results = ({}, {}, {}, {}, {})
        obs, rewards, terminateds, truncateds, infos = results
        while self.env.agents:
            agent = self.env.agent_selection
            for by_agent, value in zip(results, self.env.last(), strict=True):
                by_agent[agent] = value
            obs[agent] = self._with_mask(agent, obs[agent], infos[agent])
            if not (terminateds[agent] or truncateds[agent]):
                break
            self.env.step(None)  # removes an agent that is out
        return obs, rewards, *_with_all(terminateds, truncateds, not self.env.agents), infos


def _with_all(
    terminateds: AgentDict, truncateds: AgentDict, is_over: bool
) -> tuple[AgentDict, AgentDict]:
    """Return the flags with ALL_AGENTS: the end is a truncation if an agent was cut off rather than
    terminated.
    """
    is_cut = is_over and any(truncateds[agent] and not terminateds[agent] for agent in truncateds)
    return {**terminateds, ALL_AGENTS: is_over and not is_cut}, {**truncateds, ALL_AGENTS: is_cut}


def _shared(spaces: ByAgent) -> Any:
    """Return the common space of all agents, or None if they differ."""
    for first in spaces.values():
        return first if all(space == first for space in spaces.values()) else None
    return None
