"""WorkerSettings and SamplerSetup: the arguments of a sampling worker, and of a sampler alone."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiorl.acting.filters import ObservationFilter
from aiorl.acting.policy_map import PolicyMap, PolicyMappingFn
from aiorl.acting.preprocessors import Preprocessor
from aiorl.config.worker import WorkerConfig
from aiorl.data.fragment import SamplePlan
from aiorl.env.env_maker import to_base_env
from aiorl.env.registry import EnvSource
from aiorl.env.wrapping import Wrapping
from aiorl.errors import ConfigError, SamplerDied
from aiorl.offline.io import InputCreator, OutputCreator, noop_output, sampler_input
from aiorl.sampling.callbacks import DefaultCallbacks, worker_hooks

SIMULATION = "simulation"
"""Input evaluation by sampling the environment."""

ObservationFn = Callable[..., Any]
"""``observation_fn(agent_obs, worker, base_env, policies, episode)`` -> agent id -> raw
observation."""


@dataclass(frozen=True, kw_only=True)
class IOSettings:
    """Source of a worker's batches, and destination of their copies.

    Attributes:
        input_creator: makes the InputReader from an IOContext; the default reads from the sampler.
        input_evaluation: any of ``"is"``, ``"wis"`` and ``"simulation"``: ways to evaluate stored
            input.
        output_creator: makes the OutputWriter from an IOContext; the default writes nothing.
    """

    input_creator: InputCreator = sampler_input
    input_evaluation: Collection[str] = frozenset()
    output_creator: OutputCreator = noop_output

    @property
    def wants_simulation(self) -> bool:
        """True if the environment is sampled for metrics only."""
        return SIMULATION in self.input_evaluation

    @property
    def is_stored(self) -> bool:
        """True if rows are read from somewhere else than the sampler, or written."""
        return self.input_creator is not sampler_input or self.output_creator is not noop_output


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Config keys for a worker, and parts that only code can provide.

    Nothing is checked here: configs and the arguments of a RolloutWorker are checked where they
    enter.

    Attributes:
        config: the worker's keys; see docs/config.md.
        env_creator: function that makes an environment from an EnvContext, or a name, see
            ``aiorl.env.registry``.
        policy: a Policy class, or policy id -> (class, observation space, action space, config).
        policy_mapping_fn: agent id -> policy id, called once per agent and episode; None = the
            default policy.
        policies_to_train: ids of the policies that learn; None or empty = all.
        observation_fn: function that rewrites each environment's observations.
        policy_config: base config of every policy; the policy's own config overrides it.
        worker_index: index of the worker, 0 = local.
        num_workers: number of remote workers.
        monitor_path: directory for episode statistics and videos.
        log_dir: the run's directory, for output.
        log_level: level of the ``aiorl`` logger; None leaves it unchanged.
        callbacks: class of the hooks.
        io: input and output of batches.
        sample_plan: the columns needed of the default policy's rows, if nothing else uses the rows;
            the environments then step in lockstep if they can. None = complete rows are needed.
    """

    config: WorkerConfig
    env_creator: EnvSource
    policy: Any
    policy_mapping_fn: PolicyMappingFn | None = None
    policies_to_train: Collection[str] | None = None
    observation_fn: ObservationFn | None = None
    policy_config: Mapping[str, Any] = field(default_factory=dict)
    worker_index: int = 0
    num_workers: int = 0
    monitor_path: str | None = None
    log_dir: str | None = None
    log_level: str | None = None
    callbacks: type[DefaultCallbacks] = DefaultCallbacks
    io: IOSettings = field(default_factory=IOSettings)
    sample_plan: SamplePlan | None = None

    @property
    def shows_worker(self) -> bool:
        """True if code of users can get the worker."""
        return bool(
            worker_hooks(self.callbacks)
            or self.policy_mapping_fn
            or self.observation_fn
            or self.io.input_evaluation
            or self.io.is_stored
        )

    @property
    def wrapping(self) -> Wrapping:
        """Wrappers of single gym-like environments."""
        path = None if self.monitor_path is None else os.fspath(self.monitor_path)
        return Wrapping.of(self.config, path)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSetup:
    """Environments, policies and settings of a SyncSampler or AsyncSampler.

    Attributes:
        worker: argument for callbacks and ``observation_fn``. It can be a ``weakref.ref``, so that
            a sampler in its own thread does not keep the worker alive.
        base_env: the environments; ``to_base_env`` converts other kinds. Its owner closes it.
        policy_map: the policies by id, and the rule that binds agents to them.
        preprocessors: policy id -> preprocessor.
        filters: policy id -> observation filter.
        settings: config keys for samplers. Rewards of rows are clipped before postprocessing, those
            of metrics never. A batch of complete episodes contains one episode.
        callbacks: the hooks.
        observation_fn: rewrites each environment's observations before they are preprocessed.
    """

    worker: Any
    base_env: Any
    policy_map: PolicyMap
    preprocessors: Mapping[str, Preprocessor]
    filters: Mapping[str, ObservationFilter]
    settings: WorkerConfig
    callbacks: DefaultCallbacks
    observation_fn: ObservationFn | None = None

    def __post_init__(self) -> None:
        """Convert the environment.

        Raises:
            UnsupportedEnvError: the object is not an environment (also a ValueError).
            ConfigError: there is a horizon, but the environment cannot be reset.
        """
        object.__setattr__(self, "base_env", to_base_env(self.base_env))
        horizon = self.settings.horizon
        if horizon and not self.base_env.can_reset:  # 0 counts as none
            raise ConfigError(
                f"horizon is {horizon}, but {type(self.base_env).__name__} cannot be reset at the"
                " horizon.",
                key="horizon",
                value=horizon,
                hint="Leave horizon out.",
            )

    def get_worker(self) -> Any:
        """Return the worker for callbacks.

        Raises:
            SamplerDied: the worker no longer exists.
        """
        if not isinstance(self.worker, weakref.ref):
            return self.worker
        worker = self.worker()
        if worker is None:
            raise SamplerDied("the worker of this sampler no longer exists")
        return worker

    @property
    def is_abandoned(self) -> bool:
        """True if the worker no longer exists."""
        return isinstance(self.worker, weakref.ref) and self.worker() is None
