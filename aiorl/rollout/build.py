"""The parts of a RolloutWorker, each made from the constructor's arguments; the worker says in which order."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from aiorl.callbacks import DefaultCallbacks
from aiorl.config.merge import deep_update
from aiorl.env.base_env import BaseEnv
from aiorl.env.env_maker import EnvMaker, EnvPlan
from aiorl.env.external_env import ExternalMultiAgentEnv
from aiorl.errors import ConfigError
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
    "Sampler",
    "env_maker",
    "make_estimators",
    "make_filters",
    "make_input_reader",
    "make_output_writer",
    "make_policies",
    "make_sampler",
    "set_environment_variables",
    "set_rules_for_agents",
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


def env_maker(arguments: WorkerArguments) -> EnvMaker:
    """What makes a worker's environments.

    Raises:
        UnknownEnvError: the creator is a name that nothing has, or cannot be called.
    """
    settings = arguments.settings
    plan = EnvPlan(
        env=arguments.env_creator,
        env_config=settings.env_config,
        num_envs=settings.num_envs_per_worker,
        vectorize="remote" if settings.remote_worker_envs else "serial",
        worker_index=arguments.worker_index,
        # at a soft horizon an environment is not to cut its episodes
        horizon=None if settings.soft_horizon else settings.horizon,
        wrapping=arguments.wrapping,
        remote_wait_ms=settings.remote_env_batch_wait_ms,
        max_restarts_per_hour=settings.max_env_restarts_per_hour,
        seed=settings.seed,
    )
    return EnvMaker(plan)


def set_rules_for_agents(env: Any, arguments: WorkerArguments) -> None:
    """Tell an environment whose clients are checked what the worker's settings make of the rules for agents."""
    if isinstance(env, ExternalMultiAgentEnv):
        is_rewritten = arguments.observation_fn is not None
        env.leave_agents_to_sampler(
            observations_rewritten=is_rewritten, no_done_at_end=arguments.settings.no_done_at_end
        )


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
    """Raise if a policy lacks attributes that samplers and learners read."""
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
