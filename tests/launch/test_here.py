"""`aiorl launch here` under Open MPI's mpirun, and with the variables of other starters."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from processes import Started, free_address

from aiorl.config.key_text import keys_as_text
from aiorl.keys import main as keys_command, make_keys
from aiorl.launch import __main__ as program, here, starters

LOOP = Path(__file__).parents[1] / "support" / "launched_loop.py"
SHARED = ("--", "--env", "CartPole-v1", "--run-dir", "mine")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Return the commands that copies in a new directory become."""
    commands: list[list[str]] = []
    for names in (*starters.RANK_VARIABLES, ("SLURM_CPUS_PER_TASK", "MASTER_ADDR")):
        for name in names:
            monkeypatch.delenv(name, raising=False)

    def become(path: str, command: list[str], environment: dict[str, str]) -> None:
        assert not {"AIORL_KEYS", "AIORL_KEYS_FILE"} & environment.keys()
        commands.append(command)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "execve", become)
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


VERTEX = {
    "cluster": {"workerpool0": ["cmle-0:2222"], "workerpool1": ["cmle-1:2222", "cmle-2:2222"]},
    "environment": "cloud",
    "task": {"type": "workerpool1", "index": 1},
}
VERTEX_MAIN = {**VERTEX, "task": {"type": "workerpool0", "index": 0}}
AWS = {"AWS_BATCH_JOB_NUM_NODES": "3", "AWS_BATCH_JOB_MAIN_NODE_INDEX": "1"}


@pytest.mark.parametrize(
    ("variables", "learner", "host"),
    [
        ({"RANK": "1", "MASTER_ADDR": "10.0.0.1"}, False, "10.0.0.1"),
        ({"RANK": "0", "MASTER_ADDR": "fd00::1"}, True, "[fd00::1]"),
        ({"PET_NODE_RANK": "2", "PET_MASTER_ADDR": "a-node-0-0.a"}, False, "a-node-0-0.a"),
        (
            {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n"},
            False,
            "10.0.0.1",
        ),
        (
            AWS
            | {
                "AWS_BATCH_JOB_NODE_INDEX": "0",
                "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.1",
            },
            False,
            "10.0.0.1",
        ),
        (AWS | {"AWS_BATCH_JOB_NODE_INDEX": "1"}, True, ""),
        ({"CLUSTER_SPEC": json.dumps(VERTEX)}, False, "cmle-0"),
        ({"CLUSTER_SPEC": json.dumps(VERTEX_MAIN)}, True, "cmle-0"),
        ({"SAGEMAKER": "algo-2"}, False, "algo-1"),
        ({"SAGEMAKER": "algo-1"}, True, "algo-1"),
    ],
)
def test_copies_meet_at_the_host_that_their_starter_names_if_each_has_keys(
    started: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variables: dict[str, str],
    learner: bool,
    host: str,
) -> None:
    make_keys(tmp_path / "made")
    monkeypatch.setenv("AIORL_KEYS", keys_as_text(tmp_path / "made"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if "SAGEMAKER" in variables:
        resources = {"hosts": ["algo-2", "algo-1"], "current_host": variables["SAGEMAKER"]}
        (tmp_path / "resources.json").write_text(json.dumps(resources))
        monkeypatch.setattr(starters, "RESOURCES", tmp_path / "resources.json")
    program.main(["here", "--port", "7001", *SHARED])
    (command,) = started
    if learner:
        advertised = f"--advertise {host.strip('[]')} " if host else ""
        assert f"--bind tcp://0.0.0.0:7001 {advertised}--keys" in " ".join(command)
        assert command[4] == "train"
    else:
        assert command[4:7] == ["worker", "--connect", f"tcp://{host}:7001"]
    keys = Path(command[command.index("--keys") + 1])
    assert (keys / "worker.key_secret").stat().st_mode & 0o777 == 0o600
    for path in (tmp_path / "made").rglob("*_secret"):
        assert (keys / path.name).read_text() == path.read_text()


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"CLUSTER_SPEC": "{"}, "CLUSTER_SPEC"),
        ({"CLUSTER_SPEC": json.dumps({**VERTEX, "cluster": {"workerpool1": "abc"}})}, "abc"),
        ({"CLUSTER_SPEC": json.dumps({**VERTEX, "cluster": {"workerpool0": []}})}, "CLUSTER_SPEC"),
        ({"SAGEMAKER": "algo-3"}, "current_host"),
        ({"RANK": "1", "MASTER_ADDR": "a:b/c"}, "MASTER_ADDR"),
        (AWS | {"AWS_BATCH_JOB_NODE_INDEX": "0"}, "--address"),
    ],
)
def test_what_a_starter_says_without_sense_is_named(
    started: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    variables: dict[str, str],
    says: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if "SAGEMAKER" in variables:
        resources = {"hosts": ["algo-1"], "current_host": variables["SAGEMAKER"]}
        (tmp_path / "resources.json").write_text(json.dumps(resources))
        monkeypatch.setattr(starters, "RESOURCES", tmp_path / "resources.json")
    assert program.main(["here", *SHARED, "--keys", "made"]) == 2
    assert says in capsys.readouterr().err
    assert started == []


def test_keys_can_be_in_a_file_that_a_variable_names(
    started: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    assert keys_command([str(tmp_path / "made"), "--print"]) == 0
    (tmp_path / "secret").write_text(capsys.readouterr().out)
    monkeypatch.setenv("AIORL_KEYS_FILE", str(tmp_path / "secret"))
    monkeypatch.setenv("RANK", "1")
    program.main(["here", "--address", "tcp://host1:5557", *SHARED])
    (command,) = started
    keys = Path(command[command.index("--keys") + 1])
    made = tmp_path / "made" / "worker.key_secret"
    assert (keys / "worker.key_secret").read_text() == made.read_text()


@pytest.mark.parametrize("text", ["aiorl-keys-1:e30=", "aiorl-keys-1:%%", "secret", ""])
def test_other_texts_are_no_keys(
    started: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    text: str,
) -> None:
    """The empty text stands for a missing file."""
    if text:
        (tmp_path / "secret").write_text(text)
    monkeypatch.setenv("AIORL_KEYS_FILE", str(tmp_path / "secret"))
    monkeypatch.setenv("RANK", "1")
    assert program.main(["here", "--address", "tcp://host1:5557", *SHARED]) == 2
    assert "AIORL_KEYS_FILE" in capsys.readouterr().err
    assert started == []


@pytest.mark.slow
def test_copies_of_a_cloud_that_share_nothing_but_a_secret_find_each_other(tmp_path: Path) -> None:
    make_keys(tmp_path / "made")
    port = free_address().rpartition(":")[2]
    words = ["--workers", "1", "--port", port, "--", "--script", "my_loop.py"]
    copies = []
    try:
        for rank in ("1", "0"):
            place = tmp_path / rank
            place.mkdir()
            shutil.copy(LOOP, place / "my_loop.py")
            variables = {
                "SKYPILOT_NODE_RANK": rank,
                "SKYPILOT_NUM_NODES": "2",
                "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
                "AIORL_KEYS": keys_as_text(tmp_path / "made"),
            }
            launch = [sys.executable, "-P", "-m", "aiorl", "launch", "here", *words]
            shell = ["sh", "-c", 'cd "$0" && exec "$@"', str(place), *launch]
            copies.append(Started(shell, variables))
        worker, loop = copies
        assert loop.wait(60) == 0, loop.text
        assert "2 actors, 1 joined" in loop.text
        assert worker.wait(20) == 0, worker.text
    finally:
        for copy in copies:
            copy.end()


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
        "400",
        "--num-workers",
        "0",
        "--train-batch-size",
        "400",
        "--num-sgd-iter",
        "1",
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
