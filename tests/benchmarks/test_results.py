"""Learning results: a seed is run once, and the page says what the files of results hold."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from aiorl.offline.readers import FileReader, ReaderOptions
from benchmarks import recordings
from benchmarks.recordings import RECORDINGS, DataRow, Player, Recording, read_data_row, recorded
from benchmarks.results import TASKS, OfflineTask, Row, Task, measure, page_of, read_rows
from benchmarks.rows import write_csv


@pytest.mark.nightly
def test_a_seed_is_trained_evaluated_and_kept_as_a_row_and_a_curve(tmp_path: Path) -> None:
    task = Task("quick", "ppo-cartpole", "CartPole-v1", 2000, 10.0, "nothing", options={"num-workers": 1, "xla": "off"})
    rows = [measure(task, seed, tmp_path, episodes=3) for seed in (1, 0)]
    assert read_rows(task, tmp_path) == rows[::-1]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, stdout=subprocess.PIPE, check=True)
    assert all(commit.stdout.decode().startswith(row.commit.rstrip("+")) for row in rows)
    assert all(row.env_steps >= 2000 and row.episodes == 3 and row.return_mean > 0 for row in rows)
    header, *points = (tmp_path / "curves" / "quick-1.csv").read_text().splitlines()
    assert header.startswith("env_steps_trained_total,")
    assert points


@pytest.mark.parametrize(
    ("returns", "holds"), [([500, 500, 480, 500, 480], "yes"), ([500, 500, 500, 500, 300], "no"), ([500], "so far")]
)
def test_the_page_has_mean_interquartile_mean_and_worst_over_seeds_beside_the_bar(
    tmp_path: Path, returns: list[float], holds: str
) -> None:
    task = Task("some", "ppo-cartpole", "CartPole-v1", 100, 490 if min(returns) > 400 else 400, "500 (somebody)")
    rows = [Row(seed, 100, value, 1.0, 100, 9.0, 2, "0.1") for seed, value in enumerate(returns)]
    text = ",".join(vars(rows[0])) + "\n" + "\n".join(",".join(map(str, vars(row).values())) for row in rows)
    (tmp_path / "some.csv").write_text(text + "\n")
    line = next(line for line in page_of(tmp_path, [task]).splitlines() if "some.csv" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[3] == str(len(returns))
    assert float(cells[4]) == pytest.approx(np.mean(returns), abs=0.05)
    assert float(cells[7]) == min(returns)
    middle = np.mean(sorted(returns)[1:-1]) if len(returns) == 5 else np.mean(returns)
    assert float(cells[6]) == pytest.approx(middle, abs=0.05)
    assert cells[9] == holds


def test_rows_that_are_older_than_a_field_are_read(tmp_path: Path) -> None:
    (tmp_path / "none.csv").write_text(
        "seed,env_steps,return_mean,return_std,episodes,wall_s,cores,version\n3,100,5.0,1.0,100,9.0,2,0.1\n"
    )
    task = Task("none", "ppo-cartpole", "CartPole-v1", 100, 1.0, "nothing")
    assert read_rows(task, tmp_path) == [Row(3, 100, 5.0, 1.0, 100, 9.0, 2, "0.1")]


def test_a_task_without_rows_says_so(tmp_path: Path) -> None:
    task = Task("none", "ppo-cartpole", "CartPole-v1", 100, 1.0, "nothing")
    assert "not measured yet" in page_of(tmp_path, [task])


def test_a_recording_is_whole_episodes_in_files_made_once_and_again_as_before(tmp_path: Path) -> None:
    recording = Recording("tiny", "CartPole-v1", None, rows=2000)
    files = recorded(recording, tmp_path / "cache", tmp_path)
    assert len(files) == recordings.NUM_FILES
    row = read_data_row("tiny", tmp_path)
    assert row is not None
    assert row.rows >= 2000
    batches = list(FileReader(files, ReaderOptions(epochs=1)))
    assert sum(batch.count for batch in batches) == row.rows
    assert sum(int(batch["dones"].sum()) for batch in batches) == row.episodes
    assert row.return_mean == pytest.approx(row.rows / row.episodes, abs=1e-3)
    before = [(path, Path(path).stat().st_mtime_ns) for path in files]
    assert recorded(recording, tmp_path / "cache", tmp_path) == files
    assert [(path, Path(path).stat().st_mtime_ns) for path in files] == before
    recorded(recording, tmp_path / "other", tmp_path)
    assert read_data_row("tiny", tmp_path) == row


@pytest.mark.nightly
def test_a_seed_learns_from_what_a_policy_that_was_trained_for_it_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expert = Recording("cartpole-expert", "CartPole-v1", Player("ppo-cartpole", 3000), rows=1000)
    medium = Recording("medium", "CartPole-v1", Player("ppo-cartpole", 9000, third_of="cartpole-expert"), rows=1000)
    monkeypatch.setitem(RECORDINGS, "cartpole-expert", expert)
    monkeypatch.setitem(RECORDINGS, "medium", medium)
    task = OfflineTask("quick", "bc-cartpole", "CartPole-v1", 20_000, 10.0, "", data=("medium",), explore=True,
                       of_data=(0.1, 10.0), options={"xla": "off"})  # fmt: skip
    row = measure(task, 0, tmp_path / "results", episodes=3, cache=tmp_path / "cache")
    assert read_rows(task, tmp_path / "results") == [row]
    assert row.env_steps >= 20_000
    found = {name: read_data_row(name, tmp_path / "results") for name in ("cartpole-expert", "medium")}
    assert all(data is not None and data.rows >= 1000 for data in found.values())
    assert not (tmp_path / "results" / "curves").exists(), "nobody played"
    assert "| so far |" in page_of(tmp_path / "results", [task])


def played(name: str, mean: float, folder: Path) -> None:
    row = DataRow(1000, 500.0, 100_000, 200, mean, 1.0, mean - 2, mean + 2, "0.1")
    write_csv(folder / "data" / f"{name}.csv", [vars(row)])


def learned(name: str, mean: float, folder: Path, seeds: int = 5) -> None:
    write_csv(folder / f"{name}.csv", [vars(Row(seed, 100, mean, 1.0, 100, 9.0, 2, "0.1")) for seed in range(seeds)])


@pytest.mark.parametrize(
    ("name", "means", "holds"),
    [
        ("bc-cartpole-expert", {"bc-cartpole-expert": 476}, "yes"),
        ("bc-cartpole-expert", {"bc-cartpole-expert": 474}, "no"),
        ("bc-cartpole-medium", {"bc-cartpole-medium": 109}, "yes"),
        ("bc-cartpole-medium", {"bc-cartpole-medium": 89}, "no"),
        ("bc-cartpole-medium", {"bc-cartpole-medium": 111}, "no"),
        ("marwil-cartpole-mixed", {"bc-cartpole-mixed": 200, "marwil-cartpole-mixed": 301}, "yes"),
        ("marwil-cartpole-mixed", {"bc-cartpole-mixed": 260, "marwil-cartpole-mixed": 301}, "no"),
        ("marwil-cartpole-mixed", {"bc-cartpole-mixed": 200, "marwil-cartpole-mixed": 299}, "no"),
        ("bc-halfcheetah-expert", {"bc-halfcheetah-expert": 95}, "yes"),
        ("bc-halfcheetah-expert", {"bc-halfcheetah-expert": 85}, "no"),
    ],
)
def test_what_learns_from_stored_experience_is_held_against_its_data_and_other_tasks(
    tmp_path: Path, name: str, means: dict[str, float], holds: str
) -> None:
    for recording in RECORDINGS:
        played(recording, 100.0, tmp_path)
    for task, mean in means.items():
        learned(task, mean, tmp_path)
    line = next(line for line in page_of(tmp_path).splitlines() if f"results/{name}.csv" in line)
    assert [cell.strip() for cell in line.strip("|").split("|")][9] == holds


def test_the_page_has_the_data_beside_and_says_what_is_missing(tmp_path: Path) -> None:
    played("cartpole-medium", 123.4, tmp_path)
    page = page_of(tmp_path)
    assert "| [`cartpole-medium`](results/data/cartpole-medium.csv) | CartPole-v1 | 100,000 | 200 | 123.4 |" in page
    assert "| `halfcheetah-expert` | HalfCheetah-v5 | 100,000 | | not recorded yet |" in page
    assert "| 111.1 to 135.7 |" in page
    assert "| 0.9 of the data |" in page
    names = {name for task in TASKS if isinstance(task, OfflineTask) for name in task.data}
    assert names == set(RECORDINGS)
