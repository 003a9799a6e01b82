"""RolloutWorker: environments, policies and a sampler as one object, in one process and without any socket.

    worker = RolloutWorker(env_creator="CartPole-v1", policy=MyPolicy)
    batch = worker.sample()

The same class is what a worker process runs.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, Self, TypeVar

import numpy as np

from aiorl.acting.graph_policy import in_front_of
from aiorl.acting.policy import Policy
from aiorl.acting.policy_map import PolicyMap, PolicyMappingFn
from aiorl.data.concat import Batch, columns_of, compressed, concat_batches
from aiorl.data.fragment import Fragment
from aiorl.data.metrics import EpisodeColumns, RolloutMetrics
from aiorl.data.multi_agent_batch import MultiAgentBatch
from aiorl.data.sample_batch import SampleBatch
from aiorl.env.base_env import BaseEnv
from aiorl.env.kinds import facts_of
from aiorl.env.lockstep import TrainingDisabled
from aiorl.errors import ConfigError, EndOfData, SamplerDied
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
from aiorl.process.log_once import report
from aiorl.sampling import build, frameworks, rendezvous
from aiorl.sampling.arguments import DEFAULTS, EnvSource, WorkerArguments
from aiorl.sampling.callbacks import DefaultCallbacks
from aiorl.sampling.lockstep import LockstepSampler
from aiorl.sampling.minibatch_sgd import check_sgd, minibatch_sgd
from aiorl.sampling.policy_specs import policy_classes, policy_specs
from aiorl.sampling.sample_stream import Ahead, SampleStream
from aiorl.sampling.setup import ObservationFn
from aiorl.sampling.worker_policies import WorkerPolicies

__all__ = ["RolloutWorker", "get_global_worker"]

logger = logging.getLogger(__name__)

R = TypeVar("R")
Sampled = TypeVar("Sampled", Fragment, Batch)

_current: weakref.ref[RolloutWorker] | None = None


def get_global_worker() -> RolloutWorker | None:
    """The RolloutWorker made last in this process, while somebody keeps it."""
    return None if _current is None else _current()


class RolloutWorker(WorkerPolicies):
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
        preprocessors, filters: by policy id; where rewards are scaled, the statistic of a policy's returns is among the
            filters, as ``policy id/returns``.
        sampling_filters: policy id -> what stands before the policy where rows are made, see `in_front_of`.
        preprocessing_enabled: False where the environment's wrappers prepare observations.
        reward_limit: rewards of rows lie in ``[-limit, limit]``; 0 = wherever they do.
        callbacks: the hooks.
        policy_config: base config of the policies.
        worker_index, num_workers: place among the workers.
        tf_sess: always None; TensorFlow 2 has no sessions.
        io_context: what reader and writer were made with.
        reward_estimators: off-policy estimators.
        sampler: SyncSampler, AsyncSampler or LockstepSampler.
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
        max_env_restarts_per_hour: int = DEFAULTS.max_env_restarts_per_hour,
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

    @classmethod
    def of(cls, arguments: WorkerArguments, *, on_turn: Callable[[Self], None] | None = None) -> Self:
        """A worker made from settings that are checked already.

        Args:
            arguments: what it is made from.
            on_turn: as the attribute, but given the worker; an asynchronous sampler calls it before this returns.

        Raises:
            Exception: see the constructor.
        """
        worker = cls.__new__(cls)
        if on_turn is not None:
            worker.on_turn = functools.partial(on_turn, worker)
        worker._start(arguments, vars(arguments))
        return worker

    def _start(self, arguments: WorkerArguments, given: Mapping[str, Any]) -> None:
        """Build everything.

        Args:
            arguments: what the worker is made from.
            given: what ``creation_args`` tells.
        """
        global _current
        before, _current = _current, weakref.ref(self)
        self._creation_args = dict(given)
        self._arguments = arguments
        self._settings = settings = arguments.settings
        self.num_envs = settings.num_envs_per_worker
        self.rollout_fragment_length = settings.rollout_fragment_length * self.num_envs
        self.policy_config: dict[str, Any] = dict(arguments.policy_config or {})
        self.worker_index = arguments.worker_index
        self.num_workers = arguments.num_workers
        self.tf_sess: None = None
        self.global_vars = None
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
        polled = build.why_polled(arguments)
        maker = build.env_maker(arguments, polled)
        self.callbacks = (arguments.callbacks or DefaultCallbacks)()
        self.env = maker.make_first()
        self.preprocessing_enabled = not maker.is_deepmind
        self.reward_limit = float(maker.is_deepmind) if settings.clip_rewards is None else settings.reward_limit
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
        self.filters |= build.make_return_filters(policies)
        self.sampling_filters = self.filters | {
            policy_id: in_front_of(policy, self.filters[policy_id]) for policy_id, policy in policies.items()
        }
        build.set_rules_for_agents(self.env, arguments)
        self.async_env: BaseEnv = maker.to_base_env(self.env)
        self.io_context = IOContext(arguments.log_dir, self.policy_config, arguments.worker_index, self)
        self.reward_estimators: list[OffPolicyEstimator] = build.make_estimators(arguments, self.io_context)
        self._on_turn = _weakly(self._between_turns)
        self.sampler: build.Sampler = build.lockstep_sampler(
            self, arguments, polled, self._on_turn
        ) or build.polling_sampler(self, arguments, self._on_turn)
        if hasattr(self.sampler, "start"):  # one that samples in the background
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

    def sample_in_lockstep(self) -> tuple[Fragment, EpisodeColumns] | None:
        """A fragment and the episodes that ended since the last; None where environments are not in lockstep.

        A step that is not to be trained on ends lockstep for good: the environments begin anew, and ``sample`` has
        what comes of them.

        Raises:
            Exception: as ``sample``.
        """
        sampler = self.sampler
        if not isinstance(sampler, LockstepSampler):
            return None
        sampler.on_step = self.on_turn  # called at every step, so with nothing in between
        try:
            return self._reported(sampler.sample), sampler.take_episodes()
        except TrainingDisabled as error:
            logger.info("%s, so the environments begin anew and are polled from now on", error)
            self.sampler = build.polling_sampler(self, self._arguments, self._on_turn)
            self.input_reader = build.make_input_reader(self._arguments, self.io_context)
            return None

    def _reported(self, sample: Callable[[], Sampled]) -> Sampled:
        """What comes of sampling; how much is wanted, and what came, are logged."""
        report("sample_start", self.rollout_fragment_length)
        sampled = sample()
        report("sample_end", sampled.columns if isinstance(sampled, Fragment) else columns_of(sampled))
        return sampled

    def _sample(self) -> Batch:
        batch = self._reported(self._read_enough)
        self.output_writer.write(batch)
        if self.reward_estimators:
            # estimators evaluate policies, and those are not evaluated by two threads at once
            with self._paused():
                for part in episode_parts(batch):
                    for estimator in self.reward_estimators:
                        estimator.process(part)
        if self._settings.compress_observations:
            batch = compressed(batch, is_bulk=self._settings.compress_observations == "bulk")
        if self._settings.fake_sampler:
            self.last_batch = batch
        return batch

    def _read_enough(self) -> Batch:
        """What was read, after the callback has had it; all is kept for the next call if that raises."""
        limit = self.num_envs if self._settings.is_truncating else math.inf
        while not self._read or (
            len(self._read) < limit and sum(batch.env_steps for batch in self._read) < self.rollout_fragment_length
        ):
            try:
                self._read.append(self._read_one())
            except EndOfData:  # what was read before is the last batch of stored experience
                if not self._read:
                    raise
                break
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

    # --- the worker itself ---

    def foreach_env(self, function: Callable[[Any], R]) -> list[R]:
        """What the function gives for each environment; for the BaseEnv where it shows none."""
        envs = list(self.async_env.get_unwrapped())
        return [function(env) for env in envs or [self.async_env]]

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
        if sampler is not None and hasattr(sampler, "end_soon"):
            sampler.end_soon()
        if env is not None:
            env.interrupt()  # a thread that waits for clients or processes, and clients that wait for it

    def _between_turns(self) -> None:
        if self.on_turn is not None:
            self.on_turn()

    def _paused(self) -> contextlib.AbstractContextManager[None]:
        """Neither observations are processed nor policies evaluated, but by the thread that calls this."""
        paused: contextlib.AbstractContextManager[None] = self.sampler.paused()
        return paused


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """The same method of an object that is not kept alive; nothing, once it is gone."""
    found = weakref.WeakMethod(method)

    def call() -> None:
        bound = found()
        if bound is not None:
            bound()

    return call
