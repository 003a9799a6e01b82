"""End of a training: when, why, and whether it will be continued."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aiorl.process.tasks import first_of

T = TypeVar("T")


class Ended(Exception):
    """Exit from a start-up that the user ended; not an error.

    Attributes:
        reason: reason for the end, one plain sentence.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class End:
    """End of training and its reason; the first reason counts. Must be created on the running loop.

    Attributes:
        has_come: True once there is a reason to end.
        hurry: set as soon as there is no time to wait for a running update.
        is_final: False if the run is to be continued, here or on another host.
    """

    def __init__(self) -> None:
        self.has_come = False
        self.hurry = asyncio.Event()
        self.is_final = True
        self._reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def reason(self) -> str:
        """Reason for the end, one plain sentence.

        Raises:
            BaseException: the error that training failed with.
        """
        return self._reason.result()

    def set(self, reason: str, *, hurry: bool = False, final: bool = True) -> None:
        """End training in an orderly way."""
        if hurry:
            self.hurry.set()
        if not self.has_come:
            self.has_come = True
            self.is_final = final
            self._reason.set_result(reason)

    def fail(self, error: BaseException) -> None:
        """End training with an error."""
        if not self.has_come:
            self.has_come = True
            self._reason.set_exception(error)
            self._reason.exception()  # marks it as retrieved, since no one may ask for it

    async def before(self, step: Coroutine[Any, Any, T]) -> T:
        """Return the result of a step, which is cancelled if the end comes first.

        Raises:
            Ended: the end came first.
        """
        ended = await first_of(step, self._reason)
        if ended is None:
            raise Ended(self.reason)
        return ended.result()


async def wait_for_last(
    update: asyncio.Future[None],
    wait_s: float,
    hurry: asyncio.Event,
    tell: Callable[[str, int], None],
) -> None:
    """Wait until the running update, the last one, has ended; in a hurry, wait ``wait_s`` seconds
    at most.

    Args:
        update: done when the update has ended.
        wait_s: seconds to wait in a hurry.
        hurry: set when there is no time; can also be set during the wait.
        tell: called with (text, logging level) when the update takes longer than ``wait_s``.
    """
    await asyncio.wait([update], timeout=wait_s)
    if not update.done() and not hurry.is_set():
        tell(
            "waiting for the last update to end before its checkpoint is written "
            "(Ctrl-C writes a checkpoint of the update before it, without waiting)",
            logging.INFO,
        )
        await first_of(hurry.wait(), update)
