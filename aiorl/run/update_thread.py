"""The thread in which the learner learns, beside the event loop that takes fragments in.

Batches go in through a queue of bounded length; results come out through a callback, which is called in this thread:
under asyncio it should do no more than `loop.call_soon_threadsafe`. TensorFlow and NumPy let go of Python's lock
while they compute, so ingest goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from aiorl.errors import InternalError
from aiorl.learning.algorithms.algorithm import AlgorithmState, UpdateResult
from aiorl.learning.replay import Snapshot
from aiorl.process.tasks import first_of
from aiorl.run.ingest import AssembledBatch
from aiorl.run.policy_group import PolicyGroup

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WarmUpDone:
    """The update is compiled.

    Attributes:
        took_s: seconds it took.
    """

    took_s: float


@dataclass(frozen=True, slots=True)
class UpdateDone:
    """One train batch was learned from, or skipped.

    Attributes:
        batch: what was learned from.
        result: what the algorithms say of it.
        weights: policy id -> copies, as they are after it; None if they are not to go out yet.
        wait_s: time the thread waited for the batch.
        make_batch_s: time it took to lay the batch out.
        update_s: time it took to learn.
        state: gives all of the policies' state as it is after it, see `Algorithm.hold_state`.
        experience: policy id -> stored experience as it is after it, where that was asked for; see
            `Algorithm.hold_experience`.
    """

    batch: AssembledBatch
    result: UpdateResult
    weights: dict[str, dict[str, NDArray[Any]]] | None
    wait_s: float
    make_batch_s: float
    update_s: float
    state: Callable[[], AlgorithmState]
    experience: dict[str, Snapshot] | None = None


@dataclass(frozen=True, slots=True)
class UpdateFailed:
    """The thread has ended because of an error.

    Attributes:
        error: with its traceback.
        batch: the train batch it happened in, if any; its env steps are lost.
    """

    error: BaseException
    batch: AssembledBatch | None = None


@dataclass(frozen=True, slots=True)
class UpdatesEnded:
    """The thread has ended since it was to; no update follows.

    Attributes:
        num_left: train batches that it was handed, and has not touched.
    """

    num_left: int = 0


UpdateEvent = WarmUpDone | UpdateDone | UpdateFailed | UpdatesEnded


class Updater:
    """Makes updates, in whichever thread calls.

    Attributes:
        group: what learns.
        wants_experience: set to have the next update tell what is stored after it; any thread may.
    """

    def __init__(
        self,
        group: PolicyGroup,
        env_steps_total: int = 0,
        *,
        publish_every: int = 1,
        publish_interval_s: float = math.inf,
    ) -> None:
        """Nothing is compiled yet.

        Args:
            group: what learns.
            env_steps_total: env steps trained on before, when a run is resumed.
            publish_every: see `LeasePlan`.
            publish_interval_s: see `LeasePlan`.
        """
        self.group = group
        self.wants_experience = threading.Event()
        self._env_steps_total = env_steps_total
        self._publish_every = publish_every
        self._publish_interval_s = publish_interval_s
        self._unpublished = 0
        self._published_at = -math.inf

    def warm_up(self) -> WarmUpDone:
        """Compile the update."""
        started = time.perf_counter()
        self.group.warm_up()
        return WarmUpDone(time.perf_counter() - started)

    def update(self, batch: AssembledBatch, wait_s: float = 0.0) -> UpdateDone:
        """Learn from a train batch, which was waited for so long."""
        started = time.perf_counter()
        laid_out = self.group.make_batch(batch.batches)
        made = time.perf_counter()
        result = self.group.update(laid_out, self._env_steps_total)
        updated = time.perf_counter()
        self._env_steps_total += batch.env_steps
        weights = self.group.get_weights() if self._publishes(updated) else None
        state = self.group.hold_state()
        experience = None
        if self.wants_experience.is_set():
            self.wants_experience.clear()
            experience = self.group.hold_experience()
        return UpdateDone(batch, result, weights, wait_s, made - started, updated - made, state, experience)

    def publish_next(self) -> None:
        """Have the weights of the next update go out, as those of the first one do."""
        self._unpublished, self._published_at = 0, -math.inf

    def _publishes(self, now: float) -> bool:
        """Note an update; whether its weights are to go out."""
        self._unpublished += 1
        if self._unpublished < self._publish_every and now - self._published_at < self._publish_interval_s:
            return False
        self._unpublished, self._published_at = 0, now
        return True


class UpdateThread:
    """Runs updates one after the other in a thread of its own.

    After `start`, nothing else may use the policies until `join` has returned.
    """

    def __init__(
        self,
        group: PolicyGroup,
        on_event: Callable[[UpdateEvent], None],
        *,
        env_steps_total: int = 0,
        max_queued: int = 2,
        publish_every: int = 1,
        publish_interval_s: float = math.inf,
    ) -> None:
        """Nothing runs yet.

        Args:
            group: what learns; warmed up first thing in the thread.
            on_event: called in the thread with each event; must neither block nor raise.
            env_steps_total: env steps trained on before, when a run is resumed.
            max_queued: train batches that may wait.
            publish_every: see `LeasePlan`.
            publish_interval_s: see `LeasePlan`.
        """
        self._updater = Updater(
            group, env_steps_total, publish_every=publish_every, publish_interval_s=publish_interval_s
        )
        self._on_event = on_event
        self._max_queued = max_queued
        self._batches_queued = 0
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[AssembledBatch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="aiorl-update", daemon=True)
        self._stopping = threading.Event()

    @property
    def has_room(self) -> bool:
        """Whether `submit_nowait` would take a batch now."""
        with self._lock:
            return self._batches_queued < self._max_queued and not self._stopping.is_set()

    def ask_for_experience(self) -> None:
        """Have the next update tell what is stored after it."""
        self._updater.wants_experience.set()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread: it compiles the update, then waits for batches."""
        self._thread.start()

    def submit_nowait(self, batch: AssembledBatch) -> bool:
        """Hand a train batch over; False, and nothing done, if as many wait as may.

        Raises: InternalError after `stop`.
        """
        if self._stopping.is_set():
            raise InternalError("a train batch for an update thread that was stopped")
        with self._lock:
            if self._batches_queued >= self._max_queued:
                return False
            self._batches_queued += 1
        self._inbox.put(batch)
        return True

    def stop(self) -> None:
        """Let the thread end after what it is doing now; batches that wait are not trained on. May be repeated."""
        self._stopping.set()
        self._inbox.put(None)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread to end; whether it has."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        batch: AssembledBatch | None = None
        try:
            self._on_event(self._updater.warm_up())
            waiting_since = time.perf_counter()
            while (item := self._inbox.get()) is not None and not self._stopping.is_set():
                batch = item
                with self._lock:
                    self._batches_queued -= 1
                self._on_event(self._updater.update(batch, time.perf_counter() - waiting_since))
                batch = None
                waiting_since = time.perf_counter()
            self._on_event(UpdatesEnded(self._batches_queued))
        except BaseException as error:  # the owner decides what follows, so nothing may get lost in this thread
            _log.debug("the update thread ends with an error", exc_info=True)
            self._stopping.set()
            self._on_event(UpdateFailed(error, batch))


class LastUpdate:
    """The end of an update thread, as the event loop waits for it; to be made on the running loop."""

    def __init__(self, stop: Callable[[], None]) -> None:
        """Take what has the thread end after the update that it is at: `UpdateThread.stop`."""
        self._stop = stop
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def come(self) -> None:
        """The thread has said that it ended."""
        if not self._end.done():
            self._end.set_result(None)

    async def wait(self, wait_s: float, hurry: asyncio.Event, on_wait: Callable[[], None]) -> None:
        """Wait until the running update has ended; in a hurry, no longer than a little while.

        Args:
            wait_s: the little while.
            hurry: set when, or as soon as, there is no time.
            on_wait: called when it takes longer.
        """
        self._stop()
        await asyncio.wait([self._end], timeout=wait_s)
        if not self._end.done() and not hurry.is_set():
            on_wait()
            await first_of(hurry.wait(), self._end)
