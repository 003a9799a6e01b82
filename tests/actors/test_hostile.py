"""What a hostile actor, or a hostile hub, can take from others is bounded."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import msgpack
import numpy as np
import pytest
from actor_things import Counter
from zmtp import RawPeer

from aiorl.actors import actor_session as up
from aiorl.actors.actor_session import ActorSession, Identity, LinkState
from aiorl.actors.calls import WINDOW, Calls, RemoteStream
from aiorl.actors.hub import Actors
from aiorl.actors.hub_session import ActorSpec, HubSession, HubSettings
from aiorl.actors.values import ENDPOINT_LIMITS, LIMITS, ActorName, num_bytes, pack, unpack
from aiorl.errors import BadFrame, RemoteProtocolError, UnsendableError
from aiorl.net.transport.endpoint import EventKind
from aiorl.net.transport.relay import worker_endpoint
from aiorl.net.wire import messages as m
from aiorl.net.wire.decoding import decode
from aiorl.net.wire.encoding import encode
from aiorl.net.wire.format import ARRAY_REF
from aiorl.process.children import Children

NO_ARGS: dict[str, Any] = {"args": [], "kwargs": {}}
MAX_BYTES = 1 << 20

EXPENSIVE: dict[str, Any] = {
    "empty dicts": [[{}] * 1000] * 5,
    "empty lists": [[[]] * 1000] * 5,
    "nested lists": [[[[[[]]]]]] * 1000,
    "dicts": [{"a": 1, "b": 2}] * 1000,
    "texts": [f"text {number}" for number in range(5000)],
    "wide texts": ["\U0001f600" * 200] * 200,
    "numbers": list(range(1 << 40, (1 << 40) + 5000)),
    "small arrays": [np.zeros(1, np.int8)] * 300,
    "a large array": np.zeros(1 << 18, np.int8),
}


def frames_of(message: m.Message) -> list[bytes]:
    return [bytes(frame) for frame in encode(message, compress=False, limits=LIMITS)]


def call_of(frames: Sequence[bytes]) -> m.Call:
    message = decode(frames, LIMITS)
    assert isinstance(message, m.Call)
    return message


def traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.fixture
def _tracing() -> Any:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("_tracing")
@pytest.mark.parametrize("kind", EXPENSIVE)
def test_a_value_is_counted_with_what_its_containers_take_here(kind: str) -> None:
    frames = frames_of(m.Call(1, "echo", {"args": [EXPENSIVE[kind]], "kwargs": {}}))
    call_of(frames)  # fills caches
    before = traced()
    call = call_of(frames)
    taken = traced() - before + sum(map(len, frames[1:]))
    assert taken <= 1.1 * num_bytes(call.args) + 4096


@pytest.mark.rest_slow
@pytest.mark.usefixtures("_tracing")
@pytest.mark.parametrize("kind", [*EXPENSIVE, "nothing"])
def test_calls_to_other_actors_take_no_more_memory_than_their_bounds(kind: str) -> None:
    hub = hub_with_actors(b"p", b"q")
    args = {"args": [EXPENSIVE.get(kind)], "kwargs": {}}
    before = traced()
    for number in range(1, 3000):
        hub.receive(b"p", call_of(frames_of(m.Call(number, "echo", args, actor="q"))), 0.0)
        hub.messages_to_send()  # waits in the endpoint, within bounds of its own
        if not hub.knows(b"p"):
            break
        if number % 50 == 0:
            assert traced() - before < 3 * MAX_BYTES
    assert not hub.knows(b"p")
    assert hub.knows(b"q")
    del args
    assert traced() - before < MAX_BYTES


def hub_with_actors(*peers: bytes) -> HubSession:
    """Return a hub that runs an actor in the process of each peer, with the peer's name."""
    hub = HubSession("hub", HubSettings(max_bytes=MAX_BYTES))
    for peer in peers:
        name = peer.decode()
        hub.receive(peer, m.Hello(m.PROTOCOL_VERSION, m.RUN_OF_ACTORS, name, name), 0.0)
        hub.add(ActorSpec(name, "m:C", NO_ARGS))
        hub.receive(peer, m.Reply(0, True, None), 0.0)
    drain(hub)
    return hub


def drain(hub: HubSession) -> list[tuple[bytes | None, m.DownMessage]]:
    hub.events()
    return hub.messages_to_send()


def test_a_flood_of_other_messages_is_not_passed_on() -> None:
    hub = hub_with_actors(b"p", b"q")
    hub.receive(b"p", m.Call(1, "items", NO_ARGS, actor="q", credit=8), 0.0)
    for _ in range(1000):
        hub.receive(b"p", m.Cancel(1), 0.0)
        hub.receive(b"p", m.Cancel(2), 0.0)
        hub.receive(b"p", m.Credit(1, 1 << 30), 0.0)
        hub.receive(b"p", m.Credit(2, 1), 0.0)
    assert len(drain(hub)) == 3  # the call, its cancellation, and the rest of the highest credit
    assert hub.knows(b"p")


def test_a_flood_of_requests_for_shared_arguments_costs_an_actor_its_place() -> None:
    hub = hub_with_actors(b"p")
    numbers = [hub.share(NO_ARGS) for _ in range(2)]
    for number in range(1000):
        if hub.knows(b"p"):
            hub.receive(b"p", m.PayloadRequest(numbers[number % 2]), 0.0)
    assert not hub.knows(b"p")
    assert len(drain(hub)) < 300


@pytest.mark.parametrize("references", [[0, 0, 1], [0], []], ids=["twice", "one left", "none"])
def test_each_array_of_a_message_stands_in_one_place(references: list[int]) -> None:
    """One that stands in many places could be copied many times, one in none keeps its frame."""
    header, *frames = frames_of(m.Reply(1, True, [np.zeros(4), np.ones(4)]))
    fields = msgpack.unpackb(header)
    fields[2]["result"] = [
        msgpack.ExtType(ARRAY_REF, number.to_bytes(4, "little")) for number in references
    ]
    with pytest.raises(BadFrame, match=r"array|missing"):
        decode([msgpack.packb(fields), *frames], LIMITS)


def test_rows_of_objects_cost_a_byte_each_and_are_bounded_in_sum() -> None:
    rows = {"$objects": {"is_filled": np.zeros(1 << 19, np.bool_), "items": []}}
    assert num_bytes(rows) > 64 * (1 << 19)
    assert len(unpack([rows, rows], ActorName, imports_code=False)) == 2
    with pytest.raises(RemoteProtocolError, match="rows of objects"):
        unpack([rows, rows, rows], ActorName, imports_code=False)
    with pytest.raises(UnsendableError, match="objects is too long"):
        pack(np.array([{}] * ((1 << 20) + 1)))


# A hostile hub
# --------------------------------------------------------------------------------------------------


def registered() -> ActorSession:
    session = ActorSession(Identity("w", "host", 1))
    session.receive(m.LearnerBeat("hub", -1), 0.0)
    session.receive(m.Call(0, "__init__", {"path": "m:C", "name": "a", "args": NO_ARGS}), 0.0)
    session.events()
    return session


@pytest.mark.parametrize(
    ("args", "most"),
    [
        (NO_ARGS, 1 << 16),
        ({"payload": 1}, 1 << 16),
        ({"args": [np.zeros(1 << 28, np.int8)], "kwargs": {}}, 16),
    ],
    ids=["small", "without arguments", "large"],
)
def test_calls_that_an_actor_has_not_answered_are_bounded(args: dict[str, Any], most: int) -> None:
    session = registered()
    number = 0
    while session.state is LinkState.REGISTERED:
        number += 1
        session.receive(m.Call(number, "echo", args), 0.0)
    assert most <= number + 1 <= most + 2


def test_answered_calls_do_not_count() -> None:
    session = registered()
    for number in range(1, 70_000):
        session.receive(m.Call(number, "echo", NO_ARGS), 0.0)
        session.reply(number, ok=True, result=None)
    assert session.state is LinkState.REGISTERED


@pytest.mark.parametrize("number", [0, 7])
def test_a_hub_can_use_no_number_of_a_call_twice(number: int) -> None:
    session = registered()
    session.receive(m.Call(7, "echo", NO_ARGS), 0.0)
    session.receive(m.Call(number, "__init__", NO_ARGS), 0.0)
    *_, end = session.events()
    assert isinstance(end, up.Ended)
    assert "twice" in end.reason


async def test_a_stream_takes_no_more_items_than_it_has_asked_for() -> None:
    session = hub_with_actors(b"p")
    calls = Calls(session, lambda: None)
    stream = RemoteStream(calls, "C.items")
    stream.begin("p", "items", NO_ARGS)
    [(_, call)] = drain(session)
    assert isinstance(call, m.Call)
    for number in range(WINDOW + 1):
        calls.item(call.call_id, number)
    assert drain(session) == [(b"p", m.Cancel(call.call_id))]
    assert [await anext(stream) for _ in range(WINDOW)] == list(range(WINDOW))
    with pytest.raises(RemoteProtocolError, match="more items"):
        await anext(stream)


# Over sockets
# --------------------------------------------------------------------------------------------------


async def test_strangers_who_leave_cost_no_look_at_the_processes_of_all_actors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = Mock()
    async with asyncio.timeout(60), Actors(bind="tcp://127.0.0.1:0", insecure=True) as actors:
        await actors.start(Counter, 100)
        monkeypatch.setattr("aiorl.actors.hub.TICK_S", 60.0)
        await asyncio.sleep(0.3)
        with monkeypatch.context() as patch:
            patch.setattr(Children, "poll", looks)
            for _ in range(10):
                stranger = await asyncio.to_thread(RawPeer, int(actors.address.rpartition(":")[2]))
                with stranger:
                    stranger.send(b"x")
            await asyncio.sleep(0.5)
    assert not looks.called


async def test_a_joined_process_that_floods_is_cut_off_and_the_other_actors_answer() -> None:
    async with asyncio.timeout(60), Actors(bind="tcp://127.0.0.1:0") as actors:
        counter = await actors.start(Counter, on="here")
        name = counter.__actor__
        assert isinstance(name, ActorName)
        hostile = Hostile(actors.address, name.name)
        try:
            await actors.wait_for_processes(1)
            starting = asyncio.create_task(actors.start(Counter, on="joined"))
            await hostile.is_cut.wait()
            assert await counter.add(1) == 1
            starting.cancel()
        finally:
            await hostile.close()


class Hostile:
    """A process that answers the call to make its object, and then calls another actor again and
    again.
    """

    def __init__(self, address: str, target: str) -> None:
        self.is_cut = asyncio.Event()
        self.endpoint = worker_endpoint([address], None, ENDPOINT_LIMITS)
        self.endpoint.on_event = self._on_event
        self.endpoint.on_message = self._on_message
        self._target = target
        self._flood: asyncio.Task[None] | None = None
        self.endpoint.start()

    async def close(self) -> None:
        if self._flood is not None:
            self._flood.cancel()
        await self.endpoint.close()

    def _on_event(self, event: Any) -> None:
        if event.kind is EventKind.CONNECTED:
            hello = m.Hello(m.PROTOCOL_VERSION, m.RUN_OF_ACTORS, "hostile", "hostile")
            self.endpoint.send(encode(hello, limits=LIMITS))
        elif event.kind is EventKind.DISCONNECTED:
            self.is_cut.set()

    def _on_message(self, frames: list[memoryview]) -> None:
        if isinstance(decode(frames, LIMITS), m.Call) and self._flood is None:
            self._flood = asyncio.create_task(self._flood_calls())

    async def _flood_calls(self) -> None:
        self.endpoint.send(encode(m.Reply(0, True, None), limits=LIMITS))
        args = {"args": [], "kwargs": {}, "unused": np.zeros(8 << 20, np.int8)}
        for number in range(1, 100):
            call = m.Call(number, "wait_for_ever", args, actor=self._target)
            while not self.endpoint.send(encode(call, limits=LIMITS)):
                await self.endpoint.wait_writable()
