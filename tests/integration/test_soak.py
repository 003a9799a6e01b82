"""A minute with everything on: two recurrent policies, filters, compression, environments whose processes die."""

from __future__ import annotations

import pytest

from benchmarks.soak import repeated_warnings, run_soak

LOG = """\
2026-01-02 23:59:40,123 INFO aiorl.x: copy 1 restarts
2026-01-02 23:59:41,123 WARNING aiorl.x: copy 1 restarts
23:59:50 I copy 2 restarts
00:00:20 W another one
00:00:42 W another one
2026-01-03 00:00:45,001 WARNING aiorl.x: copy 3 restarts
00:02:42 W another one
"""


def test_warnings_that_come_again_within_a_minute_are_found_also_over_midnight():
    assert repeated_warnings(LOG) == ["another one"]
    assert repeated_warnings(LOG, period_s=70.0) == ["another one", "aiorl.x: copy # restarts"]


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
    # the learner compiles for new sizes of batches within the first minute, so only the worker's memory says anything
    rows = [size / 1e6 for at, size in report.memory["worker"] if 30.0 <= at < 50.0]
    assert max(rows) - min(rows) < 20.0, rows
