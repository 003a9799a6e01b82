"""Errors and signals before a learner has made anything: one sentence, and no run directory."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aiorl.learner import main

ENVS = """
import numpy as np, gymnasium
from gymnasium import spaces

class Plain(gymnasium.Env):
    observation_space, action_space = spaces.Box(-1.0, 1.0, (3,), np.float32), spaces.Discrete(2)

class Sized(Plain):
    def __init__(self, size, *, depth, speed=1.0): ...

class SeenInSequence(Plain):
    observation_space = spaces.Sequence(spaces.Discrete(3))

class ActedInSequence(Plain):
    action_space = spaces.Sequence(spaces.Discrete(3))

gymnasium.register("Sized-v0", "refused_envs:Sized")
gymnasium.register("Half-v0", "refused_envs:Sized", kwargs={"size": 1})
"""

WHILE_IT_LOADS = """
import builtins, os, runpy, signal, sys
load = builtins.__import__
def interrupted(name, *arguments, **options):
    if name.startswith("aiorl.learning.algorithms."):
        os.kill(os.getpid(), signal.{name})
    return load(name, *arguments, **options)
builtins.__import__ = interrupted
sys.argv = ["learner", "--env", "CartPole-v1"]
runpy.run_module("aiorl.learner", run_name="__main__", alter_sys=True)
"""

Refused = Callable[..., str]


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Refused]:
    """Run a learner that must end with status 2 in an empty directory, and return its output."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "refused_envs.py").write_text(ENVS)
    (tmp_path / "cwd").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "lib")
    monkeypatch.chdir(tmp_path / "cwd")
    variables, level = dict(os.environ), logging.getLogger("aiorl").level

    def run(*words: str) -> str:
        try:
            status: Any = main(words)
        except SystemExit as exit:
            status = exit.code
        assert status == 2
        assert not list((tmp_path / "cwd").iterdir()), "nothing is made"
        return capsys.readouterr().err

    yield run
    logging.captureWarnings(False)
    logging.getLogger("aiorl").setLevel(level)
    os.environ.clear()
    os.environ.update(variables)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--env refused_envs:Sized", "--env-config.size "),
        ("--env refused_envs:Sized --env-config.size 3", "--env-config.depth "),
        ("--env refused_envs:Sized-v0", "size, depth"),
        ("--env refused_envs:Half-v0", "--env-config.depth "),
        ("--env refused_envs:SeenInSequence", "model.custom_preprocessor"),
        ("--env refused_envs:ActedInSequence", "MultiDiscrete"),
        ("--env CartPole-v1 --keys nowhere", "`aiorl keys nowhere`"),
        ("--env CartPole-v1 --init-from nowhere", "nowhere"),
        ("--env CartPole-v1 --init-from .", "cwd"),
        ("--env CartPole-v1 --resume nowhere --init-from other", "--init-from"),
        ("--env CartPole-v1 --model.fcnet-hidens [8]", "hiddens'"),
    ],
)
def test_errors_name_the_cause_and_the_remedy(refused: Refused, words: str, value: str) -> None:
    said = refused(*words.split())
    assert value in said
    assert "Traceback" not in said


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--algo", "bc"], "--input"),
        (["--algo", "bc", "--input", "missing"], "'missing'"),
        (["--algo", "marwil", "--input", "[data/*.json]"], "'data/*.json'"),
        (["--output", __file__], "Name a directory"),
    ],
)
def test_files_of_experience_that_are_missing_or_in_the_way_are_reported_before_tensorflow_is_loaded(
    tmp_path: Path, words: list[str], said: str
) -> None:
    code = (
        "import sys\n"
        "from aiorl.learner import main\n"
        "try:\n"
        "    status = main(['--env', 'CartPole-v1', *sys.argv[1:]])\n"
        "except SystemExit as exit:\n"
        "    status = exit.code\n"
        "assert 'tensorflow' not in sys.modules\n"
        "sys.exit(status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert not list(tmp_path.iterdir())


def test_without_the_extras_of_a_learner_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys\nsys.modules.update(dict.fromkeys(['tensorflow', 'keras', 'tf2onnx', 'onnx',"
        " 'tensorboard', 'matplotlib', 'h5py']))\nfrom aiorl.learner import"
        " main\nsys.exit(main(['--env', 'CartPole-v1']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    needed, _, command = done.stderr.partition(" pip install -e ")
    assert done.returncode == 2
    assert "tensorflow, keras, tf2onnx, onnx, " in needed
    assert done.stderr.count("\n") == 1
    assert (Path(shlex.split(command)[0].removesuffix("[learner]")) / "pyproject.toml").is_file()
    assert not list(tmp_path.iterdir())


def test_a_warning_before_there_is_a_display_is_shown_once(refused: Refused) -> None:
    said = refused("--env", "refused_envs:Sized", "--multiagent.polices", "{}")
    assert said.count("multiagent.polices") == 1


@pytest.mark.parametrize("program", ["aiorl.__main__", "aiorl.worker"])
def test_help_ends_quietly_if_its_reader_is_gone(program: str) -> None:
    """As `aiorl train --help | head -1` does."""
    code = (
        f"import sys, {program} as program; sys.argv[1:] = ['--help']; sys.exit(program.command())"
    )
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        'aiorl = "aiorl.__main__:command"'
        in (Path(__file__).parents[2] / "pyproject.toml").read_text()
    )


def test_a_signal_while_the_program_loads_is_answered_in_one_line() -> None:
    code = WHILE_IT_LOADS.replace("{name}", "SIGTERM")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (143, "", 1)
    assert "SIGTERM" in done.stderr
