"""The thread that bounds what peers have sent and the learner has not read."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest

from aiorl.net.transport.connections import BacklogGuard, Connection, ConnectionTable
from aiorl.net.transport.endpoint import EndpointLimits


class FailingTable(ConnectionTable):
    def look(self, connection: Connection) -> int:
        raise OSError("a fault of the test's making")


def test_an_error_of_the_thread_is_raised_on_the_loop() -> None:
    async def main() -> BaseException:
        failed: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failed.set_result(context))
        table = FailingTable()
        one, other = socket.socketpair()
        with one, other:
            table.accept(one.fileno())
            guard = BacklogGuard(table, EndpointLimits(), lambda connection, reason: None)
            async with asyncio.timeout(5):
                context = await failed
            guard.close()
        assert "handle" in context, "as of a callback: what has no handler but the process's"
        error = context["exception"]
        assert isinstance(error, OSError)
        return error

    assert "of the test's making" in str(asyncio.run(main()))


class Table(ConnectionTable):
    """One in which nothing is ever read, and of which cutting off may fail."""

    def __init__(self, fails: int = 0, look_s: float = 0.0) -> None:
        super().__init__()
        self.looked = 0
        self._fails = fails
        self._look_s = look_s

    def look(self, connection: Connection) -> int:
        self.looked += 1
        time.sleep(self._look_s)  # as where the thread waits for the lock of the interpreter, or for a core
        return 1 << 60

    def cut(self, connection: Connection, *, reset: bool = False) -> bool:
        self._fails -= 1
        return self._fails < 0


@pytest.mark.parametrize("table", [Table(fails=3), Table(fails=3, look_s=0.1)], ids=["at once", "on a busy machine"])
def test_who_floods_is_cut_off_though_that_fails_at_first_and_though_a_look_takes_long(table: Table) -> None:
    """How long the thread was kept waiting is not what its look has cost others."""

    async def main() -> str:
        cut: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        one, other = socket.socketpair()
        with one, other:
            table.accept(one.fileno())
            guard = BacklogGuard(table, EndpointLimits(), lambda connection, reason: cut.set_result(reason))
            async with asyncio.timeout(5):
                reason = await cut
            guard.close()
        assert table.looked == 4
        return reason

    assert "too much of what it sent is unread" in asyncio.run(main())
