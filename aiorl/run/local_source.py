"""Sampling and updates, alternately, in one thread without further processes, sockets or threads.

A debugger, a profiler and ``print`` see everything. Sampling and learning run step by step in the
thread that waits for the training. Everything else runs on the event loop, as it does with workers.
"""

from __future__ import annotations

import asyncio
import bdb
import dataclasses
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from aiorl.errors import AiorlError, EndOfData, EvaluationError, InternalError, described
from aiorl.net.protocol.events import SamplesAccepted
from aiorl.net.protocol.leases import LeaseBook
from aiorl.net.wire.messages import Samples, Snapshot
from aiorl.process.machine import keep_within
from aiorl.process.tasks import Tasks
from aiorl.run.build import Learning
from aiorl.run.evaluation import evaluate
from aiorl.run.flow import Flow
from aiorl.run.ingest import AssembledBatch
from aiorl.run.policy_group import Updater
from aiorl.run.threads import BrokenOff, LoopThread
from aiorl.run.training import Ended, Source, Training, wait_for_last
from aiorl.run.worker.sampler_unit import SamplerUnit, StopSampling, UnitPlace

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SLOT = 0
"""Slot of the local worker, as in `EnvContext.worker_index`."""
_UPDATE_WAIT_S = 2.0
_STEP_IN_HURRY_S = 0.5
_CLOSE_S = 10.0
_CLOSE_IN_HURRY_S = 1.0
_UPDATING = "making an update"


class LocalSource(Source):
    """Samples train batches and makes updates from them in the caller's thread.

    It also replaces the update thread and the session with workers for its `Flow`.

    Attributes:
        ledger: the account of env steps.
        leases: not used; fragments are requested one by one.
        has_room: True while no train batch waits.
        unit: the current sampler, or None.
    """

    def __init__(self, training: Training, *, here: LoopThread) -> None:
        """Prepare without building anything yet.

        Args:
            training: the training to sample for.
            here: the loop's thread, which makes the caller's thread sample and learn.
        """
        super().__init__(training)
        self.ledger = training.ledger
        self.leases = LeaseBook()
        self.unit: SamplerUnit | None = None
        self._status = "making the environments and compiling the update"
        self.play = self._play
        self._here = here
        self._tasks = Tasks(training.fail)
        self._turn: asyncio.Task[None] | None = None
        self._is_interrupted = False
        self._snapshot: Snapshot | None = None
        self._wanted = 0
        self._batch: AssembledBatch | None = None
        # the current sampler and its totals
        self._incarnation = ""
        self._fragments = 0
        self._env_steps = 0
        self._num_broken_off = (
            0  # samplers that ended since the last checkpoint; the next one gets other seeds
        )
        training.directory.save_address(self._config.bind)  # with run id and seed, for a resume

    def waiting_for(self) -> str:
        """See `Source`."""
        in_env_s = 0.0 if self.unit is None else self.unit.in_env_s
        return f"this process is {self._status}" + (
            f" ({in_env_s:.0f} s in one step)" if in_env_s > 1 else ""
        )

    # Life
    # ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to enforce the memory quota."""
        self._tasks.start(keep_within(self._config.memory, "memory"), "memory quota")

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
        # no fragment arrives during an update, and nothing depends on time
        learning.lease_plan = dataclasses.replace(
            learning.lease_plan, mode="on_policy", publish_interval_s=math.inf
        )
        self._learning = learning
        self._updater = Updater(
            learning.group, learning.lease_plan, training.counters.env_steps_trained
        )
        self._flow = Flow(
            training, learning, self, self, tell=self._tell_of, max_queued_bytes=1 << 62
        )
        self.publish(self.flow.next_snapshot(learning.group.get_weights()), 0.0)
        await self._call(self.sampler)
        await self._call(self._updater.warm_up)
        training.begin_saving(learning)
        training.compiled_in(time.perf_counter() - began)
        self._status = "sampling the first train batch"

    def _tell_of(self, kind: str, source: object, text: str, level: int, **how: Any) -> bool:
        self._tell(text, level)
        return True

    def sampler(self) -> SamplerUnit:
        """Return the sampler, a new one if a fragment was broken off; call it in the caller's
        thread.
        """
        if self.unit is None:
            assert self._snapshot is not None
            incarnation = secrets.token_hex(8)
            place = UnitPlace(
                _SLOT,
                incarnation,
                num_workers=self._config.num_workers,
                num_broken_off=self._num_broken_off,
            )
            self.unit = SamplerUnit(
                self._learning.worker_part, self._learning.graphs, self._snapshot, place
            )
            self.ledger.open(incarnation)
            self.flow.publisher.join(incarnation)
            self._incarnation = incarnation
            self._fragments = 0
            self._env_steps = 0
        return self.unit

    def ask_for_experience(self) -> None:
        """See `Source`."""
        self._updater.wants_experience.set()

    def begin_episodes_anew(self) -> None:
        """See `Source`.

        Environments cannot be saved, so new episodes begin both here and in a restored run. If
        episodes are truncated, this is skipped, since too many would end early. The same applies if
        stored experience is read only once, since parts would be read again.
        """
        if self._config.is_truncating or self._config.input_epochs is not None:
            return
        self._drop_sampler()
        self._num_broken_off = 0
        learning = self._learning
        if learning.lease_plan.publish_every > 1:  # a restored run begins with the newest weights
            self._updater.publish_next()
            self.flow.set_weights(learning.group.get_weights())
        learning.worker_part = learning.worker_part.model_copy(
            update={"life": self._training.counters.updates}
        )

    def stop(self, *, hurry: bool) -> None:
        """See `Source`; sampling stops at its next step, while an update is finished."""
        if self._flow is not None:
            self._flow.stop()
        if self.unit is not None:
            self.unit.stop()

    async def finish_update(self) -> None:
        """See `Source`."""
        turn = self._turn
        hurry = self._training.end.hurry
        if turn is None or turn.done():
            return
        if self._status != _UPDATING:  # an environment may never return
            await asyncio.wait(
                [turn], timeout=_STEP_IN_HURRY_S if hurry.is_set() else _UPDATE_WAIT_S
            )
            return
        await wait_for_last(turn, _UPDATE_WAIT_S, hurry, self._training.waits_for_update)

    async def close(self, reason: str, *, final: bool) -> None:
        """Close the environments, unless their thread is in a step that cannot be interrupted."""
        if self._turn is None or self._turn.done():
            closing = self._tasks.start(
                self._here.in_caller(self._drop_sampler, is_breakable=True), "environments"
            )
            await asyncio.wait(
                [closing],
                timeout=_CLOSE_IN_HURRY_S if self._training.end.hurry.is_set() else _CLOSE_S,
            )
        await self._tasks.close()

    # Turns
    # ----------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Leave the turn as soon as the current step has ended."""
        self._is_interrupted = True

    async def advance(self) -> None:
        """Sample a train batch and make an update from it, or continue a turn that has begun.

        Raises:
            BrokenOff: Ctrl-C interrupted a step; the next turn begins with new episodes.
            Ended: training has ended meanwhile.
            Exception: the environment, the policy or an update failed.
        """
        self._news.clear()
        if self._turn is None:
            self._is_interrupted = False
            self._turn = asyncio.get_running_loop().create_task(self._take_turn(), name="turn")
            self._turn.add_done_callback(lambda _: self._news.set())
        await self._news.wait()
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
        training = self._training
        while self._wanted > 0:
            self._take(await self._sample())
            if training.end.has_come:
                return
            self._heed_interrupt()
        self.flow.feed_updates()
        batch = self._batch
        self._batch = None
        if batch is None:
            raise InternalError("all fragments are there, but they make no train batch")
        self._status = _UPDATING
        try:
            done = await self._call(lambda: self._updater.update(batch))
        except BaseException:
            self.flow.drop_batch(batch)
            self.flow.stand_still()  # so that training continues with a new batch
            raise
        finally:
            self._status = "sampling"
        training.take_update(done)
        self._heed_interrupt()

    def _heed_interrupt(self) -> None:
        if self._is_interrupted:
            raise BrokenOff("Ctrl-C was pressed between two steps") from KeyboardInterrupt()

    async def _sample(self) -> Samples:
        try:
            return await self._call(lambda: self.sampler().sample(), is_breakable=True)
        except EndOfData:  # a new sampler would read all of it again
            raise
        except Ended:
            raise
        except Exception:  # it is left in the middle of a step
            await self._here.in_caller(self._drop_sampler)
            raise

    def _take(self, samples: Samples) -> None:
        """Account for a fragment and queue it."""
        assert self.unit is not None
        self._fragments += 1
        self._env_steps += samples.env_steps
        self._wanted -= 1
        self.ledger.report(self._incarnation, self._env_steps)
        self.ledger.receive(self._incarnation, samples.env_steps)
        deltas = self.unit.take_deltas(self._fragments)
        samples = dataclasses.replace(samples, seq=self._fragments, filter_deltas=deltas)
        self.flow.take(SamplesAccepted(_SLOT, self._incarnation, samples))

    def _drop_sampler(self) -> None:
        unit = self.unit
        self.unit = None
        if unit is not None:
            self.flow.publisher.forget(self._incarnation)
            self._num_broken_off += 1
            self.ledger.close(self._incarnation, "broken off")
            unit.close()

    async def _call(self, step: Callable[[], T], *, is_breakable: bool = False) -> T:
        """See `LoopThread.in_caller`.

        Raises:
            Ended: the step was interrupted because the run ends.
        """
        try:
            return await self._here.in_caller(step, is_breakable=is_breakable)
        except BrokenOff as error:
            if isinstance(error.__cause__, StopSampling):
                raise Ended(self._training.end.reason) from None
            raise

    async def _play(self, path: Path, request: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return await self._call(lambda: evaluate(path, **request).to_dict(), is_breakable=True)
        except (AiorlError, Ended, BrokenOff):
            raise
        except (
            Exception
        ) as error:  # an environment or a callback can raise anything; same error as from a process
            raise EvaluationError(described(error)) from error

    # Called by the flow
    # ----------------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """See `UpdateThread`."""
        return self._batch is None

    def submit_nowait(self, batch: AssembledBatch) -> None:
        """See `UpdateThread`."""
        self._batch = batch

    def publish(self, snapshot: Snapshot, now: float) -> None:
        """See `LearnerSession`."""
        self._snapshot = snapshot
        if self.unit is not None:
            self.unit.offer(snapshot)

    def deal(self, version: int, fragments: int) -> None:
        """See `LearnerSession`."""
        self._wanted = fragments

    def deal_again(self, fragments: int) -> None:
        """See `LearnerSession`."""
        self._wanted += fragments

    def stream(self, waiting: int, min_version: int) -> None:
        """See `LearnerSession`; never called, since the plan is on-policy here."""
        raise NotImplementedError

    def lose(self, slot: int, reason: str, now: float) -> None:
        """See `LearnerSession`.

        Raises:
            InternalError: always, since a new sampler would do the same.
        """
        raise InternalError(f"the sampler is unusable: {reason}; the next one would do the same")


def is_of_debugger(error: BaseException | None) -> bool:
    """Return True if the user has quit a debugger that had stopped in the environment's code."""
    while error is not None and not isinstance(error, bdb.BdbQuit):
        error = error.__cause__
    return error is not None
