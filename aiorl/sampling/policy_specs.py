"""Which policies a worker has: the argument ``policy`` in its full form, checked."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from gymnasium import spaces

from aiorl.acting.policy import Policy
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.errors import ConfigError

__all__ = ["ENV_SPACE", "PolicySpec", "policy_classes", "policy_specs"]

ENV_SPACE: Any = object()
"""In a policy's 4-tuple: the environment's own space."""

_FORM = "a tuple (class, observation_space, action_space, config)"


class PolicySpec(NamedTuple):
    """How one policy is made.

    Attributes:
        policy_class: its class.
        observation_space: space of what environments show its agents.
        action_space: space of their actions.
        config: what it has otherwise than the base config.
    """

    policy_class: type[Policy]
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    config: Mapping[str, Any]


def policy_classes(policy: Any) -> list[type[Policy]]:
    """The classes in the argument ``policy``, as far as it has any; never raises."""
    values = policy.values() if isinstance(policy, Mapping) else [(policy,)]
    firsts = [value[0] for value in values if isinstance(value, tuple | list) and value]
    return [found for found in firsts if _is_policy_class(found)]


def policy_specs(policy: Any, observation_space: Any, action_space: Any) -> dict[str, PolicySpec]:
    """How each policy is made, in the order of their ids.

    Args:
        policy: a Policy class, which becomes the default policy, or policy id -> 4-tuple.
        observation_space: the environment's, for a policy given as a class, or with ENV_SPACE as its space.
        action_space: likewise.

    Raises:
        ConfigError: anything else, with what was expected (also a ValueError).
    """
    if not isinstance(policy, Mapping):
        if not _is_policy_class(policy):
            raise _refused("policy", policy, "a subclass of aiorl.Policy, or a dict: policy id -> " + _FORM)
        for name, space in (("observation_space", observation_space), ("action_space", action_space)):
            if not isinstance(space, spaces.Space):
                raise ConfigError(
                    f"policy is a class, and the environment's {name} is {space!r}, no space that it could have.",
                    key="policy",
                    hint="Give the environment both spaces of an agent, or a dict: policy id -> " + _FORM + ".",
                )
        return {DEFAULT_POLICY_ID: PolicySpec(policy, observation_space, action_space, {})}
    if not policy:
        raise _refused("policy", policy, "at least one policy")
    for policy_id in policy:
        if not isinstance(policy_id, str):
            raise _refused("policy", policy_id, "ids that are strings")
    given = (observation_space, action_space)
    return {policy_id: _spec(policy_id, policy[policy_id], given) for policy_id in sorted(policy)}


def _spec(policy_id: str, value: Any, env_spaces: tuple[Any, Any]) -> PolicySpec:
    key = f"policy[{policy_id!r}]"
    if not isinstance(value, tuple | list) or len(value) != len(PolicySpec._fields):
        raise _refused(key, value, _FORM)
    kind, observation_space, action_space, config = value
    spec = PolicySpec(
        kind,
        env_spaces[0] if observation_space is ENV_SPACE else observation_space,
        env_spaces[1] if action_space is ENV_SPACE else action_space,
        config,
    )
    if not _is_policy_class(spec.policy_class):
        raise _refused(f"{key}[0]", spec.policy_class, "a subclass of aiorl.Policy")
    for position, space in ((1, spec.observation_space), (2, spec.action_space)):
        if not isinstance(space, spaces.Space):
            raise _refused(f"{key}[{position}]", space, "a gymnasium space")
    if not isinstance(spec.config, dict):
        raise _refused(f"{key}[3]", spec.config, "a dict of settings")
    return spec


def _is_policy_class(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Policy)


def _refused(key: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(f"{key} is {value!r}, expected {expected}.", key=key, value=value)
