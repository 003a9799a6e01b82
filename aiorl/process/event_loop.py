"""The event loop of a process: uvloop's where there is one, and nothing that fails on it goes unnoticed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ["new_event_loop", "run", "tell_of_stray_errors"]


def new_event_loop() -> asyncio.AbstractEventLoop:
    """An event loop, to be closed by the caller."""
    try:
        import uvloop
    except ImportError:  # no wheel for this platform
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def run(work: Coroutine[Any, Any, int]) -> int:
    """Run a program's work to its end; returns the exit status that it gives."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)


def tell_of_stray_errors(fail: Callable[[BaseException], None]) -> None:
    """Have ``fail`` called, after it was logged, with what a callback of the running loop raises.

    A callback has nobody else to tell: without this all would go on as if nothing had happened.
    """

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        error = context.get("exception")
        if error is not None and "handle" in context:
            fail(error)

    asyncio.get_running_loop().set_exception_handler(handle)
