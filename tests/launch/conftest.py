"""Options of learners are checked in forked processes, as nearly every launch checks some."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from forked_module import run_module

CHECK = ["-P", "-m", "aiorl.launch.job"]


@pytest.fixture(autouse=True)
def _options_are_checked_in_forked_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run

    def run_or_fork(command: Any, *args: Any, **options: Any) -> Any:
        if list(command[1:4]) == CHECK:
            return run_module("aiorl.launch.job", command[4:], options["env"])
        return run(command, *args, **options)

    monkeypatch.setattr(subprocess, "run", run_or_fork)
