"""Workers on newer versions of Python than the learner's, which TensorFlow may not know yet."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from processes import CARTPOLE, SMALL, Started, StartedLearner, free_address

import aiorl

ROOT = Path(aiorl.__file__).parents[1]


def python_of(version: str) -> str:
    """Return the Python of a version; "" if this machine has none."""
    for program in filter(None, (shutil.which(f"python{version}"), shutil.which("uv"))):
        command = [program, "-c", "import sys; print(sys.executable)"]
        if program.endswith("uv"):
            command = [program, "python", "find", "--no-python-downloads", version]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode == 0:
            return done.stdout.strip()
    return ""


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", ["3.12", "3.13", "3.14"])
def test_a_worker_is_installed_and_samples_on_another_python(tmp_path: Path, version: str) -> None:
    python = python_of(version)
    if not python:
        pytest.skip(f"Python {version} is not on this machine, neither by its name nor by uv")
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True, timeout=120)
    theirs = tmp_path / "venv" / "bin" / "python"
    install = [theirs, "-m", "pip", "install", "--quiet", "--only-binary=:all:", ROOT]
    subprocess.run(install, check=True, timeout=600)
    address = free_address()
    options = (CARTPOLE, *SMALL, "--num-workers=0", f"--bind={address}", "--stop-timesteps=4096")
    learner = StartedLearner(tmp_path / "run", *options, "--run-dir", str(tmp_path / "run"))
    shell = ["sh", "-c", 'cd "$0" && exec "$@"', str(tmp_path), str(theirs), "-m", "aiorl.worker"]
    worker = Started([*shell, "--connect", address], {"PYTHONPATH": ""})
    try:
        assert learner.wait(120) == 0, f"{learner.text}\n{worker.text}"
        assert worker.wait(20) == 0, worker.text
        assert learner.results()[-1]["num_healthy_workers"] == 1
        imported = "import aiorl, sys; print(aiorl.__file__, sys.version_info[:2])"
        shown = subprocess.run(
            [theirs, "-c", imported],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": ""},
            capture_output=True,
            text=True,
            check=True,
        )
        assert str(tmp_path / "venv") in shown.stdout, "the worker's own copy"
    finally:
        worker.end()
        learner.end()
