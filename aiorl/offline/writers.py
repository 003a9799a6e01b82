"""FileWriter: all batches that a worker samples, in files of limited size."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from datetime import datetime

from aiorl.data import columns as c
from aiorl.data.sample_batch import Batch
from aiorl.errors import ConfigError, DataError
from aiorl.offline.files import in_directory, is_uri, make_directory
from aiorl.offline.formats import BatchFile, WriteOptions
from aiorl.offline.io import OutputWriter
from aiorl.offline.json_lines import JsonLines

MAX_FILE_BYTES = 64 * 2**20
COMPRESSED = (c.OBS, c.NEW_OBS)
_MAX_NAMES = 10_000


class FileWriter(OutputWriter):
    """Writer of ``output-TIME_worker-INDEX_N.json`` in a directory, with a new file when one
    exceeds its size.

    A file is created for the first batch in it. Existing files are never written to. Each line of
    JSON is a single write; if a process dies meanwhile, the last line is torn, and readers skip it.
    """

    def __init__(
        self,
        directory: str,
        *,
        worker_index: int = 0,
        compress_columns: Iterable[str] = COMPRESSED,
        max_file_bytes: int = MAX_FILE_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the directory if it is missing.

        Args:
            directory: path or URI.
            worker_index: index of the worker, for the files' names.
            compress_columns: columns to compress.
            max_file_bytes: size at which a new file is started.
            clock: seconds since 1970, for the files' names.

        Raises:
            ConfigError: the directory can't be created (also a ValueError).
        """
        try:
            make_directory(directory)
        except OSError as error:
            raise ConfigError(
                f"The output directory can't be created: {error}.",
                key="output",
                value=directory,
                hint="Name another.",
            ) from error
        self._directory = directory if is_uri(directory) else os.path.expanduser(directory)
        self._index = worker_index
        self._options = WriteOptions(frozenset(compress_columns))
        self._max_bytes = max_file_bytes
        self._clock = clock
        self._file: BatchFile | None = None
        self._path = ""
        self._inode = -1
        self._bytes = 0
        self._number = 0

    def write(self, batch: Batch) -> None:
        """See `OutputWriter.write`; a batch without rows is ignored.

        Raises:
            DataError: the format can't hold it.
            OSError: for example, the disk is full; earlier batches are kept.
        """
        if not batch.total():
            return
        if self._file is None:
            self._file = self._next_file()
            self._bytes = 0
        try:
            self._bytes += self._file.write(batch)
        except OSError:  # the file may end with half a batch, and nothing can follow it
            file = self._file
            self._file = None
            file.abandon()
            raise
        if self._bytes >= self._max_bytes:
            self.close()

    def is_lost(self) -> bool:
        """Return True if the file that is written to is no longer at its place, as after someone
        removed it.
        """
        if self._file is None or is_uri(self._directory):
            return False
        try:
            return os.stat(self._path).st_ino != self._inode
        except OSError:
            return True

    def close(self) -> None:
        """See `OutputWriter.close`."""
        file = self._file
        self._file = None
        if file is not None:
            file.close()

    def _next_file(self) -> BatchFile:
        moment = datetime.fromtimestamp(self._clock()).strftime("%Y-%m-%d_%H-%M-%S")
        for _ in range(_MAX_NAMES):
            name = f"output-{moment}_worker-{self._index}_{self._number}.json"
            self._number += 1
            with contextlib.suppress(FileExistsError):
                path = in_directory(self._directory, name)
                file = JsonLines().create(path, self._options)
                if not is_uri(path):
                    self._path = path
                    self._inode = os.stat(path).st_ino
                return file
        raise DataError(
            f"{_MAX_NAMES:,} files with names of that second exist already", path=self._directory
        )
