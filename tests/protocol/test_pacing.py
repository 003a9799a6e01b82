"""Whose turn it is, where workers are there that bring nothing."""

from __future__ import annotations

import pytest

from aiorl.protocol.pacing import Pacing


@pytest.mark.parametrize("stay", [True, False], ids=["that stay", "that come and go"])
def test_newcomers_that_never_bring_anything_leave_a_worker_that_does_its_leases(stay: bool) -> None:
    """Who floods the learner with registrations once took all leases there were, and training stood still."""
    pacing = Pacing(fragments_per_batch=1, max_policy_lag=10, per_worker=3)
    pacing.join(1)
    now, brought, owed = 0.0, 0, 0
    for newcomer in range(2, 400):
        if newcomer > 50:  # by then it is known
            pacing.join(newcomer)
            if not stay and newcomer > 60:
                pacing.leave(newcomer - 10)
        owed += pacing.next_leases(0, now).count(1)
        pacing.check_valid()
        now += 0.01
        if owed:
            owed -= 1
            brought += 1
            pacing.arrived(1, now - 0.01, now)
            pacing.updated(0.005, 0, now)
    assert brought > 0.97 * 398


def test_newcomers_are_tried_while_others_could_use_all_of_the_budget() -> None:
    pacing = Pacing(fragments_per_batch=1, max_policy_lag=10, per_worker=8)
    pacing.join(1)
    pacing.next_leases(0, 0.0)
    pacing.arrived(1, 0.0, 0.1)
    assert pacing.budget < 8
    pacing.join(2)
    pacing.join(3)
    pacing.join(4)
    assert {2, 3} <= set(pacing.next_leases(0, 0.2)) <= {1, 2, 3}
    pacing.arrived(2, 0.2, 0.3)
    assert 4 in pacing.next_leases(0, 0.3)
    pacing.check_valid()


def test_who_waits_to_be_tried_is_not_called_too_slow() -> None:
    """Where too many fragments were too old, a worker whose speed is not known is not tried yet."""
    pacing = Pacing(fragments_per_batch=1, max_policy_lag=3, per_worker=2)
    pacing.join(1)
    for now in (0.0, 1.0, 2.0):
        assert 1 in pacing.next_leases(0, now)
        pacing.arrived(1, now, now + 0.5)
        pacing.updated(0.0, 0, now + 0.5)
        pacing.outdated(1)
    pacing.join(2)
    assert 2 not in pacing.next_leases(1, 2.6)
    assert pacing.slow_workers() == []
    pacing.check_valid()
