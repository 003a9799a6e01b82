"""From the name of an environment to its copies, in the forms that samplers drive.

``EnvMaker`` makes what a worker is to have; ``make_lockstep_env`` and ``to_base_env`` are its two ends by themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

import gymnasium
from gymnasium.envs.registration import EnvSpec

from aiorl.config.worker import WorkerConfig
from aiorl.env.atari import AtariCopies, why_not_atari_vector
from aiorl.env.base_env import BaseEnv, LockstepEnv, checked_horizon
from aiorl.env.checks import raise_env_fault
from aiorl.env.gym_like import check_seedable, close_env
from aiorl.env.kinds import check_can_be_remote, kind_of
from aiorl.env.native_vector_env import NativeVectorEnv
from aiorl.env.registry import EnvContext, EnvCreator, is_atari_id, loaded_entry, name_elsewhere, resolve_env
from aiorl.env.remote_env import RemoteEnv, RemoteSettings
from aiorl.env.vector_env import VectorEnv
from aiorl.env.wrapping import Wrapping
from aiorl.errors import AiorlError, ConfigError, UnsupportedEnvError

logger = logging.getLogger(__name__)

VECTORIZE_CHOICES: tuple[str, ...] = get_args(WorkerConfig.model_fields["vectorize"].annotation)

EnvSource = str | type[Any] | Callable[[EnvContext], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvPlan:
    """Which environments a worker is to have.

    Attributes:
        env: name, class or creating function (see ``registry``).
        env_config: the environment's own settings.
        num_envs: number of copies.
        vectorize: ``"native"`` the environment's own vectorised form; ``"serial"`` copies stepped in turn; ``"remote"``
            one process per copy; ``"auto"`` native where there is one and more than one copy is wanted, else serial.
        worker_index: slot of the worker, for the environments' EnvContext.
        horizon: truncate episodes at this many steps; None or 0 = the environment's own limit.
        wrapping: wrappers put around each single copy.
        remote_wait_ms: how long a poll of remote copies waits for more, once one is ready.
        max_restarts_per_hour: see RemoteSettings.
        seed: the worker's seed; None leaves environments to themselves.
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

    def __post_init__(self) -> None:
        """Check what can be checked before anything is made.

        Raises:
            ConfigError: an unknown choice, or fewer than one copy.
        """
        if self.vectorize not in VECTORIZE_CHOICES:
            raise ConfigError(
                f"vectorize is {self.vectorize!r}, expected one of {', '.join(VECTORIZE_CHOICES)}.",
                key="vectorize",
                value=self.vectorize,
            )
        if self.num_envs < 1:
            raise ConfigError(
                f"number of environments is {self.num_envs}, expected at least 1.", key="num_envs_per_worker"
            )

    @property
    def is_remote(self) -> bool:
        """Each copy lives in a process of its own."""
        return self.vectorize == "remote"


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
        self.context = EnvContext(config, plan.worker_index, remote=plan.is_remote, num_envs=plan.num_envs)
        self.is_deepmind = False

    def make_first(self) -> Any:
        """Environment 0, with its wrappers; where one object holds all copies, that object.

        Raises:
            EnvError: the environment's constructor failed.
            UnsupportedEnvError: what was made is no environment that can be driven (also a ValueError).
            ConfigError: a form or a horizon that it cannot have.
        """
        plan = self.plan
        if plan.vectorize == "native" or (plan.vectorize == "auto" and choose_vectorize(self._wanted) == "native"):
            return self._made_vectorised()
        env = self._made(self.context.copy_with_overrides())  # creators may change what they are given
        if isinstance(env, LockstepEnv):
            env.limit_episodes(plan.horizon)
        self.is_deepmind = kind_of(env, self.env_id).is_single and plan.wrapping.wraps_atari(env)
        # of remote ones only its spaces are of interest; the one that is played, and monitored, lives in a child
        return self._wrap(env, self.context, is_monitored=not plan.is_remote)

    @property
    def _wanted(self) -> Wanted:
        plan = self.plan
        return Wanted(self.creator, plan.env_config, plan.num_envs, plan.horizon, plan.wrapping)

    def check_native(self) -> None:
        """Raise if the environment has no vectorised form that does what is wanted; nothing is made.

        Raises:
            ConfigError: it has none.
        """
        obstacle = why_not_vectorised(self._wanted)
        if obstacle is not None:
            raise ConfigError(
                f"vectorize is 'native', but environment {self.env_id!r} has no such form here: {obstacle}.",
                key="vectorize",
                value="native",
                hint="Use vectorize: serial (or auto).",
            )

    def _made_vectorised(self) -> Any:
        self.check_native()
        wanted = self._wanted
        self.is_deepmind = wanted.wrapping.deepmind and is_atari_id(self.creator.gym_id or "")
        return self._guarded(lambda: make_vector_form(wanted), 0)

    def check_seedable(self, env: Any) -> None:
        """Raise if an environment cannot be seeded.

        Raises:
            ConfigError: it cannot (also a ValueError).
        """
        check_seedable(env, self.env_id)

    def to_base_env(self, env: Any) -> BaseEnv:
        """Environment 0 and as many more as are wanted.

        Raises:
            ConfigError: a number of environments or remote processes that this kind cannot have.
            EnvError: a child process could not make its environment.
        """
        plan = self.plan
        settings = self._remote_settings() if plan.is_remote and not kind_of(env, self.env_id).holds_copies else None
        return to_base_env(
            env,
            self._make_copy,
            plan.num_envs,
            plan.is_remote,
            plan.remote_wait_ms,
            remote_settings=settings,
            env_id=self.env_id,
            seed=plan.seed,
        )

    def make_lockstep(self) -> LockstepEnv:
        """All copies, stepped together; their seeds are given at the first ``reset``.

        Raises:
            ConfigError: a choice that this environment does not offer, or a horizon that it cannot have.
            UnsupportedEnvError: not an environment with one agent.
            EnvError: the environment's constructor raised.
        """
        env = self.make_first()
        base_env = self.to_base_env(env)
        with contextlib.ExitStack() as on_error:
            on_error.callback(base_env.stop)
            lockstep = base_env.in_lockstep(self.plan.horizon)
            on_error.pop_all()
        if lockstep is None:
            kind = kind_of(env, self.env_id).name
            raise UnsupportedEnvError(f"environment {self.env_id!r}, {kind}, cannot be stepped as whole arrays")
        return lockstep

    def _make_copy(self, index: int) -> Any:
        context = self.context.copy_with_overrides(vector_index=index)
        return self._wrap(self._made(context), context)

    def _made(self, context: EnvContext) -> Any:
        return self._guarded(lambda: self.creator(context), context.vector_index)

    def _guarded(self, make: Callable[[], Any], index: int) -> Any:
        try:
            return make()
        except AiorlError:
            raise
        except Exception as error:  # whatever an environment's constructor raises
            raise_env_fault(self.env_id, "its constructor", error, index, -1)

    def _wrap(self, env: Any, context: EnvContext, *, is_monitored: bool = True) -> Any:
        wrapping = self.plan.wrapping
        if not is_monitored:
            wrapping = dataclasses.replace(wrapping, monitor_path=None)
        return wrapping.wrap(env, context)

    def _remote_settings(self) -> RemoteSettings:
        """How child processes make the environment."""
        plan = self.plan
        return RemoteSettings(
            name_elsewhere(plan.env),
            dict(self.context),
            worker_index=plan.worker_index,
            wrapping=plan.wrapping,
            max_restarts_per_hour=plan.max_restarts_per_hour,
        )


def make_lockstep_env(
    env: EnvSource,
    env_config: Mapping[str, Any] | None = None,
    num_envs: int = 1,
    vectorize: str = "auto",
    *,
    worker_index: int = 0,
    horizon: int | None = None,
    wrapping: Wrapping | None = None,
) -> LockstepEnv:
    """N copies of an environment, stepped together; see EnvPlan and ``EnvMaker.make_lockstep``."""
    plan = EnvPlan(
        env=env,
        env_config=dict(env_config or {}),
        num_envs=num_envs,
        vectorize=vectorize,
        worker_index=worker_index,
        horizon=horizon,
        wrapping=wrapping or Wrapping(),
    )
    return EnvMaker(plan).make_lockstep()


def choose_vectorize(wanted: Wanted) -> str:
    """What ``"auto"`` means for an environment: ``"native"`` or ``"serial"``.

    A single copy is stepped as it is: a vector of one costs more per step and gains nothing.
    """
    if wanted.num_envs < 2:
        return "serial"
    obstacle = why_not_vectorised(wanted)
    if obstacle is not None and is_atari_id(wanted.creator.gym_id or ""):
        logger.info("%s is stepped game by game: %s", wanted.creator.env_id, obstacle)
    return "native" if obstacle is None else "serial"


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
    """Convert an environment of any kind to a BaseEnv; a BaseEnv is returned as it is.

    Args:
        env: environment 0, of any of the kinds in ``kinds``.
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
    kind = kind_of(env, env_id)
    if remote_envs:
        check_can_be_remote(env, env_id)
    if num_envs < 1:
        raise ConfigError(f"number of environments is {num_envs}, expected at least 1.", key="num_envs_per_worker")
    if kind.is_external and num_envs != 1:
        raise ConfigError(
            f"{num_envs} environments are asked for, but an external environment drives itself: expected 1.",
            key="num_envs_per_worker",
            value=num_envs,
        )
    if kind.holds_copies:
        return kind.to_base_env([env], env_id, seed)
    if remote_envs:
        if remote_settings is None:
            raise ConfigError("environments in processes of their own need to know how they are made.", key="env")
        close_env(env)
        return RemoteEnv(
            remote_settings,
            num_envs,
            batch_wait_ms=remote_env_batch_wait_ms,
            seed=seed,
            has_agents=kind.has_agents,
        )
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
