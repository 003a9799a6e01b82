"""The thread that limits the unread bytes of peers."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from aiorl.net.transport.connections import BacklogGuard, Connection, ConnectionTable
from aiorl.net.transport.endpoint import EndpointLimits


class Table(ConnectionTable):
    """Table of connections that are never read; checks and cuts can fail."""

    def __init__(self, fails: int = 0, look_s: float = 0.0, error: Exception | None = None) -> None:
        super().__init__()
        self.looked = 0
        self._fails, self._look_s, self._error = fails, look_s, error

    def num_received(self, connection: Connection) -> int:
        self.looked += 1
        if self._error is not None:
            raise self._error
        time.sleep(self._look_s)  # like a thread that waits for the interpreter lock, or for a core
        return 1 << 60

    def cut(self, connection: Connection, *, reset: bool = False) -> bool:
        self._fails -= 1
        return self._fails < 0


@contextmanager
def _guarded(table: Table) -> Iterator[asyncio.Future[str]]:
    """Return a future that is set when the only connection is cut off."""
    cut: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    one, other = socket.socketpair()
    with one, other:
        table.accept(one.fileno())
        guard = BacklogGuard(
            table, EndpointLimits(), lambda connection, reason: cut.set_result(reason), port=0
        )
        yield cut
        guard.close()


async def test_an_error_of_the_thread_is_raised_on_the_loop() -> None:
    failed: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: failed.set_result(context)
    )
    error = OSError("a fault of the test's making")
    with _guarded(Table(error=error)):
        context = await asyncio.wait_for(failed, 5)
    assert "handle" in context, "as of a callback: what has no handler but the process's"
    assert context["exception"] is error


@pytest.mark.parametrize("look_s", [0.0, 0.1], ids=["at once", "on a busy machine"])
async def test_a_flooding_peer_is_cut_off_even_if_a_first_cut_fails_and_checks_are_slow(
    look_s: float,
) -> None:
    """Time in which the thread waits does not count as the cost of its check."""
    table = Table(fails=3, look_s=look_s)
    with _guarded(table) as cut:
        await asyncio.wait_for(cut, 5)
    assert table.looked == 4


async def test_a_whole_host_of_workers_can_leave_at_the_same_moment() -> None:
    guard = BacklogGuard(
        ConnectionTable(), EndpointLimits(), lambda connection, reason: None, port=0
    )
    for _ in range(100):
        guard.ended(Connection(-1, ""))
    assert not guard.is_full, "new connections would be cut off until everything was read"
    guard.close()


@pytest.mark.parametrize("has_ended", [False, True], ids=["a new descriptor", "that of another"])
async def test_a_flood_over_a_connection_that_the_busy_loop_has_not_seen_is_cut_off(
    has_ended: bool,
) -> None:
    """The loop has not seen the end of the connection before on the same descriptor, either."""
    table = ConnectionTable()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with (
            socket.create_connection(("127.0.0.1", port)) as flooder,
            server.accept()[0] as taken,
        ):
            if has_ended:
                table.by_fd[taken.fileno()] = Connection(taken.fileno(), "127.0.0.1:1")
            guard = BacklogGuard(
                table, EndpointLimits(), lambda connection, reason: None, port=port, max_bytes=4096
            )
            with pytest.raises(ConnectionError):
                _keep_the_loop_busy(flooder, taken)
        guard.close()


def _keep_the_loop_busy(flooder: socket.socket, taken: socket.socket) -> None:
    for _ in range(200):
        flooder.sendall(bytes(1000))
        taken.recv(1000)
        time.sleep(0.05)
