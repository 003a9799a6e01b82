"""`aiorl launch ENGINE -- --script FILE`: a user's loop in place of a learner (R255)."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from processes import Started

import aiorl
from aiorl.launch import __main__ as program
from aiorl.launch.script_job import checked_script

ROOT = Path(aiorl.__file__).parents[1]
LOOP = ROOT / "tests" / "support" / "launched_loop.py"
PLACE = ("--", "--run-dir", "mine")


@pytest.fixture(autouse=True)
def _in_a_directory_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(LOOP, tmp_path / "my_loop.py")


# Mistakes
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("slurm -- --script missing.py", "'missing.py'"),
        ("here -- --run-dir mine --script missing.py", "'missing.py'"),
        ("ssh --hosts n1=1 -- --script missing.py", "'missing.py'"),
        ("ssh --hosts n1=1 --code sent -- --script my_loop.py", "--code"),
        ("ssh --hosts n1=1 --code sent -- --script sent/ignored.py", "--include"),
        ("slurm -- --env CartPole-v1 --script my_loop.py", "--env"),
        ("slurm -- --resume runs/mine --script my_loop.py", "--resume"),
        ("slurm -- --script", "--script"),
        ("slurm -- --script --env CartPole-v1", "--script"),
        ("slurm -- --run-dir trained --script my_loop.py", "aiorl train"),
        ("slurm -- --bind host1 --script my_loop.py", "bind"),
        ("slurm", "--script"),
    ],
)
def test_wrong_usage_is_named_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, says: str
) -> None:
    (tmp_path / "sent").mkdir()
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "config.yaml").touch()
    subprocess.run(["git", "init", "-q", "sent"], check=True, timeout=20)
    shutil.copy(LOOP, tmp_path / "sent" / "ignored.py")
    (tmp_path / "sent" / ".gitignore").write_text("ignored.py\n")
    before = sorted(tmp_path.rglob("*"))
    try:
        status = program.main(words.split())
    except SystemExit as ended:
        status = int(str(ended.code))
    shown = capsys.readouterr()
    assert (status, shown.out) == (2, "")
    assert says in shown.err
    assert sorted(tmp_path.rglob("*")) == before


# Here
# --------------------------------------------------------------------------------------------------


class Copies:
    """Copies of `aiorl launch here`, each in a process of its own."""

    def __init__(self) -> None:
        self.started: list[Started] = []

    def start(self, rank: int, *script: str) -> Started:
        words = ["here", "--workers", "1", *PLACE, "--script", *script]
        variables = {"RANK": str(rank), "WORLD_SIZE": "2"}
        command = [sys.executable, "-P", "-m", "aiorl", "launch", *words]
        self.started.append(Started(command, variables))
        return self.started[-1]


@pytest.fixture
def copies() -> Iterator[Copies]:
    made = Copies()
    yield made
    for started in made.started:
        started.end()


def test_copies_become_the_script_and_processes_that_join_it_and_end_with_its_status(
    copies: Copies,
) -> None:
    Path("loops").mkdir()
    shutil.move("my_loop.py", "loops")
    worker = copies.start(1, "loops/my_loop.py")
    loop = copies.start(0, "loops/my_loop.py", "seven", "--env", "a b")
    assert loop.wait(60) == 7, loop.text
    assert "turn 1 seven --env a b" in loop.text
    assert "2 actors, 1 joined" in loop.text
    assert worker.wait(20) == 0, worker.text
    assert Path("mine/turns.txt").read_text() == "turn\n"


def test_the_same_script_runs_alone() -> None:
    done = subprocess.run(
        [sys.executable, "my_loop.py", "seven"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    assert re.search(r"^\d+ actors, 0 joined", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_a_script_ends_in_order_by_a_signal_and_its_processes_wait_for_its_next_turn_or_end(
    copies: Copies,
) -> None:
    worker = copies.start(1, "my_loop.py", "wait")
    loop = copies.start(0, "my_loop.py", "wait")
    loop.wait_for("2 actors")
    loop.send(signal.SIGTERM)
    assert loop.wait(20) == 128 + signal.SIGTERM
    assert "ending in order" in loop.text
    assert "Traceback" not in loop.text
    again = copies.start(0, "my_loop.py", "wait")
    again.wait_for("turn 2")
    again.wait_for("2 actors, 1 joined")
    again.send(signal.SIGINT)
    assert again.wait(20) == 128 + signal.SIGINT
    assert worker.wait(20) == 0, worker.text


def test_a_script_that_fails_shows_why_and_ends_all(copies: Copies) -> None:
    worker = copies.start(1, "my_loop.py")
    loop = copies.start(0, "my_loop.py", "fail")
    assert loop.wait(60) == 1
    assert "RuntimeError: the loop failed" in loop.text
    assert worker.wait(20) == 0, worker.text


def test_a_script_that_opens_no_hub_is_warned_of(copies: Copies) -> None:
    loop = copies.start(0, "my_loop.py", "idle", "seven")
    assert loop.wait(60) == 7
    assert "my_loop.py ended without `async with aiorl.Actors()`" in loop.text


# Scripts and manifests of engines
# --------------------------------------------------------------------------------------------------


def printed(capsys: pytest.CaptureFixture[str], words: str) -> str:
    assert program.main(words.split()) == 0
    return capsys.readouterr().out


def test_a_slurm_script_says_how_many_processes_join_unless_they_come_and_go(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("sub").mkdir()
    shutil.move("my_loop.py", "sub/my_loop.py")
    words = "--print -- --run-dir mine --script sub/my_loop.py --nodes 9"
    fixed = printed(capsys, f"slurm --nodes 3 --cpus-per-node 4 {words}")
    assert "--num-here 3 --num-joining 8 -- sub/my_loop.py --nodes 9" in fixed
    assert f"export PYTHONPATH={Path('sub').absolute()}" in fixed
    elastic = printed(capsys, f"slurm --elastic 3 --cpus-per-node 4 {words}")
    assert "--num-joining" not in elastic
    assert elastic.count(f"export PYTHONPATH={Path('sub').absolute()}") == 2


def of_shell(script: str, end: str, environment: dict[str, str] | None = None) -> list[str]:
    """Return what the first lines of a shell script would run, or a variable that they set."""
    start = script.index('/keys"\n') + len('/keys"\n')
    lines = script[start:].partition("\n")[2].partition("exec ")[0]
    done = subprocess.run(
        ["sh", "-c", f"{lines}{end}"], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize("options", ["", "--jobset", "--queue mine"])
def test_manifests_start_a_script_of_the_image(
    capsys: pytest.CaptureFixture[str], options: str
) -> None:
    words = "--print --image i --workers 3 --cpus 2 -- --script loops/mine.py --name it's --script"
    objects = list(yaml.safe_load_all(printed(capsys, f"kubernetes {options} {words}")))
    jobs = [each for each in objects if each["kind"] == "Job"]
    if "--jobset" in options:
        jobs = [job["template"] for job in objects[-1]["spec"]["replicatedJobs"]]
    loop, worker = (job["spec"]["template"]["spec"]["containers"][0]["args"][0] for job in jobs)
    command = of_shell(loop, 'printf "%s\\0" "$@"')
    assert command[:4] == ["python", "-P", "-m", "aiorl.launch.script"]
    assert command[-5:] == ["--", "loops/mine.py", "--name", "it's", "--script"]
    joining = [] if "--queue" in options else ["--num-joining", "6"]
    assert command[command.index("--num-here") + 2 : -5] == joining
    assert of_shell(worker, 'printf "%s\\0" "$PYTHONPATH"', {"PYTHONPATH": "/app"}) == [
        "loops:/app"
    ]


def test_a_script_has_a_directory_named_after_it_unless_one_is_given(tmp_path: Path) -> None:
    job = checked_script("aiorl launch", ["--script=my_loop.py"])
    assert job.run_dir.parent == tmp_path / "runs"
    assert job.run_dir.name.startswith("my_loop_")
