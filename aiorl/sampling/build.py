"""Construction of a Worker's parts from its settings; the worker calls these functions in order."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gymnasium import spaces

from aiorl.acting.exploration import exploration_has_memory
from aiorl.acting.filters import ObservationFilter, ReturnFilter, RewardScaler, returns_of
from aiorl.acting.graph_policy import GraphPolicy
from aiorl.acting.policy import Policy
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.env.base_env import LockstepEnv
from aiorl.env.env_maker import EnvMaker
from aiorl.env.wrapping import EnvPlan
from aiorl.errors import ConfigError
from aiorl.offline.io import IOContext, SamplerInput, noop_output, sampler_input
from aiorl.process.log_once import log_once
from aiorl.sampling.async_sampler import AsyncSampler
from aiorl.sampling.callbacks import worker_hooks
from aiorl.sampling.fragments import FRAGMENT_COLUMNS
from aiorl.sampling.lockstep import Lockstep
from aiorl.sampling.policies import ENV_SPACE
from aiorl.sampling.sampler import SyncSampler
from aiorl.sampling.settings import SIMULATION, SamplerSetup, WorkerSettings

if TYPE_CHECKING:
    from aiorl.sampling.worker import Worker

logger = logging.getLogger(__name__)


def env_maker(settings: WorkerSettings, polled: str) -> EnvMaker:
    """Return the maker of a worker's environments.

    Args:
        settings: the worker's settings.
        polled: result of `why_polled`.

    Raises:
        UnknownEnvError: the creator is an unknown name or cannot be called.
    """
    config = settings.config
    vectorize = config.vectorize
    # environments that are not polled separately step together
    remote_wait_ms = math.inf
    if config.remote_worker_envs:
        vectorize = "remote"
        remote_wait_ms = config.remote_env_batch_wait_ms
    elif vectorize == "auto" and polled:
        vectorize = "serial"
    plan = EnvPlan(
        env=settings.env_creator,
        env_config=config.env_config,
        num_envs=config.num_envs_per_worker,
        vectorize=vectorize,
        worker_index=settings.worker_index,
        # At a soft horizon, an environment must not cut its episodes.
        horizon=None if config.soft_horizon else config.horizon,
        wrapping=settings.wrapping,
        remote_wait_ms=remote_wait_ms,
        max_restarts_per_hour=config.max_env_restarts_per_hour,
        seed=config.seed,
    )
    return EnvMaker(plan)


def make_return_filters(policies: Mapping[str, Policy]) -> dict[str, ObservationFilter]:
    """Make policies scale their rewards if they need it; return the statistics as filters by
    name.
    """
    filters: dict[str, ObservationFilter] = {}
    for policy_id, policy in policies.items():
        if isinstance(policy, GraphPolicy) and policy.return_discount is not None:
            statistics = filters[returns_of(policy_id)] = ReturnFilter()
            policy.reward_scaler = RewardScaler(statistics, policy.return_discount)
    return filters


def why_polled(settings: WorkerSettings) -> str:
    """Return the reason why environments must be polled turn by turn; "" if lockstep is allowed.

    In lockstep there are no episodes or agents to pass to user code, and one network acts for all.
    """
    config = settings.config
    plan = settings.sample_plan
    policies = settings.policy
    if plan is None:
        return "complete rows are needed"
    for name in (
        "soft_horizon",
        "no_done_at_end",
        "sample_async",
        "remote_worker_envs",
        "fake_sampler",
    ):
        if getattr(config, name):
            return f"{name} is set"
    if config.model.custom_preprocessor:
        return "model.custom_preprocessor is set"
    for name in ("observation_fn", "policy_mapping_fn"):
        if getattr(settings, name):
            return f"multiagent.{name} is set"
    if worker_hooks(settings.callbacks):
        return "callbacks has hooks for workers"
    if settings.input_creator is not sampler_input or settings.output_creator is not noop_output:
        return "rows are read or written"
    if not isinstance(policies, Mapping) or set(policies) != {DEFAULT_POLICY_ID}:
        return "there are several policies"
    kind, *policy_spaces, policy_config = policies[DEFAULT_POLICY_ID]
    spec = getattr(kind, "acting_spec", None)
    if spec is None or exploration_has_memory(policy_config.get("exploration")):
        return "the policy acts in its own way"
    if any(space is not ENV_SPACE for space in policy_spaces):
        return "the policy has its own spaces"
    if spec.prev_action is not None:
        return "the policy looks back at actions and rewards"
    unknown = [name for name in plan.of_rows if name not in FRAGMENT_COLUMNS]
    return f"the plan has the column {unknown[0]!r}" if unknown else ""


def make_sampler(
    worker: Worker,
    settings: WorkerSettings,
    polled: str,
    *,
    worker_of_hooks: Any,
    on_turn: Callable[[], None],
) -> SyncSampler | AsyncSampler:
    """Make the sampler without starting it.

    Args:
        worker: the worker.
        settings: the worker's settings.
        polled: result of `why_polled`.
        worker_of_hooks: what callbacks and other code of users get as the worker.
        on_turn: called between two turns.

    Raises:
        AssertionError: asynchronous sampling with a filter that must not be shared by threads.
        ConfigError: the environments cannot have the horizon.
    """
    setup = SamplerSetup(
        # otherwise the thread of an asynchronous sampler keeps it alive forever
        worker=weakref.ref(worker_of_hooks),
        base_env=worker.async_env,
        policy_map=worker.policy_map,
        preprocessors=worker.preprocessors,
        filters=worker.sampling_filters,
        settings=settings.config.model_copy(update={"clip_rewards": worker.reward_limit}),
        callbacks=worker.callbacks,
        observation_fn=settings.observation_fn,
    )
    lockstep = _lockstep(worker, settings, polled)
    if settings.wants_simulation:
        logger.warning(
            "input evaluation %r: the environment is sampled in the background, for metrics only",
            SIMULATION,
        )
    if settings.config.sample_async or settings.wants_simulation:
        return AsyncSampler(setup, blackhole_outputs=settings.wants_simulation, on_turn=on_turn)
    return SyncSampler(setup, lockstep=lockstep, on_turn=on_turn)


def _lockstep(worker: Worker, settings: WorkerSettings, polled: str) -> Lockstep | None:
    """Return the worker's environments in lockstep; None if they must be polled."""
    config = settings.config
    plan = settings.sample_plan
    env = None if polled else worker.async_env.in_lockstep(config.horizon)
    if env is None or plan is None or env.num_envs != config.num_envs_per_worker or _is_nested(env):
        if plan is not None and log_once("polled"):
            logger.info(
                "environments are polled turn by turn: %s",
                polled or "they cannot be stepped as whole arrays",
            )
        return None
    policy = worker.policy_map[DEFAULT_POLICY_ID]
    assert isinstance(policy, GraphPolicy), "why_polled allowed another class"
    return Lockstep(
        env,
        policy,
        plan,
        config.model_copy(update={"clip_rewards": worker.reward_limit}),
        preprocessor=worker.preprocessors[DEFAULT_POLICY_ID],
        filter=worker.sampling_filters[DEFAULT_POLICY_ID],
    )


def _is_nested(env: LockstepEnv) -> bool:
    return any(
        isinstance(space, spaces.Dict | spaces.Tuple)
        for space in (env.observation_space, env.action_space)
    )


def make_stream(settings: WorkerSettings, name: str, kind: Any, context: IOContext) -> Any:
    """Make the reader or the writer of batches.

    Args:
        settings: the worker's settings.
        name: name of the setting that makes it.
        kind: its base class.
        context: the argument to make it with.

    Raises:
        AssertionError: the object made is of another class.
        ConfigError: the input is the sampler's batches, which input evaluation drops.
    """
    stream = getattr(settings, name)(context)
    if not isinstance(stream, kind):
        raise AssertionError(f"{name} made a {type(stream).__name__}, expected an {kind.__name__}")
    if settings.wants_simulation and isinstance(stream, SamplerInput):
        raise ConfigError(
            f"input_evaluation {SIMULATION!r} drops the sampler's batches, which are the input"
            " here.",
            key="input_evaluation",
            value=SIMULATION,
            hint="Use it with stored input only.",
        )
    return stream
