"""A learner with peers that send any messages in any order, and commands in between.

No input raises an error, every account balances, and all messages of the learner can be decoded.
"""

from __future__ import annotations

from collections.abc import Iterable

from aiorl.errors import BadFrame, LocalProtocolError
from aiorl.net.protocol import events as ev
from aiorl.net.protocol.learner_session import LearnerSession, LearnerSettings
from aiorl.net.protocol.pacing import Pacing
from aiorl.net.wire import messages as m
from aiorl.net.wire.decoding import decode
from aiorl.net.wire.encoding import encode
from fuzz_targets.examples import example_messages, make_samples, make_snapshot
from fuzz_targets.source import Source

NUM_WORKERS = 3
PEERS = [b"p0", b"p1", b"p2", b"p3", b"p4"]
IDS = ["w1", "w2", "w3", "", "w4"]
INCARNATIONS = ["i1", "i2", "i3", "i4", "i5", "i6", ""]
KEYS = [None, "k1", "k2"]
SETTINGS = LearnerSettings(num_workers=NUM_WORKERS, max_workers=NUM_WORKERS, hello_grace=8)
DOWN_MESSAGES = [message for message in example_messages() if isinstance(message, m.DownMessage)]


def seeds() -> Iterable[bytes]:
    hellos = b"".join(bytes([0, peer, peer, peer, 0, 0]) for peer in range(3))
    samples = b"".join(bytes([1, 0, 0, seq, 4, 0, 0, 4 * seq]) for seq in (1, 2, 3))
    yield b"\1\0\1" + hellos + bytes([12, 0, 9]) + samples
    for begin in (b"\0\0\1", b"\0\1\1", b"\0\0\0"):
        yield begin + hellos
        yield begin + hellos + bytes([12, 0, 9]) + samples + samples
        for step in range(24):
            yield begin + hellos + bytes([step, 1, 2, 3, 4, 5, 6, 7, 8])
            yield begin + hellos + bytes([12, 0, 9, step, 0, 0, 1, 1, 1, 0, 0, 1, 22, 0])


def run(data: bytes) -> None:
    world = HostileWorld(Source(data))
    steps = 0
    while not world.source.is_empty:
        world.step()
        world.drain()
        steps += 1
        if steps % 4 == 0:
            world.check()
    world.check()


class HostileWorld:
    """A session, and the memory of the service around it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.now = 100.0
        self.version = 0
        self.queued: list[int] = []
        self.calls: set[int] = set()
        # decode its messages, which takes as long as everything else
        self.is_read = source.below(16) == 1
        max_lag = 2 if source.below(2) else None
        self.session = LearnerSession("run", "L", SETTINGS)
        self.session.leases.begin_streaming(Pacing(3, max_lag, 2))
        if source.below(8):
            self.session.begin({"env": "x"}, {}, self.now)
            self.session.publish(make_snapshot(0, ""), self.now)

    def step(self) -> None:
        """Run one event."""
        source, session = self.source, self.session
        kind = source.below(24)
        peer = source.choice(PEERS)
        match kind:
            case 0 | 16:
                session.receive(peer, self.hello(), self.now, source.choice(KEYS))
            case 1 | 2 | 3 | 4 | 17 | 18:
                session.receive(peer, self.samples(), self.now)
            case 5 | 19:
                session.receive(peer, self.other(), self.now)
            case 6:
                session.receive(peer, source.choice(DOWN_MESSAGES), self.now)
            case 7:
                session.bad_frames(peer, BadFrame(source.text(), field=source.text()), self.now)
            case 8:
                session.peer_gone(peer, self.now)
            case 9 | 20:
                self.now += source.choice([0.0, 0.1, 0.5, 1.0, 3.0, 11.0, 100.0])
                session.tick(self.now)
            case 10:
                self.version += source.below(3)
                try:
                    session.publish(make_snapshot(self.version, ""), self.now)
                except LocalProtocolError:
                    self.version = session.version
            case 11:
                pacing = session.leases.pacing
                assert pacing is not None
                pacing.updated(source.choice([0.0, 0.5]), source.below(8), self.now)
                pacing.outdated(1 + source.below(NUM_WORKERS))
                session.stream(source.below(8), self.version)
            case 12 | 21:
                session.deal(self.version, source.below(8))
            case 13:
                session.deal_again(source.below(3))
            case 14:
                self.command(source)
            case 15:
                session.reserve_slot(1 + source.below(NUM_WORKERS), source.choice(IDS))
            case 22 if self.queued:
                session.ledger.train(self.queued.pop())
            case 22:
                session.mark_process_lost(source.choice(IDS), "ended", self.now)
            case _ if hasattr(session, "unread"):
                number = source.number() & 0xFFFFFFFF
                if not session.knows(peer):
                    session.unread(peer, number)

    def command(self, source: Source) -> None:
        """Run a command that needs a worker in the slot."""
        slot = source.below(NUM_WORKERS + 2)
        try:
            match source.below(4):
                case 0:
                    self.session.deal_again(1 + source.below(4))
                case 1:
                    method = source.choice(["stacks", "ping"])
                    self.calls.add(self.session.call(slot, method, {}, num_bytes=0))
                case 2:
                    self.session.mark_lost(slot, "ended", self.now)
                case _:
                    self.session.shutdown("done", bool(source.below(2)))
        except LocalProtocolError:
            if slot in self.session.slots:
                raise

    def hello(self) -> m.Hello:
        source = self.source
        worker_id, incarnation = source.choice(IDS), source.choice(INCARNATIONS)
        kind = source.byte()
        if kind < 192:
            return m.Hello(m.PROTOCOL_VERSION, "run", worker_id, incarnation, kind % 5)
        return m.Hello(
            source.choice([m.PROTOCOL_VERSION, 0, 9]),
            source.choice(["", "run", "other"]),
            worker_id,
            incarnation,
            source.number() & 0x7FFFFFFF,
            source.text(),
            0,
            source.choice(["", "L", "other"]),
        )

    def samples(self) -> m.Samples:
        source = self.source
        lease_id = source.byte()
        if lease_id < 224:
            slot = 1 + lease_id % NUM_WORKERS
            leases = (
                self.session.leases.outstanding_leases(slot) if slot in self.session.slots else []
            )
            lease_id = leases[-1].lease_id if leases else lease_id
        seq = source.byte()
        steps, first, last, total = (count(source) for _ in range(4))
        abandoned = count(source) if seq >= 128 else 0
        return make_samples(
            seq=seq % 128,
            lease_id=lease_id,
            env_steps=steps,
            first_version=first,
            last_version=last,
            sampled_total=total,
            abandoned_total=abandoned,
        )

    def other(self) -> m.UpMessage:
        source = self.source
        match source.below(6):
            case 0:
                return m.Beat(count(source), "sampling", 0.5, count(source))
            case 1:
                return m.SnapshotRequest(source.below(8) - 1)
            case 2:
                return m.Failure(
                    source.text(), source.text(), source.text(), fatal=bool(source.below(2))
                )
            case 3:
                return m.Reply(source.below(8), bool(source.below(2)), source.plain(1))
            case 4:
                return m.Leaving(source.text(), count(source), count(source))
            case _:
                return m.Beat(count(source), source.text(), 0.0, 0)

    def drain(self) -> None:
        """Process the session's messages and events."""
        session = self.session
        for event in session.events():
            match event:
                case ev.SamplesAccepted():
                    self.queued.append(event.message.env_steps)
                case ev.CallReplied() | ev.CallLost():
                    self.calls.remove(event.call_id)
                case ev.WorkerJoined():
                    assert event.slot in range(1, NUM_WORKERS + 1)
        for target, message in session.messages_to_send():
            assert target is None or target in PEERS
            if self.is_read:
                decode([bytes(frame) for frame in encode(message)])

    def check(self) -> None:
        """Check invariants after a step; once broken, they stay broken."""
        session = self.session
        session.ledger.check()
        if session.leases.pacing is not None:
            session.leases.pacing.check_valid()
        assert session.ledger.queued == sum(self.queued)
        assert len(session.slots) <= NUM_WORKERS
        assert session.num_waiting <= NUM_WORKERS


def count(source: Source) -> int:
    """Return a count that messages can contain."""
    number = source.number()
    return number if 0 <= number <= 1 << 53 else 0
