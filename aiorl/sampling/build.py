"""Construction of a Worker's parts from its settings; the worker calls these functions in order."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping

from gymnasium import spaces

from aiorl.acting.exploration import exploration_has_memory
from aiorl.acting.filters import ObservationFilter, ReturnFilter, RewardScaler, returns_of
from aiorl.acting.graph_policy import GraphPolicy
from aiorl.acting.policy import Policy
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.fragment import SamplePlan
from aiorl.env.base_env import LockstepEnv
from aiorl.env.env_maker import EnvMaker
from aiorl.env.wrapping import EnvPlan
from aiorl.process.log_once import log_once
from aiorl.sampling.async_sampler import AsyncSampler
from aiorl.sampling.callbacks import worker_hooks
from aiorl.sampling.fragments import FRAGMENT_COLUMNS
from aiorl.sampling.lockstep import Lockstep
from aiorl.sampling.policies import ENV_SPACE
from aiorl.sampling.sampler import SyncSampler
from aiorl.sampling.settings import SIMULATION, SamplerSetup, WorkerSettings

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
    horizon = config.horizon
    if config.soft_horizon:  # the environment itself must not cut its episodes
        horizon = None
    plan = EnvPlan(
        env=settings.env_creator,
        env_config=config.env_config,
        num_envs=config.num_envs_per_worker,
        vectorize=vectorize,
        worker_index=settings.worker_index,
        horizon=horizon,
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
    if settings.io.is_stored:
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
    if unknown:
        return f"the plan has the column {unknown[0]!r}"
    return ""


def make_sampler(
    setup: SamplerSetup, settings: WorkerSettings, polled: str, *, on_turn: Callable[[], None]
) -> SyncSampler | AsyncSampler:
    """Make the sampler without starting it.

    Args:
        setup: environments, policies and settings of the sampler.
        settings: the worker's settings.
        polled: result of `why_polled`.
        on_turn: called between two turns.

    Raises:
        AssertionError: asynchronous sampling with a filter that must not be shared by threads.
        ConfigError: the environments cannot have the horizon.
    """
    lockstep = _lockstep(setup, settings.sample_plan, polled)
    wants_simulation = settings.io.wants_simulation
    if wants_simulation:
        logger.warning(
            "input evaluation %r: the environment is sampled in the background, for metrics only",
            SIMULATION,
        )
    if setup.settings.sample_async or wants_simulation:
        return AsyncSampler(setup, blackhole_outputs=wants_simulation, on_turn=on_turn)
    return SyncSampler(setup, lockstep=lockstep, on_turn=on_turn)


def _lockstep(setup: SamplerSetup, plan: SamplePlan | None, polled: str) -> Lockstep | None:
    """Return the environments in lockstep; None if they must be polled."""
    if plan is None:
        return None
    env = None
    if not polled:
        polled = "they cannot be stepped as whole arrays"
        env = setup.base_env.in_lockstep(setup.settings.horizon)
    if env is None or env.num_envs != setup.settings.num_envs_per_worker or _is_nested(env):
        if log_once("polled"):
            logger.info("environments are polled turn by turn: %s", polled)
        return None
    policy = setup.policy_map[DEFAULT_POLICY_ID]
    assert isinstance(policy, GraphPolicy), "why_polled allowed another class"
    return Lockstep(
        env,
        policy,
        plan,
        setup.settings,
        preprocessor=setup.preprocessors[DEFAULT_POLICY_ID],
        filter=setup.filters[DEFAULT_POLICY_ID],
    )


def _is_nested(env: LockstepEnv) -> bool:
    return any(
        isinstance(space, spaces.Dict | spaces.Tuple)
        for space in (env.observation_space, env.action_space)
    )
