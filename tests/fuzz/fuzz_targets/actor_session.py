"""An actor with a hub that sends any messages in any order.

Only malformed calls are refused, each call arrives and is answered once, and all messages of the
actor can be decoded.
"""

from __future__ import annotations

from collections.abc import Iterable

from aiorl.actors import actor_session as ev
from aiorl.actors.actor_session import ActorSession, Identity, LinkState
from aiorl.actors.values import LIMITS
from aiorl.errors import RemoteProtocolError
from aiorl.net.wire import messages as m
from aiorl.net.wire.decoding import decode
from aiorl.net.wire.encoding import encode
from fuzz_targets.examples import example_messages
from fuzz_targets.hub_session import ARGS, METHODS
from fuzz_targets.learner_session import count
from fuzz_targets.source import Source

INIT_ARGS: dict[str, m.Plain] = {"path": "m:C", "name": "a", "args": {"args": [], "kwargs": {}}}
CALL_ARGS: list[dict[str, m.Plain]] = [*ARGS, {"payload": "1"}, {"payload": -1}, {"payload": 2}]
MESSAGES = example_messages()


def seeds() -> Iterable[bytes]:
    begin = bytes([1, 0, 0])
    yield begin
    for step in range(16):
        yield begin + bytes([step, 1, 0, 0, 0, 0])
        yield begin + bytes([1, 1, 0, 2, 0]) + bytes([step, 1, 2, 0, 0, 1, 9, 3])
        yield b"\0" + bytes([9, 2, 9, 2, step, 1, 1, 0])


def run(data: bytes) -> None:
    world = HostileWorld(Source(data))
    while not world.source.is_empty:
        world.step()
        world.drain()


class HostileWorld:
    """An actor's session, and the memory of the host around it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.now = 100.0
        self.is_read = source.below(16) == 1
        self.session = ActorSession(Identity("w", "host", 1))
        self.session.connected(self.now)
        self.arrived: set[int] = set()
        self.calls: set[int] = set()
        self.is_made = False

    def step(self) -> None:
        """Run one event."""
        source, session = self.source, self.session
        match source.below(15):
            case 0:
                self.hear(m.Call(0, "__init__", source.choice([INIT_ARGS, *CALL_ARGS])))
            case 1 | 2:
                call_id, method = count(source), source.choice(METHODS)
                self.hear(m.Call(call_id, method, source.choice(CALL_ARGS), "", source.below(9)))
            case 3:
                self.hear(m.Payload(source.below(4), source.choice([None, 1, *ARGS])))
            case 4:
                self.hear(m.Reply(count(source), bool(source.below(2)), source.plain(1)))
            case 5:
                self.hear(m.Item(count(source), source.plain(1)))
            case 6:
                self.hear(m.Credit(count(source), source.number() & 0x7FFFFFFF))
            case 7:
                self.hear(m.Cancel(count(source)))
            case 8:
                self.hear(source.choice(MESSAGES))
            case 9:
                self.now += source.choice([0.0, 0.3, 1.0, 100.0])
                session.tick(self.now)
            case 10 if self.arrived:
                call_id = self.arrived.pop()
                session.reply(call_id, ok=bool(source.below(2)), result=None)
            case 11:
                args = source.choice(ARGS)
                self.calls.add(session.call("other", source.choice(METHODS), args, source.below(9)))
            case 12 if self.calls:
                session.cancel(source.choice(sorted(self.calls)))
            case 13:
                session.disconnected(source.text())
            case _:
                session.connected(self.now)

    def hear(self, message: m.Message) -> None:
        """Give the session a message by one of its two ways."""
        try:
            if self.source.below(4) == 3:
                self.session.broadcast(message)
            else:
                self.session.receive(message, self.now)
        except RemoteProtocolError:
            assert isinstance(message, m.Call)

    def drain(self) -> None:
        """Process the session's messages and events."""
        session = self.session
        for event in session.events():
            match event:
                case ev.ObjectRequested():
                    assert not self.is_made
                    self.is_made = True
                case m.Call(call_id):
                    assert call_id not in self.arrived
                    self.arrived.add(call_id)
                case m.Reply(call_id):
                    self.calls.discard(call_id)
                case ev.Ended():
                    assert session.state is LinkState.ENDED
        for message in session.messages_to_send():
            if self.is_read:
                decode([bytes(frame) for frame in encode(message, limits=LIMITS)], LIMITS)
