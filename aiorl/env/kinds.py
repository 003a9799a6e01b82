"""The kinds of environments: how each is recognised, what it is, and how its copies become a BaseEnv.

A new kind is a line of ``KINDS``, and the file that has its class.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import gymnasium
from gymnasium import spaces

from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.env.base_env import BaseEnv, LockstepEnv
from aiorl.env.external_env import ExternalBaseEnv, ExternalEnv, ExternalMultiAgentEnv
from aiorl.env.gym_like import check_gym_like, is_gym_like, seed_env_now
from aiorl.env.multi_agent_env import MultiAgentBaseEnv, MultiAgentEnv
from aiorl.env.native_vector_env import LockstepBaseEnv, NativeVectorEnv
from aiorl.env.vector_env import Copies, VectorBaseEnv, VectorEnv
from aiorl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EnvKind:
    """One kind of environments.

    Attributes:
        name: for messages.
        type: class of its objects.
        wrap: makes a BaseEnv of (the copies, their name for messages, the worker's seed).
        holds_copies: one object is all the environments of a worker, so that none has a process of its own.
        is_single: an environment with one agent, which may get wrappers.
        has_agents: it has agents that different policies may act for.
        is_external: its clients drive it: a worker has one, and nothing cuts its episodes.
        is_seeded_whole: its object is seeded before it begins; else each copy at its first reset.
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
        """Make a BaseEnv of the copies; of the one object if it holds its copies.

        Args:
            copies: the environments.
            env_id: name for messages.
            seed: the worker's seed.

        Raises:
            ConfigError: a seed for an environment that cannot be seeded.
        """
        if self.is_seeded_whole and seed is not None:
            seed_env_now(copies[0], env_id, seed)
        return self.wrap(copies, env_id, seed)


def _of_copies(envs: Sequence[Any], env_id: str, seed: int | None) -> BaseEnv:
    return VectorBaseEnv(Copies(envs, env_id=env_id, seed=seed))


_HOLDS = {"holds_copies": True, "is_seeded_whole": True}
_EXTERNAL = {**_HOLDS, "is_external": True}

# The first kind that an object is an instance of is its kind.
KINDS = (
    EnvKind("a BaseEnv", BaseEnv, lambda envs, env_id, seed: cast(BaseEnv, envs[0]), has_agents=True, **_HOLDS),
    EnvKind("a LockstepEnv", LockstepEnv, lambda envs, env_id, seed: LockstepBaseEnv(envs[0]), **_HOLDS),
    EnvKind("a VectorEnv", VectorEnv, lambda envs, env_id, seed: VectorBaseEnv(envs[0], env_id=env_id), **_HOLDS),
    EnvKind(
        "a vector environment of Gymnasium",
        gymnasium.vector.VectorEnv,
        lambda envs, env_id, seed: LockstepBaseEnv(NativeVectorEnv(envs[0], env_id=env_id), seed=seed),
        holds_copies=True,
    ),
    EnvKind(
        "an ExternalMultiAgentEnv",
        ExternalMultiAgentEnv,
        lambda envs, env_id, seed: ExternalBaseEnv(envs[0]),
        has_agents=True,
        **_EXTERNAL,
    ),
    EnvKind("an ExternalEnv", ExternalEnv, lambda envs, env_id, seed: ExternalBaseEnv(envs[0]), **_EXTERNAL),
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
    """The kind of an environment.

    Raises:
        UnsupportedEnvError: it is none that can be driven (also a ValueError).
    """
    kind = next(kind for kind in KINDS if isinstance(env, kind.type))
    if kind.is_single:
        check_gym_like(env, env_id)
    return kind


def is_single(env: Any) -> bool:
    """Tell whether it is a gym-like environment with one agent, which may get wrappers."""
    return is_gym_like(env) and kind_of(env, "").is_single


def check_can_be_remote(env: Any, env_id: str) -> None:
    """Raise if copies of an environment cannot live in processes of their own.

    Raises:
        ConfigError: it is of a kind that holds its copies.
    """
    if kind_of(env, env_id).holds_copies:
        raise ConfigError(
            f"environments in processes of their own are asked for, but {env_id!r} made a {type(env).__name__}, which"
            " holds its environments itself.",
            key="remote_worker_envs",
            value=True,
            hint="Leave out remote_worker_envs and vectorize: remote; only single and multi-agent environments can "
            "have them.",
        )


@dataclass(frozen=True, slots=True)
class EnvFacts:
    """What there is to know of an environment.

    Attributes:
        kind: its kind.
        observation_space: of an agent, wrappers' work included, where all have the same; else None.
        action_space: likewise.
        observation_spaces: by agent id, where they are known; else None.
        action_spaces: likewise.
        is_seedable: it takes a seed; False also where nobody has looked.
    """

    kind: EnvKind
    observation_space: spaces.Space[Any] | None
    action_space: spaces.Space[Any] | None
    observation_spaces: Mapping[Any, spaces.Space[Any]] | None = None
    action_spaces: Mapping[Any, spaces.Space[Any]] | None = None
    is_seedable: bool = False

    def check_policies(self, policy_ids: Collection[str], key: str) -> None:
        """Raise if the environment has no agents that different policies could act for.

        Args:
            policy_ids: ids of the policies.
            key: the setting that names them.

        Raises:
            ConfigError: other policies than the default one, for an environment with one agent (a ValueError).
        """
        if self.kind.has_agents or set(policy_ids) == {DEFAULT_POLICY_ID}:
            return
        raise ConfigError(
            f"the policies are {', '.join(sorted(policy_ids))}, but the environment, {self.kind.name}, has one agent, "
            f"which only {DEFAULT_POLICY_ID!r} acts for.",
            key=key,
            value=sorted(policy_ids),
            hint="Use a MultiAgentEnv, an ExternalMultiAgentEnv or a BaseEnv.",
        )


def facts_of(env: Any, env_id: str) -> EnvFacts:
    """What there is to know of an environment; it is not touched.

    Raises:
        UnsupportedEnvError: it is none that can be driven.
    """
    kind = kind_of(env, env_id)
    prefix = "single_" if isinstance(env, gymnasium.vector.VectorEnv) else ""
    found: dict[str, Any] = {"observation_space": None, "action_space": None}
    for name in tuple(found):
        space = getattr(env, f"{prefix}{name}", None)
        if isinstance(space, spaces.Space):
            found[name] = space
        by_agent = getattr(env, f"{name}s", None) or space
        if isinstance(by_agent, Mapping) and not isinstance(by_agent, spaces.Space) and by_agent:
            found[f"{name}s"] = by_agent
            known = list(by_agent.values())
            if found[name] is None and all(other == known[0] for other in known):
                found[name] = known[0]
    return EnvFacts(kind, **found)
