"""A minute with everything on: two recurrent policies, filters, compression, dying environment
processes.
"""

from __future__ import annotations

import pytest

from benchmarks.soak import run_soak


@pytest.mark.nightly
def test_a_minute_with_everything_on_leaves_a_balanced_ledger_and_a_quiet_log(tmp_path):
    report = run_soak(60.0, tmp_path, mean_steps=1000.0)
    output = (tmp_path / "output.txt").read_text()
    assert report.status == 0, output
    assert report.results >= 5
    assert report.env_steps >= 3000
    assert report.restarts >= 4
    assert report.unbalanced == 0
    assert report.repeated == []
    # the learner compiles for new batch sizes in the first minute, so only the worker's memory is
    # meaningful
    rows = [size / 1e6 for at, size in report.memory["worker"] if 30.0 <= at < 50.0]
    assert max(rows) - min(rows) < 20.0, rows
