"""WorkerSettings: all that a sampling worker is built from."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiorl.acting.policy_map import PolicyMappingFn
from aiorl.config.worker import WorkerConfig
from aiorl.data.sample_plan import SamplePlan
from aiorl.env.registry import EnvContext
from aiorl.env.wrapping import Wrapping
from aiorl.offline.io import InputCreator, OutputCreator, noop_output, sampler_input
from aiorl.sampling.callbacks import DefaultCallbacks

SIMULATION = "simulation"
"""Input evaluation by playing on in the environment."""

EnvSource = str | type[Any] | Callable[[EnvContext], Any]

ObservationFn = Callable[..., Any]
"""``observation_fn(agent_obs, worker, base_env, policies, episode)`` -> agent id -> raw observation."""


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """The config keys that a worker obeys, and the parts that only a program can give.

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
