"""Construction of a worker's environments from their name, in the forms that samplers drive.

``EnvMaker`` makes a worker's environments; ``to_base_env`` converts environments of any kind to a
BaseEnv.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

from aiorl.config.code import check_objects
from aiorl.env.atari import AtariCopies, why_not_atari_vector
from aiorl.env.base_env import BaseEnv, LockstepEnv, SettingsChange, checked_horizon
from aiorl.env.gym_like import close_env, innermost
from aiorl.env.kinds import check_can_be_remote, kind_of
from aiorl.env.native_vector_env import NativeVectorEnv
from aiorl.env.old_gym import adopted
from aiorl.env.registry import EnvContext, EnvCreator, is_atari_id, loaded_entry, resolve_env
from aiorl.env.remote_env import RemoteEnv
from aiorl.env.vector_env import VectorEnv
from aiorl.env.wrapping import EnvPlan
from aiorl.errors import ConfigError

logger = logging.getLogger(__name__)


class EnvMaker:
    """Maker of a worker's environments, with their wrappers, in the form that samplers drive.

    Attributes:
        plan: description of the environments.
        env_id: their name, for messages.
        context: context of environment 0.
        is_deepmind: True if environment 0 got the DeepMind wrappers; known once it is made.
        first: environment 0, or the one object that holds all copies; None until a worker has set
            it, and another one when environment 0 is made again.
    """

    def __init__(self, plan: EnvPlan) -> None:
        """Look up the function that makes the environments.

        Raises:
            UnknownEnvError: the name is unknown, or the object cannot be called.
            ConfigError: an argument is the name of an object that is gone.
        """
        self.creator = resolve_env(plan.env)
        self.env_id = self.creator.env_id
        self.is_deepmind = False
        self.first: Any = None
        self._num_changes = 0
        self._set_plan(plan)

    def _set_plan(self, plan: EnvPlan) -> None:
        check_objects(plan.env_config, "env_config")
        self.plan = plan
        self.context = EnvContext(
            plan.wrapping.env_config(self.creator, plan.env_config),
            plan.worker_index,
            remote=plan.vectorize == "remote",
            num_envs=plan.num_envs,
        )

    def change_settings(self, base_env: BaseEnv, env_config: Mapping[str, Any]) -> None:
        """Give environments made here other settings, each before its next episode.

        Args:
            base_env: result of `to_base_env`.
            env_config: all of their own settings.

        Raises:
            ConfigError: an argument is the name of an object that is gone, or environments of this
                kind can't change.
        """
        self._set_plan(dataclasses.replace(self.plan, env_config=env_config))
        self._num_changes += 1
        seed = self.plan.seed
        if seed is not None:  # an environment that is made again must not play its first episodes
            entropy = np.random.SeedSequence((seed, self._num_changes))
            seed = int(entropy.generate_state(1)[0] >> 1)
        base_env.change_settings(SettingsChange(self.context, self._make_again, seed))

    def _make_again(self, index: int) -> Any:
        env = adopted(self._make_copy(index))
        if index == 0:
            self.first = env
        return env

    def make_first(self) -> Any:
        """Make environment 0 with its wrappers, or the one object that holds all copies.

        Raises:
            EnvError: the environment's constructor failed.
            UnsupportedEnvError: the object made is not an environment that can be driven (also a
                ValueError).
            ConfigError: the environment does not have the requested form or cannot have the
                horizon.
        """
        plan = self.plan
        wrapping = self.plan.wrapping
        if self.form == "native":
            self.check_native()
            self.is_deepmind = wrapping.deepmind and is_atari_id(self.creator.gym_id or "")
            return EnvCreator(self.env_id, self._make_native)(self.context)  # for the same errors
        context = self.context.copy_with_overrides()  # creators may change their argument
        env = self.creator(context)
        if isinstance(env, LockstepEnv):
            env.limit_episodes(plan.horizon)
        self.is_deepmind = kind_of(env, self.env_id).is_single and wrapping.wraps_atari(env)
        if plan.vectorize == "remote":
            # Only its spaces are needed; the copy in a child process is the monitored one.
            wrapping = dataclasses.replace(wrapping, monitor_path=None)
        return wrapping.wrap(env, self.context)

    @property
    def form(self) -> str:
        """The plan's ``vectorize``; for ``"auto"`` either ``"native"`` or ``"serial"``.

        A single copy is always serial: a vector of one costs more per step and gains nothing.
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
        """Raise an error if the environment has no suitable vectorised form, without making it.

        Raises:
            ConfigError: there is no suitable vectorised form.
        """
        obstacle = self._native_obstacle()
        if obstacle is not None:
            raise ConfigError(
                f"vectorize is 'native', but environment {self.env_id!r} has no such form here:"
                f" {obstacle}.",
                key="vectorize",
                value="native",
                hint="Use vectorize: serial (or auto).",
            )

    def to_base_env(self, env: Any) -> BaseEnv:
        """Make the other copies and return them with environment 0 as a BaseEnv.

        Raises:
            ConfigError: environments of this kind cannot have this number of copies or cannot be
                remote.
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
        """Return the reason why no vectorised form is suitable; None if there is a suitable one."""
        wrapping = self.plan.wrapping
        spec = self.creator.gym_spec
        if spec is None:
            return "it has no vectorised form of its own"
        if wrapping.users:
            return "wrappers apply to each copy"
        if wrapping.monitor_path is not None:
            return "the monitor applies to each copy"
        if not is_atari_id(spec.id):
            return _gymnasium_obstacle(spec, self.plan)
        if not wrapping.deepmind:
            return (
                "its vectorised form has its own preprocessing, so observations differ from those"
                " of a single game"
            )
        return why_not_atari_vector({**spec.kwargs, **self.context})

    def _make_native(self, context: EnvContext) -> LockstepEnv | VectorEnv:
        plan = self.plan
        spec = self.creator.gym_spec
        assert spec is not None, "an environment without a spec has no vectorised form"
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
        length = checked_horizon(
            plan.horizon, settings.pop("max_episode_steps", spec.max_episode_steps)
        )
        if length is not None:
            settings["max_episode_steps"] = length
        with warnings.catch_warnings():
            # Gymnasium warns about missing metadata; aiorl raises an error with a better message.
            warnings.filterwarnings("ignore", message=".*AutoresetMode.*")
            env = gymnasium.make_vec(
                spec,
                plan.num_envs,
                vectorization_mode="vector_entry_point",
                **settings,
            )
        return NativeVectorEnv(env, env_id=self.env_id, max_episode_steps=length)


def _gymnasium_obstacle(spec: EnvSpec, plan: EnvPlan) -> str | None:
    if spec.vector_entry_point is None:
        return "it has no vectorised form of its own"
    if spec.additional_wrappers:
        return "its wrappers only work on single environments"
    try:
        vector_type = loaded_entry(spec.vector_entry_point)
    except ImportError as error:
        return f"its vectorised form needs {error.name or error}, which is not installed"
    parameters = inspect.signature(vector_type).parameters
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
    """Convert an environment of any kind to a BaseEnv; a BaseEnv is returned unchanged.

    Args:
        env: environment 0, of any of the kinds in ``kinds``.
        make_env: makes environment 1, 2, ..., given the index; only for gym-like and multi-agent
            environments.
        num_envs: number of environments N.
        env_id: name for messages.
        seed: the worker's seed; None leaves the environments unseeded.

    Raises:
        UnsupportedEnvError: the environment is of none of these kinds.
        Exception: ``make_env`` raised it; the copies made so far are closed, but ``env`` is not.
        ConfigError: environments of this kind cannot have this number of copies or cannot be
            seeded.
    """
    env = adopted(env)
    kind = kind_of(env, env_id)
    if kind.is_external and num_envs != 1:
        raise ConfigError(
            f"{num_envs} environments are requested, but an external environment drives itself:"
            " expected 1.",
            key="num_envs_per_worker",
            value=num_envs,
        )
    if kind.holds_copies:
        return kind.to_base_env([env], env_id, seed)
    if num_envs > 1 and make_env is None:
        raise ConfigError(
            f"{num_envs} environments are requested, but only one is given.",
            key="num_envs_per_worker",
        )
    copies = [env]
    with contextlib.ExitStack() as on_error:
        if make_env is not None:
            for index in range(1, num_envs):
                copies.append(adopted(make_env(index)))
                on_error.callback(_close_after_error, copies[-1])
        _check_distinct(copies, env_id)
        base_env = kind.to_base_env(copies, env_id, seed)
        on_error.pop_all()
    return base_env


def _check_distinct(copies: Sequence[Any], env_id: str) -> None:
    """Refuse copies that are the same object inside their wrappers."""
    inner = {id(innermost(env)) for env in copies}
    if len(inner) < len(copies):
        raise ConfigError(
            f"{len(copies)} environments are requested, but the creator of {env_id!r} returned the"
            " same object again.",
            key="num_envs_per_worker",
            value=len(copies),
            hint="Have it make a new environment on each call.",
        )


def _close_after_error(env: Any) -> None:
    """Close a copy; an error is only logged, because the one that came first is raised."""
    try:
        close_env(env)
    except Exception:
        logger.exception(
            "after another copy had failed, %s could not be closed", type(env).__name__
        )
