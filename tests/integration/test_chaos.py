"""Ninety seconds of random faults:

PPO and IMPALA, each with local and external workers, with keys.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        sys.platform != "linux", reason="finds and disturbs processes by means of Linux"
    ),
]


def start(*options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.chaos", *options]
    return subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.timeout(900)
def test_a_run_survives_90_s_of_random_faults(tmp_path):
    told = tmp_path / "chaos.json"
    chaos = start("--seconds=90", "--slack=3", f"--json={told}", f"--folder={tmp_path / 'logs'}")
    try:
        text, _ = chaos.communicate(timeout=840)
    finally:
        chaos.terminate()
        chaos.wait(60)
    assert chaos.returncode == 0, text
    report = json.loads(told.read_text())
    assert len(report["by_kind"]) >= 10
    assert {each["algo"] for each in report["struck"]} == {"ppo", "impala"}
    assert report["results"] > 50
    for none in ("gaps", "aborted", "orphans", "complaints"):
        assert report[none] == []
