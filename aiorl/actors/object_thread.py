"""The thread of an actor's object."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from aiorl.process.machine import keep_children_out


class ObjectThread:
    """Thread that calls functions in order; it ends with the process.

    Each call costs two changes of threads and nothing else: `concurrent.futures` would take half as
    long again.
    """

    def __init__(self) -> None:
        """Start the thread."""
        self._calls: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]]] = SimpleQueue()
        threading.Thread(target=self._run, name="actor", daemon=True).start()

    def call(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """Call a function; return the future of its result.

        A function that has not begun when the future is cancelled is left out. StopIteration, which
        no future can have, becomes a RuntimeError.
        """
        future = asyncio.get_running_loop().create_future()
        self._calls.put((function, future))
        return future

    def _run(self) -> None:
        while True:
            self._make(*self._calls.get())

    def _make(self, function: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        """Make a call, and pass its end to the event loop."""
        if future.cancelled():
            return
        call_soon = future.get_loop().call_soon_threadsafe
        with contextlib.suppress(RuntimeError):  # the loop has ended
            try:
                result = _result_of(function)
            except BaseException as error:
                call_soon(_fail, future, error)
            else:
                call_soon(_succeed, future, result)


def _result_of(function: Callable[[], Any]) -> Any:
    try:
        return keep_children_out(function)
    except StopIteration as error:  # no future can have this exception
        raise RuntimeError("the method raised StopIteration") from error


def _succeed(future: asyncio.Future[Any], result: Any) -> None:
    if not future.cancelled():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.cancelled():
        future.set_exception(error)
