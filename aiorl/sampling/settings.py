"""WorkerSettings and SamplerSetup: all that a sampling worker, and a sampler alone, is built from."""

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
from aiorl.env.wrapping import EnvSource, Wrapping
from aiorl.errors import ConfigError, SamplerDied
from aiorl.offline.io import InputCreator, OutputCreator, noop_output, sampler_input
from aiorl.sampling.callbacks import DefaultCallbacks

SIMULATION = "simulation"
"""Input evaluation by playing on in the environment."""

ObservationFn = Callable[..., Any]
"""``observation_fn(agent_obs, worker, base_env, policies, episode)`` -> agent id -> raw observation."""


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Config keys that a worker obeys, and the parts that only a program can give.

    Nothing is checked here: configs and the arguments of a RolloutWorker are checked where they come in.

    Attributes:
        config: the worker's keys; see docs/config.md.
        env_creator: makes an environment, given an EnvContext; also a name, see ``aiorl.env.registry``.
        policy: a Policy class; or policy id -> (class, observation space, action space, config).
        policy_mapping_fn: agent id -> policy id, asked once per agent and episode; None = the default policy.
        policies_to_train: ids of the policies that learn; None or empty = all.
        observation_fn: rewrites each environment's observations.
        policy_config: base config of every policy, over which its own config wins.
        worker_index: 0 = local.
        num_workers: number of remote workers.
        monitor_path: directory for episode statistics and videos.
        log_dir: the run's directory, for output.
        log_level: level of the ``aiorl`` logger; None leaves it.
        callbacks: class of the hooks.
        input_creator: makes the InputReader, given an IOContext; by default the sampler is read.
        input_evaluation: any of ``"is"``, ``"wis"`` and ``"simulation"``: how stored input is judged.
        output_creator: makes the OutputWriter, given an IOContext; by default nothing is written.
        sample_plan: all that is wanted of the default policy's rows, where nobody is to see more of them; the
            environments are then stepped in lockstep if that can be. None = whole rows are wanted.
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
    input_creator: InputCreator = sampler_input
    input_evaluation: Collection[str] = frozenset()
    output_creator: OutputCreator = noop_output
    sample_plan: SamplePlan | None = None

    @property
    def wants_simulation(self) -> bool:
        """Whether the environment is played for metrics only."""
        return SIMULATION in self.input_evaluation

    @property
    def wrapping(self) -> Wrapping:
        """The wrappers of single gym-like environments."""
        return Wrapping.of(self.config, None if self.monitor_path is None else os.fspath(self.monitor_path))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSetup:
    """Environments, policies and settings of a SyncSampler or AsyncSampler.

    Attributes:
        worker: handed to callbacks and to ``observation_fn``, and not used otherwise. It may be a ``weakref.ref``, so
            that a sampler in a thread of its own does not keep it alive.
        base_env: the environments; ``to_base_env`` converts other kinds. Its owner closes it.
        policy_map: the policies by id, with the rule that binds agents to them.
        preprocessors: policy id -> preprocessor.
        filters: policy id -> observation filter.
        settings: those of the config that samplers obey. Rewards of rows are clipped before they are postprocessed,
            metrics never are; batches of complete episodes hold one each.
        callbacks: hooks.
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
            UnsupportedEnvError: an object that is no environment (also a ValueError).
            ConfigError: a horizon, and an environment that can't be reset.
        """
        object.__setattr__(self, "base_env", to_base_env(self.base_env))
        horizon = self.settings.horizon
        if horizon and not self.base_env.can_reset:  # 0 counts as none
            raise ConfigError(
                f"horizon is {horizon}, but {type(self.base_env).__name__} cannot be reset where it cuts.",
                key="horizon",
                value=horizon,
                hint="Leave horizon out.",
            )

    def get_worker(self) -> Any:
        """Return the worker for callbacks.

        Raises:
            SamplerDied: nobody keeps the worker any more.
        """
        if not isinstance(self.worker, weakref.ref):
            return self.worker
        worker = self.worker()
        if worker is None:
            raise SamplerDied("nobody keeps its worker any more")
        return worker

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody keeps the worker any more."""
        return isinstance(self.worker, weakref.ref) and self.worker() is None
