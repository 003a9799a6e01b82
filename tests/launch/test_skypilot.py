"""`aiorl launch skypilot`: the job group is read by SkyPilot, and its commands run here."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked_module import run_module
from processes import Started, free_address

from aiorl.config.key_text import keys_as_text
from aiorl.keys import make_keys
from aiorl.launch.__main__ import main

LOOP = Path(__file__).parents[1] / "support" / "launched_loop.py"
CARTPOLE = ("--", "--env", "CartPole-v1", "--run-dir", "mine")
ALL = ("--infra", "aws", "--store", "s3://my-runs", "--on-demand", "--setup", "pip install x")


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def group(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, list[dict[str, Any]]]:
    assert main(["skypilot", "--print", *words]) == 0
    text = capsys.readouterr().out
    return text, list(yaml.safe_load_all(text))


@pytest.mark.filterwarnings("ignore")  # of SkyPilot's own packages
@pytest.mark.parametrize("options", [(), ALL])
def test_skypilot_reads_the_job_group(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    dag_utils = pytest.importorskip(
        "sky.utils.dag_utils", reason="skypilot is not installed: it needs 97 packages, 460 MB"
    )
    text, (header, *tasks) = group(capsys, *options, "--workers", "3", *CARTPOLE)
    dag = dag_utils.load_job_group_from_yaml_str(text, secrets_overrides=[("AIORL_KEYS", "x")])
    assert dag.name == header["name"]
    assert [task.name for task in dag.tasks] == ["learner", "workers"]
    assert [task.num_nodes for task in dag.tasks] == [1, 3]
    for task, printed in zip(dag.tasks, tasks, strict=True):
        assert task.run.strip() == printed["run"].strip()
        (resources,) = task.resources
        assert resources.use_spot == printed["resources"]["use_spot"]
    assert dag.primary_tasks == ["learner"]


def test_the_learner_is_on_demand_and_workers_dial_its_name_in_the_group(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, (header, learner, workers) = group(capsys, "--cpus", "16", "--workers", "3", *CARTPOLE)
    assert header["primary_tasks"] == [learner["name"]]
    assert learner["resources"]["use_spot"] is False
    assert workers["resources"]["use_spot"] is True
    assert workers["num_nodes"] == 3
    for task in (learner, workers):
        words = shlex.split(task["run"])
        address = words[words.index("--address") + 1]
        assert address == f"tcp://{learner['name']}-0.{header['name']}:5557"
        assert task["secrets"] == {"AIORL_KEYS": None}
    _, (_, with_store, _) = group(capsys, *ALL, *CARTPOLE)
    assert with_store["file_mounts"]["/runs"]["source"] == "s3://my-runs"
    assert f"--run-dir /runs/{header['name']} " in with_store["run"]


def test_launching_makes_keys_and_names_the_command_that_passes_them_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["skypilot", *CARTPOLE]) == 0
    shown = capsys.readouterr()
    keys = tmp_path / "mine" / "keys"
    assert f"keys {keys} --print" in shown.err
    assert keys_as_text(keys) not in shown.out + shown.err
    subprocess.run(["git", "init", "-q"], check=True, timeout=20)
    listed = ["git", "status", "--porcelain", "--untracked-files=all"]
    sent = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    assert "keys" not in sent, "SkyPilot leaves out what Git ignores"
    assert main(["skypilot", *CARTPOLE, "--insecure"]) == 2


@pytest.mark.slow
def test_the_commands_of_a_group_start_a_script_and_processes_that_join_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_address().rpartition(":")[2]
    options = ("--workers", "1", "--cpus", "1", "--learner-cpus", "2", "--")
    place = ("--bind", f"tcp://0.0.0.0:{port}", "--run-dir", "mine", "--script")
    _, (header, learner, workers) = group(capsys, *options, *place, "my_loop.py", "seven")
    make_keys(tmp_path / "keys")
    name = f"learner-0.{header['name']}"
    copies = []
    try:
        for task in (workers, learner):
            folder = tmp_path / task["name"]
            folder.mkdir()
            shutil.copy(LOOP, folder / "my_loop.py")
            variables = {
                "HOME": str(folder),
                "SKYPILOT_NODE_RANK": "0",
                "AIORL_KEYS": keys_as_text(tmp_path / "keys"),
            }
            command = task["run"].replace(name, "127.0.0.1")
            aiorl = f"{sys.executable} -P -m aiorl launch"
            command = command.replace("aiorl launch", aiorl)
            shell = ["sh", "-c", f'cd "$0" && {command}', str(folder)]
            copies.append(Started(shell, variables))
        joined, loop = copies
        assert loop.wait(60) == 7, loop.text
        assert "2 actors, 1 joined" in loop.text
        assert joined.wait(20) == 0, joined.text
        assert (tmp_path / "learner/runs" / header["name"] / "turns.txt").exists()
    finally:
        for copy in copies:
            copy.end()


def test_a_wrong_option_of_the_learner_is_named_before_anything_is_printed() -> None:
    words = ["launch", "skypilot", "--", "--nev", "x"]
    done = run_module("aiorl", words, {**os.environ})
    assert (done.returncode, done.stdout) == (2, "")
    assert "--nev" in done.stderr
