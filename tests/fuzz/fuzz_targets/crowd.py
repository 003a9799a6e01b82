"""A few messages repeated by ever new peers under ever new names: no memory may grow.

The memory of peers is bounded by a few thousand entries of each kind. Here the bounds are a few
dozen, so that growth shows.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from unittest.mock import patch

from aiorl.errors import BadFrame
from aiorl.net.protocol import learner_session, roster
from aiorl.net.protocol.learner_session import LearnerSession, LearnerSettings
from aiorl.net.wire import messages as m
from fuzz_targets.examples import make_samples, make_snapshot
from fuzz_targets.sizes import num_items
from fuzz_targets.source import Source

NUM_WORKERS = 4
ROUNDS = 160
REMEMBERED = 16
MAX_ITEMS = 150


def seeds() -> Iterable[bytes]:
    for first in range(9):
        yield bytes([1, first, 0])
        for second in range(9):
            yield bytes([1, first, 1, second, 2, 8, 1])


def run(data: bytes) -> None:
    source = Source(data)
    with ExitStack() as stack:
        for module in (roster, learner_session):
            stack.enter_context(patch.object(module, "MAX_REMEMBERED", REMEMBERED))
        session = LearnerSession(
            "run", "L", LearnerSettings(max_workers=NUM_WORKERS, hello_grace=4)
        )
        if source.below(4):
            session.begin({"env": "x"}, {}, 0.0)
            session.publish(make_snapshot(0, ""), 0.0)
        steps = [(source.below(9), source.byte()) for _ in range(6) if not source.is_empty]
        for turn in range(ROUNDS):
            for kind, how in steps:
                _say(session, kind, how, turn)
            session.messages_to_send()
            session.events()
    items = num_items(session)
    assert items <= MAX_ITEMS, f"{items} items are kept"


def _say(session: LearnerSession, kind: int, how: int, turn: int) -> None:
    fresh = f"n{turn}"
    peer = fresh.encode() if how & 1 else b"peer"
    name = fresh if how & 2 else "name"
    incarnation = fresh if how & 4 else "incarnation"
    now = turn * (0.1 if how & 8 else 5.0)
    text = fresh * (200 if how & 16 else 1)
    match kind:
        case 0:
            session.receive(
                peer, m.Hello(m.PROTOCOL_VERSION, "run", name, incarnation, how >> 5), now, None
            )
        case 1:
            session.receive(peer, make_samples(seq=turn, lease_id=turn), now)
        case 2:
            session.receive(peer, m.Beat(turn, text, 0.0, 0), now)
        case 3:
            session.receive(peer, m.Failure(text, text, text, fatal=bool(how & 32)), now)
        case 4:
            session.receive(peer, m.Leaving(text, 0, 0), now)
        case 5:
            session.bad_frames(peer, BadFrame(text, field=text), now)
        case 6:
            session.peer_gone(peer, now)
        case 7:
            session.receive(peer, m.Reply(turn, True, text), now)
        case _:
            session.tick(now)
