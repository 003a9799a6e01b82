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


def _env_and_episode(given: dict[str, Any]) -> dict[str, Any]:
    return {"env": given["base_env"], "episode": given["episode"]}


_HOOKS: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "on_episode_start": ("on_episode_start", _env_and_episode),
    "on_episode_step": ("on_episode_step", _env_and_episode),
    "on_episode_end": ("on_episode_end", _env_and_episode),
    "on_sample_end": ("on_sample_end", lambda given: {name: given[name] for name in ("worker", "samples")}),
    "on_train_result": ("on_train_result", lambda given: {name: given[name] for name in ("trainer", "result")}),
    "on_postprocess_traj": (
        "on_postprocess_trajectory",
        lambda given: {
            "episode": given["episode"],
            "agent_id": given["agent_id"],
            "pre_batch": given["original_batches"][given["agent_id"]],
            "post_batch": given["postprocessed_batch"],
            "all_pre_batches": given["original_batches"],
        },
    ),
}
"""Name of a function -> the hook that calls it, and what makes its dict of the hook's arguments."""

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
    members = {}
    for name, function in functions.items():
        key = f"callbacks.{name}"
        if name not in _HOOKS:
            hint = nearest(str(name), _HOOKS).strip()
            raise ConfigError(f"callbacks has no hook {name!r}.", key=key, value=name, hint=hint)
        if not callable(function):
            raise ConfigError(f"{key} is {function!r}, expected a function.", key=key, value=function)
        check_takes(function, key, key, {})
        hook, info_of = _HOOKS[name]
        members[hook] = _as_method(function, info_of)
    warnings.warn(
        "callbacks given as a dict are deprecated; subclass aiorl.DefaultCallbacks instead",
        DeprecationWarning,
        stacklevel=2,
    )
    return type("DictCallbacks", (DefaultCallbacks,), members)


def _as_method(function: InfoFunction, info_of: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[..., None]:
    def call(self: DefaultCallbacks, **given: Any) -> None:
        """Call the function with one dict."""
        function(info_of(given))

    return call
