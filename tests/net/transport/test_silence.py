"""Connections over which nothing is heard any more, though nobody has closed them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

from zmtp import GREETING, RawPeer, ready

from aiorl.net.transport.endpoint import EndpointLimits, EventKind

QUICK = EndpointLimits(dead_after_s=0.3, tick_s=0.03, retry_s=0.05, max_retry_s=0.1, handshake_s=0.2)


class Relay:
    """Stands between workers and a learner on both ports, and stops passing anything on when frozen."""

    def __init__(self, learner_port: int) -> None:
        self._learner_port = learner_port
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> str:
        while not self._servers:
            first = await asyncio.start_server(self._carry(0), "127.0.0.1", 0)
            port = first.sockets[0].getsockname()[1]
            try:
                second = await asyncio.start_server(self._carry(1), "127.0.0.1", port + 1)
            except OSError:
                first.close()
                continue
            self._servers = [first, second]
        return f"tcp://127.0.0.1:{port}"

    def freeze(self) -> None:
        self._thawed.clear()

    def thaw(self) -> None:
        self._thawed.set()

    def close(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.transport.abort()

    def _carry(self, index):
        async def accepted(reader, writer):
            self._writers.append(writer)
            await self._thawed.wait()
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._learner_port + index)
            self._writers.append(other_writer)
            for source, target in ((reader, other_writer), (other_reader, writer)):
                task = asyncio.create_task(self._pass_on(source, target))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

        return accepted

    async def _pass_on(self, reader, writer):
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._thawed.wait()
                writer.write(data)
                await writer.drain()
        await self._thawed.wait()
        writer.close()


def _port(learner):
    return int(learner.endpoint.address.rpartition(":")[2])


def test_both_sides_notice_a_path_that_carries_nothing_any_more_and_the_worker_connects_again(run):
    async def test(stage):
        learner = stage.learner(limits=QUICK)
        relay = Relay(_port(learner))
        worker = stage.worker(await relay.start(), limits=QUICK)
        try:
            await worker.until_event(EventKind.CONNECTED)
            relay.freeze()
            for side, kind in ((worker, EventKind.DISCONNECTED), (learner, EventKind.SILENT)):
                gone = await side.until_event(kind, timeout_s=3)
                assert "nothing was heard" in gone.reason
            relay.thaw()
            await worker.until_event(EventKind.CONNECTED, count=2)
            worker.endpoint.send([b"again"])
            await learner.until(lambda: learner.messages)
        finally:
            relay.close()

    run(test)


def test_a_pair_whose_users_say_something_now_and_then_stays_connected(run):
    async def test(stage):
        learner = stage.learner(limits=QUICK)
        worker = stage.worker(learner.endpoint.address, limits=QUICK)
        await worker.until_event(EventKind.CONNECTED)
        for _ in range(20):
            assert worker.endpoint.send([b"up"])
            await learner.until(lambda: learner.messages)
            learner.endpoint.send(learner.messages[0][0], [b"down"])
            learner.endpoint.broadcast([b"to all"])
            await asyncio.sleep(QUICK.dead_after_s / 8)
        assert EventKind.DISCONNECTED not in worker.kinds() + learner.kinds()

    run(test)


def test_a_peer_that_stands_still_is_cut_off(run):
    """Its kernel confirms all that is sent to it, as that of a stopped process does."""

    async def test(stage):
        learner = stage.learner(limits=QUICK)
        peer = await asyncio.to_thread(RawPeer, _port(learner))
        with peer:
            peer.send(b"hello")
            await learner.until(lambda: learner.messages)
            gone = await learner.until_event(EventKind.SILENT, timeout_s=3)
            assert gone.peer == learner.messages[0][0]
            assert "nothing was heard" in gone.reason

    run(test)


def test_connections_that_never_say_a_word_after_the_handshake_are_cut_off_on_both_ports(run):
    async def test(stage):
        learner = stage.learner(limits=QUICK)
        for port, kind in ((_port(learner), "DEALER"), (_port(learner) + 1, "SUB")):
            with await asyncio.to_thread(RawPeer, port, kind) as peer:
                assert await asyncio.to_thread(peer.receive) == []
        await stage.eventually(lambda: len(learner.endpoint._peers) + len(learner.endpoint._subscribers) == 0)

    run(test)


def test_a_message_that_takes_long_to_arrive_is_no_silence(run):
    async def test(stage):
        learner = stage.learner(limits=QUICK)
        with await asyncio.to_thread(RawPeer, _port(learner)) as peer:
            peer.socket.sendall(b"\x02" + struct.pack(">Q", 25))
            for _ in range(25):
                peer.socket.sendall(b"x")
                await asyncio.sleep(QUICK.dead_after_s / 10)
            await learner.until(lambda: learner.messages)
            assert learner.messages[0][1] == [b"x" * 25]

    run(test)


def test_the_kernel_gives_up_connections_to_a_host_that_has_vanished(run):
    async def test(stage):
        learner, worker = await stage.pair(limits=EndpointLimits(dead_after_s=6))
        descriptors = [connection.fd for connection in (*learner.endpoint._peers, *learner.endpoint._subscribers)]
        worker_fds = [channel.fd for channel in worker.endpoint._channels]
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

    run(test)


def test_no_endpoint_sends_heartbeats_of_zeromq(run):
    """libzmq 4.3.5 aborts the process when one is due on a connection that broke while its queue was full."""

    async def test(stage):
        learner, worker = await stage.pair()
        sockets = [learner.endpoint._router, learner.endpoint._xpub]
        sockets += [channel.socket for channel in worker.endpoint._channels]
        assert [each.heartbeat_ivl for each in sockets] == [0] * 4

    run(test)


def test_greeting_alone_is_not_enough_to_stay(run):
    async def test(stage):
        learner = stage.learner(limits=QUICK)
        for index in (0, 1):
            reader, writer = await asyncio.open_connection("127.0.0.1", _port(learner) + index)
            writer.write(GREETING + ready("DEALER")[:10])
            async with asyncio.timeout(3):
                while await reader.read(1000):
                    pass
            writer.close()
        await learner.until_event(EventKind.REFUSED, 2)

    run(test)
