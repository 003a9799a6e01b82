"""DefaultCallbacks: the hooks into sampling and training, and when each of them is called.

A subclass overrides what it needs; each worker makes one object of it, and so does the learner, for
`on_train_result`. All other hooks run in the thread that samples, between two steps: what they take, sampling waits
for.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from aiorl.config.import_path import import_object
from aiorl.config.user_function import check_takes, named_failures
from aiorl.errors import ConfigError, nearest

__all__ = [
    "DefaultCallbacks",
    "callbacks_class",
    "callbacks_from_dict",
    "named_callbacks",
    "overridden_hooks",
    "worker_hooks",
]


class DefaultCallbacks:
    """Hooks that do nothing. All arguments are keywords; accept ``**kwargs`` to be safe against new ones."""

    def on_episode_start(self, *, worker: Any, base_env: Any, policies: Any, episode: Any, **kwargs: Any) -> None:
        """A new episode has its first observation in hand; exploration's own hooks have run.

        Args:
            worker: the RolloutWorker that samples.
            base_env: its environment.
            policies: policy id -> policy.
            episode: the MultiAgentEpisode; ``user_data`` is free for use.
            **kwargs: what later versions may add.
        """

    def on_episode_step(self, *, worker: Any, base_env: Any, episode: Any, **kwargs: Any) -> None:
        """An environment has been polled and its rows are recorded; once per environment and poll.

        Also for a first observation that came by a poll, but not for one that came from a reset in line.
        """

    def on_episode_end(self, *, worker: Any, base_env: Any, policies: Any, episode: Any, **kwargs: Any) -> None:
        """An episode is over; custom metrics and history added here still enter its report."""

    def on_postprocess_trajectory(
        self,
        *,
        worker: Any,
        episode: Any,
        agent_id: Any,
        policy_id: str,
        policies: Any,
        postprocessed_batch: Any,
        original_batches: Any,
        **kwargs: Any,
    ) -> None:
        """A policy has postprocessed one agent's trajectory; the batch may be changed in place.

        Where rows in between were not recorded, the rows before and behind them are a trajectory each.

        Args:
            worker: the RolloutWorker that samples.
            episode: the episode it comes from.
            agent_id: the agent.
            policy_id: its policy.
            policies: policy id -> policy.
            postprocessed_batch: what goes on to learning.
            original_batches: agent id -> (policy, batch before postprocessing), of all agents.
            **kwargs: what later versions may add.
        """

    def on_sample_end(self, *, worker: Any, samples: Any, **kwargs: Any) -> None:
        """``RolloutWorker.sample`` has a batch; it may be changed in place before it is written or returned."""

    def on_train_result(self, *, trainer: Any, result: dict[str, Any], **kwargs: Any) -> None:
        """A training iteration is over; what is changed in the result is logged and returned changed.

        Called in the learner, on an object of its own; everything else there waits for it.

        Args:
            trainer: what trains.
            result: the iteration's result; may be changed in place, by numbers, strings, lists and dicts.
            **kwargs: what later versions may add.
        """


def callbacks_class(setting: str | Mapping[str, Any] | None) -> type[DefaultCallbacks] | None:
    """The class that the setting `callbacks` names; None where it names none.

    Args:
        setting: import path of a subclass of DefaultCallbacks; or, of the older form, import paths of functions by
            the names that `callbacks_from_dict` takes.

    Raises:
        ConfigError: something that is not found, or is no callbacks, or a hook that does not take its arguments.
    """
    if not setting:
        return None
    if isinstance(setting, Mapping):
        return callbacks_from_dict(
            {name: import_object(str(path), key=f"callbacks.{name}") for name, path in setting.items()}
        )
    kind = import_object(setting, key="callbacks")
    if isinstance(kind, DefaultCallbacks):  # one object for all who ask, as whoever made it wants
        hooks = {name: staticmethod(getattr(kind, name)) for name in _own_hooks(type(kind))}
        kind = type(type(kind).__name__, (DefaultCallbacks,), hooks)
    if not (isinstance(kind, type) and issubclass(kind, DefaultCallbacks)):
        raise ConfigError(
            f"callbacks is {setting!r}, expected a subclass of aiorl.DefaultCallbacks.", key="callbacks", value=setting
        )
    for name in _own_hooks(kind):
        hook = getattr(kind, name)
        is_static = isinstance(inspect.getattr_static(kind, name), staticmethod | classmethod)
        positional = () if is_static else (None,)
        check_takes(hook, f"callbacks {setting!r}: {name}", "callbacks", *positional, **_arguments_of(name))
    return kind


def named_callbacks(setting: str | Mapping[str, Any] | None) -> type[DefaultCallbacks] | None:
    """As `callbacks_class`, but what a hook raises becomes a ConfigError that names the class and the hook.

    Raises:
        ConfigError: see `callbacks_class`.
    """
    kind = callbacks_class(setting)
    if kind is None:
        return None
    named = setting if isinstance(setting, str) else dict(setting or {})

    def guarded(name: str) -> Any:
        hook = named_failures(getattr(kind, name), f"callbacks {named!r:.200}: {name}", "callbacks")
        is_method = not isinstance(inspect.getattr_static(kind, name), staticmethod | classmethod)
        return hook if is_method else staticmethod(hook)

    return type(kind.__name__, (kind,), {name: guarded(name) for name in _own_hooks(kind)})


def overridden_hooks(callbacks: DefaultCallbacks) -> frozenset[str]:
    """Names of the hooks that do something: those of its class, or its own, that are not DefaultCallbacks'."""
    return frozenset(
        name
        for name, default in vars(DefaultCallbacks).items()
        if name.startswith("on_") and getattr(getattr(callbacks, name), "__func__", None) is not default
    )


def worker_hooks(kind: type[DefaultCallbacks]) -> set[str]:
    """Names of the hooks that a class overrides and workers call; the learner has its own."""
    return set(_own_hooks(kind)) - {"on_train_result"}


def _own_hooks(kind: type[DefaultCallbacks]) -> list[str]:
    """Names of the hooks that a class overrides."""
    hooks = [name for name in vars(DefaultCallbacks) if name.startswith("on_")]
    return [name for name in hooks if getattr(kind, name) is not getattr(DefaultCallbacks, name)]


def _arguments_of(name: str) -> dict[str, None]:
    """Names of the arguments that a hook is given."""
    parameters = inspect.signature(getattr(DefaultCallbacks, name)).parameters.values()
    return {parameter.name: None for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


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
    """A callbacks class of the older form: functions by name, each taking one dict.

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
