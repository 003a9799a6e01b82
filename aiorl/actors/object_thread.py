"""The thread of an actor's object."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeAlias

from aiorl.process.machine import keep_children_out

OnEnd: TypeAlias = Callable[[Any, BaseException | None], None]
"""(result, error) -> None: takes the end of a call, on the event loop."""


class ThreadCall:
    """A function that runs in the thread, or waits for it.

    Attributes:
        function: the function.
        on_end: takes its end.
        is_cancelled: True once no one waits for the end.
    """

    __slots__ = ("_error", "_result", "function", "is_cancelled", "on_end")

    def __init__(self, function: Callable[[], Any], on_end: OnEnd) -> None:
        self.function = function
        self.on_end = on_end
        self.is_cancelled = False
        self._result: Any = None
        self._error: BaseException | None = None

    def cancel(self) -> None:
        """Leave the function out if it has not begun, and drop its result otherwise; the call ends
        at once, with CancelledError.
        """
        if not self.is_cancelled:
            self.is_cancelled = True
            self.on_end(None, asyncio.CancelledError())

    def run(self) -> None:
        """Run the function, in the thread."""
        try:
            self._result = keep_children_out(self.function)
        except BaseException as error:
            self._error = error

    def end(self) -> None:
        """Pass the end on, on the event loop."""
        if not self.is_cancelled:
            self.on_end(self._result, self._error)


class ObjectThread:
    """Thread that calls functions in order; it ends with the process.

    Each call costs two changes of threads and little else: `concurrent.futures` would take half as
    long again. The ends of calls that follow each other closely reach the event loop together.
    """

    def __init__(self) -> None:
        """Start the thread."""
        self._loop = asyncio.get_running_loop()
        self._calls: SimpleQueue[ThreadCall] = SimpleQueue()
        self._ended: deque[ThreadCall] = deque()
        self._is_reported = False
        threading.Thread(target=self._run, name="actor", daemon=True).start()

    def begin(self, function: Callable[[], Any], on_end: OnEnd) -> ThreadCall:
        """Call a function, and ``on_end`` on the event loop with its result or its error."""
        call = ThreadCall(function, on_end)
        self._calls.put(call)
        return call

    async def call(self, function: Callable[[], Any]) -> Any:
        """Call a function, and return its result.

        A function that has not begun when this is cancelled is left out.
        """
        ended: asyncio.Future[Any] = self._loop.create_future()

        def on_end(result: Any, error: BaseException | None) -> None:
            if ended.done():
                return
            if isinstance(error, StopIteration):  # no future can have this exception
                error = RuntimeError("the method raised StopIteration")
            if error is None:
                ended.set_result(result)
            else:
                ended.set_exception(error)

        call = self.begin(function, on_end)
        try:
            return await ended
        except asyncio.CancelledError:
            call.cancel()
            raise

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            if call.is_cancelled:
                continue
            call.run()
            self._ended.append(call)
            if not self._is_reported:
                self._is_reported = True
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._report)

    def _report(self) -> None:
        self._is_reported = False
        try:
            while self._ended:
                self._ended.popleft().end()
        finally:  # one that failed must not hold up the others
            if self._ended:
                self._loop.call_soon(self._report)
