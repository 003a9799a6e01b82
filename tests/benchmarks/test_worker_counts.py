from __future__ import annotations

from pathlib import Path

import pytest

from aiorl.learner import configure_learner
from aiorl.learning.algorithms.registry import config_class
from benchmarks.recordings import RECORDINGS, Recording
from benchmarks.rows import write_csv
from benchmarks.worker_counts import (
    CASES,
    COUNTS,
    Case,
    WorkersRow,
    chance_of,
    measured,
    read_workers_rows,
    words_of,
    workers_section,
)


@pytest.mark.parametrize("workers", COUNTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.algo)
def test_each_case_is_a_run_that_can_be(case: Case, workers: int) -> None:
    config = configure_learner(words_of(case, workers, ["a.parquet"]), config_class)
    assert (config.algo, config.num_workers) == (case.algo, workers)
    assert bool(case.data) == (config.input == ["a.parquet"]) == (case.num_envs == 0)
    assert case.data or config.num_workers * config.num_envs_per_worker == case.num_envs


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_has_its_environments_in_so_many_workers(workers: int) -> None:
    case = Case("ppo", "ppo-cartpole", "CartPole-v1", 8, 3000, {"xla": "off"})
    row = measured(case, workers, 0)
    assert (row.algo, row.workers, row.seed) == ("ppo", workers, 0)
    assert row.env_steps >= 3000
    assert 9 <= row.return_over_all <= row.return_last * 2


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [1, 2])
def test_of_stored_experience_each_worker_reads_its_share_and_policies_are_evaluated(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECORDINGS, "tiny", Recording("tiny", "CartPole-v1", None, rows=1000))
    options = {"train-batch-size": 32, "training-intensity": 1, "xla": "off"}
    case = Case("iql", "", "CartPole-v1", 0, 3000, options, data=("tiny",), evaluated_every=500)
    row = measured(case, workers, 0, tmp_path, tmp_path / "cache")
    assert row.env_steps >= 3000
    assert row.return_last >= 8
    assert row.return_over_all >= 8


@pytest.mark.nightly
def test_runs_with_one_worker_and_with_four_are_distributed_alike() -> None:
    """On-policy runs with a seed give the same each time: it may fail by chance on a machine, but not now and then."""
    case = Case("ppo", "ppo-cartpole", "CartPole-v1", 8, 20_000)
    one, four = ([measured(case, workers, seed).return_over_all for seed in range(5)] for workers in (1, 4))
    assert min(*one, *four) > 40, "it learns"
    assert chance_of(one, four) > 0.01


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 2], [3, 4], 2 / 6),  # means differ by 2 in two ways of six, by 1 in two, by 0 in two
        ([1, 3], [2, 4], 4 / 6),
        ([1, 4], [2, 3], 1.0),
        ([5, 5], [5, 5], 1.0),
        ([0, 0, 0], [9, 9, 9], 2 / 20),
    ],
)
def test_chance_is_the_share_of_all_ways_to_part_the_runs_that_part_their_means_as_far(
    first: list[float], second: list[float], expected: float
) -> None:
    assert chance_of(first, second) == pytest.approx(expected)


def test_the_page_has_a_line_for_each_algorithm_that_ran_with_both_numbers(tmp_path: Path) -> None:
    rows = [WorkersRow("ppo", workers, seed, 100_000, 490.0 + seed, 300.0) for workers in (1, 4) for seed in (0, 1)]
    rows.append(WorkersRow("dqn", 1, 0, 50_000, 400.0, 200.0))
    rows.sort(key=lambda row: (row.algo, row.workers, row.seed))
    write_csv(tmp_path / "workers.csv", [vars(row) for row in rows])
    assert read_workers_rows(tmp_path) == rows
    lines = workers_section(rows)
    assert lines[1:] == [
        "| ppo | 8 envs | 100,000 | 490.5 (0.5) | 490.5 (0.5) | 300.0 (0.0) | 300.0 (0.0) | 1.00 |",
    ]
    assert workers_section([]) == []
