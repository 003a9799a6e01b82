"""DefaultCallbacks: hooks into sampling and training, and when each is called.

Override the hooks you need in a subclass. Each worker makes one object of it, and so does the
learner, for `on_train_result`. All other hooks run in the sampling thread, between two steps, so
they slow down sampling.
"""

from __future__ import annotations

import inspect
from typing import Any

from aiorl.config.code import check_takes, import_object, named_failures
from aiorl.errors import ConfigError


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


def callbacks_class(path: str | None) -> type[DefaultCallbacks] | None:
    """Return the subclass of DefaultCallbacks named by the setting `callbacks`; None if there is
    none.

    Raises:
        ConfigError: the path is not found or names another object, or a hook does not take its
            arguments.
    """
    if not path:
        return None
    kind = import_object(path, key="callbacks")
    if isinstance(kind, DefaultCallbacks):  # its creator wants one object to be shared
        hooks = {name: staticmethod(getattr(kind, name)) for name in overridden_hooks(type(kind))}
        kind = type(type(kind).__name__, (DefaultCallbacks,), hooks)
    if not (isinstance(kind, type) and issubclass(kind, DefaultCallbacks)):
        raise ConfigError(
            f"callbacks is {path!r}, expected a subclass of aiorl.DefaultCallbacks.",
            key="callbacks",
            value=path,
        )
    for name in overridden_hooks(kind):
        hook = getattr(kind, name)
        is_static = isinstance(inspect.getattr_static(kind, name), staticmethod | classmethod)
        positional = () if is_static else (None,)
        known = inspect.signature(getattr(DefaultCallbacks, name)).parameters.values()
        keywords = {
            parameter.name: None for parameter in known if parameter.kind is parameter.KEYWORD_ONLY
        }
        check_takes(hook, f"callbacks {path!r}: {name}", "callbacks", *positional, **keywords)
    return kind


def with_named_failures(kind: type[DefaultCallbacks], setting: Any) -> type[DefaultCallbacks]:
    """Return a class whose hooks raise a ConfigError with the names of the setting and the hook."""

    def guarded(name: str) -> Any:
        hook = named_failures(
            getattr(kind, name), f"callbacks {setting!r:.200}: {name}", "callbacks"
        )
        is_method = not isinstance(inspect.getattr_static(kind, name), staticmethod | classmethod)
        return hook if is_method else staticmethod(hook)

    return type(kind.__name__, (kind,), {name: guarded(name) for name in overridden_hooks(kind)})


def overridden_hooks(callbacks: DefaultCallbacks | type[DefaultCallbacks]) -> frozenset[str]:
    """Return the names of the hooks that an object or a class overrides."""
    own = {
        name: getattr(callbacks, name) for name in vars(DefaultCallbacks) if name.startswith("on_")
    }
    return frozenset(
        name
        for name, hook in own.items()
        if getattr(hook, "__func__", hook) is not getattr(DefaultCallbacks, name)
    )


def worker_hooks(kind: type[DefaultCallbacks]) -> frozenset[str]:
    """Return the names of the hooks that a class overrides and workers call, without the
    learner's.
    """
    return overridden_hooks(kind) - {"on_train_result"}
