"""What the learner must know of the environment: its kind and its spaces. It makes one, looks at it and closes it."""

from __future__ import annotations

import dataclasses
import logging
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium import spaces

from aiorl.config.schema import CommonConfig
from aiorl.env.adapt import check_can_be_remote
from aiorl.env.base_env import BaseEnv
from aiorl.env.external_env import ExternalEnv, ExternalMultiAgentEnv
from aiorl.env.gym_like import check_gym_like, check_seedable
from aiorl.env.lockstep import checked_horizon
from aiorl.env.multi_agent_env import MultiAgentEnv
from aiorl.env.registry import EnvContext, EnvCreator, resolve_env
from aiorl.env.stepped_vector_env import VectorEnv
from aiorl.env.vector_env import episode_limit
from aiorl.env.wrapping import Wrapping
from aiorl.errors import AiorlError, ConfigError, EnvError

__all__ = ["EnvFacts", "look_at_env"]

logger = logging.getLogger(__name__)

_SPECIAL = {
    MultiAgentEnv: "a MultiAgentEnv",
    ExternalMultiAgentEnv: "an ExternalMultiAgentEnv",
    ExternalEnv: "an ExternalEnv",
    BaseEnv: "a BaseEnv",
    VectorEnv: "a VectorEnv",
    gymnasium.vector.VectorEnv: "a vector environment of Gymnasium",
}


@dataclass(frozen=True, slots=True)
class EnvFacts:
    """What there is to know of an environment.

    Attributes:
        special_kind: what it is where it is no plain `gymnasium.Env`, such as "a MultiAgentEnv"; else "".
        observation_space: of an agent, wrappers' work included, where all have the same; else None.
        action_space: likewise.
        observation_spaces: by agent id, where they are known; else None.
        action_spaces: likewise.
        has_agents: it has agents that different policies may act for.
        is_external: its clients drive it, so that a worker has one.
        is_seedable: it takes a seed.
    """

    special_kind: str
    observation_space: spaces.Space[Any] | None
    action_space: spaces.Space[Any] | None
    observation_spaces: Mapping[Any, spaces.Space[Any]] | None = None
    action_spaces: Mapping[Any, spaces.Space[Any]] | None = None
    has_agents: bool = False
    is_external: bool = False
    is_seedable: bool = False


def look_at_env(config: CommonConfig) -> EnvFacts:
    """Make the environment as a worker would, look at it, and close it; no process is started.

    Raises:
        ConfigError: no such environment, or settings that it cannot have.
        UnsupportedEnvError: what was made is no environment that can be driven.
        EnvError: its constructor failed.
    """
    creator = resolve_env(config.env or "")
    wrapping = Wrapping.of(config)
    context = EnvContext(wrapping.env_config(creator, config.env_config), remote=config.remote_worker_envs)
    env = _made(creator, wrapping, context)
    try:
        _check_settings(config, env)
        if config.remote_worker_envs:
            check_can_be_remote(env, creator.env_id)
        return dataclasses.replace(_facts_of(env), is_seedable=_is_seedable(env, creator.env_id, config.seed))
    finally:
        _close(env, creator.env_id)


def _is_seedable(env: Any, env_id: str, seed: int | None) -> bool:
    try:
        check_seedable(env, env_id)
    except ConfigError:
        if seed is not None and isinstance(env, BaseEnv | VectorEnv | ExternalEnv | ExternalMultiAgentEnv):
            raise
        return False
    return True


def _made(creator: EnvCreator, wrapping: Wrapping, context: EnvContext) -> Any:
    try:
        env = creator(context)
        if isinstance(env, tuple(_SPECIAL)):
            return env
        check_gym_like(env, creator.env_id)
        return wrapping.wrap(env, context)
    except AiorlError:
        raise
    except Exception as error:
        # whatever an environment's constructor raises
        raise _constructor_fault(creator, error) from error


def _constructor_fault(creator: EnvCreator, error: Exception) -> EnvError:
    text = "".join(traceback.format_exception(error))
    message = f"its constructor raised {type(error).__name__}: {error}"
    return EnvError(creator.env_id, message, vector_index=0, step=-1, traceback_text=text)


def _check_settings(config: CommonConfig, env: Any) -> None:
    if isinstance(env, ExternalEnv | ExternalMultiAgentEnv):
        if config.num_envs_per_worker != 1 and "num_envs_per_worker" in config.model_fields_set:
            raise ConfigError(
                f"num_envs_per_worker is {config.num_envs_per_worker}, but an external environment drives itself: a "
                "worker has one.",
                key="num_envs_per_worker",
                value=config.num_envs_per_worker,
                hint="Set num_envs_per_worker: 1.",
            )
        if config.horizon:
            raise ConfigError(
                f"horizon is {config.horizon}, but the episodes of an external environment are its clients'.",
                key="horizon",
                value=config.horizon,
                hint="Leave horizon out.",
            )
    elif isinstance(env, gymnasium.Env):
        checked_horizon(config.horizon, episode_limit(env))


def _facts_of(env: Any) -> EnvFacts:
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
        _special_kind(env),
        found.get("observation_space"),
        found.get("action_space"),
        found.get("observation_spaces"),
        found.get("action_spaces"),
        isinstance(env, MultiAgentEnv | ExternalMultiAgentEnv | BaseEnv),
        isinstance(env, ExternalEnv | ExternalMultiAgentEnv),
    )


def _special_kind(env: Any) -> str:
    for kind, name in _SPECIAL.items():
        if isinstance(env, kind):
            return name
    return "" if isinstance(env, gymnasium.Env) else f"a {type(env).__name__} of an older Gym"


def _close(env: Any, env_id: str) -> None:
    close = env.stop if isinstance(env, BaseEnv) else getattr(env, "close", None)
    if not callable(close):
        return
    try:
        close()
    except Exception as error:
        # it was only looked at; workers have their own
        logger.warning("environment %r raised when it was closed: %r", env_id, error)
