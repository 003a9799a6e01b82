"""The thread that waits for a run does the run's work meanwhile, where a debugger, a profiler and ``print`` see it.

The run itself goes on on an event loop in another thread, which has steps called here one at a time.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from aiorl.process.forked_child import keep_children_out

__all__ = ["BrokenOff", "CallerThread"]

T = TypeVar("T")


class BrokenOff(Exception):
    """A step was left in its middle by what is no Exception: Ctrl-C, ``exit``."""


@dataclass(frozen=True, slots=True)
class _Call:
    step: Callable[[], Any]
    is_breakable: bool
    outcome: concurrent.futures.Future[tuple[Any, BaseException | None]]


class CallerThread:
    """Has steps called in the thread that serves."""

    def __init__(self) -> None:
        """Nothing is served yet; what is asked for waits."""
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._is_breakable = False

    async def call(self, step: Callable[[], T], *, is_breakable: bool = False) -> T:
        """Have a step called; to be awaited on the loop. What is cancelled meanwhile is the wait, not the step.

        Args:
            step: what to call.
            is_breakable: Ctrl-C may leave it in its middle.
        Returns: what it gave.

        Raises:
            BrokenOff: it was left in its middle.
            Exception: what it raised.
        """
        call = _Call(step, is_breakable, concurrent.futures.Future())
        self._calls.put(call)
        given, error = await asyncio.shield(asyncio.wrap_future(call.outcome))
        if error is None:
            return given  # type: ignore[no-any-return]
        if isinstance(error, Exception):
            raise error
        raise BrokenOff(f"{type(error).__name__} came in the middle of a step") from error  # else it may end the loop

    def serve(self, ended: concurrent.futures.Future[T], on_interrupt: Callable[[], object] = lambda: None) -> T:
        """Make calls in this thread until a run has ended; what it gave.

        Args:
            ended: the run's.
            on_interrupt: called with each Ctrl-C, where that raises KeyboardInterrupt else: in the main thread of a
                program that does nothing about it.

        Raises: what the run raised.
        """
        ended.add_done_callback(lambda _: self._calls.put(None))
        with self._interruptible(on_interrupt):
            while (call := self._calls.get()) is not None:
                self._make(call)
        return ended.result()

    def break_off(self) -> None:
        """Leave a breakable step in its middle; to be called by a signal handler in the thread that serves."""
        if self._is_breakable:
            raise KeyboardInterrupt

    def _make(self, call: _Call) -> None:
        given, error = None, None
        try:
            self._is_breakable = call.is_breakable
            try:
                given = keep_children_out(call.step)
            finally:
                self._is_breakable = False
        except BaseException as raised:  # who asked for it decides what follows
            error = raised
        call.outcome.set_result((given, error))

    @contextlib.contextmanager
    def _interruptible(self, on_interrupt: Callable[[], object]) -> Iterator[None]:
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return

        def interrupt(number: int, frame: object) -> None:
            on_interrupt()
            self.break_off()

        signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
