"""`python -m benchmarks.against` on two trees whose only benchmark says a number and who was measured."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_TINY = """
from pathlib import Path
from benchmarks.result import Figure

__all__ = ["tiny_shared", "tiny_shared_too"{added}]

def tiny_shared():
    with open({tape!r}, "a") as tape:
        tape.write({name!r} + "\\n")
    return [Figure("tiny/shared", {value}, "steps/s", baseline=50.0)]

def tiny_shared_too():
    return [Figure("tiny/too", 1.0, "s")]

tiny_added = tiny_shared
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root, benchmarks = tmp_path / "tree", tmp_path / "tree" / "benchmarks"
    benchmarks.mkdir(parents=True)
    for name in ("__init__", "against", "measure", "result"):
        shutil.copy(ROOT / "benchmarks" / f"{name}.py", benchmarks)
    text = (ROOT / "benchmarks" / "__main__.py").read_text(encoding="utf-8")
    (benchmarks / "__main__.py").write_text(
        re.sub(r"(?s)MODULES = \(.*?\)", 'MODULES = ("tiny",)', text), encoding="utf-8"
    )
    write_tiny(tmp_path, "old", 10.0)
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "-c", "user.name=A", "-c", "user.email=a@localhost", "commit", "--quiet", "--message", "old")
    write_tiny(tmp_path, "new", 12.0, ', "tiny_added"')
    return root


def write_tiny(folder: Path, name: str, value: float, added: str = "") -> None:
    text = _TINY.format(tape=str(folder / "tape"), name=name, value=value, added=added)
    (folder / "tree" / "benchmarks" / "tiny.py").write_text(text, encoding="utf-8")


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout


def measure_against(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.against", *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )


def test_both_trees_are_measured_by_turns_each_with_its_own_benchmarks(repository: Path) -> None:
    done = measure_against(repository, "HEAD", "tiny_shared", "tiny_added", "--rounds", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n  tiny/shared: 12 steps/s here, 10 there\n") == 3  # what was measured outlasts a Ctrl-C
    [row] = [line for line in done.stdout.splitlines() if "│ tiny/shared" in line]
    cells = [cell.strip() for cell in row.strip("│| ").split("│")]
    assert cells == ["tiny/shared", "12", "10", "steps/s", "0%, 0%", "1.200 (1.20-1.20)", "0.240, 0.200"]
    assert "tiny/too" in done.stdout  # a name is the beginning of one
    assert "tiny_added: not in HEAD" in done.stdout
    assert (repository.parent / "tape").read_text().split() == ["new", "old", "old", "new", "new", "old"]
    assert len(git(repository, "worktree", "list").splitlines()) == 1, "the temporary worktree is gone"
