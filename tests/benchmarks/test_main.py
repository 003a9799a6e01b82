from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import __main__ as program
from benchmarks.result import Figure


def fails() -> list[Figure]:
    raise RuntimeError("3 results in the last 4 s")


def interrupted() -> list[Figure]:
    raise KeyboardInterrupt


def one() -> list[Figure]:
    return [Figure("tiny/one", 2.0, "steps/s", 1.0, target_ratio=1.5)]


def test_a_figure_that_cannot_be_measured_is_a_row_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "_functions", lambda: {"broken": fails, "tiny": one})
    assert program.main(["--json", str(tmp_path / "bench.json")]) == 1
    broken, tiny = json.loads((tmp_path / "bench.json").read_text())
    assert (broken["name"], broken["ok"], broken["problem"]) == (
        "broken",
        False,
        "RuntimeError: 3 results in the last 4 s",
    )
    assert (tiny["name"], tiny["ok"]) == ("tiny/one", True)
    table = capsys.readouterr().out.rpartition("aiorl benchmarks")[2]
    assert "not measured: RuntimeError: 3 results" in table
    assert "tiny/one" in table


def test_what_was_measured_before_ctrl_c_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "_functions", lambda: {"tiny": one, "slow": interrupted, "never": fails})
    assert program.main([]) == 130
    table = capsys.readouterr().out.rpartition("aiorl benchmarks")[2]
    assert "tiny/one" in table
    assert "never" not in table
