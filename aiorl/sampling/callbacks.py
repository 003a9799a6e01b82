"""DefaultCallbacks: hooks into sampling and training, and when each is called.

Override the hooks you need in a subclass. Each worker makes one object of it, and so does the
learner, for `on_train_result`. All other hooks run in the sampling thread, between two steps, so
they slow down sampling.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from aiorl.config.code import check_takes, import_object, named_failures
from aiorl.errors import ConfigError, nearest


class DefaultCallbacks:
    """Hooks that do nothing.

    All arguments are keywords; accept ``**kwargs`` for arguments of later versions.
    """

    def on_episode_start(
        self, *, worker: Any, base_env: Any, policies: Any, episode: Any, **kwargs: Any
    ) -> None:
        """Handle the start of an episode, after its first observation and after exploration's own
        hooks.

        Args:
            worker: the RolloutWorker that samples.
            base_env: its environments.
            policies: policy id -> policy.
            episode: the MultiAgentEpisode; ``user_data`` is free for use.
            **kwargs: arguments of later versions.
        """

    def on_episode_step(self, *, worker: Any, base_env: Any, episode: Any, **kwargs: Any) -> None:
        """Handle a step of an environment, after its rows are recorded; called once per environment
        step.

        It is not called for the first observation of an episode: for that there is
        `on_episode_start`.

        Args:
            worker: the RolloutWorker that samples.
            base_env: its environments.
            episode: the MultiAgentEpisode.
            **kwargs: arguments of later versions.
        """

    def on_episode_end(
        self, *, worker: Any, base_env: Any, policies: Any, episode: Any, **kwargs: Any
    ) -> None:
        """Handle the end of an episode; custom metrics and history added here are still reported.

        Args:
            worker: the RolloutWorker that samples.
            base_env: its environments.
            policies: policy id -> policy.
            episode: the MultiAgentEpisode.
            **kwargs: arguments of later versions.
        """

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
        """Handle one agent's postprocessed trajectory; the batch can be changed in place.

        If rows in between were not recorded, the rows before and after them are a trajectory each.

        Args:
            worker: the RolloutWorker that samples.
            episode: the trajectory's episode.
            agent_id: the agent.
            policy_id: its policy.
            policies: policy id -> policy.
            postprocessed_batch: SampleBatch to learn from, with columns ``[B, ...]``.
            original_batches: agent id -> (policy, batch before postprocessing), of all agents.
            **kwargs: arguments of later versions.
        """

    def on_sample_end(self, *, worker: Any, samples: Any, **kwargs: Any) -> None:
        """Handle a batch of ``RolloutWorker.sample``, which can be changed in place before it is
        used.

        Args:
            worker: the RolloutWorker that samples.
            samples: SampleBatch, or MultiAgentBatch, of the experience.
            **kwargs: arguments of later versions.
        """

    def on_train_result(self, *, trainer: Any, result: dict[str, Any], **kwargs: Any) -> None:
        """Handle the result of a training iteration; changes to it are logged and returned.

        It is called in the learner, on a separate object; the learner waits for it.

        Args:
            trainer: the trainer.
            result: the iteration's result; add or change numbers, strings, lists and dicts in
                place.
            **kwargs: arguments of later versions.
        """


def callbacks_class(setting: str | Mapping[str, Any] | None) -> type[DefaultCallbacks] | None:
    """Return the class that the setting `callbacks` names, or None if there is none.

    Args:
        setting: import path of a subclass of DefaultCallbacks, or import paths of functions by
            hook, as in `callbacks_from_dict`.

    Raises:
        ConfigError: a path is not found or names another kind of object, or a hook does not take
            its arguments.
    """
    if not setting:
        return None
    if isinstance(setting, Mapping):
        return callbacks_from_dict(
            {
                name: None if path is None else import_object(str(path), key=f"callbacks.{name}")
                for name, path in setting.items()
            }
        )
    kind = import_object(setting, key="callbacks")
    if isinstance(kind, DefaultCallbacks):  # its creator wants one object to be shared
        hooks = {name: staticmethod(getattr(kind, name)) for name in overridden_hooks(type(kind))}
        kind = type(type(kind).__name__, (DefaultCallbacks,), hooks)
    if not (isinstance(kind, type) and issubclass(kind, DefaultCallbacks)):
        raise ConfigError(
            f"callbacks is {setting!r}, expected a subclass of aiorl.DefaultCallbacks.",
            key="callbacks",
            value=setting,
        )
    for name in overridden_hooks(kind):
        hook = getattr(kind, name)
        positional = () if _is_static(kind, name) else (None,)
        parameters = inspect.signature(getattr(DefaultCallbacks, name)).parameters.values()
        keywords = {
            parameter.name: None
            for parameter in parameters
            if parameter.kind is parameter.KEYWORD_ONLY
        }
        check_takes(hook, f"callbacks {setting!r}: {name}", "callbacks", *positional, **keywords)
    return kind


def named_callbacks(setting: str | Mapping[str, Any] | None) -> type[DefaultCallbacks] | None:
    """Return the class of `callbacks_class`; errors in its hooks become a ConfigError that names
    setting and hook.

    Raises:
        ConfigError: the setting is wrong; see `callbacks_class`.
    """
    kind = callbacks_class(setting)
    return None if kind is None else with_named_failures(kind, setting)


def with_named_failures(kind: type[DefaultCallbacks], setting: Any) -> type[DefaultCallbacks]:
    """Return a class whose hooks raise a ConfigError with the names of the setting and the hook."""

    def guarded(name: str) -> Any:
        hook = named_failures(
            getattr(kind, name), f"callbacks {setting!r:.200}: {name}", "callbacks"
        )
        return staticmethod(hook) if _is_static(kind, name) else hook

    return type(kind.__name__, (kind,), {name: guarded(name) for name in overridden_hooks(kind)})


def _is_static(kind: type[DefaultCallbacks], name: str) -> bool:
    """Return True if a hook is called without an object of its class."""
    return isinstance(inspect.getattr_static(kind, name), staticmethod | classmethod)


def overridden_hooks(callbacks: DefaultCallbacks | type[DefaultCallbacks]) -> frozenset[str]:
    """Return the names of the hooks that an object or a class overrides."""
    hooks = {
        name: getattr(callbacks, name) for name in vars(DefaultCallbacks) if name.startswith("on_")
    }
    return frozenset(
        name
        for name, hook in hooks.items()
        # the class has functions, an object has methods of them
        if getattr(hook, "__func__", hook) is not getattr(DefaultCallbacks, name)
    )


def worker_hooks(kind: type[DefaultCallbacks]) -> frozenset[str]:
    """Return the names of the hooks that a class overrides and workers call, without the
    learner's.
    """
    return overridden_hooks(kind) - {"on_train_result"}


# --- RLlib's older form: a function of one dict for each hook ---

_POSTPROCESS = "on_postprocess_traj"
_NEW_NAMES = {_POSTPROCESS: "on_postprocess_trajectory"}
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
        members[_NEW_NAMES.get(name, name)] = _as_method(name, function)
    warnings.warn(
        "callbacks given as a dict are deprecated; subclass aiorl.DefaultCallbacks instead",
        DeprecationWarning,
        stacklevel=2,
    )
    return type("DictCallbacks", (DefaultCallbacks,), members)


def _as_method(name: str, function: InfoFunction) -> Callable[..., None]:
    def call(self: DefaultCallbacks, **arguments: Any) -> None:
        """Call the function with one dict."""
        info = {entry: arguments[argument] for entry, argument in _HOOKS[name].items()}
        if name == _POSTPROCESS:
            info["pre_batch"] = info["all_pre_batches"][info["agent_id"]]
        function(info)

    return call
