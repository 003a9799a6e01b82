"""The learner's session, fed message by message: its messages and its events."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiorl.config.worker import TransportConfig
from aiorl.errors import BadFrame, LocalProtocolError
from aiorl.net.protocol import events as ev
from aiorl.net.protocol.learner_session import BROADCAST, LearnerSession, LearnerSettings
from aiorl.net.protocol.pacing import Pacing
from aiorl.net.wire import messages as m

A, B = b"peer-a", b"peer-b"


def snapshot(version: int) -> m.Snapshot:
    return m.Snapshot(version, {"p": {"w": np.ones(2, np.float32)}}, {}, {}, {"timestep": 0})


def hello(name: str = "a", **changes: Any) -> m.Hello:
    given = m.Hello(m.PROTOCOL_VERSION, "", f"w-{name}", f"i-{name}", 0, "host", 7, "")
    return given._replace(**changes)


def fragment(seq: int, lease: int, /, **changes: Any) -> m.Samples:
    given = m.Samples(seq, lease, 10, 10, 1, 1, 1, 10, {}, {}, {}, {}, sampled_total=10 * seq)
    return given._replace(**changes)


def make(*joined: str, **settings: Any) -> LearnerSession:
    """A session with these workers: A's is "a", B's is "b"."""
    times = {name: settings.pop(name) for name in settings.keys() & TransportConfig.model_fields}
    session = LearnerSession(
        "run", "learner-1", LearnerSettings(TransportConfig(**times), **settings)
    )
    session.begin({"env": "x"}, {"p": {"graph": b"g", "spec": {}}}, 0.0)
    session.publish(snapshot(1), 0.0)
    for name in joined:
        join(session, b"peer-" + name.encode(), name)
    return session


def join(
    session: LearnerSession, peer: bytes = A, name: str = "a", now: float = 0.0, **changes: Any
) -> m.Welcome:
    session.receive(peer, hello(name, **changes), now, key=f"key-{name}")
    welcome = next(
        message for _, message in session.messages_to_send() if isinstance(message, m.Welcome)
    )
    session.events()
    return welcome


def lease(session: LearnerSession, slot: int = 1, fragments: int = 5, min_version: int = 1) -> int:
    return session.leases.grant(slot, fragments, min_version, 0.0).lease.lease_id


def sent(session: LearnerSession, *kinds: type) -> list[Any]:
    return [
        message
        for _, message in session.messages_to_send()
        if not kinds or isinstance(message, kinds)
    ]


def told(session: LearnerSession, *kinds: type) -> list[Any]:
    return [event for event in session.events() if not kinds or isinstance(event, kinds)]


# Registration
# --------------------------------------------------------------------------------------------------


def test_a_worker_gets_all_it_needs_before_its_first_fragment() -> None:
    """R4: index, config, num_workers, weights, filters and global vars."""
    session = make(num_workers=2)
    known = m.Snapshot(
        2, {"p": {"w": np.ones(2)}}, {"p": {"n": np.array(5)}}, {"i-z": 4}, {"timestep": 70}
    )
    session.publish(known, 0.0)
    session.receive(A, hello(), 0.0)
    ((peer, welcome),) = session.messages_to_send()
    assert peer == A
    assert (welcome.slot, welcome.num_workers, welcome.run_id) == (1, 2, "run")
    assert welcome.config == {"env": "x"}
    assert welcome.graphs == {"p": {"graph": b"g", "spec": {}}}
    assert (welcome.snapshot.version, welcome.snapshot.learner_incarnation) == (2, "learner-1")
    assert welcome.snapshot.weights == {"p": {"w": pytest.approx(np.ones(2))}}
    assert welcome.snapshot.filters == {"p": {"n": 5}}
    assert (welcome.snapshot.filter_acks, welcome.snapshot.global_vars) == (
        {"i-z": 4},
        {"timestep": 70},
    )
    assert session.events() == [ev.WorkerJoined(1, "i-a", "host", 7, local=False)]


def test_indices_begin_at_1_and_no_two_live_workers_have_the_same() -> None:
    """R4: the index of a worker that has left goes to the next one."""
    session = make(num_workers=2)
    peers = [f"peer-{number}".encode() for number in range(6)]
    slots = [join(session, peer, name=str(number)).slot for number, peer in enumerate(peers)]
    assert slots == [1, 2, 3, 4, 5, 6]
    session.receive(peers[2], m.Leaving("done", 0, 0), 1.0)
    session.messages_to_send()
    assert join(session, A, "a", 1.0).slot == 3
    assert join(session, B, "b", 1.0, slot_hint=9, run_id="run").slot == 9
    assert join(session, b"c", "c", 1.0, slot_hint=9).slot == 7
    assert session.slots == [1, 2, 3, 4, 5, 6, 7, 9]


def test_a_worker_gets_the_number_of_earlier_workers_in_its_slot() -> None:
    """Its seeds must differ from theirs."""
    session = make()
    for number, fragments in enumerate([0, 3, 1, 0]):
        config = join(session, A, str(number), float(number)).config
        for seq in range(1, fragments + 1):
            session.receive(A, fragment(seq, lease(session)), float(number))
        session.mark_lost(1, "killed", float(number))
        session.messages_to_send()
    assert config == {"env": "x", "life": 2}


def test_early_workers_wait_and_are_admitted_in_the_order_they_came() -> None:
    session = LearnerSession("run", "learner-1")
    for peer, name in ((A, "a"), (B, "b"), (A, "a")):
        session.receive(peer, hello(name), 0.0)
        assert [type(message) for message in sent(session)] == [m.LearnerBeat]
    session.begin({}, {}, 0.0)
    assert session.num_waiting == 2
    session.publish(snapshot(1), 0.0)
    assert [(event.slot, event.incarnation) for event in told(session)] == [(1, "i-a"), (2, "i-b")]


def test_a_waiting_worker_that_falls_silent_or_leaves_is_forgotten() -> None:
    session = LearnerSession("run", "learner-1")
    session.receive(A, hello("a"), 0.0)
    session.receive(B, hello("b"), 9.0)
    session.tick(11.0)
    assert session.num_waiting == 1
    assert (B, m.LearnerBeat("learner-1", -1)) in session.messages_to_send()
    session.peer_gone(B, 11.0)
    assert session.num_waiting == 0


def test_a_reserved_slot_is_kept_for_the_local_worker() -> None:
    session = make()
    session.reserve_slot(1, "w-local")
    assert join(session, A, "a").slot == 2
    session.receive(B, hello("local", slot_hint=1), 0.0)
    (joined,) = told(session)
    assert (joined.slot, joined.local) == (1, True)
    session.mark_lost(1, "killed", 1.0)
    assert join(session, b"c", "c").slot == 1


def test_more_workers_than_slots_are_asked_to_try_again() -> None:
    session = make("a", max_workers=1)
    session.receive(B, hello("b"), 0.0)
    (refusal,) = sent(session)
    assert refusal.retry
    assert refusal.code == m.RefusalCode.FULL


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"protocol": 99}, m.RefusalCode.VERSION),
        ({"run_id": "other"}, m.RefusalCode.RUN),
        ({"worker_id": ""}, m.RefusalCode.VIOLATION),
        ({"incarnation": ""}, m.RefusalCode.VIOLATION),
    ],
)
def test_a_wrong_hello_is_refused_and_the_peer_dropped(changes: dict[str, Any], code: str) -> None:
    """Bad input: wrong run id or protocol version."""
    session = make()
    session.receive(A, hello(**changes), 0.0)
    (refusal,) = sent(session)
    assert (refusal.retry, refusal.code) == (False, code)
    assert [type(event) for event in told(session)] == [ev.PeerRejected]
    session.receive(A, hello(), 0.0)
    assert sent(session) == told(session) == []


def test_a_second_hello_of_a_live_incarnation_is_answered_in_full() -> None:
    session = make("a")
    lease_id = lease(session)
    session.receive(A, fragment(1, lease_id), 0.5)
    session.messages_to_send()
    session.events()
    session.receive(A, hello(learner_incarnation="learner-1"), 1.0, key="key-a")
    welcome, granted = sent(session)
    assert (welcome.slot, welcome.acked_seq) == (1, 1)
    assert granted == m.Lease(lease_id, 5, 1)
    session.receive(A, hello(learner_incarnation="learner-1"), 1.1, key="key-a")
    assert sent(session) == [], "not twice in a moment"
    assert told(session) == []


def test_a_worker_of_an_earlier_learner_is_asked_to_come_back_as_new() -> None:
    session = make()
    session.receive(A, hello(learner_incarnation="learner-0"), 0.0)
    (refusal,) = sent(session)
    assert (refusal.retry, refusal.code, refusal.incarnation) == (True, m.RefusalCode.ENDED, "i-a")
    assert join(session, A, "a2", worker_id="w-a").slot == 1


@pytest.mark.parametrize(
    ("peer", "worker_id"), [(B, "w-a"), (A, "w-b")], ids=["of a process", "over a connection"]
)
def test_a_new_incarnation_ends_the_old_one_immediately(peer: bytes, worker_id: str) -> None:
    session = make("a")
    session.receive(peer, hello("b", worker_id=worker_id), 1.0, key="key-a")
    lost, joined = told(session)
    assert (lost.incarnation, joined.incarnation, joined.slot) == ("i-a", "i-b", 1)


# Identity
# --------------------------------------------------------------------------------------------------


def test_an_incarnation_is_bound_to_its_key() -> None:
    session = make("a")
    for name in ("i-a", "i-other"):
        peer = name.encode()
        session.receive(peer, hello("a", incarnation=name), 1.0, key="another key")
        (refusal,) = sent(session)
        assert refusal.code == m.RefusalCode.VIOLATION
        assert [event.peer for event in told(session)] == [peer]
    assert session.slots == [1], "the true worker is not disturbed"


@pytest.mark.parametrize("is_known", [True, False])
def test_a_worker_comes_back_at_once_over_another_connection_whether_the_old_one_is_known_to_be_gone(
    is_known: bool,
) -> None:
    session = make("a")
    if is_known:
        session.peer_gone(A, 1.0)
    session.receive(B, hello(), 1.1, key="key-a")
    assert [(peer, type(message)) for peer, message in session.messages_to_send()] == [
        (B, m.Welcome)
    ]
    session.receive(A, m.Beat(0, ""), 1.2)
    assert [refusal.code for refusal in sent(session)] == [m.RefusalCode.HELLO_FIRST]
    session.peer_gone(A, 1.3)
    session.tick(5.0)
    assert session.knows(B)


# Fragments
# --------------------------------------------------------------------------------------------------


def test_fragments_are_accepted_in_order_acknowledged_together_and_entered() -> None:
    session = make("a")
    lease_id = lease(session)
    for seq in (1, 2, 3):
        session.receive(A, fragment(seq, lease_id), 0.5)
    assert session.messages_to_send() == [(A, m.Ack(3))]
    assert session.messages_to_send() == []
    assert [event.message.seq for event in told(session, ev.SamplesAccepted)] == [1, 2, 3]
    assert session.ledger.queued == 30
    assert session.leases.outstanding(1) == 2


def test_duplicate_fragments_are_dropped() -> None:
    """D5; bad input: replayed frames."""
    session = make("a")
    lease_id = lease(session)
    for _ in range(3):
        session.receive(A, fragment(1, lease_id), 0.5)
    assert sent(session) == [m.Ack(1)]
    assert len(told(session)) == 1
    assert session.ledger.queued == 10


@pytest.mark.parametrize(
    "changes",
    [
        {"lease_id": 12345},
        {"first_version": 0},
        {"last_version": 2},
        {"last_version": 0},
        {"sampled_total": 5},
        {"abandoned_total": 11},
        {"seq": 3},
        {"sampled_total": 2**53},
    ],
)
def test_a_fragment_against_the_rules_costs_the_peer_its_place(changes: dict[str, Any]) -> None:
    session = make("a", "b")
    lease_id = lease(session)
    session.receive(A, fragment(1, lease_id, **changes), 1.0)
    (refusal,) = sent(session)
    assert (refusal.retry, refusal.code) == (False, m.RefusalCode.VIOLATION)
    lost, rejected = told(session)
    assert (lost.slot, rejected.peer) == (1, A)
    assert session.slots == [2]
    session.ledger.check()


@pytest.mark.parametrize("claim", [m.Beat(2**53, "sampling"), m.Leaving("bye", 2**53)])
def test_no_worker_can_claim_more_steps_than_its_leases_allow(claim: m.Message) -> None:
    session = make("a")
    lease(session, fragments=3)
    session.receive(A, m.Beat(4 << 24, "sampling"), 1.0)
    assert session.slots == [1]
    session.receive(A, claim, 2.0)
    assert session.slots == []
    assert session.ledger.sampled == 4 << 24
    session.ledger.check()


# Life and death
# --------------------------------------------------------------------------------------------------


def test_a_silent_worker_is_lost_and_its_steps_in_flight_are_counted() -> None:
    """R8: within the heartbeat limit."""
    session = make("a")
    lease_id = lease(session)
    session.receive(A, fragment(1, lease_id, sampled_total=25), 0.5)
    for second in range(1, 11):
        session.tick(float(second))
        assert session.slots == [1]
    told(session)
    session.tick(10.6)
    (lost,) = told(session)
    assert (lost.incarnation, lost.lost_env_steps, [*session.ledger.lost.values()]) == (
        "i-a",
        15,
        [15],
    )
    session.messages_to_send()
    session.receive(A, m.Beat(30, ""), 11.0)
    (refusal,) = sent(session)
    assert (refusal.retry, refusal.code, refusal.incarnation) == (True, m.RefusalCode.ENDED, "i-a")
    session.receive(A, hello(learner_incarnation="learner-1"), 11.0)
    assert sent(session)[0].code == m.RefusalCode.ENDED
    session.receive(A, hello(), 11.0)
    assert sent(session)[0].code == m.RefusalCode.ENDED


def test_a_buried_worker_with_many_messages_in_flight_is_not_dropped() -> None:
    session = make("a")
    session.mark_lost(1, "killed", 1.0)
    for seq in range(500):
        session.receive(A, fragment(seq + 1, 1), 1.0)
    assert not any(isinstance(event, ev.PeerRejected) for event in session.events())
    session.messages_to_send()
    assert join(session, A, "a2", 1.5).slot == 1


def test_a_worker_that_is_marked_as_lost_gets_the_reason() -> None:
    session = make("a")
    session.mark_lost(1, "it sent a malformed fragment: no rewards", 1.0)
    (refusal,) = sent(session, m.Refused)
    assert refusal.code == m.RefusalCode.ENDED
    assert "it sent a malformed fragment: no rewards" in refusal.reason


def test_any_message_counts_as_life() -> None:
    session = make("a")
    for second in range(1, 40):
        session.receive(A, m.SnapshotRequest(1), float(second))
        session.tick(second + 0.5)
    assert session.slots == [1]


def test_a_learner_that_stood_still_does_not_bury_its_workers() -> None:
    session = make("a")
    session.tick(1.0)
    session.tick(31.0)
    assert session.slots == [1]
    session.tick(36.0)
    session.tick(40.9)
    session.tick(42.0)
    assert session.slots == []


def test_heartbeats_go_to_each_worker_and_to_all() -> None:
    session = make("a")
    session.tick(1.0)
    beat = m.LearnerBeat("learner-1", 1)
    assert session.messages_to_send() == [(BROADCAST, beat), (A, beat)]
    session.tick(1.5)
    assert session.messages_to_send() == []


def test_a_lost_workers_share_is_dealt_to_the_others() -> None:
    session = make("a", "b")
    session.deal(1, 4)
    assert [(peer, message.fragments) for peer, message in session.messages_to_send()] == [
        (A, 2),
        (B, 2),
    ]
    session.mark_lost(1, "killed", 1.0)
    assert [(peer, message.fragments) for peer, message in session.messages_to_send()[1:]] == [
        (B, 2)
    ]
    session.mark_process_lost("w-b", "killed", 1.0)
    session.messages_to_send()
    session.receive(b"c", hello("c"), 2.0)
    assert [message.fragments for message in sent(session, m.Lease)] == [4]


def test_streaming_workers_share_one_budget() -> None:
    session = make("a", "b")
    session.leases.begin_streaming(Pacing(2, 0, 3))
    session.stream(0, 1)
    leases = {peer: message for peer, message in session.messages_to_send()}
    assert {peer: message.fragments for peer, message in leases.items()} == {A: 1, B: 1}
    session.receive(A, fragment(1, leases[A].lease_id), 0.5)
    session.messages_to_send()
    session.stream(1, 1)
    assert sent(session, m.Lease) == [], "queued fragments count"
    session.stream(0, 1)
    assert [(message.lease_id, message.fragments) for message in sent(session, m.Lease)] == [
        (leases[A].lease_id, 2)
    ]
    session.mark_lost(1, "killed", 1.0)
    session.messages_to_send()
    session.stream(0, 1)
    assert sent(session, m.Lease) == [], "one whose speed is not known has one fragment at a time"


@pytest.mark.parametrize("stood_still", [0.0, 100.0])
def test_a_worker_that_beats_but_never_samples_is_reported_and_its_share_dealt_again(
    stood_still: float,
) -> None:
    """Time in which the learner stood still counts for no worker; the fragment that arrived
    meanwhile is read first.
    """
    session = make("a", "b", lease_timeout_s=5.0)
    session.deal(1, 2)
    leases = {peer: message for peer, message in session.messages_to_send()}
    session.tick(0.5)
    session.receive(A, fragment(1, leases[A].lease_id), 0.5 + stood_still)
    session.events()
    for tenth in range(60):
        now = 0.5 + stood_still + tenth / 10
        for peer in (A, B):
            session.receive(peer, m.Beat(10 if peer == A else 0, "sampling"), now)
        session.tick(now)
    assert told(session) == [ev.LeaseOverdue(2, 1, pytest.approx(5.1, abs=0.11))]
    dealt = {
        peer: message
        for peer, message in session.messages_to_send()
        if isinstance(message, m.Lease)
    }
    assert dealt[A].fragments == 1
    assert dealt[A].lease_id not in (leases[A].lease_id, leases[B].lease_id)


def test_a_worker_that_leaves_frees_its_slot_immediately() -> None:
    session = make("a")
    session.receive(A, m.Leaving("SIGTERM", 12, 0), 1.0)
    (lost,) = told(session)
    assert (lost.incarnation, lost.lost_env_steps, [*session.ledger.lost.values()]) == (
        "i-a",
        12,
        [12],
    )
    assert "SIGTERM" in lost.reason
    assert sent(session) == []


def test_failures_are_passed_on_with_their_traceback() -> None:
    session = make("a")
    session.receive(A, m.Failure("EnvError", "boom", "Traceback...", fatal=False), 1.0)
    assert told(session) == [ev.WorkerFailed(1, "EnvError", "boom", "Traceback...", "host")]
    session.receive(A, m.Failure("EnvError", "boom", "", fatal=True), 1.0)
    assert [type(event) for event in told(session)] == [ev.WorkerFailed, ev.WorkerLost]


def test_heartbeats_say_what_a_worker_does() -> None:
    session = make("a")
    session.receive(A, m.Beat(50, "in env.step", 3.5), 1.0)
    (worker,) = session.workers
    assert (worker.state, worker.in_env_s, worker.last_heard) == ("in env.step", 3.5, 1.0)
    assert session.ledger.in_flight == 50
    session.receive(A, m.Beat(60, "", 0.0, abandoned_total=5), 1.0)
    assert session.ledger.in_flight == 55, "but for what it will never send"


# Snapshots, calls, goodbye
# --------------------------------------------------------------------------------------------------


def test_snapshots_are_broadcast_and_given_on_request_but_not_too_often() -> None:
    session = make("a")
    session.publish(snapshot(2), 0.0)
    ((target, message),) = session.messages_to_send()
    assert target is BROADCAST
    assert (message.version, message.learner_incarnation) == (2, "learner-1")
    session.receive(A, m.SnapshotRequest(1), 1.0)
    session.receive(A, m.SnapshotRequest(1), 1.1)
    session.receive(A, m.SnapshotRequest(2), 3.0)
    assert [message.version for message in sent(session)] == [2]
    with pytest.raises(LocalProtocolError):
        session.publish(snapshot(2), 0.0)


def test_a_call_is_answered_once_by_the_called_worker() -> None:
    session = make("a", "b")
    first = session.call(1, "ping", {"x": 1}, num_bytes=0)
    assert [(message.method, message.args) for message in sent(session)] == [("ping", {"x": 1})]
    session.receive(B, m.Reply(first, True, "forged"), 1.0)
    session.receive(A, m.Reply(first, True, "pong"), 1.0)
    session.receive(A, m.Reply(first, True, "pong"), 1.0)
    (event,) = told(session)
    assert (event.slot, event.call_id, event.ok, event.result) == (1, first, True, "pong")
    lost = session.call(1, "ping", {}, num_bytes=0)
    session.mark_lost(1, "killed", 2.0)
    join(session, A, "a2", 3.0)
    session.receive(A, m.Reply(lost, True, "pong"), 3.0)
    assert told(session, ev.CallReplied) == []
    with pytest.raises(LocalProtocolError, match="9"):
        session.call(9, "x", {}, num_bytes=0)


def test_calls_of_a_lost_worker_end_and_others_go_their_way() -> None:
    session = make("a", "b")
    sent_call = session.call(1, "ping", {}, num_bytes=0)
    other = session.call(2, "ping", {}, num_bytes=0)
    waiting = [session.call(1, "ping", {}, num_bytes=0) for _ in range(64)][-1]
    session.mark_lost(1, "killed", 2.0)
    lost = told(session, ev.CallLost)
    assert {sent_call, waiting} <= {event.call_id for event in lost}
    assert {event.reason for event in lost} == {"killed"}
    session.receive(B, m.Reply(other, True, "pong"), 2.0)
    assert [event.call_id for event in told(session, ev.CallReplied)] == [other]


@pytest.mark.parametrize(("num_bytes", "at_a_time"), [(0, 64), (40 << 20, 1), (1 << 30, 1)])
def test_a_worker_gets_a_limited_number_of_calls_and_bytes_at_a_time_in_order(
    num_bytes: int, at_a_time: int
) -> None:
    session = make("a")
    numbers = [session.call(1, "ping", {}, num_bytes=num_bytes) for _ in range(66)]
    stacks = session.call(1, "stacks", {}, num_bytes=0)
    assert [message.call_id for message in sent(session)] == [*numbers[:at_a_time], stacks]
    session.receive(A, m.Reply(numbers[0], True, None), 1.0)
    session.receive(A, m.Reply(stacks, True, ""), 1.0)
    assert [message.call_id for message in sent(session)] == [numbers[at_a_time]]


def test_calls_without_an_answer_are_repeated_after_each_welcome() -> None:
    session = make("a")
    number = session.call(1, "ping", {"x": 1}, num_bytes=0)
    sent(session)
    session.peer_gone(A, 1.0)
    later = session.call(1, "ping", {}, num_bytes=0)
    assert sent(session) == []
    session.receive(B, hello("a"), 2.0, key="key-a")
    calls = [message for message in sent(session) if isinstance(message, m.Call)]
    assert [message.call_id for message in calls] == [number, later]


@pytest.mark.parametrize("message", [fragment(0, 1), m.Reply(3, True, None)])
def test_a_worker_that_keeps_sending_needless_messages_is_dropped(message: m.UpMessage) -> None:
    session = make("a", "b")
    for _ in range(1 << 16):
        session.receive(A, message, 1.0)
    assert session.slots == [1, 2]
    session.receive(A, message, 1.0)
    assert session.slots == [2]


def test_each_connected_worker_gets_one_acknowledgement_after_all_other_messages() -> None:
    session = make()
    leases = []
    for peer, name in ((A, "a"), (B, "b")):
        join(session, peer, name)
        leases.append(lease(session, len(leases) + 1))
    for seq in (1, 2):
        session.receive(A, fragment(seq, leases[0]), 1.0)
        session.receive(B, fragment(seq, leases[1]), 1.0)
    session.peer_gone(B, 1.0)
    session.call(1, "ping", {}, num_bytes=0)
    assert [type(message) for message in sent(session)] == [m.Call, m.Ack]
    session.receive(A, fragment(3, leases[0]), 1.0)
    assert [message.seq for message in sent(session)] == [3]


def test_goodbye_reaches_workers_and_latecomers() -> None:
    session = make("a")
    session.shutdown("the run is over", True)
    bye = m.Bye("the run is over", True)
    assert session.messages_to_send() == [(BROADCAST, bye), (A, bye)]
    session.receive(B, hello("b"), 1.0)
    assert session.messages_to_send() == [(B, bye)]


# Bad peers
# --------------------------------------------------------------------------------------------------


def test_samples_before_hello_are_refused_and_finally_the_sender_is_dropped() -> None:
    session = make("a")
    for _ in range(3):
        session.receive(B, fragment(1, 1), 1.0)
        assert [refusal.code for refusal in sent(session)] == [m.RefusalCode.HELLO_FIRST]
    assert told(session) == []
    for _ in range(100):
        session.receive(B, fragment(1, 1), 1.0)
    assert [event.peer for event in told(session)] == [B]
    assert len(sent(session)) == 62
    assert session.slots == [1]


def test_a_stranger_is_dropped_after_one_message_far_too_large_for_a_hello() -> None:
    session = make()
    session.unread(A, 1 << 16)
    assert [refusal.code for refusal in sent(session)] == [m.RefusalCode.HELLO_FIRST]
    session.unread(A, (1 << 16) + 1)
    assert [refusal.code for refusal in sent(session)] == [m.RefusalCode.VIOLATION]
    assert len(told(session)) == 1
    session.unread(A, 1 << 20)
    assert sent(session) == told(session) == []


def test_a_lost_worker_may_have_many_messages_in_flight_but_not_endlessly_many() -> None:
    session = make("a")
    assert session.knows(A)
    session.mark_lost(1, "killed", 1.0)
    assert not session.knows(A)
    session.messages_to_send()
    for _ in range(4096):
        session.unread(A, 1 << 20)
    assert {refusal.code for refusal in sent(session)} == {m.RefusalCode.ENDED}
    session.unread(A, 1 << 20)
    assert [refusal.code for refusal in sent(session)] == [m.RefusalCode.VIOLATION]


def test_the_end_of_a_worker_is_reported_even_if_others_share_its_key() -> None:
    session = make()
    for number in range(200):
        peer = b"%d" % number
        session.receive(peer, hello(str(number)), 1.0, key="the key of all")
        session.receive(peer, m.Failure("env", "boom", "", fatal=True), 1.0, "the key of all")
    assert len(told(session, ev.WorkerFailed)) == 200


def test_registrations_over_all_connections_are_bounded_and_the_rest_waits_its_turn() -> None:
    session = make()
    for number in range(1500):
        session.receive(b"%d" % number, hello(str(number)), 0.0, host="10.0.0.1")
    assert 1000 <= len(sent(session, m.Welcome)) <= 1024
    assert session.num_waiting == 1500 - len(session.slots)
    for tenth in range(1, 11):
        session.tick(tenth / 10)
    assert 60 <= len(sent(session, m.Welcome)) <= 64
    for number in range(1000):
        session.receive(b"%d" % number, m.Leaving("done"), 1.0)
        session.peer_gone(b"%d" % number, 1.0)
    for tenth in range(11, 200):
        for number in range(1000, 1500):
            if tenth % 50 == 0:
                session.receive(b"%d" % number, hello(str(number)), tenth / 10, host="10.0.0.1")
        session.tick(tenth / 10)
    assert session.num_waiting == 0
    assert len(session.slots) == 500, "no worker was refused"


def test_a_source_that_fills_the_line_delays_others_by_one_turn() -> None:
    session = make()
    for number in range(3000):
        session.receive(b"%d" % number, hello(str(number)), 0.0, host="192.0.2.1")
    session.receive(A, hello("a"), 0.0, host="10.0.0.1")
    session.messages_to_send()
    session.tick(0.1)
    assert A in [
        peer for peer, message in session.messages_to_send() if isinstance(message, m.Welcome)
    ]


def test_large_snapshots_are_given_to_fewer() -> None:
    session = make()
    large = {"p": {"w": np.zeros(16 << 20, np.uint8)}}
    session.publish(m.Snapshot(2, large, {}, {}, {"timestep": 0}), 0.0)
    for number in range(1000):
        session.receive(b"%d" % number, hello(str(number)), 0.0, host="10.0.0.1")
    assert 200 <= len(sent(session, m.Welcome)) <= 210
    session.tick(1.0)
    assert 8 <= len(sent(session, m.Welcome)) <= 14


def test_a_worker_that_asks_again_and_again_keeps_no_other_from_a_missed_snapshot() -> None:
    session = make("a", "b")
    large = {"p": {"w": np.zeros(256 << 20, np.uint8)}}
    session.publish(m.Snapshot(2, large, {}, {}, {"timestep": 0}), 0.0)
    session.messages_to_send()
    given: dict[Any, list[float]] = {A: [], B: []}
    for twentieth in range(1, 1200):
        now = twentieth / 20
        session.receive(A, m.SnapshotRequest(1), now)
        if twentieth == 30:
            session.receive(B, m.SnapshotRequest(1), now)
        session.receive(B, m.Beat(0, ""), now)
        session.tick(now)
        for target, message in session.messages_to_send():
            if isinstance(message, m.Snapshot):
                given[target].append(now)
    assert len(given[B]) == 1
    assert given[B][0] < 4.0
    assert 8 <= len(given[A]) <= 12
    change = m.Snapshot(3, {"p": {"v": np.ones(1)}}, {}, {}, {}, since=2)
    session.publish(change, 60.0)
    (message,) = sent(session, m.Snapshot)
    assert message.since == 2, "one worker that repeats its request makes no broadcast whole"


def test_requests_that_serve_no_purpose_are_counted() -> None:
    session = make("a", "b")
    session.publish(snapshot(2), 0.0)
    for _ in range(100_000):
        session.receive(A, m.SnapshotRequest(1), 1.0)
    assert session.slots == [2]
    assert told(session, ev.PeerRejected)[-1].reason == "sent too many requests for a snapshot"


def test_if_many_miss_a_broadcast_the_next_one_is_whole_and_answers_them() -> None:
    session = make(*(str(number) for number in range(100)))
    session.publish(snapshot(2), 0.0)
    session.messages_to_send()
    for number in range(100):
        session.receive(b"peer-%d" % number, m.SnapshotRequest(1), 1.0)
    assert 60 <= len(sent(session, m.Snapshot)) <= 64
    session.publish(snapshot(3)._replace(since=2), 1.1)
    ((target, message),) = session.messages_to_send()
    assert (target, message.since) == (BROADCAST, -1)
    session.tick(2.0)
    assert sent(session, m.Snapshot) == []
    for number in range(90, 100):
        session.receive(b"peer-%d" % number, m.SnapshotRequest(1), 3.0)
    assert [message.version for message in sent(session, m.Snapshot)] == [3] * 10


def test_a_connection_that_keeps_saying_hello_is_dropped_before_it_has_cost_many_snapshots() -> (
    None
):
    session = make()
    welcomes = 0
    for number in range(10_000):
        session.receive(A, hello(str(number)), 1.0)
        welcomes += len(sent(session, m.Welcome))
    assert 10 < welcomes < 100
    assert told(session, ev.PeerRejected)[-1].peer == A
    assert session.slots == []
    for number in range(10_000):
        session.receive(B, hello("b"), 1.0 + number / 1000)
    assert len(sent(session, m.Welcome)) <= 4
    assert told(session, ev.PeerRejected)[-1].peer == B


def test_no_peer_gets_another_snapshot_before_the_last_one_has_left() -> None:
    session = make()
    for name in ("a", "a2", "a3"):
        session.receive(A, hello(name), 0.0)
    assert len(sent(session, m.Welcome)) == 1, "unsent snapshots count"
    join(session, B, "b")
    for second in range(1, 10):
        session.publish(snapshot(second + 1), float(second))
        sent(session)
        for message in (m.SnapshotRequest(1), hello("a"), hello(f"a{second}")):
            session.receive(A, message, float(second), has_unsent=True)
        session.receive(B, m.SnapshotRequest(second), float(second))
        assert [
            target
            for target, message in session.messages_to_send()
            if isinstance(message, m.Snapshot)
        ] == [B]
    assert len(session.slots) == 2
    session.receive(A, m.SnapshotRequest(1), 10.0)
    assert [message.version for message in sent(session, m.Snapshot)] == [10]
    session.receive(A, hello("a"), 11.0)
    assert len(sent(session, m.Welcome)) == 1
    session.receive(A, hello("a9"), 12.0)
    assert len(sent(session, m.Welcome)) == 1, "a new incarnation was only kept waiting"


def test_a_lost_worker_with_ten_minutes_of_queued_hellos_is_refused_but_not_dropped() -> None:
    session = make("a")
    for second in range(0, 600, 5):
        session.tick(1.0 + second)
    assert session.slots == []
    for _ in range(120):
        session.receive(A, hello("a"), 601.0)
    for _ in range(120):
        session.receive(B, hello("b", learner_incarnation="learner-0"), 601.0)
    assert told(session, ev.PeerRejected) == []
    assert {message.code for message in sent(session, m.Refused)} == {m.RefusalCode.ENDED}


def test_undecodable_frames_cost_only_their_sender_its_place() -> None:
    """Bad input: garbage, truncated and oversized frames are counted and reported once, and the
    peer is dropped.
    """
    session = make("a", "b")
    for peer in (A, b"unknown"):
        for _ in range(3):
            session.bad_frames(peer, BadFrame("not a message header", field="header"), 1.0)
        ((target, refusal),) = [
            pair for pair in session.messages_to_send() if isinstance(pair[1], m.Refused)
        ]
        assert target == peer
        assert "not a message header" in refusal.reason
        assert len(told(session, ev.PeerRejected)) == 1
    assert session.slots == [2]


def test_a_message_that_only_learners_send_is_a_violation() -> None:
    session = make("a")
    session.receive(A, m.Ack(1), 1.0)
    assert "Ack" in told(session, ev.PeerRejected)[0].reason


def test_a_worker_that_builds_its_environment_may_be_silent_longer_unless_it_hung_up() -> None:
    building = m.Beat(0, m.BUILDING)
    session = make(heartbeat_timeout_s=10.0, build_timeout_s=60.0)
    for peer, name in ((A, "a"), (B, "b"), (b"c", "c")):
        join(session, peer, name)
        session.receive(peer, building, 0.0)
    session.receive(b"c", m.Beat(0, "sampling"), 0.5)  # its environment is built
    session.peer_gone(A, 1.0, was_silent=True)
    session.peer_gone(B, 1.0)
    slots = {}
    for quarter in range(400):
        now = quarter / 4
        if now == 20.0:  # it is back, and still building
            session.receive(b"a2", hello("a", learner_incarnation="learner-1"), now, key="key-a")
            session.receive(b"a2", building, now, key="key-a")
        session.tick(now)
        slots[now] = session.slots
    assert slots[10.0] == [1, 2, 3]
    assert slots[11.0] == slots[79.0] == [1]
    assert slots[81.0] == []


@pytest.mark.parametrize("data_ends", [True, False])
def test_out_of_data_counts_only_in_runs_where_data_ends(data_ends: bool) -> None:
    session = make("a", "b", data_ends=data_ends)
    session.deal(1, 4)
    before = sent(session, m.Lease)
    session.receive(A, m.Beat(0, m.OUT_OF_DATA), 1.0)
    assert len(before) == 2
    assert bool(sent(session, m.Lease)) is data_ends, "its share goes to the other one"
