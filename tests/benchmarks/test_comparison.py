from __future__ import annotations

from pathlib import Path

import pytest

from aiorl.learning.algorithms.registry import config_class
from benchmarks import comparison
from benchmarks.comparison import TASKS, ComparedRow, ComparedTask, comparison_section, ratio_of, read_compared_rows
from benchmarks.rows import write_csv

CARTPOLE = TASKS[0]


def rows_of(task: ComparedTask, **returns: list[float]) -> list[ComparedRow]:
    return [
        ComparedRow(task.name, library, seed, 1000, value, 2 * value, 20, 1.0)
        for library, values in returns.items()
        for seed, value in enumerate(values)
    ]


@pytest.mark.parametrize(("ours", "theirs", "ratio"), [(95, 100, 0.95), (-105, -100, 0.95), (-90, -100, 1.1)])
def test_a_ratio_below_1_is_short_of_their_return_by_that_share_of_its_size(
    ours: float, theirs: float, ratio: float
) -> None:
    assert ratio_of(ours, theirs) == pytest.approx(ratio)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_both_libraries_train_the_same_number_of_env_steps(task: ComparedTask) -> None:
    config = config_class(task.algo)(env=task.env, num_workers=0)
    if task.algo == "ppo":
        assert task.env_steps % config.train_batch_size == 0
        assert task.env_steps % 2048 == 0


def test_the_page_has_means_extremes_and_ratios_of_tasks_that_both_have_trained() -> None:
    rows = rows_of(CARTPOLE, aiorl=[90.0, 110.0], sb3=[150.0, 250.0]) + rows_of(TASKS[1], aiorl=[1.0])
    *_, line = comparison_section(rows)
    assert line == (
        "| PPO | CartPole-v1 | 49,152 | 2 | 100 (90 to 110) | 200 (150 to 250) | 0.50 "
        "| 200 (180 to 220) | 400 (300 to 500) | 0.50 |"
    )
    assert comparison_section(rows_of(CARTPOLE, aiorl=[1.0])) == []


def test_a_run_that_has_a_row_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int]] = []

    def measured(task: ComparedTask, library: str, seed: int) -> ComparedRow:
        made.append((library, seed))
        return ComparedRow(task.name, library, seed, 1000, 1.0, 1.0, 20, 1.0)

    monkeypatch.setattr(comparison, "_FOLDER", tmp_path)
    monkeypatch.setattr(comparison, "measured", measured)
    monkeypatch.setattr(comparison, "installed", lambda: None)
    monkeypatch.setattr("benchmarks.results.main", lambda argv: 0)
    write_csv(tmp_path / "comparison.csv", [vars(row) for row in rows_of(CARTPOLE, sb3=[1.0, 2.0, 3.0])])
    assert comparison.main([CARTPOLE.name]) == 0
    assert sorted(made) == [*(("aiorl", seed) for seed in range(5)), ("sb3", 3), ("sb3", 4)]
    assert len(read_compared_rows(tmp_path)) == 10
