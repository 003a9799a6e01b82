"""Connections that have become silent without being closed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

import psutil
from zmtp import GREETING, RawPeer, ready

from aiorl.net.transport import learner_sockets, zmq_worker
from aiorl.net.transport.endpoint import EndpointLimits, EndpointTimes, EventKind
from aiorl.net.transport.sockets import make_socket

QUICK = EndpointLimits(
    times=EndpointTimes(
        dead_after_s=0.3, tick_s=0.03, retry_s=0.05, max_retry_s=0.1, handshake_s=0.2
    )
)


async def test_a_worker_with_a_silent_connection_ends_it_and_makes_another(stage):
    learner = stage.learner()
    worker = await stage.joined(learner.endpoint.address, limits=QUICK)
    await worker.until_event(EventKind.DISCONNECTED, timeout_s=3)
    await worker.until_event(EventKind.CONNECTED, count=2)
    await stage.exchange(learner, worker)


async def test_a_pair_with_occasional_messages_stays_connected(stage):
    learner = stage.learner(limits=QUICK)
    worker = await stage.joined(learner.endpoint.address, limits=QUICK)
    for _ in range(20):
        assert worker.endpoint.send([b"up"])
        await learner.until(lambda: learner.messages)
        learner.endpoint.send(learner.messages[0][0], [b"down"])
        learner.endpoint.broadcast([b"to all"])
        await asyncio.sleep(QUICK.times.dead_after_s / 8)
    assert EventKind.DISCONNECTED not in worker.kinds() + learner.kinds()


async def test_a_peer_that_stands_still_is_cut_off(stage):
    """Its kernel still acknowledges all data, as for a stopped process."""
    learner = stage.learner(limits=QUICK)
    peer = await asyncio.to_thread(RawPeer, learner.port)
    with peer:
        peer.send(b"hello")
        await learner.until(lambda: learner.messages)
        gone = await learner.until_event(EventKind.SILENT, timeout_s=3)
        assert gone.peer == learner.messages[0][0]


async def test_connections_that_stay_silent_after_the_handshake_are_cut_off_on_both_ports(stage):
    learner = stage.learner(limits=QUICK)
    for port, kind in ((learner.port, "DEALER"), (learner.port + 1, "SUB")):
        with await asyncio.to_thread(RawPeer, port, kind) as peer:
            assert await asyncio.to_thread(peer.receive) == []
    await stage.eventually(lambda: not any(len(port.table) for port in learner.endpoint._ports))


async def test_a_message_that_takes_long_to_arrive_is_no_silence(stage):
    learner = stage.learner(limits=QUICK)
    with await asyncio.to_thread(RawPeer, learner.port) as peer:
        peer.socket.sendall(b"\x02" + struct.pack(">Q", 25))
        for _ in range(25):
            peer.socket.sendall(b"x")
            await asyncio.sleep(QUICK.times.dead_after_s / 10)
        await learner.until(lambda: learner.messages)
        assert learner.messages[0][1] == [b"x" * 25]


async def test_the_kernel_gives_up_connections_to_a_host_that_has_vanished(stage):
    learner, _ = await stage.pair(limits=EndpointLimits(times=EndpointTimes(dead_after_s=6)))
    ports = (learner.port, learner.port + 1)
    connections = [
        connection for connection in psutil.Process().net_connections("tcp") if connection.raddr
    ]
    descriptors = [each.fd for each in connections if each.laddr.port in ports]
    worker_fds = [each.fd for each in connections if each.raddr.port in ports]
    assert len(descriptors) == len(worker_fds) == 2
    for fd, after_s in [(fd, 6) for fd in descriptors] + [(fd, 10) for fd in worker_fds]:
        with contextlib.closing(socket.socket(fileno=fd)) as borrowed:
            try:
                for option, value in (
                    (socket.TCP_USER_TIMEOUT, after_s * 1000),
                    (socket.TCP_KEEPIDLE, after_s // 2),
                ):
                    assert borrowed.getsockopt(socket.IPPROTO_TCP, option) == value
                assert borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            finally:
                borrowed.detach()


async def test_no_endpoint_sends_heartbeats_of_zeromq(stage, monkeypatch):
    """libzmq 4.3.5 aborts the process when one is due on a connection that broke while its queue
    was full.
    """
    sockets = []

    def make_recorded(*arguments, **options):
        sockets.append(make_socket(*arguments, **options))
        return sockets[-1]

    for module in (learner_sockets, zmq_worker):
        monkeypatch.setattr(module, "make_socket", make_recorded)
    await stage.pair()
    assert [socket.heartbeat_ivl for socket in sockets] == [0] * 4


async def test_greeting_alone_is_not_enough_to_stay(stage):
    learner = stage.learner(limits=QUICK)
    for index in (0, 1):
        reader, writer = await asyncio.open_connection("127.0.0.1", learner.port + index)
        writer.write(GREETING + ready("DEALER")[:10])
        async with asyncio.timeout(3):
            while await reader.read(1000):
                pass
        writer.close()
    await learner.until_event(EventKind.REFUSED, 2)
