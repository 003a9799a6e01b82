"""`make chaos CHAOS=--actors` can fail: its accounts notice each call that breaks the rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos.actor_faults import ActorReport, accounts_of

CALL = ["0-1", "begin", "echo", 2]
LOST = [["0-9", "begin", "wait", 1], ["0-9", "lost"]]
OVER = ["", "end"]


def report_of(folder: Path, lines: list[list[Any]], ran: str) -> ActorReport:
    report = ActorReport(seed=1)
    text = "".join(f"{json.dumps(line)}\n" for line in [*LOST, *lines])
    (folder / "calls-0.jsonl").write_text(text)
    (folder / "ran-1-a.txt").write_text(ran)
    accounts_of(folder, report)
    return report


@pytest.mark.parametrize(
    ("lines", "ran", "complaint"),
    [
        ([CALL, ["0-1", "ok"], OVER], "0-1\n", ""),
        ([CALL], "", ""),  # the hub was killed
        ([CALL, ["0-1", "ok"], ["0-1", "ok"], OVER], "0-1\n", "ended 2 times"),
        ([CALL, OVER], "0-1\n", "has no end"),
        ([CALL, ["0-1", "stuck"], OVER], "0-1\n", "stuck"),
        ([CALL, ["0-1", "wrong: ValueError"], OVER], "0-1\n", "ValueError"),
        ([CALL, ["0-1", "ok"], OVER], "0-1\n0-1\n", "run twice"),
        ([CALL, ["0-1", "ok"], OVER], "0-1\n0-1/other\n0-1/other\n", "2 times|run twice"),
        ([CALL, ["0-1", "ok"], OVER], "", "without having been run"),
    ],
)
def test_calls_are_accounted_for(
    tmp_path: Path, lines: list[list[Any]], ran: str, complaint: str
) -> None:
    report = report_of(tmp_path, lines, ran)
    assert bool(report.complaints) == bool(complaint)
    if complaint:
        assert any(part in "; ".join(report.complaints) for part in complaint.split("|"))
    assert report.calls["lost"] == 1


def test_a_campaign_in_which_nothing_was_lost_proves_nothing() -> None:
    report = ActorReport(seed=1)
    report.calls["ok"] = 1000
    assert not report.ok
    report.calls["lost"] = 1
    assert report.ok
