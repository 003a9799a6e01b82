"""Leases as a budget of the whole run, in simulated time; sessions, lease book, budget and queue are the real ones."""

from __future__ import annotations

import itertools

import pytest

from aiorl.algorithms.algorithm import LeasePlan
from benchmarks.lease_simulation import Simulated, Simulation
from benchmarks.leases import spread

MAX_LAG = 10


def simulate(
    fragment_s: list[float], per_batch: int, update_s: float, seconds: float, per_worker: int = 3
) -> Simulated:
    found = Simulation(fragment_s, LeasePlan("streaming", per_batch, per_worker, MAX_LAG), update_s).run(
        seconds, seconds / 3
    )
    assert max(found.lags) <= MAX_LAG
    return found


@pytest.mark.parametrize("workers", [1, 4, 16, 64])
def test_a_learner_slower_than_its_workers_is_always_busy_and_hardly_a_sample_is_thrown_away(
    workers: int,
) -> None:
    """S6. With leases for each worker by itself, 16 of them made half of their samples for nothing."""
    found = simulate([0.01 * max(1, workers // 2)] * workers, 2, 0.05, 20.0)
    assert found.fragments_per_s == pytest.approx(2 / 0.05, rel=0.03)
    assert found.discarded <= 0.01
    assert sum(found.lags) / len(found.lags) < 9


@pytest.mark.parametrize("workers", [1, 4, 16, 64])
def test_workers_that_are_slower_than_the_learner_never_wait_for_a_lease(workers: int) -> None:
    """S6."""
    found = simulate([0.64] * workers, 16, 0.01, 40.0)
    assert sum(found.by_slot.values()) / (40.0 * 2 / 3) == pytest.approx(workers / 0.64, rel=0.04)
    assert found.discarded == 0


def test_each_of_several_equal_workers_gets_its_share() -> None:
    found = simulate([0.1] * 20, 2, 0.05, 40.0)
    each = found.by_slot.values()
    assert len(each) == 20
    assert max(each) <= 1.2 * min(each)


def test_workers_of_different_speeds_share_by_time() -> None:
    """Who is twice as fast brings twice as much, and nobody is left out who keeps up."""
    found = simulate([0.05, 0.1, 0.2, 0.4] * 4, 8, 0.1, 60.0)
    brought = [sum(found.by_slot[slot] for slot in range(1 + kind, 17, 4)) for kind in range(4)]
    for fast, slow in itertools.pairwise(brought):
        assert 1.5 < fast / slow < 2.5
    assert found.discarded < 0.01


def test_a_worker_that_the_policy_outruns_is_left_out_and_costs_nothing() -> None:
    found = simulate([0.02] * 8 + [5.0] * 2, 2, 0.02, 60.0)
    assert found.fragments_per_s == pytest.approx(2 / 0.02, rel=0.03)
    assert found.discarded < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(("per_batch", "update_s"), [(64, 0.1), (256, 0.05)], ids=["learner-bound", "worker-bound"])
def test_a_thousand_workers_whose_speeds_differ_by_fifty(per_batch: int, update_s: float) -> None:
    """S6."""
    fragment_s = spread(1000, 0.2)
    default, others = simulate(fragment_s, per_batch, update_s, 60.0), []
    for per_worker in (1, 8):
        others.append(simulate(fragment_s, per_batch, update_s, 60.0, per_worker).fragments_per_s)
    assert default.discarded <= 0.01
    assert default.fragments_per_s >= 0.97 * max(others)
