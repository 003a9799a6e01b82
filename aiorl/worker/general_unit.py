"""GeneralUnit: a RolloutWorker in a worker process; any environment, any number of policies, callbacks.

What it produces are rows of trajectories, laid out for the learner by ``sampler.layout``. Rows of policies that are
not trained stay here.
"""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from aiorl.callbacks import named_callbacks
from aiorl.config.import_path import import_object
from aiorl.config.user_function import named_failures
from aiorl.config.worker import PolicyPart, WorkerPart
from aiorl.data import columns as c
from aiorl.data.concat import Batch
from aiorl.data.metrics import EpisodeColumns, RolloutMetrics
from aiorl.data.sample_batch import SampleBatch
from aiorl.data.spaces import space_from_dict
from aiorl.errors import EnvError, SamplerDied
from aiorl.observation.filters import ObservationFilter
from aiorl.policy.policy import Policy
from aiorl.rollout.arguments import WorkerArguments
from aiorl.rollout.learner_policy import learner_policy_class
from aiorl.rollout.policy_specs import ENV_SPACE
from aiorl.rollout.rollout_worker import RolloutWorker
from aiorl.sampler.layout import to_rows, to_sequences
from aiorl.wire.messages import PolicyGraph, Snapshot
from aiorl.worker.apply import SnapshotSlot, StopSampling
from aiorl.worker.unit import (
    Produced,
    SamplerUnit,
    StepClock,
    UnitPlace,
    check_graphs,
    monitor_directory,
    perf_columns,
    unit_seed,
)

__all__ = ["GeneralUnit"]

_PERF = ("iters", "env_wait_time", "processing_time", "inference_time")


class GeneralUnit(SamplerUnit):
    """A RolloutWorker with what it is made of.

    With ``sample_async`` batches are sampled ahead, in a thread of the sampler's own; they count as sampled under the
    newest version that has arrived when they are taken, since how far they lag is for that setting's user to judge.

    Attributes:
        worker: the RolloutWorker.
    """

    def __init__(
        self, part: WorkerPart, graphs: Mapping[str, PolicyGraph], snapshot: Snapshot, place: UnitPlace
    ) -> None:
        """Build environments, policies and sampler; may take as long as the environments do.

        Args:
            part: the worker's part of the configuration.
            graphs: policy id -> acting graph.
            snapshot: weights and filter states to begin with.
            place: which sampler of the run it is.

        Raises:
            ConfigError: a setting that cannot be honoured here, such as an environment not installed.
            EnvError: a remote environment could not be made.
            PolicyError: a graph that cannot be used.
            Exception: whatever the environment's constructor raised.
        """
        check_graphs(part, graphs)
        self._part = part
        self._clock = StepClock()
        self._is_stopped = False
        self._is_sampling = False
        self._policies: dict[str, Policy] = {}
        self._filters: dict[str, ObservationFilter] = {}
        self._slot = SnapshotSlot(
            self._policies, self._filters, place.incarnation, synchronize_filters=part.synchronize_filters
        )
        self._slot.offer(snapshot)
        self._perf = dict.fromkeys(_PERF, 0.0)
        # a run without a seed asks nothing of its environments
        seed = None if part.seed is None else unit_seed(part.seed, place, part.life)
        self.worker = _HookedWorker(
            self._between_turns,
            WorkerArguments(
                settings=part.model_copy(update={"seed": seed}),
                env_creator=part.env,
                policy={
                    policy_id: _policy_entry(policy_id, policy, graphs, part.num_cpus_per_worker)
                    for policy_id, policy in part.policies.items()
                },
                policy_mapping_fn=_imported(part.multiagent.policy_mapping_fn, "multiagent.policy_mapping_fn"),
                policies_to_train=[policy_id for policy_id, policy in part.policies.items() if policy.is_trained],
                observation_fn=_imported(part.multiagent.observation_fn, "multiagent.observation_fn"),
                worker_index=place.slot,
                num_workers=place.num_workers,
                monitor_path=monitor_directory(part, place),
                log_dir=part.log_dir,
                log_level=part.log_level,
                callbacks=named_callbacks(part.callbacks),
            ),
        )

    @property
    def version(self) -> int:
        """See SamplerUnit."""
        return self._slot.version

    @property
    def in_env_s(self) -> float:
        """See SamplerUnit."""
        return self._clock.in_step_s if self._is_sampling else 0.0

    def offer(self, snapshot: Snapshot) -> None:
        """See SamplerUnit."""
        self._slot.offer(snapshot)

    def stop(self) -> None:
        """See SamplerUnit; also a wait for clients or for environments in other processes is ended."""
        self._is_stopped = True
        self._slot.stop()
        # what is woken may hold a lock for a moment, and this is the event loop
        threading.Thread(target=self.worker.interrupt, name="interrupt-sampler", daemon=True).start()

    def sample(self) -> Produced:
        """See SamplerUnit.

        Raises:
            StopSampling: ``stop`` was called.
            EnvError: the environment failed, or there is nothing more to come of it.
            BatchError: rows without a column that the learner needs.
            Exception: whatever a policy or a callback raised.
        """
        self._clock.step()
        self._is_sampling = True
        try:
            first_version = self._version_at_start()
            batch = self.worker.sample()
            last_version = self._slot.newest_version if self._part.sample_async else self._slot.version
            return self._produced(batch, first_version, last_version)
        except SamplerDied as error:
            self._raise_if_stopped(error)
            text = "".join(traceback.format_exception(error))
            raise EnvError(self._part.env, str(error), traceback_text=text) from error
        except Exception as error:
            self._raise_if_stopped(error)
            raise
        finally:
            self._is_sampling = False
            self._clock.idle()

    def take_deltas(self, sequence: int) -> dict[str, dict[str, Any]]:
        """See SamplerUnit."""
        return {
            policy_id: dict(found.take_delta(sequence))
            for policy_id, found in self.worker.filters.items()
            if not found.is_identity
        }

    def close(self) -> None:
        """See SamplerUnit."""
        self.worker.stop()

    def _version_at_start(self) -> int:
        if self._is_stopped:
            raise StopSampling
        if self._part.sample_async:
            return self._slot.newest_version
        self._between_turns(self.worker)
        return self._slot.version

    def _between_turns(self, worker: RolloutWorker) -> None:
        """Take up what is offered; in the thread that samples, which may be at work before the constructor ends."""
        self._clock.step()
        if not self._policies:
            self._policies.update(worker.policy_map)
            self._filters.update(worker.filters)
        version = self._slot.version
        try:
            self._slot.between_steps()
        except StopSampling:
            if not self._part.sample_async:
                raise
            return  # its own thread looks for that after each turn
        if self._slot.version != version:
            worker.global_vars = dict(self._slot.global_vars)

    def _raise_if_stopped(self, error: Exception) -> None:
        """What stopping an environment brings about is no fault."""
        if self._is_stopped:
            raise StopSampling from error

    def _produced(self, batch: Batch, first_version: int, last_version: int) -> Produced:
        by_policy = {c.DEFAULT_POLICY_ID: batch} if isinstance(batch, SampleBatch) else batch.policy_batches
        part = self._part
        return Produced(
            {
                policy_id: _laid_out(rows, part.policies[policy_id])
                for policy_id, rows in by_policy.items()
                if part.policies[policy_id].is_trained and rows.count
            },
            batch.env_steps,
            batch.total(),
            part.rollout_fragment_length,
            part.num_envs_per_worker,
            EpisodeColumns.of([found for found in self.worker.get_metrics() if isinstance(found, RolloutMetrics)]),
            first_version,
            last_version,
            self._take_perf(),
        )

    def _take_perf(self) -> dict[str, float]:
        """What was added since the last call; the sampler may be at work."""
        now = perf_columns(self.worker.sampler.perf)
        before, self._perf = self._perf, now
        return {name: now[name] - before[name] for name in _PERF}


class _HookedWorker(RolloutWorker):
    """A RolloutWorker that has its hook from the first turn on, also where it samples as soon as it is built."""

    def __init__(self, on_turn: Callable[[RolloutWorker], None], arguments: WorkerArguments) -> None:
        self.on_turn = functools.partial(on_turn, self)
        self._start(arguments, vars(arguments))


def _laid_out(rows: SampleBatch, policy: PolicyPart) -> dict[str, Any]:
    if policy.layout == "rows":
        return to_rows(rows, policy.sample_plan)
    return to_sequences(rows, policy.sample_plan, policy.sequence_length)


def _policy_entry(
    policy_id: str, policy: PolicyPart, graphs: Mapping[str, PolicyGraph], threads: int
) -> tuple[type[Policy], Any, Any, dict[str, Any]]:
    """An entry of RolloutWorker's argument ``policy``."""
    config, plan = dict(policy.config), policy.sample_plan
    if policy.policy_class is not None:
        kind = import_object(policy.policy_class, key=f"multiagent.policies.{policy_id}")
    else:
        graph = graphs[policy_id]
        # it gets its weights before the first turn, with the first snapshot
        kind = learner_policy_class(graph["graph"], graph["spec"], threads=threads)
        config |= {
            "postprocess": plan.postprocess,
            "postprocess_params": dict(plan.postprocess_params),
            "bootstrap_values": c.BOOTSTRAP_VALUES in plan.columns,
        }
    return kind, _space(policy.observation_space), _space(policy.action_space), config


def _space(data: dict[str, Any] | None) -> Any:
    return ENV_SPACE if data is None else space_from_dict(data)


def _imported(path: str | None, key: str) -> Any:
    return None if path is None else named_failures(import_object(path, key=key), f"{key} {path!r}", key)
