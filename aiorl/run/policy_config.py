"""By which algorithm, and with which settings, each policy of a run learns; loads no TensorFlow."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from aiorl.acting.policy import Policy
from aiorl.compat.old_keys import translate_old_keys
from aiorl.config.code import import_object, is_import_path
from aiorl.config.key import group_of
from aiorl.config.layers import Layer
from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError, UnknownAlgorithmError
from aiorl.learning.algorithms.actor_critic_config import BATCH, ENVS, LENGTH
from aiorl.learning.algorithms.algorithm import Algorithm
from aiorl.learning.algorithms.registry import config_class

__all__ = ["POLICIES", "config_class_of", "config_of", "learning_settings"]

POLICIES = "multiagent.policies"
"""The key that policies are named by."""

# A policy's own settings are those of its learning; everything else is the run's
_RUN_GROUPS = frozenset(["Run", "Sampling", "Workers and hosts", "Resources", "Reports", "Offline data"])
_RUN_KEYS = frozenset([
    "min_iter_time_s", "timesteps_per_iteration", "max_policy_lag", "outstanding_fragments_per_worker",
    "fragments_per_update", "max_env_steps_ahead", "broadcast_updates", "broadcast_interval_ms", "gradients",
])  # fmt: skip


def config_class_of(config: CommonConfig, policy_id: str, name: str | None) -> type[CommonConfig] | None:
    """The config class of the algorithm that a policy's network is of; None for a Policy class of the user's own.

    Args:
        config: the run's.
        policy_id: of the policy.
        name: what is given as its class.

    Raises:
        ConfigError: it is neither an algorithm nor a policy, or can't be imported.
    """
    if name is None or name.lower() == config.algo.lower():
        return type(config)
    key = f"{POLICIES}.{policy_id}.class"
    if is_import_path(name):
        found = import_object(name, key=key)
        if inspect.isclass(found) and issubclass(found, Policy):
            return None
        if not (inspect.isclass(found) and issubclass(found, Algorithm)):
            raise ConfigError(
                f"{key} is {name!r}, which is no subclass of aiorl.Policy, and no algorithm.", key=key, value=name
            )
    try:
        return config_class(name)
    except UnknownAlgorithmError as error:
        raise ConfigError(
            f"{key} is {name!r}, expected null for {config.algo!r}, which is the run's algorithm, the name of another "
            f"one, or 'package.module:Name' for a Policy class of your own. {error.message}",
            key=key, value=name, hint=error.hint,
        ) from error  # fmt: skip
    except ConfigError as error:
        raise ConfigError(f"{key}: {error.message}", key=key, value=name, hint=error.hint) from error


def config_of(
    config: CommonConfig,
    kind: type[CommonConfig],
    policy_id: str,
    overrides: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> CommonConfig:
    """The config by which a policy's network learns: the run's, with its own settings on top.

    Of an algorithm that is not the run's, what is said for the run as a whole holds, and what a user has set of the
    keys that both have; the rest are the algorithm's defaults. A preset is of the run's algorithm alone.

    Args:
        config: the run's.
        kind: the class of the policy's.
        policy_id: of the policy.
        overrides: its own settings.
        defaults: what a run's config says of its other settings; they go before the run's.

    Raises:
        ConfigError: one of them is the run's, or they make no config.
    """
    own = translate_old_keys(overrides)
    key = f"{POLICIES}.{policy_id}.config"
    for place, values in ((key, own), (f"{POLICIES}.{policy_id}.defaults", defaults or {})):
        for name in values:
            if name in kind.model_fields and _is_of_run(kind, name):
                raise ConfigError(f"{place}.{name} can't differ from the run's {name}.", key=f"{place}.{name}")
    layers = [values for values in (defaults, own) if values]
    if kind is type(config) and not layers:
        return config
    try:
        if kind is type(config):
            return _with_sizes_of(config, config.updated(*layers))
        return _with_sizes_of(config, kind.from_layers([Layer(_common_settings(config, kind)), *map(Layer, layers)]))
    except ConfigError as error:
        first = error.key.partition(".")[0]
        if first in kind.model_fields and _is_of_run(kind, first):  # what the run says doesn't suit the algorithm
            key, name = f"{POLICIES}.{policy_id}.class", kind.model_fields["algo"].default
            message = f"{key} is {name!r}, which can't learn in this run: {error.message}"
            raise ConfigError(message, key=key, value=name, hint=error.hint) from error
        raise ConfigError(f"{key}: {error.message}", key=f"{key}.{error.key}", hint=error.hint) from error


def _with_sizes_of(run: CommonConfig, config: CommonConfig) -> CommonConfig:
    """Return a policy's config, unless sizes that belong to the run were derived otherwise for it.

    Raises:
        ConfigError: they were.
    """
    for name in (LENGTH, ENVS, BATCH):
        size, wanted = getattr(run, name), getattr(config, name)
        if wanted != size and _is_of_run(type(config), name):
            raise ConfigError(
                f"the settings of this policy would need a {name} of {wanted}, and the run has {size}.",
                key=name, value=wanted, hint=f"Set {name} for the run, or other settings for the policy.",
            )  # fmt: skip
    return config


def learning_settings(config: CommonConfig) -> dict[str, Any]:
    """The settings that concern learning, which each policy may have of its own."""
    kind = type(config)
    return {name: value for name, value in config.to_dict().items() if not _is_of_run(kind, name)}


def _common_settings(config: CommonConfig, kind: type[CommonConfig]) -> dict[str, Any]:
    """What a run's config says for a policy of another algorithm."""
    of_run = {name: value for name, value in config.to_dict().items() if name in kind.model_fields}
    of_run = {name: value for name, value in of_run.items() if _is_of_run(kind, name)}
    given = {name: value for name, value in config.users_values().items() if name in kind.model_fields}
    return {**given, **of_run, "algo": kind.model_fields["algo"].default, "preset": None}


def _is_of_run(kind: type[CommonConfig], name: str) -> bool:
    """Whether a key of a config class is the same for all policies of a run."""
    if name == "train_batch_size":
        return kind.trains_on_what_comes
    return name in _RUN_KEYS or group_of(kind.model_fields[name]) in _RUN_GROUPS
