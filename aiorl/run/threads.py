"""An event loop in a thread of its own, and the thread that asks it for things.

So a trainer works in scripts, in threads and in notebooks, where another loop is running, and workers are answered also
between two calls. While the caller waits for the loop, its thread does what the loop wants done there: in a run without
workers all sampling and updates, one step at a time, where a debugger, a profiler and ``print`` see them.
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
    """A step was left in its middle by ``exit`` or Ctrl-C, which are no Exceptions."""


@dataclass(frozen=True, slots=True)
class _Call:
    step: Callable[[], Any]
    is_breakable: bool
    outcome: concurrent.futures.Future[tuple[Any, BaseException | None]]


class LoopThread:
    """Runs an event loop until it is closed.

    Attributes:
        was_interrupted: Ctrl-C came in the newest `call`, which ended with a result nonetheless.
    """

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self.was_interrupted = False
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._is_breakable = self._handles_interrupts = False
        self._loop = tasks.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # For the caller -------------------------------------------------------------------------------------------

    def ask(self, step: Coroutine[Any, Any, T]) -> T:
        """Return a coroutine's result; Ctrl-C cancels it and is raised when it has ended.

        Raises: what the coroutine raised.
        """
        found = self.call(step)
        if self.was_interrupted:
            raise KeyboardInterrupt
        return found

    def do(self, function: Callable[[], T]) -> T:
        """Return the result of a function that is called on the loop."""

        async def step() -> T:
            return function()

        return self.ask(step())

    def call(self, step: Coroutine[Any, Any, T], on_interrupt: Callable[[], object] | None = None) -> T:
        """Return a coroutine's result, and do meanwhile what `in_caller` is asked for.

        Args:
            step: the coroutine.
            on_interrupt: called with each Ctrl-C in place of KeyboardInterrupt, in the main thread of a program that
                does nothing about it; None cancels the coroutine.

        Raises:
            KeyboardInterrupt: Ctrl-C has cancelled the coroutine, which has ended.
            Exception: what the coroutine raised.
        """
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            step.close()
            raise InternalError("a trainer can't be asked from its own event loop, nor after its end")
        ended: concurrent.futures.Future[T] = concurrent.futures.Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(step))
            tasks[0].add_done_callback(lambda task: _settle(ended, task))

        def cancel() -> None:
            self.soon(lambda: tasks[0].cancel())

        def interrupt() -> None:
            self.was_interrupted = True
            (on_interrupt or cancel)()

        self.was_interrupted = False
        ended.add_done_callback(lambda _: self._calls.put(None))
        self.soon(begin)
        with self._interruptible(interrupt):
            try:
                while not ended.done():
                    self._serve_one(interrupt)
            except BaseException:  # a signal handler of the program's
                cancel()
                while not ended.done():
                    concurrent.futures.wait([ended], timeout=_LOOK_S)
                raise
        if ended.cancelled() and self.was_interrupted:
            raise KeyboardInterrupt
        return ended.result()

    def end(self, step: Coroutine[Any, Any, None], hurry: Callable[[], object]) -> None:
        """Have something ended; Ctrl-C has it hurry.

        Raises:
            KeyboardInterrupt: it came meanwhile, and all has ended.
        """
        self.call(step, lambda: self.soon(hurry))
        if self.was_interrupted:
            raise KeyboardInterrupt

    def soon(self, function: Callable[[], object]) -> None:
        """Have a function called on the loop; may be called by a signal handler."""
        self._loop.call_soon_threadsafe(function)

    def break_off(self) -> None:
        """Leave a breakable step in its middle; to be called by a signal handler in the thread that waits."""
        if self._is_breakable:
            raise KeyboardInterrupt

    def on_stop_signals(self, stop: Callable[[str], None]) -> None:
        """Have Ctrl-C and SIGTERM call ``stop`` on the loop, and break off a step of the caller's that may be."""
        on_stop_signals_for_loop_of_another_thread(self._loop, stop, self.break_off)
        self._handles_interrupts = True  # it raises in breakable steps alone, so no step needs to put it off

    def close(self) -> None:
        """End the loop, and the thread with it."""
        if self._thread.is_alive():
            self.soon(self._loop.stop)
            self._thread.join(_END_S)

    # For the loop ---------------------------------------------------------------------------------------------

    async def in_caller(self, step: Callable[[], T], *, is_breakable: bool = False) -> T:
        """Have a step called in the thread that waits in `call`; if this is cancelled, the step goes on.

        Args:
            step: what to call.
            is_breakable: Ctrl-C may leave it in its middle.

        Returns: its result.

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

    # Inside ---------------------------------------------------------------------------------------------------

    def _serve_one(self, on_interrupt: Callable[[], object]) -> None:
        """Make the next call, or return after a while or when the coroutine has ended.

        A signal that comes between Python's last look for one and the wait for a lock doesn't end that wait.
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
        given, error = None, None
        late: list[Callable[[], object]] = []
        try:
            self._is_breakable = call.is_breakable
            with contextlib.nullcontext() if call.is_breakable or self._handles_interrupts else _deferred(late):
                try:
                    given = keep_children_out(call.step)
                finally:
                    self._is_breakable = False
        except BaseException as raised:  # who asked for it decides what follows
            error = raised
        call.outcome.set_result((given, error))
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

        signal.signal(signal.SIGINT, interrupt)
        self._handles_interrupts = True
        try:
            yield
        finally:
            self._handles_interrupts = False
            signal.signal(signal.SIGINT, signal.default_int_handler)

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


def _settle(ended: concurrent.futures.Future[T], task: asyncio.Task[T]) -> None:
    if task.cancelled():
        ended.cancel()
        ended.set_running_or_notify_cancel()
    elif (error := task.exception()) is not None:
        ended.set_exception(error)
    else:
        ended.set_result(task.result())


@contextlib.contextmanager
def _deferred(late: list[Callable[[], object]]) -> Iterator[None]:
    """Have the program's own handler of Ctrl-C called later, for it may raise in the middle of what must be whole."""
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
