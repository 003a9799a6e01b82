"""EnvPlan: description of a worker's environments and their wrappers: the user's, Atari
preprocessing, the monitor.

The monitor uses Gymnasium's recorders to write a line of statistics per episode, and videos of some
episodes. A folder can be used again: statistics are appended, and each start makes a new folder for
videos.
"""

from __future__ import annotations

import inspect
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import gymnasium
import numpy as np
from gymnasium.wrappers import RecordEpisodeStatistics, RecordVideo

from aiorl.config.code import check_objects, import_object, named_failures
from aiorl.data.gym_spaces import is_of_gym
from aiorl.env.atari import is_atari, wrap_deepmind
from aiorl.env.gym_like import AsGymnasium, GymnasiumEnv, StepResult
from aiorl.env.kinds import is_single, kind_of
from aiorl.env.registry import EnvContext, EnvCreator, EnvSource, is_atari_id, loaded_entry
from aiorl.errors import ConfigError
from aiorl.process.imports import install_command

if TYPE_CHECKING:
    # Processes of environments do not need its imports.
    from aiorl.config.worker import WorkerModelConfig

logger = logging.getLogger(__name__)


class WrappingKeys(Protocol):
    """Keys of a config, of a run or of a worker, that decide how environments are wrapped."""

    @property
    def wrappers(self) -> Sequence[str | Mapping[str, Any]]:
        """The user's wrappers."""

    @property
    def preprocessor_pref(self) -> str:
        """Preprocessing of Atari frames."""

    @property
    def model(self) -> WorkerModelConfig:
        """Size of frames, and the user's own preprocessor."""


@dataclass(frozen=True, slots=True)
class Wrapping:
    """Wrappers of single gym-like environments; environments of other kinds are never wrapped.

    Attributes:
        users: the user's own, innermost first: import paths, or mappings of ``class`` and
            ``kwargs``.
        deepmind: True if Atari games get the DeepMind preprocessing.
        dim: side of their square frames, pixels.
        framestack: True if their observations are the last four frames.
        monitor_path: directory for episode statistics and videos; None for no monitor.
    """

    users: Sequence[str | Mapping[str, Any]] = ()
    deepmind: bool = False
    dim: int = 84
    framestack: bool = True
    monitor_path: str | None = None

    @classmethod
    def of(cls, settings: WrappingKeys, monitor_path: str | None = None) -> Self:
        """Return the wrappers of a config; the user's own observation preprocessor replaces
        DeepMind's.
        """
        model = settings.model
        return cls(
            users=tuple(settings.wrappers),
            deepmind=settings.preprocessor_pref == "deepmind" and not model.custom_preprocessor,
            dim=model.dim,
            framestack=model.framestack,
            monitor_path=monitor_path,
        )

    def wraps_atari(self, env: Any) -> bool:
        """Return True if ``wrap`` adds the DeepMind preprocessing to this environment."""
        return self.deepmind and isinstance(env, gymnasium.Env) and is_atari(env)

    def wrap(self, env: Any, context: EnvContext) -> Any:
        """Add the wrappers to an environment.

        Args:
            env: any environment; one that is not gym-like with a single agent is returned
                unchanged. The monitor works with gym-like ones of any dialect.
            context: place where it was made, which names the monitor's folder.

        Raises:
            ConfigError: a package is not installed, or a user's wrapper cannot be applied to the
                environment.
        """
        for position, wrapper in enumerate(self.users):
            env = _wrapped(env, wrapper, f"wrappers[{position}]")
        if not is_single(env):
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
        """Return the environment's settings, with defaults that the wrappers need.

        The monitor needs a render mode for videos, if there is one. The DeepMind preprocessing
        skips frames itself and shows the maximum of the last two, so the Atari game must show every
        frame. A game that does not show its screen in colours is not preprocessed and keeps its own
        frame skip.
        """
        config = dict(env_config)
        if self.deepmind and is_atari_id(creator.gym_id or "") and creator.gym_spec is not None:
            obs_type = {**creator.gym_spec.kwargs, **config}.get("obs_type", "rgb")
            if obs_type == "rgb":
                config.setdefault("frameskip", 1)
        if self.monitor_path is None or "render_mode" in config or creator.gym_spec is None:
            return config
        try:
            env_type = loaded_entry(creator.gym_spec.entry_point)
        except ImportError:  # a better error follows when the environment is made
            return config
        modes = getattr(env_type, "metadata", {}).get("render_modes", ())
        if "rgb_array" in modes:
            config["render_mode"] = "rgb_array"
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvPlan:
    """Description of a worker's environments.

    Attributes:
        env: name, class or function that makes an environment (see ``registry``).
        env_config: the environment's own settings.
        num_envs: number of copies, at least 1.
        vectorize: ``"native"`` the environment's own vectorised form; ``"serial"`` copies stepped
            in turn; ``"remote"`` one process per copy; ``"auto"`` native if there is such a form
            and more than one copy, else serial.
        worker_index: slot of the worker, for the environments' EnvContext.
        horizon: truncate episodes at this many steps; None or 0 = the environment's own limit.
        wrapping: wrappers of each single copy.
        remote_wait_ms: time that a poll of remote copies waits for more once one is ready,
            milliseconds.
        max_restarts_per_hour: number of times per hour that the process of one environment can be
            replaced when it fails; 0 makes every failure an error.
        seed: the worker's seed; None leaves the environments unseeded.
    """

    env: EnvSource
    env_config: Mapping[str, Any] = field(default_factory=dict)
    num_envs: int = 1
    vectorize: str = "serial"
    worker_index: int = 0
    horizon: int | None = None
    wrapping: Wrapping = field(default_factory=Wrapping)
    remote_wait_ms: float = 0.0
    max_restarts_per_hour: int = 0
    seed: int | None = None


def _wrapped(env: Any, wrapper: str | Mapping[str, Any], key: str) -> Any:
    """Wrap an environment in one wrapper of the user's.

    Raises:
        ConfigError: the environment has several agents or copies; or the wrapper cannot be
            imported, fails, or returns another kind of object.
    """
    if not is_single(env):
        raise ConfigError(
            f"{key} is for a gymnasium.Env, but the environment, a {type(env).__name__}, is"
            f" {kind_of(env, '').name}.",
            key=key,
            value=wrapper,
            hint="Add the wrappers in the function that makes the environment.",
        )
    settings = {"class": wrapper} if isinstance(wrapper, str) else dict(wrapper)
    path = settings.pop("class", None)
    kwargs = settings.pop("kwargs", None) or {}
    if not isinstance(path, str) or not isinstance(kwargs, Mapping) or settings:
        raise ConfigError(
            f"{key} is {wrapper!r:.200}, expected 'package.module:Name' or a mapping of class and"
            " kwargs.",
            key=key,
            value=wrapper,
        )
    make = import_object(path, key=key)
    check_objects(kwargs, f"{key}.kwargs")
    is_as_it_is = isinstance(env, gymnasium.Env) or (is_of_gym(make) and is_of_gym(env))
    single = env if is_as_it_is else AsGymnasium(env)
    what = f"{key} {path!r} around {type(single.unwrapped).__name__}"
    wrapped = named_failures(make, what, key)(single, **_as_declared(make, kwargs))
    if not isinstance(wrapped, gymnasium.Env) and not (is_of_gym(wrapped) and is_single(wrapped)):
        raise ConfigError(
            f"{key} {path!r} returned a {type(wrapped).__name__}, expected a gymnasium.Env.",
            key=key,
            value=wrapper,
        )
    return wrapped


def _as_declared(wrapper: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a wrapper's arguments with tuples and arrays for lists where its annotations ask for
    them.

    A file has only lists, and workers get only lists.
    """
    arguments = dict(kwargs)
    try:
        parameters = inspect.signature(wrapper).parameters
    except (TypeError, ValueError):  # some built-in callables have no signature
        return arguments
    for name, value in kwargs.items():
        if not isinstance(value, list | tuple) or name not in parameters:
            continue
        declared = str(parameters[name].annotation).lower()
        if any(word in declared for word in ("list", "sequence", "iterable", "arraylike")):
            continue
        if "tuple" in declared:
            arguments[name] = _tuples(value)
        elif "ndarray" in declared:
            arguments[name] = np.asarray(value)
    return arguments


def _tuples(value: Any) -> Any:
    """Return tuples for lists, however nested."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


STATS_FILE = "episodes.jsonl"


def monitor_env(env: GymnasiumEnv, folder: Path) -> GymnasiumEnv:
    """Record an environment's episodes in a folder.

    Videos require an environment that renders images (``render_mode: rgb_array``) and moviepy
    (extra ``video``). They show episodes 0, 1, 8, 27 and so on, then every thousandth.

    Args:
        env: the environment, with the wrappers that the policy sees.
        folder: created if missing; no other process may write to it at the same time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if env.render_mode not in ("rgb_array", "rgb_array_list"):
        logger.info(
            "%s: no videos, since its render_mode is %s, not rgb_array", env, env.render_mode
        )
    else:
        # Each start gets its own folder: Gymnasium numbers from 0 again and warns about existing
        # folders.
        numbers = [int(earlier.name.split("-")[1]) for earlier in folder.glob("videos-*")]
        videos = folder / f"videos-{max(numbers, default=0) + 1}"
        try:
            env = RecordVideo(env, str(videos), name_prefix="video")
        except gymnasium.error.DependencyNotInstalled:
            logger.warning(
                "no videos are recorded: moviepy is missing; %s", install_command("video")
            )
    return StatsFile(RecordEpisodeStatistics(env), folder / STATS_FILE)


class StatsFile(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that appends one JSON object per finished episode to a file: reward, length, seconds
    and end time.
    """

    def __init__(self, env: RecordEpisodeStatistics[Any, Any], path: Path) -> None:
        """Open the file for appending."""
        super().__init__(env)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def step(self, action: Any) -> StepResult:
        """Step once and record an episode's end."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            episode = info["episode"]
            line = {
                "reward": float(episode["r"]),
                "length": int(episode["l"]),
                "seconds": float(episode["t"]),
                "ended_at": time.time(),
            }
            self._file.write(json.dumps(line) + "\n")
        return obs, reward, terminated, truncated, info

    def close(self) -> None:
        """Close the environment and the file."""
        super().close()
        self._file.close()
