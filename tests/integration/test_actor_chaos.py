"""Random faults in a program of actors, with local and joined processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux", reason="finds and disturbs processes by means of Linux"
    ),
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("seconds", "num_faults"), [(12, 3), pytest.param(30, 8, marks=pytest.mark.nightly)]
)
def test_each_call_of_a_program_of_actors_ends_once_whatever_strikes_it(
    tmp_path: Path, seconds: int, num_faults: int
) -> None:
    results = tmp_path / "chaos.json"
    command = [sys.executable, "-m", "benchmarks.chaos", "--actors", "--slack=3"]
    command += [f"--seconds={seconds}", f"--json={results}", f"--folder={tmp_path / 'logs'}"]
    chaos = subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        text, _ = chaos.communicate(timeout=360)
    finally:
        chaos.terminate()
        chaos.wait(60)
    assert chaos.returncode == 0, text
    report = json.loads(results.read_text())
    assert report["complaints"] == []
    assert report["calls"]["ok"] > 200
    assert report["calls"]["lost"] > 0
    assert len(report["faults"]) >= num_faults
