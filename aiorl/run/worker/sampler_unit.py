"""SamplerUnit: environments, policies and filters of one sampler, a Worker in its own thread.

Environment code can block, so it never runs on the event loop. Only ``offer``, ``stop`` and
``in_env_s`` of a unit can be used from any thread. All other methods belong to the unit's thread,
or to the event loop while the unit is idle.

If the environments step in lockstep, a unit returns their columns unchanged. Otherwise it returns
rows of trajectories, laid out for the learner by ``sampler.layout``. Rows of untrained policies are
not sent, nor are rows whose gradients are sent instead.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from aiorl.acting.filters import ObservationFilter
from aiorl.acting.graph_policy import GraphPolicy
from aiorl.acting.policy import Policy
from aiorl.actors.calls import public_method, unpacked_arguments
from aiorl.actors.values import pack, refuse_handle
from aiorl.config.code import with_objects
from aiorl.config.worker import PolicyPart, WorkerPart
from aiorl.data import columns as c
from aiorl.data.fragment import Fragment, PolicyGraph
from aiorl.data.layout import to_training_arrays
from aiorl.data.metrics import EpisodeColumns, RolloutMetrics
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import EnvError, SamplerDied
from aiorl.net.wire.messages import Arrays, Samples, Snapshot, Value
from aiorl.offline.estimators import OffPolicyEstimate
from aiorl.process.log_once import log_once, report
from aiorl.run.added_policy import AddedPolicy, changes_to
from aiorl.sampling.callbacks import DefaultCallbacks, named_callbacks
from aiorl.sampling.policies import learned_policies, named_function
from aiorl.sampling.sampler import SyncSampler
from aiorl.sampling.settings import IOSettings, WorkerSettings
from aiorl.sampling.worker import Worker

logger = logging.getLogger(__name__)


class StopSampling(BaseException):
    """Signal to abandon a fragment between two steps; not an error, so not an Exception."""


class SnapshotSlot:
    """Hands the newest snapshot from the event loop to one sampler's thread.

    Attributes:
        version: policy version in use; -1 before the first.
        env_config: settings of the environments with that version; empty if they have not changed.
        env_changes: number of changes that led to them.
        newest_version: version of the newest snapshot offered, applied or not; -1 before the first.
        global_vars: global variables of the version in use.
        change_policies: called with each snapshot before it is applied; adds and removes policies.
    """

    def __init__(
        self,
        policies: Mapping[str, Policy],
        filters: Mapping[str, ObservationFilter],
        incarnation: str,
        *,
        synchronize_filters: bool,
    ) -> None:
        """Set the policies and filters that snapshots apply to; both mappings are read again with
        each snapshot.

        Args:
            policies: policy id -> policy, which gets the weights of its id if a snapshot has any.
            filters: policy id -> filter, which adopts the published state but keeps deltas not sent
                yet.
            incarnation: incarnation under which this worker's filter deltas are acknowledged.
            synchronize_filters: False keeps the filters' own statistics after the first snapshot.
        """
        self.version = self.newest_version = -1
        self.env_config: Mapping[str, Any] = {}
        self.env_changes = 0
        self.global_vars: Mapping[str, Any] = {}
        self.change_policies: Callable[[Snapshot], None] = lambda snapshot: None
        self._policies = policies
        self._filters = filters
        self._incarnation = incarnation
        self._synchronize_filters = synchronize_filters
        self._offered: Snapshot | None = None
        self._offering = threading.Lock()

    def offer(self, snapshot: Snapshot) -> None:
        """Offer a snapshot to the sampler; it takes effect after the changes of an older one that
        waits.

        Can be called in any thread.

        Args:
            snapshot: a whole snapshot, or a partial one that builds on one offered before.
        """
        with self._offering:
            if snapshot.version <= self.newest_version:
                return
            offered = self._offered
            self._offered = snapshot if offered is None else snapshot.after(offered)
            self.newest_version = snapshot.version

    def between_steps(self) -> None:
        """Apply the snapshot offered, if any; the sampler calls this before each step.

        Raises:
            PolicyError: weights do not fit their policy, or a policy cannot be made.
            BatchError: a filter state does not fit its filter.
        """
        snapshot = self._offered
        if snapshot is None:
            return
        self.change_policies(snapshot)
        for policy_id, policy in self._policies.items():
            if policy_id in snapshot.weights:
                policy.set_weights(snapshot.weights[policy_id])
            policy.on_global_var_update(snapshot.global_vars)
        acknowledged = snapshot.filter_acks.get(self._incarnation, 0)
        adopts = self._synchronize_filters or self.version < 0
        for policy_id, observation_filter in self._filters.items():
            state = snapshot.filters.get(policy_id)
            if state and (adopts or observation_filter.is_frozen):
                observation_filter.adopt(state, acknowledged)
            else:
                observation_filter.acknowledge(acknowledged)
        self.global_vars = snapshot.global_vars
        self.env_config = snapshot.env_config
        self.env_changes = snapshot.env_changes
        self.version = snapshot.version
        # it waits until here, because Ctrl-C can interrupt any line, and then it is applied again
        with self._offering:
            if self._offered is snapshot:
                self._offered = None


_FOR_POLICIES = {"eager", "no_eager_on_workers", "eager_tracing"}
_ENDING = {"stop", "interrupt"}
_PERF = ("iters", "env_wait_time", "processing_time", "inference_time")


@dataclass(frozen=True, slots=True)
class UnitPlace:
    """Place of a unit among the samplers of a run.

    Attributes:
        slot: index of its worker, from 1.
        incarnation: the worker's registration life, a hexadecimal number.
        unit_index: index among the worker's samplers, from 0.
        num_workers: number of workers in the run's config.
        num_broken_off: number of earlier samplers in this place that were broken off during the
            same life.
    """

    slot: int
    incarnation: str
    unit_index: int = 0
    num_workers: int = 1
    num_broken_off: int = 0


class SamplerUnit:
    """Sampler with its environments, policies and filters, built from the handshake.

    With ``sample_async``, batches are sampled ahead in another thread. They count as sampled under
    the newest version that has arrived when they are taken; users of that setting accept the lag.

    Attributes:
        worker: the Worker that samples.
    """

    def __init__(
        self,
        part: WorkerPart,
        graphs: Mapping[str, PolicyGraph],
        snapshot: Snapshot,
        place: UnitPlace,
    ) -> None:
        """Build environments, policies and sampler, which can take as long as the environments
        need.

        Args:
            part: the worker's part of the configuration.
            graphs: policy id -> acting graph.
            snapshot: first weights and filter states.
            place: place among the samplers of the run.

        Raises:
            ConfigError: a setting cannot be honoured here. For example, an environment, or
                TensorFlow for gradients, is not installed.
            EnvError: an environment's constructor failed.
            PolicyError: a graph is missing or unusable, or a network built here differs from the
                learner's.
        """
        if snapshot.env_changes:
            env_config = with_objects(dict(snapshot.env_config))
            part = part.model_copy(update={"env_config": env_config})
        self._env_changes = snapshot.env_changes
        self._part = part
        self._policy_parts = dict(part.policies)  # those of removed policies stay, for their rows
        self._step_began = 0.0  # nonzero during a step
        self._is_stopped = self._is_sampling = False
        self._policies: dict[str, Policy] = {}
        self._filters: dict[str, ObservationFilter] = {}
        self._slot = SnapshotSlot(
            self._policies,
            self._filters,
            place.incarnation,
            synchronize_filters=part.synchronize_filters,
        )
        self._slot.offer(snapshot)
        self._perf = dict.fromkeys(_PERF, 0.0)
        # without a seed, environments need not support one
        seed = None if part.seed is None else unit_seed(part.seed, place, part.life)
        # messages are compressed instead of observations
        unit_part = part.model_copy(update={"seed": seed, "compress_observations": False})
        default = part.policies.get(c.DEFAULT_POLICY_ID)
        # networks get their weights before the first turn, with the first snapshot
        settings = settings_of_run(
            unit_part,
            learned_policies(part, graphs),
            policy_config=part.model_dump(include=_FOR_POLICIES) if part.eager else {},
            policies_to_train=[
                policy_id for policy_id, policy in part.policies.items() if policy.is_trained
            ],
            worker_index=place.slot,
            num_workers=place.num_workers,
            monitor_path=monitor_directory(part, place),
            log_dir=part.log_dir,
            io=_io_settings(unit_part, place),
            sample_plan=None if default is None else default.sample_plan,
        )
        self.worker = Worker(settings, on_turn=self._between_turns)
        # the level itself belongs to this process, which may be a user's program
        log_once.set_up(place.slot, part.log_level)
        self._learning = {
            policy_id: policy.learning
            for policy_id, policy in self.worker.policy_map.items()
            if part.policies[policy_id].sends == "gradients" and isinstance(policy, GraphPolicy)
        }
        for learning in self._learning.values():
            learning.warm_up()

    @property
    def version(self) -> int:
        """Policy version in use."""
        return self._slot.version

    @property
    def in_env_s(self) -> float:
        """Seconds since the last step began, 0 while idle or while the environment waits for
        others; large if an environment hangs.

        Can be read in any thread.
        """
        began = self._step_began
        if not (began and self._is_sampling) or self.waits_for():
            return 0.0
        return time.monotonic() - began

    def waits_for(self) -> str:
        """Return for whom the environment waits; see `BaseEnv.waits_for`. Can be called in any
        thread.
        """
        return self.worker.async_env.waits_for() if self._is_sampling else ""

    def offer(self, snapshot: Snapshot) -> None:
        """Offer a snapshot to be applied between two steps. Can be called in any thread."""
        self._slot.offer(snapshot)

    def stop(self) -> None:
        """Make a running ``sample``, and every later one, raise StopSampling as soon as possible.
        Returns immediately.

        Waits for clients or for environments in other processes end, too. Can be called in any
        thread.
        """
        self._is_stopped = True
        # a woken thread may hold a lock for a moment, and the event loop must not wait
        threading.Thread(
            target=self.worker.interrupt, name="interrupt-sampler", daemon=True
        ).start()

    def sample(self) -> Samples:
        """Sample and return the next fragment, complete except for its number, lease and filter
        deltas. Blocks.

        Raises:
            StopSampling: ``stop`` was called.
            EnvError: the environment failed, or has no more data.
            BatchError: rows lack a column that the learner needs.
            Exception: a policy or a callback failed.
        """
        self._step_began = time.monotonic()
        self._is_sampling = True
        try:
            return self._sample()
        except Exception as error:
            if self._is_stopped:  # errors caused by stopping an environment are not faults
                raise StopSampling from error
            if isinstance(error, SamplerDied):
                text = "".join(traceback.format_exception(error))
                raise EnvError(self._part.env, str(error), traceback_text=text) from error
            raise
        finally:
            self._is_sampling = False
            self._step_began = 0.0

    def prepare(self) -> None:
        """Do in advance what the next ``sample`` would begin with; nothing unless environments step
        in lockstep.
        """
        lockstep = getattr(self.worker.sampler, "lockstep", None)
        if lockstep is not None:
            lockstep.prepare()

    def take_up(self) -> None:
        """Apply the snapshot offered, as the next ``sample`` would; only while idle.

        Raises:
            StopSampling: ``stop`` was called.
        """
        self._between_turns(self.worker)

    def call(self, method: str, packed: Mapping[str, Value]) -> Value:
        """Call a method of the RolloutWorker that code of users gets; only while idle.

        A batch that it samples moves the environments on, but is not part of the run's experience.

        Args:
            method: name of a public method.
            packed: its arguments, as `aiorl.actors.values.pack` returns them.

        Returns:
            The packed result.

        Raises:
            StopSampling: ``stop`` was called.
            AttributeError: there is no such method.
            RemoteProtocolError: the arguments can't be read.
            UnsendableError: the result can't be sent.
            Exception: the method raised it.
        """
        if not self._part.sample_async:  # then its own thread takes snapshots up
            self.take_up()
        function = public_method(self.worker.rollout_worker(), method)
        if method in _ENDING:
            raise RuntimeError(
                f"{method}() would end a worker of the run: trainer.workers.reset(others) does that"
            )
        args, kwargs = unpacked_arguments(packed, refuse_handle, imports_code=True)
        try:
            return pack(function(*args, **kwargs))
        except StopIteration as error:  # no future can have this exception
            raise RuntimeError(f"{method} raised StopIteration") from error

    def take_deltas(self, sequence: int) -> dict[str, dict[str, Any]]:
        """Return policy id -> filter delta, sent with the fragment of that sequence number; only
        while idle.

        Policies with an identity filter have none.
        """
        return {
            policy_id: dict(statistics.take_delta(sequence))
            for policy_id, statistics in self.worker.filters.items()
            if not statistics.is_identity
        }

    def close(self) -> None:
        """Close the environments; call this in the unit's thread, or when that is done."""
        self.worker.stop()

    def _sample(self) -> Samples:
        part = self._part
        worker = self.worker
        if self._is_stopped:
            raise StopSampling
        if not part.sample_async:
            self._between_turns(worker)
        first_version = self._version_now
        in_lockstep = self._sample_in_lockstep()
        if in_lockstep is not None:
            fragment, episodes = in_lockstep
            batches: dict[str, Arrays] = {c.DEFAULT_POLICY_ID: fragment.training_arrays()}
            env_steps = agent_steps = fragment.env_steps
            length = fragment.length
            num_envs = fragment.num_envs
        else:
            batch = worker.sample()
            by_policy = (
                {c.DEFAULT_POLICY_ID: batch}
                if isinstance(batch, SampleBatch)
                else batch.policy_batches
            )
            batches = {
                policy_id: _laid_out(rows, self._policy_parts[policy_id])
                for policy_id, rows in by_policy.items()
            }
            env_steps = batch.env_steps
            agent_steps = batch.total()
            length = part.rollout_fragment_length
            num_envs = part.num_envs_per_worker
            metrics = worker.get_metrics()
            episodes = EpisodeColumns.of(
                [item for item in metrics if isinstance(item, RolloutMetrics)],
                [item for item in metrics if isinstance(item, OffPolicyEstimate)],
            )
        for policy_id, learning in self._learning.items():
            if batches.get(policy_id):
                self._step_began = 0.0  # no environment is stepping
                batches[policy_id] = learning.gradient_columns(batches[policy_id])
        return Samples(
            seq=0,
            lease_id=0,
            env_steps=env_steps,
            agent_steps=agent_steps,
            first_version=first_version,
            last_version=self._version_now,
            num_envs=num_envs,
            length=length,
            batches={policy_id: columns for policy_id, columns in batches.items() if columns},
            episodes=episodes.to_arrays(),
            filter_deltas={},
            perf=self._take_perf(),
        )

    def _sample_in_lockstep(self) -> tuple[Fragment, EpisodeColumns] | None:
        """Return a fragment and the episodes that ended since the last one; None unless
        environments step in lockstep.
        """
        sampler = self.worker.sampler
        if not isinstance(sampler, SyncSampler) or sampler.lockstep is None:
            return None
        report("sample_start", self.worker.reader.rollout_fragment_length)
        sampled = sampler.get_fragment(self.worker.on_turn)
        if sampled is not None:
            report("sample_end", sampled[0].columns)
        return sampled

    @property
    def _version_now(self) -> int:
        return self._slot.newest_version if self._part.sample_async else self._slot.version

    def _between_turns(self, worker: Worker) -> None:
        """Apply the snapshot offered, in the sampling thread, which can start before the
        constructor ends.
        """
        self._step_began = time.monotonic()
        if not self._policies:
            self._policies.update(worker.policy_map)
            self._filters.update(worker.filters)
            self._slot.change_policies = partial(self._change_policies, worker)
        # with sample_async, its own thread checks after each turn
        if self._is_stopped and not self._part.sample_async:
            raise StopSampling
        version = self._slot.version
        self._slot.between_steps()
        if self._slot.version != version:
            worker.global_vars = dict(self._slot.global_vars)
        if self._slot.env_changes != self._env_changes:
            self._env_changes = self._slot.env_changes
            worker.change_env_config(with_objects(dict(self._slot.env_config)))

    def _change_policies(self, worker: Worker, snapshot: Snapshot) -> None:
        """Add the policies that come with a snapshot, and remove those that it leaves out."""
        if not snapshot.policies and snapshot.weights.keys() == self._policies.keys():
            return
        parts = self._policy_parts
        networks = {
            policy_id for policy_id in self._policies if parts[policy_id].policy_class is None
        }
        packed, removed = changes_to(snapshot, networks)
        added: dict[str, Any] = {}
        for policy_id, array in packed.items():
            policy = AddedPolicy.unpack(array)
            parts[policy_id] = policy.part
            part = self._part.model_copy(update={"policies": {policy_id: policy.part}})
            added |= learned_policies(part, {policy_id: policy.graph})
        worker.change_policies(added, removed)
        for policy_id in added:
            self._policies[policy_id] = worker.policy_map[policy_id]
            self._filters[policy_id] = worker.filters[policy_id]
        for policy_id in removed:
            del self._policies[policy_id]
            del self._filters[policy_id]

    def _take_perf(self) -> dict[str, float]:
        """Return the increments since the last call; the sampler can be running."""
        perf = self.worker.sampler.perf
        totals = {name: float(getattr(perf, name)) for name in _PERF}
        before = self._perf
        self._perf = totals
        # a new sampler counts from 0
        return {name: max(0.0, totals[name] - before[name]) for name in _PERF}


def settings_of_run(part: WorkerPart, policy: Any, **settings: Any) -> WorkerSettings:
    """Return the settings of a worker that acts with a run's policies.

    Args:
        part: the worker's part of the configuration.
        policy: see `learned_policies`.
        **settings: further settings, which take precedence.

    Raises:
        ConfigError: a function or class of the user's cannot be imported.
    """
    multiagent = part.multiagent
    settings.setdefault("callbacks", named_callbacks(part.callbacks) or DefaultCallbacks)
    return WorkerSettings(
        config=part,
        env_creator=part.env,
        policy=policy,
        policy_mapping_fn=named_function(
            multiagent.policy_mapping_fn, "multiagent.policy_mapping_fn"
        ),
        observation_fn=named_function(multiagent.observation_fn, "multiagent.observation_fn"),
        **settings,
    )


def _io_settings(settings: WorkerPart, place: UnitPlace) -> IOSettings:
    """Return where batches come from and go to; stored experience loads modules only if used."""
    if settings.input == "sampler" and settings.output is None:
        return IOSettings()
    from aiorl.offline.sources import configured_input, configured_output, share_of

    share = share_of(place.slot, place.num_workers, place.unit_index, settings.samplers_per_worker)
    return IOSettings(
        input_creator=configured_input(settings, share),
        input_evaluation=() if settings.input == "sampler" else settings.input_evaluation,
        output_creator=configured_output(settings),
    )


def unit_seed(seed: int, place: UnitPlace, life: int = 0) -> int:
    """Return a sampler's seed, which depends only on the run's seed, slot, unit, life and earlier
    samplers broken off.

    A sampler that replaces another gets a different seed. With the same one it would sample the
    same rows and fail in the same way.
    """
    if place.unit_index == life == place.num_broken_off == 0:
        return seed + place.slot
    entropy = [seed, place.slot, place.unit_index]
    if life or place.num_broken_off:
        entropy.append(life)
    if place.num_broken_off:
        entropy.append(place.num_broken_off)
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def monitor_directory(part: WorkerPart, place: UnitPlace) -> str | None:
    """Return the directory for episode statistics and videos; None without a monitor.

    It is in the run's directory if this host can access that, as the learner's host can. Otherwise
    it is ``monitor/<run's name>`` below the directory in which the worker was started.
    """
    if not part.monitor:
        return None
    if part.log_dir and Path(part.log_dir).is_dir():
        directory = Path(part.log_dir) / "monitor"
    else:
        directory = Path.cwd() / "monitor" / (Path(part.log_dir or "run").name)
    if place.unit_index:
        directory /= f"sampler-{place.unit_index}"
    return str(directory)


def _laid_out(rows: SampleBatch, policy: PolicyPart) -> dict[str, Any]:
    """Return the columns that the learner trains on; empty if there are none."""
    if not (policy.is_trained and rows.count):
        return {}
    if c.PIECE in policy.sample_plan.columns and c.PIECE not in rows:
        rows[c.PIECE] = np.zeros(rows.count, np.int64)
    return to_training_arrays(
        rows, policy.sample_plan, policy.sequence_length if policy.layout == "sequences" else None
    )
