"""The parts of a RolloutWorker, each made from the constructor's arguments; the worker says in which order."""

from __future__ import annotations

import dataclasses
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np

from aiorl.callbacks import DefaultCallbacks
from aiorl.config.merge import deep_update
from aiorl.env.adapt import to_base_env
from aiorl.env.base_env import BaseEnv
from aiorl.env.checks import env_fault
from aiorl.env.external_env import ExternalMultiAgentEnv
from aiorl.env.gym_like import check_gym_like, check_seedable
from aiorl.env.registry import EnvContext, resolve_env
from aiorl.env.remote_base_env import RemoteSettings, remote_name
from aiorl.env.wrapping import HOLD_THEIR_COPIES, NEVER_WRAPPED
from aiorl.errors import AiorlError, ConfigError
from aiorl.log_once import log_once
from aiorl.observation.filters import ObservationFilter, make_filter
from aiorl.observation.preprocessors import Preprocessor, make_preprocessor
from aiorl.offline.estimators import ESTIMATORS, OffPolicyEstimator
from aiorl.offline.io import InputReader, IOContext, OutputWriter, SamplerInput
from aiorl.policy.policy import Policy
from aiorl.policy.policy_map import PolicyMap
from aiorl.rollout.arguments import SIMULATION, WorkerArguments
from aiorl.rollout.frameworks import check_tensorflow, granted_gpus, policy_class_for
from aiorl.rollout.policy_specs import PolicySpec
from aiorl.sampler.async_sampler import AsyncSampler
from aiorl.sampler.setup import SamplerSetup
from aiorl.sampler.sync_sampler import SyncSampler

__all__ = [
    "EnvMaker",
    "Sampler",
    "make_estimators",
    "make_filters",
    "make_input_reader",
    "make_output_writer",
    "make_policies",
    "make_sampler",
    "set_environment_variables",
    "set_up_logging",
]

logger = logging.getLogger(__name__)

Sampler = SyncSampler | AsyncSampler

_POLICY_ATTRIBUTES = ("observation_space", "action_space", "global_timestep")


def set_environment_variables(values: Mapping[str, Any] | None) -> None:
    """Set environment variables of this process, as strings."""
    os.environ.update({name: str(value) for name, value in (values or {}).items()})


def set_up_logging(log_level: str | None, worker_index: int) -> None:
    """Set aiorl's log level, and how often reports of data flow appear.

    Workers 0 and 1 report, at DEBUG again and again; others keep quiet, also at DEBUG.
    """
    if log_level is not None:
        logging.getLogger("aiorl").setLevel(log_level)
    log_once.set_up(worker_index, log_level)


class EnvMaker:
    """Makes and wraps a worker's environments, and brings them into the form that samplers drive.

    Attributes:
        context: of environment 0.
        is_deepmind: environment 0 got the DeepMind wrappers; known once it is made.
    """

    def __init__(self, arguments: WorkerArguments) -> None:
        """Find out what makes the environments.

        Raises:
            UnknownEnvError: the creator is a name that nothing has, or cannot be called.
        """
        self._arguments = arguments
        self._settings = arguments.settings
        self._creator = resolve_env(arguments.env_creator)
        self._wrapping = arguments.wrapping
        config = self._wrapping.env_config(self._creator, self._settings.env_config)
        self.context = EnvContext(config, arguments.worker_index)
        self.is_deepmind = False

    def make_first(self) -> Any:
        """Environment 0, wrapped.

        Raises:
            EnvError: the environment's constructor failed.
            UnsupportedEnvError: what was made is no environment that we can drive (also a ValueError).
        """
        env = self._made(self.context.copy_with_overrides())  # creators may change what they are given
        if not isinstance(env, NEVER_WRAPPED):
            check_gym_like(env, self._creator.env_id)
            self.is_deepmind = self._wrapping.wraps_atari(env)
        if self._settings.remote_worker_envs:
            # only its spaces are of interest; the one that is played, and monitored, lives in a child process
            return self._wrap(env, self.context, is_monitored=False)
        return self._wrap(env, self.context)

    def check_seedable(self, env: Any) -> None:
        """Nothing, for an environment that can be seeded.

        Raises:
            ConfigError: it cannot (also a ValueError).
        """
        check_seedable(env, self._creator.env_id)

    def to_base_env(self, env: Any) -> BaseEnv:
        """Environment 0 and as many more as are wanted.

        Raises:
            ConfigError: a number of environments or remote processes that this kind cannot have.
            EnvError: a child process could not make its environment.
        """
        settings = self._settings
        if isinstance(env, ExternalMultiAgentEnv):
            is_rewritten = self._arguments.observation_fn is not None
            env.leave_agents_to_sampler(observations_rewritten=is_rewritten, no_done_at_end=settings.no_done_at_end)
        return to_base_env(
            env,
            self._make_copy,
            settings.num_envs_per_worker,
            settings.remote_worker_envs,
            settings.remote_env_batch_wait_ms,
            remote_settings=self._remote_settings(env) if settings.remote_worker_envs else None,
            env_id=self._creator.env_id,
            seed=settings.seed,
        )

    def _make_copy(self, index: int) -> Any:
        context = self.context.copy_with_overrides(vector_index=index, remote=self._settings.remote_worker_envs)
        return self._wrap(self._made(context), context)

    def _made(self, context: EnvContext) -> Any:
        try:
            return self._creator(context)
        except AiorlError:
            raise
        except Exception as error:
            # whatever an environment's constructor raises
            creator = self._creator.env_id
            raise env_fault(creator, "its constructor", error, context.vector_index, step=-1) from error

    def _wrap(self, env: Any, context: EnvContext, *, is_monitored: bool = True) -> Any:
        if isinstance(env, NEVER_WRAPPED):
            return env
        wrapping = self._wrapping if is_monitored else dataclasses.replace(self._wrapping, monitor_path=None)
        return wrapping.wrap(env, context)

    def _remote_settings(self, env: Any) -> RemoteSettings | None:
        """How child processes make the environment; None where it is of a kind that has none."""
        if isinstance(env, HOLD_THEIR_COPIES):
            return None
        return RemoteSettings(
            remote_name(self._arguments.env_creator),
            dict(self.context),
            worker_index=self._arguments.worker_index,
            wrapping=self._wrapping,
            max_restarts_per_hour=self._settings.max_env_restarts_per_hour,
        )


def agent_spaces(env: Any) -> tuple[Any, Any]:
    """Observation and action space of one agent, None where the environment names none."""
    prefix = "single_" if isinstance(env, gymnasium.vector.VectorEnv) else ""
    return getattr(env, f"{prefix}observation_space", None), getattr(env, f"{prefix}action_space", None)


def make_policies(
    specs: Mapping[str, PolicySpec], arguments: WorkerArguments, *, preprocess: bool
) -> tuple[dict[str, Policy], dict[str, Preprocessor]]:
    """Policies and preprocessors by policy id, made in the order of the ids.

    Args:
        specs: how each policy is made.
        arguments: of the worker.
        preprocess: False takes observations as the environment's wrappers made them.

    Raises:
        UnsupportedSpaceError: observations that no preprocessor makes an array of (also a ValueError).
        ConfigError: a policy without an eager variant, in eager mode; or one without spaces (also a ValueError).
        ImportError: a policy needs TensorFlow, which is not installed.
        RuntimeError: GPUs are granted that TensorFlow does not see.
    """
    policies: dict[str, Policy] = {}
    preprocessors: dict[str, Preprocessor] = {}
    settings, base_config = arguments.settings, arguments.policy_config or {}
    for position, policy_id in enumerate(sorted(specs)):
        spec = specs[policy_id]
        config = deep_update(base_config, spec.config)
        config |= {"num_workers": arguments.num_workers, "worker_index": arguments.worker_index}
        if settings.seed is not None:
            seed = _policy_seed(settings.seed, position)
            config.setdefault("seed", seed)
            spec.action_space.seed(seed)  # for policies that draw their actions from it
        custom = (config.get("model") or {}).get("custom_preprocessor") or settings.model.custom_preprocessor
        if custom and not preprocess:
            logger.warning(
                "policy %r: its custom_preprocessor is not used, since DeepMind's wrappers prepare observations; give "
                "it in model_config, or preprocessor_pref='rllib', to do without these wrappers",
                policy_id,
            )
            custom = None
        preprocessor = make_preprocessor(
            spec.observation_space,
            action_space=spec.action_space,
            custom_preprocessor=custom,
            is_enabled=preprocess,
        )
        check_tensorflow(spec.policy_class, granted_gpus(base_config, arguments.worker_index))
        policy_class = policy_class_for(spec.policy_class, base_config)
        preprocessors[policy_id] = preprocessor
        filtered = make_filter(settings.observation_filter, preprocessor.shape, preprocessor.layout.num_mask)
        space = filtered.output_space(preprocessor.observation_space)
        policies[policy_id] = policy_class(space, spec.action_space, config)
        _check_initialised(policy_id, policies[policy_id])
    return policies, preprocessors


def _check_initialised(policy_id: str, policy: Policy) -> None:
    """Nothing, for a policy with the attributes that samplers and learners read."""
    missing = [name for name in _POLICY_ATTRIBUTES if not hasattr(policy, name)]
    if missing:
        raise ConfigError(
            f"policy {policy_id!r}, a {type(policy).__name__}, has no {', '.join(missing)}.",
            key="policy",
            hint="Its __init__ has to call super().__init__(observation_space, action_space, config).",
        )


def _policy_seed(seed: int, position: int) -> int:
    """Seed of a policy's own generators: the worker's for the first, else another one each."""
    return seed if position == 0 else int(np.random.SeedSequence((seed, position)).generate_state(1)[0])


def make_filters(preprocessors: Mapping[str, Preprocessor], name: str) -> dict[str, ObservationFilter]:
    """A filter for each policy's observations.

    Raises:
        ConfigError: no filter of that name (also a ValueError).
    """
    return {
        policy_id: make_filter(name, preprocessor.shape, preprocessor.layout.num_mask)
        for policy_id, preprocessor in preprocessors.items()
    }


def make_sampler(
    worker: Any,
    arguments: WorkerArguments,
    *,
    base_env: BaseEnv,
    policies: PolicyMap,
    preprocessors: Mapping[str, Preprocessor],
    filters: Mapping[str, ObservationFilter],
    callbacks: DefaultCallbacks,
    is_deepmind: bool,
    on_turn: Callable[[], None],
) -> Sampler:
    """The sampler, not yet started.

    Raises:
        AssertionError: sampling in the background with a filter that threads may not share.
    """
    settings = arguments.settings
    if settings.clip_rewards is None:
        settings = settings.model_copy(update={"clip_rewards": is_deepmind})
    setup = SamplerSetup(
        worker=weakref.ref(worker),  # else an asynchronous sampler's thread would keep it alive for ever
        base_env=base_env,
        policy_map=policies,
        policy_mapping_fn=None,
        preprocessors=preprocessors,
        filters=filters,
        settings=settings,
        callbacks=callbacks,
        observation_fn=arguments.observation_fn,
    )
    if arguments.wants_simulation:
        logger.warning(
            "Input evaluation %r: the environment is sampled in the background, for metrics only", SIMULATION
        )
    if settings.sample_async or arguments.wants_simulation:
        return AsyncSampler(setup, blackhole_outputs=arguments.wants_simulation, on_turn=on_turn)
    return SyncSampler(setup, on_turn=on_turn)


def make_estimators(arguments: WorkerArguments, context: IOContext) -> list[OffPolicyEstimator]:
    """Off-policy estimators, in the order of their names.

    Raises:
        ConfigError: there is no default policy to judge (also a ValueError).
    """
    return [ESTIMATORS[name].create(context) for name in sorted(arguments.input_evaluation) if name in ESTIMATORS]


def make_input_reader(arguments: WorkerArguments, context: IOContext) -> InputReader:
    """Where batches come from.

    Raises:
        AssertionError: the creator made something else.
        ConfigError: the sampler's batches are asked for, and dropped for the sake of input evaluation.
    """
    reader = arguments.input_creator(context)
    if not isinstance(reader, InputReader):
        raise AssertionError(f"input_creator made a {type(reader).__name__}, expected an InputReader")
    if arguments.wants_simulation and isinstance(reader, SamplerInput):
        raise ConfigError(
            f"input_evaluation {SIMULATION!r} drops what the sampler yields, which is the input here.",
            key="input_evaluation",
            value=SIMULATION,
            hint="Use it with stored input only.",
        )
    return reader


def make_output_writer(arguments: WorkerArguments, context: IOContext) -> OutputWriter:
    """Where copies of batches go.

    Raises:
        AssertionError: the creator made something else.
    """
    writer = arguments.output_creator(context)
    if not isinstance(writer, OutputWriter):
        raise AssertionError(f"output_creator made a {type(writer).__name__}, expected an OutputWriter")
    return writer
