from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aiorl.acting.run_dir import RunDirectory
from aiorl.acting.run_lock import RunLock
from aiorl.errors import ConfigError
from aiorl.learning.algorithms.registry import config_class


def config(**values: object) -> object:
    return config_class("ppo").from_mapping({"env": "CartPole-v1", **values})


def test_r173_the_default_name_has_algorithm_environment_and_time_and_is_unique(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "2026-01-31_12-00-00")
    first, second = RunDirectory.open(config()), RunDirectory.open(config())
    assert re.match(r"ppo_CartPole-v1_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", first.path.name)
    assert first.path != second.path
    assert first.run_id != second.run_id
    assert (first.path / "config.yaml").exists()


def test_a_run_is_found_again_with_its_id_address_and_seed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with RunDirectory.open(config(run_dir=str(run_dir), seed=11)) as directory:
        directory.save_address("tcp://127.0.0.1:5557")
    with RunDirectory.open(config(run_dir=str(run_dir), resume=str(run_dir))) as again:
        assert (again.run_id, again.last_port) == (directory.run_id, 5557)
        again.abandon()  # has an effect only on new runs
    assert json.loads((run_dir / "run.json").read_text())["seed"] == 11
    assert "seed: 11\n" in (run_dir / "config.yaml").read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_port_of_another_users_run_is_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    with RunDirectory.open(config(run_dir=str(run_dir))) as directory:
        directory.save_address("tcp://127.0.0.1:5557")
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with RunDirectory.open(config(run_dir=str(run_dir), resume=str(run_dir))) as again:
        assert (again.run_id, again.last_port) == (directory.run_id, 5557), "root wrote it"
    monkeypatch.undo()
    for path in (run_dir / "run.json", run_dir):
        os.chown(path, 12345, -1)
        with RunDirectory.open(config(run_dir=str(run_dir), resume=str(run_dir))) as again:
            assert (again.run_id, again.last_port) == (directory.run_id, 0)
        os.chown(path, 0, -1)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names themselves")
def test_a_working_directory_whose_path_is_no_utf8_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "\udcff"
    place.mkdir()
    monkeypatch.chdir(place)
    for values in ({}, {"run_dir": "mine"}, {"resume": "mine"}):
        with pytest.raises(ConfigError) as error:
            RunDirectory.open(config(**values))
        assert error.value.key == "run_dir"
    assert list(place.iterdir()) == []


def test_a_directory_that_contains_a_run_is_not_overwritten(tmp_path: Path) -> None:
    with RunDirectory.open(config(run_dir=str(tmp_path))) as directory:
        directory.save_address("tcp://127.0.0.1:1")
    with pytest.raises(ConfigError, match="--resume"):
        RunDirectory.open(config(run_dir=str(tmp_path)))


def test_a_new_run_that_could_not_begin_leaves_its_directory_to_the_next(tmp_path: Path) -> None:
    existing = tmp_path / "own"
    existing.mkdir()
    (existing / "notes.txt").write_text("mine")
    for path in (tmp_path / "made", existing):
        for _ in range(2):
            with RunDirectory.open(config(run_dir=str(path))) as directory:
                directory.save_address("tcp://127.0.0.1:1")
                directory.abandon()
    assert not (tmp_path / "made").exists()
    assert (existing / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "content",
    [
        None,
        "{",
        '{"run_id": 1}',
        "[]",
        '{"run_id": "../x", "address": "tcp://127.0.0.1:1"}',
        "[" * 100_000,
        '{"run_id": "ab", "address": "tcp://\\u001b[31m:1"}',
        '{"run_id": "ab", "address": 1}',
        '{"run_id": "ab", "run_id": "cd"}',
    ],
    ids=lambda content: repr(content)[:30],
)
def test_an_invalid_run_directory_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
        RunDirectory.open(config(resume=str(tmp_path)))


@pytest.mark.parametrize("name", ["file/run", "n" * 300, "a\0b"])
def test_a_directory_that_cannot_be_made_gets_a_hint(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--run-dir"):
        RunDirectory.open(config(run_dir=os.fspath(tmp_path / name)))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_opening_a_run_directory_never_blocks(tmp_path: Path, make) -> None:
    make(tmp_path / "run.json")
    with pytest.raises(ConfigError, match=r"run\.json"):
        RunDirectory.open(config(resume=str(tmp_path)))
    (tmp_path / "new").mkdir()
    make(tmp_path / "new" / "lock")
    with pytest.raises(ConfigError, match="--run-dir"):
        RunDirectory.open(config(run_dir=str(tmp_path / "new")))


@pytest.mark.parametrize("name", ["log.txt", "result.jsonl", "logs/worker-1.txt"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/etc/passwd")])
def test_nothing_is_written_through_a_pipe_or_a_link(tmp_path: Path, make, name: str) -> None:
    with RunDirectory.open(config(run_dir=str(tmp_path))) as directory:
        directory.save_address("tcp://127.0.0.1:1")
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    with pytest.raises(ConfigError, match=re.escape(name)):
        RunDirectory.open(config(resume=str(tmp_path)))
    RunDirectory.open(config(run_dir=str(tmp_path.parent / "other"))).close()


@pytest.mark.parametrize(
    "name", ["logs", "checkpoints", "checkpoints/superseded", "best", "evaluation"]
)
def test_nothing_is_written_or_removed_in_the_target_of_a_linked_directory(
    tmp_path: Path, name: str
) -> None:
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    with RunDirectory.open(config(run_dir=str(run_dir))) as directory:
        directory.save_address("tcp://127.0.0.1:1")
    (elsewhere / ".partial-checkpoint-000007").mkdir(parents=True)
    if (run_dir / name).exists():
        (run_dir / name).rmdir()
    (run_dir / name).symlink_to(elsewhere)
    with pytest.raises(ConfigError, match=str(run_dir / name)):
        RunDirectory.open(config(resume=str(run_dir)))
    assert [path.name for path in elsewhere.iterdir()] == [".partial-checkpoint-000007"]


def test_partial_checkpoints_of_a_killed_learner_are_removed(tmp_path: Path) -> None:
    with RunDirectory.open(config(run_dir=str(tmp_path))) as directory:
        directory.save_address("tcp://127.0.0.1:1")
        (directory.checkpoints / ".partial-checkpoint-000007").mkdir()
    with RunDirectory.open(config(resume=str(tmp_path))) as directory:
        assert list(directory.checkpoints.iterdir()) == []


HOLD = """
import sys
from pathlib import Path
from aiorl.acting.run_lock import RunLock
lock = RunLock.acquire(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_learner_is_told_who_the_first_is_until_that_one_is_dead(tmp_path: Path) -> None:
    with RunDirectory.open(config(run_dir=str(tmp_path))) as directory:
        directory.save_address("tcp://127.0.0.1:1")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        for options in ({"resume": str(tmp_path)}, {"run_dir": str(tmp_path)}):
            with pytest.raises(
                ConfigError, match=f"{first.pid} .*{re.escape(socket.gethostname())}.* 20"
            ):
                RunDirectory.open(config(**options))
        first.kill()
        first.wait()
        with RunDirectory.open(config(resume=str(tmp_path))):
            assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert (tmp_path / "lock").read_text() == ""


def test_only_its_owner_can_lock_a_directory_even_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for _ in ("new", "of before"):
        with RunDirectory.open(config(run_dir=str(tmp_path))):
            assert path.stat().st_mode & 0o777 == 0o600
        path.chmod(0o644)


def test_a_lock_without_an_owner_is_named(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=str(tmp_path / "lock")):
            RunDirectory.open(config(run_dir=str(tmp_path)))
        (tmp_path / "lock").unlink()
        RunDirectory.open(config(run_dir=str(tmp_path))).close()


def without_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.mark.parametrize(
    ("owner", "message"),
    [
        ({"host": "elsewhere", "pid": 7, "since": "2026-01-31 12:00:00"}, "elsewhere.*lock"),
        ({"host": socket.gethostname(), "pid": 1, "since": "2026-01-31 12:00:00"}, " 1 "),
        ({"host": socket.gethostname(), "pid": 2**31 - 1, "since": "2026-01-31 12:00:00"}, None),
        ({"host": "\x1b[31m", "pid": 7, "since": ""}, None),
        ({"host": "elsewhere", "pid": "7", "since": ""}, None),
        ([], None),
        (None, None),
    ],
)
def test_on_a_file_system_without_locks_the_contents_of_the_file_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, message: str | None
) -> None:
    monkeypatch.setattr(fcntl, "flock", without_locks)
    if owner is not None:
        (tmp_path / "lock").write_text(json.dumps(owner))
    if message is None:
        RunLock.acquire(tmp_path).release()
    else:
        with pytest.raises(ConfigError, match=message):
            RunLock.acquire(tmp_path)
