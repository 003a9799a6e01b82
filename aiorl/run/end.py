"""End: whether and why training ends, for all that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from aiorl.process.tasks import first_of

__all__ = ["End", "Ended"]

T = TypeVar("T")


class Ended(Exception):
    """The way out of a start-up that was ended; no error.

    Attributes:
        reason: one plain sentence.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class End:
    """Whether and why training ends; the first reason counts. To be made on the running loop.

    Attributes:
        hurry: set as soon as there is no time to wait for a running update.
    """

    def __init__(self) -> None:
        self.hurry = asyncio.Event()
        self._reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def has_come(self) -> bool:
        """Whether there is a reason."""
        return self._reason.done()

    @property
    def reason(self) -> str:
        """One plain sentence.

        Raises: the error that training failed with.
        """
        return self._reason.result()

    def come(self, reason: str, *, hurry: bool = False) -> None:
        """Training is to end in an orderly way."""
        if hurry:
            self.hurry.set()
        if not self.has_come:
            self._reason.set_result(reason)

    def fail(self, error: BaseException) -> None:
        """Training cannot go on."""
        if not self.has_come:
            self._reason.set_exception(error)
            self._reason.exception()  # nobody may come to ask for it

    async def before(self, step: Coroutine[Any, Any, T]) -> T:
        """The result of a step, which is cancelled when the end comes before.

        Raises:
            Ended: it does.
        """
        done = await first_of(step, self._reason)
        if done is None:
            raise Ended(self.reason)
        return done.result()
