"""Callbacks in RLlib's older form: a function of one dict for each hook, by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from aiorl.config.code import check_takes, import_object
from aiorl.errors import ConfigError, nearest
from aiorl.sampling import callbacks
from aiorl.sampling.callbacks import DefaultCallbacks


def callbacks_class(setting: str | Mapping[str, Any] | None) -> type[DefaultCallbacks] | None:
    """Return the class that the setting `callbacks` names, or None if there is none.

    Args:
        setting: import path of a subclass of DefaultCallbacks, or import paths of functions by
            hook, as in `callbacks_from_dict`.

    Raises:
        ConfigError: a path is not found or names another kind of object, or a hook does not take
            its arguments.
    """
    if not isinstance(setting, Mapping):
        return callbacks.callbacks_class(setting)
    if not setting:
        return None
    return callbacks_from_dict(
        {
            name: None if path is None else import_object(str(path), key=f"callbacks.{name}")
            for name, path in setting.items()
        }
    )


def named_callbacks(setting: str | Mapping[str, Any] | None) -> type[DefaultCallbacks] | None:
    """Return the class of `callbacks_class`; errors in its hooks become a ConfigError that names
    setting and hook.

    Raises:
        ConfigError: the setting is wrong; see `callbacks_class`.
    """
    kind = callbacks_class(setting)
    return None if kind is None else callbacks.with_named_failures(kind, setting)


_POSTPROCESS = "on_postprocess_traj"
_EPISODE = {"env": "base_env", "episode": "episode"}
_HOOKS = {
    "on_episode_start": _EPISODE,
    "on_episode_step": _EPISODE,
    "on_episode_end": _EPISODE,
    "on_sample_end": {"worker": "worker", "samples": "samples"},
    "on_train_result": {"trainer": "trainer", "result": "result"},
    _POSTPROCESS: {
        "episode": "episode",
        "agent_id": "agent_id",
        "post_batch": "postprocessed_batch",
        "all_pre_batches": "original_batches",
    },
}
"""Entries of a function's dict, by the function's name: entry -> argument of the hook."""

InfoFunction = Callable[[dict[str, Any]], None]


def callbacks_from_dict(functions: Mapping[str, InfoFunction | None]) -> type[DefaultCallbacks]:
    """Make a callbacks class from functions that take one dict.

    Args:
        functions: ``on_episode_start``, ``on_episode_step`` and ``on_episode_end`` get ``env`` and
            ``episode``, ``on_sample_end`` gets ``worker`` and ``samples``, ``on_train_result`` gets
            ``trainer`` and ``result``, ``on_postprocess_traj`` gets ``episode``, ``agent_id``,
            ``pre_batch``, ``post_batch`` and ``all_pre_batches``. None for a hook is nothing, as in
            RLlib's defaults.

    Returns:
        A subclass of DefaultCallbacks.

    Raises:
        ConfigError: a name is unknown, or its value cannot be called with one argument.
    """
    members = {}
    for name, function in functions.items():
        key = f"callbacks.{name}"
        if name not in _HOOKS:
            hint = nearest(str(name), _HOOKS).strip()
            raise ConfigError(f"callbacks has no hook {name!r}.", key=key, value=name, hint=hint)
        if function is None:
            continue
        if not callable(function):
            raise ConfigError(
                f"{key} is {function!r}, expected a function.", key=key, value=function
            )
        check_takes(function, key, key, {})
        members["on_postprocess_trajectory" if name == _POSTPROCESS else name] = _as_method(
            name, function
        )
    warnings.warn(
        "callbacks given as a dict are deprecated; subclass aiorl.DefaultCallbacks instead",
        DeprecationWarning,
        stacklevel=2,
    )
    return type("DictCallbacks", (DefaultCallbacks,), members)


def _as_method(name: str, function: InfoFunction) -> Callable[..., None]:
    def call(self: DefaultCallbacks, **given: Any) -> None:
        """Call the function with one dict."""
        info = {entry: given[argument] for entry, argument in _HOOKS[name].items()}
        if name == _POSTPROCESS:
            info["pre_batch"] = info["all_pre_batches"][info["agent_id"]]
        function(info)

    return call
