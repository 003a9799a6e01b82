"""aiorl doctor: this machine, keys, and the way to a real learner."""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from processes import Processes, free_address

from aiorl import doctor
from aiorl.keys import make_keys
from aiorl.learning import gpu_check


def findings(
    capsys: pytest.CaptureFixture[str], *words: str
) -> dict[str, list[tuple[str, str, str]]]:
    """Return level, text and remedy of the findings by check."""
    status = doctor.main([*words, "--json"])
    found: dict[str, list[tuple[str, str, str]]] = {}
    for each in json.loads(capsys.readouterr().out):
        found.setdefault(each["check"], []).append((each["level"], each["text"], each["remedy"]))
    assert status == any(level == "fail" for rows in found.values() for level, *_ in rows)
    return found


def test_this_machine_gets_a_line_for_each_check(capsys: pytest.CaptureFixture[str]) -> None:
    found = findings(capsys)
    assert found.keys() == {
        "software",
        "packages",
        "cores",
        "files",
        "room",
        "name",
        "ports",
        "clock",
    }
    assert doctor.main([]) == 0, "a machine that runs these tests can run aiorl"
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == [*found]
    assert all(" -> " in line for line in lines if not line.startswith("ok"))


def test_what_is_wrong_here_has_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        monkeypatch.setattr(doctor, "_PORT", taken.getsockname()[1])
        monkeypatch.setattr(doctor, "versions", lambda: dict.fromkeys(doctor.NEEDED[1:], "9.0"))
        monkeypatch.setattr(doctor, "usable_cores", lambda: 0)
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (100, 200))
        monkeypatch.setattr(doctor.tempfile, "gettempdir", lambda: "/nowhere")
        found = findings(capsys)
    wrong = {
        check: row[0] for check, row in found.items() if check not in ("software", "name", "clock")
    }
    assert wrong.keys() == {"packages", "cores", "files", "room", "ports"}
    assert all(level != "ok" and remedy for level, _, remedy in wrong.values())
    assert wrong["packages"] == ("fail", "missing: gymnasium", "pip install gymnasium")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let this host list a GPU, which does not exist."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho NVIDIA H1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.slow  # TensorFlow is loaded
def test_a_gpu_that_tensorflow_does_not_see_and_one_that_compiles_are_told(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_GPU_DEVICE", "CPU")
    (seen,) = doctor.check_gpus()
    assert seen.level == "ok"
    assert "NVIDIA H1" in seen.text
    monkeypatch.setattr(sys, "argv", ["gpu_check", "GPU"])
    status = gpu_check.main()  # as another process would end, without TensorFlow a second time
    ends = [sys.executable, "-c", f"import sys; sys.exit({status})"]
    monkeypatch.setattr(doctor, "child_python", lambda module: ends)
    (unseen,) = doctor.check_gpus()
    assert (unseen.level, unseen.check) == ("warn", "gpu")
    assert "learner-gpu" in unseen.remedy


@pytest.mark.parametrize(
    ("code", "part"),
    [
        (
            (
                "import sys; sys.exit('tensorflow.errors_impl.InternalError: Autotuner could not"
                " find any')"
            ),
            "Autotuner",
        ),
        ("import os; os.abort()", "-6"),
    ],
)
def test_a_gpu_on_which_no_convolution_compiles_is_a_failure_that_names_cudnn(
    gpu: None, monkeypatch: pytest.MonkeyPatch, code: str, part: str
) -> None:
    monkeypatch.setattr(doctor, "child_python", lambda module: [sys.executable, "-c", code])
    (finding,) = doctor.check_gpus()
    assert finding.level == "fail"
    assert "cuDNN" in finding.text
    assert part in finding.text
    assert "nvidia-cudnn-cu12>=9.24" in finding.remedy


def test_without_a_gpu_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "child_python", lambda module: ["/nowhere"])
    monkeypatch.setenv("PATH", "/nowhere")
    assert not [*doctor.check_gpus()]


def test_keys_are_checked_for_permissions_and_for_a_match(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, others = tmp_path / "keys", tmp_path / "others"
    make_keys(keys, ("worker", "host2"))
    make_keys(others)
    assert findings(capsys, "--keys", str(keys))["keys"][0][0] == "ok"
    (keys / "worker.key_secret").chmod(0o644)
    ((level, text, remedy),) = findings(capsys, "--keys", str(keys))["keys"]
    assert (level, "worker.key_secret" in text, "chmod" in remedy) == ("fail", True, True)
    (keys / "worker.key_secret").chmod(0o600)
    (keys / "admitted" / "worker.key").unlink()
    ((level, text, remedy),) = findings(capsys, "--keys", str(keys))["keys"]
    assert (level, remedy) == ("fail", f"cp {keys}/worker.key {keys}/admitted")
    (others / "learner.key").write_text((keys / "learner.key").read_text())
    ((level, text, _),) = findings(capsys, "--keys", str(others))["keys"]
    assert (level, "another learner" in text) == ("fail", True)


def test_code_of_the_environment_is_looked_for_without_running_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worlds_of_mine.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor.check_code("worlds_of_mine").level == "ok"
    assert (
        doctor.check_code("worlds_of_yours").level
        == doctor.check_code("worlds.of.yours").level
        == "fail"
    )


def test_an_address_without_a_learner_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [level for level, *_ in findings(capsys, free_address())["port"]] == ["fail", "fail"]
    assert (
        "no.such.host.invalid"
        in findings(capsys, "tcp://no.such.host.invalid:5557")["address"][0][1]
    )
    assert "does not exist yet" in findings(capsys, f"run:{tmp_path}/run")["address"][0][1]
    with pytest.raises(SystemExit) as ended:
        doctor.main(["learner-host:5557"])
    assert ended.value.code == 2


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.end()


@pytest.mark.slow
def test_a_real_learner_says_whether_a_worker_from_here_could_join(
    processes: Processes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys, others = tmp_path / "keys", tmp_path / "others"
    make_keys(keys)
    make_keys(others)
    learner = processes.learner("--num-workers=1", f"--bind={free_address()}", f"--keys={keys}")
    learner.wait_for_result(lambda result: result["num_healthy_workers"] == 1)

    def answer(*words: str) -> tuple[str, str, str]:
        (found,) = findings(capsys, *words)["learner"]
        return found

    for address in (learner.address, f"run:{learner.run_dir}"):
        level, text, _ = answer(address, "--keys", str(keys))
        assert (level, "accepts these keys" in text) == ("ok", True), text
    monkeypatch.setattr(doctor, "versions", lambda: {"numpy": "1.0"})
    found = findings(capsys, learner.address, "--keys", str(keys))
    assert found["versions"][0][:2] == ("warn", f"numpy 1.0 here, {numpy.__version__} there")
    assert found["clocks"][0][0] == "ok"
    level, text, remedy = answer(learner.address, "--keys", str(others))
    assert (level, "learner.key" in text, "--keys" in remedy) == ("fail", True, True), text
    assert {result["num_healthy_workers"] for result in learner.results()} == {1}, (
        "the doctor did not join"
    )
