"""From an environment's name to a LockstepEnv: native vector form, stepped in turn, or a process each."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

from aiorl.env.lockstep import LockstepEnv, checked_horizon
from aiorl.env.native_vector_env import NativeVectorEnv
from aiorl.env.registry import EnvContext, EnvCreator, resolve_env
from aiorl.env.remote_env import RemoteEnv
from aiorl.env.vector_env import SerialEnv
from aiorl.errors import ConfigError, EnvError

__all__ = ["VECTORIZE_CHOICES", "choose_vectorize", "make_lockstep_env"]

VECTORIZE_CHOICES = ("auto", "native", "serial", "remote")


def make_lockstep_env(
    env: str | type[Any] | Callable[[EnvContext], Any],
    env_config: Mapping[str, Any] | None = None,
    num_envs: int = 1,
    vectorize: str = "auto",
    *,
    worker_index: int = 0,
    horizon: int | None = None,
) -> LockstepEnv:
    """N copies of an environment, stepped the way asked for.

    Seeds are given at the first ``reset``; see ``lockstep.env_seeds``.

    Args:
        env: name, class or creating function (see ``registry``).
        env_config: the environment's own settings.
        num_envs: number of copies.
        vectorize: ``"native"`` the environment's own vectorised form; ``"serial"`` copies stepped in turn;
            ``"remote"`` one process per copy; ``"auto"`` native where there is one and more than one copy is
            wanted, else serial.
        worker_index: slot of the worker, given to the environment in its EnvContext.
        horizon: truncate episodes at this many steps; None or 0 = the environment's own limit.

    Raises:
        UnknownEnvError: nothing of that name.
        ConfigError: a choice that this environment does not offer, or a horizon above its limit.
        EnvError: the environment's constructor raised.
    """
    if vectorize not in VECTORIZE_CHOICES:
        raise ConfigError(
            f"vectorize is {vectorize!r}, expected one of {', '.join(VECTORIZE_CHOICES)}.",
            key="vectorize",
            value=vectorize,
        )
    if num_envs < 1:
        raise ConfigError(f"number of environments is {num_envs}, expected at least 1.", key="num_envs_per_worker")
    config = dict(env_config or {})
    creator = resolve_env(env)
    if vectorize == "auto":
        vectorize = choose_vectorize(creator, config, num_envs, horizon)
    if vectorize == "native":
        return _make_native(creator, config, num_envs, horizon)
    if vectorize == "remote":
        if not isinstance(env, str):
            raise ConfigError(
                "environments in processes of their own are named by id or import path, not given as objects.",
                key="env",
                hint="Say 'package.module:Name'.",
            )
        return RemoteEnv(env, config, num_envs, worker_index=worker_index, horizon=horizon)
    context = EnvContext(config, worker_index=worker_index)
    copies = []
    for index in range(num_envs):
        try:
            copies.append(creator(context.copy_with_overrides(vector_index=index)))
        except (EnvError, ConfigError):
            raise
        except Exception as error:
            raise _constructor_fault(creator, error, index) from error
    return SerialEnv(copies, env_id=creator.env_id, horizon=horizon)


def choose_vectorize(
    creator: EnvCreator, env_config: Mapping[str, Any], num_envs: int, horizon: int | None = None
) -> str:
    """What ``"auto"`` means for an environment: ``"native"`` or ``"serial"``.

    A single copy is stepped as it is: a vector of one costs more per step and gains nothing.
    """
    if num_envs < 2 or _native_obstacle(creator, env_config, horizon) is not None:
        return "serial"
    return "native"


def _native_obstacle(creator: EnvCreator, env_config: Mapping[str, Any], horizon: int | None) -> str | None:
    """Why the environment's own vectorised form cannot be had, None if it can."""
    spec = creator.gym_spec
    if spec is None or spec.vector_entry_point is None:
        return "it has no vectorised form of its own"
    if spec.additional_wrappers:
        return "its wrappers work on single environments only"
    try:
        entry = _vector_entry(spec)
    except ImportError as error:
        return f"its vectorised form needs {error.name or error}, which is not installed"
    try:
        parameters = inspect.signature(entry).parameters
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    unknown = sorted(set(env_config) - set(parameters))
    if unknown:
        return f"its vectorised form does not know the setting {unknown[0]!r}"
    if horizon and "max_episode_steps" not in parameters:
        return "its vectorised form cannot cut episodes at a horizon"
    return None


def _vector_entry(spec: EnvSpec) -> Callable[..., Any]:
    entry = spec.vector_entry_point
    return entry if callable(entry) else load_env_creator(str(entry))


def _make_native(creator: EnvCreator, env_config: dict[str, Any], num_envs: int, horizon: int | None) -> LockstepEnv:
    obstacle = _native_obstacle(creator, env_config, horizon)
    spec = creator.gym_spec
    if obstacle is not None or spec is None:
        raise ConfigError(
            f"vectorize is 'native', but environment {creator.env_id!r} cannot be had so: {obstacle}.",
            key="vectorize",
            value="native",
            hint="Use vectorize: serial (or auto).",
        )
    limit = env_config.pop("max_episode_steps", spec.max_episode_steps)
    length = checked_horizon(horizon, limit)
    if length is not None:
        env_config["max_episode_steps"] = length
    try:
        with warnings.catch_warnings():
            # The missing metadata Gymnasium warns about is an error of ours, with a better message.
            warnings.filterwarnings("ignore", message=".*AutoresetMode.*")
            env = gymnasium.make_vec(spec, num_envs, vectorization_mode="vector_entry_point", **env_config)
    except Exception as error:
        raise _constructor_fault(creator, error, 0) from error
    return NativeVectorEnv(env, env_id=creator.env_id, max_episode_steps=length)


def _constructor_fault(creator: EnvCreator, error: Exception, index: int) -> EnvError:
    import traceback

    text = "".join(traceback.format_exception(error))
    message = f"its constructor raised {type(error).__name__}: {error}"
    return EnvError(creator.env_id, message, vector_index=index, step=0, traceback_text=text)
