"""Sampling and updates, alternately, in one thread without further processes, sockets or threads.

A debugger, a profiler and ``print`` see everything. Sampling and learning run step by step in the
thread that waits for the training. Everything else runs on the event loop, as it does with workers.
The core and its one worker are the same as those of a run with workers: they exchange the same
messages, only as objects.
"""

from __future__ import annotations

import asyncio
import bdb
import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from aiorl.acting.filters import ObservationFilter
from aiorl.config.parts import SamplePart
from aiorl.errors import (
    AiorlError,
    ConfigError,
    EndOfData,
    EvaluationError,
    InternalError,
    described,
)
from aiorl.net.protocol import events as ev
from aiorl.net.protocol.roster import Worker
from aiorl.net.protocol.worker_session import WorkerSession, WorkerSettings, WorkerState
from aiorl.net.transport.endpoint import EndpointStats
from aiorl.net.wire.messages import (
    WAITING_FOR,
    Arrays,
    DownMessage,
    PolicyArrays,
    Samples,
    Snapshot,
    UpMessage,
)
from aiorl.process.machine import keep_within
from aiorl.process.tasks import Tasks
from aiorl.run.build import Learning
from aiorl.run.core import (
    BeginUpdate,
    DeltaLeftOut,
    Effect,
    FragmentRefused,
    LearnerCore,
    News,
    Report,
    Send,
    UpdateSkipped,
)
from aiorl.run.end import Ended, wait_for_last
from aiorl.run.evaluation import evaluate
from aiorl.run.ingest import AssembledBatch
from aiorl.run.overview import Overview
from aiorl.run.peer_news import skipped_text
from aiorl.run.policy_group import UpdateDone, Updater
from aiorl.run.ports import TrainingView, Updates
from aiorl.run.source import Source
from aiorl.run.threads import BrokenOff, LoopThread
from aiorl.run.worker.sampler_unit import SamplerUnit, StopSampling, UnitPlace

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SLOT = 0
"""Slot of the local worker for environments and in news, as in `EnvContext.worker_index`."""
_PEER = b"here"
_FRAGMENT_S = 1.0
"""Time that a fragment takes for the core; see `LocalSource`."""
_UPDATE_WAIT_S = 2.0
_STEP_IN_HURRY_S = 0.5
_CLOSE_S = 10.0
_CLOSE_IN_HURRY_S = 1.0
_NO_TRAFFIC = EndpointStats()
_UPDATING = "making an update"


class InlineUpdates:
    """Makes updates in the thread of the caller, one at each call of `make_next`.

    Attributes:
        updater: makes the updates.
    """

    def __init__(self, updater: Updater) -> None:
        """Prepare without compiling yet."""
        self.updater = updater
        self._waiting: deque[AssembledBatch] = deque()

    @property
    def is_due(self) -> bool:
        """True if a train batch waits for its update."""
        return bool(self._waiting)

    def submit_nowait(self, batch: AssembledBatch) -> None:
        """See `Updates`."""
        self._waiting.append(batch)

    def stop(self) -> None:
        """See `Updates`."""
        self._waiting.clear()

    @property
    def next_batch(self) -> AssembledBatch:
        """Train batch of the next update."""
        return self._waiting[0]

    def make_next(self) -> UpdateDone:
        """Make the next update.

        Raises:
            Exception: the update failed; its train batch is not used again.
        """
        return self.updater.update(self._waiting.popleft())


class LocalWorker:
    """The worker in this process: its side of the protocol, and the sampler.

    Attributes:
        learning: the policies; their parts are used as they are, not as copies from a welcome.
        unit: the sampler, which runs in the caller's thread; None until it is built.
        num_broken_off: samplers that ended since the last checkpoint; the next one gets other seeds.
    """

    def __init__(self, learning: Learning, num_workers: int) -> None:
        """Prepare without joining yet.

        Args:
            learning: the policies.
            num_workers: number of workers in the run's config.
        """
        plan = learning.lease_plan
        self.unit: SamplerUnit | None = None
        self.num_broken_off = 0
        self.learning = learning
        self._num_workers = num_workers
        self._session: WorkerSession | None = None
        self._snapshot: Snapshot | None = None
        self._is_delayed = plan.mode == "streaming" and plan.max_policy_lag is not None
        self._delayed: list[Snapshot] = []

    @property
    def is_registered(self) -> bool:
        """True from its welcome on until it leaves."""
        return self._session is not None and self._session.state is WorkerState.REGISTERED

    def join(self, now: float) -> None:
        """Say hello, unless it has joined."""
        if self._session is None:
            self._session = WorkerSession(WorkerSettings("here"))
            self._session.connected(now)

    def leave(self, now: float) -> SamplerUnit | None:
        """Say goodbye, and return the sampler, which has to be closed."""
        unit = self.unit
        self.unit = None
        if self._session is not None:
            self._session.leaving("broken off", now)
        if unit is not None:
            self.num_broken_off += 1
        return unit

    def messages(self) -> list[UpMessage]:
        """Return the messages to the learner, in order, and clear the list."""
        if self._session is None:
            return []
        messages = self._session.messages_to_send()
        if self._session.state is WorkerState.ENDED:
            self._session = None
            self._delayed.clear()  # the next one begins with the newest snapshot
        return messages

    def hear(self, message: DownMessage, now: float) -> None:
        """Take a message of the learner; snapshots may be delayed."""
        session = self._session
        if session is None:
            return
        if not isinstance(message, Snapshot):
            session.receive(message, now)
        elif self._is_delayed:
            self._delayed.append(message)
        else:
            session.broadcast(message, now)
        self._handle_events(session)

    def hear_delayed(self, now: float) -> None:
        """Take the snapshots of all updates so far."""
        for snapshot in self._delayed:
            if self._session is not None:
                self._session.broadcast(snapshot, now)
                self._handle_events(self._session)
        self._delayed.clear()

    def _handle_events(self, session: WorkerSession) -> None:
        for event in session.events():
            match event:
                case ev.Registered(welcome):
                    self._snapshot = welcome.snapshot
                case ev.SnapshotReceived(snapshot):
                    newest = snapshot
                    if self._snapshot is not None and snapshot.since >= 0:
                        newest = snapshot.after(self._snapshot)
                    self._snapshot = newest
                    if self.unit is not None:
                        self.unit.offer(snapshot)

    def build(self) -> SamplerUnit:
        """Build the sampler with the newest snapshot; call this in the caller's thread.

        Raises:
            ConfigError: the sampler cannot honour a setting.
            EnvError: the environment's constructor failed.
        """
        assert self._session is not None
        assert self._snapshot is not None
        place = UnitPlace(
            slot=_SLOT,
            incarnation=self._session.incarnation,
            num_workers=self._num_workers,
            num_broken_off=self.num_broken_off,
        )
        learning = self.learning
        self.unit = SamplerUnit(learning.worker_part, learning.graphs, self._snapshot, place)
        return self.unit

    def begin_fragment(self, now: float) -> int:
        """Return the lease of the next fragment.

        Raises:
            InternalError: there is none, although no train batch is complete.
        """
        session = self._session
        assert session is not None
        lease_id = session.start_fragment(session.version)
        if lease_id is None:  # a worker would wait for a snapshot
            self.hear_delayed(now)
            lease_id = session.start_fragment(session.version)
        if lease_id is None:
            raise InternalError("all fragments are there, but they make no train batch")
        return lease_id

    def send(self, lease_id: int, samples: Samples, now: float) -> None:
        """Send a fragment, after it got its number and filter deltas."""
        assert self._session is not None
        assert self.unit is not None
        deltas = self.unit.take_deltas(self._session.next_seq)
        fragment = samples._replace(lease_id=lease_id, filter_deltas=deltas)
        self._session.fragment_done(fragment, now)


class LocalSource(Source):
    """Samples train batches and makes updates from them in the caller's thread.

    Nothing depends on the clock, so that two runs with one seed are equal: for the core, a fragment
    takes a second and an update no time. An algorithm that corrects for old policies still sees
    some: as if updates ran along with the sampler, a train batch is sampled with the policy from
    before the newest update. All others sample with the newest policy.
    """

    def __init__(
        self,
        training: TrainingView,
        core: LearnerCore,
        *,
        sample: SamplePart,
        bind: str,
        loop: LoopThread,
    ) -> None:
        """Prepare without building anything yet.

        Args:
            training: the training to sample for.
            core: the learner's core.
            sample: the environment, and limits of this process.
            bind: address for the run's file; nothing listens there.
            loop: the loop's thread, which makes the caller's thread sample and learn.
        """
        self.core = core
        self.updates: Updates | None = None
        self.overview = Overview(sample.env)
        self.news = asyncio.Event()
        self.play = self._play
        self._training = training
        self._sample = sample
        self._loop = loop
        self._tasks = Tasks(training.fail)
        self._status = "making the environments and compiling the update"
        self._now = 0.0
        self._worker: LocalWorker | None = None
        self._turn: asyncio.Task[None] | None = None
        self._is_interrupted = False
        # with run id and seed, for a resume
        training.directory.save_address(bind)

    @property
    def status(self) -> str:
        """See `Source`."""
        return self._status

    def waits_for_others(self) -> bool:
        """See `Source`."""
        unit = None if self._worker is None else self._worker.unit
        return unit is not None and bool(unit.waits_for())

    def waiting_for(self) -> str:
        """See `Source`."""
        text = f"this process is {self._status}"
        unit = None if self._worker is None else self._worker.unit
        waits_for = "" if unit is None else unit.waits_for()
        if waits_for:
            return f"this process is {WAITING_FOR}{waits_for}"
        if unit is not None and unit.in_env_s > 1:
            text += f" ({unit.in_env_s:.0f} s in one step)"
        return text

    def workers(self) -> Sequence[Worker]:
        """See `Source`; there are no processes."""
        return ()

    def traffic(self) -> EndpointStats:
        """See `Source`; it is zero, so that results keep the same columns."""
        return _NO_TRAFFIC

    # Life
    # ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to enforce the memory quota."""
        self._tasks.start(keep_within(self._sample.memory, "memory"), "memory quota")

    async def build(self, step: Callable[[], T]) -> T:
        """See `Source`; the step runs in the caller's thread."""
        return await self._call(step)

    async def begin(self, learning: Learning) -> None:
        """Make the environments and compile the update.

        Raises:
            ConfigError: the sampler cannot honour a setting.
            EnvError: the environment's constructor failed.
        """
        training = self._training
        began = time.perf_counter()
        self._worker = LocalWorker(learning, self._sample.num_workers)
        plan = learning.lease_plan
        timeless = dataclasses.replace(plan, publish_interval_s=math.inf)
        updater = Updater(learning.group, timeless, training.counters.env_steps_trained)
        self.updates = self._inline = InlineUpdates(updater)
        # no fragment arrives during an update, so fragments that wait need no limit
        snapshot = self.core.begin(learning, max_queued_bytes=1 << 62)
        self.core.admit({}, {}, snapshot, self._now)
        await self._sampler()
        await self._call(updater.warm_up)
        training.begin_saving(learning)
        training.compiled_in(time.perf_counter() - began)
        self._status = "sampling the first train batch"

    async def add_workers(self, count: int) -> None:
        """See `Source`; there are no processes."""
        raise ConfigError(
            "this run samples in its own process, so no worker can be added.",
            key="num_workers",
            hint="Begin with num_workers of 1 or more, or with bind.",
        )

    async def compiled(self) -> None:
        """See `Source`; it is compiled when `begin` returns."""

    def set_weights(self, weights: PolicyArrays) -> None:
        """See `Source`."""
        self.core.set_weights(weights, self._now)
        self.pump()
        self._hear_delayed()

    def change_policies(
        self,
        policies: Arrays,
        weights: PolicyArrays,
        filters: Mapping[str, ObservationFilter],
    ) -> None:
        """See `Source`."""
        self.core.change_policies(policies, weights, filters, self._now)
        self.pump()
        self._hear_delayed()

    def check_room(self, snapshot: Snapshot) -> None:
        """See `Source`; messages are passed on as objects, which have no limit."""

    async def begin_episodes_anew(self) -> None:
        """See `Source`.

        Environments cannot be saved, so new episodes begin both here and in a restored run. If
        episodes are truncated, this is skipped, since too many would end early. The same applies if
        stored experience is read only once, since parts would be read again.
        """
        if self._sample.is_truncating or self._sample.data_ends:
            return
        await self._drop_worker()
        worker = self._joined_worker
        worker.num_broken_off = 0
        learning = worker.learning
        if learning.lease_plan.publish_every > 1:  # a restored run begins with the newest weights
            self._inline.updater.publish_next()
            self.set_weights(learning.group.get_weights())
        learning.worker_part = learning.worker_part.model_copy(
            update={"life": self._training.counters.updates}
        )

    def hold(self) -> None:
        """See `Source`; updates are made only while the training is waited for."""

    def stop(self) -> None:
        """See `Source`; sampling stops at its next step, while an update is finished."""
        self.core.stop()
        if self._worker is not None and self._worker.unit is not None:
            self._worker.unit.stop()

    async def finish_update(self) -> None:
        """See `Source`."""
        turn = self._turn
        hurry = self._training.end.hurry
        if turn is None or turn.done():
            return
        if self._status == _UPDATING:
            await wait_for_last(turn, _UPDATE_WAIT_S, hurry, self._training.tell)
        else:  # an environment may never return
            timeout_s = _STEP_IN_HURRY_S if hurry.is_set() else _UPDATE_WAIT_S
            await asyncio.wait([turn], timeout=timeout_s)

    async def close(self, reason: str, *, final: bool) -> None:
        """Close the environments, unless their thread is in a step that cannot be interrupted."""
        if self._turn is None or self._turn.done():
            closing = self._tasks.start(self._drop_worker(is_breakable=True), "environments")
            is_hurried = self._training.end.hurry.is_set()
            await asyncio.wait([closing], timeout=_CLOSE_IN_HURRY_S if is_hurried else _CLOSE_S)
        await self._tasks.close()

    def join(self, timeout_s: float) -> None:
        """See `Source`; there is no thread."""

    # Turns
    # ----------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """See `Source`."""
        self._is_interrupted = True

    async def advance(self) -> None:
        """Sample a train batch and make an update from it, or continue a turn that has begun.

        Raises:
            BrokenOff: Ctrl-C interrupted a step; the next turn begins with new episodes.
            Ended: training has ended meanwhile.
            Exception: the environment, the policy or an update failed.
        """
        self.news.clear()
        if self._turn is None:
            self._is_interrupted = False
            self._turn = asyncio.get_running_loop().create_task(self._take_turn(), name="turn")
            self._turn.add_done_callback(lambda _: self.news.set())
        await self.news.wait()
        if self._turn.done():
            turn = self._turn
            self._turn = None
            turn.result()

    async def _take_turn(self) -> None:
        try:
            await self._sample_and_update()
        except EndOfData:
            self._training.stop("Done: all stored experience was read.")
        except Exception as error:  # an environment, a policy or an update can raise anything
            if not self._training.end.has_come:
                raise
            if not isinstance(error, (Ended, BrokenOff)):
                logger.warning("the step running at the end failed and is left out", exc_info=error)

    async def _sample_and_update(self) -> None:
        self.pump()
        while not self._inline.is_due:
            await self._sample_fragment()
            if self._training.end.has_come:
                self.pump()  # accounts for the fragment
                return
            self._heed_interrupt()
            self.pump()
        await self._update()
        self._heed_interrupt()

    async def _sample_fragment(self) -> None:
        unit = await self._sampler()
        worker = self._joined_worker
        lease_id = worker.begin_fragment(self._now)
        try:
            samples = await self._call(unit.sample, is_breakable=True)
        except (EndOfData, Ended):  # a new sampler would read all of the data again
            raise
        except Exception:  # it is left in the middle of a step
            await self._drop_worker()
            raise
        self._now += _FRAGMENT_S
        worker.send(lease_id, samples, self._now)
        self._pass_on()

    async def _update(self) -> None:
        self._hear_delayed()
        batch = self._inline.next_batch
        self._status = _UPDATING
        try:
            update = await self._call(self._inline.make_next)
        except BaseException:
            self.core.update_failed(batch)
            self.core.stand_still()  # so that training continues with a new batch
            raise
        finally:
            self._status = "sampling"
        self.core.update_ended(update, self._now)
        self._training.update_ended(update)
        self.pump()

    def _heed_interrupt(self) -> None:
        if self._is_interrupted:
            raise BrokenOff("Ctrl-C was pressed between two steps") from KeyboardInterrupt()

    # Messages between the core and the worker
    # ----------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """See `Source`; also pass messages on, until both sides have none left."""
        self._pass_on()
        has_more = True
        while has_more:
            for effect in self.core.effects(self._now):
                self._carry_out(effect)
            has_more = self._pass_on()

    def _pass_on(self) -> bool:
        """Pass the worker's messages to the core; return whether there were any."""
        if self._worker is None:
            return False
        messages = self._worker.messages()
        for message in messages:
            self.core.receive(_PEER, message, self._now)
        return bool(messages)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send(message=message):
                self._joined_worker.hear(message, self._now)
            case BeginUpdate(batch):
                self._inline.submit_nowait(batch)
            case Report(news):
                self._report(news)

    def _report(self, news: News) -> None:
        match news:
            case FragmentRefused(_, reason):
                text = f"worker {_SLOT} sent a malformed fragment: {reason}"
                self._training.tell(text, logging.ERROR)
                raise InternalError(
                    f"the sampler is unusable: it sent a malformed fragment ({reason}); the next one"
                    " would do the same"
                )
            case DeltaLeftOut(_, reason):
                text = f"worker {_SLOT} sent a filter delta that was left out: {reason}"
                self._training.tell(text, logging.WARNING)
            case UpdateSkipped():
                self._training.tell(skipped_text(news), logging.WARNING)

    # The worker
    # ----------------------------------------------------------------------------------------------

    @property
    def _joined_worker(self) -> LocalWorker:
        assert self._worker is not None, "training has not begun"
        return self._worker

    async def _sampler(self) -> SamplerUnit:
        """Return the sampler, a new one if a fragment was broken off."""
        worker = self._joined_worker
        if worker.unit is not None:
            return worker.unit
        worker.join(self._now)
        self.pump()
        try:
            if not worker.is_registered:
                raise InternalError("the sampler of this process was not registered")
            return await self._call(worker.build)
        except BaseException:
            self._leave()
            raise

    async def sampler_here(self) -> SamplerUnit:
        """See `Source`."""
        unit = await self._sampler()
        self._hear_delayed()
        return unit

    def _hear_delayed(self) -> None:
        self._joined_worker.hear_delayed(self._now)

    async def _drop_worker(self, *, is_breakable: bool = False) -> None:
        """End the worker and close its environments."""
        unit = self._leave()
        if unit is not None:
            await self._loop.in_caller(unit.close, is_breakable=is_breakable)

    def _leave(self) -> SamplerUnit | None:
        """Let the worker say that it leaves, if there is one; the next one takes its leases."""
        unit = None if self._worker is None else self._worker.leave(self._now)
        self._pass_on()
        self.core.session.peer_gone(_PEER, self._now)
        # the session limits the registrations in a time, and an environment may fail at each attempt
        self._now += _FRAGMENT_S
        return unit

    async def _call(self, step: Callable[[], T], *, is_breakable: bool = False) -> T:
        """See `LoopThread.in_caller`.

        Raises:
            Ended: the step was interrupted because the run ends.
        """
        try:
            return await self._loop.in_caller(step, is_breakable=is_breakable)
        except BrokenOff as error:
            if isinstance(error.__cause__, StopSampling):
                raise Ended(self._training.end.reason) from None
            raise

    async def _play(self, path: Path, request: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return await self._call(lambda: evaluate(path, **request).to_dict(), is_breakable=True)
        except (AiorlError, Ended, BrokenOff):
            raise
        except Exception as error:
            # an environment or a callback can raise anything; same error as from a process
            raise EvaluationError(described(error)) from error


def is_of_debugger(error: BaseException | None) -> bool:
    """Return True if the user has quit a debugger that had stopped in the environment's code."""
    while error is not None and not isinstance(error, bdb.BdbQuit):
        error = error.__cause__
    return error is not None
