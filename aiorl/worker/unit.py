"""One sampler with its environments, policy and filter, run in a thread of its own.

Environment code may block, so it never runs on the event loop. Everything here but ``offer``, ``stop`` and
``in_env_s`` belongs to the unit's thread, or to the event loop while the unit is idle.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from aiorl.config.worker import WorkerPart
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.fragment import Fragment
from aiorl.data.metrics import EpisodeColumns, PerfStats
from aiorl.env.adapt import make_lockstep_env
from aiorl.errors import PolicyError
from aiorl.observation.filters import make_filter
from aiorl.observation.preprocessors import preprocessor_for
from aiorl.policy.loading import load_policy
from aiorl.protocol.messages import PolicyGraph, Snapshot
from aiorl.sampler.columnar import ColumnarSampler
from aiorl.worker.apply import SnapshotSlot

__all__ = ["Produced", "SamplerUnit", "unit_seed"]


@dataclass(frozen=True, slots=True)
class Produced:
    """A fragment and what belongs to it.

    Attributes:
        fragment: the columns.
        episodes: episodes that ended in it.
        first_version: policy version of its first row.
        last_version: policy version of its last row.
        perf: iterations and seconds the sampler spent on it, see PerfStats.
    """

    fragment: Fragment
    episodes: EpisodeColumns
    first_version: int
    last_version: int
    perf: Mapping[str, float]


def unit_seed(seed: int | None, slot: int, unit_index: int, incarnation: str) -> int:
    """Seed of a sampler: the same for the same run seed, slot and unit; fresh for a run without a seed.

    A worker that comes back into a slot after a failure gets other numbers than its predecessor had only in a
    run without a seed: a run with one is to be repeatable.
    """
    if seed is None:
        return int(np.random.SeedSequence(int(incarnation, 16)).generate_state(1)[0])
    if unit_index == 0:
        return seed + slot
    return int(np.random.SeedSequence((seed, slot, unit_index)).generate_state(1)[0])


class SamplerUnit:
    """What one sampler needs, built from the handshake."""

    def __init__(
        self,
        part: WorkerPart,
        graphs: Mapping[str, PolicyGraph],
        snapshot: Snapshot,
        *,
        slot: int,
        unit_index: int,
        incarnation: str,
    ) -> None:
        """Build environments, policy, filter and sampler; may take as long as the environments do.

        Args:
            part: the worker's part of the configuration.
            graphs: policy id -> acting graph.
            snapshot: weights and filter state to begin with.
            slot: index of the worker.
            unit_index: which of the worker's samplers, from 0.
            incarnation: the worker's registration life.

        Raises:
            ConfigError: a setting that cannot be honoured here, such as an environment not installed.
            EnvError: the environment's constructor failed.
            PolicyError: a graph that cannot be used.
        """
        if DEFAULT_POLICY_ID not in graphs:
            raise PolicyError(f"the learner sent no graph for policy {DEFAULT_POLICY_ID!r}")
        graph = graphs[DEFAULT_POLICY_ID]
        self.env = make_lockstep_env(
            part.env,
            part.env_config,
            part.num_envs_per_worker,
            part.vectorize,
            worker_index=slot,
            horizon=part.horizon,
        )
        self.policy = load_policy(graph["graph"], graph["spec"], threads=part.num_cpus_per_worker)
        if self.policy.action_space != self.env.action_space:
            raise PolicyError(
                f"this host's {part.env!r} has the action space {self.env.action_space}, the learner's has "
                f"{self.policy.action_space}; install the same version of the environment on both"
            )
        spec = self.policy.spec
        preprocessor = preprocessor_for(self.env.observation_space)
        if tuple(preprocessor.shape) != tuple(spec.obs_shape):
            raise PolicyError(
                f"this host's {part.env!r} has observations of shape {preprocessor.shape}, the learner's "
                f"{spec.obs_shape}; install the same version of the environment on both"
            )
        self.filter = make_filter(part.observation_filter, preprocessor.shape)
        self._slot = SnapshotSlot(self.policy, self.filter, incarnation, synchronize_filters=part.synchronize_filters)
        self._slot.offer(snapshot)
        plan = part.sample_plan
        self.sampler = ColumnarSampler(
            self.env,
            self.policy,
            fragment_length=part.rollout_fragment_length,
            # recurrent states go along by themselves
            columns=[name for name in (*plan.columns, *plan.extras) if not name.startswith("state_in_")],
            batch_mode=part.batch_mode,
            preprocessor=preprocessor,
            filter=self.filter,
            postprocess=plan.postprocess,
            postprocess_settings=plan.postprocess_params,
            clip_rewards=bool(part.clip_rewards),
            clip_actions=part.clip_actions,
            seed=unit_seed(part.seed, slot, unit_index, incarnation),
            on_step=self._between_steps,
        )
        self._step_began = 0.0

    @property
    def version(self) -> int:
        """Policy version in force."""
        return self._slot.version

    @property
    def in_env_s(self) -> float:
        """Seconds since the last step began, 0 while idle: long when an environment hangs. Any thread."""
        began = self._step_began
        return time.monotonic() - began if began else 0.0

    def offer(self, snapshot: Snapshot) -> None:
        """Leave a snapshot to be taken up between two steps. Any thread may call."""
        self._slot.offer(snapshot)

    def stop(self) -> None:
        """Make a running ``sample`` raise StopSampling at its next step. Any thread may call."""
        self._slot.stop()

    def sample(self) -> Produced:
        """The next fragment; blocks.

        Raises:
            StopSampling: ``stop`` was called.
            EnvError: the environment failed.
        """
        try:
            self._between_steps()
            first_version = self._slot.version
            fragment = self.sampler.sample()
            return Produced(
                fragment, self.sampler.take_episodes(), first_version, self._slot.version, self._take_perf()
            )
        finally:
            self._step_began = 0.0

    def _take_perf(self) -> dict[str, float]:
        perf, self.sampler.perf = self.sampler.perf, PerfStats()
        return {
            "iters": float(perf.iters),
            "env_wait_time": perf.env_wait_time,
            "processing_time": perf.processing_time,
            "inference_time": perf.inference_time,
        }

    def take_delta(self, sequence: int) -> dict[str, Any]:
        """The filter's delta, sent under the fragment's sequence number; only while idle."""
        if self.filter.is_identity:
            return {}
        return dict(self.filter.take_delta(sequence))

    def close(self) -> None:
        """Close the environments; in the unit's thread, or when it is done."""
        self.env.close()

    def _between_steps(self) -> None:
        self._step_began = time.monotonic()
        self._slot.between_steps()
