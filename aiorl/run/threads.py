"""An event loop in its own thread, and calls to it from other threads.

A trainer therefore works in scripts, in threads and in notebooks, where another loop is running,
and workers get answers between two calls, too. While the caller waits for the loop, its thread runs
steps for the loop. In a run without workers these are all sampling and updates, so that a debugger,
a profiler and ``print`` see them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

from aiorl.errors import InternalError
from aiorl.process import tasks
from aiorl.process.machine import keep_children_out
from aiorl.process.program import on_stop_signals_for_loop_of_another_thread

T = TypeVar("T")

_END_S = 10.0
_LOOK_S = 0.25


class BrokenOff(Exception):
    """Interruption of a step by ``exit`` or Ctrl-C, whose own exceptions are not subclasses of
    Exception.
    """


@dataclass(frozen=True, slots=True)
class _Call:
    step: Callable[[], Any]
    is_breakable: bool
    outcome: concurrent.futures.Future[tuple[Any, BaseException | None]]


class LoopThread:
    """Runs an event loop until it is closed.

    Attributes:
        was_interrupted: True if Ctrl-C was pressed during the newest `call`, which returned a
            result nonetheless.
    """

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self.was_interrupted = False
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._is_breakable = self._handles_interrupts = False
        self._loop = tasks.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # For the caller
    # ----------------------------------------------------------------------------------------------

    def ask(self, step: Coroutine[Any, Any, T]) -> T:
        """Return a coroutine's result; Ctrl-C cancels it and is raised when it has ended.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed; the coroutine has ended.
            Exception: the error of the coroutine.
        """
        result = self.call(step)
        if self.was_interrupted:
            raise KeyboardInterrupt
        return result

    def do(self, function: Callable[[], T]) -> T:
        """Call a function on the loop and return its result."""

        async def step() -> T:
            return function()

        return self.ask(step())

    def call(
        self, step: Coroutine[Any, Any, T], on_interrupt: Callable[[], object] | None = None
    ) -> T:
        """Return a coroutine's result, and meanwhile run the steps passed to `in_caller`.

        Args:
            step: the coroutine.
            on_interrupt: called for each Ctrl-C instead of raising KeyboardInterrupt, in the main
                thread of a program without its own handler; None cancels the coroutine.

        Raises:
            KeyboardInterrupt: Ctrl-C cancelled the coroutine, which has ended.
            Exception: the error of the coroutine.
        """
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            step.close()
            raise InternalError(
                "a trainer cannot be called from its own event loop, nor after its end"
            )
        ended: concurrent.futures.Future[T] = concurrent.futures.Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            if not tasks:
                tasks.append(self._loop.create_task(step))
                tasks[0].add_done_callback(lambda task: _settle(ended, task))

        def cancel_task() -> None:
            begin()  # a signal handler may have raised before it was scheduled
            tasks[0].cancel()

        def cancel() -> None:
            self.soon(cancel_task)

        def interrupt() -> None:
            self.was_interrupted = True
            (on_interrupt or cancel)()

        self.was_interrupted = False
        ended.add_done_callback(lambda _: self._calls.put(None))
        with self._interruptible(interrupt):
            try:
                self.soon(begin)
                while not ended.done():
                    self._serve_one(interrupt)
            except BaseException:  # raised by a signal handler of the program
                cancel()
                while not ended.done():
                    concurrent.futures.wait([ended], timeout=_LOOK_S)
                raise
        if ended.cancelled() and self.was_interrupted:
            raise KeyboardInterrupt
        return ended.result()

    def end(self, step: Coroutine[Any, Any, None], hurry: Callable[[], object]) -> None:
        """Run a coroutine that ends something; Ctrl-C calls ``hurry`` on the loop.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed; the coroutine has ended.
        """
        self.call(step, lambda: self.soon(hurry))
        if self.was_interrupted:
            raise KeyboardInterrupt

    def soon(self, function: Callable[[], object]) -> None:
        """Schedule a function on the loop; a signal handler can call this."""
        self._loop.call_soon_threadsafe(function)

    def break_off(self) -> None:
        """Interrupt a breakable step; call this from a signal handler in the waiting thread."""
        if self._is_breakable:
            raise KeyboardInterrupt

    def on_stop_signals(self, stop: Callable[[str], None]) -> None:
        """Call ``stop`` on the loop at Ctrl-C and SIGTERM, and interrupt the caller's step if it is
        breakable.
        """
        on_stop_signals_for_loop_of_another_thread(self._loop, stop, self.break_off)
        # the handler raises only in breakable steps, so signals need not be deferred
        self._handles_interrupts = True

    def close(self) -> None:
        """End the loop and its thread."""
        if self._thread.is_alive():
            self.soon(self._loop.stop)
            self._thread.join(_END_S)

    # For the loop
    # ----------------------------------------------------------------------------------------------

    async def in_caller(self, step: Callable[[], T], *, is_breakable: bool = False) -> T:
        """Run a step in the thread that waits in `call`; if this coroutine is cancelled, the step
        continues.

        Args:
            step: function to call.
            is_breakable: True if Ctrl-C can interrupt it.

        Returns:
            Result of the step.

        Raises:
            BrokenOff: the step was interrupted.
            Exception: the error of the step.
        """
        call = _Call(step, is_breakable, concurrent.futures.Future())
        self._calls.put(call)
        result, error = await asyncio.shield(asyncio.wrap_future(call.outcome))
        if error is None:
            return result  # type: ignore[no-any-return]
        if isinstance(error, Exception):
            raise error
        # a BaseException might end the loop
        raise BrokenOff(f"{type(error).__name__} interrupted a step") from error

    # Inside
    # ----------------------------------------------------------------------------------------------

    def _serve_one(self, on_interrupt: Callable[[], object]) -> None:
        """Make the next call, or return after a while or when the coroutine has ended.

        The wait is short because a signal just before it does not end it: Python has checked for
        signals by then.
        """
        try:
            call = self._calls.get(timeout=_LOOK_S)
            if call is not None:
                self._make(call)
        except queue.Empty:
            pass
        except KeyboardInterrupt:
            on_interrupt()

    def _make(self, call: _Call) -> None:
        result = None
        error = None
        late: list[Callable[[], object]] = []
        handler: contextlib.AbstractContextManager[None] = _deferred(late)
        if call.is_breakable or self._handles_interrupts:
            handler = contextlib.nullcontext()
        try:
            self._is_breakable = call.is_breakable
            with handler:
                try:
                    result = keep_children_out(call.step)
                finally:
                    self._is_breakable = False
        except BaseException as raised:  # the caller of `in_caller` handles it
            error = raised
        call.outcome.set_result((result, error))
        for handle in late:
            handle()

    @contextlib.contextmanager
    def _interruptible(self, on_interrupt: Callable[[], object]) -> Iterator[None]:
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return

        def interrupt(number: int, frame: object) -> None:
            on_interrupt()
            self.break_off()

        try:
            signal.signal(signal.SIGINT, interrupt)
            self._handles_interrupts = True
            yield
        finally:
            self._handles_interrupts = False
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            pending = asyncio.all_tasks(self._loop)
            for task in pending:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()


def _settle(ended: concurrent.futures.Future[T], task: asyncio.Task[T]) -> None:
    if task.cancelled():
        ended.cancel()
        ended.set_running_or_notify_cancel()
        return
    error = task.exception()
    if error is not None:
        ended.set_exception(error)
    else:
        ended.set_result(task.result())


@contextlib.contextmanager
def _deferred(late: list[Callable[[], object]]) -> Iterator[None]:
    """Defer the program's own handler of Ctrl-C, since it may raise in a step that must not be
    interrupted.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        late.append(lambda: handler(number, frame))

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
