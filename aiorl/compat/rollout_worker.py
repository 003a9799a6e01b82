"""RolloutWorker: a sampling worker with RLlib's interface, with 36 keyword arguments and policies
that learn.

worker = RolloutWorker(env_creator="CartPole-v1", policy=MyPolicy)
batch = worker.sample()
"""

from __future__ import annotations

import asyncio
import functools
import socket
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

import numpy as np

from aiorl.acting.filters import ObservationFilter, check_states
from aiorl.acting.policy import Policy
from aiorl.acting.policy_map import PolicyMappingFn
from aiorl.actors.references import method
from aiorl.compat import learning
from aiorl.compat.arguments import worker_settings
from aiorl.compat.saved_state import SavedState, dump_state, load_state
from aiorl.config.code import import_object
from aiorl.config.worker import WorkerConfig
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.metrics import RolloutMetrics
from aiorl.data.sample_batch import Batch
from aiorl.env.registry import EnvSource
from aiorl.errors import ConfigError
from aiorl.offline.estimators import OffPolicyEstimate, OffPolicyEstimator
from aiorl.offline.io import (
    InputCreator,
    InputReader,
    IOContext,
    OutputCreator,
    OutputWriter,
    noop_output,
    sampler_input,
)
from aiorl.sampling.callbacks import DefaultCallbacks
from aiorl.sampling.settings import ObservationFn
from aiorl.sampling.worker import Worker, change_all

DEFAULTS = WorkerConfig()
_ELSEWHERE = ("192.0.2.1", 9)  # TEST-NET-1 of RFC 5737; no data is sent there

P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W")


def _function(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function that an import path names; a function is returned as it is.

    Raises:
        ConfigError: it can't be imported.
    """
    imported: Callable[P, R] = _imported(function, "function")
    return imported


def _imported(value: Any, key: str) -> Any:
    return import_object(value, key=key) if isinstance(value, str) else value


class EvaluatorInterface(ABC):
    """Interface of an object that samples, and computes and applies gradients."""

    @abstractmethod
    def sample(self) -> Batch:
        """Return a batch of experience ``[B, ...]``, sampled with the current weights."""

    @abstractmethod
    def learn_on_batch(self, samples: Batch) -> dict[str, Any]:
        """Update the policies on a batch.

        Args:
            samples: rows ``[B, ...]`` of one or several policies.

        Returns:
            Figures about the update.
        """

    @abstractmethod
    def compute_gradients(self, samples: Batch) -> tuple[Any, dict[str, Any]]:
        """Compute gradients on a batch.

        Args:
            samples: rows ``[B, ...]`` of one or several policies.

        Returns:
            The gradients, and figures about them with ``batch_count``.
        """

    @abstractmethod
    def apply_gradients(self, gradients: Any) -> dict[str, Any]:
        """Update the policies with gradients.

        Args:
            gradients: gradients from ``compute_gradients``.

        Returns:
            Figures about the update.
        """

    @abstractmethod
    def get_weights(self, policies: Collection[str] | None = None) -> dict[str, Any]:
        """Return weights by policy id.

        Args:
            policies: ids of the policies; None takes all.
        """

    @abstractmethod
    def set_weights(
        self, weights: Mapping[str, Any], global_vars: Mapping[str, Any] | None = None
    ) -> None:
        """Set weights by policy id.

        Args:
            weights: weights in the form that ``get_weights`` returns.
            global_vars: global variables for all policies, such as ``timestep``; None for no
                change.
        """

    def get_host(self) -> str:
        """Return the name of this host."""
        return socket.gethostname()

    def apply(
        self, function: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call a function with this object and the arguments, and return its result.

        Args:
            function: the function, or its import path; its first argument is this object.
            *args: further arguments.
            **kwargs: keyword arguments.
        """
        return _function(function)(self, *args, **kwargs)


class SampleStream:
    """Endless iterator over a worker's batches.

    ``for batch in stream`` samples in the caller's thread, ``async for batch in stream`` in another
    thread. Each batch is returned once, to the next caller. Use only one of the two forms at a
    time.
    """

    def __init__(
        self, sample: Callable[[], Batch], ahead: deque[Future[Batch]] | None = None
    ) -> None:
        """Make a stream.

        Args:
            sample: function that returns the next batch.
            ahead: unclaimed batches, finished or in progress, oldest first; streams of one worker
                share them.
        """
        self._sample = sample
        self._ahead = deque() if ahead is None else ahead

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._ahead:
            return self._ahead.popleft().result()
        return self._sample()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        """Return the next batch without blocking the event loop.

        Cancellation does not stop sampling; the next caller gets the batch.
        """
        future = self._ahead.popleft() if self._ahead else _in_thread(self._sample)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            self._ahead.appendleft(future)
            raise


def _in_thread(sample: Callable[[], Batch]) -> Future[Batch]:
    """Call ``sample`` in a daemon thread, so that a blocked call does not keep the process
    alive.
    """
    future: Future[Batch] = Future()
    # it can no longer be cancelled, but its waiter can
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(sample())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="aiorl-sample", daemon=True).start()
    return future


_OLD_ARGUMENTS = {
    "policy_graph": "It is called policy.",
    "batch_steps": (
        "It is called rollout_fragment_length: env steps of each environment in a batch."
    ),
    "sample_batch_size": (
        "It is called rollout_fragment_length: env steps of each environment in a batch."
    ),
    "input_evaluation_method": (
        "It is called input_evaluation, and takes a collection such as ['is', 'wis']."
    ),
    "registry": "aiorl.register_env registers environments by name. Leave it out.",
}
"""Arguments of RLlib's earlier workers -> what to write here."""
_OLD_METHODS = {"compute_apply": "It is called learn_on_batch."}
"""Methods of RLlib's earlier workers -> what to write here."""


def _naming_successors(
    init: Callable[Concatenate[W, P], None],
) -> Callable[Concatenate[W, P], None]:
    """Refuse arguments that have other names now."""

    @functools.wraps(init)
    def checked(self: W, /, *args: P.args, **kwargs: P.kwargs) -> None:
        for name in kwargs.keys() & _OLD_ARGUMENTS.keys():
            raise TypeError(
                f"{type(self).__name__} takes no argument {name!r}. {_OLD_ARGUMENTS[name]}"
            )
        init(self, *args, **kwargs)

    return checked


_CODE = (
    "policy",
    "policy_mapping_fn",
    "observation_fn",
    "callbacks",
    "input_creator",
    "output_creator",
)
"""Arguments that can be import paths; ``env_creator`` can always be one."""


if TYPE_CHECKING:  # `RolloutWorker.__getattr__` passes on the attributes of both
    from aiorl.compat.remote import RemoteClass

    class _Worker(Worker):
        """Attributes of a worker and of its reader of batches.

        Attributes:
            rollout_fragment_length: the minimum of environment steps in a batch.
            io_context: argument that reader and writer were made with.
            input_reader: source of the batches.
            output_writer: writer of copies of them.
            reward_estimators: off-policy estimators.
            callbacks: the hooks.
            last_batch: batch that ``fake_sampler`` returns repeatedly, None before the first batch.
        """

        rollout_fragment_length: int
        io_context: IOContext
        input_reader: InputReader
        output_writer: OutputWriter
        reward_estimators: list[OffPolicyEstimator]
        callbacks: DefaultCallbacks
        last_batch: Batch | None
else:
    _Worker = object


class RolloutWorker(EvaluatorInterface, _Worker):
    """Worker that samples experience with its policies and lets them learn.

    It wraps a `sampling.Worker` and has all attributes of it and of its reader of batches; setting
    them sets theirs.

    Attributes:
        tf_sess: always None; TensorFlow 2 has no sessions.
    """

    tf_sess: None = None

    @_naming_successors
    def __init__(
        self,
        env_creator: EnvSource,
        policy: type[Policy] | str | Mapping[str, tuple[type[Policy], Any, Any, dict[str, Any]]],
        policy_mapping_fn: PolicyMappingFn | str | None = None,
        policies_to_train: Collection[str] | None = None,
        tf_session_creator: Callable[[], Any] | None = None,
        rollout_fragment_length: int = 100,
        batch_mode: str = DEFAULTS.batch_mode,
        episode_horizon: int | None = DEFAULTS.horizon,
        preprocessor_pref: str = DEFAULTS.preprocessor_pref,
        sample_async: bool = DEFAULTS.sample_async,
        compress_observations: bool | str = DEFAULTS.compress_observations,
        num_envs: int = DEFAULTS.num_envs_per_worker,
        observation_fn: ObservationFn | str | None = None,
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
        callbacks: type[DefaultCallbacks] | str | None = None,
        input_creator: InputCreator | str = sampler_input,
        input_evaluation: Collection[str] = frozenset(),
        output_creator: OutputCreator | str = noop_output,
        remote_worker_envs: bool = DEFAULTS.remote_worker_envs,
        remote_env_batch_wait_ms: float = DEFAULTS.remote_env_batch_wait_ms,
        soft_horizon: bool = DEFAULTS.soft_horizon,
        no_done_at_end: bool = DEFAULTS.no_done_at_end,
        seed: int | None = DEFAULTS.seed,
        extra_python_environs: Mapping[str, Any] | None = None,
        fake_sampler: bool = DEFAULTS.fake_sampler,
        max_env_restarts_per_hour: int = DEFAULTS.max_env_restarts_per_hour,
    ) -> None:
        """Build everything; an asynchronous sampler starts to sample.

        Names and order of the arguments are RLlib's. Many of them are config keys too, which
        docs/config.md explains in full. A class or function can also be given by its import path,
        ``package.module:Name``. If the constructor fails, it stops the parts that it has built.

        Args:
            env_creator: function that makes an environment from an EnvContext; a name, see
                `aiorl.env.registry`; or a class.
            policy: a Policy class, or policy id -> (class, observation space, action space,
                config).
            policy_mapping_fn: agent id -> policy id, called once per agent and episode; None = the
                default policy.
            policies_to_train: ids of the policies that learn; None or empty = all.
            tf_session_creator: must be None; TensorFlow 2 has no sessions.
            rollout_fragment_length: env steps per environment in a batch.
            batch_mode: "truncate_episodes", or "complete_episodes" for batches that end with an
                episode.
            episode_horizon: env steps after which an episode ends; None = the environment's own
                limit.
            preprocessor_pref: "deepmind" or "rllib", preprocessing of Atari frames.
            sample_async: True samples continuously in the background.
            compress_observations: True compresses observations row by row, "bulk" by whole columns.
            num_envs: number of environments.
            observation_fn: function that rewrites each environment's observations.
            observation_filter: "NoFilter", "MeanStdFilter" or "ConcurrentMeanStdFilter".
            clip_rewards: True clips rewards for learning to [-1, 1], a number x to [-x, x]; None
                does so only for DeepMind-wrapped Atari.
            clip_actions: True clips actions to their space before the environment receives them.
            env_config: config of the environment.
            model_config: settings of the policies' networks.
            policy_config: base config of every policy; the policy's own config overrides it.
            worker_index: index of the worker, 0 = local.
            num_workers: number of remote workers.
            monitor_path: directory for episode statistics and videos; None for none.
            log_dir: the run's directory, for output; None for none.
            log_level: level of the ``aiorl`` logger; None leaves it unchanged.
            callbacks: class of the hooks; None for none.
            input_creator: makes the InputReader from an IOContext; the default reads from the
                sampler.
            input_evaluation: any of "is", "wis" and "simulation", ways to evaluate stored input.
            output_creator: makes the OutputWriter from an IOContext; the default writes nothing.
            remote_worker_envs: True runs each environment in its own process.
            remote_env_batch_wait_ms: milliseconds that a poll of such environments waits for more
                of them.
            soft_horizon: True ends episodes at the horizon without resetting the environment.
            no_done_at_end: True never records done.
            seed: seed of the environments and of all random draws; None is random.
            extra_python_environs: environment variables to set in this process.
            fake_sampler: True returns the first batch again and again.
            max_env_restarts_per_hour: replacements of one environment's failed process per hour;
                with 0, each failure is an error.

        Raises:
            ValueError: an argument is wrong or cannot be applied.
            AssertionError: a reader or writer has the wrong type, or sample_async cannot use the
                filter.
            ImportError: a policy needs TensorFlow, which is not installed.
            RuntimeError: the settings grant GPUs that TensorFlow does not see.
        """
        self._arguments = {
            name: value for name, value in locals().items() if name not in ("self", "__class__")
        }
        for name in _CODE:
            self._arguments[name] = _imported(self._arguments[name], name)
        self._ahead: deque[Future[Batch]] = deque()
        Worker(worker_settings(self._arguments), wrap=self._wrap)

    def _wrap(self, worker: Worker) -> weakref.ref[Self]:
        """Take the worker, whose parts are made next; it refers to this object only weakly, so that
        both end as soon as this one is dropped.
        """
        self._worker = worker
        return weakref.ref(self)

    if not TYPE_CHECKING:  # type checkers should know the real attributes only

        def __getattr__(self, name: str) -> Any:
            """Return an attribute of the worker; unknown ones are refused, with a hint if RLlib's
            earlier workers have it.
            """
            worker = vars(self).get("_worker")
            if hasattr(worker, name):
                return getattr(worker, name)
            reader = vars(getattr(worker, "reader", self))
            if name in reader:
                return reader[name]
            message = f"'RolloutWorker' object has no attribute {name!r}"
            hint = _OLD_METHODS.get(name)
            raise AttributeError(f"{message}. {hint}" if hint else message, name=name, obj=self)

        def __setattr__(self, name: str, value: Any) -> None:
            """Set the attribute of the worker or of its reader if one of them has it."""
            worker = vars(self).get("_worker", self)
            for part in (worker, getattr(worker, "reader", self)):
                if name in vars(part) and not name.startswith("_"):
                    object.__setattr__(part, name, value)
                    return
            object.__setattr__(self, name, value)

    def __dir__(self) -> list[str]:
        worker = vars(self).get("_worker")
        return [*super().__dir__(), *dir(worker), *vars(getattr(worker, "reader", self))]

    @functools.cached_property
    def num_envs(self) -> int:
        """Number of environments requested."""
        return self.settings.config.num_envs_per_worker

    @functools.cached_property
    def worker_index(self) -> int:
        """Index of the worker, 0 = local."""
        return self.settings.worker_index

    @functools.cached_property
    def num_workers(self) -> int:
        """Number of remote workers."""
        return self.settings.num_workers

    @functools.cached_property
    def policy_config(self) -> dict[str, Any]:
        """Base config of the policies."""
        return dict(self.settings.policy_config)

    @functools.cached_property
    def policies_to_train(self) -> list[str]:
        """Ids of the policies that learn, in order."""
        return list(self.policy_map.trainable_ids)

    @functools.cached_property
    def multiagent(self) -> bool:
        """True unless the default policy is the only one."""
        return self.policy_map.is_multi_agent

    def creation_args(self) -> dict[str, Any]:
        """Return the arguments that the worker was made with."""
        return dict(self._arguments)

    # --- sampling ---

    def sample(self) -> Batch:
        """Return rows ``[B, ...]`` of ``rollout_fragment_length`` env steps, or of whole episodes
        with at least that.

        While one thread samples, others wait.

        Raises:
            SamplerDied: the worker was stopped.
            ConfigError: the reader returned an object that is not a batch.
            Exception: the environment, a policy, a callback or the reader raised it. Batches read
                before are kept for the next call.
        """
        return self._worker.sample()

    @property
    def samples(self) -> SampleStream:
        """Endless iterator over results of ``sample()``, synchronous or asynchronous."""
        return SampleStream(self.sample, self._ahead)

    @method(num_returns=2)
    def sample_with_count(self) -> tuple[Batch, int]:
        """Sample, and return the batch ``[B, ...]`` and its count of env steps."""
        batch = self.sample()
        return batch, batch.count

    def get_metrics(self) -> list[RolloutMetrics | OffPolicyEstimate]:
        """Return the episodes that ended since the last call, then the new estimates."""
        return self._worker.get_metrics()

    # --- policies and environments ---

    def get_weights(self, policies: Collection[str] | None = None) -> dict[str, Any]:
        """Return weights by policy id.

        Args:
            policies: ids of the policies, or one id; None takes all. Unknown ids are skipped.
        """
        names = [policies] if isinstance(policies, str) else policies
        with self.paused():
            return {
                policy_id: policy.get_weights()
                for policy_id, policy in self.policy_map.items()
                if names is None or policy_id in names
            }

    def set_weights(
        self, weights: Mapping[str, Any], global_vars: Mapping[str, Any] | None = None
    ) -> None:
        """Set weights of policies, then global variables if there are any; between two turns.

        Args:
            weights: policy id -> weights in the form that ``get_weights`` returns.
            global_vars: global variables for all policies, such as ``timestep``; None for no
                change.

        Raises:
            UnknownPolicyError: no policy has one of the ids; nothing is changed (a KeyError).
            PolicyError: the weights do not fit their policy; all policies keep theirs (a
                ValueError).
        """
        self._worker.set_weights(weights, global_vars)

    def get_global_vars(self) -> dict[str, Any] | None:
        """Return the global variables set last; None before the first."""
        return self.global_vars

    def set_global_vars(self, global_vars: Mapping[str, Any]) -> None:
        """Pass new ``global_vars`` to every policy, and store them."""
        self._worker.set_global_vars(global_vars)

    def get_policy(self, policy_id: str = DEFAULT_POLICY_ID) -> Policy | None:
        """Return the policy with the id ``policy_id``, or None."""
        return self.policy_map.get(policy_id)

    def for_policy(self, function: Callable[[Policy], R], policy_id: str = DEFAULT_POLICY_ID) -> R:
        """Call ``function`` with the policy ``policy_id``, and return its result.

        Raises:
            UnknownPolicyError: no policy has this id (a KeyError).
        """
        return _function(function)(self.policy_map[policy_id])

    def foreach_policy(self, function: Callable[[Policy, str], R]) -> list[R]:
        """Call a function with each policy and its id; return the results."""
        function = _function(function)
        return [function(policy, policy_id) for policy_id, policy in self.policy_map.items()]

    def foreach_env(self, function: Callable[[Any], R]) -> list[R]:
        """Call a function with each environment, or with the BaseEnv if it shows none; return the
        results.
        """
        function = _function(function)
        envs = list(self.async_env.get_unwrapped())
        return [function(env) for env in envs or [self.async_env]]

    # --- learning ---

    def compute_gradients(self, samples: Batch) -> tuple[Any, dict[str, Any]]:
        """Compute gradients on a batch, without an update.

        Args:
            samples: rows ``[B, ...]`` of the default policy, or of several policies; only trainable
                ones count.

        Returns:
            Gradients and figures with ``batch_count``; both are by policy id for a multi-agent
            batch.

        Raises:
            UnknownPolicyError: the batch is a plain one and there is no default policy (also a
                KeyError).
        """
        with self.paused():
            return learning.compute_gradients(self.policy_map, samples)

    def apply_gradients(self, gradients: Any) -> dict[str, Any]:
        """Update policies with gradients, even if they are not trainable.

        Args:
            gradients: gradients by policy id; in any other form, those of the default policy.

        Returns:
            Figures of the update, by policy id if the gradients are.

        Raises:
            UnknownPolicyError: no policy has that id; no weights change then (also a KeyError).
        """
        with self.paused():
            return learning.apply_gradients(self.policy_map, gradients)

    def learn_on_batch(self, samples: Batch) -> dict[str, Any]:
        """Update policies on a batch.

        Args:
            samples: rows ``[B, ...]`` of the default policy, or of several policies, of which the
                trainable ones learn.

        Returns:
            Figures of the update, by policy id for a multi-agent batch.

        Raises:
            UnknownPolicyError: the batch is a plain one and there is no default policy (also a
                KeyError).
        """
        with self.paused():
            return learning.learn_on_batch(self.policy_map, samples)

    def sample_and_learn(
        self,
        expected_batch_size: int,
        num_sgd_iter: int,
        sgd_minibatch_size: int,
        standardize_fields: Collection[str],
    ) -> tuple[dict[str, Any], int]:
        """Sample, and let the policies learn in minibatches.

        Args:
            expected_batch_size: count that the batch must have, in env steps.
            num_sgd_iter: number of passes over the batch.
            sgd_minibatch_size: rows per minibatch; 0 is all rows.
            standardize_fields: columns to scale to mean 0 and standard deviation 1 first.

        Returns:
            Figures by policy id, as means over the last pass, and the batch's count.

        Raises:
            AssertionError: the batch has another count.
            ConfigError: the number of passes or rows is impossible; no batch is sampled then (also
                a ValueError).
        """
        learning.check_sgd(num_sgd_iter, sgd_minibatch_size, standardize_fields)
        batch = self.sample()
        if batch.count != expected_batch_size:
            raise AssertionError(
                f"the batch has a count of {batch.count}, expected {expected_batch_size}"
            )
        info = learning.minibatch_sgd(
            batch,
            self.policies_to_train,
            self.learn_on_batch,
            num_sgd_iter=num_sgd_iter,
            sgd_minibatch_size=sgd_minibatch_size,
            standardize_fields=standardize_fields,
            rng=np.random.default_rng(np.random.randint(2**31)),
        )
        return info, batch.count

    def foreach_trainable_policy(self, function: Callable[[Policy, str], R]) -> list[R]:
        """Call a function with each trainable policy, and return the results.

        Args:
            function: function that takes a policy and its id.

        Returns:
            The results, in the order of ``policies_to_train``.
        """
        function = _function(function)
        return [
            function(self.policy_map[policy_id], policy_id) for policy_id in self.policies_to_train
        ]

    # --- filters and state ---

    def get_filters(self, flush_after: bool = False) -> dict[str, ObservationFilter]:
        """Return copies of the filters by policy id.

        Args:
            flush_after: True clears the deltas of the worker's own filters after the copy.

        Returns:
            Filters by policy id.
        """
        with self.paused():
            copies = {
                policy_id: statistics.as_serializable()
                for policy_id, statistics in self.filters.items()
            }
            if flush_after:
                for statistics in self.filters.values():
                    statistics.clear_buffer()
            return copies

    def sync_filters(self, new_filters: Mapping[str, ObservationFilter]) -> None:
        """Replace the filters' statistics by the ones given, and add this worker's unsent deltas.

        Args:
            new_filters: filters by policy id, one for each policy.

        Raises:
            AssertionError: a policy's filter is missing; no filter changes then.
            ValueError: a filter has another kind or shape; no filter changes then.
        """
        self._check_filters(new_filters)
        with self.paused():
            # on copies first: a filter that does not fit raises before any has changed
            for policy_id, statistics in self.filters.items():
                statistics.copy().sync(new_filters[policy_id])
            for policy_id, statistics in self.filters.items():
                statistics.sync(new_filters[policy_id])

    def save(self) -> bytes:
        """Return filters and policy states as bytes; unsent deltas stay pending.

        Raises:
            CheckpointError: a policy's state cannot be saved.
        """
        with self.paused():
            filters = {
                policy_id: statistics.state() for policy_id, statistics in self.filters.items()
            }
            policies = {
                policy_id: policy.get_state() for policy_id, policy in self.policy_map.items()
            }
            return dump_state(SavedState(filters, policies))

    def restore(self, data: bytes) -> None:
        """Restore a saved state; deltas pending or in flight are dropped. If it raises, the worker
        is unchanged.

        Args:
            data: bytes from ``save``.

        Raises:
            CheckpointError: the bytes are not from ``save``, or a filter has another kind.
            AssertionError: a policy's filter is missing.
            UnknownPolicyError: no policy has that id (also a KeyError).
            PolicyError: a state does not fit its policy (also a ValueError).
        """
        saved = load_state(data)
        self._check_filters(saved.filters)
        policies = {policy_id: self.policy_map[policy_id] for policy_id in saved.policies}
        with self.paused():
            check_states(self.filters, saved.filters, "of a rollout worker")
            change_all(
                policies,
                saved.policies,
                lambda policy: policy.get_state(),
                lambda policy, new: policy.set_state(new),
            )
            for policy_id, statistics in self.filters.items():
                statistics.restore(saved.filters[policy_id])

    def _check_filters(self, filters: Mapping[str, Any]) -> None:
        missing = sorted(self.filters.keys() - filters.keys())
        if missing:
            raise AssertionError(
                f"no filters are given for {', '.join(missing)}, only for {sorted(filters)}"
            )

    def export_policy_model(self, export_dir: str, policy_id: str = DEFAULT_POLICY_ID) -> None:
        """Export a policy's model to a directory.

        Args:
            export_dir: the directory.
            policy_id: id of the policy.

        Raises:
            UnknownPolicyError: no policy has that id (also a KeyError).
        """
        self.policy_map[policy_id].export_model(export_dir)

    def import_policy_model_from_h5(
        self, import_file: str, policy_id: str = DEFAULT_POLICY_ID
    ) -> None:
        """Read a policy's weights from a file that `export_policy_checkpoint` wrote, or from an
        HDF5 file.

        Args:
            import_file: path of the file. An HDF5 file has one dataset for each weight, at the
                weight's name; the files of Keras have other names, and are refused.
            policy_id: id of the policy.

        Raises:
            UnknownPolicyError: no policy has that id (also a KeyError).
        """
        self.policy_map[policy_id].import_model_from_h5(import_file)

    def export_policy_checkpoint(
        self, export_dir: str, filename_prefix: str = "model", policy_id: str = DEFAULT_POLICY_ID
    ) -> None:
        """Export a policy's weights to a directory.

        Args:
            export_dir: the directory.
            filename_prefix: beginning of the names of the files.
            policy_id: id of the policy.

        Raises:
            UnknownPolicyError: no policy has that id (also a KeyError).
        """
        self.policy_map[policy_id].export_checkpoint(export_dir, filename_prefix)

    # --- the worker itself ---

    def interrupt(self) -> None:
        """Make a waiting ``sample``, and each later one, raise; this method never waits.

        Any thread can call it. A blocking environment is not interrupted.
        """
        self._worker.interrupt()

    def stop(self) -> None:
        """Stop the sampler; close environments, reader and writer; can be called more than once.

        A ``sample`` in another thread ends at its next turn, and later ones raise.

        Raises:
            Exception: closing one of them raised it; the others are closed nevertheless.
        """
        if "_worker" in vars(self):  # otherwise an argument was refused
            self._worker.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    # --- launching ---

    @classmethod
    def as_remote(
        cls,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        memory: float | None = None,
        object_store_memory: float | None = None,
        resources: Mapping[str, float] | None = None,
    ) -> RemoteClass:
        """Return the class whose ``remote(...)``, with the arguments of this class, starts a worker
        in a process of its own.

        Args:
            num_cpus: threads of the libraries there; None leaves them as they are.
            num_gpus: 0 hides the GPUs; there is no other limit.
            memory: heap quota of the process, bytes; None is no quota.
            object_store_memory: largest result of a call, bytes; None is no limit.
            resources: must be empty, since aiorl does not schedule machines.

        Raises:
            ConfigError: a limit is impossible (also a ValueError).
        """
        # loads the sockets, which a worker of its own does not need
        from aiorl.compat.limits import ActorOptions
        from aiorl.compat.remote import RemoteClass

        options = ActorOptions(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            memory=memory,
            object_store_memory=object_store_memory,
            resources=resources,
        )
        return RemoteClass(cls, options)

    def get_node_ip(self) -> str:
        """Return the address at which other hosts reach this one, according to its routes, or else
        loopback.
        """
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(_ELSEWHERE)
            except OSError:  # no route to other hosts
                return "127.0.0.1"
            return str(probe.getsockname()[0])

    def find_free_port(self) -> int:
        """Return a TCP port that can be bound now."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def setup_torch_data_parallel(
        self, url: str, world_rank: int, world_size: int, backend: str
    ) -> None:
        """Let every policy take part in data-parallel learning; the name is RLlib's.

        A policy that supports this has a method ``join_data_parallel(url, world_rank, world_size,
        backend)``. It then gets the number of processes as its attribute
        ``distributed_world_size``.

        Args:
            url: address at which the processes meet.
            world_rank: index of this process, from 0.
            world_size: number of processes.
            backend: name of the communication backend.

        Raises:
            ConfigError: the rank is not below the size, or a policy cannot take part; no policy has
                joined then (also a ValueError).
        """
        if not 0 <= world_rank < world_size:
            raise ConfigError(
                f"world_rank is {world_rank}, expected 0 to {world_size - 1}.", key="world_rank"
            )
        policies: Mapping[str, Any] = self.policy_map
        for policy_id, policy in policies.items():
            if not callable(getattr(policy, "join_data_parallel", None)):
                raise ConfigError(
                    f"policy {policy_id!r} is a {type(policy).__name__}, which cannot learn"
                    " data-parallel: it has no method join_data_parallel.",
                    key="policy",
                )
        for policy in policies.values():
            policy.join_data_parallel(url, world_rank, world_size, backend)
            policy.distributed_world_size = world_size


class WrappedWorker(RolloutWorker):
    """RolloutWorker of a worker that a run has made, for callbacks and other code of users."""

    def __init__(self, worker: Worker) -> None:
        """Take the `worker`, which may not have its parts yet."""
        self._arguments = {}
        self._ahead = deque()
        self._worker = worker
