"""The broadcast port and peers that send more than a subscription."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq
from zmtp import RawPeer, frame

from aiorl.net.transport.connections import Connection, ConnectionTable, ListeningPort
from aiorl.net.transport.endpoint import EndpointStats, Event, EventKind
from aiorl.net.transport.sockets import bind_pair
from aiorl.net.transport.zmq_learner import Broadcaster


@contextmanager
def _listening(
    told: list[Event],
    check_key: Callable[[ListeningPort, Connection], None] = lambda *checked: None,
) -> Iterator[tuple[ListeningPort, int]]:
    """Broadcast port with peers that ZeroMQ's own thread serves while the loop stands still."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket, other = context.socket(zmq.XPUB), context.socket(zmq.XPUB)
    socket.setsockopt(zmq.XPUB_VERBOSER, 1)
    port = ListeningPort(
        socket, ConnectionTable(), EndpointStats(), told.append, lambda *gone: None, 100
    )
    number = bind_pair(socket, other, "127.0.0.1", 0)
    broadcaster = Broadcaster(socket, port, check_key, lambda: None)
    try:
        yield port, number
    finally:
        broadcaster.pump.close()
        port.monitor.close()
        context.destroy(linger=0)


async def _until_dropped(told: list[Event]) -> Event:
    async with asyncio.timeout(5):
        while not (dropped := [event for event in told if event.kind is EventKind.DROPPED]):
            await asyncio.sleep(0)
    return dropped[0]


@pytest.mark.parametrize(
    "said",
    [
        frame(b"x"),
        frame(b"\x00"),
        frame(b"\x01") + frame(b"\x00"),
        frame(b"\x01") * 2,
        frame(b"x", more=True) * 3 + frame(b"\x01"),
    ],
    ids=["a message", "an unsubscription", "to and fro", "two subscriptions", "in parts"],
)
async def test_all_but_a_subscription_ends_the_connection_even_on_a_reused_descriptor(
    said: bytes,
) -> None:
    told: list[Event] = []
    with _listening(told) as (port, number):
        with RawPeer(number, "SUB") as first:
            first.socket.sendall(frame(b"\x01"))
        async with asyncio.timeout(5):
            while not told or len(port.table) or port.ended_fds:
                await asyncio.sleep(0)
        with RawPeer(number, "SUB") as other:
            other.socket.sendall(said)
            await _until_dropped(told)


async def test_a_wrongly_assigned_key_is_corrected_by_the_connections_own_message() -> None:
    """An earlier connection's last message on the same descriptor can look like its own, with the
    other key.
    """
    checked: list[str] = []
    listening = _listening([], lambda _, connection: checked.append(connection.user_id))
    with listening as (port, number), RawPeer(number, "SUB") as subscriber:
        subscriber.socket.sendall(frame(b"\x01"))
        async with asyncio.timeout(5):
            while not checked:
                await asyncio.sleep(0)
            (connection,) = port.table
            connection.user_id = "another's"
            subscriber.socket.sendall(frame(b"\x01"))
            while len(checked) < 2:
                await asyncio.sleep(0)
    assert (checked, connection.user_id) == (["", ""], "")
