"""The process of an actor: its object, its thread and its tasks, around an endpoint and a session.

Asynchronous methods run on the process's event loop, side by side. All others run in one thread, in
the order of the calls; the object is made in that thread, too. A generator's items are sent as the
caller takes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from types import CodeType
from typing import Any, Final

import numpy as np

from aiorl.actors.actor_session import (
    ActorEvent,
    ActorSession,
    Ended,
    ObjectRequested,
)
from aiorl.actors.calls import Calls, description_of, public_method, unpacked_arguments
from aiorl.actors.object_thread import ObjectThread, ThreadCall
from aiorl.actors.values import LIMITS, pack
from aiorl.config.code import import_object
from aiorl.errors import (
    LocalProtocolError,
    RemoteProtocolError,
    UnsendableError,
)
from aiorl.net.transport.endpoint import Event, EventKind, Outbox, WorkerEndpoint
from aiorl.net.transport.system import give_back_regularly
from aiorl.net.wire.decoding import decode
from aiorl.net.wire.encoding import encode
from aiorl.net.wire.messages import (
    Call,
    Cancel,
    Credit,
    Item,
    Message,
    Plain,
    Reply,
    UpMessage,
    Value,
)
from aiorl.process.tasks import Tasks

logger = logging.getLogger(__name__)

_TICK_S: Final = 0.25
_DONE: Final = object()
_INIT_CALL: Final = 0
_PLAIN: Final = frozenset({type(None), bool, int, float, str, dict, list, tuple, np.ndarray})
"""Types of results that are answers, not awaitables or iterators: other questions take longer."""


class _Credit:
    """Items of a stream that its caller takes."""

    def __init__(self, items: int) -> None:
        self._items = items
        self._is_more = asyncio.Event()

    def add(self, items: int) -> None:
        """Allow more items."""
        self._items += items
        self._is_more.set()

    async def take(self) -> None:
        """Wait until an item is allowed, and count it."""
        while not self._items:
            self._is_more.clear()
            await self._is_more.wait()
        self._items -= 1


class ActorHost:
    """Runs one actor for the hub at the endpoint's address, until one of them ends.

    Args:
        endpoint: not started yet.
        session: new.
    """

    def __init__(self, endpoint: WorkerEndpoint, session: ActorSession) -> None:
        self._endpoint = endpoint
        self._session = session
        self._calls = Calls(session, self._flush)
        self._tasks = Tasks(self.fail)
        self._thread: ObjectThread
        self._object: Any = None
        self._running: dict[int, asyncio.Task[None] | ThreadCall] = {}
        self._unsendable: dict[int, UnsendableError] = {}  # items of streams
        self._credits: dict[int, _Credit] = {}  # of streams
        self._outbox = Outbox(endpoint, self._tasks)
        self._done: asyncio.Future[Ended] | None = None

    async def run(self) -> Ended:
        """Run until the hub says goodbye, the connection ends after the registration, or `stop`."""
        self._calls.loop = asyncio.get_running_loop()
        self._done = self._calls.loop.create_future()
        self._thread = ObjectThread()
        self._endpoint.on_message = self._on_message
        self._endpoint.on_broadcast = self._on_broadcast
        self._endpoint.on_event = self._on_event
        async with AsyncExitStack() as stack:
            self._endpoint.start()
            stack.push_async_callback(self._endpoint.close)
            stack.push_async_callback(self._tasks.close)
            self._tasks.start(self._tick(), "tick")
            self._tasks.start(give_back_regularly(), "memory")
            return await self._done

    def stop(self, reason: str) -> None:
        """Leave the hub and end; call this on the event loop."""
        self._session.leave(reason)
        self._flush()

    def fail(self, error: BaseException) -> None:
        """End with an internal error, since a process is useless after a task has died."""
        self._finish(Ended(f"unexpected {error!r}", is_orderly=False))

    # Receiving and sending
    # ----------------------------------------------------------------------------------------------

    def _on_message(self, frames: list[memoryview]) -> None:
        self._take(lambda message: self._session.receive(message, time.monotonic()), frames)

    def _on_broadcast(self, frames: list[memoryview]) -> None:
        self._take(self._session.broadcast, frames)

    def _take(self, receive: Callable[[Message], None], frames: list[memoryview]) -> None:
        try:
            receive(decode(frames, LIMITS))
        except RemoteProtocolError as error:
            logger.warning("a message of the hub was not understood and is ignored: %s", error)
        self._flush()

    def _on_event(self, event: Event) -> None:
        match event.kind:
            case EventKind.CONNECTED:
                self._session.connected(time.monotonic())
            case EventKind.DISCONNECTED | EventKind.REFUSED | EventKind.WAITING:
                self._session.disconnected(event.reason)
                logger.debug("no connection to the hub: %s", event.reason)
        self._flush()

    async def _tick(self) -> None:
        while True:
            self._session.tick(time.monotonic())
            self._flush()
            await asyncio.sleep(_TICK_S)

    def _flush(self) -> None:
        """Handle the session's events, then send its messages."""
        for event in self._session.events():
            self._handle(event)
        for message in self._session.messages_to_send():
            self._send(message)

    def _send(self, message: UpMessage) -> None:
        try:
            frames = encode(message, compress=not self._endpoint.is_local, limits=LIMITS)
        except LocalProtocolError as error:  # too large, for example
            self._not_sent(message, UnsendableError(str(error)))
        else:
            self._outbox.send(frames)  # without a connection, the hub counts this actor as lost

    def _not_sent(self, message: UpMessage, error: UnsendableError) -> None:
        """Let the call end to which a message belongs that can't be sent."""
        match message:
            case Reply(call_id):
                self._send(Reply(call_id, False, description_of(error)))
            case Item(call_id):
                self._unsendable[call_id] = error
            case Call(call_id):
                self._session.receive(
                    Reply(call_id, False, description_of(error)), time.monotonic()
                )
                self._flush()
            case _:
                raise error

    # Events
    # ----------------------------------------------------------------------------------------------

    def _handle(self, event: ActorEvent) -> None:
        match event:
            case Call(call_id):
                if event.credit:
                    self._credits[call_id] = _Credit(event.credit)
                self._begin(event)
            case Cancel(call_id):
                if call_id in self._running:
                    self._running[call_id].cancel()
            case Credit(call_id, items):
                credit = self._credits.get(call_id)
                if credit is not None:
                    credit.add(items)
            case Reply(call_id, ok, result):
                self._calls.ended(call_id, ok=ok, result=result)
            case Item(call_id, value):
                self._calls.item(call_id, value)
            case ObjectRequested():
                self._tasks.start(self._make(event), "make the object")
            case Ended():
                self._finish(event)

    def _finish(self, end: Ended) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(end)

    # The object and its methods
    # ----------------------------------------------------------------------------------------------

    async def _make(self, request: ObjectRequested) -> None:
        def make() -> Any:
            kind = import_object(request.path, key="the class of an actor")
            args, kwargs = self._arguments(request.args, imports_code=True)
            return kind(*args, **kwargs)

        try:
            self._object = await self._thread.call(make)
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError):  # which the hub's end is
                logger.warning("the actor %s could not be made: %r", request.name, error)
            self._answer(_INIT_CALL, ok=False, result=_described(error))
            if not isinstance(error, Exception):
                raise
        else:
            self._answer(_INIT_CALL, ok=True, result=None)

    def _begin(self, call: Call) -> None:
        """Begin to run a method: a plain one in the thread, any other as a task."""
        try:
            method = public_method(self._object, call.method)
            args, kwargs = self._arguments(call.args, imports_code=not call.actor)
            if _is_asynchronous(method):
                self._begin_task(call, method(*args, **kwargs))
                return
        except Exception as error:
            self._end(call, error=error)
            return
        self._running[call.call_id] = self._thread.begin(
            lambda: _packed_or_later(method(*args, **kwargs)),
            functools.partial(self._returned, call),
        )

    def _returned(self, call: Call, result: Any, error: BaseException | None) -> None:
        """Answer with what a plain method has returned, or continue with it in a task."""
        if isinstance(error, Exception | asyncio.CancelledError):
            self._end(call, error=error)
            return
        if error is not None:  # such as SystemExit, which must end the process
            raise error
        packed, later = result
        if later is None:
            self._end(call, packed)
        else:
            self._begin_task(call, later)

    def _begin_task(self, call: Call, result: Any) -> None:
        self._running[call.call_id] = self._tasks.start(
            self._run(call, result), f"call {call.call_id}"
        )

    async def _run(self, call: Call, result: Any) -> None:
        """Await or iterate over what a method has returned, and answer the call."""
        try:
            if inspect.isawaitable(result):
                result = await result
            if type(result) not in _PLAIN and isinstance(result, AsyncIterator | Iterator):
                await self._stream(call, result)
                result = None
            packed = pack(result)
        except (Exception, asyncio.CancelledError) as error:
            self._end(call, error=error)
        else:
            self._end(call, packed)

    def _end(self, call: Call, packed: Value = None, *, error: BaseException | None = None) -> None:
        """Answer a call."""
        self._running.pop(call.call_id, None)
        self._credits.pop(call.call_id, None)
        if error is None:
            self._answer(call.call_id, ok=True, result=packed)
        else:
            self._answer(call.call_id, ok=False, result=_described(error))

    async def _stream(self, call: Call, items: AsyncIterator[Any] | Iterator[Any]) -> None:
        """Send the items of a generator as the caller takes them, and close it."""
        if not call.credit:
            raise TypeError(
                f"{call.method} is a generator: iterate over the call with `async for` at once, or"
                " return a list"
            )
        credit = self._credits[call.call_id]
        async with contextlib.aclosing(self._all_of(items)) as stream:
            await credit.take()
            async for item in stream:
                self._session.send_item(call.call_id, item)
                self._flush()
                if call.call_id in self._unsendable:
                    raise self._unsendable.pop(call.call_id)
                await credit.take()

    async def _all_of(
        self, items: AsyncIterator[Any] | Iterator[Any]
    ) -> AsyncGenerator[Value, None]:
        """Yield the packed items; a plain generator runs in the actor's thread."""
        if isinstance(items, AsyncIterator):
            try:
                async for item in items:
                    yield pack(item)
            finally:
                if inspect.isasyncgen(items):
                    await items.aclose()
            return
        try:
            while True:
                item = await self._thread.call(lambda: _packed_next(items))
                if item is _DONE:
                    return
                yield item
        finally:
            if inspect.isgenerator(items):
                await self._thread.call(items.close)

    def _arguments(
        self, packed: Mapping[str, Plain], *, imports_code: bool
    ) -> tuple[list[Any], dict[str, Any]]:
        return unpacked_arguments(packed, self._calls.make_handle, imports_code=imports_code)

    def _answer(self, call_id: int, *, ok: bool, result: Any) -> None:
        self._session.reply(call_id, ok=ok, result=result)
        self._flush()


def _is_asynchronous(method: Callable[..., Any]) -> bool:
    code = getattr(method, "__code__", None)
    if isinstance(code, CodeType):  # as `inspect` finds it out, in a tenth of the time
        return bool(code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR))
    return inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)


def _packed_or_later(result: Any) -> tuple[Value, Any]:
    """Return a method's result in packed form and None; or None and the awaitable or iterator that
    gives it.

    This runs in the actor's thread, since the next method there may change the arrays of a result.
    """
    is_plain = type(result) in _PLAIN
    if not is_plain and (
        inspect.isawaitable(result) or isinstance(result, AsyncIterator | Iterator)
    ):
        return None, result
    return pack(result), None


def _packed_next(items: Iterator[Any]) -> Any:
    item = next(items, _DONE)
    return item if item is _DONE else pack(item)


def _described(error: BaseException) -> dict[str, Any]:
    """Return what the caller gets to know of an exception."""
    return description_of(error, runner=__file__)
