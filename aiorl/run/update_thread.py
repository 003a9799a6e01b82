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

from aiorl.run.ingest import AssembledBatch
from aiorl.run.policy_group import UpdateDone, Updater, WarmUpDone

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UpdatesEnded:
    """The thread has ended; no update follows.

    Attributes:
        num_left: train batches that it was handed, and has not touched.
        error: what ended it, with its traceback; None if it was to end.
        batch: the train batch that the error came of, if any; its env steps are lost.
    """

    num_left: int = 0
    error: BaseException | None = None
    batch: AssembledBatch | None = None


UpdateEvent = WarmUpDone | UpdateDone | UpdatesEnded


class UpdateThread:
    """Runs updates one after the other in a thread of its own; one train batch may wait.

    After `start`, nothing else may use the policies until the thread has ended.

    Attributes:
        updater: makes the updates.
    """

    def __init__(self, updater: Updater, on_event: Callable[[UpdateEvent], None]) -> None:
        """Nothing runs yet.

        Args:
            updater: makes the updates; it is warmed up first thing in the thread.
            on_event: called in the thread with each event; must neither block nor raise.
        """
        self.updater = updater
        self._on_event = on_event
        self._inbox: queue.SimpleQueue[AssembledBatch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="aiorl-update", daemon=True)
        self._stopping = threading.Event()

    @property
    def has_room(self) -> bool:
        """Whether a batch may be handed over now."""
        return self._inbox.empty() and not self._stopping.is_set()

    def start(self) -> None:
        """Start the thread: it compiles the update, then waits for batches."""
        self._thread.start()

    def submit_nowait(self, batch: AssembledBatch) -> None:
        """Hand a train batch over, for which there must be room. One thread only calls this."""
        self._inbox.put(batch)

    def stop(self) -> None:
        """Let the thread end after what it is doing now; a batch that waits is not trained on. May be repeated."""
        self._stopping.set()
        self._inbox.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; whether it has."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        batch: AssembledBatch | None = None
        try:
            self._on_event(self.updater.warm_up())
            waiting_since = time.perf_counter()
            while (item := self._inbox.get()) is not None and not self._stopping.is_set():
                batch = item
                self._on_event(self.updater.update(batch, time.perf_counter() - waiting_since))
                batch = None
                waiting_since = time.perf_counter()
            left = [item]
            while not self._inbox.empty():
                left.append(self._inbox.get())
            self._on_event(UpdatesEnded(sum(one is not None for one in left)))
        except BaseException as error:  # the owner decides what follows, so nothing may get lost in this thread
            _log.debug("the update thread ends with an error", exc_info=True)
            self._stopping.set()
            self._on_event(UpdatesEnded(error=error, batch=batch))
