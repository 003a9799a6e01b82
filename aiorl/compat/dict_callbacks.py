"""Callbacks in RLlib's older form: functions of one dict, by the names of hooks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from aiorl.config.code import check_takes, import_object
from aiorl.errors import ConfigError, nearest
from aiorl.sampling import callbacks
from aiorl.sampling.callbacks import DefaultCallbacks


def callbacks_class(setting: str | Mapping[str, Any] | None) -> type[DefaultCallbacks] | None:
    """Return the class that the setting `callbacks` names; None without one.

    Args:
        setting: import path of a subclass of DefaultCallbacks; or import paths of functions by the names that
            `callbacks_from_dict` takes.

    Raises:
        ConfigError: a path that is not found or names something else, or a hook that does not take its arguments.
    """
    if not isinstance(setting, Mapping):
        return callbacks.callbacks_class(setting)
    if not setting:
        return None
    return callbacks_from_dict(
        {name: import_object(str(path), key=f"callbacks.{name}") for name, path in setting.items()}
    )


def named_callbacks(setting: str | Mapping[str, Any] | None) -> type[DefaultCallbacks] | None:
    """Return the same, with hooks that raise a ConfigError that names the setting and the hook.

    Raises:
        ConfigError: see `callbacks_class`.
    """
    kind = callbacks_class(setting)
    return None if kind is None else callbacks.with_named_failures(kind, setting)


_LEGACY_NAMES = {
    "on_episode_start": "on_episode_start",
    "on_episode_step": "on_episode_step",
    "on_episode_end": "on_episode_end",
    "on_sample_end": "on_sample_end",
    "on_postprocess_traj": "on_postprocess_trajectory",
    "on_train_result": "on_train_result",
}

InfoFunction = Callable[[dict[str, Any]], None]


def callbacks_from_dict(functions: Mapping[str, InfoFunction]) -> type[DefaultCallbacks]:
    """Return a callbacks class of functions by name, each taking one dict.

    Args:
        functions: ``on_episode_start``, ``on_episode_step`` and ``on_episode_end`` get ``env`` and ``episode``,
            ``on_sample_end`` gets ``worker`` and ``samples``, ``on_train_result`` gets ``trainer`` and
            ``result``, ``on_postprocess_traj`` gets ``episode``, ``agent_id``, ``pre_batch``, ``post_batch``
            and ``all_pre_batches``.

    Raises:
        ConfigError: an unknown name, or something that cannot be called with one argument.
    """
    for name, function in functions.items():
        if name not in _LEGACY_NAMES:
            raise ConfigError(
                f"callbacks has no hook {name!r}.",
                key=f"callbacks.{name}",
                value=name,
                hint=nearest(str(name), _LEGACY_NAMES).strip(),
            )
        if not callable(function):
            raise ConfigError(
                f"callbacks.{name} is {function!r}, expected a function.", key=f"callbacks.{name}", value=function
            )
        check_takes(function, f"callbacks.{name}", f"callbacks.{name}", {})
    warnings.warn(
        "callbacks given as a dict are deprecated; subclass aiorl.DefaultCallbacks instead",
        DeprecationWarning,
        stacklevel=2,
    )
    members = {_LEGACY_NAMES[name]: _as_method(name, function) for name, function in functions.items()}
    return type("DictCallbacks", (DefaultCallbacks,), members)


def _as_method(name: str, function: InfoFunction) -> Callable[..., None]:
    def call(self: DefaultCallbacks, **kwargs: Any) -> None:
        if name == "on_postprocess_traj":
            info = {
                "episode": kwargs["episode"],
                "agent_id": kwargs["agent_id"],
                "pre_batch": kwargs["original_batches"][kwargs["agent_id"]],
                "post_batch": kwargs["postprocessed_batch"],
                "all_pre_batches": kwargs["original_batches"],
            }
        elif name == "on_sample_end":
            info = {"worker": kwargs["worker"], "samples": kwargs["samples"]}
        elif name == "on_train_result":
            info = {"trainer": kwargs["trainer"], "result": kwargs["result"]}
        else:
            info = {"env": kwargs["base_env"], "episode": kwargs["episode"]}
        function(info)

    call.__doc__ = f"Call the function given for {name}."
    return call
