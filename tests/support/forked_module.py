"""Modules that a test runs as programs, without the time to load what they import.

They are forked like learners (`learner_server`), each with its own arguments, working directory,
environment and streams.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_ERRORS = "ERRORS_OF_FORKED_MODULE"


def run_module(
    module: str,
    words: Sequence[str],
    environment: dict[str, str],
    directory: Path | str = "",
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m MODULE WORDS``, and return its status and what it has written.

    Args:
        module: name of the module.
        words: its arguments.
        environment: all its environment variables.
        directory: its working directory; "" is the current one.
    """
    from learner_server import ForkedLearner, can_fork  # a program does not find it

    if not can_fork:
        command = [sys.executable, "-P", "-m", module, *words]
        return subprocess.run(
            command, cwd=directory or None, env=environment, capture_output=True, text=True
        )
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as errors:
        forked = ForkedLearner(
            [module, *words],
            {**environment, _ERRORS: errors.name},
            script=__file__,
            directory=str(directory),
        )
        with forked.stdout:
            output = forked.stdout.read()
        status = forked.wait(60)
        return subprocess.CompletedProcess([module, *words], status, output, errors.read())


def _main() -> None:
    os.dup2(os.open(os.environ.pop(_ERRORS), os.O_WRONLY), 2)
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
