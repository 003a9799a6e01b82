"""`aiorl COMMAND`: one program for all commands."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from saved_runs import save_run

import aiorl
from aiorl import __main__ as program
from aiorl.config.command_line import as_typed

ROOT = Path(__file__).parents[1]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        status = program.main(words)
    except SystemExit as ended:
        status = int(str(ended.code))
    output = capsys.readouterr()
    return status, output.out, output.err


def test_help_lists_every_command_and_no_command_is_wrong_usage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, _ = said(capsys, "--help")
    assert status == 0
    for name in (
        "train",
        "worker",
        "evaluate",
        "plot",
        "export",
        "estimate",
        "data",
        "keys",
        "--version",
    ):
        assert f"  {name} " in out or f"aiorl {name}" in out
    assert said(capsys) == (2, out, "")


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--version") == (0, f"aiorl {aiorl.__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["evaluat", "runs/mine"], "'evaluate'"),
        (["xyz"], "train, worker, evaluate"),
        (["play", "runs/mine"], "aiorl evaluate"),
        (["--env", "CartPole-v1"], "aiorl train --env CartPole-v1"),
    ],
)
def test_an_unknown_command_is_refused_with_a_suggestion(
    capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    status, _, err = said(capsys, *words)
    assert status == 2
    assert says in err


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    save_run(directory, env="CartPole-v1")
    (directory / "result.jsonl").write_text(
        '{"timesteps_total": 9, "time_total_s": 1, "episode_reward_mean": 2}\n'
    )
    return directory


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        ("evaluate nowhere", 1, "nowhere"),
        ("evaluate RUN --episodes 0", 2, "--episodes"),
        ("evaluate RUN --episode 3", 2, "'--episodes'"),
        ("evaluate RUN --video film.txt", 2, ".mp4"),
        ("evaluate RUN --video nowhere/film.mp4", 2, "nowhere/film.mp4"),
        ("evaluate RUN --video film.mp4 --render human", 2, "--render"),
        ("export nowhere", 1, "nowhere"),
        ("export RUN --formats onx", 2, "onnx, savedmodel, keras, tflite"),
        ("export RUN --format onnx", 2, "'--formats'"),
        ("export RUN --policy left", 2, "'default_policy'"),
        ("export RUN --out RUN/result.jsonl", 2, "result.jsonl"),
        ("plot nowhere", 2, "nowhere"),
        ("plot", 2, "RUN"),
        ("plot RUN --goal much", 2, "--goal"),
        ("plot RUN --out curves.docx", 2, "curves.docx"),
    ],
)
def test_a_mistake_in_a_command_takes_one_sentence(
    capsys: pytest.CaptureFixture[str], saved: Path, words: str, status: int, says: str
) -> None:
    exit_status, _, error = said(capsys, *words.replace("RUN", str(saved)).split())
    assert (exit_status, error.count("\n") <= 2) == (status, True)
    assert says in error


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("train --config CLOSED/file", 2),
        ("train --env CartPole-v1 --run-dir CLOSED/run", 1),
        ("train --env CartPole-v1 --output CLOSED", 2),
        ("train --env CartPole-v1 --output CLOSED/data", 2),
        ("train --env CartPole-v1 --algo bc --input CLOSED", 2),
        ("train --env CartPole-v1 --init-from CLOSED", 2),
        ("train --env CartPole-v1 --keys CLOSED", 2),
        ("evaluate CLOSED", 1),
        ("evaluate RUN", 1),
        ("serve CLOSED", 1),
        ("status CLOSED", 1),
        ("data inspect CLOSED", 2),
        ("keys CLOSED/keys", 1),
    ],
)
def test_what_may_not_be_used_is_named_with_what_to_do(
    tmp_path: Path, words: str, status: int
) -> None:
    closed = tmp_path / "closed"
    checkpoint = tmp_path / "run" / "checkpoints" / "checkpoint-000007"
    for directory in (closed, checkpoint):
        directory.mkdir(parents=True)
        directory.chmod(0)
    if os.access(closed, os.W_OK):
        pytest.skip("this user may read and write everything, as root may")
    command = words.replace("CLOSED", str(closed)).replace("RUN", str(tmp_path / "run"))
    done = subprocess.run(
        [sys.executable, "-m", "aiorl", *command.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (status, False)
    assert (checkpoint.name if "RUN" in words else str(closed)) in done.stderr
    assert "Permission denied" in done.stderr


def test_messages_name_the_command_that_was_typed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = (
        "python -m aiorl.learner --resume a; python -m aiorl.evaluate a; python -m"
        " aiorl.config.rllib_file"
    )
    for argv0 in ("/home/me/.venv/bin/aiorl", "mine.py"):
        monkeypatch.setattr(sys, "argv", [argv0, "train"])
        assert (
            as_typed(text)
            == "aiorl train --resume a; aiorl evaluate a; python -m aiorl.config.rllib_file"
        )
    monkeypatch.setattr(sys, "argv", [str(ROOT / "aiorl/learner.py")])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert as_typed(text) == text
    (tmp_path / "aiorl").write_text("#!/bin/sh")
    (tmp_path / "aiorl").chmod(0o755)
    assert as_typed(text).startswith("aiorl train"), "the short name can be typed, too"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return the console script in the form that installers write."""
    module, _, name = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "scripts"
    ]["aiorl"].partition(":")
    (tmp_path / "bin").mkdir()
    path = tmp_path / "bin" / "aiorl"
    path.write_text(
        f"#!{sys.executable}\nimport sys\nfrom {module} import {name}\nsys.exit({name}())\n"
    )
    path.chmod(0o755)
    return path


def run(*words: object, cwd: Path, code: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [str(word) for word in words]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_help_loads_no_library(tmp_path: Path) -> None:
    result = run(sys.executable, "-X", "importtime", "-m", "aiorl", "--help", cwd=tmp_path)
    assert result.returncode == 0
    loaded = {
        line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()
    }
    assert "aiorl" in loaded
    assert not loaded & {"numpy", "zmq", "yaml", "pydantic", "gymnasium", "tensorflow", "asyncio"}


def test_the_console_script_finds_modules_in_the_current_directory(
    script: Path, tmp_path: Path
) -> None:
    (tmp_path / "here.py").write_text("raise RuntimeError('found here')\n")
    result = run(script, "train", "--env", "here:Env", "--run-dir", "run", cwd=tmp_path)
    assert result.returncode == 2
    assert "found here" in result.stderr
    assert "`aiorl train --help`" in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_module_in_the_current_directory_hides_no_module_of_python(
    script: Path, tmp_path: Path
) -> None:
    for name in ("random", "asyncio", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the wrong one')\n")
    assert run(script, "keys", tmp_path / "keys", cwd=tmp_path).returncode == 0
    worker = run(
        script,
        "worker",
        "--connect=tcp://127.0.0.1:9",
        f"--keys={tmp_path / 'nowhere'}",
        cwd=tmp_path,
    )
    assert worker.returncode == 2
    assert str(tmp_path / "nowhere") in worker.stderr
