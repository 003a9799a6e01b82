"""RolloutWorker: environments, policies and a sampler as one object, in one process and without any socket.

    worker = RolloutWorker(env_creator="CartPole-v1", policy=MyPolicy)
    batch = worker.sample()

The same class is what a worker process runs.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, Self, TypeVar

import numpy as np

from aiorl.callbacks import DefaultCallbacks
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.concat import Batch, concat_batches
from aiorl.data.metrics import RolloutMetrics
from aiorl.data.multi_agent_batch import MultiAgentBatch
from aiorl.data.sample_batch import SampleBatch
from aiorl.env.base_env import BaseEnv
from aiorl.env.kinds import facts_of
from aiorl.errors import ConfigError, SamplerDied
from aiorl.log_once import log_once, summarize
from aiorl.observation.filters import ObservationFilter
from aiorl.offline.estimators import OffPolicyEstimate, OffPolicyEstimator, episode_parts
from aiorl.offline.io import (
    InputCreator,
    InputReader,
    IOContext,
    OutputCreator,
    OutputWriter,
    noop_output,
    sampler_input,
)
from aiorl.policy.policy import Policy
from aiorl.policy.policy_map import PolicyMap, PolicyMappingFn
from aiorl.rollout import build, frameworks, learning, rendezvous
from aiorl.rollout.arguments import DEFAULTS, EnvSource, WorkerArguments
from aiorl.rollout.interface import EvaluatorInterface
from aiorl.rollout.minibatch_sgd import check_sgd, minibatch_sgd
from aiorl.rollout.policy_specs import policy_classes, policy_specs
from aiorl.rollout.sample_stream import Ahead, SampleStream
from aiorl.rollout.saved_state import SavedState, change_all, check_filter_states, dump_state, load_state
from aiorl.sampler.async_sampler import AsyncSampler
from aiorl.sampler.setup import ObservationFn

__all__ = ["RolloutWorker", "get_global_worker"]

logger = logging.getLogger(__name__)

R = TypeVar("R")

_current: weakref.ref[RolloutWorker] | None = None


def get_global_worker() -> RolloutWorker | None:
    """The RolloutWorker made last in this process, while somebody keeps it."""
    return None if _current is None else _current()


class RolloutWorker(EvaluatorInterface):
    """Samples experience with its policies, and lets them learn.

    One thread at a time may call its methods; but one may sample while another sets weights, say, or also samples.

    Attributes:
        env: environment 0, with its wrappers.
        async_env: all environments, as a BaseEnv.
        num_envs: number of environments asked for.
        rollout_fragment_length: T, environment steps a batch aims at: the argument times ``num_envs``.
        policy_map: policy id -> policy.
        policies_to_train: ids of the policies that learn, in order.
        multiagent: the policy ids differ from exactly the default one.
        preprocessors, filters: by policy id.
        preprocessing_enabled: False where the environment's wrappers prepare observations.
        callbacks: the hooks.
        policy_config: base config of the policies.
        worker_index, num_workers: place among the workers.
        tf_sess: always None; TensorFlow 2 has no sessions.
        io_context: what reader and writer were made with.
        reward_estimators: off-policy estimators.
        sampler: SyncSampler or AsyncSampler.
        input_reader: where batches come from.
        output_writer: where copies of them go.
        samples: the results of ``sample()`` as an endless iterator, plain or asynchronous.
        last_batch: what ``fake_sampler`` gives again and again, None before the first batch.
        global_vars: the last global variables set, or None.
        on_turn: called between two turns of the sampler, in the thread that samples, where weights may be set; what
            it raises comes out of ``sample()``. A synchronous sampler goes on from there, an asynchronous one ends.
    """

    on_turn: Callable[[], None] | None = None

    def __init__(
        self,
        env_creator: EnvSource,
        policy: type[Policy] | Mapping[str, tuple[type[Policy], Any, Any, dict[str, Any]]],
        policy_mapping_fn: PolicyMappingFn | None = None,
        policies_to_train: Collection[str] | None = None,
        tf_session_creator: Callable[[], Any] | None = None,
        rollout_fragment_length: int = 100,
        batch_mode: str = DEFAULTS.batch_mode,
        episode_horizon: int | None = DEFAULTS.horizon,
        preprocessor_pref: str = DEFAULTS.preprocessor_pref,
        sample_async: bool = DEFAULTS.sample_async,
        compress_observations: bool | str = DEFAULTS.compress_observations,
        num_envs: int = DEFAULTS.num_envs_per_worker,
        observation_fn: ObservationFn | None = None,
        observation_filter: str = DEFAULTS.observation_filter,
        clip_rewards: bool | float | None = DEFAULTS.clip_rewards,
        clip_actions: bool = DEFAULTS.clip_actions,
        env_config: Mapping[str, Any] | None = None,
        model_config: Mapping[str, Any] | None = None,
        policy_config: Mapping[str, Any] | None = None,
        worker_index: int = 0,
        num_workers: int = 0,
        monitor_path: str | None = None,
        log_dir: str | None = None,
        log_level: str | None = None,
        callbacks: type[DefaultCallbacks] | None = None,
        input_creator: InputCreator = sampler_input,
        input_evaluation: Collection[str] = frozenset(),
        output_creator: OutputCreator = noop_output,
        remote_worker_envs: bool = DEFAULTS.remote_worker_envs,
        remote_env_batch_wait_ms: float = DEFAULTS.remote_env_batch_wait_ms,
        soft_horizon: bool = DEFAULTS.soft_horizon,
        no_done_at_end: bool = DEFAULTS.no_done_at_end,
        seed: int | None = DEFAULTS.seed,
        extra_python_environs: Mapping[str, Any] | None = None,
        fake_sampler: bool = DEFAULTS.fake_sampler,
    ) -> None:
        """Build everything; an asynchronous sampler begins to sample.

        Arguments that the config has too are explained in docs/config.md, the others by WorkerArguments.

        If it fails, what was built is stopped.

        Raises:
            ValueError: an argument that cannot be honoured.
            AssertionError: a reader or writer of another type; a filter that sample_async cannot use.
            ImportError: a policy needs TensorFlow, which is not installed.
            RuntimeError: GPUs are granted that TensorFlow does not see.
        """
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self._start(WorkerArguments.of(given), given)

    def _start(self, arguments: WorkerArguments, given: Mapping[str, Any]) -> None:
        """Build everything; subclasses that have settings from elsewhere call it in place of the constructor.

        Args:
            arguments: what the worker is made from.
            given: what ``creation_args`` tells.
        """
        global _current
        before, _current = _current, weakref.ref(self)
        self._creation_args = dict(given)
        self._settings = settings = arguments.settings
        self.num_envs = settings.num_envs_per_worker
        self.rollout_fragment_length = settings.rollout_fragment_length * self.num_envs
        self.policy_config: dict[str, Any] = dict(arguments.policy_config or {})
        self.worker_index = arguments.worker_index
        self.num_workers = arguments.num_workers
        self.tf_sess: None = None
        self.global_vars: dict[str, Any] | None = None
        self.last_batch: Batch | None = None
        self._read: list[Batch] = []
        self._sampling = threading.RLock()
        self._is_stopped = False
        try:
            self._build(arguments)
        except BaseException:
            if get_global_worker() is self:
                _current = before
            self._stop_what_there_is()
            raise

    def _build(self, arguments: WorkerArguments) -> None:
        """Build everything, in the documented order."""
        settings = arguments.settings
        build.set_environment_variables(settings.extra_python_environs_for_worker)
        self._ahead = Ahead()
        classes = policy_classes(arguments.policy)
        frameworks.enable_eager(self.policy_config, classes)
        build.set_up_logging(arguments.log_level, arguments.worker_index)
        maker = build.env_maker(arguments)
        self.callbacks = (arguments.callbacks or DefaultCallbacks)()
        self.env = maker.make_first()
        self.preprocessing_enabled = not maker.is_deepmind
        facts = facts_of(self.env, maker.env_id)
        specs = policy_specs(arguments.policy, facts.observation_space, facts.action_space)
        if settings.seed is not None:
            maker.check_seedable(self.env)
            frameworks.seed_generators(settings.seed, classes)
        policies, self.preprocessors = build.make_policies(specs, arguments, preprocess=self.preprocessing_enabled)
        self.policy_map = PolicyMap(policies, arguments.policy_mapping_fn, arguments.policies_to_train)
        self.policies_to_train = list(self.policy_map.trainable_ids)
        self.multiagent = self.policy_map.is_multi_agent
        facts.check_policies(specs, "policy")
        self.filters = build.make_filters(self.preprocessors, settings.observation_filter)
        build.set_rules_for_agents(self.env, arguments)
        self.async_env: BaseEnv = maker.to_base_env(self.env)
        self.io_context = IOContext(arguments.log_dir, self.policy_config, arguments.worker_index, self)
        self.reward_estimators: list[OffPolicyEstimator] = build.make_estimators(arguments, self.io_context)
        self.sampler: build.Sampler = build.make_sampler(
            self,
            arguments,
            base_env=self.async_env,
            policies=self.policy_map,
            preprocessors=self.preprocessors,
            filters=self.filters,
            callbacks=self.callbacks,
            is_deepmind=maker.is_deepmind,
            on_turn=_weakly(self._between_turns),
        )
        if isinstance(self.sampler, AsyncSampler):
            self.sampler.start()
        self.input_reader: InputReader = build.make_input_reader(arguments, self.io_context)
        self.output_writer: OutputWriter = build.make_output_writer(arguments, self.io_context)
        if self.worker_index == 0:
            logger.info("Policies: %s", dict(self.policy_map))
            logger.info("Preprocessors: %s", self.preprocessors)
            logger.info("Filters: %s", self.filters)

    # --- sampling ---

    def sample(self) -> Batch:
        """A batch of ``rollout_fragment_length`` environment steps, or of whole episodes with at least as many.

        While one thread samples, others wait.

        Raises:
            SamplerDied: the worker was stopped.
            ConfigError: the reader gave what is no batch.
            Exception: whatever the environment, a policy, a callback or the reader raised. Batches read before are
                kept for the next call.
        """
        with self._sampling:
            if self._is_stopped:
                raise SamplerDied("the worker was stopped; make another one to go on sampling")
            if self._settings.fake_sampler and self.last_batch is not None:
                return self.last_batch
            return self._sample()

    def _sample(self) -> Batch:
        if log_once("sample_start"):
            logger.info("Sampling %d environment steps", self.rollout_fragment_length)
        batch = self._read_enough()
        self.output_writer.write(batch)
        if self.reward_estimators:
            # estimators evaluate policies, and those are not evaluated by two threads at once
            with self._paused():
                for part in episode_parts(batch):
                    for estimator in self.reward_estimators:
                        estimator.process(part)
        if log_once("sample_end"):
            logger.info("Sampled: %s", _summary(batch))
        if self._settings.compress_observations:
            batch = _compressed(batch, is_bulk=self._settings.compress_observations == "bulk")
        if self._settings.fake_sampler:
            self.last_batch = batch
        return batch

    def _read_enough(self) -> Batch:
        """What was read, after the callback has had it; all is kept for the next call if that raises."""
        limit = self.num_envs if self._settings.is_truncating else math.inf
        while not self._read or (
            len(self._read) < limit and sum(batch.env_steps for batch in self._read) < self.rollout_fragment_length
        ):
            self._read.append(self._read_one())
        batches, self._read = self._read, []
        try:
            batch = concat_batches(batches)
            self.callbacks.on_sample_end(worker=self, samples=batch)
        except BaseException:
            self._read = batches + self._read
            raise
        return batch

    def _read_one(self) -> Batch:
        batch: object = self.input_reader.next()
        if not isinstance(batch, SampleBatch | MultiAgentBatch):
            raise ConfigError(
                f"the input reader {type(self.input_reader).__name__} gave a {type(batch).__name__}, expected a "
                "SampleBatch or a MultiAgentBatch.",
                key="input",
                value=batch,
            )
        return batch

    @property
    def samples(self) -> SampleStream:  # noqa: D102 (the class describes it)
        return SampleStream(self.sample, self._ahead)

    def sample_with_count(self) -> tuple[Batch, int]:
        """``sample()`` and the batch's count."""
        batch = self.sample()
        return batch, batch.count

    def sample_and_learn(
        self,
        expected_batch_size: int,
        num_sgd_iter: int,
        sgd_minibatch_size: int,
        standardize_fields: Collection[str],
    ) -> tuple[dict[str, Any], int]:
        """Sample, and let the policies learn in minibatches.

        Args:
            expected_batch_size: count that the batch must have.
            num_sgd_iter: passes over the batch.
            sgd_minibatch_size: rows of a minibatch; 0 = all at once.
            standardize_fields: columns brought to mean 0 and deviation 1 before.
        Returns: figures by policy id, means over the last pass; and the batch's count.

        Raises:
            AssertionError: the batch has another count.
            ConfigError: a number of passes or rows that is none; nothing is sampled then (a ValueError).
        """
        check_sgd(num_sgd_iter, sgd_minibatch_size, standardize_fields)
        batch = self.sample()
        if batch.count != expected_batch_size:
            raise AssertionError(f"the batch has a count of {batch.count}, expected {expected_batch_size}")
        info = minibatch_sgd(
            batch,
            self.policies_to_train,
            self.learn_on_batch,
            num_sgd_iter=num_sgd_iter,
            sgd_minibatch_size=sgd_minibatch_size,
            standardize_fields=standardize_fields,
            rng=np.random.default_rng(np.random.randint(2**31)),
        )
        return info, batch.count

    def get_metrics(self) -> list[RolloutMetrics | OffPolicyEstimate]:
        """Episodes that ended since the last call, then estimates made since."""
        metrics: list[RolloutMetrics | OffPolicyEstimate] = [*self.sampler.get_metrics()]
        for estimator in self.reward_estimators:
            metrics += estimator.get_metrics()
        return metrics

    # --- learning ---

    def compute_gradients(self, samples: Batch) -> tuple[Any, dict[str, Any]]:
        """Gradients and figures; see ``rollout.learning``."""
        with self._paused():
            return learning.compute_gradients(self.policy_map, samples)

    def apply_gradients(self, gradients: Any) -> dict[str, Any]:
        """Apply gradients, the default policy's or by policy id; see ``rollout.learning``."""
        with self._paused():
            return learning.apply_gradients(self.policy_map, gradients)

    def learn_on_batch(self, samples: Batch) -> dict[str, Any]:
        """Update policies, the default one or those that learn by id; see ``rollout.learning``."""
        with self._paused():
            return learning.learn_on_batch(self.policy_map, samples)

    # --- weights, state, global variables ---

    def get_weights(self, policies: Collection[str] | None = None) -> dict[str, Any]:
        """Weights of the policies named, None = all; names of no policy are passed over. A string is one name."""
        names = [policies] if isinstance(policies, str) else policies
        with self._paused():
            return {
                policy_id: policy.get_weights()
                for policy_id, policy in self.policy_map.items()
                if names is None or policy_id in names
            }

    def set_weights(self, weights: Mapping[str, Any], global_vars: Mapping[str, Any] | None = None) -> None:
        """Take up weights of the policies given, then global variables if there are any; between two turns.

        Raises:
            UnknownPolicyError: no policy has that id; nothing is changed then (a KeyError).
            PolicyError: weights that do not fit their policy; all policies keep theirs then (a ValueError).
        """
        policies = {policy_id: self.policy_map[policy_id] for policy_id in weights}
        with self._paused():
            change_all(
                policies, weights, lambda policy: policy.get_weights(), lambda policy, new: policy.set_weights(new)
            )
            if global_vars:
                self.set_global_vars(global_vars)

    def get_filters(self, flush_after: bool = False) -> dict[str, ObservationFilter]:
        """Copies of the filters by policy id; with the flag their deltas are forgotten here afterwards."""
        with self._paused():
            copies = {policy_id: found.as_serializable() for policy_id, found in self.filters.items()}
            if flush_after:
                for found in self.filters.values():
                    found.clear_buffer()
            return copies

    def sync_filters(self, new_filters: Mapping[str, ObservationFilter]) -> None:
        """Adopt the statistics given, with the own unsent deltas on top.

        Raises:
            AssertionError: a policy's filter is missing; nothing is changed then.
            ValueError: a filter of another kind or shape; nothing is changed then.
        """
        self._check_filters(new_filters)
        with self._paused():
            for policy_id, found in self.filters.items():
                found.copy().sync(new_filters[policy_id])
            for policy_id, found in self.filters.items():
                found.sync(new_filters[policy_id])

    def save(self) -> bytes:
        """Filters and states of the policies; deltas not sent yet stay pending.

        Raises:
            CheckpointError: a policy's state cannot be saved.
        """
        with self._paused():
            return dump_state(
                SavedState(
                    {policy_id: found.state() for policy_id, found in self.filters.items()},
                    {policy_id: policy.get_state() for policy_id, policy in self.policy_map.items()},
                )
            )

    def restore(self, data: bytes) -> None:
        """Go on from what ``save`` gave; deltas pending or in flight are forgotten. If it raises, nothing is changed.

        Raises:
            CheckpointError: bytes that ``save`` did not give, or another kind of filter.
            AssertionError: a policy's filter is missing.
            UnknownPolicyError: no policy has that id (a KeyError).
            PolicyError: a state that does not fit its policy (a ValueError).
        """
        saved = load_state(data)
        self._check_filters(saved.filters)
        policies = {policy_id: self.policy_map[policy_id] for policy_id in saved.policies}
        with self._paused():
            check_filter_states(self.filters, saved.filters)
            change_all(
                policies, saved.policies, lambda policy: policy.get_state(), lambda policy, new: policy.set_state(new)
            )
            for policy_id, found in self.filters.items():
                found.restore(saved.filters[policy_id])

    def set_global_vars(self, global_vars: Mapping[str, Any]) -> None:
        """Tell every policy of new global variables, and keep them."""
        with self._paused():
            for policy in self.policy_map.values():
                policy.on_global_var_update(global_vars)
            self.global_vars = dict(global_vars)

    def get_global_vars(self) -> dict[str, Any] | None:
        """The global variables set last, None before."""
        return self.global_vars

    # --- environments and policies ---

    def foreach_env(self, function: Callable[[Any], R]) -> list[R]:
        """What the function gives for each environment; for the BaseEnv where it shows none."""
        envs = list(self.async_env.get_unwrapped())
        return [function(env) for env in envs or [self.async_env]]

    def get_policy(self, policy_id: str = DEFAULT_POLICY_ID) -> Policy | None:
        """The policy of that id, or None."""
        return self.policy_map.get(policy_id)

    def for_policy(self, function: Callable[[Policy], R], policy_id: str = DEFAULT_POLICY_ID) -> R:
        """What the function gives for a policy.

        Raises:
            UnknownPolicyError: no policy has that id (a KeyError).
        """
        return function(self.policy_map[policy_id])

    def foreach_policy(self, function: Callable[[Policy, str], R]) -> list[R]:
        """What the function gives for each policy and its id."""
        return [function(policy, policy_id) for policy_id, policy in self.policy_map.items()]

    def foreach_trainable_policy(self, function: Callable[[Policy, str], R]) -> list[R]:
        """The same for the policies that learn."""
        return [function(self.policy_map[policy_id], policy_id) for policy_id in self.policies_to_train]

    def export_policy_model(self, export_dir: str, policy_id: str = DEFAULT_POLICY_ID) -> None:
        """Write a policy's model for use elsewhere."""
        self.policy_map[policy_id].export_model(export_dir)

    def import_policy_model_from_h5(self, import_file: str, policy_id: str = DEFAULT_POLICY_ID) -> None:
        """Read a policy's weights from a Keras h5 file."""
        self.policy_map[policy_id].import_model_from_h5(import_file)

    def export_policy_checkpoint(
        self, export_dir: str, filename_prefix: str = "model", policy_id: str = DEFAULT_POLICY_ID
    ) -> None:
        """Write a policy's weights for use elsewhere."""
        self.policy_map[policy_id].export_checkpoint(export_dir, filename_prefix)

    # --- the worker itself ---

    @classmethod
    def as_remote(
        cls,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        memory: int | None = None,
        object_store_memory: int | None = None,
        resources: Mapping[str, float] | None = None,
    ) -> rendezvous.LauncherSpec:
        """What a launcher is told of a worker of this class, with limits where given.

        Raises:
            ConfigError: a limit that cannot be had (also a ValueError).
        """
        return rendezvous.LauncherSpec(cls, num_cpus, num_gpus, memory, object_store_memory, dict(resources or {}))

    def setup_torch_data_parallel(self, url: str, world_rank: int, world_size: int, backend: str) -> None:
        """Let every policy take part in data-parallel learning; the name is that of the reference.

        Raises:
            ConfigError: a policy that cannot; none has joined then (also a ValueError).
        """
        rendezvous.join_data_parallel(self.policy_map, url, world_rank, world_size, backend)

    def get_node_ip(self) -> str:
        """The address under which other hosts reach this one."""
        return rendezvous.node_ip()

    def find_free_port(self) -> int:
        """A TCP port that can be bound now."""
        return rendezvous.find_free_port()

    def creation_args(self) -> dict[str, Any]:
        """The arguments it was made with."""
        return dict(self._creation_args)

    def interrupt(self) -> None:
        """Let a ``sample`` that waits for environments or clients raise, and every later one; never waits itself.

        Any thread may call. An environment that blocks is not interrupted.
        """
        sampler, env = getattr(self, "sampler", None), getattr(self, "async_env", None)
        if sampler is not None:
            sampler.stop(timeout_s=0.0)
        if env is not None:
            env.interrupt()

    def stop(self) -> None:
        """End the sampler, close environments, reader and writer; may be called more than once.

        A ``sample`` that another thread is in ends at its next turn, and every later one raises.

        Raises:
            Exception: whatever one of them raised; the others are closed all the same.
        """
        self._is_stopped = True
        sampler, env = getattr(self, "sampler", None), getattr(self, "async_env", None)
        with contextlib.ExitStack() as last_first:
            for stream in (getattr(self, "output_writer", None), getattr(self, "input_reader", None)):
                if stream is not None:
                    last_first.callback(stream.close)
            if env is not None:
                last_first.callback(env.stop)
            elif callable(close := getattr(getattr(self, "env", None), "close", None)):
                last_first.callback(close)
            if sampler is not None:
                last_first.callback(sampler.stop)
            last_first.callback(self.interrupt)  # a sampler that waits has to be woken

    def _stop_what_there_is(self) -> None:
        """Stop after an error, which is the one to be seen."""
        try:
            self.stop()
        except Exception:
            logger.exception("After its construction had failed, not all of the worker could be closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __del__(self) -> None:
        sampler, env = getattr(self, "sampler", None), getattr(self, "async_env", None)
        if isinstance(sampler, AsyncSampler):
            sampler.end_soon()
        if env is not None:
            env.interrupt()  # a thread that waits for clients or processes, and clients that wait for it

    def _between_turns(self) -> None:
        if self.on_turn is not None:
            self.on_turn()

    def _paused(self) -> contextlib.AbstractContextManager[None]:
        """Neither observations are processed nor policies evaluated, but by the thread that calls this."""
        return self.sampler.paused()

    def _check_filters(self, given: Mapping[str, Any]) -> None:
        missing = sorted(self.filters.keys() - given.keys())
        if missing:
            raise AssertionError(f"no filters are given for {', '.join(missing)}; given are {sorted(given)}")


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """The same method of an object that is not kept alive; nothing, once it is gone."""
    found = weakref.WeakMethod(method)

    def call() -> None:
        bound = found()
        if bound is not None:
            bound()

    return call


def _summary(batch: Batch) -> str:
    return summarize(batch if isinstance(batch, SampleBatch) else batch.policy_batches)


def _compressed(batch: Batch, *, is_bulk: bool) -> Batch:
    """The same batch with compressed observations; who has the one given keeps it as it is."""
    packed: Batch
    if isinstance(batch, SampleBatch):
        packed = batch.slice(0, batch.count)
        packed.env_steps = batch.env_steps
    else:
        parts = {policy_id: rows.slice(0, rows.count) for policy_id, rows in batch.policy_batches.items()}
        packed = MultiAgentBatch(parts, batch.count)
    packed.compress("bulk" if is_bulk else "rows")
    return packed
