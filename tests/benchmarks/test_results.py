"""Learning results: a seed is trained, evaluated and stored, and compared with targets, data and
other tasks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from aiorl.learner import configure_learner
from aiorl.learning.algorithms.registry import config_class
from benchmarks.recordings import RECORDINGS, DataRow, Recording, read_data_row, recorded
from benchmarks.results import Row, Task, measure, page_of, read_rows
from benchmarks.rows import write_csv
from benchmarks.worker_counts import CASES, COUNTS, Case, chance_of, measured, words_of


@pytest.mark.nightly
def test_a_seed_is_trained_evaluated_and_stored_as_a_row_and_a_curve(tmp_path: Path) -> None:
    task = Task(
        "quick",
        "ppo-cartpole",
        "CartPole-v1",
        2000,
        10.0,
        "nothing",
        options={"num-workers": 1, "xla": "off"},
    )
    rows = [measure(task, seed, tmp_path, episodes=3) for seed in (1, 0)]
    assert read_rows(task, tmp_path) == rows[::-1]
    assert all(row.env_steps >= 2000 and row.episodes == 3 and row.return_mean > 0 for row in rows)
    header, *points = (tmp_path / "curves" / "quick-1.csv").read_text().splitlines()
    assert header.startswith("env_steps_trained_total,")
    assert points


def test_a_recording_is_made_once(tmp_path: Path) -> None:
    recording = Recording("tiny", "CartPole-v1", None, rows=500)
    files = recorded(recording, tmp_path / "cache", tmp_path)
    row = read_data_row("tiny", tmp_path)
    assert row is not None
    assert row.return_mean == pytest.approx(row.rows / row.episodes, abs=1e-3)
    before = [(path, Path(path).stat().st_mtime_ns) for path in files]
    assert recorded(recording, tmp_path / "cache", tmp_path) == files
    assert [(path, Path(path).stat().st_mtime_ns) for path in files] == before


@pytest.mark.parametrize(
    ("name", "means", "holds"),
    [
        ("bc-cartpole-expert", {"bc-cartpole-expert": 476}, "yes"),
        ("bc-cartpole-expert", {"bc-cartpole-expert": 474}, "no"),
        ("bc-cartpole-medium", {"bc-cartpole-medium": 109}, "yes"),
        ("bc-cartpole-medium", {"bc-cartpole-medium": 89}, "no"),
        ("marwil-cartpole-mixed", {"bc-cartpole-mixed": 200, "marwil-cartpole-mixed": 301}, "yes"),
        ("marwil-cartpole-mixed", {"bc-cartpole-mixed": 260, "marwil-cartpole-mixed": 301}, "no"),
    ],
)
def test_seeds_are_compared_with_a_target_their_data_and_other_tasks(
    tmp_path: Path, name: str, means: dict[str, float], holds: str
) -> None:
    assert f"results/{name}.csv" not in page_of(tmp_path)
    data = DataRow(1000, 500.0, 100_000, 200, 100.0, 1.0, 98.0, 102.0, "0.1")
    for recording in RECORDINGS:
        write_csv(tmp_path / "data" / f"{recording}.csv", [vars(data)])
    for task, mean in means.items():
        rows = [Row(seed, 100, mean, 1.0, 100, 9.0, 2, "0.1") for seed in range(5)]
        write_csv(tmp_path / f"{task}.csv", [vars(row) for row in rows])
    line = next(line for line in page_of(tmp_path).splitlines() if f"results/{name}.csv" in line)
    assert [cell.strip() for cell in line.strip("|").split("|")][9] == holds


@pytest.mark.parametrize("workers", COUNTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.algo)
def test_each_case_of_worker_counts_is_a_valid_run(case: Case, workers: int) -> None:
    config = configure_learner(words_of(case, workers, ["a.parquet"]), config_class)
    assert (config.algo, config.num_workers) == (case.algo, workers)
    assert bool(case.data) == (config.input == ["a.parquet"]) == (case.num_envs == 0)


@pytest.mark.nightly
def test_runs_with_one_worker_and_with_four_have_the_same_distribution() -> None:
    """On-policy runs with a seed are deterministic: on a given machine, the test always passes or
    always fails.
    """
    case = Case("ppo", "ppo-cartpole", "CartPole-v1", 8, 20_000)
    one, four = (
        [measured(case, workers, seed).return_over_all for seed in range(5)] for workers in (1, 4)
    )
    assert min(*one, *four) > 40, "the policy learns"
    assert chance_of(one, four) > 0.01
