"""Script of docs/own_code.md: workers import its definitions and registrations."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "own_code.md"


@pytest.mark.slow
def test_workers_import_definitions_of_the_running_script(tmp_path: Path) -> None:
    (code,) = re.findall(
        r"^```python file=my_training.py\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    code = code.replace('"run"', repr(str(tmp_path / "run")))
    # compilation takes longer than this run
    code = code.replace("num_workers=1,", 'num_workers=1, xla="off",')
    (tmp_path / "my_training.py").write_text(code)
    run = subprocess.run(
        [sys.executable, str(tmp_path / "my_training.py")],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        timeout=120,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path))),
        },
    )
    assert re.search(r": \d.*\n.*: 2$", run.stdout, re.MULTILINE), run.stdout + run.stderr
    saved = (tmp_path / "run" / "config.yaml").read_text()
    assert "callbacks: my_training:Notes" in saved
    assert "env: my_training:Corridor-v0" in saved
    assert "my_training:Softmax" in saved
