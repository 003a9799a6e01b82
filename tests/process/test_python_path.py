from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aiorl.process.python_path import python_path


def test_another_python_finds_the_modules_beside_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside.py").write_text("FOUND = 5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    command = [sys.executable, "-c", "import beside, numpy; print(beside.FOUND)"]
    found = subprocess.run(command, env={**os.environ, **python_path()}, cwd="/", capture_output=True, text=True)
    assert found.stdout == "5\n", found.stderr


def test_a_child_of_the_program_finds_modules_of_the_current_directory_after_pythons_own(tmp_path: Path) -> None:
    """Of two modules in the current directory the child finds the one that Python itself doesn't have."""
    for name in ("own", "random"):
        (tmp_path / f"{name}.py").write_text("FOUND = 5\n")
    child = "import find; import own, random; print(own.FOUND, hasattr(random, 'FOUND'))"
    child = child.replace("import find", "from aiorl.process.python_path import find_modules_here; find_modules_here()")
    script = (
        "import os, subprocess, sys; from aiorl.process.python_path import find_modules_here, python_path; "
        "find_modules_here(); "
        f"subprocess.run([sys.executable, '-P', '-c', {child!r}], env={{**os.environ, **python_path()}}, check=True)"
    )
    command = [sys.executable, "-P", "-c", script]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.stdout == "5 False\n", found.stderr


def test_folders_of_this_python_itself_are_no_other_pythons_business(tmp_path: Path) -> None:
    """They would break one of another version, which an environment may start."""
    script = tmp_path / "script.py"
    script.write_text("from aiorl.process.python_path import python_path; print(python_path().get('PYTHONPATH', ''))")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    places = found.stdout.strip().split(os.pathsep)
    assert places[0] == str(tmp_path)
    assert not [place for place in places if "site-packages" in place or f"python3.{sys.version_info.minor}" in place]
