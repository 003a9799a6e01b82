"""What the learner must know of the environment: its kind and its spaces. It makes one, looks at it and closes it."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import gymnasium

from aiorl.config.schema import CommonConfig
from aiorl.env.base_env import BaseEnv, checked_horizon
from aiorl.env.env_maker import EnvMaker, EnvPlan
from aiorl.env.gym_like import check_seedable
from aiorl.env.kinds import EnvFacts, EnvKind, check_can_be_remote, facts_of
from aiorl.env.vector_env import episode_limit
from aiorl.env.wrapping import Wrapping
from aiorl.errors import ConfigError

logger = logging.getLogger(__name__)


def look_at_env(config: CommonConfig) -> EnvFacts:
    """Make the environment as a worker would, look at it, and close it; no process is started.

    Raises:
        ConfigError: no such environment, or settings that it cannot have.
        UnsupportedEnvError: what was made is no environment that can be driven.
        EnvError: its constructor failed.
    """
    is_remote = config.remote_worker_envs or config.vectorize == "remote"
    plan = EnvPlan(
        env=config.env or "",
        env_config=config.env_config,
        num_envs=config.num_envs_per_worker,
        horizon=config.horizon,
        vectorize="remote" if is_remote else "serial",
        wrapping=Wrapping.of(config),
    )
    maker = EnvMaker(plan)
    if config.vectorize == "native":
        if config.remote_worker_envs:
            raise ConfigError(
                "vectorize is 'native', but remote_worker_envs gives each environment a process of its own.",
                key="vectorize", value="native", hint="Leave out one of the two.",
            )  # fmt: skip
        maker.check_native()
    env = maker.make_first()
    try:
        facts = facts_of(env, maker.env_id)
        _check_settings(config, env, facts.kind)
        if is_remote:
            check_can_be_remote(env, maker.env_id)
        is_seedable = True
        try:
            check_seedable(env, maker.env_id)
        except ConfigError:
            if config.seed is not None and facts.kind.is_seeded_whole:
                raise
            is_seedable = False
        return dataclasses.replace(facts, is_seedable=is_seedable)
    finally:
        _close(env, maker.env_id)


def _check_settings(config: CommonConfig, env: Any, kind: EnvKind) -> None:
    if kind.is_external:
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


def _close(env: Any, env_id: str) -> None:
    close = env.stop if isinstance(env, BaseEnv) else getattr(env, "close", None)
    if not callable(close):
        return
    try:
        close()
    except Exception as error:
        # it was only looked at; workers have their own
        logger.warning("environment %r raised when it was closed: %r", env_id, error)
