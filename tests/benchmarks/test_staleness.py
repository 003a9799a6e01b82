from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.rows import write_csv
from benchmarks.staleness import StaleRow, measured, read_stale_rows, section_of


@pytest.mark.nightly
@pytest.mark.parametrize("algo", ["impala", "appo"])
def test_a_seed_is_trained_on_samples_of_just_that_lag(algo: str) -> None:
    row = measured(algo, 2, 0, env_steps=20_000)  # it looks at the versions of all that it trains on
    assert (row.algo, row.lag, row.seed) == (algo, 2, 0)
    assert 20_000 <= row.env_steps < 25_000
    assert 9 < row.return_last <= 500


def test_the_page_has_a_line_for_each_lag_with_the_mean_and_the_worst_seed(tmp_path: Path) -> None:
    rows = [
        StaleRow("impala", 4, 0, 1_000_000, 4096, 500.0, 300.0),
        StaleRow("impala", 4, 1, 1_000_000, 4096, 400.0, 200.0),
        StaleRow("appo", 4, 0, 1_000_000, 4096, 90.0, 50.5),
        StaleRow("impala", 0, 0, 1_000_000, 4096, 499.0, 350.0),
    ]
    write_csv(tmp_path / "staleness.csv", [vars(row) for row in rows])
    assert read_stale_rows(tmp_path) == rows
    lines = section_of(rows)
    assert lines[-2:] == [
        "| 0 | 0 | 499.0 (499.0) | 350.0 (350.0) |  |  |",
        "| 4 | 16,384 | 450.0 (400.0) | 250.0 (200.0) | 90.0 (90.0) | 50.5 (50.5) |",
    ]
    assert section_of([]) == []
