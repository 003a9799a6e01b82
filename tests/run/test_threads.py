"""Calls to an event loop in its own thread, and signal handlers of the program that raise in them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from aiorl.run.threads import LoopThread


class Interrupted(LoopThread):
    """Loop whose caller is interrupted once, before or after it has scheduled something."""

    fault = ""

    def soon(self, function: Callable[[], object]) -> None:
        """Schedule a function, or fail."""
        fault = self.fault
        self.fault = ""
        if fault == "before":
            raise TimeoutError("an alarm of the program")
        super().soon(function)
        if fault == "after":
            raise TimeoutError("an alarm of the program")


@pytest.fixture
def loop() -> Iterator[Interrupted]:
    thread = Interrupted("test")
    yield thread
    thread.close()


@pytest.mark.parametrize("fault", ["before", "after"])
def test_an_exception_of_a_signal_handler_cancels_a_step_that_has_just_been_scheduled(
    loop: Interrupted, fault: str
) -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append("waiting")

    async def next_step() -> str:
        return "next"

    loop.fault = fault
    with pytest.raises(TimeoutError, match="alarm"):
        loop.call(wait())
    assert loop.call(next_step()) == "next"
    assert ended in ([], ["waiting"]), "it was cancelled before it began, or while it waited"
    assert loop.do(lambda: len(asyncio.all_tasks())) == 1
