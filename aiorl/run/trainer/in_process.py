"""Training in one thread: one sampler and the updates by turns, with no process, socket or thread between.

A debugger, a profiler and ``print`` see all of it. What becomes of fragments is decided where it is in every run
(`aiorl.run.flow`); who samples is asked for them directly. A trainer goes the whole way in its caller's thread; a
whole run asks for its steps one by one (`aiorl.run.trainer.alone`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from aiorl.errors import EndOfData, InternalError
from aiorl.learning.tf_runtime import compilation_cache, prepare_environment
from aiorl.net.protocol.events import SamplesAccepted
from aiorl.net.protocol.leases import LeaseBook
from aiorl.net.protocol.ledger import Ledger
from aiorl.net.wire.messages import PolicyArrays, Snapshot
from aiorl.process.memory_quota import check_heap
from aiorl.process.tasks import Tasks
from aiorl.run.build import build_learning
from aiorl.run.flow import Counters, Flow
from aiorl.run.ingest import AssembledBatch
from aiorl.run.iterations import Iteration
from aiorl.run.report.results import Progress, Results
from aiorl.run.report.system import SystemUsage
from aiorl.run.restoring import give_back
from aiorl.run.saving import Saver
from aiorl.run.setup import TrainingSetup
from aiorl.run.update_thread import UpdateDone, Updater
from aiorl.run.worker.sampler_unit import Produced, SamplerUnit, UnitPlace
from aiorl.sampling.callbacks import DefaultCallbacks

__all__ = ["InProcessTraining"]

_SLOT = 0
"""The local worker's, as in `EnvContext.worker_index`."""

_TRANSPORT = ("queued_messages_out", "rejected_messages", "refused_connections", "dropped_peers")
"""Gauges of a run with workers, so that results have the same columns here."""


class InProcessTraining:
    """Trains one run in the thread that calls it.

    Attributes:
        counters: totals of the run.
        results: episodes and rates.
        iteration: the one that goes on.
        learning: policies, algorithms and filters.
        flow: what becomes of fragments.
        saver: writes checkpoints.
    """

    def __init__(self, setup: TrainingSetup, tasks: Tasks) -> None:
        """Load TensorFlow and build the model.

        Args:
            setup: what it is made from.
            tasks: of the run, for checkpoints in passing.

        Raises:
            ConfigError: a setting that cannot be honoured.
            CheckpointError: the checkpoint is of another run.
        """
        directory, plan, tell = setup.directory, setup.plan, setup.tell
        config = setup.config if plan is None else plan.config
        prepare_environment(config)
        self._config = config
        self._run_id = directory.run_id
        directory.save_address(config.bind)  # with run id and seed, for whoever goes on with the run
        self._usage = SystemUsage() if config.log_sys_usage else None
        self.learning = learning = build_learning(config, directory.path, plan)
        # nothing comes meanwhile, and nothing depends on the time
        learning.lease_plan = dataclasses.replace(learning.lease_plan, mode="on_policy", publish_interval_s=math.inf)
        restored = None if setup.restored is None else setup.restored.run
        self.counters = Counters() if restored is None else restored.counters
        self.results = Results(config.metrics_smoothing_episodes, time.monotonic())
        self._local = local = _Local(Ledger() if restored is None else Ledger.from_dict(restored.ledger))
        give_back(setup.restored, config, learning)
        self._updater = Updater(
            learning.group, self.counters.env_steps_trained, publish_every=learning.lease_plan.publish_every
        )

        def tell_of(kind: str, source: object, text: str, level: int, **how: Any) -> bool:
            tell(text, level)
            return True

        self.flow = Flow(
            learning,
            local,
            local,
            self.counters,
            self.results,
            tell=tell_of,
            say=tell,
            max_queued_bytes=1 << 62,
        )
        if restored is not None:
            self.results.from_state(restored.results, time.monotonic(), self._progress())
        self.saver = Saver(
            config,
            directory,
            learning,
            self,
            tasks,
            before_writing=setup.before_saving,
            on_error=lambda error: tell(f"{error}; training goes on", logging.ERROR),
            ask_for_experience=self._updater.wants_experience.set,
        )
        self.iteration = Iteration(config, self.counters)

    def begin(self) -> None:
        """Make the environments and compile the update.

        Raises:
            ConfigError: a setting that the sampler can't honour.
            EnvError: the environment's constructor failed.
        """
        cache = compilation_cache()
        if cache is not None:
            cache.begin()
        self._local.publish(self.flow.next_snapshot(self.learning.group.get_weights()), 0.0)
        self.unit()  # environments that can't be made are told of now
        self._updater.warm_up()
        if cache is not None:
            cache.seal()
        self.saver.keep(self.learning.group.hold_state())
        self.results.begin_rates(time.monotonic(), self._progress())
        self.iteration.begin()

    @property
    def ledger(self) -> Ledger:
        """The account of env steps."""
        return self._local.ledger

    @property
    def callbacks(self) -> DefaultCallbacks | None:
        """The user's hooks on the learner."""
        return self.learning.callbacks

    @property
    def sampler(self) -> SamplerUnit | None:
        """The sampler, if there is one now."""
        return self._local.unit

    def unit(self) -> SamplerUnit:
        """Return the sampler; a new one after a fragment that was broken off."""
        local = self._local
        if local.unit is None:
            assert local.snapshot is not None
            incarnation = secrets.token_hex(8)
            place = UnitPlace(
                _SLOT, incarnation, num_workers=self._config.num_workers, num_broken_off=local.num_broken_off
            )
            local.unit = SamplerUnit(self.learning.worker_part, self.learning.graphs, local.snapshot, place)
            local.ledger.open(incarnation)
            self.flow.publisher.join(incarnation)
            local.incarnation, local.fragments, local.env_steps = incarnation, 0, 0
        return local.unit

    def train_iteration(self) -> dict[str, Any]:
        """Sample and make updates until training is to stand still (`Flow.is_enough`); the iteration's result.

        Raises:
            EndOfData: all stored experience is read, and nothing was trained on in this iteration.
            Exception: what the environment, the policy or an update raised.
        """
        flow = self.flow
        self.results.leave_out_pause(time.monotonic())  # the caller's
        self.iteration.begin()
        flow.go_on()
        try:
            while not flow.is_still:
                self._update()
        except EndOfData:
            flow.stand_still()
            if not self.iteration.has_trained:
                raise
        return self.finish_iteration()

    def finish_iteration(self) -> dict[str, Any]:
        """The result of the iteration that ends now; the next one begins."""
        result = self.results.finish_iteration(time.monotonic(), self._progress(), timestamp=time.time())
        if self._usage is not None:
            result["perf"] = self._usage.look()
        result["run_id"] = self._run_id
        self.iteration.look_at_episodes(self.results.episodes_total)
        self.iteration.begin()
        return result

    def set_weights(self, weights: PolicyArrays) -> None:
        """Give the sampler other weights than an update led to, and keep what the policies are now."""
        self.flow.set_weights(weights)
        self.saver.keep(self.learning.group.hold_state())

    def begin_episodes_anew(self) -> None:
        """After a checkpoint, sample from here on what a trainer that is restored from it does.

        Environments can't be saved, so those of both begin anew. Where episodes are cut that would end too many early,
        and what was read of stored experience that is read once would be read again.
        """
        if self._config.is_truncating or self._config.input_epochs is not None:
            return
        self._drop_unit()
        self._local.num_broken_off = 0
        if self.learning.lease_plan.publish_every > 1:  # the other trainer begins with the newest weights
            self._updater.publish_next()
            self.flow.set_weights(self.learning.group.get_weights())
        part = self.learning.worker_part
        self.learning.worker_part = part.model_copy(update={"life": self.counters.updates})

    def settle(self) -> None:
        """Nobody else uses the policies."""

    def close(self, *, final: bool = True) -> None:
        """Close the environments."""
        self._local.drop_unit()

    # Steps ------------------------------------------------------------------------------------------------------

    @property
    def wants_fragments(self) -> bool:
        """Whether fragments are to be sampled before the next update."""
        return self._local.wanted > 0

    def sample(self) -> Produced:
        """Sample a fragment, to be given to `take`.

        Raises:
            EndOfData: all stored experience is read.
            Exception: what the environment or the policy raised; a sampler that was broken off is of no use any more.
        """
        return self.unit().sample()

    def take(self, produced: Produced) -> None:
        """Account for a fragment and queue it."""
        local = self._local
        local.fragments += 1
        local.env_steps += produced.env_steps
        local.wanted -= 1
        local.ledger.report(local.incarnation, local.env_steps)
        local.ledger.receive(local.incarnation, produced.env_steps)
        samples = produced.to_samples(local.fragments, 0, self.unit().take_deltas(local.fragments))
        self.flow.take(SamplesAccepted(_SLOT, local.incarnation, samples))

    def next_batch(self) -> AssembledBatch:
        """The train batch that the fragments make."""
        self.flow.feed_updates()
        return self._local.take_batch()

    def update(self, batch: AssembledBatch) -> UpdateDone:
        """Learn from a train batch, to be given to `take_update`."""
        return self._updater.update(batch)

    def take_update(self, done: UpdateDone) -> None:
        """Account for an update and keep what it led to."""
        self.flow.take_update(done)
        self.saver.keep(done.state, done.experience)

    def _update(self) -> None:
        """Sample a train batch and make an update of it."""
        while self.wants_fragments:
            check_heap(self._config.memory, "memory")
            self._sample()
        with _uninterrupted():
            batch = self.next_batch()
            try:
                done = self.update(batch)
            except BaseException:
                self.flow.drop_batch(batch)
                self.flow.stand_still()  # so that the next iteration begins with a new batch
                raise
            self.take_update(done)

    def _sample(self) -> None:
        try:
            produced = self.sample()
        except EndOfData:  # a sampler that is new would read all of it again
            raise
        except BaseException:  # Ctrl-C too: what it leaves behind is in the middle of a step
            self._drop_unit()
            raise
        with _uninterrupted():
            self.take(produced)

    def _drop_unit(self) -> None:
        self.flow.publisher.forget(self._local.incarnation)
        self._local.drop_unit()

    def _progress(self) -> Progress:
        return Progress(
            **dataclasses.asdict(self.counters),
            ledger=self.ledger.as_dict(),
            transport={"queued_fragments": self.flow.queued_fragments, **dict.fromkeys(_TRANSPORT, 0)},
            learner=self.flow.metrics,
        )


class _Local:
    """The one who samples and the one who learns, as `Flow` asks for them.

    Attributes:
        ledger: the account of env steps.
        leases: not used; fragments are wanted one by one.
        unit: the sampler, if there is one now.
        snapshot: the newest.
        wanted: fragments that are to be sampled.
        batch: that is to be learned from.
        incarnation, fragments, env_steps: the sampler's life, and what it has brought in it.
        num_broken_off: samplers that ended before this one and since the last checkpoint; each has other seeds.
    """

    def __init__(self, ledger: Ledger) -> None:
        """Nothing is wanted yet."""
        self.ledger = ledger
        self.leases = LeaseBook()
        self.unit: SamplerUnit | None = None
        self.snapshot: Snapshot | None = None
        self.wanted = 0
        self.batch: AssembledBatch | None = None
        self.incarnation, self.fragments, self.env_steps = "", 0, 0
        self.num_broken_off = 0

    def drop_unit(self) -> None:
        unit, self.unit = self.unit, None
        if unit is not None:
            self.num_broken_off += 1
            self.ledger.close(self.incarnation, "broken off")
            unit.close()

    @property
    def has_room(self) -> bool:
        return self.batch is None

    def submit_nowait(self, batch: AssembledBatch) -> bool:
        self.batch = batch
        return True

    def take_batch(self) -> AssembledBatch:
        batch, self.batch = self.batch, None
        if batch is None:
            raise InternalError("all fragments are there, and make no train batch")
        return batch

    def publish(self, snapshot: Snapshot, now: float) -> None:
        self.snapshot = snapshot
        if self.unit is not None:
            self.unit.offer(snapshot)

    def deal(self, version: int, fragments: int) -> None:
        self.wanted = fragments

    def deal_again(self, fragments: int) -> None:
        self.wanted += fragments

    def stream(self, waiting: int, min_version: int) -> None:
        raise NotImplementedError  # the plan is an on-policy one here

    def lose(self, slot: int, reason: str, now: float) -> None:
        self.drop_unit()
        raise InternalError(f"the sampler is of no use: {reason}; the next one would do the same")


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait until what changes policies and accounts together is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, Any]] = []
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):  # it is ignored, or handled outside of Python
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        for number, frame in came[:1]:
            before(number, frame)
