"""DefaultCallbacks: the hooks into sampling and training, and when each of them is called.

A subclass overrides what it needs; each worker makes one object of it, and so does the learner, for
`on_train_result`. All other hooks run in the thread that samples, between two steps: what they take, sampling waits
for.
"""

from __future__ import annotations

import inspect
from typing import Any

from aiorl.config.code import check_takes, import_object, named_failures
from aiorl.errors import ConfigError


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


def callbacks_class(path: str | None) -> type[DefaultCallbacks] | None:
    """Return the subclass of DefaultCallbacks that the setting `callbacks` names; None without one.

    Raises:
        ConfigError: a path that is not found or names something else, or a hook that does not take its arguments.
    """
    if not path:
        return None
    kind = import_object(path, key="callbacks")
    if isinstance(kind, DefaultCallbacks):  # one object for all who ask, as whoever made it wants
        hooks = {name: staticmethod(getattr(kind, name)) for name in overridden_hooks(type(kind))}
        kind = type(type(kind).__name__, (DefaultCallbacks,), hooks)
    if not (isinstance(kind, type) and issubclass(kind, DefaultCallbacks)):
        raise ConfigError(
            f"callbacks is {path!r}, expected a subclass of aiorl.DefaultCallbacks.", key="callbacks", value=path
        )
    for name in overridden_hooks(kind):
        hook = getattr(kind, name)
        is_static = isinstance(inspect.getattr_static(kind, name), staticmethod | classmethod)
        positional = () if is_static else (None,)
        known = inspect.signature(getattr(DefaultCallbacks, name)).parameters.values()
        keywords = {parameter.name: None for parameter in known if parameter.kind is parameter.KEYWORD_ONLY}
        check_takes(hook, f"callbacks {path!r}: {name}", "callbacks", *positional, **keywords)
    return kind


def with_named_failures(kind: type[DefaultCallbacks], setting: Any) -> type[DefaultCallbacks]:
    """Return a class whose hooks raise a ConfigError that names the setting and the hook."""

    def guarded(name: str) -> Any:
        hook = named_failures(getattr(kind, name), f"callbacks {setting!r:.200}: {name}", "callbacks")
        is_method = not isinstance(inspect.getattr_static(kind, name), staticmethod | classmethod)
        return hook if is_method else staticmethod(hook)

    return type(kind.__name__, (kind,), {name: guarded(name) for name in overridden_hooks(kind)})


def overridden_hooks(callbacks: DefaultCallbacks | type[DefaultCallbacks]) -> frozenset[str]:
    """Names of the hooks of an object or a class that do something: those that are not DefaultCallbacks' own."""
    own = {name: getattr(callbacks, name) for name in vars(DefaultCallbacks) if name.startswith("on_")}
    return frozenset(
        name for name, hook in own.items() if getattr(hook, "__func__", hook) is not getattr(DefaultCallbacks, name)
    )


def worker_hooks(kind: type[DefaultCallbacks]) -> frozenset[str]:
    """Names of the hooks that a class overrides and workers call; the learner has its own."""
    return overridden_hooks(kind) - {"on_train_result"}
