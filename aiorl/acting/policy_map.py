"""PolicyMap: policies by id, and the assignment of agents to policies during an episode."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from aiorl.acting.policy import Policy
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.errors import ConfigError, UnknownPolicyError
from aiorl.text import agent_text

PolicyMappingFn = Callable[..., str]
"""Agent id -> policy id. The function can be random: it is called once per agent and episode.

It can also take the episode and the worker, by the names ``episode`` and ``worker`` or as required
arguments after the agent id. """

_CONTEXT = ("episode", "worker")
"""Arguments that a mapping function can take besides the agent id, in this order."""


def mapping_parameters(function: PolicyMappingFn) -> dict[str, str]:
    """Return the parameters of a mapping function besides the agent id: name -> ``"episode"`` or
    ``"worker"``.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())[1:]
    except (TypeError, ValueError):  # some built-in functions have no signature
        return {}
    names = [parameter.name for parameter in parameters]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    context = {name: name for name in _CONTEXT if takes_any or name in names}
    required = [
        parameter.name
        for parameter in parameters
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and parameter.default is parameter.empty
    ]
    for name, value in zip(required, _CONTEXT, strict=False):
        if name not in _CONTEXT:  # under another name, it is the second or third argument
            context.pop(value, None)
            context[name] = value
    return context


def mapping_by_table(policy_ids: Mapping[str, str]) -> PolicyMappingFn:
    """Return a mapping function for a table from agent ids, as `agent_text` writes them, to policy
    ids.
    """

    def choose(agent_id: Any) -> str:
        text = agent_text(agent_id)
        # earlier versions wrote the latter
        policy_id = policy_ids.get(text, policy_ids.get(str(agent_id)))
        if policy_id is None:
            key = "multiagent.policy_mapping_fn"
            raise ConfigError(
                f"{key} has no agent {agent_id!r}; it has {', '.join(policy_ids)}.",
                key=key,
                value=agent_id,
                hint=(
                    f"In a file, add {text!r} and a policy id; in Python, the agent id itself can"
                    " be the key."
                ),
            )
        return policy_id

    return choose


class PolicyMap(dict[str, Policy]):
    """Policies by id, in the order of their ids.

    Attributes:
        trainable_ids: ids of the policies that learn, in order.
        is_multi_agent: True unless the only id is the default one.
        leaving: removed policies with which episodes still play. ``policies[policy_id]`` returns
            them, too; iteration, and the choice for a new agent, leave them out.
    """

    def __init__(
        self,
        policies: Mapping[str, Policy],
        mapping_fn: PolicyMappingFn | None = None,
        policies_to_train: Collection[str] | None = None,
    ) -> None:
        """Set the policies and the assignment of agents.

        Args:
            policies: policy id -> policy.
            mapping_fn: agent id -> policy id; None assigns every agent to the default policy.
            policies_to_train: ids of the policies that learn; None or empty = all.

        Raises:
            ConfigError: when the mapping function can't be called, or an id to train is not among
                the policies.
        """
        if mapping_fn is not None and not callable(mapping_fn):
            raise ConfigError(
                f"policy_mapping_fn is {mapping_fn!r}, expected a function: agent id -> policy id.",
                key="multiagent.policy_mapping_fn",
                value=mapping_fn,
            )
        super().__init__({policy_id: policies[policy_id] for policy_id in sorted(policies)})
        self.leaving: dict[str, Policy] = {}
        self._mapping_fn = mapping_fn
        self._context = {} if mapping_fn is None else mapping_parameters(mapping_fn)
        unknown = sorted(set(policies_to_train or ()) - self.keys())
        if unknown:
            raise ConfigError(
                f"policies_to_train names {', '.join(unknown)}; the policies are"
                f" {', '.join(self)}.",
                key="multiagent.policies_to_train",
                value=policies_to_train,
            )
        self.trainable_ids = tuple(
            policy_id
            for policy_id in self
            if not policies_to_train or policy_id in policies_to_train
        )
        self.is_multi_agent = set(self) != {DEFAULT_POLICY_ID}

    def __missing__(self, policy_id: str) -> Policy:
        if policy_id in self.leaving:
            return self.leaving[policy_id]
        raise UnknownPolicyError(policy_id, self)

    def remove(self, policy_id: str) -> None:
        """Move a policy to `leaving`.

        Args:
            policy_id: its id; an unknown one changes nothing.
        """
        policy = self.pop(policy_id, None)
        if policy is not None:
            self.leaving[policy_id] = policy

    @property
    def maps_by_episode(self) -> bool:
        """True if the mapping function takes the episode."""
        return "episode" in self._context.values()

    def choose(
        self, agent_id: Any, episode: Any = None, get_worker: Callable[[], Any] = lambda: None
    ) -> str:
        """Return the mapping function's policy id for an agent.

        Args:
            agent_id: the agent.
            episode: its episode, for a function that takes it.
            get_worker: returns the worker that samples, for a function that takes it.

        Raises:
            UnknownPolicyError: when no policy has the id (also a ValueError and KeyError).
        """
        policy_id = DEFAULT_POLICY_ID
        if self._mapping_fn is not None:
            context = {
                name: episode if value == "episode" else get_worker()
                for name, value in self._context.items()
            }
            policy_id = self._mapping_fn(agent_id, **context)
        if policy_id not in self:
            raise UnknownPolicyError(policy_id, self)
        return policy_id

    def binding(self, get_worker: Callable[[], Any] = lambda: None) -> AgentBinding:
        """Return an empty binding of agents to policies for one episode.

        Args:
            get_worker: returns the worker that samples the episode.
        """
        return AgentBinding(self, get_worker)


class AgentBinding:
    """Assignment of agents to policies in one episode, made when an agent first appears."""

    __slots__ = ("_by_agent", "_get_worker", "_policies")

    def __init__(self, policies: PolicyMap, get_worker: Callable[[], Any]) -> None:
        self._policies = policies
        self._get_worker = get_worker
        self._by_agent: dict[Any, str] = {}

    @property
    def policy_ids(self) -> set[str]:
        """Ids of the policies that agents are bound to."""
        return set(self._by_agent.values())

    def policy_for(self, agent_id: Any, episode: Any = None) -> str:
        """Return the agent's policy id, which stays the same throughout the episode.

        Raises:
            UnknownPolicyError: when the mapping function returns an unknown id; the agent then
                stays unassigned.
        """
        policy_id = self._by_agent.get(agent_id)
        if policy_id is None:
            policy_id = self._policies.choose(agent_id, episode, self._get_worker)
            self._by_agent[agent_id] = policy_id
        return policy_id

    def forget(self, agent_id: Any) -> None:
        """Forget an agent that has left; if it appears again, the mapping function is called
        again.
        """
        self._by_agent.pop(agent_id, None)


def policy_seed(seed: int, position: int) -> int:
    """Return the seed of one of several policies in id order: the given one for the first,
    different ones after it.
    """
    if position == 0:
        return seed
    return int(np.random.SeedSequence((seed, position)).generate_state(1)[0])
