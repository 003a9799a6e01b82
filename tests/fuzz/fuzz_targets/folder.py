"""A directory of this process for files that are read back at once: in memory where there is such a place."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path


def make_folder() -> Path:
    """A new directory, removed when the process ends."""
    memory = "/dev/shm"
    path = Path(tempfile.mkdtemp(prefix="aiorl-fuzz-", dir=memory if os.access(memory, os.W_OK) else None))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path
