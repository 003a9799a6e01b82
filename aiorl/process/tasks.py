"""Event loop of a process, and tasks that cannot die unnoticed.

If no one awaits a task, its exception goes unnoticed and its work just stops. Code that starts
tasks therefore owns a `Tasks`, which reports their errors.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from aiorl.process.children import Children

logger = logging.getLogger(__name__)
T = TypeVar("T")
_END_S = 10.0
_LOOK_EVERY_S = 0.02


class Tasks:
    """Tasks of one owner, to whom their errors are reported. They end with ``close``."""

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        """Start with no tasks.

        Args:
            on_failure: called on the event loop with a task's error, after it has been logged with
                its traceback.
        """
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, step: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run a coroutine as a task; call this on the event loop."""
        task = asyncio.get_running_loop().create_task(step, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self, timeout_s: float = 2.0) -> None:
        """Cancel every task except the calling one and wait for their ends; slow ones are left
        behind.
        """
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            _, slow = await asyncio.wait(tasks, timeout=timeout_s)
            for task in slow:
                logger.warning("the task %s did not end within %g s", task.get_name(), timeout_s)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("the task %s failed", task.get_name(), exc_info=error)
            self._on_failure(error)


async def end_children(all_children: Sequence[Children], grace_s: float) -> None:
    """End child processes; those that do not leave by themselves within ``grace_s`` seconds are
    ended by signal. None is started again.
    """
    for children in all_children:
        children.stop()
    for wait_s, number in (
        (grace_s, signal.SIGTERM),
        (min(1.0, grace_s), signal.SIGKILL),
        (5.0, None),
    ):
        for _ in range(round(wait_s / _LOOK_EVERY_S)):
            for children in all_children:
                children.poll()
            if all(children.is_over for children in all_children):
                return
            await asyncio.sleep(_LOOK_EVERY_S)
        for children in all_children:
            children.stop(number)


async def end_in_time(what: str, step: Callable[[], Awaitable[None] | None]) -> None:
    """Run a step that ends something, within a time limit; errors are logged, so that other steps
    run, too.

    Args:
        what: name for the log.
        step: function that ends it.
    """
    try:
        async with asyncio.timeout(_END_S):
            waiting = step()
            if waiting is not None:
                await waiting
    except TimeoutError:
        logger.error("%s could not be ended within %g s", what, _END_S)
    except Exception:
        logger.exception("%s could not be ended", what)


async def first_of(
    step: Coroutine[Any, Any, T], other: asyncio.Future[Any]
) -> asyncio.Task[T] | None:
    """Run a step until it is done or ``other`` is.

    Returns:
        The finished task, or None if it was cancelled because ``other`` was done first.
    """
    task = asyncio.get_running_loop().create_task(step)
    try:
        await asyncio.wait([task, other], return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=2.0)
    if not other.done():
        return task
    if task.done() and not task.cancelled():
        task.exception()  # its owner has another reason to end
    return None


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Make an event loop; the caller closes it."""
    try:
        import uvloop
    except ImportError:  # no wheel for this platform
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def report_stray_errors(fail: Callable[[BaseException], None]) -> None:
    """Call ``fail`` with errors of the running loop's callbacks, after logging them.

    A callback has no caller to report to. Without this, the program would continue as if nothing
    had happened.
    """

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        error = context.get("exception")
        if error is not None and "handle" in context:
            fail(error)

    asyncio.get_running_loop().set_exception_handler(handle)
