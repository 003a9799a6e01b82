"""Everything that learning needs, built from the configuration: spaces, models, acting graphs,
algorithms.

Building loads TensorFlow, so it runs outside the event loop while workers start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import getattr_static
from pathlib import Path
from typing import Any

from aiorl.acting.acting_state import ActingState
from aiorl.acting.checkpoint import Checkpoint, find_checkpoint
from aiorl.acting.exploration import make_exploration
from aiorl.acting.filters import ObservationFilter, ReturnFilter, make_filter, returns_of
from aiorl.acting.graph_policy import FIXED_TIMESTEP
from aiorl.acting.policy_map import policy_seed
from aiorl.config import FORMER_DEFAULTS
from aiorl.config.code import named_failures
from aiorl.config.layers import DEFAULT
from aiorl.config.parts import RuntimePart
from aiorl.config.schema import CommonConfig
from aiorl.config.worker import PolicyPart, WorkerPart
from aiorl.data.fragment import PolicyGraph, SamplePlan
from aiorl.data.spaces import space_to_dict
from aiorl.env.base_env import BaseEnv, checked_horizon
from aiorl.env.env_maker import EnvMaker
from aiorl.env.gym_like import check_seedable, episode_limit
from aiorl.env.kinds import EnvFacts, EnvKind, check_can_be_remote, facts_of
from aiorl.env.registry import name_elsewhere
from aiorl.env.wrapping import EnvPlan, Wrapping
from aiorl.errors import CheckpointError, ConfigError
from aiorl.learning.algorithm import (
    Algorithm,
    Experience,
    LeasePlan,
    Networks,
    Observations,
    acting_settings_of,
    experience_of,
)
from aiorl.learning.algorithms.registry import algorithm_class
from aiorl.learning.joint import with_steps
from aiorl.learning.learner import Learner
from aiorl.learning.tf_runtime import configure_tensorflow, import_tensorflow
from aiorl.process.imports import require_packages
from aiorl.run.added_policy import PolicyChanges
from aiorl.run.env_changes import EnvChanges, curriculum_function, obstacle_to_changes
from aiorl.run.joint_policies import joint_policies
from aiorl.run.policy_group import PolicyGroup
from aiorl.run.policy_plan import (
    PlannedPolicy,
    check_leases,
    plan_policies,
    with_policies_named,
    with_settings_said,
)
from aiorl.run.report.loggers import check_loggers
from aiorl.sampling.callbacks import DefaultCallbacks, callbacks_class
from aiorl.web.ports import check_ports

logger = logging.getLogger(__name__)

_AFTER_ALL_SCHEDULES = 1 << 53
"""Env steps at which all schedules of exploration have ended."""
_NEEDED = ("tensorflow", "keras", "tf2onnx", "onnx")


@dataclass(frozen=True, slots=True)
class LearningPlan:
    """Result of `plan_learning`: everything that can be determined and checked before models are
    built.

    Attributes:
        config: the configuration, completed for the environment.
        policies: policy id -> policy.
        callbacks: class of the learner's callbacks, or None.
        begins_with: checkpoint of another run that supplies the first weights and filter
            statistics, or None.
        env_changes: changes of the environment's settings, none yet.
    """

    config: CommonConfig
    policies: dict[str, PlannedPolicy]
    callbacks: type[DefaultCallbacks] | None
    begins_with: Checkpoint | None
    env_changes: EnvChanges


def plan_learning(config: CommonConfig) -> LearningPlan:
    """Inspect the environment and plan a run without writing files or starting processes.

    TensorFlow is loaded only if the policies use different algorithms.

    Raises:
        ConfigError: a setting cannot be honoured, or a package that training needs is not
            installed.
        UnsupportedSpaceError: no preprocessor supports the observations.
        EnvError: the environment's constructor failed.
    """
    require_packages("training", _NEEDED, "learner", key="algo", value=config.algo)
    begins_with = None
    if config.init_from is not None and config.resume is None:
        try:
            begins_with = find_checkpoint(config.init_from)
        except CheckpointError as error:
            raise unusable_init_from(config.init_from, error) from error
        config = _with_former_keys_of(begins_with, config)
    check_loggers(config.loggers)
    facts = look_at_env(config)
    env_changes = EnvChanges(obstacle=facts.settings_obstacle, has_processes=not config.is_alone)
    if config.env_config_fn is not None:
        env_changes.function = curriculum_function(config.env_config_fn)
        env_changes.check_possible("env_config_fn")
    config = with_policies_named(_for_env(config, facts), facts)
    policies = plan_policies(config, facts)
    if any(policy.is_of_other_algorithm(config) for policy in policies.values()):
        import_tensorflow(RuntimePart.of(config))
        check_leases(config, policies)
    joint_policies(policies)  # refuses those that can't be updated together
    stores = config.input != "sampler" or config.output is not None
    if stores and (config.num_workers or config.is_alone):
        from aiorl.offline.sources import check_places  # loaded only if experience is stored

        check_places(config.input, config.output)
    return LearningPlan(
        config=with_settings_said(config, policies),
        policies=policies,
        callbacks=callbacks_class(config.callbacks),
        begins_with=begins_with,
        env_changes=env_changes,
    )


def _with_former_keys_of(checkpoint: Checkpoint, config: CommonConfig) -> CommonConfig:
    """Return the config with `FORMER_DEFAULTS` if a checkpoint's run has them and no one set these
    keys.

    Otherwise weights of earlier versions would get another network, or act in other units.
    """
    with contextlib.suppress(CheckpointError):  # early versions stored no config
        stored = ActingState.from_checkpoint(checkpoint).config
        for name, value in FORMER_DEFAULTS.items():
            had = functools.reduce(dict.__getitem__, name.split("."), dict(stored))
            if had == value and config.origin_of(name) == DEFAULT:
                *groups, key = name.split(".")
                logger.info(
                    "%s is %s, as in the run of init_from, %s",
                    name,
                    str(value).lower(),
                    checkpoint.path,
                )
                changes = functools.reduce(
                    lambda inner, group: {group: inner}, reversed(groups), {key: value}
                )
                config = config.updated(changes)
    return config


def look_at_env(config: CommonConfig) -> EnvFacts:
    """Make the environment as a worker would, inspect it and close it. No process is started.

    Raises:
        ConfigError: the environment does not exist, or does not support a setting.
        UnsupportedEnvError: the object made is not an environment that aiorl can step.
        EnvError: the constructor failed.
    """
    is_remote = config.remote_worker_envs or config.vectorize == "remote"
    plan = EnvPlan(
        env=config.env or "",
        env_config=config.env_config,
        num_envs=config.num_envs_per_worker,
        horizon=config.horizon,
        vectorize="remote" if is_remote else "serial",
        wrapping=Wrapping.of(config),
    )
    maker = EnvMaker(plan)
    if config.vectorize == "native":
        if config.remote_worker_envs:
            raise ConfigError(
                "vectorize is 'native', but remote_worker_envs gives each environment its own"
                " process.",
                key="vectorize",
                value="native",
                hint="Leave out one of the two.",
            )
        maker.check_native()
    env = maker.make_first()
    try:
        facts = facts_of(env, maker.env_id)
        _check_settings(config, env, facts.kind)
        if is_remote:
            check_can_be_remote(env, maker.env_id)
        is_seedable = True
        try:
            check_seedable(env, maker.env_id)
        except ConfigError:
            if config.seed is not None:
                raise
            is_seedable = False
        return dataclasses.replace(
            facts,
            is_seedable=is_seedable,
            settings_obstacle=obstacle_to_changes(plan, config.vectorize, env, facts.kind),
        )
    finally:
        _close(env, maker.env_id)


def _check_settings(config: CommonConfig, env: Any, kind: EnvKind) -> None:
    check_ports(
        page=config.web,
        clients=config.client_port,
        allow_origins=config.allow_origin,
        has_clients=hasattr(env, "has_clients"),
    )
    if kind.is_external:
        key = "num_envs_per_worker"
        number = config.num_envs_per_worker
        if number != 1 and key in config.model_fields_set:
            raise ConfigError(
                f"{key} is {number}, but an external environment drives itself: each worker has"
                " exactly one.",
                key=key,
                value=number,
                hint=f"Set {key}: 1.",
            )
        if config.horizon:
            raise ConfigError(
                f"horizon is {config.horizon}, but clients decide when the episodes of an external"
                " environment end.",
                key="horizon",
                value=config.horizon,
                hint="Leave horizon out.",
            )
    elif kind.is_single:
        checked_horizon(config.horizon, episode_limit(env))


def _close(env: Any, env_id: str) -> None:
    close = env.stop if isinstance(env, BaseEnv) else getattr(env, "close", None)
    if not callable(close):
        return
    try:
        close()
    except Exception as error:
        # this one was only inspected; workers make their own
        logger.warning("environment %r raised an error when it was closed: %r", env_id, error)


def unusable_init_from(path: str | None, error: CheckpointError) -> ConfigError:
    """Return the error for an ``init_from`` checkpoint that cannot be used."""
    return ConfigError(f"init_from can't be used: {error}", key="init_from", value=path)


def _for_env(config: CommonConfig, facts: EnvFacts) -> CommonConfig:
    """Complete the config for the environment and draw a seed if the user sets none and the
    environment takes one.

    ``env`` becomes a name that other processes know, so that they can sample, evaluate or resume
    the run.
    """
    with contextlib.suppress(ConfigError):  # no environment may be named
        config = config.model_copy(update={"env": name_elsewhere(config.env or "")})
    if config.seed is None and facts.is_seedable:
        config = config.model_copy(update={"seed": secrets.randbits(31)})
        logger.info("the seed of this run is %d", config.seed)
    if not facts.kind.is_external or config.num_envs_per_worker == 1:
        return config
    logger.info(
        "num_envs_per_worker is 1: an external environment drives itself, and each worker has"
        " exactly one"
    )
    return config.updated({"num_envs_per_worker": 1})


@dataclass(slots=True)
class Learning:
    """Result of `build_learning`.

    Attributes:
        group: the policies with their algorithms and models.
        lease_plan: the leases that the algorithms need.
        worker_part: the part of the configuration that workers get.
        graphs: policy id -> acting graph, for workers.
        filters: policy id -> the merged filter of its observations, still empty. If rewards are
            scaled, also the merged statistic of its returns, under the name given by `returns_of`.
        spaces: policy id -> observation and action space as plain data, for checkpoints.
        callbacks: called with the result of each iteration, or None.
        begins_with: checkpoint of another run that has not been loaded yet, or None.
        is_fresh: True if the policies begin with weights drawn at random.
        agents: policy id -> agents that the environment names and that are known to act with it.
        changes: policies that join or leave during the run.
        env_changes: settings of environments that change during the run.
    """

    group: PolicyGroup
    lease_plan: LeasePlan
    worker_part: WorkerPart
    graphs: dict[str, PolicyGraph]
    filters: dict[str, ObservationFilter]
    spaces: dict[str, Any]
    callbacks: DefaultCallbacks | None = None
    begins_with: Checkpoint | None = None
    is_fresh: bool = True
    agents: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    changes: PolicyChanges = field(default_factory=PolicyChanges)
    env_changes: EnvChanges = field(default_factory=EnvChanges)


def build_learning(
    config: CommonConfig,
    run_dir: Path | None = None,
    plan: LearningPlan | None = None,
    *,
    resumed: Checkpoint | None = None,
) -> Learning:
    """Build models, algorithms and acting graphs. This takes a few seconds, mostly to import
    TensorFlow.

    Args:
        config: the effective configuration.
        run_dir: the run's directory; workers on this host write their logs there.
        plan: result of `plan_learning` for this config, if it has been called before.
        resumed: checkpoint that the run continues from, or None.

    Raises:
        ConfigError: a setting cannot be honoured.
        UnsupportedSpaceError: no preprocessor or distribution supports a space.
        EnvError: the environment's constructor failed.
    """
    if plan is None:
        plan = plan_learning(config)
    config = plan.config
    # refuses a run without the stored experience that it needs, before networks are built
    lease_plan = experience_of(algorithm_class(config.algo), config).lease_plan()
    planned = _in_order_of(resumed or plan.begins_with, plan.policies)
    callbacks: DefaultCallbacks | None = None
    if plan.callbacks is not None:
        callbacks = named_failures(plan.callbacks, f"callbacks {config.callbacks!r}", "callbacks")()
    configure_tensorflow(RuntimePart.of(config))
    parts: dict[str, PolicyPart] = {}
    trained: dict[str, tuple[type[Algorithm[Any]], CommonConfig, Any]] = {}
    fixed: dict[str, Mapping[str, Any]] = {}
    graphs: dict[str, PolicyGraph] = {}
    filters: dict[str, ObservationFilter] = {}
    for position, (policy_id, policy) in enumerate(planned.items()):
        kind = algorithm_class(policy.config.algo)
        own_filter = filters[policy_id] = make_filter(
            config.observation_filter,
            policy.preprocessor.shape,
            policy.preprocessor.layout.num_mask,
        )
        own_filter.is_frozen = not policy.is_trained
        part = parts[policy_id] = _policy_part(config, policy, kind)
        if policy.policy_class is not None:
            continue
        seed = None if config.seed is None else policy_seed(config.seed, position)
        model, graphs[policy_id] = _build_network(
            kind, policy, own_filter, seed, exploration=part.config.get("exploration")
        )
        if policy.is_trained:
            trained[policy_id] = kind, policy.config.model_copy(update={"seed": seed}), model
        else:
            fixed[policy_id] = model.get_weights()
    _check_room([(experience_of(kind, own), model) for kind, own, model in trained.values()])
    joint = joint_policies(planned)
    learners = {
        policy_id: Learner(kind, own, model, merged_filter=filters[policy_id])
        for policy_id, (kind, own, model) in trained.items()
        if not kind.is_joint
    }
    for name, policy_ids in joint.items():
        kind, own, _ = trained[policy_ids[0]]
        networks = Networks({policy_id: trained[policy_id][2] for policy_id in policy_ids})
        learners[name] = Learner(kind, own, networks)
    scaled = [
        policy_id
        for policy_id, part in parts.items()
        if part.sample_plan.return_discount is not None
    ]
    filters |= {returns_of(policy_id): ReturnFilter() for policy_id in scaled}
    log_dir = None if run_dir is None else str(run_dir.resolve())
    worker_part = WorkerPart.of(config, policies=parts, log_dir=log_dir)
    return Learning(
        group=PolicyGroup(learners, fixed, joint),
        lease_plan=lease_plan,
        # with the objects of the user's program themselves, which a run in one process can have
        worker_part=worker_part.model_copy(update={"env_config": config.env_config}),
        graphs=graphs,
        filters=filters,
        spaces={policy_id: policy.described_spaces() for policy_id, policy in planned.items()},
        callbacks=callbacks,
        begins_with=plan.begins_with,
        agents={policy_id: policy.agents for policy_id, policy in planned.items()},
        env_changes=plan.env_changes,
    )


def _check_room(policies: list[tuple[Experience, Any]]) -> None:
    """Check that there is room for all policies; each kind of experience sees all of them.

    Raises:
        ConfigError: there is no room.
    """
    for check_room in {type(experience).check_room for experience, _ in policies}:
        check_room(policies)


def _in_order_of(
    checkpoint: Checkpoint | None, planned: Mapping[str, PlannedPolicy]
) -> Mapping[str, PlannedPolicy]:
    """Return the policies with the parts of Dict spaces in the order that a checkpoint's networks
    were trained on.
    """
    if checkpoint is None:
        return planned
    try:
        stored = ActingState.from_checkpoint(checkpoint).spaces
    except CheckpointError:  # what restores the checkpoint refuses it if it can't be used at all
        return planned
    return {
        policy_id: policy.in_order_of(stored[policy_id]) if policy_id in stored else policy
        for policy_id, policy in planned.items()
    }


def _build_network(
    kind: type[Algorithm[Any]],
    policy: PlannedPolicy,
    observation_filter: ObservationFilter,
    seed: int | None,
    exploration: Any,
) -> tuple[Any, PolicyGraph]:
    """Build a policy's model and its acting graph; both take filtered observations.

    The model's type is Any, because importing it here would load TensorFlow.

    Raises:
        ConfigError: workers cannot explore with this model as configured.
    """
    from aiorl.learning.models.export import describe_policy

    observations = Observations(
        tuple(policy.preprocessor.shape),
        observation_filter.output_dtype(policy.preprocessor.dtype).name,
        observation_filter.output_layout(policy.preprocessor.layout),
    )
    model = kind.build_model(policy.config, observations, policy.action_space, seed)
    # an error is raised here once, instead of in each worker
    make_exploration(exploration, model.distribution)
    is_of_catalog = getattr_static(kind, "build_model") is getattr_static(Algorithm, "build_model")
    graph, description = describe_policy(
        model, policy.config.model.model_dump() if is_of_catalog else None
    )
    return model, {"graph": graph, "spec": description}


def _policy_part(
    config: CommonConfig, policy: PlannedPolicy, kind: type[Algorithm[Any]]
) -> PolicyPart:
    """Return the description of a policy that workers get."""
    own = policy.has_own_spaces
    is_network = policy.policy_class is None
    experience = experience_of(kind, policy.config)
    sample_plan = experience.sample_plan
    if kind.is_joint:
        sample_plan = with_steps(sample_plan)
    sequences = is_network and bool(experience.sample_plan.of_sequences)
    settings = dict(policy.settings)
    if is_network:
        settings.update(acting_settings_of(kind, policy.config))
    if is_network and not policy.is_trained:
        settings[FIXED_TIMESTEP] = _AFTER_ALL_SCHEDULES  # unless a checkpoint says where they stand
    return PolicyPart(
        policy_class=policy.policy_class,
        algo=policy.config.algo if policy.is_of_other_algorithm(config) else None,
        observation_space=space_to_dict(policy.observation_space) if own else None,
        action_space=space_to_dict(policy.action_space) if own else None,
        config=settings,
        sample_plan=sample_plan if policy.is_trained else SamplePlan(),
        is_trained=policy.is_trained,
        layout="sequences" if sequences else "rows",
        sequence_length=policy.config.sequence_length() if sequences else 1,
        sends=("gradients" if policy.is_trained and experience.sends_gradients else "rows"),
    )
