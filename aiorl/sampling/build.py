"""The parts of a RolloutWorker, each made from the constructor's arguments; the worker says in which order."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from gymnasium import spaces

from aiorl.acting.exploration import exploration_has_memory
from aiorl.acting.graph_policy import GraphPolicy
from aiorl.acting.observation.filters import ObservationFilter, make_filter
from aiorl.acting.observation.preprocessors import Preprocessor, make_preprocessor
from aiorl.acting.observation.returns import ReturnFilter, RewardScaler, returns_of
from aiorl.acting.policy import Policy
from aiorl.acting.policy_map import policy_seed
from aiorl.config.merge import deep_update
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.env.env_maker import EnvMaker, EnvPlan
from aiorl.env.external_env import ExternalMultiAgentEnv
from aiorl.env.lockstep import LockstepEnv
from aiorl.errors import ConfigError
from aiorl.offline.estimators import ESTIMATORS, OffPolicyEstimator
from aiorl.offline.io import InputReader, IOContext, OutputWriter, SamplerInput, noop_output, sampler_input
from aiorl.process.log_once import log_once
from aiorl.sampling.arguments import SIMULATION, WorkerArguments
from aiorl.sampling.assemble import FRAGMENT_COLUMNS
from aiorl.sampling.callbacks import worker_hooks
from aiorl.sampling.frameworks import check_tensorflow, granted_gpus, policy_class_for
from aiorl.sampling.lockstep import LockstepSampler
from aiorl.sampling.policy_specs import ENV_SPACE, PolicySpec
from aiorl.sampling.setup import SamplerSetup

if TYPE_CHECKING:
    from aiorl.sampling.async_sampler import AsyncSampler
    from aiorl.sampling.sync_sampler import SyncSampler
    from aiorl.sampling.worker import RolloutWorker

    Sampler: TypeAlias = LockstepSampler | SyncSampler | AsyncSampler

__all__ = [
    "env_maker",
    "lockstep_sampler",
    "make_estimators",
    "make_filters",
    "make_input_reader",
    "make_output_writer",
    "make_policies",
    "make_return_filters",
    "polling_sampler",
    "set_environment_variables",
    "set_rules_for_agents",
    "set_up_logging",
    "why_polled",
]

logger = logging.getLogger(__name__)

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


def env_maker(arguments: WorkerArguments, polled: str) -> EnvMaker:
    """What makes a worker's environments.

    Args:
        arguments: of the worker.
        polled: from `why_polled`.

    Raises:
        UnknownEnvError: the creator is a name that nothing has, or cannot be called.
    """
    settings = arguments.settings
    vectorize = "remote" if settings.remote_worker_envs else settings.vectorize
    if vectorize == "auto" and polled:
        vectorize = "serial"
    plan = EnvPlan(
        env=arguments.env_creator,
        env_config=settings.env_config,
        num_envs=settings.num_envs_per_worker,
        vectorize=vectorize,
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
            seed = policy_seed(settings.seed, position)
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


def make_filters(preprocessors: Mapping[str, Preprocessor], name: str) -> dict[str, ObservationFilter]:
    """A filter for each policy's observations.

    Raises:
        ConfigError: no filter of that name (also a ValueError).
    """
    return {
        policy_id: make_filter(name, preprocessor.shape, preprocessor.layout.num_mask)
        for policy_id, preprocessor in preprocessors.items()
    }


def make_return_filters(policies: Mapping[str, Policy]) -> dict[str, ObservationFilter]:
    """Have policies scale their rewards that are to; the statistics they do it by, as they are named among filters."""
    filters: dict[str, ObservationFilter] = {}
    for policy_id, policy in policies.items():
        discount = policy.return_discount if isinstance(policy, GraphPolicy) else None
        if isinstance(policy, GraphPolicy) and discount is not None:
            own = filters[returns_of(policy_id)] = ReturnFilter()
            policy.reward_scaler = RewardScaler(own, discount)
    return filters


def why_polled(arguments: WorkerArguments) -> str:
    """Why environments have to be polled turn by turn; "" where they may be stepped in lockstep, if they can.

    In lockstep there are neither episodes nor agents that anybody could be told of, and one network acts for all.
    """
    settings, plan, policies = arguments.settings, arguments.sample_plan, arguments.policy
    if plan is None:
        return "whole rows are wanted"
    for name in ("soft_horizon", "no_done_at_end", "sample_async", "remote_worker_envs", "fake_sampler"):
        if getattr(settings, name):
            return f"{name} is set"
    if settings.model.custom_preprocessor:
        return "model.custom_preprocessor is set"
    for name in ("observation_fn", "policy_mapping_fn"):
        if getattr(arguments, name):
            return f"multiagent.{name} is set"
    if arguments.callbacks is not None and worker_hooks(arguments.callbacks):
        return "callbacks has hooks for workers"
    if arguments.input_creator is not sampler_input or arguments.output_creator is not noop_output:
        return "rows are read or written"
    if not isinstance(policies, Mapping) or set(policies) != {DEFAULT_POLICY_ID}:
        return "there are several policies"
    kind, *own_spaces, config = policies[DEFAULT_POLICY_ID]
    spec = getattr(kind, "acting_spec", None)
    if spec is None or exploration_has_memory(config.get("exploration")):
        return "the policy acts in a way of its own"
    if any(space is not ENV_SPACE for space in own_spaces):
        return "the policy has spaces of its own"
    if spec.prev_action is not None:
        return "the policy looks back at actions and rewards"
    odd = [name for name in plan.of_rows if name not in FRAGMENT_COLUMNS]
    return f"the column {odd[0]!r} is wanted" if odd else ""


def lockstep_sampler(
    worker: RolloutWorker, arguments: WorkerArguments, polled: str, on_turn: Callable[[], None]
) -> LockstepSampler | None:
    """The sampler of environments that all step at once; None where they have to be polled.

    Args:
        worker: the worker.
        arguments: what it is made from.
        polled: from `why_polled`.
        on_turn: called between two turns.

    Raises:
        ConfigError: a horizon that the environments cannot have.
    """
    settings, plan = arguments.settings, arguments.sample_plan
    env = None if polled else worker.async_env.in_lockstep(settings.horizon)
    if env is None or plan is None or env.num_envs != settings.num_envs_per_worker or _is_nested(env):
        if plan is not None and log_once("polled"):
            logger.info("Environments are polled turn by turn: %s", polled or "they cannot be stepped as whole arrays")
        return None
    policy = worker.policy_map[DEFAULT_POLICY_ID]
    assert isinstance(policy, GraphPolicy), "why_polled has seen its class"
    return LockstepSampler(
        env,
        policy,
        fragment_length=settings.rollout_fragment_length,
        # recurrent states go along by themselves
        columns=[name for name in plan.columns if name in FRAGMENT_COLUMNS],
        complete_episodes=not settings.is_truncating,
        preprocessor=worker.preprocessors[DEFAULT_POLICY_ID],
        filter=worker.sampling_filters[DEFAULT_POLICY_ID],
        postprocess=plan.postprocess,
        postprocess_settings=plan.postprocess_params,
        reward_limit=worker.reward_limit,
        reward_scaler=policy.reward_scaler,
        clip_actions=settings.clip_actions,
        state_every=plan.state_every,
        seed=settings.seed,
        on_step=on_turn,
    )


def _is_nested(env: LockstepEnv) -> bool:
    return any(isinstance(space, spaces.Dict | spaces.Tuple) for space in (env.observation_space, env.action_space))


def polling_sampler(
    worker: RolloutWorker, arguments: WorkerArguments, on_turn: Callable[[], None]
) -> SyncSampler | AsyncSampler:
    """The sampler of environments that report when they are ready, not yet started.

    Raises:
        AssertionError: sampling in the background with a filter that threads may not share.
    """
    # those who step in lockstep need nothing of these
    from aiorl.sampling.async_sampler import AsyncSampler
    from aiorl.sampling.sync_sampler import SyncSampler

    settings = arguments.settings.model_copy(update={"clip_rewards": worker.reward_limit})
    setup = SamplerSetup(
        worker=weakref.ref(worker),  # else an asynchronous sampler's thread would keep it alive for ever
        base_env=worker.async_env,
        policy_map=worker.policy_map,
        policy_mapping_fn=None,
        preprocessors=worker.preprocessors,
        filters=worker.sampling_filters,
        settings=settings,
        callbacks=worker.callbacks,
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
