"""Log files that neither fill the disk nor end a run when the disk is full."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from aiorl.acting.run_dir import RunDirectory
from aiorl.config.schema import CommonConfig
from aiorl.process.kept_logs import LogRotation

logger = logging.getLogger(__name__)


class LogFile(logging.FileHandler):
    """Log of a run; each line has the time, the level and the module.

    A log that can't be written is reported once and has no other effect.

    Args:
        path: file to append to.

    Raises:
        OSError: the file can't be opened for writing.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Report once that the file can't be written; report other errors, such as a bad format
        string, as usual.
        """
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        # the next record opens it again
        former = self.stream
        self.stream = None
        with contextlib.suppress(OSError):
            if former is not None:
                former.close()
        if not self._has_failed:
            self._has_failed = (
                True  # this file loses the next line, too, but other handlers show it
            )
            logger.error(
                "%s can't be written (%s); the run continues",
                self.baseFilename,
                error.strerror or error,
            )


_logger = logging.getLogger("aiorl")


_lock = threading.Lock()
_levels: list[int] = []
"""Levels of the open logs."""
_own_level = logging.NOTSET
"""Level that the program has set for aiorl's logger."""


def _use(level: int, *, is_open: bool) -> None:
    """Make aiorl's logger pass records of a level while a log is open, and restore the program's
    own level after it.
    """
    global _own_level
    with _lock:
        if not _levels:
            _own_level = _logger.level
        (_levels.append if is_open else _levels.remove)(level)
        _logger.setLevel(_own_level)
        if _levels and not _logger.isEnabledFor(min(_levels)):
            _logger.setLevel(min(_levels))


class RunLog:
    """Log file of a run while it is open; the size of this log and of the workers' logs is limited
    meanwhile.

    If one process has several runs, each log contains the records of all of them, from its own
    ``log_level`` up.
    """

    def __init__(self, directory: RunDirectory, config: CommonConfig) -> None:
        """Open the log.

        Args:
            directory: the run directory.
            config: the effective configuration.
        """
        self._file = LogFile(directory.log)
        self._file.setLevel(config.log_level.replace("WARN", "WARNING"))
        _use(self._file.level, is_open=True)
        _logger.addHandler(self._file)
        self._kept = LogRotation(directory.logs(config.num_workers), config.log_max_bytes)

    def close(self) -> None:
        """Close the files."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._file.close)
            stack.callback(_logger.removeHandler, self._file)
            stack.callback(_use, self._file.level, is_open=False)
            stack.callback(self._kept.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()
