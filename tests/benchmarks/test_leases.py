"""Leases as a budget of the whole run, in simulated time, with the real sessions, lease book,
budget and queue.
"""

from __future__ import annotations

import itertools

import pytest

from aiorl.learning.algorithm import LeasePlan
from benchmarks.lease_simulation import Host, Simulated, Simulation
from benchmarks.leases import spread

MAX_LAG = 10


def simulate(
    fragment_s: list[float], per_batch: int, update_s: float, seconds: float, per_worker: int = 3
) -> Simulated:
    plan = LeasePlan("streaming", per_batch, per_worker, MAX_LAG)
    found = Simulation(fragment_s, plan, update_s).run(seconds, seconds / 3)
    assert max(found.lags) <= MAX_LAG
    return found


@pytest.mark.parametrize("workers", [1, 16, 64])
def test_a_learner_slower_than_its_workers_is_always_busy_and_few_samples_are_wasted(
    workers: int,
) -> None:
    """S6. With separate leases for each worker, 16 workers wasted half of their samples."""
    found = simulate([0.01 * max(1, workers // 2)] * workers, 2, 0.05, 20.0)
    assert found.fragments_per_s == pytest.approx(2 / 0.05, rel=0.03)
    assert found.discarded <= 0.01
    assert sum(found.lags) / len(found.lags) < 9


@pytest.mark.parametrize("workers", [1, 64])
def test_workers_that_are_slower_than_the_learner_never_wait_for_a_lease(workers: int) -> None:
    """S6."""
    found = simulate([0.64] * workers, 16, 0.01, 40.0)
    assert sum(found.by_slot.values()) / (40.0 * 2 / 3) == pytest.approx(workers / 0.64, rel=0.04)
    assert found.discarded == 0


def test_workers_get_shares_by_their_speed_and_equal_ones_equal_shares() -> None:
    each = simulate([0.1] * 20, 2, 0.05, 40.0).by_slot.values()
    assert len(each) == 20
    assert max(each) <= 1.2 * min(each)
    found = simulate([0.05, 0.1, 0.2, 0.4] * 4, 8, 0.1, 60.0)
    brought = [sum(found.by_slot[slot] for slot in range(1 + kind, 17, 4)) for kind in range(4)]
    for fast, slow in itertools.pairwise(brought):
        assert 1.5 < fast / slow < 2.5
    assert found.discarded < 0.01


def test_a_worker_that_is_too_slow_for_the_policy_is_left_out_without_cost() -> None:
    found = simulate([0.02] * 8 + [5.0] * 2, 2, 0.02, 60.0)
    assert found.fragments_per_s == pytest.approx(2 / 0.02, rel=0.03)
    assert found.discarded < 0.01


@pytest.mark.slow
def test_workers_on_a_busy_host_waste_few_samples() -> None:
    """S6. There the learner waits at any budget, so the budget once grew every few seconds, wasting
    1 to 2 %.
    """
    plan = LeasePlan("streaming", 1, 3, MAX_LAG)
    runs = [
        Simulation([0.015] * 16, plan, 0.005, seed=seed, host=Host()).run(60.0, 20.0)
        for seed in range(3)
    ]
    assert sum(run.discarded for run in runs) / 3 < 0.007
    assert sum(run.fragments_per_s for run in runs) / 3 > 17


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("per_batch", "update_s"), [(64, 0.1), (256, 0.05)], ids=["learner-bound", "worker-bound"]
)
def test_a_thousand_workers_with_speeds_from_1_to_50(per_batch: int, update_s: float) -> None:
    """S6."""
    fragment_s = spread(1000, 0.2)
    default = simulate(fragment_s, per_batch, update_s, 60.0)
    others = [
        simulate(fragment_s, per_batch, update_s, 60.0, per_worker).fragments_per_s
        for per_worker in (1, 8)
    ]
    assert default.discarded <= 0.01
    assert default.fragments_per_s >= 0.97 * max(others)
