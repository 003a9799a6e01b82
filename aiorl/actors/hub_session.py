"""The hub's side of calls: actors, the processes that run them, and calls in flight.

No socket, no clock, no process: ``now`` is any monotonic time in seconds. The shell (`Actors`)
calls ``receive``, ``peer_gone`` and, a few times a second, ``tick``; after each batch of messages
it drains ``messages_to_send()`` and ``events()``.

A process that says Hello is a *place*, for one actor in its life. An actor is lost when its
connection ends, when it is silent for too long, or when it breaks the protocol; its pending calls
then end with the reason. Each call ends exactly once, and the calls of other actors continue.
"""

from __future__ import annotations

import enum
import reprlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from aiorl.actors.values import UNKNOWN_ACTOR, num_bytes
from aiorl.actors.window import MAX_CREDIT, CallWindow
from aiorl.errors import LocalProtocolError, RemoteProtocolError
from aiorl.net.wire import messages as m
from aiorl.text import one_line

_MAX_OUTSTANDING = 1024
"""Unanswered calls of one actor to others; an actor that exceeds them breaks the protocol."""
_CALL_BYTES = 1024
"""Memory of a call without its arguments."""
_MAX_NEEDLESS = 256
"""Needless messages, such as replies to calls that have ended, before an actor is cut off."""
_MAX_REASONS = 1000
"""Actors of which the session knows why they ended."""


class HubSettings(NamedTuple):
    """Times and bounds.

    Attributes:
        heartbeat_s: time between two heartbeats of each side, seconds.
        silence_s: silence after which a process counts as lost, seconds.
        busy_silence_s: the same while the process makes its object, which can block it.
        in_flight: calls that an actor gets before it has answered; further ones wait here.
        max_bytes: bytes of the arguments of these calls; one call of any size is let through.
        max_places: processes at a time.
    """

    heartbeat_s: float = 1.0
    silence_s: float = 10.0
    busy_silence_s: float = 120.0
    in_flight: int = 64
    max_bytes: int = 64 << 20
    max_places: int = 4096


class ActorSpec(NamedTuple):
    """Class and arguments of an actor, and its place.

    Attributes:
        name: its name, unique in the hub.
        path: import path of its class.
        args: packed arguments of its constructor.
        restarts: how often it is started again after it was lost.
        place: worker id of the process that is to run it; "" for any joined process.
    """

    name: str
    path: str
    args: Mapping[str, m.Plain]
    restarts: int = 0
    place: str = ""


class ActorState(enum.StrEnum):
    """States of an actor."""

    NAMED = "waiting for its arguments"
    WAITING = "waiting for a process"
    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"


# Events
# --------------------------------------------------------------------------------------------------


class PlaceJoined(NamedTuple):
    """A process offers to run an actor."""

    worker_id: str
    host: str
    pid: int


class PlaceGone(NamedTuple):
    """A process has ended, or its connection has."""

    worker_id: str
    reason: str


class ActorStarted(NamedTuple):
    """An actor's object is made; it answers calls."""

    name: str


class ActorEnded(NamedTuple):
    """An actor has ended.

    Attributes:
        name: its name.
        reason: why, one plain sentence.
        is_restarting: True if it starts again.
        failure: result of the reply if its object could not be made, else None.
    """

    name: str
    reason: str
    is_restarting: bool
    failure: m.Value = None


class CallLost(NamedTuple):
    """A call of the hub has ended because its actor did."""

    call_id: int
    name: str
    reason: str
    is_restarting: bool


HubEvent: TypeAlias = (
    PlaceJoined | PlaceGone | ActorStarted | ActorEnded | CallLost | m.Reply | m.Item
)
"""A Reply or an Item is for a call of the hub."""


# State
# --------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Place:
    """A process that runs an actor, or can run one.

    Attributes:
        peer: its connection.
        worker_id: its name.
        host: name of its host.
        last_heard: time of its last message.
        unanswered: calls of its actor to others that have not been answered.
        actor: the actor that it runs.
        outstanding: the actor's number of such a call -> ours.
        needless: needless messages so far.
    """

    peer: bytes
    worker_id: str
    host: str
    last_heard: float
    unanswered: CallWindow
    actor: _Actor | None = None
    outstanding: dict[int, int] = field(default_factory=dict)
    needless: int = 0


@dataclass(slots=True, eq=False)
class _Call:
    """A call that has not ended.

    Attributes:
        call_id: our number of the call.
        message: the call as its actor gets it, until it is sent: its arguments take memory.
        caller: process that called, with its own number of the call; None for the hub.
        credit: items of its stream that the actor may still send.
        num_bytes: size of its arguments.
        is_cancelled: True once its caller has cancelled it.
    """

    call_id: int
    message: m.Call | None
    caller: tuple[_Place, int] | None
    credit: int
    num_bytes: int
    is_cancelled: bool = False

    @property
    def is_sent(self) -> bool:
        """True once it has left for the actor."""
        return self.message is None


@dataclass(slots=True, eq=False)
class _Actor:
    """An actor and its calls.

    Attributes:
        spec: what it is made of.
        restarts_left: restarts that remain.
        sent: calls of the hub that were sent and have not been answered.
        state: its state.
        place: the process that runs it.
        calls: our number of a call -> the call, sent or not.
        waiting: numbers of calls that have not been sent, in order.
        num_restarts: restarts so far.
    """

    spec: ActorSpec
    restarts_left: int
    sent: CallWindow
    state: ActorState = ActorState.WAITING
    place: _Place | None = None
    calls: dict[int, _Call] = field(default_factory=dict)
    waiting: deque[int] = field(default_factory=deque)
    num_restarts: int = 0


class HubSession:
    """Calls of a hub to its actors, and between actors.

    Args:
        hub_id: random name of this hub's life.
        settings: times and bounds.
    """

    def __init__(self, hub_id: str, settings: HubSettings | None = None) -> None:
        self.hub_id = hub_id
        self.settings = settings or HubSettings()
        self._places: dict[bytes, _Place] = {}
        self._places_by_id: dict[str, _Place] = {}
        self._actors: dict[str, _Actor] = {}
        # actors that wait for a process: for one in particular, by its worker id, or for any
        self._awaited: dict[str, _Actor] = {}
        self._waiting: dict[str, _Actor] = {}
        self._reasons: dict[str, str] = {}  # why the last actors ended, for calls that come later
        self._free: dict[bytes, _Place] = {}
        self._named_places: set[str] = set()
        self._actor_of_call: dict[int, _Actor] = {}
        self._payloads: dict[int, m.Payload] = {}
        self._requests: dict[int, set[bytes]] = {}  # number of a payload -> peers that missed it
        self._next_call = 1
        self._out: list[tuple[bytes | None, m.DownMessage]] = []
        self._dropped: list[tuple[bytes, str]] = []
        self._events: list[HubEvent] = []
        self._goodbye: m.Bye | None = None
        self._last_beat = float("-inf")
        self._last_tick = float("inf")

    # Commands
    # ----------------------------------------------------------------------------------------------

    def reserve(self, name: str) -> None:
        """Let calls wait for an actor that is added later, or ended.

        Raises:
            LocalProtocolError: its name is in use.
        """
        if name in self._actors:
            raise LocalProtocolError(f"there is an actor {name!r} already")
        no_spec = ActorSpec(name, path="", args={})
        sent = CallWindow(self.settings.in_flight, self.settings.max_bytes)
        self._actors[name] = _Actor(no_spec, restarts_left=0, sent=sent, state=ActorState.NAMED)

    def add(self, spec: ActorSpec) -> None:
        """Add an actor, which starts as soon as there is a process for it.

        Raises:
            LocalProtocolError: its name is in use, other than by `reserve`.
        """
        if self.state_of(spec.name) is not ActorState.NAMED:
            self.reserve(spec.name)
        actor = self._actors[spec.name]
        actor.spec = spec
        actor.restarts_left = spec.restarts
        if spec.place:
            self._named_places.add(spec.place)
        self._wait_for_place(actor)

    def call(self, name: str, method: str, args: Mapping[str, m.Plain], credit: int = 0) -> int:
        """Call a method of an actor; return the number of the call, which ends with a Reply or
        CallLost.

        Args:
            name: name of the actor.
            method: name of the method.
            args: packed arguments.
            credit: items of a stream that may be sent before more `give_credit`.
        """
        call = m.Call(self._new_number(), method, args, credit=credit)
        self._open(name, call, _cost_of(args), caller=None)
        return call.call_id

    def share(self, value: m.Value) -> int:
        """Broadcast arguments for calls to several actors; return their number, the ``payload`` of
        the calls' ``args``.

        They are all arguments of these calls. If the ``args`` have a ``place``, a position or a
        name, they are one argument, the ``value``, and the call has ``args`` and ``kwargs`` for the
        others. They are kept for actors that miss them, until `release`.
        """
        number = self._new_number()
        payload = self._payloads[number] = m.Payload(number, value)
        self._requests[number] = set()
        self._out.append((None, payload))
        return number

    def release(self, number: int) -> None:
        """Forget shared arguments; calls that still miss them fail."""
        self._payloads.pop(number, None)
        self._requests.pop(number, None)

    def give_credit(self, call_id: int, items: int) -> None:
        """Allow more items of a stream."""
        actor = self._actor_of_call.get(call_id)
        if actor is not None:
            call = actor.calls[call_id]
            items = min(items, MAX_CREDIT - call.credit)
            call.credit += items
            if call.is_sent and items:
                self._send_to(actor, m.Credit(call_id, items))

    def cancel(self, call_id: int) -> None:
        """Cancel a call: its method, if it is asynchronous and runs, or the call, if it waits.

        It still ends by an event.
        """
        actor = self._actor_of_call.get(call_id)
        if actor is None or actor.calls[call_id].is_cancelled:
            return
        actor.calls[call_id].is_cancelled = True
        if actor.calls[call_id].is_sent:
            self._send_to(actor, m.Cancel(call_id))
        else:
            self._end_call(actor, m.Reply(call_id, False, m.failed("CancelledError")))

    def end(self, name: str, reason: str) -> None:
        """End an actor and its process for good; its pending calls are lost."""
        actor = self._actors.get(name)
        if actor is not None:
            actor.restarts_left = 0
            self._lose(actor, reason)

    def lose_place(self, worker_id: str, reason: str) -> None:
        """Count a process as gone that is known to have ended."""
        place = self._places_by_id.get(worker_id)
        if place is not None:
            self._forget(place, reason)

    def shutdown(self, reason: str, *, is_final: bool = True) -> None:
        """End all actors and say goodbye to all processes, and to those that come later.

        Args:
            reason: reason for the other side.
            is_final: False if the processes should wait for another hub at this address.
        """
        self._goodbye = m.Bye(reason, final=is_final)
        for name in list(self._actors):
            self.end(name, reason)
        for peer in self._places:
            self._out.append((peer, self._goodbye))

    # Queries
    # ----------------------------------------------------------------------------------------------

    def state_of(self, name: str) -> ActorState:
        """Return the state of an actor; an unknown one has ended."""
        actor = self._actors.get(name)
        return ActorState.ENDED if actor is None else actor.state

    def num_restarts(self, name: str) -> int:
        """Return how often an actor has been started again."""
        actor = self._actors.get(name)
        return 0 if actor is None else actor.num_restarts

    def host_of(self, name: str) -> str:
        """Return the host of an actor, "" while it has none."""
        actor = self._actors.get(name)
        return "" if actor is None or actor.place is None else actor.place.host

    @property
    def free_places(self) -> list[str]:
        """Worker ids of the processes that run no actor."""
        return [place.worker_id for place in self._free.values()]

    def knows(self, peer: bytes) -> bool:
        """Return whether a registered process uses this peer; for other peers, decode only a
        Hello.
        """
        return peer in self._places

    def messages_to_send(self) -> list[tuple[bytes | None, m.DownMessage]]:
        """Return (peer, message) in order, and clear the list; None is everyone."""
        out = self._out
        self._out = []
        return out

    def peers_to_drop(self) -> list[tuple[bytes, str]]:
        """Return (peer, reason) of connections to cut off, and clear the list."""
        dropped = self._dropped
        self._dropped = []
        return dropped

    def events(self) -> list[HubEvent]:
        """Return the events so far, in order, and clear the list."""
        events = self._events
        self._events = []
        return events

    # Inputs
    # ----------------------------------------------------------------------------------------------

    def receive(self, peer: bytes, message: m.Message, now: float) -> None:
        """Process a message from a peer."""
        place = self._places.get(peer)
        if isinstance(message, m.Hello):
            self._hello(peer, message, now)
            return
        if place is None:
            self._refuse(peer, "say Hello first", m.RefusalCode.HELLO_FIRST, retry=True)
            return
        place.last_heard = now
        match message:
            case m.Reply():
                self._reply(place, message)
            case m.Item():
                self._item(place, message)
            case m.Call():
                self._forward(place, message)
            case m.Credit(call_id, items):
                ours = place.outstanding.get(call_id)
                if ours is not None:
                    self.give_credit(ours, items)
            case m.Cancel(call_id):
                ours = place.outstanding.get(call_id)
                if ours is not None:
                    self.cancel(ours)
            case m.PayloadRequest(number):
                self._share_again(place, number)
            case m.Beat():
                pass
            case m.Leaving(reason):
                self._forget(place, one_line(reason, 300))
            case _:
                self._violated(place, f"sent a {type(message).__name__}")

    def bad_frames(self, peer: bytes, error: RemoteProtocolError) -> None:
        """Cut off a peer whose message can't be read."""
        place = self._places.get(peer)
        if place is None:
            self._refuse(peer, str(error), m.RefusalCode.VIOLATION, retry=False)
        else:
            self._violated(place, str(error))

    def not_sent(self, peer: bytes, message: m.DownMessage, reason: str) -> None:
        """Let the call end to which a message belongs that can't be sent, because it is too large
        for example.
        """
        place = self._places.get(peer)
        if place is None:
            return
        result = m.failed("UnsendableError", reason)
        match message:
            case m.Call(call_id):
                self._reply(place, m.Reply(call_id, False, result))
            case m.Reply(call_id):
                self._out.append((peer, m.Reply(call_id, False, result)))
            case m.Item(call_id):
                ours = place.outstanding.get(call_id, 0)
                actor = self._actor_of_call.get(ours)
                if actor is not None and actor.place is not None:
                    self.cancel(ours)
                    self._reply(actor.place, m.Reply(ours, False, result))
            case _:
                self._violated(place, f"a message to it can't be sent: {reason}")

    def peer_gone(self, peer: bytes, reason: str) -> None:
        """Take note that a connection has ended."""
        place = self._places.get(peer)
        if place is not None:
            self._forget(place, reason or "its connection has ended")

    def tick(self, now: float) -> None:
        """Send heartbeats, and give up processes that are silent.

        Time in which this program stood still itself does not count as silence.
        """
        settings = self.settings
        stood_s = now - self._last_tick
        self._last_tick = now
        if stood_s > settings.heartbeat_s:
            for place in self._places.values():
                place.last_heard = min(now, place.last_heard + stood_s)
        if now - self._last_beat >= settings.heartbeat_s:
            self._last_beat = now
            if self._places:
                self._out.append((None, m.LearnerBeat(self.hub_id, -1)))
                # over ZeroMQ, the broadcast alone keeps only one of the two channels alive
                self._out += [(peer, m.LearnerBeat(self.hub_id, -1)) for peer in self._places]
        for place in list(self._places.values()):
            actor = place.actor
            is_starting = actor is not None and actor.state is ActorState.STARTING
            limit_s = settings.busy_silence_s if is_starting else settings.silence_s
            silent_s = now - place.last_heard
            if silent_s > limit_s:
                self._dropped.append((place.peer, "silent for too long"))
                self._forget(place, f"it was silent for {silent_s:.0f} s")

    # Inside: places
    # ----------------------------------------------------------------------------------------------

    def _hello(self, peer: bytes, hello: m.Hello, now: float) -> None:
        if self._goodbye is not None:
            self._out.append((peer, self._goodbye))
            return
        if peer in self._places:
            return
        if hello.protocol != m.PROTOCOL_VERSION:
            reason = (
                f"it speaks protocol version {hello.protocol}, the hub {m.PROTOCOL_VERSION}; install"
                " the same aiorl version on both sides"
            )
            self._refuse(peer, reason, m.RefusalCode.VERSION, retry=False)
            return
        if hello.run_id != m.RUN_OF_ACTORS:
            self._refuse(peer, "this is a hub of actors", m.RefusalCode.ACTORS, retry=True)
            return
        is_full = len(self._places) >= self.settings.max_places
        if is_full and hello.worker_id not in self._named_places:
            self._refuse(
                peer, "there is no room for more processes", m.RefusalCode.FULL, retry=True
            )
            return
        self.lose_place(hello.worker_id, "it connected again")
        if hello.worker_id in self._named_places and hello.worker_id not in self._awaited:
            self._out.append((peer, m.Bye("its actor has ended", final=False)))
            return
        # an actor stays within half of these bounds
        unanswered = CallWindow(_MAX_OUTSTANDING, 2 * self.settings.max_bytes)
        place = _Place(peer, hello.worker_id, hello.host, now, unanswered)
        self._places[peer] = place
        self._places_by_id[hello.worker_id] = place
        self._out.append((peer, m.LearnerBeat(self.hub_id, -1)))
        self._events.append(PlaceJoined(hello.worker_id, hello.host, hello.pid))
        if hello.worker_id in self._awaited:
            self._begin(self._awaited.pop(hello.worker_id), place)
        elif self._waiting:
            self._begin(self._waiting.pop(next(iter(self._waiting))), place)
        else:
            self._free[peer] = place

    def _refuse(self, peer: bytes, reason: str, code: str, *, retry: bool) -> None:
        self._out.append((peer, m.Refused(reason, retry, code)))
        if not retry:
            self._dropped.append((peer, reason))

    def _violated(self, place: _Place, what: str) -> None:
        reason = f"it broke the protocol: {what}"
        self._out.append((place.peer, m.Refused(reason, False, m.RefusalCode.VIOLATION)))
        self._dropped.append((place.peer, reason))
        self._forget(place, reason)

    def _needless(self, place: _Place, what: str) -> None:
        place.needless += 1
        if place.needless > _MAX_NEEDLESS:
            self._violated(place, f"too many {what}")

    def _forget(self, place: _Place, reason: str) -> None:
        """Remove a process, and lose its actor."""
        self._remove(place, reason)
        if place.actor is not None:
            self._lose(place.actor, reason)

    def _remove(self, place: _Place, reason: str) -> None:
        """Remove a process, and cancel the calls of its actor to others."""
        if self._places.pop(place.peer, None) is None:
            return
        self._free.pop(place.peer, None)
        del self._places_by_id[place.worker_id]
        self._events.append(PlaceGone(place.worker_id, reason))
        for ours in list(place.outstanding.values()):
            self.cancel(ours)
        place.outstanding.clear()

    def _share_again(self, place: _Place, number: int) -> None:
        """Answer a request for shared arguments, with None if they are gone."""
        peers = self._requests.get(number)
        if peers is None or place.peer in peers:
            self._needless(place, "requests for shared arguments")
        else:
            peers.add(place.peer)
        self._out.append((place.peer, self._payloads.get(number, m.Payload(number, None))))

    def _wait_for_place(self, actor: _Actor) -> None:
        """Start an actor in a free process, or as soon as its process, or any, has joined."""
        actor.state = ActorState.WAITING
        if actor.spec.place:
            self._awaited[actor.spec.place] = actor
        elif self._free:
            self._begin(actor, self._free.pop(next(iter(self._free))))
        else:
            self._waiting[actor.spec.name] = actor

    def _begin(self, actor: _Actor, place: _Place) -> None:
        actor.state = ActorState.STARTING
        actor.place = place
        place.actor = actor
        spec = actor.spec
        args: dict[str, m.Plain] = {"path": spec.path, "name": spec.name, "args": spec.args}
        self._out.append((place.peer, m.Call(0, m.INIT, args)))

    # Inside: actors and calls
    # ----------------------------------------------------------------------------------------------

    def _lose(self, actor: _Actor, reason: str, failure: m.Value = None) -> None:
        """End an actor's process and its calls; start it again if restarts are left."""
        place = actor.place
        is_restarting = actor.restarts_left > 0 and self._goodbye is None
        actor.place = None
        actor.sent.clear()
        if place is not None:
            place.actor = None
            if place.peer in self._places:
                is_final = self._goodbye is not None and self._goodbye.final
                self._out.append((place.peer, m.Bye(reason, final=is_final)))
                self._remove(place, reason)
        name = actor.spec.name
        for call_id, call in list(actor.calls.items()):
            if call.is_sent or not is_restarting:
                self._remove_call(actor, call_id)
                self._report_lost(call, name, reason, is_restarting=is_restarting)
        self._events.append(ActorEnded(actor.spec.name, reason, is_restarting, failure))
        if is_restarting:
            actor.restarts_left -= 1
            actor.num_restarts += 1
            self._wait_for_place(actor)
        else:
            del self._actors[name]
            self._waiting.pop(name, None)
            self._awaited.pop(actor.spec.place, None)
            self._reasons[name] = reason
            if len(self._reasons) > _MAX_REASONS:
                del self._reasons[next(iter(self._reasons))]

    def _new_number(self) -> int:
        """Return the number of a new call or payload."""
        number = self._next_call
        self._next_call += 1
        return number

    def _open(
        self, name: str, message: m.Call, size: int, *, caller: tuple[_Place, int] | None
    ) -> None:
        call_id = message.call_id
        call = _Call(call_id, message, caller, message.credit, size)
        actor = self._actors.get(name)
        if actor is None:
            reason = self._reasons.get(name, UNKNOWN_ACTOR)
            self._report_lost(call, name, reason, is_restarting=False)
            return
        actor.calls[call_id] = call
        self._actor_of_call[call_id] = actor
        is_next = caller is not None or not actor.waiting
        if is_next and actor.state is ActorState.RUNNING and self._has_room(actor, call):
            self._send_call(actor, call)
        else:
            actor.waiting.append(call_id)

    def _send_waiting(self, actor: _Actor) -> None:
        while actor.waiting:
            call = actor.calls[actor.waiting[0]]
            if not self._has_room(actor, call):
                return
            actor.waiting.popleft()
            self._send_call(actor, call)

    def _has_room(self, actor: _Actor, call: _Call) -> bool:
        # Calls of actors are bounded for each caller. Here they are not: actors that wait for each
        # other would wait forever.
        return call.caller is not None or actor.sent.has_room(call.num_bytes)

    def _send_call(self, actor: _Actor, call: _Call) -> None:
        message = call.message
        assert message is not None
        call.message = None
        if call.caller is None:
            actor.sent.add(call.call_id, call.num_bytes)
        if call.credit != message.credit:  # more has been given meanwhile
            message = message._replace(credit=call.credit)
        self._send_to(actor, message)

    def _send_to(self, actor: _Actor, message: m.DownMessage) -> None:
        if actor.place is not None:
            self._out.append((actor.place.peer, message))

    def _reply(self, place: _Place, reply: m.Reply) -> None:
        actor = place.actor
        call = None if actor is None else actor.calls.get(reply.call_id)
        if actor is not None and call is not None and call.is_sent:
            actor.sent.remove(reply.call_id)
            self._end_call(actor, reply)
            self._send_waiting(actor)
        elif actor is not None and reply.call_id == 0 and actor.state is ActorState.STARTING:
            self._began(actor, reply)
        else:
            self._needless(place, "replies without a call")

    def _began(self, actor: _Actor, reply: m.Reply) -> None:
        if reply.ok:
            actor.state = ActorState.RUNNING
            actor.waiting = deque(
                sorted(actor.waiting, key=lambda n: actor.calls[n].caller is None)
            )
            self._events.append(ActorStarted(actor.spec.name))
            self._send_waiting(actor)
            return
        actor.restarts_left = 0  # the same arguments would fail again
        self._lose(actor, _described(reply.result), failure=reply.result)

    def _item(self, place: _Place, item: m.Item) -> None:
        actor = place.actor
        call = None if actor is None else actor.calls.get(item.call_id)
        if call is None or not call.is_sent:
            self._needless(place, "items without a stream")
            return
        if call.credit <= 0:
            self._violated(place, "more items of a stream than it had credit for")
            return
        call.credit -= 1
        if call.caller is None:
            self._events.append(item)
        else:
            caller, theirs = call.caller
            self._out.append((caller.peer, item._replace(call_id=theirs)))

    def _forward(self, place: _Place, message: m.Call) -> None:
        """Pass the call of one actor on to another."""
        if place.actor is None or message.call_id in place.outstanding:
            self._violated(place, "called without a free number")
            return
        if "payload" in message.args:
            self._violated(place, "called with arguments that it has not shared")
            return
        size = _cost_of(message.args)
        if not place.unanswered.has_room(size):
            self._violated(place, "called others with too many calls or bytes unanswered")
            return
        credit = min(message.credit, MAX_CREDIT)
        call = m.Call(
            self._new_number(),
            message.method,
            message.args,
            actor=place.actor.spec.name,
            credit=credit,
        )
        place.outstanding[message.call_id] = call.call_id
        place.unanswered.add(message.call_id, size)
        self._open(message.actor, call, size, caller=(place, message.call_id))

    def _end_call(self, actor: _Actor, reply: m.Reply) -> None:
        call = self._remove_call(actor, reply.call_id)
        if call.caller is None:
            self._events.append(reply)
        else:
            self._answer(call.caller, reply)

    def _remove_call(self, actor: _Actor, call_id: int) -> _Call:
        call = actor.calls.pop(call_id)
        del self._actor_of_call[call_id]
        if not call.is_sent:
            actor.waiting.remove(call_id)
        return call

    def _report_lost(self, call: _Call, name: str, reason: str, *, is_restarting: bool) -> None:
        if call.caller is None:
            self._events.append(CallLost(call.call_id, name, reason, is_restarting=is_restarting))
        else:
            lost = m.lost(name, reason, is_restarting=is_restarting)
            self._answer(call.caller, m.Reply(call.call_id, False, lost))

    def _answer(self, caller: tuple[_Place, int], reply: m.Reply) -> None:
        """Answer the call of an actor, if its process is still there."""
        place, theirs = caller
        place.outstanding.pop(theirs, None)
        place.unanswered.remove(theirs)
        if place.peer in self._places:
            self._out.append((place.peer, reply._replace(call_id=theirs)))


def _cost_of(args: Mapping[str, m.Plain]) -> int:
    """Return the memory that a call takes here, in bytes."""
    return _CALL_BYTES + num_bytes(args)


def _described(result: Any) -> str:
    """Return the failure in a reply as one line; it comes from a peer."""
    if isinstance(result, Mapping):
        kind, message = result.get("kind"), result.get("message")
        if isinstance(kind, str) and isinstance(message, str):
            return one_line(f"{kind}: {message}", 1000)
    return one_line(reprlib.repr(result), 1000)
