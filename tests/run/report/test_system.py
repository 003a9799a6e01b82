from __future__ import annotations

import itertools
import logging
import os
import time

import psutil
import pytest

from aiorl.run.report.results import SystemUsage


def test_cpu_and_memory_use_are_plausible() -> None:
    """R195."""
    usage = SystemUsage()
    busy_until = time.process_time() + 0.1
    while time.process_time() < busy_until:
        pass
    figures = usage.measure()
    assert 0.0 <= figures["cpu_util_percent"] <= 100.0
    assert 0.0 < figures["ram_util_percent"] <= 100.0
    assert figures["learner_cpu_percent"] > 0.0
    with open(f"/proc/{os.getpid()}/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert abs(figures["learner_rss_bytes"] - resident) < 0.2 * resident


def test_what_cannot_be_measured_is_left_out_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without file descriptors, /proc can't be opened; that once ended a run."""

    def out_of_descriptors(*_: object) -> None:
        raise OSError(24, "Too many open files")

    usage = SystemUsage(itertools.count().__next__)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "aiorl"):
        patch.setattr(psutil, "cpu_percent", out_of_descriptors)
        assert [usage.measure() for _ in range(3)] == [{}, {}, {}]
    assert len(caplog.records) == 1
    assert len(usage.measure()) == 4
    monkeypatch.setattr(psutil, "Process", out_of_descriptors)
    later = SystemUsage(itertools.count().__next__)
    assert later.measure() == {}
    monkeypatch.undo()
    assert len(later.measure()) == 4
