"""Adapter for all of Gym's dialects: one- or two-value ``reset``, four- or five-value ``step``.

Results always have Gymnasium's form: ``(obs, info)`` and ``(obs, reward, terminated, truncated,
info)``.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

from aiorl.data.gym_spaces import gymnasium_space, is_of_gym
from aiorl.env.base_env import FinishedGame, SettingsChange, has_settings_method
from aiorl.errors import ConfigError, UnsupportedEnvError

logger = logging.getLogger(__name__)

_PICTURE = "rgb_array"
_INTERFACE = ("reset", "step", "observation_space", "action_space")

GymnasiumEnv = gymnasium.Env[Any, Any]

ResetResult = tuple[Any, dict[str, Any]]
"""Observation and info."""

StepResult = tuple[Any, Any, Any, Any, Any]
"""Observation, reward, terminated, truncated and info."""


def is_gym_like(env: Any) -> bool:
    """Return True if an object has ``reset``, ``step`` and both spaces."""
    return all(hasattr(env, name) for name in _INTERFACE)


def is_pair(result: Any) -> bool:
    """Return True for a tuple of two values, as ``reset`` returns since gym 0.26."""
    return isinstance(result, tuple) and len(result) == 2


def check_gym_like(env: Any, env_id: str) -> None:
    """Raise an error if an environment is not gym-like.

    Raises:
        UnsupportedEnvError: reset, step or a space is missing.
    """
    if callable(getattr(env, "observation_space", None)) and hasattr(env, "possible_agents"):
        raise UnsupportedEnvError(
            f"environment {env_id!r} made a {type(env).__name__}, which is one of PettingZoo: name"
            " its module, such as 'pettingzoo:classic.rps_v2', or return"
            " aiorl.env.pettingzoo.ParallelEnv(env) or AECEnv(env)"
        )
    lacking = [name for name in _INTERFACE if not hasattr(env, name)]
    if lacking:
        raise UnsupportedEnvError(
            f"environment {env_id!r} made a {type(env).__name__}, which has no {', '.join(lacking)}"
        )


def check_seedable(env: Any, env_id: str) -> None:
    """Raise an error if an environment has neither a ``reset`` that takes a seed nor a ``seed``
    method.

    Raises:
        ConfigError: the environment cannot be seeded.
    """
    inner: Any = env.unwrapped if isinstance(env, gymnasium.Wrapper) else env
    # Wrappers around AsGymnasium take any seed, so the environment inside must take it.
    seeded = env if isinstance(inner, gymnasium.Env) else inner
    if not _reset_takes_seed(seeded) and not _has_seed_method(seeded):
        raise ConfigError(
            f"a seed is set, but environment {env_id!r} ({type(seeded).__name__}) cannot be seeded:"
            " its reset takes no seed, and it has no method 'seed' of its own.",
            key="seed",
            hint="Leave seed out, or let reset take it: reset(self, *, seed=None, options=None).",
        )


def seed_env(env: Any, seed: int | None) -> dict[str, int]:
    """Seed an environment and return the keyword arguments for its next ``reset``.

    Args:
        env: an environment that can be seeded.
        seed: the seed; None leaves the environment as it is.
    """
    if seed is None:
        return {}
    if _reset_takes_seed(env):
        return {"seed": seed}
    env.seed(seed)
    return {}


def seed_env_now(env: Any, env_id: str, seed: int) -> None:
    """Seed an environment of a kind that does not begin episodes with ``reset``.

    Raises:
        ConfigError: the environment cannot be seeded.
    """
    check_seedable(env, env_id)
    if callable(getattr(env, "seed", None)):
        env.seed(seed)
    else:
        env.reset(seed=seed)


def reset_env(env: Any, keywords: Mapping[str, int] | None = None) -> ResetResult:
    """Begin an episode and return its observation and info, for either form of ``reset``.

    Args:
        env: any environment.
        keywords: result of ``seed_env``; None for none.
    """
    result = env.reset(**(keywords or {}))
    has_info = is_pair(result) and (result[1] is None or isinstance(result[1], dict))
    if has_info and not isinstance(env, gymnasium.Env):
        # An old environment's observation may itself be such a pair.
        space = gymnasium_space(getattr(env, "observation_space", None))
        has_info = not (isinstance(space, gymnasium.spaces.Tuple) and space.contains(result))
    if not has_info:
        return result, {}
    obs, info = result
    return obs, info or {}


def to_five_values(result: Any) -> StepResult:
    """Return Gymnasium's five values from the result of ``step``.

    Four values are the old form: ``done`` is a truncation if the info says so
    (``TimeLimit.truncated``), else a terminal state.

    Raises:
        ValueError: the number of values is not four or five.
    """
    if not isinstance(result, tuple | list) or len(result) not in (4, 5):
        raise ValueError(f"step returned {result!r:.200}, expected 5 values (or 4, the old form)")
    if len(result) == 5:
        obs, reward, terminated, truncated, info = result
        return obs, reward, terminated, truncated, info
    obs, reward, is_over, info = result
    if isinstance(is_over, str | bytes):
        raise ValueError(f"step returned {is_over!r:.50} as done, expected True or False")
    truncated = bool(is_over) and bool((info or {}).get("TimeLimit.truncated", False))
    terminated = bool(is_over) and not truncated
    return obs, reward, terminated, truncated, info


def close_env(env: Any) -> None:
    """Close an environment if it has a ``close`` method."""
    close = getattr(env, "close", None)
    if callable(close):
        close()


def with_settings(env: Any, change: SettingsChange, index: int) -> Any:
    """Return an environment with other settings: the same one if it, or the environment in its
    wrappers, has a method ``set_env_config``; otherwise a new one, and the old one is closed.

    Args:
        env: a copy whose episode has ended.
        change: the settings.
        index: index of the copy.

    Raises:
        ConfigError: its spaces or its limit of steps have changed, which a run relies on.
        Exception: code of the environment raised it.
    """
    before = _fixed_facts(env)
    taker = next((layer for layer in layers_of(env) if has_settings_method(layer)), None)
    if taker is not None:
        taker.set_env_config(copied(change.config))
    else:
        close_env(env)
        env = change.make(index)
    for name, value in _fixed_facts(env).items():
        if value != before[name]:
            raise ConfigError(
                f"other settings of the environment changed its {name} from {before[name]} to"
                f" {value}.",
                key="env_config",
                hint="Networks and fragments are made for it: begin another run instead.",
            )
    return env


def _fixed_facts(env: Any) -> dict[str, Any]:
    """Return the properties of an environment that can't change during a run, by name."""
    names = ("observation_space", "action_space", "observation_spaces", "action_spaces")
    facts = {name: gymnasium_space(getattr(env, name, None)) for name in names}
    facts["limit of steps"] = episode_limit(env)
    return facts


def close_all(envs: Sequence[Any]) -> None:
    """Close all environments, even if closing one of them raises."""
    with contextlib.ExitStack() as last_first:
        for env in reversed(envs):
            last_first.callback(close_env, env)


def _reset_takes_seed(env: Any) -> bool:
    try:
        parameters = inspect.signature(env.reset).parameters
    except (AttributeError, TypeError, ValueError):
        return False
    if "seed" in parameters:
        return True
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if passes_on and is_of_gym(env):
        layers = layers_of(env)
        return len(layers) > 1 and _reset_takes_seed(layers[1])
    return passes_on and not callable(getattr(env, "seed", None))


def _has_seed_method(env: Any) -> bool:
    """Return True if an environment has a ``seed`` method that does something."""
    if not callable(getattr(env, "seed", None)):
        return False
    kind = type(layers_of(env)[-1])
    # The method of gym.Env itself only warns, unless there are the random numbers of gym 0.22 or
    # later.
    is_inherited = getattr(getattr(kind, "seed", None), "__module__", None) == "gym.core"
    return not is_inherited or hasattr(kind, "np_random")


def layers_of(env: Any) -> list[Any]:
    """Return an environment's wrappers of Gymnasium or gym, outermost first, and then the
    environment in them.
    """
    layers = [env]
    while _is_wrapper(layers[-1]):
        layers.append(layers[-1].env)
    return layers


def innermost(env: Any) -> Any:
    """Return an environment without wrappers of Gymnasium or gym."""
    inner = layers_of(env)[-1]
    return inner.unwrapped if isinstance(inner, gymnasium.Env) else inner


def _is_wrapper(env: Any) -> bool:
    if isinstance(env, gymnasium.Wrapper | AsGymnasium):
        return True
    return any(
        base.__name__ == "Wrapper" and base.__module__ == "gym.core" for base in type(env).__mro__
    )


def episode_limit(env: Any) -> int | None:
    """Return the number of steps after which the environment truncates an episode; None if
    unknown.
    """
    for layer in layers_of(env):
        limit = getattr(getattr(layer, "spec", None), "max_episode_steps", None)
        if limit is None and any(base.__name__ == "TimeLimit" for base in type(layer).__mro__):
            # The wrapper has no public name for it.
            limit = getattr(layer, "_max_episode_steps", None)
        if limit is not None:
            return int(limit) if isinstance(limit, Integral) else None
    return None


class AsGymnasium(gymnasium.Env[Any, Any]):
    """Gym-like environment of any dialect in Gymnasium's form, for Gymnasium's wrappers.

    ``unwrapped`` is the environment itself. One whose ``render`` takes a mode, as before gym 0.26,
    shows its picture if it can.
    """

    def __init__(self, env: Any) -> None:
        """Take over the environment; it is closed with this object."""
        self.env = env
        self.observation_space = gymnasium_space(env.observation_space)
        self.action_space = gymnasium_space(env.action_space)
        self.metadata = dict(getattr(env, "metadata", None) or {})
        self.render_mode = getattr(env, "render_mode", None)
        self._renders_by_mode = _renders_by_mode(env)
        if self._renders_by_mode:
            modes = self.metadata.get("render_modes") or self.metadata.get("render.modes") or ()
            self.metadata["render_modes"] = list(modes)
            old_frequency = self.metadata.get("video.frames_per_second")
            frequency = self.metadata.get("render_fps") or old_frequency
            if frequency:
                self.metadata["render_fps"] = frequency
            self.render_mode = _PICTURE if _PICTURE in modes else None
        spec = getattr(env, "spec", None)
        if spec is not None and not isinstance(spec, EnvSpec):
            # Wrappers add themselves to the spec, which only Gymnasium's own class supports.
            spec = EnvSpec(type(env).__name__, max_episode_steps=episode_limit(env))
        self.spec = spec

    @property
    def unwrapped(self) -> Any:
        """The environment without wrappers."""
        return self.env

    def reset(
        self,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> ResetResult:
        """Begin an episode; options are ignored, since environments of other dialects do not take
        them.
        """
        obs, info = reset_env(self.env, seed_env(self.env, seed))
        return obs, dict(info)

    def step(self, action: Any) -> StepResult:
        """Step once."""
        obs, reward, terminated, truncated, info = to_five_values(self.env.step(action))
        return obs, reward, terminated, truncated, dict(info or {})

    def render(self) -> Any:
        """Return the environment's picture; None, with a warning, if one that takes a mode fails to
        make it.
        """
        if not self._renders_by_mode:
            return self.env.render()
        try:
            return picture_of(self.env)
        except Exception:
            # Before gym 0.26, an environment lists pictures even where the package that draws them
            # is missing.
            logger.warning("%s cannot be rendered", type(self.env).__name__, exc_info=True)
            return None

    def close(self) -> None:
        """Close the environment if it has a ``close`` method."""
        close_env(self.env)


def picture_of(env: Any) -> Any:
    """Return an environment's picture; before gym 0.26, ``render`` opened a window unless it was
    given the mode.
    """
    if _renders_by_mode(env):
        return env.render(mode=_PICTURE)
    return env.render()


def _renders_by_mode(env: Any) -> bool:
    if isinstance(env, gymnasium.Env) or getattr(env, "render_mode", None) is not None:
        return False
    try:
        return "mode" in inspect.signature(innermost(env).render).parameters
    except (AttributeError, TypeError, ValueError):
        return False


_PLAIN = (int, float, bool, str)
"""Types of values that `copied` need not be called for; infos consist of them mostly."""


def copied(value: Any) -> Any:
    """Copy all arrays, lists, tuples and dicts in a value, however nested; other objects are
    shared.
    """
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {
            key: inner if type(inner) in _PLAIN else copied(inner) for key, inner in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(inner if type(inner) in _PLAIN else copied(inner) for inner in value)
    return value


_NEW_GAME = FinishedGame(reward=0.0, length=0)


class RealGames(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that counts reward and length of whole games, independent of how episodes are cut
    outside.
    """

    def __init__(self, env: GymnasiumEnv) -> None:
        """Wrap an environment; no games are counted yet."""
        super().__init__(env)
        self._finished: list[FinishedGame] = []
        self._game = _NEW_GAME

    def reset(
        self,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> ResetResult:
        """Begin a game and forget an unfinished one."""
        self._game = _NEW_GAME
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> StepResult:
        """Step once and count a game that ends."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._game = FinishedGame(self._game.reward + float(reward), self._game.length + 1)
        if terminated or truncated:
            self._finished.append(self._game)
            self._game = _NEW_GAME
        return obs, float(reward), terminated, truncated, info

    def take_finished(self) -> list[FinishedGame]:
        """Return the games that ended since the last call."""
        finished = self._finished
        self._finished = []
        return finished


def game_counters(envs: Sequence[Any]) -> list[RealGames] | None:
    """Return the RealGames wrapper of each environment; None unless all have one."""
    counters = [counter for counter in map(_find_counter, envs) if counter is not None]
    if not counters or len(counters) < len(envs):
        return None
    return counters


def finished_games(counters: Sequence[RealGames] | None) -> list[FinishedGame] | None:
    """Return the games that ended since the last call, from the result of ``game_counters``; None
    if that is None.
    """
    if counters is None:
        return None
    return [game for counter in counters for game in counter.take_finished()]


def _find_counter(env: Any) -> RealGames | None:
    return next((layer for layer in layers_of(env) if isinstance(layer, RealGames)), None)
