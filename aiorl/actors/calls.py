"""Calls from the caller's side: handles of actors, results that are awaited, and streams.

A hub and an actor call in the same way, each through its session. The functions are for all calls,
those of a run's workers as well, and for both sides.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from typing import Any, Final, Protocol
from weakref import WeakValueDictionary

from aiorl.actors.references import ObjectRef, settle, with_results
from aiorl.actors.values import ActorName, MakeHandle, PackedValue, pack, unpack
from aiorl.errors import ActorError, ActorLost, RemoteError, RemoteProtocolError
from aiorl.net.wire import messages as m
from aiorl.text import many_lines, one_line

_MAX_TEXT: Final = 16_000

WINDOW: Final = 8
"""Items of a stream that may be under way or waiting for the caller."""


class CallSession(Protocol):
    """The commands for calls that the sessions of both sides have."""

    def call(self, name: str, method: str, args: Mapping[str, m.Plain], credit: int = 0) -> int:
        """Call a method of an actor; return the number of the call."""

    def give_credit(self, call_id: int, items: int) -> None:
        """Allow more items of a stream."""

    def cancel(self, call_id: int) -> None:
        """Cancel a call, which still ends by an event."""


def packed_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, m.Plain]:
    """Return the arguments of a call as messages carry them.

    Raises:
        UnsendableError: they contain something that can't be sent.
    """
    return {"args": pack(list(args)), "kwargs": pack(dict(kwargs))}


def unpacked_arguments(
    packed: Mapping[str, m.Plain], make_handle: MakeHandle, *, imports_code: bool
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments that `packed_arguments` was given.

    Args:
        packed: arguments of a call, from a peer.
        make_handle: makes handles of actors.
        imports_code: True if the peer may name classes and functions to import.

    Raises:
        RemoteProtocolError: they are not a result of `packed_arguments`, or name code that can't be
            imported.
    """
    arguments = unpack(packed, make_handle, imports_code=imports_code)
    return arguments["args"], arguments["kwargs"]


def public_method(target: Any, name: str) -> Callable[..., Any]:
    """Return a method that calls may name.

    Args:
        target: object with the method.
        name: name of the method, from a peer.

    Raises:
        AttributeError: it has no such method, or that is private.
    """
    method: Callable[..., Any] | None = None
    if not name.startswith("_"):
        method = getattr(target, name, None)
    if not callable(method):
        raise AttributeError(f"it has no public method {name!r}")
    return method


def answer_of(
    method: str, *, ok: bool, result: m.Value, make_handle: MakeHandle
) -> tuple[Any, Exception | None]:
    """Return what a reply means: the method's result, or the error of the call.

    Args:
        method: name of the method, for people.
        ok: False if the call has failed.
        result: packed result, or what went wrong.
        make_handle: makes handles of actors.
    """
    if not ok:
        return None, error_of(method, result)
    try:
        return unpack(result, make_handle, imports_code=False), None
    except RemoteProtocolError as error:
        return None, error


class Calls:
    """Calls of one process that have not ended.

    Attributes:
        is_over: True once the program has ended its actors: calls that it does not await are then
            no news.

    Args:
        session: sends them.
        flush: called after each command to the session, to send its messages.

    Attributes:
        loop: the event loop of this process's calls, while it runs.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self, session: CallSession, flush: Callable[[], None]) -> None:
        self.is_over = False
        self._session = session
        self._flush = flush
        self._prepared: defaultdict[str, deque[RemoteCall]] = defaultdict(deque)  # of each actor
        self._results: dict[int, RemoteCall] = {}
        # weak, so that a stream that no one reads any more is closed
        self._streams: WeakValueDictionary[int, RemoteStream] = WeakValueDictionary()

    def prepare(self, call: RemoteCall) -> None:
        """Put a call behind those that were made before it and are not sent yet."""
        self._prepared[call.actor].append(call)

    def begin_in_order(self, call: RemoteCall) -> None:
        """Send a call, after those that were made before it for the same actor."""
        prepared = self._prepared[call.actor]
        while call.is_prepared:
            prepared.popleft().begin()
        if not prepared:
            del self._prepared[call.actor]

    def begin(
        self,
        call: RemoteCall | RemoteStream,
        actor: str,
        method: str,
        args: Mapping[str, m.Plain],
        *,
        credit: int = 0,
    ) -> int:
        """Send a call, and return its number."""
        call_id = self._session.call(actor, method, args, credit)
        if isinstance(call, RemoteStream):
            self._streams[call_id] = call
        else:
            self._results[call_id] = call
        self._flush()
        return call_id

    def give_credit(self, call_id: int, items: int) -> None:
        """Allow more items of a stream."""
        self._session.give_credit(call_id, items)
        self._flush()

    def cancel(self, call_id: int) -> None:
        """Tell the actor that no one waits for the answer any more."""
        self._remove(call_id)
        self._session.cancel(call_id)
        self._flush()

    def ended(self, call_id: int, *, ok: bool, result: m.Value) -> None:
        """Take the reply to a call."""
        call = self._remove(call_id)
        if call is None:  # it was cancelled
            return
        if ok and isinstance(call, RemoteCall) and call.make_later is not None:
            call.succeed(PackedValue(result, call.make_later))
            return
        answer, error = answer_of(call.method, ok=ok, result=result, make_handle=self.make_handle)
        if error is None:
            call.succeed(answer)
        else:
            call.fail(error)

    def lost(self, call_id: int, error: ActorLost) -> None:
        """End a call whose actor is lost."""
        call = self._remove(call_id)
        if call is not None:
            call.fail(error)

    def item(self, call_id: int, value: m.Value) -> None:
        """Take an item of a stream."""
        stream = self._streams.get(call_id)
        if stream is None:
            return
        try:
            if stream.is_full:
                raise RemoteProtocolError(f"{stream.method} sent more items than were asked for")
            stream.put(unpack(value, self.make_handle, imports_code=False))
        except RemoteProtocolError as error:
            self.cancel(call_id)
            stream.fail(error)

    def close(self, reason: str) -> None:
        """End all calls."""
        calls: list[RemoteCall | RemoteStream] = [*self._results.values(), *self._streams.values()]
        self._results.clear()
        self._streams.clear()
        for call in calls:
            call.fail(ActorError(f"{call.method}: {reason}"))

    def make_handle(self, name: str, path: str) -> ActorHandle:
        """Return a handle whose calls are made here."""
        return ActorHandle(self, ActorName(name, path))

    def _remove(self, call_id: int) -> RemoteCall | RemoteStream | None:
        result = self._results.pop(call_id, None)
        return self._streams.pop(call_id, None) if result is None else result


def description_of(error: BaseException, *, runner: str = "") -> dict[str, m.Value]:
    """Return what a reply says of an exception; see `error_of`.

    Args:
        error: the exception.
        runner: file of the module that has called the method. The traceback begins behind it, in
            the user's code.
    """
    users_trace = trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == runner:
            users_trace = trace.tb_next
        trace = trace.tb_next
    # it can print an exception whose own text raises one
    printed = traceback.TracebackException.from_exception(error.with_traceback(users_trace))
    return m.failed(
        kind=type(error).__qualname__,
        message=str(printed)[:4000],
        traceback="".join(printed.format())[-12_000:],
    )


def error_of(method: str, result: Any) -> ActorError:
    """Return the exception that a reply describes; the texts in it come from a peer."""
    texts = result if isinstance(result, Mapping) else {}
    message = many_lines(str(texts.get("message", "")), _MAX_TEXT)
    if "lost" in texts:
        is_restarting = texts.get("is_restarting") is True
        return ActorLost(one_line(str(texts["lost"]), 64), message, is_restarting=is_restarting)
    kind = one_line(str(texts.get("kind", "an error")), 64)
    if kind == asyncio.CancelledError.__name__:
        return ActorError(f"{method} was cancelled")
    trace = many_lines(str(texts.get("traceback", "")), _MAX_TEXT, keep_end=True)
    return RemoteError(method, kind, message, trace)


class RemoteCall(asyncio.Future[Any]):
    """Call of an actor's method: await it for the result, or iterate over it with ``async for``.

    It is a future. Cancelling it, or the task that awaits it, cancels the method if that is
    asynchronous; a method that runs in the actor's thread ends by itself, and its result is
    dropped.

    Attributes:
        method: name of the method with its class, for people.
        actor: name of the actor.
        is_prepared: True until it is sent.
        make_later: makes handles for readers of a reference, if the result is to be a
            `PackedValue`; None unpacks it when it arrives.

    Raises:
        RemoteError: when awaited: the method raised an exception.
        ActorLost: when awaited: the actor ended before it answered.
    """

    __slots__ = (
        "_args",
        "_call_id",
        "_calls",
        "_name",
        "_stream",
        "actor",
        "is_prepared",
        "make_later",
        "method",
    )

    def __init__(
        self, calls: Calls, actor: ActorName, method: str, args: Mapping[str, m.Plain]
    ) -> None:
        super().__init__()
        self.method = f"{actor.path.rpartition(':')[2]}.{method}"
        self.actor = actor.name
        self.is_prepared = True
        self.make_later: MakeHandle | None = None
        self._calls = calls
        self._name = method
        self._args = args
        self._call_id = 0
        self._stream: RemoteStream | None = None
        calls.prepare(self)

    def __await__(self) -> Generator[Any, None, Any]:
        """Return the result of the method."""
        self.send()
        return super().__await__()

    __iter__ = __await__

    def __aiter__(self) -> RemoteStream:
        """Iterate over the items of a method that is a generator."""
        if not self.is_prepared:
            raise RuntimeError(
                f"{self.method} was called for one result, not for a stream: begin `async for` at"
                " once, before another `await`"
            )
        stream = self._stream = RemoteStream(self._calls, self.method)
        self.send()
        self._stream = None
        super().cancel()
        return stream

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the call; see above."""
        if not super().cancel(msg):
            return False
        if self._call_id:
            self._calls.cancel(self._call_id)
        return True

    def succeed(self, result: Any) -> None:
        """End with a result."""
        if not self.done():
            self.set_result(result)

    def fail(self, error: BaseException) -> None:
        """End with an error."""
        if self.done():
            return
        self.set_exception(error)
        if self._calls.is_over:
            self.exception()  # so that asyncio doesn't report it as never retrieved

    def begin(self) -> None:
        """Send the call, unless it was cancelled meanwhile; see `Calls.begin_in_order`."""
        args = self._args
        self._args = {}
        self.is_prepared = False
        if self.cancelled():
            return
        if self._stream is not None:
            self._stream.begin(self.actor, self._name, args)
        else:
            self._call_id = self._calls.begin(self, self.actor, self._name, args)

    def send(self) -> None:
        """Send the call now, if it is not sent yet, after those that were made before it."""
        if self.is_prepared:
            self._calls.begin_in_order(self)

    def send_soon(self) -> None:
        """Send the call even if no one awaits it, after the first step of tasks that are made with
        it: they may iterate over it.
        """
        self.get_loop().call_soon(self._send_in_next_turn)

    def _send_in_next_turn(self) -> None:
        if self.is_prepared:
            self.get_loop().call_soon(self.send)


class RemoteStream:
    """Items of a method that is a generator, with at most `WINDOW` of them under way.

    It ends with `aclose`, or when it is no longer used; the generator is then closed, too.
    """

    def __init__(self, calls: Calls, method: str) -> None:
        self.method = method
        self._calls = calls
        self._loop = asyncio.get_running_loop()
        self._call_id = 0
        self._items: deque[Any] = deque()
        self._num_taken = 0
        self._waiter: asyncio.Future[None] | None = None
        self._end: BaseException | None = None

    def begin(self, actor: str, name: str, args: Mapping[str, m.Plain]) -> None:
        """Send the call."""
        self._call_id = self._calls.begin(self, actor, name, args, credit=WINDOW)

    def __aiter__(self) -> RemoteStream:
        """Return this iterator."""
        return self

    async def __anext__(self) -> Any:
        """Return the next item.

        Raises:
            RemoteError: the generator raised an exception.
            ActorLost: the actor ended before the stream did.
        """
        while not self._items:
            if self._end is not None:
                raise self._end
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._num_taken += 1
        if self._num_taken == WINDOW // 2 and self._end is None:
            self._num_taken = 0
            self._calls.give_credit(self._call_id, WINDOW // 2)
        return self._items.popleft()

    async def aclose(self) -> None:
        """Close the generator; items that have arrived can still be taken."""
        if self._end is None:
            self._calls.cancel(self._call_id)
            self.fail(StopAsyncIteration())

    def __del__(self) -> None:
        """Close the generator of a stream that no one reads to its end.

        The collector can run in any thread.
        """
        if self._end is None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._calls.cancel, self._call_id)

    @property
    def is_full(self) -> bool:
        """True if all items wait for which there was credit."""
        return len(self._items) >= WINDOW

    def put(self, item: Any) -> None:
        """Add an item."""
        self._items.append(item)
        self._wake()

    def succeed(self, result: Any) -> None:
        """End the stream after its last item."""
        self.fail(StopAsyncIteration())

    def fail(self, error: BaseException) -> None:
        """End the stream with an error, after the items that have arrived."""
        if self._end is None:
            self._end = error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class RemoteMethod:
    """Method of an actor; call it for a `RemoteCall`, in other threads by ``remote``."""

    __slots__ = ("_handle", "_name")

    def __init__(self, handle: ActorHandle, name: str) -> None:
        self._handle = handle
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> RemoteCall:
        """Call the method; the arguments are those of the method itself.

        Raises:
            UnsendableError: an argument can't be sent.
        """
        call = self._handle.__prepare__(self._name, packed_arguments(args, kwargs))
        call.send_soon()
        return call

    def remote(self, *args: Any, **kwargs: Any) -> ObjectRef:
        """Begin a call from another thread than that of the event loop, as in Ray: in a method of
        an actor that is not asynchronous, for example.

        It waits for the results of references among the arguments.

        Returns:
            The reference to the result, for `get` and `wait`.

        Raises:
            ActorError: this is the thread of the event loop.
            UnsendableError: an argument can't be sent.
            Exception: the call of a reference raised it.
        """
        loop = self._handle.__calls__.loop
        if _running_loop() is loop:
            raise ActorError(f"in `async def` functions, write: await {self._name}(...)")
        packed = packed_arguments(*with_results(args, kwargs))
        future: Future[Any] = Future()

        def begin() -> None:
            call = self._handle.__begin__(self._name, packed)
            call.make_later = self._handle.__calls__.make_handle
            call.add_done_callback(functools.partial(settle, future))

        loop.call_soon_threadsafe(begin)
        return ObjectRef(future)

    def __repr__(self) -> str:
        return f"<method {self._name} of {self._handle!r}>"


class ActorHandle:
    """An actor, with its public methods; each returns a `RemoteCall`.

    A handle can be an argument of a call, or a part of one: the actor that gets it can call the
    other actor, through the hub. Handles of one actor are equal.
    """

    __slots__ = ("__actor__", "__calls__")

    def __init__(self, calls: Calls, actor: ActorName) -> None:
        """Prepare a handle; `Actors.start` returns them.

        Args:
            calls: makes the calls of this process.
            actor: the actor.
        """
        self.__calls__ = calls
        self.__actor__ = actor

    def __getattr__(self, name: str) -> RemoteMethod:
        """Return the method with this name; whether there is one shows when it is called."""
        if name.startswith("_"):
            raise AttributeError(f"{name!r} is private: actors have only public methods")
        return RemoteMethod(self, name)

    def __begin__(self, method: str, args: Mapping[str, m.Plain]) -> RemoteCall:
        """Call a method with packed arguments.

        Raises:
            ActorError: there is no event loop here, or the method is not a name.
        """
        call = self.__prepare__(method, args)
        call.send()
        return call

    def __prepare__(self, method: str, args: Mapping[str, m.Plain]) -> RemoteCall:
        """Return a call that is sent when it is awaited, or by `RemoteCall.send`.

        Raises:
            ActorError: there is no event loop here, or the method is not a name.
        """
        if not isinstance(method, str):
            raise ActorError(f"{method!r} is not the name of a method, such as 'sample'")
        if _running_loop() is None:
            raise ActorError(
                f"{method} was called without an event loop: call it in an `async def` function, or"
                f" begin the call by {method}.remote(...)"
            )
        return RemoteCall(self.__calls__, self.__actor__, method, args)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorHandle) and other.__actor__ == self.__actor__

    def __hash__(self) -> int:
        return hash(self.__actor__)

    def __repr__(self) -> str:
        return f"<actor {self.__actor__.name} of {self.__actor__.path}>"
