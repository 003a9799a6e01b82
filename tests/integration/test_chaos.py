"""Ninety seconds of random faults: PPO and IMPALA, each with workers of its own and from outside, with keys."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are found and struck by Linux's means"),
]


def start(*options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.chaos", *options]
    return subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
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


@pytest.mark.timeout(200)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ended_early_it_leaves_no_process_behind(tmp_path, number):
    chaos = start("--seconds=90", "--algos=ppo", f"--folder={tmp_path}")
    mark = str(tmp_path)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "disk" / "ppo" / "logs" / "worker-2.txt").exists():
            assert time.monotonic() < deadline
            assert chaos.poll() is None
            time.sleep(0.1)
        chaos.send_signal(number)
        assert chaos.wait(60) == 130
    finally:
        chaos.kill()
        chaos.communicate()
    left = [
        each.info["cmdline"]
        for each in psutil.process_iter(["cmdline"])
        if mark in " ".join(each.info["cmdline"] or [])
    ]
    assert left == []
    assert not (tmp_path / "disk").is_mount()
