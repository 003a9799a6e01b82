"""Actors in the shape of Ray: `init`, `remote`, `put` and `kill`, for programs without asyncio.

    RemoteWorker = aiorl.RolloutWorker.as_remote(num_cpus=1)
    workers = [RemoteWorker.remote(env_creator=make_env, policy=MyPolicy) for _ in range(4)]
    batches = aiorl.get([worker.sample.remote() for worker in workers])

An event loop in a thread of its own runs the hub of these actors (`aiorl.actors.hub`). All of them
end with the program.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import functools
import inspect
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from aiorl.actors.calls import ActorHandle, RemoteCall
from aiorl.actors.hub import Actors, new_name
from aiorl.actors.references import TERMINATE, ObjectRef, RefHandle, refuse_in_fork, settle
from aiorl.actors.values import ActorName, PackedValue, num_bytes, pack
from aiorl.compat.limits import ActorOptions, LimitedObject
from aiorl.config.code import import_path_of, importable_place, refuse_in_import
from aiorl.errors import ActorError, ActorLost, ConfigError, RemoteError
from aiorl.net.wire.messages import Value
from aiorl.process.tasks import new_event_loop

T = TypeVar("T")

_ENDED = "the program has ended its actors"
_MIN_SHARED_BYTES = 1 << 14
"""Smaller values are sent with each call."""


class PutRef(ObjectRef):
    """Reference to a value that calls of several actors share.

    Attributes:
        packed: the value as a message carries it.
        num_uses: calls that it has been an argument of.
        payload: where it was sent, to all actors, and under which number; None before.
    """

    __slots__ = ("num_uses", "packed", "payload")

    def __init__(self, value: PackedValue) -> None:
        """Refer to ``value``."""
        future: Future[Any] = Future()
        future.set_result(value)
        super().__init__(future)
        self.packed = value.packed
        self.num_uses = 0
        self.payload: tuple[_SharedValues, int] | None = None

    def __del__(self) -> None:
        """Let the hub forget the value."""
        if self.payload is not None:
            values, number = self.payload
            values.release(number)


class _SharedValues:
    """Values of `put` that are sent to all actors at once, so that each host gets them once.

    A value that a single call uses goes to its actor alone. Actors remember few values; an older
    one is therefore sent with each call again as soon as another was shared.
    """

    def __init__(self, actors: Actors) -> None:
        self._actors = actors
        self._loop = asyncio.get_running_loop()
        self._newest = 0

    def number_of(self, ref: PutRef) -> int | None:
        """Return the number under which the actors have the value; None if it has to be sent.

        Raises:
            UnsendableError: it is too large for a message.
        """
        ref.num_uses += 1
        # within a host, it would save nothing
        if not self._actors.is_open_to_others or ref.num_uses < 2:
            return None
        if ref.payload is None or ref.payload[0] is not self:
            if num_bytes(ref.packed) < _MIN_SHARED_BYTES:
                return None
            self._newest = self._actors.share({"value": ref.packed})
            ref.payload = (self, self._newest)
        number = ref.payload[1]
        return number if number == self._newest else None

    def release(self, number: int) -> None:
        """Forget a value; in any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._actors.release, number)


def put(value: Any) -> ObjectRef:
    """Return a reference to a value, for arguments of several calls.

    Later changes of the value have no effect, since it is copied. `get` returns it with arrays that
    can't be written to.

    Args:
        value: any value that a call can have as an argument.

    Raises:
        UnsendableError: it contains something that can't be sent.
        TypeError: it is a reference.
    """
    if isinstance(value, ObjectRef):
        raise TypeError("put takes a value, got a reference: pass the reference itself")
    return PutRef(PackedValue(pack(value), _handle_of, imports_code=True))


def _handle_of(name: str, path: str) -> Any:
    """Return the handle of an actor; its name alone if it has ended and is forgotten."""
    hub = _current()
    handle = None if hub is None else hub.handle_of(name)
    return handle or ActorName(name, path)


# Calls
# --------------------------------------------------------------------------------------------------


class _Arguments:
    """Arguments of a call: packed values, and references whose results are filled in later.

    As in Ray, only an argument itself can be a reference, not a part of one.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Pack all arguments but references.

        Raises:
            UnsendableError: an argument can't be sent.
        """
        self._args = [_packed_or_ref(value) for value in args]
        self._kwargs = {name: _packed_or_ref(value) for name, value in kwargs.items()}

    def first_pending(self) -> Future[Any] | None:
        """Return the future of the first reference whose call has not ended."""
        for value in (*self._args, *self._kwargs.values()):
            if isinstance(value, ObjectRef) and not value.is_ready():
                return value.future
        return None

    def packed_with_shared(self, values: _SharedValues) -> dict[str, Any]:
        """Return the arguments of a call, without a value that its actor has (`HubSession.share`).

        Raises:
            Exception: the call of a reference raised it.
        """
        packed = self.packed()
        for place, value in (*enumerate(self._args), *self._kwargs.items()):
            number = values.number_of(value) if isinstance(value, PutRef) else None
            if number is not None:
                del packed["args" if isinstance(place, int) else "kwargs"][place]
                return {**packed, "payload": number, "place": place}
        return packed

    def packed(self) -> dict[str, Any]:
        """Return the arguments as `packed_arguments` does.

        Raises:
            Exception: the call of a reference raised it.
        """
        return {
            "args": [_filled_in(value) for value in self._args],
            "kwargs": {name: _filled_in(value) for name, value in self._kwargs.items()},
        }


def _packed_or_ref(value: Any) -> Value | ObjectRef:
    return value if isinstance(value, ObjectRef) else pack(value)


def _filled_in(value: Any) -> Value:
    if isinstance(value, PutRef):
        return value.packed
    if isinstance(value, ObjectRef):
        result = value.future.result()
        # an actor may not name code to import; the one that gets its result as an argument imports
        return result.checked() if isinstance(result, PackedValue) else pack(result)
    packed: Value = value
    return packed


@dataclasses.dataclass(slots=True, eq=False)
class _Call:
    """A call that has not been sent.

    Attributes:
        method: name of the method.
        arguments: its arguments.
        future: future of its result.
    """

    method: str
    arguments: _Arguments
    future: Future[Any]


class _RemoteActor:
    """An actor of the program's hub. Its calls begin in order; it lives on the hub's event loop.

    Attributes:
        actor_name: its name, for handles in values.
        cls: its class.
    """

    def __init__(self, hub: _Hub, cls: type[Any], path: str) -> None:
        self.actor_name = ActorName(new_name(path), path)
        self.cls = cls
        self._actors = hub.actors
        self._values = hub.values
        self._running = hub.running
        self._name = cls.__qualname__
        self._calls: deque[_Call] = deque()
        self._awaited: Future[Any] | None = None
        self._begun: set[RemoteCall] = set()
        self._handle: asyncio.Task[ActorHandle] | None = None
        self._loop = hub.loop
        self._is_closed = False
        self._is_terminated = False
        self._ending: set[asyncio.Task[None]] = set()

    def start(self, make: Callable[..., Any], arguments: _Arguments, options: ActorOptions) -> None:
        """Start the process; calls wait until it answers."""
        self._actors.reserve(self.actor_name.name)
        self._handle = self._loop.create_task(self._started(make, arguments, options))
        self._handle.add_done_callback(self._start_ended)

    def _start_ended(self, started: asyncio.Future[ActorHandle]) -> None:
        if started.cancelled() or started.exception() is not None:
            self._actors.give_up(self.actor_name.name)
        self._advance()

    async def _started(
        self, make: Callable[..., Any], arguments: _Arguments, options: ActorOptions
    ) -> ActorHandle:
        pending = arguments.first_pending()
        while pending is not None:
            wrapped = asyncio.wrap_future(pending)
            await asyncio.wait([wrapped])
            wrapped.exception()  # or asyncio reports that no one has read it
            pending = arguments.first_pending()
        packed = arguments.packed()
        limits = options.limits()
        if limits:
            args = [pack(make), pack(limits), packed["args"], packed["kwargs"]]
            packed = {"args": args, "kwargs": {}}
            make = LimitedObject
        try:
            handles = await self._actors.start_packed(
                make,
                packed,
                restarts=options.max_restarts,
                on=options.on,
                name=self.actor_name.name,
            )
        except RemoteError as error:
            error.method = self._name  # with limits, it is not the user's class
            raise
        return handles[0]

    def add(self, call: _Call) -> None:
        """Begin a call after all earlier ones."""
        self._calls.append(call)
        if self._is_closed:
            self.close()
        else:
            self._advance()

    def _advance(self) -> None:
        """Begin the calls whose arguments have arrived, up to the first whose ones have not."""
        if self._handle is None or not self._handle.done():
            return
        while self._calls:
            pending = self._calls[0].arguments.first_pending()
            if pending is not None:
                if pending is not self._awaited:
                    self._awaited = pending
                    pending.add_done_callback(self._argument_arrived)
                return
            self._begin(self._calls.popleft())

    def _argument_arrived(self, future: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._advance)

    def _begin(self, call: _Call) -> None:
        assert self._handle is not None
        if call.method == TERMINATE:
            self._is_terminated = True
            task = self._loop.create_task(self._terminate())
            task.add_done_callback(functools.partial(settle, call.future))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            return
        if self._is_terminated:
            reason = f"an earlier call of {TERMINATE} ends it"
            call.future.set_exception(ActorLost(self._name, reason))
            return
        try:
            args = call.arguments.packed_with_shared(self._values)
            begun = self._handle.result().__prepare__(call.method, args)
        except asyncio.CancelledError:
            lost = ActorLost(self._name, "it was ended before it had started")
            call.future.set_exception(lost)
            return
        except Exception as error:
            call.future.set_exception(error)
            return
        begun.method = f"{self._name}.{call.method}"
        begun.make_later = _handle_of
        begun.send()
        self._begun.add(begun)
        # the closure keeps shared arguments until the call has ended
        begun.add_done_callback(functools.partial(self._ended, call))

    def _ended(self, call: _Call, ended: asyncio.Future[Any]) -> None:
        self._begun.discard(ended)
        settle(call.future, ended)

    async def _terminate(self) -> None:
        if self._begun:
            await asyncio.wait(self._begun)
        await self.stop()

    async def stop(self) -> None:
        """End the actor's process."""
        assert self._handle is not None
        self._running.discard(self)
        if not self._handle.done():
            self._handle.cancel()
            await asyncio.wait([self._handle])
        if not self._handle.cancelled() and self._handle.exception() is None:
            await self._actors.stop(self._handle.result())

    def close(self) -> None:
        """End all calls that have not begun, and those that come later."""
        self._is_closed = True
        error = ActorError(f"{self._name}: {_ENDED}")
        for call in self._calls:
            call.future.set_exception(error)
        self._calls.clear()


# The hub
# --------------------------------------------------------------------------------------------------


class _Hub:
    """The program's actors, on an event loop in a thread of its own.

    Attributes:
        pid: the process that it belongs to.
        loop: the event loop.
        actors: the actors.
        values: values that they share.
        running: actors that have not been stopped.
    """

    def __init__(self, **settings: Any) -> None:
        """Begin to listen.

        Args:
            settings: arguments of `Actors`.

        Raises:
            ConfigError: a setting is wrong.
            SecurityError: the keys can't be used.
        """
        self.pid = os.getpid()
        self.loop: asyncio.AbstractEventLoop
        self.actors: Actors
        self.values: _SharedValues
        # no call is queued behind the end of the event loop, where no one would answer it
        self._lock = threading.Lock()
        self._is_ending = False
        self._is_closing = asyncio.Event()
        self.running: set[_RemoteActor] = set()
        self._by_name: WeakValueDictionary[str, _RemoteActor] = WeakValueDictionary()
        opened: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(opened, settings), name="aiorl-actors", daemon=True
        )
        self._thread.start()
        opened.result()

    def _run(self, opened: Future[None], settings: Mapping[str, Any]) -> None:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(self._main(opened, settings))

    async def _main(self, opened: Future[None], settings: Mapping[str, Any]) -> None:
        self.loop = asyncio.get_running_loop()
        try:
            async with Actors(**settings) as self.actors:
                self.values = _SharedValues(self.actors)
                opened.set_result(None)
                await self._is_closing.wait()
                self._end_calls()
        except Exception as error:
            if opened.done():
                raise
            opened.set_exception(error)
        finally:
            with self._lock:
                self._is_ending = True
            await asyncio.sleep(0)  # calls that were queued before
            self._end_calls()

    def _end_calls(self) -> None:
        for ref in self._by_name.valuerefs():  # a list, whatever other threads add
            actor = ref()
            if actor is not None:
                actor.close()

    def close(self) -> None:
        """End all actors and the thread."""
        with contextlib.suppress(ActorError):
            self.call_soon(self._is_closing.set, is_last=True)
        self._thread.join()

    def call_soon(self, function: Callable[..., Any], *args: Any, is_last: bool = False) -> None:
        """Call a function on the event loop.

        Args:
            function: the function.
            *args: its arguments.
            is_last: True to refuse all later ones.

        Raises:
            ActorError: the hub has ended, or ends, or this is a fork of its process.
        """
        refuse_in_fork(self.pid)
        with self._lock:
            if self._is_ending:
                raise ActorError(f"{_ENDED}: start new ones")
            self._is_ending = is_last
            self.loop.call_soon_threadsafe(function, *args)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop, and return its result.

        Raises:
            ActorError: the hub has ended, or ends.
        """
        future: Future[T] = Future()

        def begin() -> None:
            task = self.loop.create_task(coroutine)
            task.add_done_callback(functools.partial(settle, future))

        try:
            self.call_soon(begin)
        except ActorError:
            coroutine.close()
            raise
        return future.result()

    def start(
        self,
        cls: type[Any],
        *,
        path: str,
        make: Callable[..., Any],
        arguments: _Arguments,
        options: ActorOptions,
    ) -> _RemoteActor:
        """Start an actor, without waiting for it.

        Raises:
            ActorError: the hub has ended.
        """
        actor = _RemoteActor(self, cls, path)
        self._by_name[actor.actor_name.name] = actor
        self.running.add(actor)
        self.call_soon(actor.start, make, arguments, options)
        return actor

    def handle_of(self, name: str) -> RemoteHandle | None:
        """Return a handle of an actor, None if it is forgotten."""
        actor = self._by_name.get(name)
        return None if actor is None else RemoteHandle(self, actor)


_lock = threading.RLock()
_hub: _Hub | None = None


def _current() -> _Hub | None:
    # a fork has no thread of its parent's
    return _hub if _hub is not None and _hub.pid == os.getpid() else None


def init(
    bind: str | None = None,
    keys: Path | str | None = None,
    *,
    insecure: bool = False,
    in_flight: int = 64,
    silence_s: float = 10.0,
    ignore_reinit_error: bool = False,
    **options: Any,
) -> str:
    """Begin to listen for the processes of actors; otherwise the first ``.remote()`` does.

    Args:
        bind: "tcp://HOST:PORT" to listen at, for processes of other hosts as well, which join by
            ``aiorl worker --connect ADDRESS``; None is for this host alone.
        keys: directory of CURVE keys, as ``aiorl keys DIR`` makes them.
        insecure: True to let everyone who can reach ``bind`` join if there are no keys.
        in_flight: calls that an actor gets before it has answered.
        silence_s: silence after which an actor on another host counts as lost, seconds.
        ignore_reinit_error: True does nothing if `init` was called before.
        options: options of Ray, which are refused.

    Returns:
        The address at which processes join, "" if none can.

    Raises:
        ConfigError: it cannot listen at ``bind``, or there is an option of Ray.
        SecurityError: the keys can't be used.
        ActorError: it listens already.
    """
    global _hub
    for name, value in options.items():
        raise ConfigError(
            f"init has no option {name!r}: there is no cluster, and nothing is scheduled.",
            key=name,
            value=value,
            hint="Leave it out; see `init`, and `options` of a class for limits of its processes.",
        )
    refuse_in_import("starts actors")
    with _lock:
        hub = _current()
        if hub is None:
            hub = _hub = _Hub(
                bind=bind, keys=keys, insecure=insecure, in_flight=in_flight, silence_s=silence_s
            )
            atexit.register(shutdown)
        elif not ignore_reinit_error:
            raise ActorError(
                "init was called before, or an actor has been started: call shutdown first, or pass"
                " ignore_reinit_error=True"
            )
        return hub.actors.address


def is_initialized() -> bool:
    """Return whether this program listens for the processes of actors."""
    return _current() is not None


def shutdown() -> None:
    """End all actors that ``.remote()`` has started, and their processes.

    The end of the program does the same.
    """
    global _hub
    with _lock:
        hub = _current()
        _hub = None
        atexit.unregister(shutdown)
        if hub is not None:
            hub.close()


def _hub_in_use() -> _Hub:
    with _lock:
        init(ignore_reinit_error=True)
        hub = _current()
        assert hub is not None
        return hub


# Classes and handles
# --------------------------------------------------------------------------------------------------


class RemoteHandle(RefHandle):
    """An actor; ``handle.method.remote(...)`` calls one of its methods.

    A handle can be an argument of a call. The actor that gets it calls the other by ``await
    handle.method(...)``. Handles of one actor are equal.
    """

    _cls: type[Any]

    def __init__(self, hub: _Hub, actor: _RemoteActor) -> None:
        """Prepare the handle; `RemoteClass.remote` returns them.

        Args:
            hub: the program's actors.
            actor: this one.
        """
        super().__init__(self._begin, actor.cls)
        self._hub = hub
        self._actor = actor

    def _begin(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # no one can cancel it
        call = _Call(method, _Arguments(args, kwargs), future)
        self._hub.call_soon(self._actor.add, call)
        return future

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteHandle) and other._actor is self._actor

    def __hash__(self) -> int:
        return hash(self._actor)

    def __repr__(self) -> str:
        return f"<remote {self._cls.__qualname__}>"

    def _kill(self) -> None:
        self._hub.run(self._actor.stop())

    @property
    def __actor__(self) -> ActorName:
        """Name of the actor, for its way as an argument."""
        return self._actor.actor_name


class RemoteClass:
    """A class whose objects are actors; `remote` makes them.

    Calling it makes a plain object, in this process.
    """

    def __init__(
        self, cls: type[Any], options: ActorOptions, decorated: RemoteClass | None = None
    ) -> None:
        """Prepare the class; `aiorl.remote` and `RolloutWorker.as_remote` return them.

        Args:
            cls: the class.
            options: limits of the processes, and restarts.
            decorated: the object that has the name of the class in its module if `remote` was its
                decorator; None for this one.

        Raises:
            TypeError: ``cls`` is not a class, but the name of one that derives from a `RemoteClass`.
        """
        if not inspect.isclass(cls):
            raise TypeError(
                f"{cls!r:.100} derives from what aiorl.remote has returned: let it derive from the"
                " plain class, then pass it to aiorl.remote"
            )
        functools.update_wrapper(self, cls, updated=())
        self._cls = cls
        self._options = options
        self._decorated = decorated or self

    def remote(self, *args: Any, **kwargs: Any) -> RemoteHandle:
        """Start an actor, with the arguments of the class, in a process of its own.

        It does not wait for the actor. If the class raises an exception, all calls raise it.

        Args:
            *args: positional arguments of the class.
            **kwargs: keyword arguments of the class.

        Returns:
            The handle of the actor.

        Raises:
            ConfigError: other processes can't import the class.
            UnsendableError: an argument can't be sent.
        """
        make = self._cls if import_path_of(self._cls) else self._decorated
        path = import_path_of(make)
        if path is None:
            raise ConfigError(
                f"{self._cls!r} can't be imported by other processes.",
                hint=f"Define it by class at the top level {importable_place()}.",
            )
        arguments = _Arguments(args, kwargs)
        hub = _hub_in_use()
        actor = hub.start(
            self._cls,
            path=path,
            make=make,
            arguments=arguments,
            options=self._options,
        )
        return RemoteHandle(hub, actor)

    def options(self, **options: Any) -> RemoteClass:
        """Return the class with other options.

        Args:
            **options: attributes of `ActorOptions`.

        Raises:
            ConfigError: a limit is impossible, or there is no such option.
        """
        return RemoteClass(self._cls, self._options.changed(options), self._decorated)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a plain object of the class."""
        return self._cls(*args, **kwargs)


def remote(*args: Any, **options: Any) -> Any:
    """Return the class of actors for a class: ``aiorl.remote(Server)``, ``@aiorl.remote``, or
    ``@aiorl.remote(num_cpus=2)``.

    Args:
        *args: the class.
        **options: attributes of `ActorOptions`.

    Raises:
        ConfigError: a limit is impossible, or there is no such option.
        TypeError: it is something else than a class.
    """
    if not args:
        return functools.partial(remote, **options)
    (cls,) = args
    if not inspect.isclass(cls):
        raise TypeError(
            f"remote takes a class, got {cls!r:.100}: put a function into a class, as one of its"
            " methods"
        )
    return RemoteClass(cls, ActorOptions().changed(options))


def kill(handle: RemoteHandle) -> None:
    """End an actor and its process; calls that have not ended raise ActorLost.

    ``handle.__ray_terminate__.remote()`` ends it after its earlier calls.

    Args:
        handle: the actor.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(handle, RemoteHandle):
        raise TypeError(f"kill takes a handle that `.remote()` has returned, got {handle!r:.100}")
    handle._kill()
