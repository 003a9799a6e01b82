"""From the name of an environment to its copies, in the forms that samplers drive.

``EnvMaker`` makes a worker's environments; ``to_base_env`` brings environments of any kind into the form of a BaseEnv.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from aiorl.env.atari import AtariCopies, why_not_atari_vector
from aiorl.env.base_env import BaseEnv, LockstepEnv, checked_horizon
from aiorl.env.gym_like import close_env
from aiorl.env.kinds import check_can_be_remote, kind_of
from aiorl.env.native_vector_env import NativeVectorEnv
from aiorl.env.registry import EnvContext, EnvCreator, is_atari_id, loaded_entry, resolve_env
from aiorl.env.remote_env import RemoteEnv
from aiorl.env.vector_env import VectorEnv
from aiorl.env.wrapping import EnvPlan
from aiorl.errors import ConfigError

logger = logging.getLogger(__name__)


class EnvMaker:
    """Makes and wraps a worker's environments, and brings them into the form that samplers drive.

    Attributes:
        plan: which they are.
        env_id: their name, for messages.
        context: of environment 0.
        is_deepmind: environment 0 got the DeepMind wrappers; known once it is made.
    """

    def __init__(self, plan: EnvPlan) -> None:
        """Find out what makes the environments.

        Raises:
            UnknownEnvError: nothing of that name, or it cannot be called.
        """
        self.plan = plan
        self.creator = resolve_env(plan.env)
        self.env_id = self.creator.env_id
        config = plan.wrapping.env_config(self.creator, plan.env_config)
        is_remote = plan.vectorize == "remote"
        self.context = EnvContext(config, plan.worker_index, remote=is_remote, num_envs=plan.num_envs)
        self.is_deepmind = False

    def make_first(self) -> Any:
        """Environment 0, with its wrappers; where one object holds all copies, that object.

        Raises:
            EnvError: the environment's constructor failed.
            UnsupportedEnvError: what was made is no environment that can be driven (also a ValueError).
            ConfigError: a form or a horizon that it cannot have.
        """
        plan, wrapping = self.plan, self.plan.wrapping
        if self.form == "native":
            self.check_native()
            self.is_deepmind = wrapping.deepmind and is_atari_id(self.creator.gym_id or "")
            return EnvCreator(self.env_id, self._make_native)(self.context)  # so errors are alike
        context = self.context.copy_with_overrides()  # creators may change what they are given
        env = self.creator(context)
        if isinstance(env, LockstepEnv):
            env.limit_episodes(plan.horizon)
        self.is_deepmind = kind_of(env, self.env_id).is_single and wrapping.wraps_atari(env)
        if plan.vectorize == "remote":  # only its spaces are of interest; a child has the one that is monitored
            wrapping = dataclasses.replace(wrapping, monitor_path=None)
        return wrapping.wrap(env, self.context)

    @property
    def form(self) -> str:
        """The plan's ``vectorize``; for ``"auto"`` either ``"native"`` or ``"serial"``.

        A single copy is stepped as it is: a vector of one costs more per step and gains nothing.
        """
        if self.plan.vectorize != "auto":
            return self.plan.vectorize
        if self.plan.num_envs < 2:
            return "serial"
        obstacle = self._native_obstacle()
        if obstacle is not None and is_atari_id(self.creator.gym_id or ""):
            logger.info("%s is stepped game by game: %s", self.env_id, obstacle)
        return "native" if obstacle is None else "serial"

    def check_native(self) -> None:
        """Raise if the environment has no vectorised form that does what is wanted; nothing is made.

        Raises:
            ConfigError: it has none.
        """
        obstacle = self._native_obstacle()
        if obstacle is not None:
            raise ConfigError(
                f"vectorize is 'native', but environment {self.env_id!r} has no such form here: {obstacle}.",
                key="vectorize",
                value="native",
                hint="Use vectorize: serial (or auto).",
            )

    def to_base_env(self, env: Any) -> BaseEnv:
        """Environment 0 and as many more as are wanted.

        Raises:
            ConfigError: a number of environments or remote processes that this kind cannot have.
            EnvError: a child process could not make its environment.
        """
        plan = self.plan
        if plan.vectorize == "remote":
            check_can_be_remote(env, self.env_id)
            close_env(env)
            return RemoteEnv(plan)
        return to_base_env(env, self._make_copy, plan.num_envs, env_id=self.env_id, seed=plan.seed)

    def _make_copy(self, index: int) -> Any:
        context = self.context.copy_with_overrides(vector_index=index)
        return self.plan.wrapping.wrap(self.creator(context), context)

    def _native_obstacle(self) -> str | None:
        """Why no vectorised form will do; None if there is one that does."""
        wrapping, spec = self.plan.wrapping, self.creator.gym_spec
        if spec is None:
            return "it has no vectorised form of its own"
        if wrapping.users:
            return "wrappers go around each copy"
        if wrapping.monitor_path is not None:
            return "the monitor goes around each copy"
        if not is_atari_id(spec.id):
            return _gymnasium_obstacle(spec, self.plan)
        if not wrapping.deepmind:
            return "its vectorised form shows other observations than a single game: it has a preprocessing of its own"
        return why_not_atari_vector({**spec.kwargs, **self.context})

    def _make_native(self, context: EnvContext) -> LockstepEnv | VectorEnv:
        plan, spec = self.plan, self.creator.gym_spec
        assert spec is not None, "environments without one have no vectorised form"
        if is_atari_id(spec.id):
            checked_horizon(plan.horizon, spec.max_episode_steps)
            return AtariCopies(
                {**spec.kwargs, **context},
                plan.num_envs,
                env_id=self.env_id,
                spec=spec,
                dim=plan.wrapping.dim,
                framestack=plan.wrapping.framestack,
            )
        settings = dict(plan.env_config)
        length = checked_horizon(plan.horizon, settings.pop("max_episode_steps", spec.max_episode_steps))
        if length is not None:
            settings["max_episode_steps"] = length
        with warnings.catch_warnings():
            # Gymnasium warns of missing metadata; here it is an error with a better message
            warnings.filterwarnings("ignore", message=".*AutoresetMode.*")
            env = gymnasium.make_vec(spec, plan.num_envs, vectorization_mode="vector_entry_point", **settings)
        return NativeVectorEnv(env, env_id=self.env_id, max_episode_steps=length)


def _gymnasium_obstacle(spec: EnvSpec, plan: EnvPlan) -> str | None:
    if spec.vector_entry_point is None:
        return "it has no vectorised form of its own"
    if spec.additional_wrappers:
        return "its wrappers work on single environments only"
    try:
        made_by = loaded_entry(spec.vector_entry_point)
    except ImportError as error:
        return f"its vectorised form needs {error.name or error}, which is not installed"
    parameters = inspect.signature(made_by).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    unknown = sorted(set(plan.env_config) - set(parameters))
    if unknown:
        return f"its vectorised form does not know the setting {unknown[0]!r}"
    if plan.horizon and "max_episode_steps" not in parameters:
        return "its vectorised form cannot cut episodes at a horizon"
    return None


def to_base_env(
    env: Any,
    make_env: Callable[[int], Any] | None = None,
    num_envs: int = 1,
    *,
    env_id: str = "environment",
    seed: int | None = None,
) -> BaseEnv:
    """Convert an environment of any kind to a BaseEnv; a BaseEnv is returned as it is.

    Args:
        env: environment 0, of any of the kinds in ``kinds``.
        make_env: makes environments 1, 2, ..., given their index; gym-like and multi-agent ones only.
        num_envs: number of environments N.
        env_id: name for messages.
        seed: the worker's seed; None leaves environments to themselves.

    Raises:
        UnsupportedEnvError: none of these kinds.
        Exception: whatever ``make_env`` raised; the copies that it had made are closed, ``env`` is its owner's.
        ConfigError: a number of environments or a seed that this kind cannot have.
    """
    kind = kind_of(env, env_id)
    if kind.is_external and num_envs != 1:
        raise ConfigError(
            f"{num_envs} environments are asked for, but an external environment drives itself: expected 1.",
            key="num_envs_per_worker",
            value=num_envs,
        )
    if kind.holds_copies:
        return kind.to_base_env([env], env_id, seed)
    if num_envs > 1 and make_env is None:
        raise ConfigError(f"{num_envs} environments are asked for, but only one is given.", key="num_envs_per_worker")
    copies = [env]
    with contextlib.ExitStack() as on_error:
        if make_env is not None:
            for index in range(1, num_envs):
                copies.append(make_env(index))
                on_error.callback(_close_after_error, copies[-1])
        _check_distinct(copies, env_id)
        base_env = kind.to_base_env(copies, env_id, seed)
        on_error.pop_all()
    return base_env


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
    """Close a copy, and only log an error of that."""
    try:
        close_env(env)
    except Exception:
        logger.exception("After another copy had failed, %s could not be closed", type(env).__name__)
