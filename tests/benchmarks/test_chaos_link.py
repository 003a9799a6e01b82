"""The relay between sockets of our own: what it carries, and how it misbehaves when told to."""

from __future__ import annotations

import asyncio
import time

import pytest

from benchmarks.chaos.link import Link, Slow, free_pair


class Pair:
    """A link, and a server behind it that sends back what it gets."""

    def __init__(self) -> None:
        self.ended: asyncio.Queue[str] = asyncio.Queue()

    async def __aenter__(self) -> Pair:
        sockets = free_pair()
        self.port = sockets[0].getsockname()[1]
        self.servers = [await asyncio.start_server(self._echo, sock=each) for each in sockets]
        self.link = Link(self.port)
        self.link.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.link.close()
        for server in self.servers:
            server.close()

    async def _echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
            self.ended.put_nowait("closed")
        except ConnectionResetError:
            self.ended.put_nowait("reset")
        finally:
            writer.close()

    async def connect(self, offset: int = 0) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.link.port + offset)


def within_5_s(scenario):
    async def run() -> None:
        async with asyncio.timeout(5), Pair() as pair:
            await scenario(pair)

    asyncio.run(run())


def test_both_ports_are_carried_both_ways_and_an_end_is_passed_on():
    async def scenario(pair: Pair) -> None:
        for offset in (0, 1):
            reader, writer = await pair.connect(offset)
            writer.write(b"x" * 200_000)
            assert await reader.readexactly(200_000) == b"x" * 200_000
            assert len(pair.link.connections) == 1
            writer.close()
            assert await pair.ended.get() == "closed"
        assert pair.link.bytes_up == 400_000

    within_5_s(scenario)


def test_a_reset_reaches_both_sides_even_of_a_connection_that_is_held():
    async def scenario(pair: Pair) -> None:
        reader, writer = await pair.connect()
        writer.write(b"x")
        await reader.readexactly(1)
        pair.link.hold()
        writer.write(b"y")
        assert pair.link.reset() == 1
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        assert await pair.ended.get() == "reset"
        assert pair.link.connections == frozenset()
        writer.close()

    within_5_s(scenario)


def test_a_held_link_stops_a_sender_soon_and_loses_nothing():
    async def scenario(pair: Pair) -> None:
        reader, writer = await pair.connect()
        pair.link.hold()
        writer.write(b"x" * 12_000_000)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(writer.drain(), 0.2)
        pair.link.release()
        assert len(await reader.readexactly(12_000_000)) == 12_000_000
        writer.close()

    within_5_s(scenario)


def test_a_corrupting_link_changes_one_bit_of_each_chunk_and_keeps_its_length():
    async def scenario(pair: Pair) -> None:
        reader, writer = await pair.connect()
        pair.link.corrupt_share = 1.0
        writer.write(bytes(100))
        got = await reader.readexactly(100)
        assert sum(byte.bit_count() for byte in got) in (0, 2)  # there and back: two bits, or one twice
        writer.close()

    within_5_s(scenario)


def test_a_slow_link_delays_and_throttles():
    async def scenario(pair: Pair) -> None:
        reader, writer = await pair.connect()
        pair.link.slow = Slow(delay_s=0.1, bytes_per_s=1e6)
        began = time.monotonic()
        writer.write(b"x")
        await reader.readexactly(1)
        assert time.monotonic() - began >= 0.2
        writer.close()

    within_5_s(scenario)


def test_a_connection_is_reset_while_nobody_listens_behind_the_link():
    async def scenario(pair: Pair) -> None:
        for server in pair.servers:
            server.close()
        reader, writer = await pair.connect()
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        writer.close()

    within_5_s(scenario)
