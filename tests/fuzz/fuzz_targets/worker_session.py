"""A worker with a learner that sends any messages in any order.

Only messages that no learner sends are refused. The worker's memory stays bounded, and its messages
can be decoded.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count as counter

from aiorl.errors import RemoteProtocolError
from aiorl.net.protocol import events as ev
from aiorl.net.protocol.worker_session import WorkerSession, WorkerSettings
from aiorl.net.wire import messages as m
from aiorl.net.wire.decoding import decode
from aiorl.net.wire.encoding import encode
from fuzz_targets.examples import example_messages, make_samples, make_snapshot
from fuzz_targets.learner_session import count
from fuzz_targets.source import Source

INCARNATIONS = ["i1", "i2", "i3", "other", ""]
FOR_ACTORS = m.Reply | m.Item | m.Credit | m.Cancel | m.Payload
LEARNERS = ["L", "L", "L", "M", ""]
UP_MESSAGES = [message for message in example_messages() if isinstance(message, m.UpMessage)]
MAX_UNACKED = 6
SETTINGS = WorkerSettings("w1", slot_hint=1, max_unacked=MAX_UNACKED)


def seeds() -> Iterable[bytes]:
    welcome = bytes([0, 1, 0, 0, 0, 0, 0])
    yield welcome
    for step in range(20):
        yield welcome + bytes([step, 1, 2, 3, 4, 5, 6, 7])
        yield welcome + bytes([3, 1, 4, 0, 12, 13, 0, 12, 13, 1]) + bytes([step, 0, 0, 1])


def run(data: bytes) -> None:
    world = HostileWorld(Source(data))
    while not world.source.is_empty:
        world.step()
        world.check()
    assert world.session.status_text(world.now)


class HostileWorld:
    """A session, and the memory of the service around it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.now = 100.0
        self.begun: list[int] = []
        self.calls: list[ev.CallRequested] = []
        # decode its messages, which takes as long as everything else
        self.is_read = source.below(16) == 1
        self.newest = -1
        ids = counter(1)
        self.session = WorkerSession(SETTINGS, make_incarnation=lambda: f"i{next(ids)}")
        self.session.connected(self.now)

    def step(self) -> None:
        """Run one event."""
        source, session = self.source, self.session
        match source.below(20):
            case 0:
                self.hear(
                    m.Welcome(
                        source.below(4),
                        3,
                        "run",
                        source.choice(LEARNERS),
                        {},
                        {},
                        make_snapshot(source.below(8), source.choice(LEARNERS)),
                        session.incarnation,
                        source.below(8),
                    ),
                )
            case 1:
                self.hear(
                    m.Welcome(
                        1,
                        3,
                        "run",
                        source.choice(LEARNERS),
                        {},
                        {},
                        make_snapshot(source.below(8)),
                        source.choice(INCARNATIONS),
                        count(source),
                    ),
                )
            case 2:
                code = source.choice(
                    ["", "hello_first", "incarnation_ended", "full", "wrong_run", "violation"]
                )
                retry = bool(source.below(4))
                self.hear(
                    m.Refused(
                        source.text(),
                        retry,
                        code,
                        source.choice([session.incarnation, "", "other"]),
                    )
                )
            case 3 | 4:
                self.hear(m.Lease(source.below(8), count(source), count(source)))
            case 5:
                self.hear(m.Ack(count(source), bool(source.below(2))))
            case 6:
                self.hear(make_snapshot(count(source), source.choice(LEARNERS)))
            case 7:
                self.hear(m.LearnerBeat(source.choice(LEARNERS), count(source) - 1))
            case 8:
                self.hear(m.Call(source.below(8), source.text(), {"a": source.plain(1)}))
            case 9:
                self.hear(m.Bye(source.text(), source.below(8) == 0))
            case 10:
                self.hear(source.choice(UP_MESSAGES))
            case 11:
                self.now += source.choice([0.0, 0.1, 0.5, 1.0, 3.0, 11.0, 100.0])
                session.tick(self.now)
            case 12:
                lease = session.start_fragment(source.choice([session.version, 0, 5]))
                if lease is not None:
                    self.begun.append(lease)
            case 13 if self.begun:
                session.fragment_done(
                    make_samples(lease_id=self.begun.pop(), env_steps=source.below(8)), self.now
                )
            case 14 if self.begun:
                session.abandon_fragment(self.begun.pop())
                source.below(8)  # unused, but the corpus contains it here and below
            case 15:
                source.below(8)
                session.note_progress(source.text(), source.below(3))
            case 16 if self.calls:
                session.reply(
                    self.calls.pop(),
                    bool(source.below(2)),
                    source.choice([None, 1, ["a"], {"b": 0.5}]),
                    self.now,
                )
            case 17:
                words = source.text(), source.text(), source.text()
                if source.below(16) == 0:
                    session.failure(*words, self.now)
            case 18:
                session.disconnected(self.now, source.text())
            case _:
                session.connected(self.now)

    def hear(self, message: m.Message) -> None:
        """Deliver a message to this worker alone, or to all."""
        feed = self.session.broadcast if self.source.below(4) == 3 else self.session.receive
        try:
            feed(message, self.now)
        except RemoteProtocolError:
            is_for_workers = isinstance(message, m.DownMessage) and not isinstance(
                message, FOR_ACTORS
            )
            assert not is_for_workers or feed == self.session.broadcast

    def check(self) -> None:
        """Check invariants after a step."""
        session = self.session
        for event in session.events():
            match event:
                case ev.Registered():
                    self.newest = event.welcome.snapshot.version
                    self.begun.clear()
                case ev.SnapshotReceived():
                    assert event.snapshot.version > self.newest
                    self.newest = event.snapshot.version
                case ev.CallRequested():
                    self.calls.append(event)
        for message in session.messages_to_send():
            if self.is_read:
                decode([bytes(frame) for frame in encode(message)])
        assert session.num_unacked <= MAX_UNACKED
        assert session.sampled_total >= 0
