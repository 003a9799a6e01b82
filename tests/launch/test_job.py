"""`aiorl launch`: the frame of all engines, and the parts that they share."""

from __future__ import annotations

import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from aiorl.errors import ConfigError
from aiorl.launch import __main__ as program
from aiorl.launch.job import Job, checked, saved

ENV = ("--env", "CartPole-v1")


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        status = program.main(words)
    except SystemExit as ended:
        status = int(str(ended.code))
    shown = capsys.readouterr()
    return status, shown.out, shown.err


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["slurn"], "'slurm'"),
        (["slurm"], "after --"),
        (["ssh", "statsu", "runs/mine"], "'status'"),
        (["kubernetes", "halt", "runs/mine"], "status, logs"),
        (["slurm", "--nodes", "0", "--", *ENV], "--nodes"),
        (["slurm", "--time", "soon", "--print", "--", *ENV], "DAYS-HOURS:MINUTES"),
        (["slurm", "--time", "1h", "--print", "--", *ENV], "DAYS-HOURS:MINUTES"),
        (["slurm", "--elastic", "2", "--worker-options=--time=1h", "--", *ENV], "--time"),
        (["here", "--nodes", "2", "--", *ENV], "--nodes"),
        (["slurm", "--", *ENV, "--num-wrkers", "3"], "--num-workers"),
        (["slurm", "--", "--algo", "ppo"], "--env"),
        (["slurm", "scale", "runs/mine"], "scale RUN N"),
    ],
)
def test_wrong_usage_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    status, out, err = said(capsys, *words)
    assert (status, out) == (2, "")
    assert says in err
    assert list(Path().iterdir()) == []


def test_the_launcher_loads_no_environments_and_no_tensorflow() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['tensorflow', 'gymnasium', 'numpy', 'zmq',"
        " 'pydantic']));from aiorl.launch.__main__ import main; main(['slurm', '--print', '--',"
        " '--env', 'CartPole-v1'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("#!/usr/bin/env bash\n#SBATCH ")


def test_printing_changes_nothing_and_texts_for_the_learner_are_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert said(capsys, "slurm", "--print", "--", *ENV)[0] == 0
    assert "algo: ppo\n" in said(capsys, "slurm", "--", *ENV, "--print-config")[1]
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    "time", ["90", "90:30", "4:00:00", "1-12", "1-12:30", "1-12:30:00", "UNLIMITED", "infinite"]
)
def test_a_time_limit_can_have_each_form_that_slurm_reads(
    capsys: pytest.CaptureFixture[str], time: str
) -> None:
    status, out, _ = said(capsys, "slurm", "--time", time, "--print", "--", *ENV)
    assert status == 0
    assert f"#SBATCH --time={time}\n" in out


def test_runs_have_absolute_directories_and_names_of_their_own(tmp_path: Path) -> None:
    first = checked([*ENV, "--run-dir", "elsewhere/../My run!"])
    assert first.run_dir == tmp_path / "My run!"
    second = checked([*ENV, "--run-dir", "other/My run!"])
    assert first.name.startswith("my-run-")
    assert first.name != second.name
    assert checked([*ENV]).run_dir.parent == tmp_path / "runs"
    assert max(len(Job(Path("/", "x" * 99), (), {}).name), len(Job(Path("/-"), (), {}).name)) < 48


def test_a_run_that_is_there_is_resumed(tmp_path: Path) -> None:
    run = tmp_path / "a run"
    words = [*ENV, "--preset", "ppo-cartpole", "--run-dir", "a run", "--num-workers", "3"]
    job = checked(words)
    assert (job.num_workers, job.port) == (3, None)
    script = job.learner_sh(shlex.quote(sys.executable)) + 'printf "%s\\n" "$@"\n'

    def command() -> list[str]:
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
        return done.stdout.splitlines()[5:]

    assert command() == job.learner_words(resumed=False)
    run.mkdir()
    config = [sys.executable, "-m", "aiorl.learner", *words, "--print-config"]
    (run / "config.yaml").write_bytes(
        subprocess.run(config, capture_output=True, check=True).stdout
    )
    (run / "run.json").write_text('{"run_id": "a", "address": "tcp://127.0.0.1:5557"}')
    assert command() == job.learner_words(resumed=True)
    assert checked(command()).run_dir == run
    assert checked(words).run_dir == run


def test_keys_are_made_for_each_run_unless_given(tmp_path: Path) -> None:
    job = checked([*ENV, "--run-dir", "mine"])
    made = job.make_keys()
    assert made == tmp_path / "mine" / "keys"
    assert {stat.S_IMODE(path.stat().st_mode) for path in made.glob("*_secret")} == {0o600}
    before = (made / "learner.key_secret").read_bytes()
    assert job.make_keys(("worker", "host1")) == made
    assert (made / "learner.key_secret").read_bytes() == before
    assert (made / "admitted" / "host1.key").exists()
    given = checked([*ENV, "--run-dir", "other", "--keys", "mine/keys"])
    assert given.make_keys() == made


def test_verbs_find_the_facts_of_a_run(tmp_path: Path) -> None:
    checked([*ENV, "--run-dir", "mine"]).save("slurm", {"name": "x"})
    assert saved("mine", "slurm") == (tmp_path / "mine", {"engine": "slurm", "name": "x"})
    for run, engine in (("mine", "ssh"), ("nowhere", "slurm")):
        with pytest.raises(ConfigError):
            saved(run, engine)
