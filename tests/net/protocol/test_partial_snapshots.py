"""Snapshots of what has changed: one worker that misses some, many that do, and a sampler that is
interrupted. All of it on a faulty network is in `test_faulty_network.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_policy import RecordedWeights

from aiorl.errors import LocalProtocolError
from aiorl.net.protocol import events as ev
from aiorl.net.protocol.learner_session import BROADCAST, LearnerSession
from aiorl.net.protocol.worker_session import WorkerSession, WorkerSettings
from aiorl.net.wire import messages as m
from aiorl.run.worker.sampler_unit import SnapshotSlot


def weights(**numbers: int) -> dict[str, dict[str, Any]]:
    return {name: {"w": np.array([number])} for name, number in numbers.items()}


def snapshot(version: int, since: int = -1, **numbers: int) -> m.Snapshot:
    return m.Snapshot(version, weights(**numbers), {}, {}, {}, "L", since=since)


def registered(version: int = 1) -> WorkerSession:
    session = WorkerSession(WorkerSettings("w"), make_incarnation=lambda: "i")
    session.connected(0.0)
    first = snapshot(version, a=version, b=version)
    session.receive(m.Welcome(1, 1, "run", "L", {}, {}, first, "i"), 0.0)
    session.events()
    session.messages_to_send()
    return session


def received(session: WorkerSession) -> list[m.Snapshot]:
    return [event.snapshot for event in session.events() if isinstance(event, ev.SnapshotReceived)]


def requests(session: WorkerSession) -> list[m.UpMessage]:
    return [
        message for message in session.messages_to_send() if isinstance(message, m.SnapshotRequest)
    ]


def test_a_worker_that_missed_a_version_asks_at_the_next_tick_and_keeps_what_follows() -> None:
    session = registered()
    session.broadcast(snapshot(3, since=2, a=3), 1.0)
    session.broadcast(snapshot(4, since=3, a=4), 1.05)
    assert not received(session)
    session.tick(1.1)
    assert requests(session) == [m.SnapshotRequest(1)]
    session.broadcast(snapshot(5, since=4, b=5), 1.15)
    # the answer is overtaken by the broadcasts after it
    session.receive(snapshot(3, a=3, b=1), 1.2)
    (merged,) = received(session)
    assert (merged.version, merged.since, session.version) == (5, -1, 5)
    assert {name: int(arrays["w"][0]) for name, arrays in merged.weights.items()} == {
        "a": 4,
        "b": 5,
    }


def test_broadcasts_that_come_twice_or_in_another_order_are_applied_once() -> None:
    session = registered()
    session.broadcast(snapshot(3, since=2, a=3), 1.0)
    session.broadcast(snapshot(2, since=1, b=2), 1.0)
    session.broadcast(snapshot(3, since=2, a=3), 1.0)
    (merged,) = received(session)
    assert (merged.version, merged.since) == (3, 1)
    assert merged.weights.keys() == {"a", "b"}
    session.tick(1.1)
    assert not requests(session)


def test_many_workers_that_miss_a_broadcast_get_a_bounded_number_of_answers_and_a_whole_one() -> (
    None
):
    learner = LearnerSession("run", "L")
    learner.begin({}, {}, 0.0)
    learner.publish(snapshot(0, a=0, b=0), 0.0)
    peers = [b"%d" % number for number in range(200)]
    for number, peer in enumerate(peers):
        learner.receive(peer, m.Hello(m.PROTOCOL_VERSION, "", f"w{number}", f"i{number}"), 0.0)
    learner.publish(snapshot(1, since=0, a=1), 1.0)
    learner.messages_to_send()
    for peer in peers:
        learner.receive(peer, m.SnapshotRequest(0), 1.5)
    answers = [message for _, message in learner.messages_to_send()]
    assert 0 < len(answers) <= 64
    assert all(isinstance(answer, m.Snapshot) and answer.is_whole for answer in answers)
    learner.publish(snapshot(2, since=1, a=2), 2.0)
    ((target, broadcast),) = learner.messages_to_send()
    assert target is BROADCAST
    assert isinstance(broadcast, m.Snapshot)
    assert broadcast.is_whole
    assert {name: int(arrays["w"][0]) for name, arrays in broadcast.weights.items()} == {
        "a": 2,
        "b": 0,
    }
    learner.publish(snapshot(3, since=2, a=3), 3.0)
    ((_, broadcast),) = learner.messages_to_send()
    assert isinstance(broadcast, m.Snapshot)
    assert (broadcast.since, broadcast.weights.keys()) == (2, {"a"})


def test_a_snapshot_that_builds_on_a_version_that_was_never_published_is_refused() -> None:
    learner = LearnerSession("run", "L")
    with pytest.raises(LocalProtocolError):
        learner.publish(snapshot(1, since=0, a=1), 0.0)


def test_a_snapshot_interrupted_while_it_is_applied_is_applied_again() -> None:
    class Interrupted(RecordedWeights):
        is_due = True

        def set_weights(self, weights: Any) -> None:
            if Interrupted.is_due:
                Interrupted.is_due = False
                raise KeyboardInterrupt
            super().set_weights(weights)

    policies: dict[str, Any] = {"a": RecordedWeights(), "b": Interrupted()}
    slot = SnapshotSlot(policies, {}, "i", synchronize_filters=True)
    slot.offer(snapshot(1, a=1, b=1))
    with pytest.raises(KeyboardInterrupt):
        slot.between_steps()
    slot.offer(snapshot(2, since=1, a=2))
    slot.between_steps()
    assert slot.version == 2
    assert [policy.weights for policy in policies.values()] == [{"w": 2}, {"w": 1}]
