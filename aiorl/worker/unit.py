"""What every sampler unit is: environments, policies and filters of one sampler, run in a thread of its own.

Environment code may block, so it never runs on the event loop. Of a unit, only ``offer``, ``stop`` and ``in_env_s``
may be used from any thread; all else belongs to the unit's thread, or to the event loop while the unit is idle.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aiorl.config.worker import WorkerPart
from aiorl.data.metrics import EpisodeColumns, PerfStats
from aiorl.errors import PolicyError
from aiorl.wire.messages import PolicyArrays, PolicyGraph, Snapshot

__all__ = [
    "Produced",
    "SamplerUnit",
    "StepClock",
    "UnitPlace",
    "check_graphs",
    "monitor_directory",
    "perf_columns",
    "unit_seed",
]


@dataclass(frozen=True, slots=True)
class Produced:
    """A fragment and what belongs to it.

    Attributes:
        batches: policy id -> columns and extras by name.
        env_steps: environment steps it stands for.
        agent_steps: rows sampled, those of policies included that send none.
        length: T, steps of each environment.
        num_envs: N, environments.
        episodes: episodes that ended in it.
        first_version: policy version in force when it was begun.
        last_version: policy version in force at its last row.
        perf: iterations and seconds the sampler spent on it, see PerfStats.
    """

    batches: PolicyArrays
    env_steps: int
    agent_steps: int
    length: int
    num_envs: int
    episodes: EpisodeColumns
    first_version: int
    last_version: int
    perf: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class UnitPlace:
    """Which sampler of the run a unit is.

    Attributes:
        slot: index of its worker, from 1.
        incarnation: the worker's registration life, a hexadecimal number.
        unit_index: which of the worker's samplers, from 0.
        num_workers: workers that the run is configured for.
    """

    slot: int
    incarnation: str
    unit_index: int = 0
    num_workers: int = 1


class SamplerUnit(ABC):
    """One sampler with all that it needs, built from the handshake."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Policy version in force."""

    @property
    @abstractmethod
    def in_env_s(self) -> float:
        """Seconds since the last step began, 0 while idle: long when an environment hangs. Any thread."""

    @abstractmethod
    def offer(self, snapshot: Snapshot) -> None:
        """Leave a snapshot to be taken up between two steps. Any thread may call."""

    @abstractmethod
    def stop(self) -> None:
        """Make a running ``sample``, and every later one, raise StopSampling as soon as it can. Never waits.

        Any thread may call.
        """

    @abstractmethod
    def sample(self) -> Produced:
        """The next fragment; blocks.

        Raises:
            StopSampling: ``stop`` was called.
            EnvError: the environment failed.
        """

    @abstractmethod
    def take_deltas(self, sequence: int) -> dict[str, dict[str, Any]]:
        """Policy id -> its filter's delta, sent under the fragment's sequence number; only while idle.

        Policies whose filter is the identity have none.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the environments; in the unit's thread, or when it is done."""


class StepClock:
    """When the running step of a running ``sample`` began."""

    def __init__(self) -> None:
        """Idle."""
        self._began = 0.0

    def step(self) -> None:
        """A step begins."""
        self._began = time.monotonic()

    def idle(self) -> None:
        """``sample`` is over."""
        self._began = 0.0

    @property
    def in_step_s(self) -> float:
        """Seconds since the last step began, 0 while idle. Any thread."""
        began = self._began
        return time.monotonic() - began if began else 0.0


def unit_seed(seed: int | None, place: UnitPlace, life: int = 0) -> int:
    """Seed of a sampler: the same for the same run seed, slot, unit and life; fresh for a run without a seed.

    A worker that takes over a slot in which another has sampled gets other numbers than its predecessor had: they
    would lead to the same rows, and to the same failure.
    """
    if seed is None:
        return int(np.random.SeedSequence((int(place.incarnation, 16), place.unit_index)).generate_state(1)[0])
    if place.unit_index == life == 0:
        return seed + place.slot
    more = (life,) if life else ()
    return int(np.random.SeedSequence((seed, place.slot, place.unit_index, *more)).generate_state(1)[0])


def monitor_directory(part: WorkerPart, place: UnitPlace) -> str | None:
    """Where episode statistics and videos are written; None without a monitor.

    In the run's directory where this host sees it, as the learner's does; elsewhere in ``monitor/<run's name>`` below
    the directory that the worker was started in.
    """
    if not part.monitor:
        return None
    run_dir = Path(part.log_dir) if part.log_dir else None
    if run_dir is not None and run_dir.is_dir():
        directory = run_dir / "monitor"
    else:
        directory = Path.cwd() / "monitor" / (run_dir.name if run_dir is not None else "run")
    return str(directory / f"sampler-{place.unit_index}" if place.unit_index else directory)


def perf_columns(perf: PerfStats) -> dict[str, float]:
    """Perf stats as they travel."""
    return {
        "iters": float(perf.iters),
        "env_wait_time": perf.env_wait_time,
        "processing_time": perf.processing_time,
        "inference_time": perf.inference_time,
    }


def check_graphs(part: WorkerPart, graphs: Mapping[str, PolicyGraph]) -> None:
    """Nothing, where the learner has sent a graph for each policy that is not the user's own.

    Raises:
        PolicyError: it has not.
    """
    for policy_id, policy in part.policies.items():
        if policy.policy_class is None and policy_id not in graphs:
            raise PolicyError(f"the learner sent no graph for policy {policy_id!r}")
