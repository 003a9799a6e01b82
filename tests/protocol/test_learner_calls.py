from __future__ import annotations

import dataclasses

from aiorl.protocol import events as ev
from aiorl.protocol.learner_calls import Calls
from aiorl.protocol.learner_outbox import Outbox
from aiorl.protocol.roster import Roster, Worker
from aiorl.wire import messages as m


def sent(outbox: Outbox) -> list[tuple[object, ...]]:
    return [(peer, *dataclasses.astuple(message)) for peer, message in outbox.take_messages()]


def told(outbox: Outbox) -> list[tuple[object, ...]]:
    """Slot, call, whether it went well, result."""
    events = outbox.take_events()
    assert all(isinstance(event, ev.CallReplied) for event in events)
    return [dataclasses.astuple(event) for event in events]


def make() -> tuple[Outbox, Calls, list[Worker]]:
    outbox, roster = Outbox(), Roster(9)
    workers = [
        roster.add(slot, m.Hello(m.PROTOCOL_VERSION, "", f"w{slot}", f"i{slot}", 0, "", 0, ""), b"%d" % slot, None, 0.0)
        for slot in (1, 2)
    ]
    return outbox, Calls(outbox), workers


def test_each_call_is_answered_once_by_the_worker_it_was_made_to() -> None:
    outbox, calls, (one, other) = make()
    first = calls.start(one, "ping", {"n": 1}, 10.0)
    second = calls.start(other, "ping", {}, 10.0)
    assert first != second
    assert sent(outbox) == [(b"1", first, "ping", {"n": 1}), (b"2", second, "ping", {})]
    calls.answer(other, m.Reply(first, True, "forged"))
    assert told(outbox) == []
    for _ in range(2):
        calls.answer(one, m.Reply(first, True, "pong"))
    assert told(outbox) == [(1, first, True, "pong")]


def test_calls_fail_in_time_or_with_their_worker() -> None:
    outbox, calls, (one, other) = make()
    early, late = calls.start(one, "a", {}, 5.0), calls.start(one, "b", {}, 9.0)
    elsewhere = calls.start(other, "c", {}, 9.0)
    calls.expire(4.9)
    assert told(outbox) == []
    calls.expire(5.0)
    assert told(outbox) == [(1, early, False, "timed out")]
    calls.lose(one, "heartbeats stopped")
    assert told(outbox) == [(1, late, False, "the worker was lost: heartbeats stopped")]
    sent(outbox)
    for worker in (one, other):
        calls.say_again(worker)
    assert sent(outbox) == [(b"2", elsewhere, "c", {})]
