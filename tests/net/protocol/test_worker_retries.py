from __future__ import annotations

import dataclasses

import numpy as np

from aiorl.config.worker import TransportConfig
from aiorl.net.protocol.worker_retries import Greeting, SentFragments, VersionWatch, WorkerSettings
from aiorl.net.wire import messages as m

PATIENT = WorkerSettings("w", transport=TransportConfig(reconnect_max_s=3.0))
SETTINGS = WorkerSettings("w", transport=TransportConfig(resend_after_s=2.0), max_unacked=4, max_unacked_bytes=100)


def hellos(greeting: Greeting, until: float) -> list[float]:
    """When Hello is said, looking every 0.5 s."""
    said = []
    for half in range(int(2 * until)):
        if greeting.is_due(half / 2):
            greeting.said(half / 2)
            said.append(half / 2)
    return said


def test_hellos_come_ever_more_rarely_over_a_connection_only() -> None:
    greeting = Greeting(PATIENT)
    assert hellos(greeting, 5.0) == []
    greeting.is_linked = True
    greeting.begin(0.0)
    assert hellos(greeting, 15.0) == [0.0, 0.5, 1.5, 3.5, 6.5, 9.5, 12.5]
    greeting.begin(15.0)
    assert greeting.is_due(15.0)
    greeting.end()
    assert not greeting.is_due(100.0)


def test_a_sign_of_life_hurries_it_but_not_within_a_quarter_second() -> None:
    greeting = Greeting(PATIENT)
    greeting.is_linked = True
    for now in (0.0, 1.0, 2.0):
        greeting.said(now)
    greeting.hurry(2.2)
    assert not greeting.is_due(2.2)
    greeting.hurry(2.25)
    assert greeting.is_due(2.25)
    greeting.put_off(2.25)
    assert not greeting.is_due(5.0)
    assert greeting.is_due(5.25)


def test_what_it_waits_for_is_told_in_plain_words() -> None:
    greeting = Greeting(PATIENT)
    assert greeting.text(None) == "cannot reach the learner: no connection yet; trying again"
    greeting.is_linked = True
    assert greeting.text(None) == "waiting for the learner to answer; trying again every 0.5 s"
    greeting.is_learner_unready = True
    assert "to get ready" in greeting.text(None)
    greeting.refusal = "all 4 slots are taken"
    assert "the learner says: all 4 slots are taken" in greeting.text(None)
    assert "silent for 12 s" in greeting.text(12.3)
    greeting.end()
    assert (greeting.refusal, greeting.is_learner_unready) == ("", False)


def fragment(env_steps: int = 10, floats: int = 1) -> m.Samples:
    return m.Samples(0, 1, env_steps, env_steps, 1, 1, 1, 10, {"p": {"obs": np.zeros(floats, np.float32)}}, {}, {}, {})


def test_fragments_are_numbered_and_carry_the_account_so_far() -> None:
    fragments = SentFragments(SETTINGS)
    first = fragments.add(fragment(10), 0.0)
    assert (first.seq, first.sampled_total, first.abandoned_total) == (1, 10, 0)
    second = fragments.add(fragment(10), 0.0)
    assert (second.seq, second.sampled_total, second.abandoned_total) == (2, 20, 0)
    assert (fragments.next_seq, len(fragments), fragments.sampled_total) == (3, 2, 20)
    fragments.reset()
    assert (fragments.next_seq, len(fragments), fragments.sampled_total) == (1, 0, 0)


def test_it_is_full_by_number_with_those_begun_or_by_bytes() -> None:
    fragments = SentFragments(SETTINGS)
    assert not fragments.is_full(3)
    assert fragments.is_full(4)
    fragments.add(fragment(floats=10), 0.0)
    assert fragments.is_full(3)
    assert not fragments.is_full(0)
    assert fragments.is_full(2), "three more of 40 bytes"
    fragments.add(fragment(floats=10), 0.0)
    assert fragments.is_full(0), "one more of 40 bytes"
    fragments.acked(1, 1.0)
    assert not fragments.is_full(0)
    fragments.acked(2, 1.0)
    fragments.add(fragment(floats=100), 2.0)
    assert fragments.is_full(0)
    fragments.acked(3, 3.0)
    assert not fragments.is_full(0), "a single one may be larger"


def test_what_is_not_acknowledged_is_sent_again_ever_more_rarely() -> None:
    fragments = SentFragments(SETTINGS)
    assert not fragments.is_resend_due(1e9)
    for _ in range(3):
        fragments.add(fragment(), 0.0)
    now, waits = 0.0, []
    for _ in range(6):
        begin = now
        while not fragments.is_resend_due(now):
            now += 0.5
        waits.append(now - begin)
        assert [message.seq for message in fragments.take_again(now)] == [1, 2, 3]
    assert waits == [2, 2, 4, 8, 16, 16]
    fragments.acked(2, now)
    assert not fragments.is_resend_due(now + 1.9)
    assert fragments.is_resend_due(now + 2.0), "progress: as often as at first"
    fragments.acked(1, now + 1.0)
    assert fragments.is_resend_due(now + 2.0), "an old acknowledgement is none"
    assert [message.seq for message in fragments.take_again(now)] == [3]


def test_settings_of_the_learner_hold_as_soon_as_they_are_known() -> None:
    settings = dataclasses.replace(SETTINGS)
    fragments, greeting = SentFragments(settings), Greeting(settings)
    settings.transport = TransportConfig(resend_after_s=50.0, reconnect_max_s=0.25)
    fragments.add(fragment(), 0.0)
    assert not fragments.is_resend_due(49.0)
    greeting.is_linked = True
    greeting.begin(0.0)
    greeting.said(0.0)
    assert greeting.is_due(0.25)


def test_a_snapshot_is_asked_for_when_it_stays_away() -> None:
    watch = VersionWatch()
    watch.reset(3)
    assert not watch.is_overdue(3, 100.0)
    watch.heard(4)
    asked = []
    for half in range(60):
        now = 100.0 + half / 2
        if watch.is_overdue(-1, now):
            watch.asked(now)
            asked.append(now)
    assert asked == [101.0, 103.0, 107.0, 115.0, 123.0], "ever more rarely, at least every 8 s"
    assert watch.take(4)
    assert not watch.is_overdue(4, 200.0)
    assert not watch.is_overdue(5, 200.0), "a lease needs it: it may be on its way"
    assert not watch.is_overdue(5, 200.5)
    assert watch.is_overdue(5, 201.0)


def test_only_newer_snapshots_are_taken() -> None:
    watch = VersionWatch()
    assert watch.version == -1
    assert watch.take(0)
    assert not watch.take(0)
    assert watch.take(7)
    assert not watch.take(6)
    assert watch.version == 7
    watch.reset()
    assert watch.version == -1
    assert not watch.is_overdue(-1, 0.0)


def test_version_0_is_a_version() -> None:
    watch = VersionWatch()
    assert not watch.is_overdue(0, 0.0)
    assert watch.is_overdue(0, 1.0)
