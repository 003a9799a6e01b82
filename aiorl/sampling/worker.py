"""Worker: environments, policies, filters and a sampler as one object, in one process and without
sockets.

A worker process and an evaluation have one each. Code of users never gets it: `aiorl.RolloutWorker`
wraps it, with the interface of RLlib's workers.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import weakref
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Self

from aiorl.acting.actor import Actor
from aiorl.acting.filters import ObservationFilter, make_filter
from aiorl.acting.graph_policy import install_filter
from aiorl.acting.policy import Policy
from aiorl.acting.policy_map import PolicyMap, policy_seed
from aiorl.config import registry
from aiorl.data.metrics import RolloutMetrics
from aiorl.data.sample_batch import Batch
from aiorl.env.base_env import BaseEnv
from aiorl.env.external_env import ExternalMultiAgentEnv
from aiorl.env.gym_like import check_seedable
from aiorl.env.kinds import facts_of
from aiorl.errors import PolicyError, SamplerDied
from aiorl.offline.estimators import OffPolicyEstimate
from aiorl.offline.io import IOContext
from aiorl.process.log_once import log_once
from aiorl.sampling import build
from aiorl.sampling.async_sampler import AsyncSampler
from aiorl.sampling.batches import BatchReader
from aiorl.sampling.policies import (
    PolicySpec,
    enable_eager,
    make_policies,
    make_policy,
    policy_classes,
    policy_specs,
    seed_generators,
)
from aiorl.sampling.settings import SamplerSetup, WorkerSettings

logger = logging.getLogger(__name__)

_current: weakref.ref[Worker] | None = None


def get_global_worker() -> Any:
    """Return the RolloutWorker of the worker made last in this process; None if there is none any
    more.
    """
    worker = None if _current is None else _current()
    return None if worker is None else worker.rollout_worker()


class Worker:
    """Sampler of experience with its policies.

    Only one thread at a time may call its methods, with an exception: while one thread samples,
    another can set weights or sample, too.

    Attributes:
        settings: the settings it was made from; once the environment is there, with the limit of
            rewards that holds for it.
        async_env: all environments, as a BaseEnv.
        policy_map: policy id -> policy.
        preprocessors: policy id -> preprocessor.
        filters: policy id -> observation filter. If rewards are scaled, they include the statistics
            of a policy's returns, as ``policy id/returns``.
        preprocessing_enabled: False if the environment's wrappers preprocess observations.
        sampler: SyncSampler or AsyncSampler.
        reader: the batches, with the reader, the writer and the callbacks.
        global_vars: the last global variables set, or None.
        on_turn: called between two turns of the sampler, in the sampling thread; it can set
            weights. ``sample()`` raises its errors; afterwards a synchronous sampler continues, but
            an asynchronous one ends. None for none.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        on_turn: Callable[[Self], None] | None = None,
        wrap: Callable[[Self], Callable[[], Any]] | None = None,
    ) -> None:
        """Make all parts, in the documented order; an asynchronous sampler starts immediately.

        If this fails, all parts made so far are stopped.

        Args:
            settings: the settings.
            on_turn: like the attribute, but with the worker as argument; an asynchronous sampler
                can call it before this returns.
            wrap: called with the worker before it has any parts, because their constructors can ask
                for ``rollout_worker()``, which calls the function that `wrap` returned. None makes
                a RolloutWorker when one is needed.

        Raises:
            ValueError: a setting cannot be used.
            AssertionError: the reader or writer is of a wrong type, or a filter does not work with
                sample_async.
            EnvError: an environment's constructor failed.
            ImportError: a policy needs TensorFlow, which is not installed.
            RuntimeError: GPUs are granted, but TensorFlow does not see them.
        """
        global _current
        before = _current
        _current = current = weakref.ref[Worker](self)
        self.settings = settings
        self.on_turn = None if on_turn is None else functools.partial(on_turn, self)
        self._wrapped = None if wrap is None else wrap(self)
        self.global_vars: dict[str, Any] | None = None
        self._sampling = threading.RLock()
        self._is_stopped = False
        try:
            self._build()
        except BaseException:
            if _current is current:
                _current = before
            try:
                self.stop()
            except Exception:  # the first error is the one to raise
                logger.exception(
                    "after its construction had failed, the worker could not be closed completely"
                )
            raise

    def _build(self) -> None:
        settings = self.settings
        config = settings.config
        os.environ.update(config.extra_python_environs_for_worker)
        classes = policy_classes(settings.policy)
        enable_eager(settings.policy_config, classes)
        if settings.log_level is not None:
            logging.getLogger("aiorl").setLevel(settings.log_level)
        log_once.set_up(settings.worker_index, settings.log_level)
        polled = build.why_polled(settings)
        maker = self._maker = build.env_maker(settings, polled)
        callbacks = settings.callbacks()
        context = IOContext(
            log_dir=settings.log_dir,
            config=settings.policy_config,
            worker_index=settings.worker_index,
            worker=self._for_hooks(),
        )
        # constructors of environments and policies can ask for its attributes
        self.reader = BatchReader(settings, context, callbacks)
        maker.first = maker.make_first()
        self.preprocessing_enabled = not maker.is_deepmind
        if config.clip_rewards is None:
            config = config.model_copy(update={"clip_rewards": float(maker.is_deepmind)})
            self.settings = settings = replace(settings, config=config)
        facts = facts_of(self.env, maker.env_id)
        self._env_spaces = (facts.declared("observation_space"), facts.declared("action_space"))
        specs = policy_specs(settings.policy, *self._env_spaces)
        if config.seed is not None:
            check_seedable(self.env, maker.env_id)
            seed_generators(config.seed, classes)
        policies, self.preprocessors = make_policies(
            specs, settings, preprocess=self.preprocessing_enabled
        )
        self.policy_map = PolicyMap(
            policies, settings.policy_mapping_fn, settings.policies_to_train
        )
        facts.check_policies(specs, "policy")
        self.filters: dict[str, ObservationFilter] = {
            policy_id: make_filter(
                config.observation_filter, preprocessor.shape, preprocessor.layout.num_mask
            )
            for policy_id, preprocessor in self.preprocessors.items()
        }
        for policy_id in self.filters.keys() - self.policy_map.trainable_ids:
            # nothing of a policy that doesn't learn changes
            self.filters[policy_id].is_frozen = True
        self.filters |= build.make_return_filters(policies)
        # of a policy that filters observations by itself, an identity
        self.sampling_filters = self.filters | {
            policy_id: install_filter(policy, self.filters[policy_id])
            for policy_id, policy in policies.items()
        }
        if isinstance(self.env, ExternalMultiAgentEnv):
            self.env.leave_agents_to_sampler(
                observations_rewritten=settings.observation_fn is not None,
                no_done_at_end=config.no_done_at_end,
            )
        self.async_env: BaseEnv = maker.to_base_env(self.env)
        self.reader.make_estimators()
        setup = SamplerSetup(
            # otherwise the thread of an asynchronous sampler keeps it alive forever
            worker=weakref.ref(self._for_hooks()),
            base_env=self.async_env,
            policy_map=self.policy_map,
            preprocessors=self.preprocessors,
            filters=self.sampling_filters,
            settings=config,
            callbacks=callbacks,
            observation_fn=settings.observation_fn,
        )
        self.sampler = build.make_sampler(setup, settings, polled, on_turn=_between_turns(self))
        if isinstance(self.sampler, AsyncSampler):
            self.sampler.start()
        self.reader.open(self.sampler)
        if settings.worker_index == 0:
            logger.info("Policies: %s", dict(self.policy_map))
            logger.info("Preprocessors: %s", self.preprocessors)
            logger.info("Filters: %s", self.filters)

    @property
    def env(self) -> Any:
        """Environment 0, with its wrappers."""
        return self._maker.first

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
        with self._sampling:
            if self._is_stopped:
                raise SamplerDied("the worker was stopped; make another one to continue sampling")
            return self.reader.read()

    def get_metrics(self) -> list[RolloutMetrics | OffPolicyEstimate]:
        """Return the episodes that ended since the last call, then the new estimates."""
        metrics: list[RolloutMetrics | OffPolicyEstimate] = [*self.sampler.get_metrics()]
        for estimator in self.reader.reward_estimators:
            metrics += estimator.get_metrics()
        return metrics

    # --- policies ---

    def change_policies(self, added: Mapping[str, Any], removed: Collection[str]) -> None:
        """Add policies that do not learn, and remove others; call this between two turns, in the
        sampling thread.

        Episodes that run keep their policies, and hooks can look them up to the end; the mapping
        function chooses among the new ones when an agent appears.

        Args:
            added: policy id -> its 4-tuple, as in the setting ``policy``; it has no weights yet.
            removed: ids of policies; unknown ones are left out.

        Raises:
            ConfigError: a policy cannot be made (also a ValueError).
            ImportError: a policy needs TensorFlow, which is not installed.
        """
        with self.paused():
            if added:
                for policy_id, spec in policy_specs(added, *self._env_spaces).items():
                    self._add_policy(policy_id, spec)
            tables: list[dict[str, Any]] = [
                self.preprocessors,
                self.filters,
                self.sampling_filters,
            ]
            for policy_id in removed:
                self.policy_map.remove(policy_id)
                for table in tables:
                    table.pop(policy_id, None)
            self.sampler.take_up_policies()

    def _add_policy(self, policy_id: str, spec: PolicySpec) -> None:
        config = self.settings.config
        seed = None
        if config.seed is not None:  # the same, whatever other policies there are
            seed = policy_seed(config.seed, 1 + zlib.crc32(policy_id.encode()))
        policy, preprocessor = make_policy(
            policy_id, spec, self.settings, preprocess=self.preprocessing_enabled, seed=seed
        )
        statistics = make_filter(
            config.observation_filter, preprocessor.shape, preprocessor.layout.num_mask
        )
        statistics.is_frozen = True
        self.preprocessors[policy_id] = preprocessor
        self.filters[policy_id] = statistics
        self.sampling_filters[policy_id] = install_filter(policy, statistics)
        self.policy_map[policy_id] = policy

    def change_env_config(self, env_config: Mapping[str, Any]) -> None:
        """Give the environments other settings, each before its next episode; call this between two
        turns, in the sampling thread.

        Args:
            env_config: all of their settings.

        Raises:
            ConfigError: environments of this kind can't change while they run.
        """
        with self.paused():
            self._maker.change_settings(self.async_env, env_config)
            config = self.settings.config.model_copy(update={"env_config": dict(env_config)})
            self.settings = replace(self.settings, config=config)

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
        policies = {policy_id: self.policy_map[policy_id] for policy_id in weights}
        with self.paused():
            change_all(
                policies,
                weights,
                lambda policy: policy.get_weights(),
                lambda policy, new: policy.set_weights(new),
            )
            if global_vars:
                self.set_global_vars(global_vars)

    def set_global_vars(self, global_vars: Mapping[str, Any]) -> None:
        """Pass new ``global_vars`` to every policy, and store them."""
        with self.paused():
            for policy in self.policy_map.values():
                policy.on_global_var_update(global_vars)
            self.global_vars = dict(global_vars)

    def actor(self, policy_id: str) -> Actor:
        """Return a policy that takes observations of the environment; it changes no statistics.

        Args:
            policy_id: id of the policy.

        Raises:
            UnknownPolicyError: no policy has that id (also a KeyError).
        """
        return Actor(
            policy_id,
            self.policy_map[policy_id],
            self.preprocessors[policy_id],
            self.sampling_filters[policy_id],
            clip_actions=self.settings.config.clip_actions,
        )

    # --- the worker itself ---

    def rollout_worker(self) -> Any:
        """Return the RolloutWorker that code of users gets as "the worker", always the same."""
        if self._wrapped is None:
            wrapped = registry.wrap_worker(self)
            self._wrapped = lambda: wrapped
        return self._wrapped()

    def interrupt(self) -> None:
        """Make a waiting ``sample``, and each later one, raise; this method never waits.

        Any thread can call it. A blocking environment is not interrupted.
        """
        for sampler in self._parts("sampler"):
            sampler.stop(timeout_s=0.0)
        for env in self._parts("async_env"):
            env.interrupt()

    def stop(self) -> None:
        """Stop the sampler; close environments, reader and writer; can be called more than once.

        A ``sample`` in another thread ends at its next turn, and later ones raise.

        Raises:
            Exception: closing one of them raised it; the others are closed nevertheless.
        """
        self._is_stopped = True
        with contextlib.ExitStack() as last_first:
            for reader in self._parts("reader"):
                last_first.callback(reader.close)
            # the BaseEnv stops the first environment, too; without one, that is all there is
            closing = [env.stop for env in self._parts("async_env")] or [
                env.close for env in self._parts("env") if hasattr(env, "close")
            ]
            for close in closing:
                last_first.callback(close)
            for sampler in self._parts("sampler"):
                last_first.callback(sampler.stop)
            last_first.callback(self.interrupt)  # wakes a sampler that waits

    def _parts(self, name: str) -> list[Any]:
        """Return a part in a list, which is empty in a worker whose constructor failed before."""
        if hasattr(self, name):
            return [getattr(self, name)]
        return []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __del__(self) -> None:
        # at the end of the interpreter there are no names of modules any more
        for sampler in self._parts("sampler"):
            if hasattr(sampler, "end_soon"):
                sampler.end_soon()
        for env in self._parts("async_env"):
            env.interrupt()  # ends waits of the sampling thread and of clients

    @property
    def reward_limit(self) -> float:
        """Limit of the rewards of rows, which lie in ``[-limit, limit]``; 0 = no limit."""
        return self.settings.config.reward_limit

    def paused(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that keeps other threads from processing observations and evaluating
        policies.
        """
        return self.sampler.paused()

    def _for_hooks(self) -> Any:
        """Return what hooks get as the worker: a RolloutWorker, unless none belongs to users."""
        if self._wrapped is None and not self.settings.shows_worker:
            return self
        return self.rollout_worker()


def _between_turns(worker: Worker) -> Callable[[], None]:
    """Return a function that calls the worker's ``on_turn`` without keeping the worker alive."""
    reference = weakref.ref(worker)

    def call() -> None:
        worker = reference()
        if worker is not None and worker.on_turn is not None:
            worker.on_turn()

    return call


def change_all(
    policies: Mapping[str, Policy],
    values: Mapping[str, Any],
    read: Callable[[Policy], Any],
    change: Callable[[Policy, Any], None],
) -> None:
    """Set a value for each policy; if one policy refuses its value, restore the values of the
    others.

    Args:
        policies: policies by id.
        values: a value for each of them.
        read: returns a policy's value.
        change: sets it.

    Raises:
        Exception: the policy that refused raised it.
    """
    before: list[tuple[str, Any]] = []
    policy_id = ""
    try:
        for policy_id, policy in policies.items():
            # it may not have a value yet
            with contextlib.suppress(PolicyError, NotImplementedError):
                before.append((policy_id, read(policy)))
            change(policy, values[policy_id])
    except BaseException:
        for changed_id, value in before:
            try:
                change(policies[changed_id], value)
            except Exception:
                if changed_id != policy_id:  # the refusing policy may refuse again
                    logger.exception("policy %r did not accept its previous value", changed_id)
        raise
