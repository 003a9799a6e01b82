"""From an environment to the form that samplers drive.

``make_lockstep_env``: from a name to a LockstepEnv (native vector form, stepped in turn, or a process each), for the
columnar sampler. ``to_base_env``: from an environment object of any kind to a BaseEnv, for the general sampler.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

from aiorl.env.base_env import BaseEnv
from aiorl.env.external_env import ExternalBaseEnv, ExternalEnv, ExternalMultiAgentEnv
from aiorl.env.gym_like import check_gym_like, check_seedable, seed_env_now
from aiorl.env.lockstep import LockstepEnv, checked_horizon
from aiorl.env.lockstep_base_env import LockstepBaseEnv
from aiorl.env.multi_agent_env import MultiAgentBaseEnv, MultiAgentEnv
from aiorl.env.native_vector_env import NativeVectorEnv
from aiorl.env.registry import EnvContext, EnvCreator, is_atari_id, resolve_env
from aiorl.env.remote_base_env import RemoteBaseEnv, RemoteSettings
from aiorl.env.remote_env import RemoteEnv
from aiorl.env.stepped_vector_env import CopiesVectorEnv, VectorBaseEnv, VectorEnv
from aiorl.env.vector_env import SerialEnv
from aiorl.env.wrapping import HOLD_THEIR_COPIES, Wrapping
from aiorl.errors import ConfigError, EnvError

__all__ = ["VECTORIZE_CHOICES", "check_can_be_remote", "choose_vectorize", "make_lockstep_env", "to_base_env"]

logger = logging.getLogger(__name__)

VECTORIZE_CHOICES = ("auto", "native", "serial", "remote")


def make_lockstep_env(
    env: str | type[Any] | Callable[[EnvContext], Any],
    env_config: Mapping[str, Any] | None = None,
    num_envs: int = 1,
    vectorize: str = "auto",
    *,
    worker_index: int = 0,
    horizon: int | None = None,
    wrapping: Wrapping | None = None,
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
        wrapping: wrappers put around each copy; None for none. ``"auto"`` is then serial where they matter.

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
    wrapping = wrapping or Wrapping()
    if vectorize == "auto":
        is_single = wrapping.needs_single_envs(creator)
        vectorize = "serial" if is_single else choose_vectorize(creator, config, num_envs, horizon)
    if vectorize == "native":
        if wrapping.needs_single_envs(creator):
            raise ConfigError(
                f"vectorize is 'native', but wrappers go around each copy of environment {creator.env_id!r}.",
                key="vectorize",
                value="native",
                hint="Use vectorize: auto (or serial), or leave out the monitor and the Atari preprocessing.",
            )
        return _make_native(creator, config, num_envs, horizon)
    if vectorize == "remote":
        if not isinstance(env, str):
            raise ConfigError(
                "environments in processes of their own are named by id or import path, not given as objects.",
                key="env",
                hint="Say 'package.module:Name'.",
            )
        return RemoteEnv(env, config, num_envs, worker_index=worker_index, horizon=horizon, wrapping=wrapping)
    context = EnvContext(wrapping.env_config(creator, config), worker_index=worker_index)
    copies = []
    for index in range(num_envs):
        try:
            own_context = context.copy_with_overrides(vector_index=index)
            copies.append(wrapping.wrap(creator(own_context), own_context))
        except (EnvError, ConfigError):
            raise
        except Exception as error:
            raise _constructor_fault(creator, error, index) from error
    _check_distinct(copies, creator.env_id)
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
    if is_atari_id(spec.id):
        return "its vectorised form shows other observations than a single game: it has a preprocessing of its own"
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


def to_base_env(
    env: Any,
    make_env: Callable[[int], Any] | None = None,
    num_envs: int = 1,
    remote_envs: bool = False,
    remote_env_batch_wait_ms: float = 0.0,
    *,
    remote_settings: RemoteSettings | None = None,
    env_id: str = "environment",
    seed: int | None = None,
) -> BaseEnv:
    """An environment of any kind as a BaseEnv; one that is so already is returned as it is.

    Args:
        env: environment 0: gym-like, VectorEnv, MultiAgentEnv, ExternalEnv, ExternalMultiAgentEnv, BaseEnv, or a
            vector environment of Gymnasium.
        make_env: makes environments 1, 2, ..., given their index; gym-like and multi-agent ones only.
        num_envs: number of environments N.
        remote_envs: put all N in processes of their own; ``env`` is then closed.
        remote_env_batch_wait_ms: how long a poll of such waits for more, once one is ready.
        remote_settings: how such are made.
        env_id: name for messages.
        seed: the worker's seed; None leaves environments to themselves.

    Raises:
        UnsupportedEnvError: none of these kinds.
        Exception: whatever ``make_env`` raised; the copies that it had made are closed, ``env`` is its owner's.
        ConfigError: a number of environments, a seed or remote processes that this kind cannot have.
    """
    if seed is not None and isinstance(env, BaseEnv | VectorEnv | ExternalEnv | ExternalMultiAgentEnv):
        # These are seeded as one, before they begin; all others at the first reset of each copy.
        check_seedable(env, env_id)
        seed_env_now(env, seed)
    if remote_envs:
        check_can_be_remote(env, env_id)
    if isinstance(env, BaseEnv):
        return env
    if num_envs < 1:
        raise ConfigError(f"number of environments is {num_envs}, expected at least 1.", key="num_envs_per_worker")
    if isinstance(env, VectorEnv):
        return VectorBaseEnv(env, env_id=env_id)
    if isinstance(env, gymnasium.vector.VectorEnv):
        return LockstepBaseEnv(NativeVectorEnv(env, env_id=env_id), seed=seed)
    if isinstance(env, ExternalEnv | ExternalMultiAgentEnv):
        if num_envs != 1:
            raise ConfigError(
                f"{num_envs} environments are asked for, but an external environment drives itself: expected 1.",
                key="num_envs_per_worker",
                value=num_envs,
            )
        return ExternalBaseEnv(env)
    if not isinstance(env, MultiAgentEnv):
        check_gym_like(env, env_id)
    if remote_envs:
        if remote_settings is None:
            raise ConfigError("environments in processes of their own need to know how they are made.", key="env")
        close = getattr(env, "close", None)
        if callable(close):
            close()
        return RemoteBaseEnv(remote_settings, num_envs, batch_wait_ms=remote_env_batch_wait_ms, seed=seed)
    if num_envs > 1 and make_env is None:
        raise ConfigError(f"{num_envs} environments are asked for, but only one is given.", key="num_envs_per_worker")
    copies = [env]
    with contextlib.ExitStack() as on_error:
        if make_env is not None:
            for index in range(1, num_envs):
                copies.append(make_env(index))
                on_error.callback(_close_after_error, copies[-1])
        _check_distinct(copies, env_id)
        base_env: BaseEnv
        if isinstance(env, MultiAgentEnv):
            base_env = MultiAgentBaseEnv(copies, env_id=env_id, seed=seed)
        else:
            base_env = VectorBaseEnv(CopiesVectorEnv(copies, env_id=env_id, seed=seed))
        on_error.pop_all()
    return base_env


def check_can_be_remote(env: Any, env_id: str) -> None:
    """Nothing, for an environment of a kind whose copies can live in processes of their own.

    Raises:
        ConfigError: it is of another kind.
    """
    if isinstance(env, HOLD_THEIR_COPIES):
        raise ConfigError(
            f"environments in processes of their own are asked for, but {env_id!r} made a {type(env).__name__}, which"
            " holds its environments itself.",
            key="remote_worker_envs",
            value=True,
            hint="Leave out remote_worker_envs; only single and multi-agent environments can have it.",
        )


def _check_distinct(copies: Sequence[Any], env_id: str) -> None:
    """Refuse copies that are all the same object, within their wrappers."""
    inner = {id(env.unwrapped if isinstance(env, gymnasium.Env) else env) for env in copies}
    if len(inner) < len(copies):
        raise ConfigError(
            f"{len(copies)} environments are asked for, but the creator of {env_id!r} returned the same object again.",
            key="num_envs_per_worker",
            value=len(copies),
            hint="Have it make a new environment at each call.",
        )


def _close_after_error(env: Any) -> None:
    """Close a copy; the error that there was is the one to be seen."""
    close = getattr(env, "close", None)
    if callable(close):
        try:
            close()
        except Exception:
            logger.exception("After another copy had failed, %s could not be closed", type(env).__name__)


def _constructor_fault(creator: EnvCreator, error: Exception, index: int) -> EnvError:
    import traceback

    text = "".join(traceback.format_exception(error))
    message = f"its constructor raised {type(error).__name__}: {error}"
    return EnvError(creator.env_id, message, vector_index=index, step=-1, traceback_text=text)
