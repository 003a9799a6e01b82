"""The kinds of environments: how each is recognised, what it is, and how its copies become a BaseEnv.

A new kind is a line of ``KINDS``, and the file that has its class.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium import spaces

from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.env.base_env import BaseEnv, LockstepEnv
from aiorl.env.external_env import ExternalBaseEnv, ExternalEnv, ExternalMultiAgentEnv
from aiorl.env.gym_like import check_gym_like, seed_env_now
from aiorl.env.multi_agent_env import MultiAgentBaseEnv, MultiAgentEnv
from aiorl.env.native_vector_env import LockstepBaseEnv, NativeVectorEnv
from aiorl.env.vector_env import Copies, VectorBaseEnv, VectorEnv
from aiorl.errors import ConfigError

__all__ = ["KINDS", "EnvFacts", "EnvKind", "check_can_be_remote", "facts_of", "kind_of"]

ToBaseEnv = Callable[[Sequence[Any], str, int | None], BaseEnv]
"""(copies, name for messages, the worker's seed) -> BaseEnv."""


@dataclass(frozen=True, slots=True)
class EnvKind:
    """One kind of environments.

    Attributes:
        name: for messages.
        type: what its objects are instances of.
        to_base_env: what makes a BaseEnv of the copies; of the one object where it holds its copies.
        holds_copies: one object is all the environments of a worker, so that none has a process of its own.
        is_single: an environment with one agent, which may get wrappers.
        has_agents: it has agents that different policies may act for.
        is_external: its clients drive it: a worker has one, and nothing cuts its episodes.
        is_seeded_whole: its object is seeded before it begins; else each copy at its first reset.
    """

    name: str
    type: type[Any]
    to_base_env: ToBaseEnv
    holds_copies: bool = False
    is_single: bool = False
    has_agents: bool = False
    is_external: bool = False
    is_seeded_whole: bool = False


def _of_gymnasiums(envs: Sequence[Any], env_id: str, seed: int | None) -> BaseEnv:
    return LockstepBaseEnv(NativeVectorEnv(envs[0], env_id=env_id), seed=seed)


def _of_multi_agent_envs(envs: Sequence[Any], env_id: str, seed: int | None) -> BaseEnv:
    return MultiAgentBaseEnv(envs, env_id=env_id, seed=seed)


def _of_copies(envs: Sequence[Any], env_id: str, seed: int | None) -> BaseEnv:
    return VectorBaseEnv(Copies(envs, env_id=env_id, seed=seed))


def _seeded_whole(wrap: Callable[[Any, str], BaseEnv]) -> ToBaseEnv:
    """For an object that is seeded as a whole, before it begins."""

    def to_base_env(envs: Sequence[Any], env_id: str, seed: int | None) -> BaseEnv:
        if seed is not None:
            seed_env_now(envs[0], env_id, seed)
        return wrap(envs[0], env_id)

    return to_base_env


_of_base_env = _seeded_whole(lambda env, env_id: env)
_of_lockstep_env = _seeded_whole(lambda env, env_id: LockstepBaseEnv(env))
_of_vector_env = _seeded_whole(lambda env, env_id: VectorBaseEnv(env, env_id=env_id))
_of_external_env = _seeded_whole(lambda env, env_id: ExternalBaseEnv(env))

# The first kind that an object is an instance of is its kind.
KINDS = (
    EnvKind("a BaseEnv", BaseEnv, _of_base_env, holds_copies=True, has_agents=True, is_seeded_whole=True),
    EnvKind("a LockstepEnv", LockstepEnv, _of_lockstep_env, holds_copies=True, is_seeded_whole=True),
    EnvKind("a VectorEnv", VectorEnv, _of_vector_env, holds_copies=True, is_seeded_whole=True),
    EnvKind("a vector environment of Gymnasium", gymnasium.vector.VectorEnv, _of_gymnasiums, holds_copies=True),
    EnvKind(
        "an ExternalMultiAgentEnv",
        ExternalMultiAgentEnv,
        _of_external_env,
        holds_copies=True,
        has_agents=True,
        is_external=True,
        is_seeded_whole=True,
    ),
    EnvKind("an ExternalEnv", ExternalEnv, _of_external_env, holds_copies=True, is_external=True, is_seeded_whole=True),
    EnvKind("a MultiAgentEnv", MultiAgentEnv, _of_multi_agent_envs, has_agents=True),
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
    found: dict[str, Any] = {}
    for name in ("observation_space", "action_space"):
        space = getattr(env, f"{prefix}{name}", None)
        if isinstance(space, spaces.Space):
            found[name] = space
        by_agent = getattr(env, f"{name}s", None) or space
        if isinstance(by_agent, Mapping) and not isinstance(by_agent, spaces.Space) and by_agent:
            found[f"{name}s"] = by_agent
            known = list(by_agent.values())
            if name not in found and all(other == known[0] for other in known):
                found[name] = known[0]
    return EnvFacts(
        kind,
        found.get("observation_space"),
        found.get("action_space"),
        found.get("observation_spaces"),
        found.get("action_spaces"),
    )
