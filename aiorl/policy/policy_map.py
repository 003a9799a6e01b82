"""PolicyMap: policies by id, and which one acts for an agent during an episode."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np

from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.errors import ConfigError, UnknownPolicyError
from aiorl.policy.policy import Policy

__all__ = ["AgentBinding", "PolicyMap", "PolicyMappingFn", "policy_seed"]

PolicyMappingFn = Callable[[Any], str]
"""Agent id -> policy id. It may be random: a binding asks it once per agent and episode."""


class PolicyMap(Mapping[str, Policy]):
    """Policies by id, in the order of their ids.

    Attributes:
        trainable_ids: ids of the policies that learn, in order.
        is_multi_agent: whether the ids differ from exactly the default one.
    """

    def __init__(
        self,
        policies: Mapping[str, Policy],
        mapping_fn: PolicyMappingFn | None = None,
        policies_to_train: Collection[str] | None = None,
    ) -> None:
        """Take policies and the rule that binds agents to them.

        Args:
            policies: policy id -> policy.
            mapping_fn: agent id -> policy id; None binds every agent to the default policy.
            policies_to_train: ids of the policies that learn; None or empty = all.

        Raises: ConfigError if the mapping function can't be called, or an id to train is not among the policies.
        """
        if mapping_fn is not None and not callable(mapping_fn):
            raise ConfigError(
                f"policy_mapping_fn is {mapping_fn!r}, expected a function: agent id -> policy id.",
                key="multiagent.policy_mapping_fn",
                value=mapping_fn,
            )
        self._policies = {policy_id: policies[policy_id] for policy_id in sorted(policies)}
        self._mapping_fn = mapping_fn
        unknown = sorted(set(policies_to_train or ()) - self._policies.keys())
        if unknown:
            raise ConfigError(
                f"policies_to_train names {', '.join(unknown)}; the policies are {', '.join(self._policies)}.",
                key="multiagent.policies_to_train",
                value=policies_to_train,
            )
        self.trainable_ids = tuple(
            policy_id for policy_id in self._policies if not policies_to_train or policy_id in policies_to_train
        )
        self.is_multi_agent = set(self._policies) != {DEFAULT_POLICY_ID}

    def __getitem__(self, policy_id: str) -> Policy:
        try:
            return self._policies[policy_id]
        except KeyError:
            raise UnknownPolicyError(policy_id, self._policies) from None

    def __contains__(self, policy_id: object) -> bool:
        return policy_id in self._policies

    def __iter__(self) -> Iterator[str]:
        return iter(self._policies)

    def __len__(self) -> int:
        return len(self._policies)

    def choose(self, agent_id: Any) -> str:
        """Ask the mapping function for an agent's policy id.

        Raises: UnknownPolicyError (a ValueError and KeyError) if it names no policy.
        """
        policy_id = DEFAULT_POLICY_ID if self._mapping_fn is None else self._mapping_fn(agent_id)
        if policy_id not in self._policies:
            raise UnknownPolicyError(policy_id, self._policies)
        return policy_id

    def binding(self) -> AgentBinding:
        """The bindings of one episode, none yet."""
        return AgentBinding(self)


class AgentBinding:
    """Binding of agents to policies within one episode, made when an agent first appears."""

    __slots__ = ("_by_agent", "_policies")

    def __init__(self, policies: PolicyMap) -> None:
        self._policies = policies
        self._by_agent: dict[Any, str] = {}

    def policy_for(self, agent_id: Any) -> str:
        """The agent's policy id, the same throughout the episode.

        Raises: UnknownPolicyError if the mapping function names no policy; the agent then stays unbound.
        """
        policy_id = self._by_agent.get(agent_id)
        if policy_id is None:
            policy_id = self._by_agent[agent_id] = self._policies.choose(agent_id)
        return policy_id

    @property
    def agents(self) -> tuple[Any, ...]:
        """Agents bound so far, in order of appearance."""
        return tuple(self._by_agent)


def policy_seed(seed: int, position: int) -> int:
    """Seed of one of several policies, in the order of their ids: the one given for the first, else another each."""
    return seed if position == 0 else int(np.random.SeedSequence((seed, position)).generate_state(1)[0])
