"""A hub with processes that send any messages in any order, and commands of its own in between.

No input raises an error, each call ends once, what a process can hold here stays bounded, and all
messages of the hub can be decoded.
"""

from __future__ import annotations

from collections.abc import Iterable

from aiorl.actors import hub_session as ev
from aiorl.actors.hub_session import ActorSpec, ActorState, HubSession, HubSettings
from aiorl.actors.values import LIMITS
from aiorl.errors import BadFrame
from aiorl.net.wire import messages as m
from aiorl.net.wire.decoding import decode
from aiorl.net.wire.encoding import encode
from fuzz_targets.examples import example_messages
from fuzz_targets.learner_session import count
from fuzz_targets.source import Source

PEERS = [b"p0", b"p1", b"p2", b"p3"]
IDS = ["w0", "w1", "w2", "w3", ""]
NAMES = ["a0", "a1", "a2", "other", ""]
METHODS = ["echo", "items", "__init__", "_private"]
ARGS: list[dict[str, m.Plain]] = [
    {"args": [], "kwargs": {}},
    {"args": [[{}] * 50], "kwargs": {}},
    {"payload": 1},
    {},
]
MAX_BYTES = 20_000
SETTINGS = HubSettings(in_flight=2, max_bytes=MAX_BYTES, max_places=3)
MESSAGES = example_messages()


def seeds() -> Iterable[bytes]:
    hellos = b"".join(bytes([0, peer, 0, peer]) for peer in range(3))
    actors = b"".join(bytes([10, 0, number, 0, 1]) for number in range(3))
    made = b"".join(bytes([1, peer, 0, 1]) for peer in range(3))
    for begin in (b"\0", b"\1"):
        for order in (hellos + actors, actors + hellos):
            yield begin + order + made
            for step in range(20):
                yield begin + order + made + bytes([step, 1, 0, 1, 0, 4, 0, 1, 2, 3])
                yield (
                    begin
                    + order
                    + made
                    + bytes([2, 0, 1, 1, 0, 8, 11, 0, 0, 1, 0, 8])
                    + bytes([step, 1, 1, 1, 1, 0, 0])
                )


def run(data: bytes) -> None:
    world = HostileWorld(Source(data))
    while not world.source.is_empty:
        world.step()
        world.drain()
        world.check()
    world.session.shutdown("done")
    world.drain()
    assert not world.pending


class HostileWorld:
    """A hub, and the memory of the program around it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.now = 100.0
        # decode its messages, which takes as long as everything else
        self.is_read = source.below(16) == 1
        self.session = HubSession("hub", SETTINGS)
        self.pending: set[int] = set()
        self.payloads = [0]

    def step(self) -> None:
        """Run one event."""
        source, session = self.source, self.session
        kind = source.below(20)
        peer = source.choice(PEERS)
        match kind:
            case 0:
                run_id = m.RUN_OF_ACTORS if source.below(8) < 7 else source.text()
                worker_id = source.choice(IDS)
                version = m.PROTOCOL_VERSION if source.below(16) < 15 else 0
                session.receive(peer, m.Hello(version, run_id, worker_id, "i"), self.now)
            case 1:
                reply = m.Reply(self.number(), bool(source.below(2)), source.plain(1))
                session.receive(peer, reply, self.now)
            case 2 | 3:
                call = m.Call(
                    self.number(),
                    source.choice(METHODS),
                    source.choice(ARGS),
                    source.choice(NAMES),
                    source.number() & 0x7FFFFFFF,
                )
                session.receive(peer, call, self.now)
            case 4:
                session.receive(peer, m.Item(self.number(), source.plain(1)), self.now)
            case 5:
                credit = m.Credit(self.number(), source.number() & 0x7FFFFFFF)
                session.receive(peer, credit, self.now)
            case 6:
                session.receive(peer, m.Cancel(self.number()), self.now)
            case 7:
                session.receive(peer, m.PayloadRequest(source.choice(self.payloads)), self.now)
            case 8:
                session.receive(peer, source.choice(MESSAGES), self.now)
            case 9:
                session.peer_gone(peer, source.text())
            case 10:
                name = source.choice(NAMES)
                if session.state_of(name) is ActorState.ENDED:
                    restarts = source.below(3)
                    place = source.choice(["", "", *IDS])
                    session.add(ActorSpec(name, "m:C", ARGS[0], restarts, place))
            case 11:
                args = source.choice([*ARGS, {"payload": self.payloads[-1]}])
                method = source.choice(METHODS)
                call_id = session.call(source.choice(NAMES), method, args, source.below(9))
                self.pending.add(call_id)
            case 12:
                self.payloads.append(session.share(source.choice(ARGS)))
            case 13:
                session.release(source.choice(self.payloads))
            case 14:
                session.give_credit(self.number(), 1 + source.below(9))
            case 15:
                session.cancel(self.number())
            case 16:
                session.end(source.choice(NAMES), source.text())
            case 17:
                session.lose_place(source.choice(IDS), source.text())
            case 18:
                self.now += source.choice([0.0, 0.1, 0.5, 1.0, 11.0, 200.0])
                session.tick(self.now)
            case _:
                session.bad_frames(peer, BadFrame(source.text(), field=source.text()))

    def number(self) -> int:
        """Return a number of a call, often one of a call that has not ended."""
        if self.source.below(4) == 3 and self.pending:
            return self.source.choice(sorted(self.pending))
        return count(self.source)

    def drain(self) -> None:
        """Process the session's messages and events."""
        session = self.session
        for target, message in session.messages_to_send():
            assert target is None or target in PEERS
            if self.is_read:
                decode([bytes(frame) for frame in encode(message, limits=LIMITS)], LIMITS)
            if target is not None and self.source.below(32) == 31:
                session.not_sent(target, message, "too large")
        for event in session.events():
            match event:
                case m.Reply(call_id) | ev.CallLost(call_id):
                    self.pending.remove(call_id)
                case m.Item(call_id):
                    assert call_id in self.pending
        for peer, _ in session.peers_to_drop():
            session.peer_gone(peer, "dropped")

    def check(self) -> None:
        """Check that what the processes hold here is bounded."""
        places = self.session._places
        assert len(places) <= SETTINGS.max_places + len(IDS)
        for place in places.values():
            assert 0 <= place.unanswered.num_bytes <= 2 * MAX_BYTES
            assert len(place.outstanding) == len(place.unanswered)
