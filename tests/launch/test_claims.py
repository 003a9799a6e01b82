"""Verbs act only on files that this user alone can have written; anyone else's are claims, and text
is printable.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from aiorl.errors import ConfigError
from aiorl.launch import here, kubernetes, slurm, ssh as ssh_engine
from aiorl.launch.__main__ import main
from aiorl.launch.job import Job, saved
from aiorl.launch.logs import run_shown, show_ends

STRANGER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
FACTS: dict[str, dict[str, Any]] = {
    "ssh": {"engine": "ssh", "pid": 0, "hosts": {"host1": None, "host2": 3}},
    "slurm": {"engine": "slurm", "name": "mine-abc123", "elastic": True},
    "kubernetes": {
        "engine": "kubernetes",
        "name": "mine-abc123",
        "namespace": "",
        "kinds": "job,service,secret",
    },
}
VERBS = [
    ("ssh", "status"),
    ("ssh", "logs"),
    ("ssh", "stop"),
    ("ssh", "add", "host3"),
    ("slurm", "status"),
    ("slurm", "logs"),
    ("slurm", "scale", "9"),
    ("slurm", "stop"),
    ("kubernetes", "status"),
    ("kubernetes", "logs"),
    ("kubernetes", "scale", "9"),
    ("kubernetes", "stop"),
]
ACTS = [words for words in VERBS if words[1] in ("stop", "scale", "add")]
FAKE = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
case "$*" in *--output=name) echo job.batch/one-worker;; esac
case "$(basename "$0")" in squeue) [ "$3" = "-n" ]; echo "7 RUNNING n1";; sbatch) echo 8;; esac
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file with the calls of programs of clusters."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("kubectl", "sbatch", "squeue", "scancel"):
        (programs / name).write_text(FAKE)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    (tmp_path / "calls").touch()
    return tmp_path / "calls"


@pytest.fixture(scope="module")
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that no verb may end."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def launched(place: Path, engine: str, **changes: object) -> Path:
    run = place / "mine"
    (run / "logs").mkdir(parents=True)
    (run / "launch.json").write_text(json.dumps(FACTS[engine] | changes))
    (run / "worker.sbatch").write_text("#!/bin/sh\n")
    (run / "logs" / "host1.txt").write_text("its last words\n")
    return run


def verb(words: tuple[str, ...], run: Path) -> int:
    engine, name, *others = words
    try:
        return main([engine, name, str(run), *others])
    except SystemExit as ended:
        return int(str(ended.code))


def _of_a_stranger(run: Path) -> None:
    for path in (*run.rglob("*"), run):
        os.chown(path, STRANGER, STRANGER)


def _file_of_a_stranger(run: Path) -> None:
    os.chown(run / "launch.json", STRANGER, -1)


def _directory_of_a_stranger(run: Path) -> None:
    os.chown(run, STRANGER, -1)


def _open_directory(run: Path) -> None:
    run.chmod(0o777)


def _directory_of_a_group(run: Path) -> None:
    os.chown(run, -1, STRANGER)
    run.chmod(0o775)


def _open_file(run: Path) -> None:
    (run / "launch.json").chmod(0o666)


def _linked(run: Path) -> None:
    (run / "launch.json").rename(run / "elsewhere.json")
    (run / "launch.json").symlink_to(run / "elsewhere.json")


def _with_a_second_name(run: Path) -> None:
    os.link(run / "launch.json", run / "elsewhere.json")


def _pipe(run: Path) -> None:
    (run / "launch.json").unlink()
    os.mkfifo(run / "launch.json")


def _huge(run: Path) -> None:
    os.truncate(run / "launch.json", 1 << 40)


STRANGE = [
    pytest.param(_of_a_stranger, marks=needs_root),
    pytest.param(_file_of_a_stranger, marks=needs_root),
    pytest.param(_directory_of_a_stranger, marks=needs_root),
    pytest.param(_directory_of_a_group, marks=needs_root),
    _open_directory,
    _open_file,
    _linked,
    _with_a_second_name,
    _pipe,
    _huge,
]


@pytest.mark.parametrize("spoil", STRANGE)
@pytest.mark.parametrize("words", VERBS)
def test_no_verb_acts_on_what_someone_else_can_have_written(
    tmp_path: Path,
    calls: Path,
    victim: subprocess.Popen[bytes],
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    spoil: Callable[[Path], None],
) -> None:
    own: dict[str, object] = {"pid": victim.pid} if words[0] == "ssh" else {}
    run = launched(tmp_path, words[0], **own)
    spoil(run)
    assert verb(words, run) == 2
    assert str(run) in capsys.readouterr().err
    assert calls.read_text() == ""
    assert victim.poll() is None
    assert not (run / "launch.lock").exists()


@needs_root
def test_the_owner_of_a_refused_file_is_named(tmp_path: Path) -> None:
    run = launched(tmp_path, "slurm")
    _of_a_stranger(run)
    with pytest.raises(ConfigError, match=str(STRANGER)):
        saved(str(run), "slurm")


DAMAGED = [
    ("ssh", {"pid": -1}),
    ("ssh", {"pid": 0}),
    ("ssh", {"pid": 1}),
    ("ssh", {"pid": True}),
    ("ssh", {"pid": "7"}),
    ("ssh", {"pid": 2**40}),
    ("ssh", {"pid": 7.0}),
    ("ssh", {"hosts": ["host1"]}),
    ("ssh", {"hosts": None}),
    ("ssh", {"hosts": {"-oProxyCommand=x": 1}}),
    ("ssh", {"hosts": {"host1": -1}}),
    ("ssh", {"hosts": {"h": "2"}}),
    ("ssh", {"hosts": {"h": True}}),
    ("slurm", {"name": "--help"}),
    ("slurm", {"name": None}),
    ("slurm", {"name": "a,b"}),
    ("slurm", {"elastic": "yes"}),
    ("slurm", {"name": "a\n"}),
    ("slurm", {"name": ["a"]}),
    ("kubernetes", {"name": "--kubeconfig=evil"}),
    ("kubernetes", {"name": "a,b=c"}),
    ("kubernetes", {"name": 3}),
    ("kubernetes", {"namespace": "--kubeconfig=evil"}),
    ("kubernetes", {"namespace": None}),
    ("kubernetes", {"kinds": "--kubeconfig=evil"}),
    ("kubernetes", {"kinds": "job,namespaces"}),
    ("kubernetes", {"kinds": ""}),
    ("kubernetes", {"kinds": ["job"]}),
]


@pytest.mark.parametrize(("engine", "change"), DAMAGED)
def test_facts_of_a_wrong_kind_are_refused_by_name(
    tmp_path: Path,
    calls: Path,
    capsys: pytest.CaptureFixture[str],
    engine: str,
    change: dict[str, object],
) -> None:
    own: dict[str, object] = {"pid": 4321} if engine == "ssh" else {}
    run = launched(tmp_path, engine, **(own | change))
    (name,) = change
    for words in VERBS:
        if words[0] == engine and words[1] in ("status", "stop"):
            assert verb(words, run) == 2
            assert f"launch.json is damaged: {name} is " in capsys.readouterr().err
    assert calls.read_text() == ""


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff", b"3", b"[" * 9999, b'{"engine": ["ssh"]}']
)
@pytest.mark.parametrize("engine", FACTS)
def test_a_damaged_file_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str, content: bytes
) -> None:
    run = launched(tmp_path, engine)
    (run / "launch.json").write_bytes(content)
    assert verb((engine, "status"), run) == 2
    shown = capsys.readouterr().err
    assert str(run) in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize("words", ACTS)
def test_a_users_own_run_is_managed(tmp_path: Path, calls: Path, words: tuple[str, ...]) -> None:
    run = launched(tmp_path, words[0], **({"pid": 4321} if words[0] == "ssh" else {}))
    verb(words, run)
    assert (calls.read_text() != "") == (words[0] != "ssh")
    if words[1] == "add":
        assert saved(str(run), "ssh")[1]["hosts"] == {"host1": None, "host2": 3, "host3": None}


@needs_root
def test_a_strangers_script_in_ones_own_directory_is_not_submitted(
    tmp_path: Path, calls: Path
) -> None:
    run = launched(tmp_path, "slurm")
    os.chown(run / "worker.sbatch", STRANGER, -1)
    assert verb(("slurm", "scale", "9"), run) == 1
    assert "sbatch" not in calls.read_text()


@pytest.mark.parametrize("pid", ["victim", "parent", "gone"])
def test_only_the_launcher_itself_is_ended(
    tmp_path: Path, victim: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str], pid: str
) -> None:
    pids = {"victim": victim.pid, "parent": os.getppid(), "gone": 2**31 - 2}
    run = launched(tmp_path, "ssh", pid=pids[pid])
    with (run / "launch.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert verb(("ssh", "status"), run) == 0
        assert "is running" in capsys.readouterr().out
        assert verb(("ssh", "stop"), run) == 1
    assert str(pids[pid]) in capsys.readouterr().err
    assert victim.poll() is None
    assert verb(("ssh", "stop"), run) == 0, "a run without a launcher has ended"


def test_a_launcher_is_ended_only_if_it_was_started_when_the_file_says(tmp_path: Path) -> None:
    run = launched(tmp_path, "ssh", pid=4321)
    code = (
        "import fcntl, sys; file = open(sys.argv[3], 'w'); fcntl.flock(file, fcntl.LOCK_EX);"
        "print('locked', flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "launch", "ssh", str(run / "launch.lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        began = psutil.Process(process.pid).create_time()
        for change in ({"began": began - 3600}, {"began": "then"}, {"host": "elsewhere"}):
            facts = {**FACTS["ssh"], "pid": process.pid, "began": began, **change}
            (run / "launch.json").write_text(json.dumps(facts))
            assert verb(("ssh", "stop"), run) == 1
        assert process.poll() is None
        (run / "launch.json").write_text(
            json.dumps({**FACTS["ssh"], "pid": process.pid, "began": began})
        )
        assert verb(("ssh", "stop"), run) == 0
    assert process.returncode == -15


@needs_root
@pytest.mark.parametrize("engine", ["slurm", "kubernetes", "here"])
def test_nothing_is_launched_into_a_strangers_directory(
    tmp_path: Path, calls: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    run = tmp_path / "theirs"
    run.mkdir()
    os.chown(run, STRANGER, STRANGER)
    own = ["--image", "aiorl:learner"] if engine == "kubernetes" else []
    assert main([engine, *own, "--", "--env", "CartPole-v1", "--run-dir", str(run)]) == 2
    assert list(run.iterdir()) == []
    assert "sbatch" not in calls.read_text()


def test_what_is_launched_can_be_changed_by_its_user_only(tmp_path: Path) -> None:
    former = os.umask(0o002)
    try:
        job = Job(tmp_path / "mine", (), {})
        job.save("slurm", {"name": "x"})
        job.write("worker.sbatch", "#!/bin/sh\n")
    finally:
        os.umask(former)
    for path in (job.run_dir, *job.run_dir.rglob("*")):
        assert path.stat().st_mode & 0o022 == 0, path


# Text that reaches a terminal
# --------------------------------------------------------------------------------------------------


def test_logs_are_shown_as_printable_text_and_only_from_regular_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = launched(tmp_path, "ssh", pid=4321)
    (run / "logs" / "a.txt").write_bytes(b"\x1b]0;title\x07\x1b[2J\xff fake\x9b1m\n")
    os.mkfifo(run / "logs" / "b.txt")
    (run / "logs" / "c.txt").symlink_to("/etc/hostname")
    for name in ("status", "logs"):
        assert verb(("ssh", name), run) == 0
        shown = capsys.readouterr().out
        assert shown.replace("\n", "").isprintable()
        assert "title" in shown
        assert "its last words" in shown
        assert (
            Path("/etc/hostname").read_text().strip() not in shown.split("c.txt")[1].split("==>")[0]
        )


def test_output_of_other_programs_is_shown_as_printable_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = run_shown(["sh", "-c", "printf '\\033[31mred\\n'; printf 'fault\\007\\n' >&2; exit 3"])
    shown = capsys.readouterr()
    assert (status, shown.out, shown.err) == (3, "?[31mred\n", "fault?\n")


def test_the_ends_of_logs_are_shown_within_bounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = tmp_path / "long.txt"
    with long.open("wb") as file:
        file.truncate(1 << 40)
    lines = tmp_path / "lines.txt"
    lines.write_text("".join(f"line {number}\n" for number in range(100)))
    assert show_ends([lines, long], 3) == 0
    shown = capsys.readouterr().out
    assert "line 96" not in shown
    assert all(f"line {number}\n" in shown for number in (97, 98, 99))
    assert len(shown) < 1 << 20
    assert show_ends([tmp_path / "missing"], 3) == 1


# Values that reach scripts, manifests and command lines
# ------------------------------------------------------

UNPRINTABLE = ["a\nrm -rf x", "a\rb", "\x1b[31m", "a\x00b", "a\u2028b", "a\udcff"]


def made(job: Job, engine: str, **options: object) -> str:
    engines: dict[str, Any] = {
        "slurm": slurm,
        "kubernetes": kubernetes,
        "here": here,
        "ssh": ssh_engine,
    }
    needed: dict[str, dict[str, object]] = {
        "kubernetes": {"image": "i"},
        "ssh": {"hosts": ["host1"]},
    }
    return str(engines[engine].artefact(job, {**needed.get(engine, {}), **options}))


def job_in(run_dir: str, *words: str, **config: object) -> Job:
    plain = dict.fromkeys(("keys", "resume", "preset", "init_from", "insecure", "web", "run_dir"))
    return Job(Path(run_dir), words, plain | {"run_dir": run_dir} | config)


@pytest.mark.parametrize("text", UNPRINTABLE)
def test_unprintable_values_are_refused_by_name(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as error:
        job_in(f"/runs/{text}")
    assert error.value.key == "run_dir"
    with pytest.raises(ConfigError) as error:
        job_in("/runs/x", keys=f"/{text}")
    assert error.value.key == "keys"
    if "\n" not in text:  # a value of several lines is quoted
        with pytest.raises(ConfigError) as error:
            job_in("/runs/x", f"--env-config={{a: {text}}}")
        assert error.value.key == "--env-config"
    job = job_in("/runs/x")
    options = [
        ("slurm", "comment"),
        ("slurm", "python"),
        ("slurm", "worker_options"),
        ("kubernetes", "image"),
        ("kubernetes", "worker_image"),
        ("ssh", "python"),
        ("ssh", "ssh"),
        ("ssh", "address"),
        ("here", "address"),
    ]
    for engine, name in options:
        with pytest.raises(ConfigError) as error:
            made(job, engine, **{name: text})
        assert (error.value.key, error.value.value) == (name, text)
    monkeypatch.setattr(Path, "cwd", lambda: Path(f"/home/{text}"))
    with pytest.raises(ConfigError) as error:
        made(job, "slurm")
    assert error.value.key == "current directory"


def test_a_python_whose_path_has_a_space_is_used_on_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "my pythons" / "python"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho mine; exec {sys.executable} -c ''\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    launch = ssh_engine.Launch(job_in(str(tmp_path / "run")), {"hosts": ["host1"]})
    command = launch.program("host1")[-1]
    done = subprocess.run(
        ["sh", "-c", command], input=b"", capture_output=True, check=False, timeout=20
    )
    assert done.stdout == b"mine\n"
