"""Kinds of environments: how each kind is recognised, its properties, and the conversion of its
copies to a BaseEnv.

To add a kind, add its class in a new file and a line to ``KINDS``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import gymnasium
from gymnasium import spaces

from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.gym_spaces import gymnasium_space
from aiorl.env.base_env import BaseEnv, LockstepEnv
from aiorl.env.external_env import ExternalBaseEnv, ExternalEnv, ExternalMultiAgentEnv
from aiorl.env.gym_like import check_gym_like, is_gym_like, seed_env_now
from aiorl.env.multi_agent_env import MultiAgentBaseEnv, MultiAgentEnv
from aiorl.env.native_vector_env import LockstepBaseEnv, NativeVectorEnv
from aiorl.env.vector_env import Copies, VectorBaseEnv, VectorEnv
from aiorl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EnvKind:
    """Kind of environment.

    Attributes:
        name: name for messages.
        type: class of its objects.
        wrap: makes a BaseEnv from (the copies, their name for messages, the worker's seed).
        holds_copies: True if one object holds all environments of a worker, so none can have its
            own process.
        is_single: True for an environment with one agent, which can have wrappers.
        has_agents: True if different policies can act for its agents.
        is_external: True if its clients drive it: a worker has one, and its episodes are never cut.
        is_seeded_whole: True if its object is seeded before it begins; else each copy is at its
            first reset.
    """

    name: str
    type: type[Any]
    wrap: Callable[[Sequence[Any], str, int | None], BaseEnv]
    holds_copies: bool = False
    is_single: bool = False
    has_agents: bool = False
    is_external: bool = False
    is_seeded_whole: bool = False

    def to_base_env(self, copies: Sequence[Any], env_id: str, seed: int | None) -> BaseEnv:
        """Make a BaseEnv from the copies, or from the one object that holds the copies.

        Args:
            copies: the environments.
            env_id: name for messages.
            seed: the worker's seed.

        Raises:
            ConfigError: a seed is given, but the environment cannot be seeded.
        """
        if self.is_seeded_whole and seed is not None:
            seed_env_now(copies[0], env_id, seed)
        return self.wrap(copies, env_id, seed)


def _of_copies(envs: Sequence[Any], env_id: str, seed: int | None) -> BaseEnv:
    return VectorBaseEnv(Copies(envs, env_id=env_id, seed=seed))


_HOLDS = {"holds_copies": True, "is_seeded_whole": True}
_EXTERNAL = {**_HOLDS, "is_external": True}

# The kind of an object is the first one with a matching type.
KINDS = (
    EnvKind(
        "a BaseEnv",
        BaseEnv,
        lambda envs, env_id, seed: cast(BaseEnv, envs[0]),
        has_agents=True,
        **_HOLDS,
    ),
    EnvKind(
        "a LockstepEnv",
        LockstepEnv,
        lambda envs, env_id, seed: LockstepBaseEnv(envs[0]),
        **_HOLDS,
    ),
    EnvKind(
        "a VectorEnv",
        VectorEnv,
        lambda envs, env_id, seed: VectorBaseEnv(envs[0], env_id=env_id),
        **_HOLDS,
    ),
    EnvKind(
        "a vector environment of Gymnasium",
        gymnasium.vector.VectorEnv,
        lambda envs, env_id, seed: LockstepBaseEnv(
            NativeVectorEnv(envs[0], env_id=env_id), seed=seed
        ),
        holds_copies=True,
    ),
    EnvKind(
        "an ExternalMultiAgentEnv",
        ExternalMultiAgentEnv,
        lambda envs, env_id, seed: ExternalBaseEnv(envs[0]),
        has_agents=True,
        **_EXTERNAL,
    ),
    EnvKind(
        "an ExternalEnv",
        ExternalEnv,
        lambda envs, env_id, seed: ExternalBaseEnv(envs[0]),
        **_EXTERNAL,
    ),
    EnvKind(
        "a MultiAgentEnv",
        MultiAgentEnv,
        lambda envs, env_id, seed: MultiAgentBaseEnv(envs, env_id=env_id, seed=seed),
        has_agents=True,
    ),
    EnvKind("a gymnasium.Env", gymnasium.Env, _of_copies, is_single=True),
    EnvKind("an environment of an older Gym", object, _of_copies, is_single=True),
)


def kind_of(env: Any, env_id: str) -> EnvKind:
    """Return the kind of an environment.

    Raises:
        UnsupportedEnvError: the environment is of no kind that can be driven (also a ValueError).
    """
    kind = next(kind for kind in KINDS if isinstance(env, kind.type))
    if kind.is_single:
        check_gym_like(env, env_id)
    return kind


def is_single(env: Any) -> bool:
    """Return True for a gym-like environment with one agent, which can have wrappers."""
    return is_gym_like(env) and kind_of(env, "").is_single


def check_can_be_remote(env: Any, env_id: str) -> None:
    """Raise an error if copies of an environment cannot run in their own processes.

    Raises:
        ConfigError: the environment is of a kind that holds its copies.
    """
    if kind_of(env, env_id).holds_copies:
        raise ConfigError(
            f"remote environments are requested, but {env_id!r} made a {type(env).__name__}, which"
            " holds its environments itself.",
            key="remote_worker_envs",
            value=True,
            hint=(
                "Leave out remote_worker_envs and vectorize: remote. Only single-agent and"
                " multi-agent environments can be remote."
            ),
        )


@dataclass(frozen=True, slots=True)
class EnvFacts:
    """Properties of an environment.

    Attributes:
        kind: its kind.
        observation_space: space of one agent, after wrappers, if all have the same; else None.
        action_space: likewise.
        observation_spaces: spaces by agent id if they are known; else None.
        action_spaces: likewise.
        is_seedable: True if it takes a seed; False also if this has not been checked.
        settings_obstacle: reason why its settings can't change during a run; "" also if this has
            not been checked.
        odd_spaces: name of an attribute -> its value, for those of ``observation_space`` and
            ``action_space`` that have a value which is no space.
    """

    kind: EnvKind
    observation_space: spaces.Space[Any] | None
    action_space: spaces.Space[Any] | None
    observation_spaces: Mapping[Any, spaces.Space[Any]] | None = None
    action_spaces: Mapping[Any, spaces.Space[Any]] | None = None
    is_seedable: bool = False
    settings_obstacle: str = ""
    odd_spaces: Mapping[str, Any] = field(default_factory=dict)

    def declared(self, name: str) -> Any:
        """Return ``observation_space`` or ``action_space``; if its value is no space, that value.

        Args:
            name: name of the attribute.
        """
        return self.odd_spaces.get(name, getattr(self, name))

    def check_policies(self, policy_ids: Collection[str], key: str) -> None:
        """Raise an error if there are several policies but no agents that they can act for.

        Args:
            policy_ids: ids of the policies.
            key: the config key that names them.

        Raises:
            ConfigError: there is a policy other than the default one, but the environment has one
                agent (a ValueError).
        """
        if self.kind.has_agents or set(policy_ids) == {DEFAULT_POLICY_ID}:
            return
        raise ConfigError(
            f"the policies are {', '.join(sorted(policy_ids))}, but the environment"
            f" ({self.kind.name}) has one agent, and only {DEFAULT_POLICY_ID!r} can act for it.",
            key=key,
            value=sorted(policy_ids),
            hint="Use a MultiAgentEnv, an ExternalMultiAgentEnv or a BaseEnv.",
        )


def facts_of(env: Any, env_id: str) -> EnvFacts:
    """Return the properties of an environment without calling it.

    Raises:
        UnsupportedEnvError: the environment is of no kind that can be driven.
    """
    kind = kind_of(env, env_id)
    # The spaces of one copy, not those of all.
    prefix = "single_" if isinstance(env, gymnasium.vector.VectorEnv) else ""
    facts: dict[str, Any] = {"observation_space": None, "action_space": None}
    odd: dict[str, Any] = {}
    for name in ("observation_space", "action_space"):
        space = gymnasium_space(getattr(env, f"{prefix}{name}", None))
        if isinstance(space, spaces.Space):
            facts[name] = space
        elif space is not None and not isinstance(space, Mapping) and not callable(space):
            odd[name] = space
        by_agent = gymnasium_space(getattr(env, f"{name}s", None)) or space
        if isinstance(by_agent, Mapping) and not isinstance(by_agent, spaces.Space) and by_agent:
            facts[f"{name}s"] = by_agent
            first, *rest = by_agent.values()
            if facts[name] is None and all(space_of_agent == first for space_of_agent in rest):
                facts[name] = first
    return EnvFacts(kind, **facts, odd_spaces=odd)
