"""The wrappers that a worker puts around environments: a user's, then Atari preprocessing, then the monitor."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import gymnasium

from aiorl.config.code import import_object, named_failures
from aiorl.env.atari import is_atari, wrap_deepmind
from aiorl.env.gym_like import AsGymnasium, is_gym_like
from aiorl.env.kinds import kind_of
from aiorl.env.monitor import monitor_env
from aiorl.env.registry import EnvContext, EnvCreator, is_atari_id, loaded_entry
from aiorl.errors import ConfigError

if TYPE_CHECKING:
    from aiorl.config.worker import WorkerConfig  # an environment's own process has no use for what checks settings

__all__ = ["Wrapping"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wrapping:
    """Which wrappers single gym-like environments get; every other kind is never wrapped.

    Attributes:
        users: a user's own, the innermost first: import paths, or mappings of ``class`` and ``kwargs``.
        deepmind: Atari games get the DeepMind preprocessing.
        dim: side of their square frames, pixels.
        framestack: their observations are the last four frames.
        monitor_path: directory for episode statistics and videos; None for no monitor.
    """

    users: Sequence[str | Mapping[str, Any]] = ()
    deepmind: bool = False
    dim: int = 84
    framestack: bool = True
    monitor_path: str | None = None

    @classmethod
    def of(cls, settings: WorkerConfig, monitor_path: str | None = None) -> Self:
        """The wrappers that settings ask for; an observation preprocessor of the user's own replaces DeepMind's."""
        model = settings.model
        return cls(
            users=tuple(settings.wrappers),
            deepmind=settings.preprocessor_pref == "deepmind" and not model.custom_preprocessor,
            dim=model.dim,
            framestack=model.framestack,
            monitor_path=monitor_path,
        )

    def wraps_atari(self, env: Any) -> bool:
        """Whether ``wrap`` will put the DeepMind preprocessing around this environment."""
        return self.deepmind and isinstance(env, gymnasium.Env) and is_atari(env)

    def wrap(self, env: Any, context: EnvContext) -> Any:
        """The environment with its wrappers.

        Args:
            env: any environment; those that are not single gym-like ones are returned as they are. The monitor takes
                gym-like ones of any dialect.
            context: where it was made; names the monitor's folder.

        Raises:
            ConfigError: what the wrappers need is not installed; or a user's own can't be put around the environment.
        """
        for position, wrapper in enumerate(self.users):
            env = _wrapped(env, wrapper, f"wrappers[{position}]")
        if not is_gym_like(env) or not kind_of(env, "").is_single:
            if self.monitor_path is not None:
                logger.info("environments of kind %s are not monitored", type(env).__name__)
            return env
        if self.wraps_atari(env):
            env = wrap_deepmind(env, self.dim, self.framestack)
        if self.monitor_path is not None:
            name = f"worker-{context.worker_index}-env-{context.vector_index}"
            single = env if isinstance(env, gymnasium.Env) else AsGymnasium(env)
            env = monitor_env(single, Path(self.monitor_path) / name)
        return env

    def env_config(self, creator: EnvCreator, env_config: Mapping[str, Any]) -> dict[str, Any]:
        """The environment's settings, with what the wrappers need and the user has not set.

        That is a render mode that the monitor can film in, where there is one; and an Atari game that shows every
        frame, since DeepMind's preprocessing skips them itself: it shows the maximum of the last two. A game that
        does not show its screen in colours gets no such preprocessing, and keeps its own frame skip.
        """
        config = dict(env_config)
        if self.deepmind and is_atari_id(creator.gym_id or "") and creator.gym_spec is not None:
            obs_type = {**creator.gym_spec.kwargs, **config}.get("obs_type", "rgb")
            if obs_type == "rgb":
                config.setdefault("frameskip", 1)
        if self.monitor_path is None or "render_mode" in config or creator.gym_spec is None:
            return config
        try:
            made_by = loaded_entry(creator.gym_spec.entry_point)
        except ImportError:  # told better when the environment is made
            return config
        modes = getattr(made_by, "metadata", {}).get("render_modes", ())
        return {**config, "render_mode": "rgb_array"} if "rgb_array" in modes else config


def _wrapped(env: Any, wrapper: str | Mapping[str, Any], key: str) -> gymnasium.Env[Any, Any]:
    """Put one wrapper of a user's around an environment.

    Raises:
        ConfigError: the environment is no single one, or the wrapper can't be imported, fails, or gives something else.
    """
    if not is_gym_like(env) or not kind_of(env, "").is_single:
        raise ConfigError(
            f"{key} is for a gymnasium.Env, and the environment, a {type(env).__name__}, is {kind_of(env, '').name}.",
            key=key, value=wrapper, hint="Have what makes the environment put the wrappers into it.",
        )  # fmt: skip
    settings = {"class": wrapper} if isinstance(wrapper, str) else dict(wrapper)
    path, kwargs = settings.pop("class", None), settings.pop("kwargs", None) or {}
    if not isinstance(path, str) or not isinstance(kwargs, Mapping) or settings:
        raise ConfigError(
            f"{key} is {wrapper!r:.200}, expected 'package.module:Name' or a mapping of class and kwargs.",
            key=key, value=wrapper,
        )  # fmt: skip
    make = import_object(path, key=key)
    single = env if isinstance(env, gymnasium.Env) else AsGymnasium(env)
    made = named_failures(make, f"{key} {path!r} around {type(single.unwrapped).__name__}", key)(single, **kwargs)
    if not isinstance(made, gymnasium.Env):
        raise ConfigError(
            f"{key} {path!r} gave a {type(made).__name__}, expected a gymnasium.Env.", key=key, value=wrapper
        )
    return made
