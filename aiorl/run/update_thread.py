"""Thread that makes the updates, next to the event loop that receives fragments.

Batches go in through a queue of bounded length. Results come out through a callback, which is
called in this thread and which under asyncio should only call `loop.call_soon_threadsafe`.
TensorFlow and NumPy release Python's lock while they compute, so that the loop continues to
receive.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from aiorl.run.ingest import AssembledBatch
from aiorl.run.policy_group import UpdateDone, Updater, WarmUpDone

_log = logging.getLogger(__name__)

_LAST_UPDATE_S = 60.0


@dataclass(frozen=True, slots=True)
class UpdatesEnded:
    """Event: the thread has ended; no update follows.

    Attributes:
        num_left: number of train batches that it was given and has not touched.
        error: error that ended it, with its traceback; None if it was stopped.
        batch: train batch that caused the error, if any; its env steps are lost.
    """

    num_left: int = 0
    error: BaseException | None = None
    batch: AssembledBatch | None = None


UpdateEvent = WarmUpDone | UpdateDone | UpdatesEnded


class UpdateThread:
    """Makes updates one after the other in its own thread; one train batch can wait.

    After `start`, no other code must use the policies until the thread has ended.

    Attributes:
        updater: makes the updates.
    """

    def __init__(self, updater: Updater, on_event: Callable[[UpdateEvent], None]) -> None:
        """Prepare without starting the thread yet.

        Args:
            updater: makes the updates; the thread warms it up first.
            on_event: called in the thread with each event; must neither block nor raise.
        """
        self.updater = updater
        self._on_event = on_event
        self._inbox: queue.SimpleQueue[AssembledBatch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="aiorl-update", daemon=True)
        self._stopping = threading.Event()

    def start(self) -> None:
        """Start the thread, which compiles the update and then waits for batches."""
        self._thread.start()

    def submit_nowait(self, batch: AssembledBatch) -> None:
        """See `Updates`; only one thread can call this."""
        self._inbox.put(batch)

    def stop(self) -> None:
        """End the thread after its current update; a waiting batch is not trained on.

        Can be called again.
        """
        if self._thread.is_alive() and not self._stopping.is_set():
            # the end of Python aborts the process if a thread is in TensorFlow's code then
            atexit.register(self._thread.join, _LAST_UPDATE_S)
        self._stopping.set()
        self._inbox.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; return True if it has."""
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
            num_left = self._num_waiting()
            if item is not None:
                num_left += 1
            self._on_event(UpdatesEnded(num_left))
        # the owner handles it, so no error must get lost in this thread
        except BaseException as error:
            _log.debug("the update thread ends with an error", exc_info=True)
            self._stopping.set()
            self._on_event(UpdatesEnded(self._num_waiting(), error=error, batch=batch))

    def _num_waiting(self) -> int:
        """Take the batches that wait out of the inbox, and return their number."""
        number = 0
        while not self._inbox.empty():
            if self._inbox.get() is not None:
                number += 1
        return number
