"""Which path workers sample on: columnar, the fast one for plain single-agent environments, or general."""

from __future__ import annotations

import logging
from typing import Literal

from gymnasium import spaces

from aiorl.callbacks import has_worker_hooks
from aiorl.config.schema import CommonConfig
from aiorl.env.kinds import EnvFacts
from aiorl.errors import ConfigError

__all__ = ["choose_sampling", "general_reasons"]

logger = logging.getLogger(__name__)


def general_reasons(config: CommonConfig, facts: EnvFacts) -> list[str]:
    """Why sampling must be general, a sentence each; empty where columnar sampling will do."""
    reasons = []
    if facts.special_kind:
        reasons.append(f"the environment is {facts.special_kind}")
    for name, space in (("observations", facts.observation_space), ("actions", facts.action_space)):
        if isinstance(space, spaces.Tuple | spaces.Dict):
            reasons.append(f"{name} are of a {type(space).__name__} space")
    if config.model.custom_preprocessor:
        reasons.append("model.custom_preprocessor is set")
    if config.model.lstm_use_prev_action_reward:
        reasons.append("model.lstm_use_prev_action_reward is set")
    multiagent = config.multiagent
    for name in ("policies", "policy_mapping_fn", "policies_to_train", "observation_fn"):
        if getattr(multiagent, name):
            reasons.append(f"multiagent.{name} is set")
    if has_worker_hooks(config.callbacks):
        reasons.append("callbacks is set")
    for name in ("soft_horizon", "no_done_at_end", "sample_async", "remote_worker_envs", "fake_sampler"):
        if getattr(config, name):
            reasons.append(f"{name} is set")
    return reasons


def choose_sampling(config: CommonConfig, facts: EnvFacts) -> Literal["columnar", "general"]:
    """The path, said in the log where it is not the fast one.

    Raises:
        ConfigError: columnar sampling is asked for and cannot be had, or a setting of one path that the other one
            cannot honour.
    """
    reasons = general_reasons(config, facts)
    if config.sampling == "columnar" and reasons:
        raise ConfigError(
            f"sampling is columnar, but that can't be: {'; '.join(reasons)}.",
            key="sampling",
            value="columnar",
            hint="Leave it at auto.",
        )
    if config.sampling != "general" and not reasons:
        return "columnar"
    if config.vectorize in ("native", "remote"):
        raise ConfigError(
            f"vectorize is {config.vectorize}, but with general sampling environments are stepped one by one "
            f"({'; '.join(reasons) or 'sampling is general'}).",
            key="vectorize",
            value=config.vectorize,
            hint="Leave it out; remote_worker_envs: true gives each environment a process of its own.",
        )
    logger.info("workers sample the general way: %s", "; ".join(reasons) or "sampling is general")
    return "general"
