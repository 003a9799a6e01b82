"""`aiorl launch here` under Open MPI's mpirun, and with the variables of other starters."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aiorl.launch import __main__ as program, here

SHARED = ("--", "--env", "CartPole-v1", "--run-dir", "mine")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Return the commands that copies in a new directory become."""
    commands: list[list[str]] = []
    for name in {name for pair in here.RANK_VARIABLES for name in pair} | {"SLURM_CPUS_PER_TASK"}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execve", lambda path, command, environment: commands.append(command))
    monkeypatch.setattr(here, "usable_cores", lambda: 8)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    return commands


@pytest.mark.parametrize(
    ("variables", "rank", "cores"),
    [
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "SLURM_PROCID": "1"},
            0,
            4,
        ),
        ({"PMI_RANK": "3"}, 3, 8),
        ({"SLURM_PROCID": "1", "SLURM_TASKS_PER_NODE": "4(x2)"}, 1, 2),
        ({"SLURM_PROCID": "0", "SLURM_CPUS_PER_TASK": "6"}, 0, 6),
        ({"RANK": "0", "PBS_NODENUM": "2"}, 0, 8),
    ],
)
def test_the_starters_variables_name_the_learner_and_its_workers(
    started: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    rank: int,
    cores: int,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(here, "_wait_for_keys", lambda job: None)
    program.main(["here", *SHARED])
    (command,) = started
    assert command[4] == ("worker" if rank else "train")
    assert command[-1] == str(cores if rank else cores - 2)
    assert Path("mine/keys/worker.key_secret").exists() == (rank == 0)


def test_copies_without_a_shared_directory_meet_at_an_address(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("keys").mkdir()
    for name in ("worker.key_secret", "learner.key"):
        Path("keys", name).touch()
    words = [
        "here",
        "--address",
        "tcp://host1:5557",
        "--workers",
        "3",
        "--",
        "--env",
        "CartPole-v1",
        "--keys",
        "keys",
    ]
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        program.main(words)
    learner, worker = (" ".join(command) for command in started)
    assert "--bind tcp://0.0.0.0:5557 --advertise host1" in learner
    assert worker.endswith(
        f"worker --connect tcp://host1:5557 --keys {Path('keys').absolute()} --num-workers 3"
    )


@pytest.mark.parametrize(
    ("rank", "words", "says"),
    [
        ("", SHARED, "RANK"),
        ("0", SHARED[:3], "--run-dir"),
        ("0", ("--address", "tcp://host1:5557", *SHARED), "--keys"),
        ("0", ("--address", "host1", *SHARED), "--address"),
    ],
)
def test_copies_that_cannot_meet_end_at_once(
    started: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: str,
    words: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.setenv("RANK", rank)
    assert program.main(["here", *words]) == 2
    assert says in capsys.readouterr().err
    assert started == []


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("mpirun"), reason="Open MPI's mpirun is not installed")
def test_mpirun_starts_a_learner_and_workers_that_end_together(tmp_path: Path) -> None:
    allowed = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command = [
        "mpirun",
        *allowed,
        "--oversubscribe",
        "-n",
        "2",
        sys.executable,
        "-P",
        "-m",
        "aiorl",
        "launch",
        "here",
    ]
    learner = [
        *SHARED,
        "--stop-timesteps",
        "4000",
        "--num-workers",
        "0",
        "--train-batch-size",
        "400",
        "--xla",
        "off",
    ]
    done = subprocess.run(
        [*command, "--workers", "1", *learner],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "OMPI_COMM_WORLD_RANK is 1: workers" in done.stderr
    result = (tmp_path / "mine" / "result.jsonl").read_text().splitlines()[-1]
    assert '"num_healthy_workers":1' in result
