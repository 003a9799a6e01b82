"""A directory of this process for files that are read back at once."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path


def make_folder() -> Path:
    """A new directory, removed when the process ends; `run.py` removes it where the fuzzer ends the process."""
    path = Path(tempfile.mkdtemp(prefix="aiorl-fuzz-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


class Rewritten:
    """A file that gets a new content for each input; kept open, since opening takes longer than writing."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)

    def write(self, content: bytes) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, content, 0)
