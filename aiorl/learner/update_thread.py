"""The thread in which the learner learns, beside the event loop that takes fragments in.

Batches go in through a queue of bounded length; results come out through a callback, which is called in this thread:
under asyncio it should do no more than `loop.call_soon_threadsafe`. TensorFlow and NumPy let go of Python's lock
while they compute, so ingest goes on meanwhile.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from aiorl.algorithms.algorithm import AlgorithmState, UpdateResult
from aiorl.errors import InternalError
from aiorl.learner.ingest import AssembledBatch
from aiorl.learner.policy_group import PolicyGroup

__all__ = ["StateTaken", "UpdateDone", "UpdateEvent", "UpdateFailed", "UpdateThread", "WarmUpDone"]

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
        weights: policy id -> copies, as they are after it.
        env_steps_total: env steps trained on, this batch included (skipped ones count).
        wait_s: time the thread waited for the batch.
        make_batch_s: time it took to lay the batch out.
        update_s: time it took to learn.
        weights_s: time it took to copy the weights.
        state: gives all of the policies' state as it is after it, see `Algorithm.hold_state`.
    """

    batch: AssembledBatch
    result: UpdateResult
    weights: dict[str, dict[str, NDArray[Any]]]
    env_steps_total: int
    wait_s: float
    make_batch_s: float
    update_s: float
    weights_s: float
    state: Callable[[], AlgorithmState]


@dataclass(frozen=True, slots=True)
class StateTaken:
    """What `request_state` asked for.

    Attributes:
        state: as it was between two updates.
        env_steps_total: env steps trained on at that time.
    """

    state: AlgorithmState
    env_steps_total: int


@dataclass(frozen=True, slots=True)
class UpdateFailed:
    """The thread has ended because of an error.

    Attributes:
        error: with its traceback.
        batch: the train batch it happened in, if any; its env steps are lost.
    """

    error: BaseException
    batch: AssembledBatch | None = None


UpdateEvent = WarmUpDone | UpdateDone | StateTaken | UpdateFailed


class _Stop:
    """Ends the thread."""


class _TakeState:
    """Asks for the policies' state."""


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
    ) -> None:
        """Nothing runs yet.

        Args:
            group: what learns; warmed up first thing in the thread.
            on_event: called in the thread with each event; must neither block nor raise.
            env_steps_total: env steps trained on before, when a run is resumed.
            max_queued: train batches that may wait.
        """
        self._group = group
        self._on_event = on_event
        self._env_steps_total = env_steps_total
        self._max_queued = max_queued
        self._batches_queued = 0
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[AssembledBatch | _TakeState | _Stop] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="aiorl-update", daemon=True)
        self._stopping = threading.Event()
        self._last_wanted = threading.Event()

    @property
    def has_room(self) -> bool:
        """Whether `submit_nowait` would take a batch now."""
        with self._lock:
            return self._batches_queued < self._max_queued and not self._stopping.is_set()

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

    def request_state(self) -> None:
        """Ask for a copy of the policies' state; it comes as `StateTaken`, after the batches that wait."""
        self._inbox.put(_TakeState())

    def request_last_state(self) -> None:
        """Ask for a copy of the policies' state once no update runs; with it the thread ends.

        Batches that wait are not trained on, and what `request_state` asked for before is not answered again.
        """
        self._last_wanted.set()
        self._inbox.put(_TakeState())

    def stop(self) -> None:
        """Let the thread end after what it is doing now; batches that wait are not trained on. May be repeated."""
        self._stopping.set()
        self._inbox.put(_Stop())

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread to end; whether it has."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        batch: AssembledBatch | None = None
        try:
            started = time.perf_counter()
            self._group.warm_up()
            self._on_event(WarmUpDone(time.perf_counter() - started))
            while not self._stopping.is_set():
                waiting_since = time.perf_counter()
                item = self._inbox.get()
                if self._stopping.is_set() or isinstance(item, _Stop):
                    break
                if isinstance(item, _TakeState) or self._last_wanted.is_set():
                    self._on_event(StateTaken(self._group.get_state(), self._env_steps_total))
                    if self._last_wanted.is_set():
                        self._stopping.set()
                    continue
                batch = item
                with self._lock:
                    self._batches_queued -= 1
                self._on_event(self._update(batch, time.perf_counter() - waiting_since))
                batch = None
        except BaseException as error:  # the owner decides what follows, so nothing may get lost in this thread
            _log.debug("the update thread ends with an error", exc_info=True)
            self._stopping.set()
            self._on_event(UpdateFailed(error, batch))

    def _update(self, batch: AssembledBatch, wait_s: float) -> UpdateDone:
        started = time.perf_counter()
        laid_out = self._group.make_batch(batch.batches)
        made = time.perf_counter()
        result = self._group.update(laid_out, self._env_steps_total)
        updated = time.perf_counter()
        self._env_steps_total += batch.env_steps
        weights = self._group.get_weights()
        copied = time.perf_counter()
        return UpdateDone(
            batch,
            result,
            weights,
            self._env_steps_total,
            wait_s,
            made - started,
            updated - made,
            copied - updated,
            self._group.hold_state(),
        )
