"""An actor's side of calls: its registration, the calls it runs, and its calls to other actors.

No socket, no clock, no thread: ``now`` is any monotonic time in seconds. A process says Hello until
the hub answers. Once it is registered, the end of its connection is its own end: the hub has
counted its actor as lost. Over ZeroMQ, the endpoint ends the connection to a hub that is silent.
"""

from __future__ import annotations

import enum
import itertools
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from aiorl.actors.values import num_bytes
from aiorl.actors.window import MAX_CREDIT, CallWindow
from aiorl.errors import RemoteProtocolError
from aiorl.net.wire import messages as m

_HELLO_AGAIN_S: Final = 1.0
_MISSED_AFTER_S: Final = 0.5
"""Time after a call until its missing payload is asked for, seconds."""
_HEARTBEAT_S: Final = 1.0
_MAX_CALLS: Final = 256
_MAX_BYTES: Final = 64 << 20
"""Bounds of this actor's own calls that have not ended; further ones wait in order."""
_MAX_UNANSWERED: Final = 1 << 16
_MAX_UNANSWERED_BYTES: Final = 1 << 32
"""Bounds of the calls of this actor that it has not answered. A hub keeps the calls of each caller
in narrower ones; it can name code to import, so these are a guard against errors above all."""
_RECENT_PAYLOADS: Final = 2
"""Payloads that are kept although no call has named them yet."""


class LinkState(enum.Enum):
    """States of a process for an actor."""

    CONNECTING = enum.auto()
    REGISTERED = enum.auto()
    ENDED = enum.auto()


class Identity(NamedTuple):
    """Identity of a process, for the hub and for people.

    Attributes:
        worker_id: its name.
        host: name of its host.
        pid: its process id there.
    """

    worker_id: str
    host: str
    pid: int


# Events
# --------------------------------------------------------------------------------------------------


class ObjectRequested(NamedTuple):
    """Make the actor's object, and answer call 0."""

    name: str
    path: str
    args: Mapping[str, m.Plain]


class Ended(NamedTuple):
    """The process has nothing left to do.

    Attributes:
        reason: why, one plain sentence.
        is_orderly: True if the hub has said goodbye.
        is_final: True if it said so because it ends itself.
    """

    reason: str
    is_orderly: bool
    is_final: bool = False


ActorEvent: TypeAlias = m.CallMessage | ObjectRequested | Ended
"""A message is for this process: a call with all of its arguments, what its caller says to it, or an
answer to one of our own calls."""


@dataclass(slots=True, eq=False)
class _WaitingCall:
    """A call whose shared arguments have not arrived, or a later one of the same caller.

    Attributes:
        call: the call.
        payload: number of the shared arguments, None if they are not missing.
        args: the shared arguments once they have arrived; the call's own if it has none.
        since: time since which the call waits.
    """

    call: m.Call
    payload: int | None
    args: Mapping[str, m.Plain]
    since: float


class ActorSession:
    """Registration of one process at a hub, and the calls to and from its actor.

    Attributes:
        state: its state.
    """

    def __init__(self, identity: Identity) -> None:
        self.state = LinkState.CONNECTING
        self._identity = identity
        self._is_linked = False
        self._last_hello = float("-inf")
        self._last_beat = float("-inf")
        self._next_call = 1
        self._unsent: OrderedDict[int, m.Call] = OrderedDict()
        self._outstanding = CallWindow(_MAX_CALLS, _MAX_BYTES)
        self._unanswered = CallWindow(_MAX_UNANSWERED, _MAX_UNANSWERED_BYTES)
        self._is_requested = False
        self._payloads: OrderedDict[int, Mapping[str, m.Plain]] = OrderedDict()
        self._requested: set[int] = set()
        self._waiting: dict[str, deque[_WaitingCall]] = {}  # of each caller, in order
        self._out: list[m.UpMessage] = []
        self._events: list[ActorEvent] = []

    # Commands
    # ----------------------------------------------------------------------------------------------

    def reply(self, call_id: int, *, ok: bool, result: m.Value) -> None:
        """Answer a call."""
        self._unanswered.remove(call_id)
        self._send(m.Reply(call_id, ok, result))

    def send_item(self, call_id: int, value: m.Value) -> None:
        """Send an item of a stream; the caller must have given credit for it."""
        self._send(m.Item(call_id, value))

    def call(self, actor: str, method: str, args: Mapping[str, m.Plain], credit: int = 0) -> int:
        """Call a method of another actor; return the number of the call, which ends with
        a Reply.
        """
        call_id = self._next_call
        self._next_call += 1
        self._unsent[call_id] = m.Call(call_id, method, args, actor=actor, credit=credit)
        self._send_calls()
        return call_id

    def give_credit(self, call_id: int, items: int) -> None:
        """Allow more items of a stream."""
        self._send(m.Credit(call_id, items))

    def cancel(self, call_id: int) -> None:
        """Cancel one of this actor's own calls; it still ends with a Reply."""
        if self._unsent.pop(call_id, None) is None:
            self._send(m.Cancel(call_id))
        else:
            self._events.append(m.Reply(call_id, False, m.failed("CancelledError")))

    def leave(self, reason: str) -> None:
        """End on purpose."""
        self._send(m.Leaving(reason))
        self._end(reason, is_orderly=True)

    # Queries
    # ----------------------------------------------------------------------------------------------

    def messages_to_send(self) -> list[m.UpMessage]:
        """Return the messages to send, in order, and clear the list."""
        out = self._out
        self._out = []
        return out

    def events(self) -> list[ActorEvent]:
        """Return the events so far, in order, and clear the list."""
        events = self._events
        self._events = []
        return events

    # Inputs
    # ----------------------------------------------------------------------------------------------

    def connected(self, now: float) -> None:
        """Take note that both channels are up."""
        self._is_linked = True
        self._say_hello(now)

    def disconnected(self, reason: str) -> None:
        """Take note that the connection is gone; a registered process ends."""
        self._is_linked = False
        if self.state is LinkState.REGISTERED:
            self._end(f"the connection to the hub is gone: {reason}", is_orderly=False)

    def broadcast(self, message: m.Message) -> None:
        """Process a message to everyone, which a process without registration gets, too."""
        if self.state is not LinkState.REGISTERED:
            return
        match message:
            case m.Bye(reason, final):
                self._end(reason, is_orderly=True, is_final=final)
            case m.Payload(number, value):
                self._take_payload(number, value)

    def receive(self, message: m.Message, now: float) -> None:
        """Process a message to this process.

        Raises:
            RemoteProtocolError: a call of the hub has not the form that it must have.
        """
        if self.state is LinkState.ENDED:
            return
        if self.state is LinkState.CONNECTING and not isinstance(message, m.Refused):
            self.state = LinkState.REGISTERED
        match message:
            case m.Call():
                self._called(message, now)
            case m.Refused(reason, retry):
                if not retry:
                    self._end(f"the hub refused this process: {reason}", is_orderly=False)
            case m.Bye(reason, final):
                self._end(reason, is_orderly=True, is_final=final)
            case m.Payload(number, value):
                self._take_payload(number, value)
            case m.Cancel(call_id):
                self._cancelled(call_id)
            case m.Credit(call_id, items):
                self._events.append(m.Credit(call_id, min(items, MAX_CREDIT)))
            case m.Reply(call_id):
                self._outstanding.remove(call_id)
                self._events.append(message)
                self._send_calls()
            case m.Item():
                self._events.append(message)

    def tick(self, now: float) -> None:
        """Say Hello again, send a heartbeat, and ask for missing payloads."""
        if not self._is_linked or self.state is LinkState.ENDED:
            return
        if self.state is LinkState.CONNECTING:
            if now - self._last_hello >= _HELLO_AGAIN_S:
                self._say_hello(now)
            return
        if now - self._last_beat >= _HEARTBEAT_S:
            self._last_beat = now
            self._send(m.Beat(0, "running"))
        for waiting in itertools.chain.from_iterable(self._waiting.values()):
            number = waiting.payload
            if number is None or number in self._requested:
                continue
            if now - waiting.since >= _MISSED_AFTER_S:
                self._requested.add(number)
                self._send(m.PayloadRequest(number))

    # Inside
    # ----------------------------------------------------------------------------------------------

    def _send(self, message: m.UpMessage) -> None:
        if self.state is LinkState.REGISTERED:
            self._out.append(message)

    def _send_calls(self) -> None:
        """Send calls within the bounds of the hub."""
        while self._unsent:
            call = next(iter(self._unsent.values()))
            size = num_bytes(call.args)
            if not self._outstanding.has_room(size):
                return
            del self._unsent[call.call_id]
            self._outstanding.add(call.call_id, size)
            self._send(call)

    def _say_hello(self, now: float) -> None:
        self._last_hello = now
        identity = self._identity
        self._out.append(
            m.Hello(
                protocol=m.PROTOCOL_VERSION,
                run_id=m.RUN_OF_ACTORS,
                worker_id=identity.worker_id,
                incarnation=identity.worker_id,
                host=identity.host,
                pid=identity.pid,
            )
        )

    def _end(self, reason: str, *, is_orderly: bool, is_final: bool = False) -> None:
        if self.state is not LinkState.ENDED:
            self.state = LinkState.ENDED
            self._events.append(Ended(reason, is_orderly, is_final))

    def _called(self, call: m.Call, now: float) -> None:
        if call.method == m.INIT and call.call_id == 0 and not self._is_requested:
            self._is_requested = True
            self._events.append(_object_requested(call.args))
            return
        if call.call_id == 0 or call.call_id in self._unanswered:
            self._end("the hub used the number of a call twice", is_orderly=False)
            return
        number = _payload_of(call) if "payload" in call.args else None
        size = num_bytes(call.args)
        if not self._unanswered.has_room(size):
            self._end("the hub sent more calls than this process can hold", is_orderly=False)
            return
        self._unanswered.add(call.call_id, size)
        args: Mapping[str, m.Plain] = call.args
        if number is not None and number in self._payloads:
            args = self._payloads[number]
            number = None
        if number is None and call.actor not in self._waiting:
            self._arrived(call, args)
        else:
            # behind the earlier calls of its caller
            waiting = self._waiting.setdefault(call.actor, deque())
            waiting.append(_WaitingCall(call, number, args, now))

    def _arrived(self, call: m.Call, shared: Mapping[str, m.Plain]) -> None:
        if shared is not call.args:
            call = call._replace(args=_with_shared(call.args, shared))
        self._events.append(call)

    def _release(self, caller: str) -> None:
        """Begin the calls of a caller, in order, up to the first that lacks its arguments."""
        waiting = self._waiting[caller]
        while waiting and waiting[0].payload is None:
            complete = waiting.popleft()
            self._arrived(complete.call, complete.args)
        if not waiting:
            del self._waiting[caller]

    def _take_payload(self, number: int, value: m.Value) -> None:
        self._requested.discard(number)
        if isinstance(value, Mapping):
            self._payloads[number] = value
            while len(self._payloads) > _RECENT_PAYLOADS:
                self._payloads.popitem(last=False)
        for caller, waiting in list(self._waiting.items()):
            for ready in [call for call in waiting if call.payload == number]:
                if isinstance(value, Mapping):
                    ready.payload = None
                    ready.args = value
                else:
                    gone = m.failed("LookupError", "its shared arguments are gone")
                    waiting.remove(ready)
                    self.reply(ready.call.call_id, ok=False, result=gone)
            self._release(caller)

    def _cancelled(self, call_id: int) -> None:
        for caller, waiting in self._waiting.items():
            cancelled = next((one for one in waiting if one.call.call_id == call_id), None)
            if cancelled is not None:
                waiting.remove(cancelled)
                self.reply(call_id, ok=False, result=m.failed("CancelledError"))
                self._release(caller)
                return
        self._events.append(m.Cancel(call_id))


def _payload_of(call: m.Call) -> int:
    number = call.args["payload"]
    if type(number) is not int or number < 0:
        raise RemoteProtocolError("the number of a payload must be a whole number")
    if "place" in call.args:
        _further_arguments(call.args)
    return number


def _with_shared(args: Mapping[str, Any], arrived: Mapping[str, m.Plain]) -> Mapping[str, m.Plain]:
    """Return the arguments of a call that `HubSession.share` describes.

    Args:
        args: what the call has.
        arrived: the shared arguments, or ``args`` if there are none.
    """
    if "place" not in args or "payload" not in args:
        return arrived
    positional, named = _further_arguments(args)
    place = args["place"]
    if isinstance(place, int):
        positional.insert(place, arrived.get("value"))
    else:
        named[place] = arrived.get("value")
    return {"args": positional, "kwargs": named}


def _further_arguments(args: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return copies of all arguments but the shared one.

    Raises:
        RemoteProtocolError: they have another form.
    """
    positional, named = args.get("args"), args.get("kwargs")
    is_place = type(args["place"]) in (int, str)
    if not is_place or not isinstance(positional, list) or not isinstance(named, Mapping):
        raise RemoteProtocolError("a shared argument must have a place among the others")
    return list(positional), dict(named)


def _object_requested(args: Mapping[str, Any]) -> ObjectRequested:
    name, path, arguments = (args.get(key) for key in ("name", "path", "args"))
    if type(name) is not str or type(path) is not str or not isinstance(arguments, Mapping):
        raise RemoteProtocolError("an actor must have a name, a path and arguments")
    return ObjectRequested(name, path, arguments)
