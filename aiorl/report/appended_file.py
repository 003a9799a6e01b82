"""A file that grows by whole records."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["AppendedFile"]


class AppendedFile:
    """Opened to append to; a record that doesn't fit on the disk is taken off again, so none is ever half there.

    Args:
        path: made if it isn't there.
    Raises: OSError when it can't be opened for writing.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def append(self, record: bytes) -> None:
        """Writes one record through to the operating system.

        Raises: OSError when it can't be stored; the file ends as before.
        """
        end = self._file.tell()
        try:
            written = self._file.write(record)
            if written != len(record):
                raise OSError(f"only {written} of {len(record)} bytes were written")
        except OSError:
            os.ftruncate(self._file.fileno(), end)
            self._file.seek(end)
            raise

    def close(self) -> None:
        """Closes the file; more calls do nothing."""
        self._file.close()
