"""Leases as a budget of the whole run, in simulated time; sessions, lease book, budget and queue are the real ones."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from aiorl.learning.algorithms.algorithm import LeasePlan
from aiorl.net.protocol.pacing import Pacing
from benchmarks.lease_simulation import Host, Simulated, Simulation
from benchmarks.lease_turns import SETTINGS, Turn, number_of, setting_of, turns_of
from benchmarks.lease_turns import main as lease_turns
from benchmarks.leases import figures_of, spread

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


@pytest.mark.parametrize("workers", [4, 16])
def test_workers_in_each_others_way_on_a_busy_host_hardly_make_samples_to_be_thrown_away(workers: int) -> None:
    """S6. The learner waits there whatever the budget is, which once grew for it every few seconds: 1 to 2 %."""
    plan = LeasePlan("streaming", 1, 3, MAX_LAG)
    runs = [Simulation([0.015] * workers, plan, 0.005, seed=seed, host=Host()).run(60.0, 20.0) for seed in range(3)]
    assert sum(run.discarded for run in runs) / 3 < 0.007
    assert sum(run.fragments_per_s for run in runs) / 3 > 17


@pytest.mark.nightly
@pytest.mark.parametrize(("per_batch", "update_s"), [(64, 0.1), (256, 0.05)], ids=["learner-bound", "worker-bound"])
def test_a_thousand_workers_whose_speeds_differ_by_fifty(per_batch: int, update_s: float) -> None:
    """S6."""
    fragment_s = spread(1000, 0.2)
    default, others = simulate(fragment_s, per_batch, update_s, 60.0), []
    for per_worker in (1, 8):
        others.append(simulate(fragment_s, per_batch, update_s, 60.0, per_worker).fragments_per_s)
    assert default.discarded <= 0.01
    assert default.fragments_per_s >= 0.97 * max(others)


def _row(at: float, trained: int, sampled: int = 0, discarded: int = 0, lag: float = 1.0) -> dict[str, Any]:
    ledger = {"sampled": sampled, "discarded": {"stale": discarded}}
    return {"timestamp": at, "env_steps_trained_total": trained, "ledger": ledger, "policy_lag": {"mean": lag}}


def test_a_turn_is_what_came_in_its_second_half() -> None:
    rows = [_row(12.1, 50), _row(13.0, 100, 200, 10), _row(14.0, 150, 250, 10, 2.0), _row(15.5, 500, 600, 20, 3.0)]
    rows += [_row(16.5, 600), _row(18.5, 800)]  # one alone tells no rate
    turns = turns_of(rows, 4.0)
    assert turns == {3: Turn(setting_of(3), pytest.approx(350 / 1.5), 350, 10, 2.5)}
    assert turns.keys() == {number_of(14.0, 4.0)}
    assert [setting_of(number) for number in range(6)] == [*SETTINGS, *SETTINGS]


def test_settings_are_compared_by_all_that_their_turns_brought_on_a_machine_that_slows_down() -> None:
    turns = [Turn(setting, speed, 1000, 5, 2.0) for speed in (100.0, 80.0, 20.0, 18.0, 90.0) for setting in SETTINGS]
    rate, discarded, lag = figures_of("x", turns)
    assert (rate.value, rate.ratio, rate.ok) == (pytest.approx(61.6), 1.0, True)
    assert (discarded.value, discarded.ok, lag.value) == (0.005, True, 2.0)
    slower = [Turn(turn.setting, turn.rate * (0.9 if turn.setting == 3 else 1.0), 1000, 20, 2.0) for turn in turns]
    rate, discarded, _ = figures_of("x", slower)
    assert (rate.ratio, rate.ok, discarded.ok) == (pytest.approx(0.9), False, False)


def test_a_learner_takes_turns_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def learner(words: list[str]) -> int:
        pacing = Pacing(4, 10, 3)
        for at in (0.0, 5.0, 10.0, 15.0):
            monkeypatch.setattr(time, "time", lambda at=at: at)
            pacing.updated(0.0, 0, at)
            seen.append(pacing.per_worker)
        return len(words)

    monkeypatch.setattr("benchmarks.lease_turns.learner_main", learner)
    assert lease_turns(["5.0", "--algo=impala"]) == 1
    assert seen == [*SETTINGS, SETTINGS[0]]
