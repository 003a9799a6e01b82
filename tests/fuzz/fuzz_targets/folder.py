"""A directory of this process for files that are read back at once."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path


def make_folder() -> Path:
    """A new directory, removed when the process ends; `run.py` removes it where the fuzzer ends the process."""
    path = Path(tempfile.mkdtemp(prefix="aiorl-fuzz-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path
