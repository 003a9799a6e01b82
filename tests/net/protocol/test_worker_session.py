"""A worker's session, fed message by message: its messages and its events."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest

from aiorl.errors import RemoteProtocolError
from aiorl.net.protocol import events as ev
from aiorl.net.protocol.worker_session import WorkerSession, WorkerSettings, WorkerState
from aiorl.net.wire import messages as m


def snapshot(version: int, learner: str = "L1") -> m.Snapshot:
    return m.Snapshot(version, {}, {}, {}, {}, learner)


def welcome(session: WorkerSession, version: int = 1, **changes: Any) -> m.Welcome:
    given = m.Welcome(3, 4, "run", "L1", {}, {}, snapshot(version), session.incarnation)
    return given._replace(**changes)


def make(**settings: Any) -> WorkerSession:
    numbers = itertools.count(1)
    return WorkerSession(WorkerSettings("w", "host", 7, **settings), lambda: f"i{next(numbers)}")


def registered(*, leased: int = 0, **settings: Any) -> WorkerSession:
    session = make(**settings)
    session.connected(0.0)
    session.receive(welcome(session), 0.0)
    if leased:
        session.receive(m.Lease(9, leased, 0), 0.0)
    session.messages_to_send()
    session.events()
    return session


def draft(lease_id: int, version: int = 1, **changes: Any) -> m.Samples:
    batches = {"p": {"obs": np.zeros(100, np.float32)}}
    given = m.Samples(0, lease_id, 10, 10, version, version, 1, 10, batches, {}, {}, {})
    return given._replace(**changes)


def sample(session: WorkerSession, count: int, now: float = 0.0) -> None:
    for _ in range(count):
        lease_id = session.start_fragment(1)
        assert lease_id is not None
        assert session.fragment_done(draft(lease_id), now)


def seqs(session: WorkerSession) -> list[int]:
    return [message.seq for message in session.messages_to_send() if isinstance(message, m.Samples)]


def kinds(session: WorkerSession) -> list[type]:
    return [type(message) for message in session.messages_to_send()]


# Registration
# --------------------------------------------------------------------------------------------------


def test_hello_is_said_on_connection_and_again_with_growing_waits() -> None:
    session = make(slot_hint=2)
    session.tick(0.0)
    assert session.messages_to_send() == [], "not without a connection"
    session.connected(0.0)
    assert session.messages_to_send() == [
        m.Hello(m.PROTOCOL_VERSION, "", "w", "i1", 2, "host", 7, "")
    ]
    said = []
    for tenth in range(1, 300):
        session.tick(tenth / 10)
        said += [tenth / 10] * len(session.messages_to_send())
    assert said == [0.5, 1.5, 3.5, 7.5, 12.5, 17.5, 22.5, 27.5]


def test_a_welcome_registers_and_heartbeats_begin() -> None:
    session = make()
    session.connected(0.0)
    session.messages_to_send()
    message = welcome(session)
    session.receive(message, 0.1)
    assert (session.state, session.slot, session.version) == (WorkerState.REGISTERED, 3, 1)
    (event,) = session.events()
    assert isinstance(event, ev.Registered)
    assert event.welcome is message
    beats = 0
    for tenth in range(2, 52):
        session.receive(m.LearnerBeat("L1", 1), tenth / 10)
        session.tick(tenth / 10)
        beats += len(session.messages_to_send())
    assert beats == 5


def test_a_welcome_for_an_older_incarnation_is_ignored() -> None:
    session = make()
    session.connected(0.0)
    session.receive(welcome(session, incarnation="i0"), 0.1)
    assert session.slot == 0


def test_messages_before_the_welcome_are_ignored() -> None:
    session = make()
    session.connected(0.0)
    for message in (m.Ack(5), m.Lease(1, 5, 0), snapshot(9), m.Call(1, "x", {})):
        session.receive(message, 0.1)
    session.broadcast(snapshot(9), 0.1)
    assert session.events() == []
    assert not session.may_sample(9)


def test_a_refusal_without_retry_ends_the_session() -> None:
    session = make()
    session.connected(0.0)
    session.receive(m.Refused("wrong run", False, m.RefusalCode.RUN, "i1"), 0.1)
    assert session.state is WorkerState.ENDED
    assert session.events() == [ev.WasRefused("wrong run", False, "wrong_run")]
    assert "wrong run" in session.status_text(1.0)
    session.messages_to_send()
    session.connected(1.0)
    session.tick(2.0)
    session.receive(m.Lease(1, 1, 1), 2.0)
    session.broadcast(snapshot(2), 2.0)
    assert session.messages_to_send() == session.events() == []


def test_a_full_learner_is_asked_again() -> None:
    session = make()
    session.connected(0.0)
    session.messages_to_send()
    session.receive(m.Refused("all 2 slots are taken", True, m.RefusalCode.FULL, "i1"), 0.1)
    assert session.incarnation == "i1"
    assert "all 2 slots are taken" in session.status_text(0.2)
    session.tick(0.6)
    assert kinds(session) == [m.Hello]


# Sampling
# --------------------------------------------------------------------------------------------------


def test_a_fragment_needs_a_lease_and_its_version() -> None:
    session = registered()
    assert not session.may_sample(1)
    assert session.start_fragment(1) is None
    session.receive(m.Lease(9, 1, 2), 0.0)
    assert session.start_fragment(1) is None
    assert session.may_sample(2)
    assert session.start_fragment(2) == 9
    assert session.start_fragment(2) is None


def test_fragments_are_numbered_and_totals_filled_in() -> None:
    session = registered(leased=5)
    first, second = session.start_fragment(1), session.start_fragment(1)
    assert first is not None
    assert second is not None
    session.fragment_done(draft(first), 0.0)
    assert session.beat().sampled_total == 10
    session.abandon_fragment(second)
    sample(session, 1)
    sent = [message for message in session.messages_to_send() if isinstance(message, m.Samples)]
    assert [(message.seq, message.sampled_total) for message in sent] == [(1, 10), (2, 20)]
    assert session.beat().sampled_total == 20


def test_an_abandoned_fragment_leaves_its_lease_unused() -> None:
    session = registered(leased=1)
    lease_id = session.start_fragment(1)
    assert lease_id is not None
    assert session.abandon_fragment(lease_id)
    assert not session.abandon_fragment(lease_id)
    assert session.may_sample(1)


def test_unacknowledged_fragments_are_bounded() -> None:
    """R7: the sampler waits for a slow learner."""
    session = registered(leased=10, max_unacked=3)
    sample(session, 3)
    assert not session.may_sample(1)
    assert "3" in session.status_text(0.0)
    session.receive(m.Ack(2), 0.1)
    assert session.may_sample(1)
    assert session.num_unacked == 1
    session = registered(leased=10, max_unacked_bytes=800)
    sample(session, 2)
    assert not session.may_sample(1)


def test_fragments_are_sent_again_when_asked() -> None:
    session = registered(leased=10)
    sample(session, 2)
    assert seqs(session) == [1, 2]
    session.receive(m.Ack(1, resend=True), 0.2)
    assert seqs(session) == [2]


# Connection and learner lost
# ------------------------------------------------------------------------------


def test_after_a_reconnect_hello_comes_first_and_then_missing_fragments() -> None:
    session = registered(leased=10)
    sample(session, 2)
    session.disconnected(1.0, "reset by peer")
    assert session.messages_to_send() == []
    assert "reset by peer" in session.status_text(1.0)
    sample(session, 1)
    assert session.messages_to_send() == [], "sampling continues, sending does not"
    session.connected(2.0)
    (hello,) = session.messages_to_send()
    assert (hello.incarnation, hello.slot_hint, hello.learner_incarnation) == ("i1", 3, "L1")
    session.tick(2.1)
    assert session.messages_to_send() == []
    session.receive(welcome(session, version=2, acked_seq=1), 2.2)
    assert seqs(session) == [2, 3]
    assert [type(event) for event in session.events()] == [ev.SnapshotReceived]


def test_a_silent_learner_pauses_sampling_until_it_answers() -> None:
    """LESSONS 12."""
    session = registered(leased=10)
    session.events()
    for second in range(1, 11):
        session.tick(float(second))
        assert session.state is WorkerState.REGISTERED
    session.messages_to_send()
    session.tick(10.5)
    assert session.state is WorkerState.PAUSED
    assert not session.may_sample(1)
    assert [type(event) for event in session.events()] == [ev.LearnerLost]
    assert kinds(session) == [m.Hello]
    session.tick(20.0)
    session.tick(23.0)
    session.tick(27.0)
    session.messages_to_send()
    assert re.search(r"\b27 s\b.*\b5 s\b", session.status_text(27.0))
    session.receive(m.LearnerBeat("L1", 1), 28.0)
    session.tick(28.1)
    assert kinds(session) == [m.Hello], "it lives: not at the next turn but now"
    session.receive(welcome(session), 28.2)
    assert [type(event) for event in session.events()] == [ev.LearnerBack]
    assert session.may_sample(1)


def test_a_worker_that_stood_still_first_reads_waiting_messages() -> None:
    session = registered()
    session.tick(0.5)
    session.tick(60.0)
    assert session.state is WorkerState.REGISTERED
    for second in range(61, 70):
        session.tick(float(second))
        assert session.state is WorkerState.REGISTERED
    session.tick(70.0)
    assert session.state is WorkerState.PAUSED


def test_a_standstill_before_the_last_message_does_not_delay_detection_of_a_silent_learner() -> (
    None
):
    session = registered()
    session.tick(0.5)
    session.receive(m.LearnerBeat("L1", 1), 60.0)
    for second in range(60, 72):
        session.tick(float(second))
    assert session.state is WorkerState.PAUSED


@pytest.mark.parametrize(
    "end",
    [
        lambda session: session.receive(m.Refused("ended", True, m.RefusalCode.ENDED, "i1"), 1.0),
        lambda session: session.receive(m.LearnerBeat("L2", 5), 1.0),
        lambda session: session.broadcast(m.LearnerBeat("L2", 5), 1.0),
        lambda session: session.receive(welcome(session, learner_incarnation="L2"), 1.0),
        lambda session: session.receive(m.Bye("back soon", False), 1.0),
    ],
)
def test_the_end_of_an_incarnation_drops_everything_and_starts_again(end: Any) -> None:
    session = registered(leased=10)
    sample(session, 1)
    begun = session.start_fragment(1)
    assert begun is not None
    session.messages_to_send()
    session.events()
    end(session)
    assert (session.state, session.incarnation, session.slot, session.num_unacked) == (
        WorkerState.CONNECTING,
        "i2",
        0,
        0,
    )
    assert isinstance(session.events()[-1], ev.Reincarnated)
    assert not session.fragment_done(draft(begun), 1.0)
    assert not session.abandon_fragment(begun)
    assert session.sampled_total == 0
    (hello,) = session.messages_to_send()
    assert (hello.incarnation, hello.slot_hint, hello.learner_incarnation) == ("i2", 3, "")


def test_late_refusals_of_an_older_incarnation_change_nothing() -> None:
    session = registered()
    for _ in range(5):
        session.receive(m.Refused("ended", True, m.RefusalCode.ENDED, "i1"), 1.0)
    assert session.incarnation == "i2"


def test_hello_first_is_answered_with_hello_but_not_in_a_storm() -> None:
    session = registered()
    for _ in range(5):
        session.receive(m.Refused("say hello", True, m.RefusalCode.HELLO_FIRST), 1.0)
    assert kinds(session) == [m.Hello]
    assert session.incarnation == "i1"
    assert session.state is WorkerState.REGISTERED


def test_goodbyes() -> None:
    session = registered()
    session.broadcast(m.Bye("back soon", False), 1.0)
    assert session.events()[0] == ev.Shutdown("back soon", final=False)
    session.receive(m.Bye("back soon", False), 1.0)
    assert session.events() == []
    assert "back soon" in session.status_text(1.0)
    session.receive(m.Bye("done", True), 2.0)
    assert session.events() == [ev.Shutdown("done", final=True)]
    assert session.state is WorkerState.ENDED


# Snapshots
# --------------------------------------------------------------------------------------------------


def test_newer_snapshots_are_taken_and_older_or_foreign_ones_ignored() -> None:
    session = registered()
    for version, learner in ((3, "L1"), (2, "L1"), (3, "L1"), (9, "L0"), (5, "L1")):
        session.broadcast(snapshot(version, learner), 0.1)
        session.receive(snapshot(version, learner), 0.1)
    assert [event.snapshot.version for event in session.events()] == [3, 5]


@pytest.mark.parametrize("sign", [m.LearnerBeat("L1", 4), m.Lease(9, 1, 4)])
def test_a_missing_snapshot_is_requested_less_and_less_often(sign: m.Message) -> None:
    session = registered()
    session.receive(sign, 0.0)
    asked = []
    for tenth in range(200):
        session.receive(m.LearnerBeat("L1", 1), tenth / 10)
        session.tick(tenth / 10)
        asked += [
            tenth / 10 for message in session.messages_to_send() if message == m.SnapshotRequest(1)
        ]
    assert asked == [1.0, 3.0, 7.0, 15.0]
    assert isinstance(sign, m.LearnerBeat) or "4" in session.status_text(20.0)
    session.receive(snapshot(4), 20.0)
    session.tick(30.0)
    assert m.SnapshotRequest not in kinds(session)


# Saying
# --------------------------------------------------------------------------------------------------


def call_of(session: WorkerSession) -> ev.CallRequested:
    (event,) = (event for event in session.events() if isinstance(event, ev.CallRequested))
    return event


def replies(session: WorkerSession) -> list[tuple[int, bool, Any]]:
    return [
        (message.call_id, message.ok, message.result)
        for message in session.messages_to_send()
        if isinstance(message, m.Reply)
    ]


def test_a_call_is_run_and_answered_once() -> None:
    session = registered()
    session.receive(m.Call(5, "ping", {"x": 1}), 0.0)
    call = call_of(session)
    assert (call.call_id, call.method, call.args) == (5, "ping", {"x": 1})
    session.receive(m.Call(5, "ping", {"x": 1}), 0.0)  # repeated after a welcome
    assert session.events() == []
    session.reply(call, True, "pong", 0.1)
    session.reply(call, True, "again", 0.1)
    assert replies(session) == [(5, True, "pong")]


def test_an_answer_waits_for_the_next_welcome_of_the_same_learner() -> None:
    session = registered()
    session.receive(m.Call(5, "ping", {}), 0.0)
    call = call_of(session)
    session.disconnected(0.2)
    session.reply(call, True, "pong", 0.3)
    assert session.messages_to_send() == []
    session.connected(0.4)
    session.receive(welcome(session), 0.5)
    assert replies(session) == [(5, True, "pong")]


def test_a_repeated_call_whose_answer_was_lost_is_not_run_again() -> None:
    session = registered()
    session.receive(m.Call(5, "ping", {}), 0.0)
    session.reply(call_of(session), True, "pong", 0.1)
    session.messages_to_send()  # lost with the connection
    session.receive(m.Call(5, "ping", {}), 0.2)
    assert session.events() == []
    ((call_id, ok, result),) = replies(session)
    assert (call_id, ok) == (5, False)
    assert "worker 3" in result["lost"]


def test_calls_of_an_earlier_learner_are_not_answered_to_the_next_one() -> None:
    session = registered()
    session.receive(m.Call(1, "ping", {}), 0.0)
    former = call_of(session)
    session.receive(m.LearnerBeat("L2", 0), 0.1)
    session.receive(welcome(session, learner_incarnation="L2"), 0.2)
    session.receive(m.Call(1, "other", {}), 0.3)
    session.reply(former, True, "pong", 0.4)
    assert replies(session) == []
    session.reply(call_of(session), True, "of L2", 0.5)
    assert replies(session) == [(1, True, "of L2")]


def test_a_worker_runs_a_limited_number_of_calls_at_a_time() -> None:
    session = registered()
    for number in range(1, 258):
        session.receive(m.Call(number, "ping", {}), 0.0)
    assert len(session.events()) == 256
    assert [(number, ok) for number, ok, _ in replies(session)] == [(257, False)]


def test_a_fatal_failure_and_leaving_end_the_session_after_a_last_message() -> None:
    session = registered(leased=1)
    sample(session, 1)
    session.messages_to_send()
    session.failure("EnvError", "boom", "", 1.0)
    beat, failure = session.messages_to_send()
    assert beat.sampled_total == 10
    assert failure.fatal
    assert session.state is WorkerState.ENDED
    session = registered(leased=1)
    sample(session, 1)
    session.messages_to_send()
    session.leaving("SIGTERM", 1.0)
    assert session.messages_to_send() == [m.Leaving("SIGTERM", 10, 0)]
    assert session.state is WorkerState.ENDED


def test_a_worker_reports_immediately_that_its_environment_is_built() -> None:
    session = registered()
    said = []
    for tenth, doing in enumerate(
        ["waiting", m.BUILDING, m.BUILDING, "sampling", "sampling", "waiting"], 1
    ):
        session.note_progress(doing)
        session.tick(tenth / 10)
        said += [
            message.state for message in session.messages_to_send() if isinstance(message, m.Beat)
        ]
    assert said[-2:] == [m.BUILDING, "sampling"]
    assert len(said) <= 3


@pytest.mark.parametrize("message", [m.Beat(1, ""), m.Leaving("x")])
def test_messages_that_only_workers_send_are_refused(message: m.Message) -> None:
    session = registered()
    with pytest.raises(RemoteProtocolError):
        session.receive(message, 0.0)
    with pytest.raises(RemoteProtocolError):
        session.broadcast(m.Ack(1), 0.0)


def test_the_status_differs_from_state_to_state() -> None:
    session = make()
    said = [session.status_text(0.0)]
    for step in (
        lambda: session.connected(0.0),
        lambda: session.receive(m.LearnerBeat("L1", -1), 0.0),
        lambda: session.receive(welcome(session), 0.0),
        lambda: session.receive(m.Lease(1, 1, 1), 0.0),
        lambda: session.start_fragment(1),
        lambda: session.disconnected(1.0),
    ):
        step()
        said.append(session.status_text(1.0))
    assert len(set(said)) == 7
    session.note_progress("in env.step", 2.0)
    assert session.beat() == m.Beat(0, "in env.step", 2.0)
