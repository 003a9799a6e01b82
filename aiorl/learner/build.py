"""Everything that learning needs, built from the configuration: spaces, models, acting graphs, algorithms.

Loads TensorFlow, so it runs beside the event loop while workers are starting.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from aiorl.algorithms.algorithm import Algorithm, LeasePlan
from aiorl.callbacks import DefaultCallbacks, callbacks_class
from aiorl.config.schema import CommonConfig
from aiorl.config.worker import PolicyPart, WorkerPart
from aiorl.data.sample_plan import SamplePlan
from aiorl.data.spaces import space_to_dict
from aiorl.env.kinds import EnvFacts
from aiorl.errors import ConfigError
from aiorl.learner.look_at_env import look_at_env
from aiorl.learner.policy_group import PolicyGroup
from aiorl.learner.policy_plan import PlannedPolicy, check_plain_policies, plan_policies
from aiorl.learner.sampling_path import choose_sampling, general_reasons
from aiorl.learner.tf_runtime import configure_tensorflow
from aiorl.observation.filters import ObservationFilter, make_filter
from aiorl.policy.distributions import make_distribution
from aiorl.wire.messages import PolicyGraph

__all__ = ["Learning", "LearningPlan", "build_learning", "plan_learning"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LearningPlan:
    """What `plan_learning` gives: all that can be known and checked without TensorFlow.

    Attributes:
        config: the configuration, completed by what the environment asks for.
        sampling: the path that workers sample on.
        policies: policy id -> policy.
        callbacks: class of the learner's callbacks; None for none.
        general_reason: why sampling is general, the first reason; "" where it is columnar.
        seconds: what it took.
    """

    config: CommonConfig
    sampling: Literal["columnar", "general"]
    policies: dict[str, PlannedPolicy]
    callbacks: type[DefaultCallbacks] | None
    general_reason: str
    seconds: float


def plan_learning(config: CommonConfig) -> LearningPlan:
    """Look at the environment and plan a run; nothing is written and no process started.

    Raises:
        ConfigError: a setting that cannot be honoured.
        UnsupportedSpaceError: observations without preprocessor.
        EnvError: the environment's constructor failed.
    """
    began = time.monotonic()
    facts = look_at_env(config)
    config = _for_env(config, facts)
    sampling = choose_sampling(config, facts)
    reasons = general_reasons(config, facts) or ["sampling is general"]
    return LearningPlan(
        config=config,
        sampling=sampling,
        policies=plan_policies(config, facts),
        callbacks=callbacks_class(config.callbacks),
        general_reason=reasons[0] if sampling == "general" else "",
        seconds=time.monotonic() - began,
    )


def _for_env(config: CommonConfig, facts: EnvFacts) -> CommonConfig:
    """The config with what the environment asks for, and a fresh seed if it takes one, where the user says nothing."""
    if config.seed is None and facts.is_seedable:
        config = config.model_copy(update={"seed": secrets.randbits(31)})
        logger.info("the seed of this run is %d", config.seed)
    if not facts.kind.is_external or config.num_envs_per_worker == 1:
        return config
    logger.info("num_envs_per_worker is 1: an external environment drives itself, and a worker has one")
    return config.updated({"num_envs_per_worker": 1})


@dataclass(slots=True)
class Learning:
    """What `build_learning` gives.

    Attributes:
        group: the policies with their algorithms and models.
        lease_plan: the leases that the run's algorithm wants.
        worker_part: what workers get of the configuration.
        graphs: policy id -> acting graph, for workers.
        filters: policy id -> the merged filter of its observations, empty.
        spaces: policy id -> observation and action space as plain data, for checkpoints.
        seconds: what took how long.
        callbacks: told of each iteration's result; None for none.
        general_reason: why workers sample the general way; "" where they don't.
    """

    group: PolicyGroup
    lease_plan: LeasePlan
    worker_part: WorkerPart
    graphs: dict[str, PolicyGraph]
    filters: dict[str, ObservationFilter]
    spaces: dict[str, Any]
    seconds: dict[str, float]
    callbacks: DefaultCallbacks | None = None
    general_reason: str = ""


def build_learning(
    config: CommonConfig, log: Path | None = None, run_dir: Path | None = None, plan: LearningPlan | None = None
) -> Learning:
    """Build it; takes a few seconds, most of them TensorFlow's import.

    Args:
        config: the effective configuration.
        log: file for what TensorFlow prints at its import; None leaves it on stderr.
        run_dir: the run's directory, of which workers on this host are told.
        plan: what `plan_learning` made of the config, if that was done before.

    Raises:
        ConfigError: a setting that cannot be honoured.
        UnsupportedSpaceError: a space without preprocessor or distribution.
        EnvError: the environment's constructor failed.
    """
    clock = time.monotonic
    if plan is None:
        plan = plan_learning(config)
    config, sampling, planned = plan.config, plan.sampling, plan.policies
    callbacks = _make_callbacks(config, plan.callbacks)
    has_env = clock()
    configure_tensorflow(config, log)
    from aiorl.algorithms.registry import algorithm_class

    has_tensorflow = clock()
    check_plain_policies(planned)
    kind = algorithm_class(config.algo)
    algorithms: dict[str, Algorithm] = {}
    fixed: dict[str, Mapping[str, Any]] = {}
    graphs: dict[str, PolicyGraph] = {}
    filters = {
        policy_id: make_filter(
            config.observation_filter, policy.preprocessor.shape, policy.preprocessor.layout.num_mask
        )
        for policy_id, policy in planned.items()
    }
    for position, (policy_id, policy) in enumerate(planned.items()):
        if policy.policy_class is not None:
            continue
        model, graphs[policy_id] = _build_network(policy, filters[policy_id], _model_seed(config.seed, position))
        if policy.is_trained:
            algorithms[policy_id] = kind(policy.config, model, sizes_vary=sampling == "general")
        else:
            fixed[policy_id] = model.get_weights()
    parts = {policy_id: _policy_part(policy, kind) for policy_id, policy in planned.items()}
    return Learning(
        group=PolicyGroup(algorithms, fixed),
        lease_plan=kind.lease_plan(config),
        worker_part=WorkerPart.of(
            config, policies=parts, sampling=sampling, log_dir=None if run_dir is None else str(run_dir.resolve())
        ),
        graphs=graphs,
        filters=filters,
        spaces={policy_id: policy.described_spaces() for policy_id, policy in planned.items()},
        seconds={
            "environment": plan.seconds,
            "TensorFlow": has_tensorflow - has_env,
            "model": clock() - has_tensorflow,
        },
        callbacks=callbacks,
        general_reason=plan.general_reason,
    )


def _make_callbacks(config: CommonConfig, kind: type[DefaultCallbacks] | None) -> DefaultCallbacks | None:
    if kind is None:
        return None
    try:
        return kind()
    except Exception as error:
        # whatever a user's constructor raises
        raise ConfigError(
            f"callbacks {config.callbacks!r} can't be made: {error!r:.500}", key="callbacks", value=config.callbacks
        ) from error


def _build_network(
    policy: PlannedPolicy, observation_filter: ObservationFilter, seed: int | None
) -> tuple[Any, PolicyGraph]:
    """A policy's model (Any: named here it would load TensorFlow) and what workers act with.

    Both take what comes out of the filter.
    """
    from aiorl.models.catalog import build_model
    from aiorl.models.export import describe_policy

    settings = policy.config.model.model_dump()
    model = build_model(
        policy.preprocessor.shape,
        observation_filter.output_dtype(policy.preprocessor.dtype).name,
        make_distribution(policy.action_space),
        settings,
        seed=seed,
        layout=policy.preprocessor.layout,
    )
    graph, description = describe_policy(model, settings)
    return model, {"graph": graph, "spec": description}


def _model_seed(seed: int | None, position: int) -> int | None:
    """Seed of a model's first weights: the run's for the first policy, else another one each."""
    if seed is None or position == 0:
        return seed
    return int(np.random.SeedSequence((seed, position)).generate_state(1)[0])


def _policy_part(policy: PlannedPolicy, kind: type[Algorithm]) -> PolicyPart:
    """What workers are told of a policy."""
    own = policy.has_own_spaces
    is_network = policy.policy_class is None
    sequences = is_network and kind.trains_on_sequences(policy.config)
    return PolicyPart(
        policy_class=policy.policy_class,
        observation_space=space_to_dict(policy.observation_space) if own else None,
        action_space=space_to_dict(policy.action_space) if own else None,
        config=dict(policy.settings),
        sample_plan=kind.sample_plan(policy.config) if policy.is_trained else SamplePlan(),
        is_trained=policy.is_trained,
        layout="sequences" if sequences else "rows",
        sequence_length=policy.config.sequence_length() if sequences else 1,
    )
