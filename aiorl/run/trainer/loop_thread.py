"""An event loop in a thread of its own, which the caller's thread asks for things.

So a trainer works in scripts, in threads, and in notebooks, whose own loop is running; and workers are answered also
while nobody asks for anything.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aiorl.errors import InternalError
from aiorl.process import event_loop
from aiorl.process.signals import on_stop_signals_for_loop_of_another_thread

__all__ = ["LoopThread"]

T = TypeVar("T")

_END_S = 10.0
_CANCELLED_S = 30.0
_LOOK_S = 0.25


def _result(future: concurrent.futures.Future[T]) -> T:
    """Return a future's result; look up now and then.

    A signal that comes between Python's last look for one and the wait for a lock doesn't end that wait.
    """
    while not future.done():
        concurrent.futures.wait([future], timeout=_LOOK_S)
    return future.result()


class LoopThread:
    """Runs an event loop until it is closed."""

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self._loop = event_loop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, step: Coroutine[Any, Any, T]) -> T:
        """Return a coroutine's result; what interrupts the wait for it, such as Ctrl-C, cancels it and awaits its end.

        Raises: what the coroutine raised.
        """
        self._refuse_unless_running(step)
        tasks: list[asyncio.Task[Any]] = []
        has_ended = threading.Event()

        async def watched() -> T:
            tasks.extend(filter(None, [asyncio.current_task()]))
            try:
                return await step
            finally:
                has_ended.set()

        try:
            return _result(self.start(watched()))
        except BaseException:
            if not has_ended.is_set():
                self._end(step, tasks)
                has_ended.wait(_CANCELLED_S if tasks else 0)
            raise

    def _end(self, step: Coroutine[Any, Any, Any], tasks: list[asyncio.Task[Any]]) -> None:
        """Cancel what was asked for, whether or not the interrupt came before the loop knew of it."""
        for _ in range(2):  # in the first turn its task is made, in the second it begins
            self._wait_for_turn()
        if tasks:
            self._loop.call_soon_threadsafe(tasks[0].cancel)
        else:
            step.close()

    def _wait_for_turn(self) -> None:
        """Wait until the loop has done what it was asked for before."""
        turn = threading.Event()
        self._loop.call_soon_threadsafe(turn.set)
        turn.wait(_CANCELLED_S)

    def finish(self, step: Coroutine[Any, Any, T], on_interrupt: Callable[[], None]) -> T:
        """Return a coroutine's result, whatever interrupts the wait for it.

        Args:
            step: the coroutine.
            on_interrupt: called on the loop with each Ctrl-C.

        Raises: what the coroutine raised.
        """
        future = self.start(step)
        while True:
            try:
                return _result(future)
            except KeyboardInterrupt:
                self.soon(on_interrupt)

    def end(self, step: Coroutine[Any, Any, None], hurry: Callable[[], None]) -> None:
        """As `finish`, for what ends something: Ctrl-C is not lost, but raised when all has ended.

        Raises:
            KeyboardInterrupt: it came meanwhile.
        """
        interrupts = 0

        def on_interrupt() -> None:
            nonlocal interrupts
            interrupts += 1
            hurry()

        self.finish(step, on_interrupt)
        if interrupts:
            raise KeyboardInterrupt

    def soon(self, function: Callable[[], object]) -> None:
        """Have a function called on the loop; may be called by a signal handler."""
        self._loop.call_soon_threadsafe(function)

    def on_stop_signals(self, stop: Callable[[str], None], break_off: Callable[[], None]) -> None:
        """See `on_stop_signals_for_loop_of_another_thread`."""
        on_stop_signals_for_loop_of_another_thread(self._loop, stop, break_off)

    def start(self, step: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Return what will have a coroutine's result."""
        self._refuse_unless_running(step)
        return asyncio.run_coroutine_threadsafe(step, self._loop)

    def _refuse_unless_running(self, step: Coroutine[Any, Any, Any]) -> None:
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            step.close()
            raise InternalError("a trainer can't be asked from its own event loop, nor after its end")

    def do(self, function: Callable[[], T]) -> T:
        """Return what a function returns that is called on the loop."""

        async def step() -> T:
            return function()

        return self.call(step())

    def close(self) -> None:
        """End the loop, and the thread with it."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_END_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()
