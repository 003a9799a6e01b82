"""Optional packages, paths of child processes, and the import of TensorFlow."""

from __future__ import annotations

import importlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from aiorl.errors import ConfigError
from aiorl.process import imports
from aiorl.process.imports import lacks_memory, python_path


def test_the_install_command_uses_the_running_clone() -> None:
    words = shlex.split(imports.install_command("atari"))
    assert words[:3] == ["pip", "install", "-e"]
    assert Path(words[3].removesuffix("[atari]")) == Path(__file__).parents[2]


def test_the_install_command_keeps_an_aiorl_installed_from_a_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports, "__file__", str(tmp_path / "aiorl" / "process" / "imports.py"))
    assert imports.install_command("atari") == "pip install 'aiorl[atari]'"


@pytest.mark.parametrize(
    ("requirement", "extra"),
    [
        ("gymnasium[box2d]", "box2d"),
        ("gymnasium[classic_control]", "classic-control"),  # as Gymnasium spells it in places
        ("gymnasium[toy-text]", ""),
    ],
)
def test_extras_of_other_packages_are_found_in_the_extras_of_aiorl(
    requirement: str, extra: str
) -> None:
    assert imports.extra_with(requirement) == extra


def test_a_missing_package_is_reported_with_the_feature_that_needs_it() -> None:
    with (
        pytest.raises(ConfigError, match=r"Parquet.*pyarrow") as caught,
        imports.needed_by("Parquet", "pyarrow", "offline", key="input"),
    ):
        importlib.import_module("no_such_module_here")
    assert caught.value.key == "input"
    assert "[offline]" in str(caught.value.hint)


def test_missing_packages_are_found_without_an_import() -> None:
    with pytest.raises(ConfigError, match="no_such_module_here"):
        imports.require_packages(
            "it", ["this", "no_such_module_here", "json"], "offline", key="input"
        )


def test_another_python_finds_the_modules_next_to_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "neighbour.py").write_text("FOUND = 5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    command = [sys.executable, "-c", "import neighbour, numpy; print(neighbour.FOUND)"]
    process = subprocess.run(
        command, env={**os.environ, **python_path()}, cwd="/", capture_output=True, text=True
    )
    assert process.stdout == "5\n", process.stderr


def test_a_child_finds_modules_of_the_current_directory_after_pythons_own(tmp_path: Path) -> None:
    """Of two modules in the current directory, the child finds only the one whose name Python
    itself does not use.
    """
    for name in ("own", "random"):
        (tmp_path / f"{name}.py").write_text("FOUND = 5\n")
    child = "import find; import own, random; print(own.FOUND, hasattr(random, 'FOUND'))"
    child = child.replace(
        "import find", "from aiorl.process.imports import find_modules_here; find_modules_here()"
    )
    script = (
        "import os, subprocess, sys; from aiorl.process.imports import find_modules_here,"
        " python_path; find_modules_here(); subprocess.run([sys.executable, '-P', '-c',"
        f" {child!r}], env={{**os.environ, **python_path()}}, check=True)"
    )
    command = [sys.executable, "-P", "-c", script]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.stdout == "5 False\n", process.stderr


def test_folders_of_this_python_are_not_passed_to_others(tmp_path: Path) -> None:
    """They would break a Python of another version, which an environment may start."""
    script = tmp_path / "script.py"
    script.write_text(
        "from aiorl.process.imports import python_path; print(python_path().get('PYTHONPATH', ''))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=True
    )
    places = process.stdout.strip().split(os.pathsep)
    assert places[0] == str(tmp_path)
    assert not [
        place
        for place in places
        if "site-packages" in place or f"python3.{sys.version_info.minor}" in place
    ]


def test_a_lack_of_memory_is_recognized_by_loader_messages_and_in_error_contexts() -> None:
    mapping = ImportError("lib.so: failed to map segment from shared object")
    cleaning = RuntimeError("unable to start watchdog thread")
    cleaning.__context__ = mapping
    assert all(
        map(lacks_memory, (mapping, cleaning, MemoryError(), OSError(12, "Cannot allocate memory")))
    )
    assert not lacks_memory(ImportError("No module named 'tensorflow'"))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit the address space")
@pytest.mark.parametrize("gigabytes", [2])
def test_too_little_address_space_for_tensorflow_is_one_sentence_before_any_file_is_made(
    tmp_path: Path, gigabytes: int
) -> None:
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({gigabytes}_000_000_000,) * 2)\n"
    )
    code += "import sys; from aiorl.learner import main; sys.exit(main(['--env', 'CartPole-v1']))"
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 2
    assert "ulimit -v" in process.stderr
    assert "Traceback" not in process.stderr
    assert list(tmp_path.iterdir()) == []
