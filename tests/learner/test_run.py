"""What a run tells its user."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from aiorl.config.schema import CommonConfig
from aiorl.learner.run import Run
from aiorl.learner.run_dir import RunDirectory
from aiorl.report.console import PlainDisplay


class Recorder(PlainDisplay):
    """Keeps what it is to show."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def event(self, text: str, now: float, level: int = logging.INFO) -> None:
        """Keeps an event."""
        self.shown.append(text)


def test_no_line_of_what_is_told_passes_for_a_line_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Several lines are moved in, control characters are gone, and there is an end to it."""
    config = CommonConfig.from_mapping({"env": "CartPole-v1", "run_dir": str(tmp_path / "run")})
    display = Recorder()
    run = Run(config, RunDirectory.open(config), display)
    with caplog.at_level(logging.INFO):
        run._tell(
            "worker 1 failed: \x1b[2Jboom\n2026-01-01 00:00:00,000 ERROR aiorl: forged\u2028x\rabc", logging.ERROR
        )
        run._tell("long " * 100_000, logging.INFO)
    first, long = display.shown
    assert first.split("\n") == [
        "worker 1 failed: ?[2Jboom",
        "    2026-01-01 00:00:00,000 ERROR aiorl: forged",
        "    x",
        "    abc",
    ]
    assert len(long) <= 24_000
    assert [record.getMessage() for record in caplog.records] == [first, long]
