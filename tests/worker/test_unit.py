from __future__ import annotations

import os
from pathlib import Path

import pytest

from aiorl.config.worker import PolicyPart, WorkerPart
from aiorl.data.metrics import PerfStats
from aiorl.errors import PolicyError
from aiorl.worker.unit import (
    StepClock,
    UnitPlace,
    check_graphs,
    monitor_directory,
    perf_columns,
    unit_seed,
)


def part(**settings: object) -> WorkerPart:
    return WorkerPart.from_dict({"env": "CartPole-v1", **settings})


def test_seeds_depend_on_run_seed_slot_and_unit_only() -> None:
    assert unit_seed(5, UnitPlace(2, "ff")) == unit_seed(5, UnitPlace(2, "aa")) == 7
    assert unit_seed(5, UnitPlace(2, "ff", 1)) == unit_seed(5, UnitPlace(2, "aa", 1))
    assert len({unit_seed(5, UnitPlace(slot, "ff", unit)) for slot in range(1, 9) for unit in range(4)}) == 32


def test_who_takes_over_a_slot_gets_other_numbers_than_its_predecessor_and_the_same_each_time() -> None:
    seeds = [unit_seed(5, UnitPlace(2, "ff", unit), life) for life in range(3) for unit in range(2)]
    assert len(set(seeds)) == 6
    assert unit_seed(5, UnitPlace(2, "aa"), 1) == unit_seed(5, UnitPlace(2, "ff"), 1)


def test_without_a_seed_every_registration_and_every_sampler_gets_its_own() -> None:
    seeds = {unit_seed(None, UnitPlace(1, life, unit)) for life in ("ff", "aa") for unit in range(3)}
    assert len(seeds) == 6


def test_perf_stats_travel_as_numbers_by_name() -> None:
    assert perf_columns(PerfStats(3, 0.1, 0.2, 0.3)) == {
        "iters": 3.0, "env_wait_time": 0.1, "processing_time": 0.2, "inference_time": 0.3,
    }  # fmt: skip


def test_a_monitor_writes_into_the_runs_directory_where_it_is_to_be_seen(tmp_path: Path) -> None:
    place = UnitPlace(1, "1")
    assert monitor_directory(part(log_dir=str(tmp_path)), place) is None
    seen = part(monitor=True, log_dir=str(tmp_path))
    assert monitor_directory(seen, place) == str(tmp_path / "monitor")
    assert monitor_directory(seen, UnitPlace(1, "1", 2)) == str(tmp_path / "monitor" / "sampler-2")


def test_a_monitor_on_another_host_writes_below_the_workers_own_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    elsewhere = part(monitor=True, log_dir="/learners/runs/one")
    assert monitor_directory(elsewhere, UnitPlace(1, "1")) == os.path.join(str(tmp_path), "monitor", "one")


def test_each_policy_but_a_users_own_needs_a_graph() -> None:
    policies = {"net": PolicyPart(), "own": PolicyPart(policy_class="a:B")}
    several = WorkerPart(env="E", policies=policies)
    check_graphs(several, {"net": {"graph": b"", "spec": {}}})
    with pytest.raises(PolicyError, match="no graph for policy 'net'"):
        check_graphs(several, {})


def test_the_step_clock_shows_time_only_while_a_step_is_under_way() -> None:
    clock = StepClock()
    assert clock.in_step_s == 0
    clock.step()
    assert 0 <= clock.in_step_s < 60
    clock.idle()
    assert clock.in_step_s == 0
