"""The thread that bounds what peers have sent and the learner has not read."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from aiorl.transport.backlog import BacklogGuard
from aiorl.transport.connections import Connection, ConnectionTable
from aiorl.transport.endpoint import EndpointLimits


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
