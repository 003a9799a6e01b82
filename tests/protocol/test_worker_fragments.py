from __future__ import annotations

import dataclasses

import numpy as np

from aiorl.protocol.worker_fragments import SentFragments
from aiorl.protocol.worker_settings import WorkerSettings
from aiorl.wire import messages as m

SETTINGS = WorkerSettings("w", resend_after_s=2.0, max_unacked=4, max_unacked_bytes=100)


def fragment(env_steps: int = 10, floats: int = 1) -> m.Samples:
    return m.Samples(0, 1, env_steps, env_steps, 1, 1, 1, 10, {"p": {"obs": np.zeros(floats, np.float32)}}, {}, {}, {})


def test_fragments_are_numbered_and_carry_the_account_so_far() -> None:
    fragments = SentFragments(SETTINGS)
    fragments.in_progress = 25
    first = fragments.add(fragment(10), 0.0, SETTINGS)
    assert (first.seq, first.sampled_total, first.abandoned_total) == (1, 25, 0), "15 steps are still under way"
    fragments.abandon(5)
    second = fragments.add(fragment(10), 0.0, SETTINGS)
    assert (second.seq, second.sampled_total, second.abandoned_total) == (2, 25, 5)
    assert (fragments.next_seq, len(fragments), fragments.in_progress) == (3, 2, 0)
    fragments.reset(SETTINGS)
    assert (fragments.next_seq, len(fragments), fragments.sampled_total) == (1, 0, 0)


def test_it_is_full_by_number_with_those_begun_or_by_bytes() -> None:
    fragments = SentFragments(SETTINGS)
    assert not fragments.is_full(3, SETTINGS)
    assert fragments.is_full(4, SETTINGS)
    fragments.add(fragment(floats=20), 0.0, SETTINGS)
    assert fragments.is_full(3, SETTINGS)
    assert not fragments.is_full(0, SETTINGS)
    fragments.add(fragment(floats=5), 0.0, SETTINGS)
    assert fragments.is_full(0, SETTINGS), "100 bytes"
    fragments.acked(1, 1.0, SETTINGS)
    assert not fragments.is_full(0, SETTINGS)


def test_what_is_not_acknowledged_is_sent_again_ever_more_rarely() -> None:
    fragments = SentFragments(SETTINGS)
    assert not fragments.is_resend_due(1e9)
    for _ in range(3):
        fragments.add(fragment(), 0.0, SETTINGS)
    now, waits = 0.0, []
    for _ in range(6):
        begin = now
        while not fragments.is_resend_due(now):
            now += 0.5
        waits.append(now - begin)
        assert [message.seq for message in fragments.take_again(now)] == [1, 2, 3]
    assert waits == [2, 2, 4, 8, 16, 16]
    fragments.acked(2, now, SETTINGS)
    assert not fragments.is_resend_due(now + 1.9)
    assert fragments.is_resend_due(now + 2.0), "progress: as often as at first"
    fragments.acked(1, now + 1.0, SETTINGS)
    assert fragments.is_resend_due(now + 2.0), "an old acknowledgement is none"
    assert [message.seq for message in fragments.take_again(now)] == [3]


def test_settings_of_the_learner_hold_from_the_next_call_on() -> None:
    fragments = SentFragments(SETTINGS)
    patient = dataclasses.replace(SETTINGS, resend_after_s=50.0, max_unacked=9)
    fragments.add(fragment(), 0.0, patient)
    assert not fragments.is_resend_due(49.0)
    assert not fragments.is_full(7, patient)
