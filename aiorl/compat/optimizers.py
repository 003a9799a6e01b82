"""RLlib's policy optimizers: what data flows between a local worker, which learns, and remote ones,
which sample.

    workers = WorkerSet(env_creator="CartPole-v1", policy=PPOTFPolicy, num_workers=4)
    optimizer = SyncSamplesOptimizer(workers, train_batch_size=2000, num_sgd_iter=10)
    while optimizer.num_steps_sampled < 100_000:
        optimizer.step()

With the weights, remote workers get the global variable ``timestep``, the number of steps sampled,
which schedules of policies depend on. If a remote worker is lost, `PolicyOptimizer.step` raises
ActorLost; `PolicyOptimizer.reset` with the handles of the others lets the next step use these.
"""

from __future__ import annotations

import logging
import math
import random
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from aiorl.acting.exploration import Schedule
from aiorl.actors.references import ObjectRef, get, wait
from aiorl.compat.learning import check_sgd, minibatch_sgd
from aiorl.compat.metrics import averages
from aiorl.compat.remote import put
from aiorl.compat.worker_set import WorkerSet, make_workers
from aiorl.data import columns as c
from aiorl.data.columns import (
    BATCH_INDEXES,
    DEFAULT_POLICY_ID,
    TD_ERROR,
    Columns,
    ColumnSpec,
    Dtype,
)
from aiorl.data.sample_batch import (
    Batch,
    MultiAgentBatch,
    SampleBatch,
    concat_batches,
    rows_by_policy,
)
from aiorl.errors import ActorLost, BatchError, ConfigError, PolicyError
from aiorl.learning.replay.priorities import Prioritised
from aiorl.learning.replay.replay import Replay
from aiorl.learning.replay.spec import ReplaySpec
from aiorl.run.report.results import Results

logger = logging.getLogger(__name__)

_NOT_STORED = {c.EPS_ID, c.INFOS, c.VALID}
_LEARNER_STATS = "learner_stats"
_NEWEST = 10


class TimerStat:
    """Times that the newest runs of a ``with`` block took, and the units that they processed."""

    def __init__(self) -> None:
        """Begin without a run."""
        self._seconds: deque[float] = deque(maxlen=_NEWEST)
        self._units: deque[float] = deque(maxlen=_NEWEST)
        self._began = 0.0

    def __enter__(self) -> Self:
        self._began = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._seconds.append(time.perf_counter() - self._began)

    def push_units_processed(self, units: float) -> None:
        """Note the units that a run processed."""
        self._units.append(units)

    @property
    def mean_ms(self) -> float:
        """Mean time of a run, milliseconds; 0 before the first."""
        return round(1000 * sum(self._seconds) / max(1, len(self._seconds)), 3)

    @property
    def mean_units_processed(self) -> float:
        """Mean number of units of a run; 0 before the first."""
        return round(sum(self._units) / max(1, len(self._units)), 3)

    @property
    def mean_throughput(self) -> float:
        """Units per second; 0 before the first run."""
        seconds = sum(self._seconds)
        return round(sum(self._units) / seconds, 3) if seconds else 0.0


class PolicyOptimizer(ABC):
    """Data flow of an algorithm between the workers of an `aiorl.WorkerSet`. A subclass defines
    `step`.

    Attributes:
        workers: the workers.
        num_steps_sampled: env steps sampled so far.
        num_steps_trained: env steps learned from so far; rows that are learned from repeatedly
            count each time.
        learner_stats: figures of the newest update, by policy id unless the default policy is the
            only one.
    """

    def __init__(self, workers: Any) -> None:
        """Take the workers.

        Args:
            workers: an `aiorl.WorkerSet`, or an object with its interface; not the
                ``trainer.workers`` of a run, which its trainer drives.
        """
        self.workers = workers
        self.num_steps_sampled = 0
        self.num_steps_trained = 0
        self.learner_stats: dict[str, Any] = {}
        self._made: WorkerSet | None = None
        self._late_metrics: list[ObjectRef] = []
        self._results: dict[int, Results] = {}

    @classmethod
    def make(
        cls,
        evaluator_cls: type[Any],
        evaluator_args: Mapping[str, Any] | Sequence[Any],
        num_workers: int = 0,
        optimizer_config: Mapping[str, Any] | None = None,
        evaluator_resources: Mapping[str, Any] | None = None,
    ) -> Self:
        """Make workers, and an optimizer of them; its `stop` ends them.

        Args:
            evaluator_cls: class of the workers, `RolloutWorker` or one with its interface.
            evaluator_args: see `make_workers`.
            num_workers: number of remote workers besides the local one.
            optimizer_config: further arguments of the optimizer, by name.
            evaluator_resources: limits of the processes of remote workers, see `aiorl.remote`.

        Raises:
            ConfigError: an argument is wrong.
        """
        local_worker, remote_workers = make_workers(
            evaluator_cls, evaluator_args, num_workers, evaluator_resources
        )
        workers = WorkerSet.of(local_worker, remote_workers)
        try:
            optimizer = cls(workers, **(optimizer_config or {}))
        except BaseException:
            workers.stop()
            raise
        optimizer._made = workers
        return optimizer

    @abstractmethod
    def step(self) -> dict[str, Any]:
        """Sample, learn, and distribute weights, in the order of the class.

        Returns:
            `learner_stats`.

        Raises:
            ActorLost: a remote worker was lost.
            RemoteError: a method of a remote worker raised an exception.
        """

    def stats(self) -> dict[str, Any]:
        """Return counters, times and the figures of the newest update."""
        return {
            "num_steps_trained": self.num_steps_trained,
            "num_steps_sampled": self.num_steps_sampled,
        }

    def save(self) -> list[int]:
        """Return the counters; workers are saved by their own ``save``."""
        return [self.num_steps_trained, self.num_steps_sampled]

    def restore(self, data: Sequence[int]) -> None:
        """Continue from the counters that `save` returned.

        Args:
            data: numbers of steps trained on and sampled.
        """
        trained, sampled = data
        self.num_steps_trained = int(trained)
        self.num_steps_sampled = int(sampled)

    def stop(self) -> None:
        """End the workers that `make` has made, and no others."""
        if self._made is not None:
            self._made.stop()

    def reset(self, remote_workers: Sequence[Any]) -> None:
        """Continue with these remote workers.

        Args:
            remote_workers: their handles.
        """
        self.workers.reset(remote_workers)

    def foreach_worker(self, function: Callable[[Any], Any]) -> list[Any]:
        """See `WorkerSet.foreach_worker`."""
        results: list[Any] = self.workers.foreach_worker(function)
        return results

    def foreach_worker_with_index(self, function: Callable[[Any, int], Any]) -> list[Any]:
        """See `WorkerSet.foreach_worker_with_index`."""
        results: list[Any] = self.workers.foreach_worker_with_index(function)
        return results

    def collect_metrics(
        self,
        timeout_seconds: float = 180,
        min_history: int = 100,
        selected_workers: Sequence[Any] | None = None,
    ) -> dict[str, Any]:
        """Return averages over the episodes that have ended since the last call.

        Args:
            timeout_seconds: longest time to wait for remote workers, seconds; later answers are
                part of the next result.
            min_history: if fewer episodes have ended, earlier ones are added up to this number.
            selected_workers: handles of the remote workers to ask; None asks all.

        Returns:
            ``episode_reward_mean``, ``episode_len_mean`` and others, with `stats` as ``info``; NaN
            before the first episode.

        Raises:
            ActorLost: a remote worker was lost.
        """
        remote_workers = selected_workers or self.workers.remote_workers()
        asked = [worker.get_metrics.remote() for worker in remote_workers]
        refs = self._late_metrics + asked
        answers = [self.workers.local_worker().get_metrics()]
        if refs:
            ready, self._late_metrics = wait(refs, len(refs), timeout_seconds)
            answers += get(ready)
        now = time.monotonic()
        if min_history not in self._results:
            self._results = {min_history: Results(max(1, min_history), now)}
        return {**averages(self._results[min_history], answers, now), "info": self.stats()}

    def _global_vars(self) -> dict[str, Any]:
        return {"timestep": self.num_steps_sampled}

    def _send_weights(self) -> None:
        """Send the weights of the local worker to all others."""
        local_worker = self.workers.local_worker()
        global_vars = self._global_vars()
        local_worker.set_global_vars(global_vars)
        remote_workers = self.workers.remote_workers()
        if remote_workers:
            weights = put(local_worker.get_weights())
            for worker in remote_workers:
                worker.set_weights.remote(weights, global_vars)

    def _sample_once(self) -> list[Batch]:
        """Return a batch of each remote worker, or of the local one if there is no other."""
        remote_workers = self.workers.remote_workers()
        if not remote_workers:
            return [self.workers.local_worker().sample()]
        batches: list[Batch] = get([worker.sample.remote() for worker in remote_workers])
        return batches


def _stats_of(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures in the result of an update; those of the default policy if there is no
    other.
    """
    if _LEARNER_STATS in info:
        return dict(info[_LEARNER_STATS])
    if info.keys() == {DEFAULT_POLICY_ID}:
        return _stats_of(info[DEFAULT_POLICY_ID])
    return {
        name: _stats_of(value) if isinstance(value, Mapping) else value
        for name, value in info.items()
        if name != TD_ERROR
    }


class SyncSamplesOptimizer(PolicyOptimizer):
    """Samples a train batch with the newest weights, and learns from it in passes and minibatches.

    It is the data flow of policy gradient, A2C and PPO.
    """

    def __init__(
        self,
        workers: Any,
        num_sgd_iter: int = 1,
        train_batch_size: int = 1,
        sgd_minibatch_size: int = 0,
        standardize_fields: Collection[str] = frozenset(),
    ) -> None:
        """Take the workers.

        Args:
            workers: see `PolicyOptimizer`.
            num_sgd_iter: passes over the train batch.
            train_batch_size: least env steps of a train batch; workers sample until they are
                reached, and nothing is discarded.
            sgd_minibatch_size: rows in a minibatch; 0 is the whole batch.
            standardize_fields: columns to scale to mean 0 and standard deviation 1.

        Raises:
            ConfigError: a number is impossible.
        """
        super().__init__(workers)
        check_sgd(num_sgd_iter, sgd_minibatch_size, standardize_fields)
        self._num_sgd_iter = num_sgd_iter
        self._train_batch_size = train_batch_size
        self._sgd_minibatch_size = sgd_minibatch_size
        self._standardize_fields = standardize_fields
        self._update_weights_timer = TimerStat()
        self._sample_timer = TimerStat()
        self._grad_timer = TimerStat()

    def step(self) -> dict[str, Any]:
        """Send weights, sample a train batch, and learn from it; see `PolicyOptimizer.step`."""
        with self._update_weights_timer:
            self._send_weights()
        with self._sample_timer:
            batches: list[Batch] = []
            while sum(batch.env_steps for batch in batches) < self._train_batch_size:
                batches += self._sample_once()
            samples = concat_batches(batches)
            self._sample_timer.push_units_processed(samples.env_steps)
        local_worker = self.workers.local_worker()
        with self._grad_timer:
            info = minibatch_sgd(
                samples,
                local_worker.policies_to_train,
                local_worker.learn_on_batch,
                num_sgd_iter=self._num_sgd_iter,
                sgd_minibatch_size=self._sgd_minibatch_size,
                standardize_fields=self._standardize_fields,
                rng=np.random.default_rng(np.random.randint(2**31)),
            )
            self._grad_timer.push_units_processed(samples.env_steps)
        self.num_steps_sampled += samples.env_steps
        self.num_steps_trained += samples.env_steps
        self.learner_stats = _stats_of(info)
        return self.learner_stats

    def stats(self) -> dict[str, Any]:
        """See `PolicyOptimizer.stats`."""
        return {
            **super().stats(),
            "sample_time_ms": self._sample_timer.mean_ms,
            "grad_time_ms": self._grad_timer.mean_ms,
            "update_time_ms": self._update_weights_timer.mean_ms,
            "opt_peak_throughput": self._grad_timer.mean_throughput,
            "sample_peak_throughput": self._sample_timer.mean_throughput,
            "opt_samples": self._grad_timer.mean_units_processed,
            "learner": self.learner_stats,
        }


def sample_gradients(worker: Any) -> tuple[Any, dict[str, Any]]:
    """Return the gradients of a new batch of a worker, with their figures; the batch stays where
    the worker is.
    """
    gradients: tuple[Any, dict[str, Any]] = worker.compute_gradients(worker.sample())
    return gradients


class AsyncGradientsOptimizer(PolicyOptimizer):
    """Remote workers compute gradients of their own samples; each gets new weights when it delivers
    one, without waiting for others.

    It is the data flow of A3C.
    """

    def __init__(self, workers: Any, grads_per_step: int = 100) -> None:
        """Take the workers.

        Args:
            workers: see `PolicyOptimizer`; at least one is remote.
            grads_per_step: gradients to apply in a step; at least one of each worker.

        Raises:
            ConfigError: there is no remote worker.
        """
        super().__init__(workers)
        _check_remote(self)
        self._grads_per_step = grads_per_step
        self._apply_timer = TimerStat()
        self._wait_timer = TimerStat()
        self._dispatch_timer = TimerStat()

    def step(self) -> dict[str, Any]:
        """Apply gradients in the order in which they arrive; see `PolicyOptimizer.step`."""
        local_worker = self.workers.local_worker()
        self._send_weights()
        pending = {
            worker.apply.remote(sample_gradients): worker
            for worker in self.workers.remote_workers()
        }
        num_begun = len(pending)
        while pending:
            with self._wait_timer:
                (ref, *_), _ = wait(list(pending))
                worker = pending.pop(ref)
                gradients, info = get(ref)
            self.learner_stats = _stats_of(info)
            if gradients is not None:
                with self._apply_timer:
                    local_worker.apply_gradients(gradients)
                self.num_steps_sampled += info["batch_count"]
                self.num_steps_trained += info["batch_count"]
            if num_begun < self._grads_per_step:
                with self._dispatch_timer:
                    worker.set_weights.remote(local_worker.get_weights(), self._global_vars())
                    pending[worker.apply.remote(sample_gradients)] = worker
                    num_begun += 1
        return self.learner_stats

    def stats(self) -> dict[str, Any]:
        """See `PolicyOptimizer.stats`."""
        return {
            **super().stats(),
            "wait_time_ms": self._wait_timer.mean_ms,
            "apply_time_ms": self._apply_timer.mean_ms,
            "dispatch_time_ms": self._dispatch_timer.mean_ms,
            "learner": self.learner_stats,
        }


def _check_remote(optimizer: PolicyOptimizer) -> None:
    """Raise ConfigError unless there is a remote worker."""
    if not optimizer.workers.remote_workers():
        raise ConfigError(
            f"{type(optimizer).__name__} needs at least one remote worker, there is none.",
            key="num_workers",
            value=0,
            hint="Use SyncSamplesOptimizer, or start remote workers.",
        )


class SyncReplayOptimizer(PolicyOptimizer):
    """Samples once with the newest weights, stores the rows, and learns from rows of the store,
    drawn by their TD errors.

    It is the data flow of DQN. A policy's ``learn_on_batch`` returns the TD error of each row as
    ``td_error``. All columns of numbers are stored, except ``eps_id``. Weights of drawn rows are
    relative to the largest one of their batch. The rows are not part of `save`.

    Attributes:
        replay_buffers: stored rows by policy id.
    """

    def __init__(
        self,
        workers: Any,
        learning_starts: int = 1000,
        buffer_size: int = 10_000,
        prioritized_replay: bool = True,
        prioritized_replay_alpha: float = 0.6,
        prioritized_replay_beta: float = 0.4,
        prioritized_replay_eps: float = 1e-6,
        final_prioritized_replay_beta: float = 0.4,
        train_batch_size: int = 32,
        before_learn_on_batch: Callable[[MultiAgentBatch, Any, int], MultiAgentBatch] | None = None,
        synchronize_sampling: bool = False,
        prioritized_replay_beta_annealing_timesteps: float = 20_000,
    ) -> None:
        """Take the workers.

        Args:
            workers: see `PolicyOptimizer`.
            learning_starts: env steps to sample before learning begins.
            buffer_size: rows of each policy to store.
            prioritized_replay: False draws all rows alike.
            prioritized_replay_alpha: exponent of the priorities.
            prioritized_replay_beta: exponent of the importance weights at the start.
            prioritized_replay_eps: is added to TD errors, so that all rows can be drawn.
            final_prioritized_replay_beta: exponent of the importance weights at the end.
            train_batch_size: rows to learn from in a step.
            before_learn_on_batch: function of drawn rows, the policy map and train_batch_size that
                returns the rows to learn from; None for none.
            synchronize_sampling: True draws the rows of all policies at the same positions; not
                with priorities.
            prioritized_replay_beta_annealing_timesteps: env steps trained on after which the
                exponent of the importance weights is the final one.

        Raises:
            ConfigError: arguments contradict each other.
        """
        super().__init__(workers)
        if synchronize_sampling and prioritized_replay:
            raise ConfigError(
                "synchronize_sampling draws the rows of all policies alike, and"
                " prioritized_replay by the TD errors of each.",
                key="synchronize_sampling",
                value=True,
                hint="Set prioritized_replay to False.",
            )
        if buffer_size < learning_starts:
            logger.warning(
                "buffer_size is %d, below learning_starts, %d: rows will be dropped before learning"
                " begins",
                buffer_size,
                learning_starts,
            )
        self._replay_starts = learning_starts
        self._train_batch_size = train_batch_size
        self._before_learn_on_batch = before_learn_on_batch
        self._synchronize_sampling = synchronize_sampling
        self._prioritized_replay_beta = Schedule(
            [
                (0, prioritized_replay_beta),
                (prioritized_replay_beta_annealing_timesteps, final_prioritized_replay_beta),
            ],
            key="prioritized_replay_beta",
        )
        self.replay_buffers: dict[str, Replay] = {}
        self._capacity = buffer_size
        self._priorities = None
        if prioritized_replay:
            self._priorities = Prioritised(prioritized_replay_alpha, prioritized_replay_eps)
        self._update_weights_timer = TimerStat()
        self._sample_timer = TimerStat()
        self._replay_timer = TimerStat()
        self._grad_timer = TimerStat()

    def step(self) -> dict[str, Any]:
        """Sample, store the rows, and learn from drawn ones; see `PolicyOptimizer.step`."""
        with self._update_weights_timer:
            self._send_weights()
        with self._sample_timer:
            batch = concat_batches(self._sample_once())
            for policy_id, rows in rows_by_policy(batch).items():
                self._store(policy_id, rows)
        if self.num_steps_sampled >= self._replay_starts:
            self._learn()
        self.num_steps_sampled += batch.env_steps
        return self.learner_stats

    def stats(self) -> dict[str, Any]:
        """See `PolicyOptimizer.stats`."""
        return {
            **super().stats(),
            "sample_time_ms": self._sample_timer.mean_ms,
            "replay_time_ms": self._replay_timer.mean_ms,
            "grad_time_ms": self._grad_timer.mean_ms,
            "update_time_ms": self._update_weights_timer.mean_ms,
            "opt_peak_throughput": self._grad_timer.mean_throughput,
            "opt_samples": self._grad_timer.mean_units_processed,
            "learner": self.learner_stats,
        }

    def _store(self, policy_id: str, rows: SampleBatch) -> None:
        columns = {
            name: column[:, None]
            for name, column in rows.items()
            if name not in _NOT_STORED and column.dtype.kind in "fbiu"
        }
        if policy_id not in self.replay_buffers:
            self.replay_buffers[policy_id] = self._new_replay(columns)
        replay = self.replay_buffers[policy_id]
        replay.check_fragment(columns)
        replay.insert_fragment(columns)

    def _new_replay(self, columns: Columns) -> Replay:
        states = [name for name in columns if c.is_of_sequences(name)]
        if states:
            raise BatchError(
                states[0], "no recurrent states, as rows are drawn one by one", sorted(columns)
            )
        specs = tuple(
            ColumnSpec(name, column.shape[2:], _dtype_of(column))
            for name, column in columns.items()
        )
        spec = ReplaySpec(specs, self._capacity, self._priorities)
        return Replay(spec, seed=np.random.randint(2**31))

    def _learn(self) -> None:
        with self._replay_timer:
            samples = self._drawn()
        local_worker = self.workers.local_worker()
        with self._grad_timer:
            if self._before_learn_on_batch is not None:
                samples = self._before_learn_on_batch(
                    samples, local_worker.policy_map, self._train_batch_size
                )
            info = local_worker.learn_on_batch(samples)
            self._grad_timer.push_units_processed(samples.count)
        if self._priorities is not None:
            for policy_id, figures in info.items():
                ids = samples.policy_batches[policy_id][BATCH_INDEXES]
                self.replay_buffers[policy_id].update_priorities(
                    ids, _td_errors(policy_id, figures)
                )
        self.learner_stats = _stats_of(info)
        self.num_steps_trained += samples.count

    def _drawn(self) -> MultiAgentBatch:
        beta = self._prioritized_replay_beta.value(self.num_steps_trained)
        batches = {}
        ids = None
        for policy_id, replay in self.replay_buffers.items():
            if ids is not None and self._synchronize_sampling:
                if ids.max() >= replay.stored or ids.min() < replay.evicted:
                    raise BatchError(
                        BATCH_INDEXES, f"rows of {policy_id!r} for all rows of the others", "none"
                    )
                columns = replay.read(ids)
                weights = np.ones(len(ids), np.float32)
            else:
                columns, ids, weights = replay.sample(self._train_batch_size, beta=beta)
            batches[policy_id] = SampleBatch(columns, weights=weights, batch_indexes=ids)
        return MultiAgentBatch(batches, self._train_batch_size)


def _dtype_of(column: Any) -> Dtype:
    if column.dtype == np.uint8:
        return "uint8"
    return "int32" if column.dtype.kind in "iu" else "float32"


def _td_errors(policy_id: str, figures: Mapping[str, Any]) -> Any:
    """Return the TD errors of an update.

    Raises:
        PolicyError: there are none.
    """
    errors = figures.get(TD_ERROR, figures.get(_LEARNER_STATS, {}).get(TD_ERROR))
    if errors is None:
        raise PolicyError(
            f"policy {policy_id!r} learned from drawn rows and returned only {sorted(figures)},"
            " without a td_error for each row: return it, or set prioritized_replay to False"
        )
    return errors


_NO_QUEUE = "a batch is learned from as soon as it has arrived, in the thread of step"
_NO_GPUS = "a policy learns on the device that TensorFlow chooses"
_WITHOUT_EFFECT = {
    "num_envs_per_worker": "it is num_envs of the workers",
    "lr": "it is a setting of the policies",
    "num_gpus": _NO_GPUS,
    "num_data_loader_buffers": _NO_GPUS,
    "_fake_gpus": _NO_GPUS,
    "learner_queue_size": _NO_QUEUE,
    "learner_queue_timeout": _NO_QUEUE,
    "num_aggregation_workers": "batches come straight from the workers",
}
"""Arguments of RLlib's AsyncSamplesOptimizer -> why they have no effect here."""


class AsyncSamplesOptimizer(PolicyOptimizer):
    """Remote workers sample all the time; batches are learned from as they arrive, while the
    workers make the next ones.

    It is the data flow of IMPALA. A worker has few calls under way, so samples are never much older
    than the weights, and nothing queues up when learning is slow. After an error of a worker, `step`
    can be called again: unless the worker is lost for good, it samples again.
    """

    def __init__(
        self,
        workers: Any,
        train_batch_size: int = 500,
        rollout_fragment_length: int = 50,
        replay_buffer_num_slots: int = 0,
        replay_proportion: float = 0.0,
        max_sample_requests_in_flight_per_worker: int = 2,
        broadcast_interval: int = 1,
        num_sgd_iter: int = 1,
        minibatch_buffer_size: int = 1,
        **without_effect: Any,
    ) -> None:
        """Take the workers, and let them sample.

        Args:
            workers: see `PolicyOptimizer`; at least one is remote.
            train_batch_size: least env steps of a train batch, which consists of whole batches of
                workers.
            rollout_fragment_length: env steps of a worker's batch, about.
            replay_buffer_num_slots: workers' batches to keep for replay.
            replay_proportion: batches to replay for each new one, on average.
            max_sample_requests_in_flight_per_worker: batches that a worker makes before it gets
                newer weights.
            broadcast_interval: workers' batches, not seconds, after which newer weights are used.
            num_sgd_iter: times that a train batch is learned from.
            minibatch_buffer_size: number of train batches to collect; passes alternate between
                them.
            **without_effect: arguments of RLlib that have no effect here: of queues, GPUs and
                aggregating workers. A warning says why.

        Raises:
            ConfigError: there is no remote worker, or too little is kept for replay.
            TypeError: an argument is unknown.
        """
        super().__init__(workers)
        _check_remote(self)
        for name in without_effect:
            if name not in _WITHOUT_EFFECT:
                raise TypeError(f"AsyncSamplesOptimizer takes no argument {name!r}")
            logger.warning("%s has no effect: %s", name, _WITHOUT_EFFECT[name])
        if replay_proportion and replay_buffer_num_slots * rollout_fragment_length <= (
            train_batch_size
        ):
            raise ConfigError(
                f"replay_buffer_num_slots is {replay_buffer_num_slots}: batches of"
                f" {rollout_fragment_length} env steps each are not more than one train batch of"
                f" {train_batch_size}.",
                key="replay_buffer_num_slots",
                value=replay_buffer_num_slots,
                hint="Raise it, or set replay_proportion to 0.",
            )
        self._train_batch_size = train_batch_size
        self._replay_proportion = replay_proportion
        self._broadcast_interval = broadcast_interval
        self._num_sgd_iter = num_sgd_iter
        self._minibatch_buffer_size = minibatch_buffer_size
        self._num_weight_syncs = 0
        self._num_steps_replayed = 0
        self._in_flight = max_sample_requests_in_flight_per_worker
        self._least_kept = math.ceil(train_batch_size / rollout_fragment_length)
        self._kept: deque[Batch] = deque(maxlen=replay_buffer_num_slots)
        self._of_train_batch: list[Batch] = []
        self._train_batches: list[Batch] = []
        self._pending: dict[ObjectRef, Any] = {}
        self._sent_since_broadcast = 0
        self._last_stats = (time.monotonic(), 0, 0)
        self._step_timer = TimerStat()
        self._grad_timer = TimerStat()
        self._weights = put(workers.local_worker().get_weights())
        self._request_samples()

    def step(self) -> dict[str, Any]:
        """Learn from all batches that have arrived, or wait for one; see `PolicyOptimizer.step`."""
        _check_remote(self)
        with self._step_timer:
            refs = list(self._pending)
            ready, _ = wait(refs, len(refs), timeout=0)
            if not ready:
                ready, _ = wait(refs)
            for ref in ready:
                batch = self._arrived(ref)
                self._take(batch)
                if len(self._kept) > self._least_kept:
                    self._replay()
                if self._kept.maxlen:
                    self._kept.append(batch)
        return self.learner_stats

    def reset(self, remote_workers: Sequence[Any]) -> None:
        """See `PolicyOptimizer.reset`; calls of other workers are forgotten."""
        super().reset(remote_workers)
        self._pending = {
            ref: worker for ref, worker in self._pending.items() if worker in remote_workers
        }
        self._request_samples()

    def stop(self) -> None:
        """See `PolicyOptimizer.stop`."""
        self._pending = {}
        super().stop()

    def stats(self) -> dict[str, Any]:
        """See `PolicyOptimizer.stats`; throughputs are since the last call, in env steps per
        second.
        """
        began, sampled, trained = self._last_stats
        now = time.monotonic()
        seconds = max(now - began, 1e-9)
        self._last_stats = (now, self.num_steps_sampled, self.num_steps_trained)
        return {
            **super().stats(),
            "num_weight_syncs": self._num_weight_syncs,
            "num_steps_replayed": self._num_steps_replayed,
            "sample_throughput": round((self.num_steps_sampled - sampled) / seconds, 3),
            "train_throughput": round((self.num_steps_trained - trained) / seconds, 3),
            "timing_breakdown": {
                "optimizer_step_time_ms": self._step_timer.mean_ms,
                "learner_grad_time_ms": self._grad_timer.mean_ms,
            },
            "learner": self.learner_stats,
        }

    def _request_samples(self) -> None:
        """Begin the calls that are missing."""
        for worker in self.workers.remote_workers():
            num_begun = sum(other == worker for other in self._pending.values())
            for _ in range(self._in_flight - num_begun):
                self._request(worker)

    def _arrived(self, ref: ObjectRef) -> Batch:
        """Return a worker's batch, and let the worker make another one unless it is lost for good.

        Raises:
            ActorLost: the worker was lost.
            RemoteError: its sampling raised an exception.
        """
        worker = self._pending.pop(ref)
        is_lost = False
        try:
            batch: Batch = get(ref)
        except ActorLost as error:
            is_lost = not error.is_restarting
            raise
        finally:
            if not is_lost:
                self._request(worker)
        return batch

    def _request(self, worker: Any) -> None:
        worker.set_weights.remote(self._weights, self._global_vars())
        self._pending[worker.sample.remote()] = worker
        self._num_weight_syncs += 1
        self._sent_since_broadcast += 1

    def _take(self, batch: Batch) -> None:
        """Add a worker's batch to the train batch, and learn from it when it is whole."""
        self._of_train_batch.append(batch)
        if sum(part.env_steps for part in self._of_train_batch) < self._train_batch_size:
            return
        train_batch = concat_batches(self._of_train_batch)
        self._of_train_batch = []
        self.num_steps_sampled += train_batch.env_steps
        self._train_batches.append(train_batch)
        if len(self._train_batches) < self._minibatch_buffer_size:
            return
        local_worker = self.workers.local_worker()
        local_worker.set_global_vars(self._global_vars())
        for train_batch in self._train_batches * self._num_sgd_iter:
            with self._grad_timer:
                info = local_worker.learn_on_batch(train_batch)
            self.learner_stats = _stats_of(info)
            self.num_steps_trained += train_batch.env_steps
        self._train_batches = []
        if self._sent_since_broadcast >= self._broadcast_interval:
            self._weights = put(local_worker.get_weights())
            self._sent_since_broadcast = 0

    def _replay(self) -> None:
        """Take earlier batches again, as many as `replay_proportion` says on average."""
        left = self._replay_proportion
        while random.random() < left:
            left -= 1
            batch = random.choice(self._kept)
            self._num_steps_replayed += batch.env_steps
            self._take(batch)
