"""A file that grows by whole records."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["AppendedFile"]


class AppendedFile:
    """Opened to append to; a record that doesn't fit on the disk is taken off again, so none is ever half there.

    Others may append to the file, or make it shorter, at the same time.

    Args:
        path: made if it isn't there.
    Raises: OSError when it can't be opened for writing.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._torn_at: int | None = None  # where a record begins that could not be taken off

    def append(self, record: bytes) -> None:
        """Writes one record through to the operating system.

        Raises: OSError when it can't be stored; the file ends as before, at the latest when the next one is stored.
        """
        if self._torn_at is not None:
            self._cut(self._torn_at)
        end = self._size()
        try:
            left = memoryview(record)
            while left:  # a write that comes short says nothing; the next one says why
                written = self._file.write(left)
                if not written:
                    raise OSError(f"{len(left)} of {len(record)} bytes were not written")
                left = left[written:]
        except OSError:
            self._torn_at = end
            with contextlib.suppress(OSError):
                self._cut(end)
            raise

    def close(self) -> None:
        """Closes the file; more calls do nothing."""
        self._file.close()

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def _cut(self, end: int) -> None:
        if self._size() > end:
            os.ftruncate(self._file.fileno(), end)
        self._torn_at = None
