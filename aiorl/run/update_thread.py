"""The thread in which the learner learns, beside the event loop that takes fragments in.

Batches go in through a queue of bounded length; results come out through a callback, which is called in this thread:
under asyncio it should do no more than `loop.call_soon_threadsafe`. TensorFlow and NumPy let go of Python's lock
while they compute, so ingest goes on meanwhile.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from aiorl.errors import InternalError
from aiorl.run.ingest import AssembledBatch
from aiorl.run.policy_group import PolicyGroup, UpdateDone, Updater, WarmUpDone

_log = logging.getLogger(__name__)


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
        self._inbox: queue.SimpleQueue[AssembledBatch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="aiorl-update", daemon=True)
        self._stopping = threading.Event()

    @property
    def has_room(self) -> bool:
        """Whether `submit_nowait` would take a batch now."""
        return self._inbox.qsize() < self._max_queued and not self._stopping.is_set()

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
        """Hand a train batch over; False, and nothing done, if as many wait as may. One thread only calls this.

        Raises: InternalError after `stop`.
        """
        if self._stopping.is_set():
            raise InternalError("a train batch for an update thread that was stopped")
        if not self.has_room:
            return False
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
                self._on_event(self._updater.update(batch, time.perf_counter() - waiting_since))
                batch = None
                waiting_since = time.perf_counter()
            left = [item]
            while not self._inbox.empty():
                left.append(self._inbox.get())
            self._on_event(UpdatesEnded(sum(one is not None for one in left)))
        except BaseException as error:  # the owner decides what follows, so nothing may get lost in this thread
            _log.debug("the update thread ends with an error", exc_info=True)
            self._stopping.set()
            self._on_event(UpdateFailed(error, batch))
