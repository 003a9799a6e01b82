"""Directory of this process for files that are read back immediately, and the permitted results of
reading them.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from aiorl.errors import DataError
from aiorl.offline.formats import Stored


def make_folder() -> Path:
    """Return a new directory, removed at exit; `run.py` removes it if the fuzzer ends the process."""
    path = Path(tempfile.mkdtemp(prefix="aiorl-fuzz-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


class Rewritten:
    """File with new contents for each input; kept open, because opening takes longer than
    writing.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)

    def write(self, content: bytes) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, content, 0)


def check_reading(stored_format: Any, where: str) -> list[Any]:
    """Return the batches of a file, after checking that columns contain numbers or objects and fit
    the batch.
    """
    found: list[Any] = []
    try:
        found += stored_format.read(where)
    except DataError as error:
        found.append(error)
    batches = [stored.batch for stored in found if isinstance(stored, Stored)]
    assert all(isinstance(stored, Stored) or str(stored).isprintable() for stored in found)
    for batch in batches:
        for name, column in batch.items():
            assert name.isprintable()
            assert column.dtype.kind in "biuf" or column.dtype == object
            assert len(column) == batch.count
    return batches
