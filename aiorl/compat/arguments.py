"""Checks of RolloutWorker's arguments, and their conversion to a worker's settings."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Collection, Mapping
from types import NoneType
from typing import Any

import numpy as np
from pydantic import ValidationError

from aiorl.config.key import plain_error
from aiorl.config.worker import WorkerConfig
from aiorl.errors import ConfigError, nearest
from aiorl.offline.estimators import ESTIMATORS
from aiorl.sampling.callbacks import DefaultCallbacks
from aiorl.sampling.settings import SIMULATION, IOSettings, WorkerSettings

_ENVIRONS = "extra_python_environs_for_worker"
KEY_OF_ARGUMENT = {
    "num_envs": "num_envs_per_worker",
    "episode_horizon": "horizon",
    "extra_python_environs": _ENVIRONS,
    "model_config": "model",
}
"""Arguments of RolloutWorker that have another name in the config."""

_IO = IOSettings.__dataclass_fields__.keys()
_LOG_LEVELS = ("DEBUG", "INFO", "WARN", "WARNING", "ERROR", "CRITICAL")
_EVALUATIONS = (*ESTIMATORS, SIMULATION)


def worker_settings(arguments: Mapping[str, Any]) -> WorkerSettings:
    """Convert the arguments of RolloutWorker's constructor to a worker's settings.

    Args:
        arguments: all arguments by name.

    Returns:
        The settings.

    Raises:
        ConfigError: an argument is wrong or cannot be applied (also a ValueError).
    """
    names = WorkerSettings.__dataclass_fields__.keys() | _IO | {"tf_session_creator"}
    settings = {name: value for name, value in arguments.items() if name in names}
    config = _config({name: value for name, value in arguments.items() if name not in names})
    for name, (is_right, expected) in _CHECKS.items():
        if not is_right(settings[name]):
            raise ConfigError(
                f"{name} is {settings[name]!r}, expected {expected}.",
                key=name,
                value=settings[name],
                hint=nearest(settings[name], _LOG_LEVELS).strip() if name == "log_level" else "",
            )
    for name in settings["input_evaluation"]:
        if name not in _EVALUATIONS:
            raise ConfigError(
                f"input_evaluation is {name!r}, expected one of {', '.join(_EVALUATIONS)}.",
                key="input_evaluation",
                value=name,
                hint=nearest(str(name), _EVALUATIONS).strip(),
            )
    settings["policy_config"] = dict(settings["policy_config"] or {})
    settings["callbacks"] = settings["callbacks"] or DefaultCallbacks
    del settings["tf_session_creator"]
    settings["io"] = IOSettings(**{name: settings.pop(name) for name in _IO})
    counts = {name: int(settings[name]) for name in ("worker_index", "num_workers")}
    return WorkerSettings(config=config, **settings | counts)


def _config(arguments: Mapping[str, Any]) -> WorkerConfig:
    """Return the arguments that are config keys, checked by the keys' declarations.

    Raises:
        ConfigError: a value is wrong; the error names the argument.
    """
    values = {KEY_OF_ARGUMENT.get(name, name): _plain(value) for name, value in arguments.items()}
    if values["horizon"] in (0, math.inf):
        values["horizon"] = None
    if values["compress_observations"] != "bulk":
        values["compress_observations"] = bool(values["compress_observations"])
    for name in ("env_config", "model", _ENVIRONS):
        if values[name] is None:
            values[name] = {}
    if isinstance(values[_ENVIRONS], dict):
        values[_ENVIRONS] = {name: str(value) for name, value in values[_ENVIRONS].items()}
    try:
        return WorkerConfig.model_validate(values, strict=True)
    except ValidationError as error:
        fault = plain_error(WorkerConfig, error)
        name, dot, rest = fault.key.partition(".")
        argument = {key: argument for argument, key in KEY_OF_ARGUMENT.items()}.get(name, name)
        fault.key = f"{argument}{dot}{rest}"
        fault.message = argument + fault.message.removeprefix(name)
        raise fault from None


def _plain(value: Any) -> Any:
    """Convert NumPy scalars and mappings to the plain types that configs have."""
    if isinstance(value, np.generic):
        return value.item()
    return dict(value) if isinstance(value, Mapping) else value


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 0)


def _is_collection(value: Any) -> bool:
    # a string is a collection of its characters
    return isinstance(value, Collection) and not isinstance(value, str | bytes)


def _is_policy_config(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("model", {}), Mapping | NoneType)


def _none_or(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_right(value)


_COUNT = _is_count, "a whole number of at least 0"
_PATH = (
    lambda value: isinstance(value, str | os.PathLike | NoneType),
    "a directory's path, or None",
)
_FUNCTION = _none_or(callable), "a function, or None"
_CREATOR = callable, "a function that takes an IOContext"
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "log_level": (
        lambda value: value is None or value in _LOG_LEVELS,
        f"one of {', '.join(_LOG_LEVELS)}, or None",
    ),
    "worker_index": _COUNT,
    "num_workers": _COUNT,
    "policy_config": (_none_or(_is_policy_config), "a dict, its model likewise, or None"),
    "monitor_path": _PATH,
    "log_dir": _PATH,
    "policies_to_train": (_none_or(_is_collection), "a list of policy ids, or None"),
    "input_evaluation": (
        _is_collection,
        f"a collection of {', '.join(_EVALUATIONS)}; an empty one for none",
    ),
    "policy_mapping_fn": _FUNCTION,
    "observation_fn": _FUNCTION,
    "input_creator": _CREATOR,
    "output_creator": _CREATOR,
    "callbacks": (
        lambda value: (
            value is None or (inspect.isclass(value) and issubclass(value, DefaultCallbacks))
        ),
        "a subclass of aiorl.DefaultCallbacks, not an instance",
    ),
    "tf_session_creator": (
        lambda value: value is None,
        "None: TensorFlow 2 has no sessions; see tf_session_args",
    ),
}
"""Checks by argument: a test of the value, and a description of valid ones."""
