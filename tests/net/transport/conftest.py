from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import uvloop
import zmq

from aiorl.net.transport import messenger, zmq_worker
from aiorl.net.transport.endpoint import Event, EventKind, LearnerEndpoint, WorkerEndpoint
from aiorl.net.transport.sockets import SocketPump
from aiorl.net.transport.zmq_learner import ZmqLearnerEndpoint
from aiorl.net.transport.zmq_worker import ZmqWorkerEndpoint


class PausablePump(SocketPump):
    """Pump of a socket that a test can stop from being read.

    Attributes:
        is_paused: True while it is not read.
        kind: type of the socket, for example zmq.DEALER.
    """

    made: ClassVar[list[PausablePump]] = []
    """All pumps of a test, in order."""

    def __init__(
        self, socket: zmq.Socket[bytes], receive: Callable[[], None], **options: Any
    ) -> None:
        self.is_paused = False
        self.kind = int(socket.getsockopt(zmq.TYPE))

        def receive_unless_paused() -> None:
            if self.is_paused:
                raise zmq.Again
            receive()

        super().__init__(socket, receive_unless_paused, **options)
        self.made.append(self)

    def schedule(self) -> None:
        if not self.is_paused:
            super().schedule()

    @property
    def is_open(self) -> bool:
        return not self._closed

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False
        self.schedule()


class Side:
    """Records all events and messages of an endpoint, and lets a test wait for them.

    Attributes:
        pumps: pumps of its first sockets, from their start on.
    """

    def __init__(self, endpoint: Any) -> None:
        self.endpoint = endpoint
        self.pumps: list[PausablePump] = []
        self.messages: list[Any] = []
        self.broadcasts: list[list[bytes]] = []
        self.events: list[Event] = []
        self.tape: list[tuple[str, Any]] = []
        self._changed = asyncio.Event()
        endpoint.on_event = self._on_event
        endpoint.on_message = self._on_message
        if hasattr(endpoint, "on_broadcast"):
            endpoint.on_broadcast = self._on_broadcast

    def _note(self, kind: str, what: Any) -> None:
        self.tape.append((kind, what))
        self._changed.set()

    def _on_event(self, event: Event) -> None:
        self.events.append(event)
        self._note("event", event)

    def _on_message(self, *arguments: Any) -> None:
        if len(arguments) == 1:
            message: Any = [bytes(frame) for frame in arguments[0]]
        else:
            peer, frames, user_id = arguments
            message = (peer, [bytes(frame) for frame in frames], user_id)
        self.messages.append(message)
        self._note("message", message)

    def _on_broadcast(self, frames: list[memoryview]) -> None:
        self.broadcasts.append([bytes(frame) for frame in frames])
        self._note("broadcast", self.broadcasts[-1])

    @property
    def port(self) -> int:
        return int(self.endpoint.address.rpartition(":")[2])

    def pump(self, kind: int) -> PausablePump:
        """Return the pump of the socket of this type."""
        (pump,) = (pump for pump in self.pumps if pump.kind == kind)
        return pump

    async def send(self, frames: list[bytes]) -> None:
        while not self.endpoint.send(frames):
            await self.endpoint.wait_writable()

    def kinds(self) -> list[EventKind]:
        return [event.kind for event in self.events]

    async def until(self, condition: Callable[[], Any], timeout_s: float = 8.0) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"not in {timeout_s} s; seen: {self.tape[-20:]}") from None

    async def until_event(self, kind: EventKind, count: int = 1, timeout_s: float = 8.0) -> Event:
        await self.until(lambda: self.kinds().count(kind) >= count, timeout_s)
        return [event for event in self.events if event.kind is kind][count - 1]


class Stage:
    """Makes endpoints on the running loop, and closes all of them."""

    def __init__(self, make_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self.make_loop = make_loop
        self.sides: list[Side] = []

    def learner(self, bind: str = "tcp://127.0.0.1:0", **keywords: Any) -> Side:
        # tests speak plain ZeroMQ to the endpoint
        keywords.setdefault("insecure", "keys" not in keywords)
        return self.started(ZmqLearnerEndpoint(bind, **keywords))

    def worker(self, address: str, **keywords: Any) -> Side:
        return self.started(ZmqWorkerEndpoint(address, **keywords))

    def started(self, endpoint: LearnerEndpoint | WorkerEndpoint) -> Side:
        """Start an endpoint whose events and messages are recorded."""
        side = Side(endpoint)
        num_pumps = len(PausablePump.made)
        endpoint.start()
        side.pumps = PausablePump.made[num_pumps:]
        self.sides.append(side)
        return side

    async def joined(self, address: str, **keywords: Any) -> Side:
        worker = self.worker(address, **keywords)
        await worker.until_event(EventKind.CONNECTED)
        return worker

    async def pair(self, **keywords: Any) -> tuple[Side, Side]:
        learner = self.learner(**keywords)
        return learner, await self.joined(learner.endpoint.address)

    async def exchange(self, learner: Side, worker: Side) -> tuple[bytes, str]:
        """Send a message each way and one to all; return peer and user id of the worker as seen by
        the learner.
        """
        counts = len(learner.messages), len(worker.messages), len(worker.broadcasts)
        assert worker.endpoint.send([b"hello"])
        await learner.until(lambda: len(learner.messages) > counts[0])
        peer, frames, user_id = learner.messages[-1]
        assert frames == [b"hello"]
        assert learner.endpoint.send(peer, [b"welcome"])
        learner.endpoint.broadcast([b"news"])
        await worker.until(
            lambda: len(worker.messages) > counts[1] and len(worker.broadcasts) > counts[2]
        )
        assert (worker.messages[-1], worker.broadcasts[-1]) == ([b"welcome"], [b"news"])
        return peer, user_id

    def num_open(self, kind: int) -> int:
        """Return the number of sockets of this type that are in use."""
        return sum(pump.is_open for pump in PausablePump.made if pump.kind == kind)

    async def eventually(self, condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
        """Wait for a condition that no event reports."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while True:
            if condition():
                return
            assert loop.time() < until, "it did not come to pass"
            await asyncio.sleep(0.001)

    async def close(self) -> None:
        for side in reversed(self.sides):
            await side.endpoint.close(flush_s=0.1)


@pytest.fixture(autouse=True)
def place(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Directory of the Unix sockets of this test's learners.

    Its path is short, unlike those of pytest's.
    """
    tmp_path_factory.getbasetemp()  # it must not be in this directory
    with tempfile.TemporaryDirectory() as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        monkeypatch.setattr("tempfile.tempdir", runtime)
        yield Path(runtime) / "aiorl"


@pytest.fixture(autouse=True)
def pausable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tests stop an endpoint from reading its messages."""
    monkeypatch.setattr(PausablePump, "made", [])
    for module in (messenger, zmq_worker):
        monkeypatch.setattr(module, "SocketPump", PausablePump)


@pytest.fixture
def stage(request: pytest.FixtureRequest) -> Stage:
    """Endpoints for an async test: on uvloop, or on asyncio's own loop if the test requests it."""
    return Stage(
        asyncio.new_event_loop
        if getattr(request, "param", "") == "asyncio"
        else uvloop.new_event_loop
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test on a stage, in at most 30 s; a failed callback fails the test."""
    stage = pyfuncitem.funcargs.get("stage")
    if not isinstance(stage, Stage):
        return None
    failures: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: failures.append(context)
        )
        try:
            async with asyncio.timeout(30):
                await pyfuncitem.obj(
                    **{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
                )
        finally:
            await stage.close()

    with asyncio.Runner(loop_factory=stage.make_loop) as runner:
        runner.run(main())
    assert not failures
    return True
