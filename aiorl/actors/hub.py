"""Actors of a user's own program: processes that hold objects, and calls of their methods.

    async with aiorl.Actors() as actors:
        counter = await actors.start(Counter, 100)
        print(await counter.add(1))

A program is the hub of its actors: it starts their processes, here or on hosts that have joined by
``aiorl worker --connect ADDRESS``, and all calls pass through it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, overload

from aiorl.actors.calls import ActorHandle, Calls, RemoteCall, error_of, packed_arguments
from aiorl.actors.hub_session import (
    ActorEnded,
    ActorSpec,
    ActorStarted,
    CallLost,
    HubEvent,
    HubSession,
    HubSettings,
    PlaceGone,
    PlaceJoined,
)
from aiorl.actors.launched import ANOTHER_TURN, take_settings
from aiorl.actors.values import ENDPOINT_LIMITS, LIMITS
from aiorl.config.addresses import dialable, join_command
from aiorl.config.code import import_path_of, importable_place, refuse_in_import
from aiorl.errors import (
    ActorError,
    ActorLost,
    ConfigError,
    LocalProtocolError,
    RemoteProtocolError,
    UnsendableError,
)
from aiorl.net.transport.endpoint import Event, EventKind, LearnerEndpoint
from aiorl.net.transport.inherited import ChildrenEndpoint
from aiorl.net.transport.system import give_back_regularly
from aiorl.net.wire.decoding import decode, decode_hello
from aiorl.net.wire.encoding import encode
from aiorl.net.wire.messages import DownMessage, Item, Payload, Plain, Reply
from aiorl.process.children import (
    RELAY,
    WORKER_ID,
    ChildEvent,
    ChildGaveUp,
    Children,
    ChildRestarting,
    status_text,
)
from aiorl.process.early import ONE_THREAD
from aiorl.process.imports import child_python, python_path
from aiorl.process.tasks import Tasks, end_children

if TYPE_CHECKING:  # most programs have no actors on other hosts, and start sooner without ZeroMQ
    from aiorl.net.transport.security import LearnerKeys

logger = logging.getLogger(__name__)

TICK_S: Final = 0.1
"""Seconds between two looks at the actors and their processes."""
_END_S: Final = 2.0
"""Seconds from the goodbye to a process until it gets a signal."""
_LOOK_AGAIN_S: Final = 0.05
_SLOT: Final = 1
_ANY_NUMBER: Final = 1 << 48


@dataclass(slots=True, eq=False)
class _Started:
    """An actor that this hub has been asked for.

    Attributes:
        handle: its handle.
        children: its process, if it runs here.
        is_ready: done when it answers calls, or has failed.
    """

    handle: ActorHandle
    children: Children | None
    is_ready: asyncio.Future[None]


class Actors:
    """Hub of the actors of a program, for ``async with``; at its end, all of them end.

    Without ``bind``, its actors run on this host and no one else can join. With ``bind``, processes
    join by ``aiorl worker --connect ADDRESS [--num-workers N]``, each for one actor at a time.

    Under ``aiorl launch ENGINE -- --script FILE``, the launcher says where the program's first hub
    listens, with which keys, and starts the processes that join; arguments given here win.

    Args:
        bind: "tcp://HOST:PORT" to listen at; port 0 takes a free one. None is for this host alone,
            or as the launcher says.
        keys: directory of CURVE keys, as ``aiorl keys DIR`` makes them. Without keys, only
            processes of the same user on this host can join.
        insecure: True to let everyone who can reach ``bind`` join if there are no keys.
        in_flight: calls that an actor gets before it has answered; further ones wait in the hub.
        silence_s: silence after which an actor on another host counts as lost, seconds.

    Attributes:
        is_open_to_others: True if processes can join.

    Raises:
        ConfigError: a variable of the launcher's can't be used (see `aiorl.actors.launched`).
        SecurityError: the keys can't be used.
    """

    def __init__(
        self,
        bind: str | None = None,
        keys: Path | str | None = None,
        *,
        insecure: bool = False,
        in_flight: int = 64,
        silence_s: float = 10.0,
    ) -> None:
        self._session = HubSession(
            secrets.token_hex(8), HubSettings(in_flight=in_flight, silence_s=silence_s)
        )
        self._calls = Calls(self._session, self._flush)
        self._launched = take_settings(is_for_others=bind is not None)
        self._launched.check_keys(keys)
        bind = bind or self._launched.bind
        keys = keys or self._launched.keys
        self._keys = keys
        self.is_open_to_others = bind is not None
        self._children_endpoint = ChildrenEndpoint(ENDPOINT_LIMITS)
        self._network: LearnerEndpoint | None = None
        learner_keys = None if keys is None else _loaded(keys)
        if bind is not None:
            insecure = insecure or self._launched.insecure is not None
            self._network = _network_endpoint(bind, learner_keys, insecure=insecure)
        self._tasks = Tasks(self._failed)
        self._actors: dict[str, _Started] = {}
        self._ending: list[Children] = []
        self._failure: BaseException | None = None
        self._places_changed = asyncio.Event()
        self._is_open = False

    async def __aenter__(self) -> Self:
        """Begin to listen.

        Raises:
            ConfigError: it cannot listen at ``bind``, or a script without a main guard begins again
                in an actor that imports it.
            SecurityError: the keys can't be used.
            OSError: its address can't be written for its launcher.
        """
        refuse_in_import("starts actors")
        self._pid = os.getpid()
        self._calls.loop = asyncio.get_running_loop()
        for endpoint in self._endpoints:
            endpoint.on_message = self._on_message
            endpoint.on_event = self._on_event
            endpoint.is_registered = self._session.knows
            endpoint.start()
        try:
            self._launched.announce(self.address, self._session.hub_id)
        except BaseException:
            await self._close_endpoints()
            raise
        self._is_open = True
        self._tasks.start(self._tick(), "actors")
        self._tasks.start(give_back_regularly(), "memory")
        if self.is_open_to_others:
            logger.info("processes join with: %s", self._join_command)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End all actors and their processes."""
        await self.close()

    async def close(self) -> None:
        """End all actors and their processes; calls that have not ended raise ActorLost."""
        if not self._is_open or os.getpid() != self._pid:  # a fork has no actors
            return
        self._calls.is_over = True
        is_final = not ANOTHER_TURN.is_set()
        self._session.shutdown("the program has ended its actors", is_final=is_final)
        self._flush()
        self._is_open = False
        try:
            of_actors = [started.children for started in self._actors.values()]
            await _end_children([*self._ending, *filter(None, of_actors)])
        finally:
            self._calls.close("the program has ended its actors")
            await self._tasks.close()
            await self._close_endpoints()

    @property
    def address(self) -> str:
        """Address at which processes of other hosts join, "" if none can."""
        return "" if self._network is None else self._network.address

    # Actors
    # ----------------------------------------------------------------------------------------------

    @overload
    async def start(
        self,
        cls: Callable[..., Any],
        *args: Any,
        count: None = None,
        restarts: int = 0,
        on: str | None = None,
        **kwargs: Any,
    ) -> ActorHandle: ...

    @overload
    async def start(
        self,
        cls: Callable[..., Any],
        *args: Any,
        count: int,
        restarts: int = 0,
        on: str | None = None,
        **kwargs: Any,
    ) -> list[ActorHandle]: ...

    async def start(
        self,
        cls: Callable[..., Any],
        *args: Any,
        count: int | None = None,
        restarts: int = 0,
        on: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Start an actor, or several, and wait until it answers calls.

        Args:
            cls: class of its object, or function that makes it; other processes must be able to
                import it.
            *args: positional arguments of the class.
            count: number of actors with these arguments; None starts one.
            restarts: how often an actor is started again, with the same arguments, after it was
                lost.
            on: "here" for a process of this host, "joined" for one that has joined; None takes a
                joined one if one is free, and otherwise this host.
            **kwargs: keyword arguments of the class.

        Returns:
            The handle of the actor; with ``count``, a list of handles.

        Raises:
            ConfigError: ``cls`` can't be imported by other processes, or another argument is wrong.
            UnsendableError: an argument can't be sent.
            RemoteError: the class raised an exception.
            ActorLost: the process ended before the object was made.
            OSError: a process can't be started.
        """
        packed = packed_arguments(args, kwargs)
        handles = await self.start_packed(
            cls, packed, count=1 if count is None else count, restarts=restarts, on=on
        )
        return handles[0] if count is None else handles

    async def start_packed(
        self,
        cls: Callable[..., Any],
        packed: Mapping[str, Plain],
        *,
        count: int = 1,
        restarts: int = 0,
        on: str | None = None,
        name: str | None = None,
    ) -> list[ActorHandle]:
        """Start actors whose arguments are packed; see `start` for the errors.

        Args:
            cls: class, or another callable that returns the object.
            packed: result of `packed_arguments`.
            count: number of actors.
            restarts: see `start`.
            on: see `start`.
            name: name of a single actor, from `new_name`; None makes a new one for each.

        Returns:
            The handles of the actors.
        """
        path = self._checked_path(cls, on)
        _check_number("count", count)
        _check_number("restarts", restarts)
        if on == "joined":
            self._report_missing(count)
        started = []
        try:
            for _ in range(count):
                one_name = name or new_name(path)
                one = self._add(one_name, path, packed, restarts=restarts, on=on)
                started.append(one)
                if one.children is not None:
                    one.children.start()
            await asyncio.gather(*(one.is_ready for one in started))
        except BaseException:
            await self.stop(*(one.handle for one in started))
            raise
        return [one.handle for one in started]

    def reserve(self, name: str) -> None:
        """Let calls wait for an actor that is started later under this name, or given up.

        Args:
            name: result of `new_name`.
        """
        self._session.reserve(name)

    def give_up(self, name: str) -> None:
        """End the calls of an actor that has not been started.

        Args:
            name: what `reserve` was given.
        """
        self._session.end(name, "it could not be started")
        self._flush()

    async def stop(self, *handles: ActorHandle) -> None:
        """End actors and their processes; calls that have not ended raise ActorLost.

        Args:
            *handles: the actors.
        """
        ended = []
        for handle in handles:
            name = handle.__actor__.name
            self._session.end(name, "it was stopped")
            started = self._actors.pop(name, None)
            if started is not None and started.children is not None:
                ended.append(started.children)
        self._ending += ended
        self._flush()
        await _end_children(ended)

    def num_restarts(self, handle: ActorHandle) -> int:
        """Return how often an actor has been started again; 0 once it has ended for good.

        Args:
            handle: the actor.
        """
        return self._session.num_restarts(handle.__actor__.name)

    def host_of(self, handle: ActorHandle) -> str:
        """Return the name of an actor's host, "" while it has no process.

        Args:
            handle: the actor.
        """
        return self._session.host_of(handle.__actor__.name)

    @property
    def num_free(self) -> int:
        """Processes that have joined and run no actor."""
        return len(self._session.free_places)

    async def wait_for_processes(self, count: int | None = None) -> int:
        """Wait until processes have joined that run no actor.

        Args:
            count: number of processes; None for all that ``aiorl launch`` starts for this program,
                and for none in a program that others can't join.

        Returns:
            The number of actors for which there is room: the free processes that have joined and,
            with None, the program's share of this host's cores.

        Raises:
            ConfigError: ``count`` is None, others can join, and no launcher has said how many will.
        """
        num_here = 0
        if count is None:
            count, num_here = self._launched.num_processes(can_join=self.is_open_to_others)
        self._report_missing(count)
        while self.num_free < count:
            self._places_changed.clear()
            await self._places_changed.wait()
        return self.num_free + num_here

    @property
    def _join_command(self) -> str:
        advertise = self._launched.advertise
        addresses = dialable(self.address, advertise)
        return join_command(addresses, self._keys, are_advertised=bool(advertise))

    def _report_missing(self, count: int) -> None:
        """Say how processes join if the program is about to wait for some."""
        if self.num_free < count:
            logger.warning(
                "waiting for %d processes, %d have joined: %s",
                count,
                self.num_free,
                self._join_command,
            )

    # Calls of several actors
    # ----------------------------------------------------------------------------------------------

    async def broadcast(
        self, handles: Iterable[ActorHandle], method: str, *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Call a method of several actors with the same arguments, which are sent once.

        Args:
            handles: the actors.
            method: name of the method.
            *args: positional arguments.
            **kwargs: keyword arguments.

        Returns:
            The results, in the order of the actors. If some raise an error, the first of these is
            raised when all have ended.

        Raises:
            UnsendableError: an argument can't be sent.
            RemoteError: the method of an actor raised an exception.
            ActorLost: an actor ended before it answered.
        """
        number = self.share(packed_arguments(args, kwargs))
        shared = {"payload": number}
        try:
            calls = [handle.__begin__(method, shared) for handle in handles]
            results = await asyncio.gather(*calls, return_exceptions=True)
        finally:
            self.release(number)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def share(self, packed: Mapping[str, Plain]) -> int:
        """Send arguments for calls of several actors; see `HubSession.share`.

        Raises:
            UnsendableError: they are too large.
        """
        try:
            encode(Payload(_ANY_NUMBER, packed), compress=False, limits=LIMITS)
        except LocalProtocolError as error:
            raise UnsendableError(str(error)) from error
        return self._session.share(packed)

    def release(self, number: int) -> None:
        """Forget shared arguments; see `HubSession.release`."""
        self._session.release(number)

    async def as_ready(
        self,
        handles: Iterable[ActorHandle],
        method: str,
        *args: Any,
        in_flight: int = 1,
        **kwargs: Any,
    ) -> AsyncGenerator[tuple[ActorHandle, Any], None]:
        """Call a method of several actors again and again; yield each result as it arrives.

        An actor gets its next call as soon as one of its results has arrived, so that it has work
        while the caller handles the result. Actors that are lost drop out; the iteration ends when
        none is left.

        Args:
            handles: the actors.
            method: name of the method.
            *args: positional arguments of each call.
            in_flight: calls of one actor at a time.
            **kwargs: keyword arguments of each call.

        Yields:
            The actor and its result.

        Raises:
            RemoteError: the method of an actor raised an exception.
        """
        packed = packed_arguments(args, kwargs)
        ready: asyncio.Queue[tuple[ActorHandle, RemoteCall]] = asyncio.Queue()
        pending: set[RemoteCall] = set()

        def call(handle: ActorHandle) -> None:
            begun = handle.__begin__(method, packed)
            pending.add(begun)
            begun.add_done_callback(lambda done: ready.put_nowait((handle, begun)))

        try:
            for handle in handles:
                for _ in range(in_flight):
                    call(handle)
            while pending:
                handle, ended = await ready.get()
                pending.discard(ended)
                try:
                    result = ended.result()
                except ActorLost as error:
                    if error.is_restarting:
                        call(handle)
                    else:
                        logger.warning("%s", error)
                    continue
                call(handle)
                yield handle, result
        finally:
            for begun in pending:
                begun.cancel()

    # Inside: starting
    # ----------------------------------------------------------------------------------------------

    def _checked_path(self, cls: Callable[..., Any], on: str | None) -> str:
        if not self._is_open:
            raise ActorError("actors can be started within `async with Actors(...)` only")
        if self._failure is not None:
            raise ActorError("the hub of the actors has failed") from self._failure
        path = import_path_of(cls)
        if path is None:
            raise ConfigError(
                f"{cls!r} can't be imported by other processes.",
                hint=f"Name a class or function at the top level {importable_place()}.",
            )
        if on not in (None, "here", "joined"):
            raise ConfigError(
                f"on is {on!r}, expected 'here', 'joined' or None.", key="on", value=on
            )
        if on == "joined" and not self.is_open_to_others:
            raise ConfigError(
                "no process can join: the hub listens for this host alone.",
                key="on",
                value=on,
                hint="Set bind: Actors(bind='tcp://0.0.0.0:5557', keys='keys').",
            )
        return path

    def _add(
        self, name: str, path: str, args: Mapping[str, Any], *, restarts: int, on: str | None
    ) -> _Started:
        is_here = on == "here" or (on is None and not self.num_free)
        worker_id = secrets.token_hex(8) if is_here else ""
        spec = ActorSpec(name, path, args, restarts=restarts, place=worker_id)
        started = _Started(
            handle=self._calls.make_handle(name, path),
            children=self._child_for(spec) if is_here else None,
            is_ready=asyncio.get_running_loop().create_future(),
        )
        self._actors[name] = started
        self._session.add(spec)
        self._flush()
        return started

    def _child_for(self, spec: ActorSpec) -> Children:
        command = child_python("aiorl.actors.process")
        peer = b""  # of the process that runs now

        def connect(slot: int) -> socket.socket:
            nonlocal peer
            peer, connection = self._children_endpoint.connect()
            return connection

        # many actors share a host, but the user's own numbers hold
        threads = {name: os.environ.get(name, number) for name, number in ONE_THREAD.items()}

        def on_event(event: ChildEvent) -> None:
            if isinstance(event, ChildRestarting | ChildGaveUp):
                reason = f"its process ended with {status_text(event.status)}"
                self._session.lose_place(spec.place, reason)
                if isinstance(event, ChildGaveUp):
                    self._session.end(spec.name, reason)
            self._flush()

        return Children(
            lambda slot: command,
            [_SLOT],
            max_restarts=spec.restarts,
            on_event=on_event,
            environment={**threads, **python_path(), RELAY: "", WORKER_ID: spec.place},
            connect=connect,
            disconnect=lambda slot: self._children_endpoint.forget(peer),
        )

    # Inside: messages
    # ----------------------------------------------------------------------------------------------

    @property
    def _endpoints(self) -> list[LearnerEndpoint]:
        if self._network is None:
            return [self._children_endpoint]
        return [self._children_endpoint, self._network]

    def _endpoint_of(self, peer: bytes) -> LearnerEndpoint:
        if self._network is None or peer in self._children_endpoint:
            return self._children_endpoint
        return self._network

    async def _close_endpoints(self) -> None:
        await asyncio.gather(*(endpoint.close() for endpoint in self._endpoints))

    def _on_message(self, peer: bytes, frames: list[memoryview], user_id: str) -> None:
        now = time.monotonic()
        session = self._session
        try:
            if session.knows(peer):
                session.receive(peer, decode(frames, LIMITS), now)
            else:
                hello = decode_hello(frames)
                if hello is not None:
                    session.receive(peer, hello, now)
        except RemoteProtocolError as error:
            session.bad_frames(peer, error)
        self._flush()

    def _on_event(self, event: Event) -> None:
        is_end = event.kind in (EventKind.DISCONNECTED, EventKind.SILENT)
        if not is_end or not self._session.knows(event.peer):
            return
        self._look_at_children()  # an ended process says more than its connection
        if self._session.knows(event.peer):
            asyncio.get_running_loop().call_later(
                _LOOK_AGAIN_S, self._peer_gone, event.peer, event.reason
            )

    def _peer_gone(self, peer: bytes, reason: str) -> None:
        self._look_at_children()
        self._session.peer_gone(peer, reason)
        self._flush()

    async def _tick(self) -> None:
        while True:
            self._session.tick(time.monotonic())
            self._flush()
            self._look_at_children()
            await asyncio.sleep(TICK_S)

    def _look_at_children(self) -> None:
        for name, started in list(self._actors.items()):
            if started.children is None:
                continue
            started.children.poll()
            if started.children.is_over:
                self._session.end(name, "its process has ended")
                self._flush()
                self._actors.pop(name, None)
        for children in self._ending:
            children.poll()
        self._ending = [children for children in self._ending if not children.is_over]

    def _flush(self) -> None:
        """Handle the session's events, then send its messages."""
        for event in self._session.events():
            self._handle(event)
        if not self._is_open:
            return
        for peer, message in self._session.messages_to_send():
            self._send(peer, message)
        for peer, reason in self._session.peers_to_drop():
            self._endpoint_of(peer).drop(peer, reason)

    def _send(self, peer: bytes | None, message: DownMessage) -> None:
        # within a host, compression takes more time than it saves
        can_be_far = self.is_open_to_others
        if peer is None:
            frames = encode(message, compress=can_be_far, limits=LIMITS)
            for endpoint in self._endpoints:
                endpoint.broadcast(frames)
            return
        endpoint = self._endpoint_of(peer)
        is_far = can_be_far and bool(endpoint.host_of(peer))
        try:
            frames = encode(message, compress=is_far, limits=LIMITS)
        except LocalProtocolError as error:  # too large, for example
            self._session.not_sent(peer, message, str(error))
            self._flush()
        else:
            endpoint.send(peer, frames)

    def _handle(self, event: HubEvent) -> None:
        match event:
            case Reply(call_id, ok, result):
                self._calls.ended(call_id, ok=ok, result=result)
            case Item(call_id, value):
                self._calls.item(call_id, value)
            case CallLost(call_id, name, reason, is_restarting):
                self._calls.lost(call_id, ActorLost(name, reason, is_restarting=is_restarting))
            case PlaceJoined() | PlaceGone():
                self._places_changed.set()
            case ActorStarted(name):
                started = self._actors.get(name)
                if started is not None and not started.is_ready.done():
                    started.is_ready.set_result(None)
            case ActorEnded():
                self._ended(event)

    def _ended(self, event: ActorEnded) -> None:
        started = self._actors.get(event.name)
        if started is None:
            return
        if event.is_restarting:
            logger.warning("the actor %s starts again: %s", event.name, event.reason)
            if started.children is not None:
                started.children.kill(_SLOT)  # it may be stopped or stuck
            return
        if started.children is None:
            del self._actors[event.name]
        else:
            started.children.stop(signal.SIGTERM)
        if not started.is_ready.done():
            started.is_ready.set_exception(_start_error(event, started.handle))

    def _failed(self, error: BaseException) -> None:
        self._failure = error
        self._session.shutdown(f"the hub failed: {error!r:.200}")
        self._flush()


def _loaded(keys: Path | str) -> LearnerKeys:
    from aiorl.net.transport.security import load_learner_keys

    return load_learner_keys(keys)


def _network_endpoint(bind: str, keys: LearnerKeys | None, *, insecure: bool) -> LearnerEndpoint:
    from aiorl.net.transport.zmq_learner import ZmqLearnerEndpoint

    return ZmqLearnerEndpoint(bind, keys=keys, insecure=insecure, limits=ENDPOINT_LIMITS)


def new_name(path: str) -> str:
    """Return a name that no other actor has.

    Args:
        path: import path of its class.
    """
    return f"{path.rpartition(':')[2].rpartition('.')[2]}-{secrets.token_hex(4)}"


def _check_number(key: str, value: int) -> None:
    """Raise ConfigError unless a number of actors or restarts is one."""
    if not isinstance(value, int) or value < 0:
        raise ConfigError(
            f"{key} is {value!r}, expected a whole number of at least 0.", key=key, value=value
        )


def _start_error(event: ActorEnded, handle: ActorHandle) -> ActorError:
    """Return the error of an actor that did not start."""
    if event.failure is None:
        return ActorLost(event.name, event.reason)
    return error_of(handle.__actor__.path.rpartition(":")[2], event.failure)


async def _end_children(all_children: list[Children]) -> None:
    """End processes as `end_children` does; they are killed at once if this is cancelled."""
    try:
        await end_children(all_children, _END_S)
    except BaseException:
        for children in all_children:
            children.stop(signal.SIGKILL)
        raise
