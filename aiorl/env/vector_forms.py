"""Environments that have a vectorised form of their own, by name: whether it will do, and how it is made."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium
from gymnasium.envs.registration import EnvSpec

from aiorl.env.atari_vector import AtariCopies, why_not_atari_vector
from aiorl.env.lockstep import LockstepEnv, checked_horizon
from aiorl.env.native_vector_env import NativeVectorEnv
from aiorl.env.registry import EnvCreator, is_atari_id, loaded_entry
from aiorl.env.vector_env import VectorEnv
from aiorl.env.wrapping import Wrapping

__all__ = ["Wanted", "make_vector_form", "why_not_vectorised"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked of a vectorised form.

    Attributes:
        creator: makes the single environment.
        env_config: the environment's own settings.
        num_envs: number of copies N.
        horizon: truncate episodes at this many steps; None or 0 = the environment's own limit.
        wrapping: wrappers that go around a single copy.
    """

    creator: EnvCreator
    env_config: Mapping[str, Any]
    num_envs: int
    horizon: int | None
    wrapping: Wrapping

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of the single environment, its wrappers' wishes included."""
        spec = self.creator.gym_spec
        own = {} if spec is None else spec.kwargs
        return {**own, **self.wrapping.env_config(self.creator, self.env_config)}


class _Form(NamedTuple):
    is_of: Callable[[EnvSpec], bool]
    obstacle: Callable[[Wanted, EnvSpec], str | None]
    make: Callable[[Wanted, EnvSpec], LockstepEnv | VectorEnv]


def why_not_vectorised(wanted: Wanted) -> str | None:
    """Why no vectorised form will do; None if there is one that does."""
    spec = wanted.creator.gym_spec
    if spec is None:
        return "it has no vectorised form of its own"
    if wanted.wrapping.users:
        return "wrappers go around each copy"
    if wanted.wrapping.monitor_path is not None:
        return "the monitor goes around each copy"
    return _form_of(spec).obstacle(wanted, spec)


def make_vector_form(wanted: Wanted) -> LockstepEnv | VectorEnv:
    """Make the vectorised form; ``why_not_vectorised`` must have given None.

    Raises:
        ConfigError: a horizon above the environment's limit.
        Exception: whatever its constructor raised.
    """
    spec = wanted.creator.gym_spec
    assert spec is not None, "environments without one have no vectorised form"
    return _form_of(spec).make(wanted, spec)


def _form_of(spec: EnvSpec) -> _Form:
    return next(form for form in _FORMS if form.is_of(spec))


def _atari_obstacle(wanted: Wanted, spec: EnvSpec) -> str | None:
    if not wanted.wrapping.deepmind:
        return "its vectorised form shows other observations than a single game: it has a preprocessing of its own"
    return why_not_atari_vector(wanted.settings)


def _make_atari(wanted: Wanted, spec: EnvSpec) -> VectorEnv:
    wrapping, settings = wanted.wrapping, wanted.settings
    checked_horizon(wanted.horizon, spec.max_episode_steps)
    return AtariCopies(
        settings,
        wanted.num_envs,
        env_id=wanted.creator.env_id,
        spec=spec,
        dim=wrapping.dim,
        framestack=wrapping.framestack,
    )


def _gymnasium_obstacle(wanted: Wanted, spec: EnvSpec) -> str | None:
    if spec.vector_entry_point is None:
        return "it has no vectorised form of its own"
    if spec.additional_wrappers:
        return "its wrappers work on single environments only"
    try:
        made_by = loaded_entry(spec.vector_entry_point)
    except ImportError as error:
        return f"its vectorised form needs {error.name or error}, which is not installed"
    try:
        parameters = inspect.signature(made_by).parameters
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    unknown = sorted(set(wanted.env_config) - set(parameters))
    if unknown:
        return f"its vectorised form does not know the setting {unknown[0]!r}"
    if wanted.horizon and "max_episode_steps" not in parameters:
        return "its vectorised form cannot cut episodes at a horizon"
    return None


def _make_gymnasium(wanted: Wanted, spec: EnvSpec) -> LockstepEnv:
    settings = dict(wanted.env_config)
    length = checked_horizon(wanted.horizon, settings.pop("max_episode_steps", spec.max_episode_steps))
    if length is not None:
        settings["max_episode_steps"] = length
    with warnings.catch_warnings():
        # The missing metadata Gymnasium warns about is an error of ours, with a better message.
        warnings.filterwarnings("ignore", message=".*AutoresetMode.*")
        env = gymnasium.make_vec(spec, wanted.num_envs, vectorization_mode="vector_entry_point", **settings)
    return NativeVectorEnv(env, env_id=wanted.creator.env_id, max_episode_steps=length)


# The first that a Gymnasium id is of is its form.
_FORMS = (
    _Form(lambda spec: is_atari_id(spec.id), _atari_obstacle, _make_atari),
    _Form(lambda spec: True, _gymnasium_obstacle, _make_gymnasium),
)
