"""Log files that neither fill the disk nor end a run when the disk is full."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from pathlib import Path

from aiorl.acting.run_dir import RunDirectory
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
            # set first: this message can't be written here, either; other handlers show it
            self._has_failed = True
            logger.error(
                "%s can't be written (%s); the run continues",
                self.baseFilename,
                error.strerror or error,
            )


class _Warnings(logging.Handler):
    """Shows warnings in a program that has set up no logging.

    Python does so for loggers without handlers, but an open log is a handler of aiorl's.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write the message on the standard error, unless another handler shows it."""
        handlers = [*logging.getLogger().handlers, *_package_logger.handlers]
        is_shown = any(not isinstance(handler, LogFile | _Warnings) for handler in handlers)
        if not is_shown and logging.lastResort is not None:
            logging.lastResort.handle(record)


_package_logger = logging.getLogger("aiorl")
_warnings = _Warnings(logging.WARNING)
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
            _own_level = _package_logger.level
        if is_open:
            _levels.append(level)
        else:
            _levels.remove(level)
        _package_logger.setLevel(_own_level)
        if _levels and not _package_logger.isEnabledFor(min(_levels)):
            _package_logger.setLevel(min(_levels))
        if _levels:
            _package_logger.addHandler(_warnings)  # if it isn't there yet
        else:
            _package_logger.removeHandler(_warnings)


class RunLog(contextlib.ExitStack):
    """Log file of a run while it is open; the size of this log and of the workers' logs is limited
    meanwhile.

    If one process has several runs, each log contains the records of all of them, from its own
    ``log_level`` up.
    """

    def __init__(
        self, directory: RunDirectory, *, level: str, num_workers: int, max_bytes: int
    ) -> None:
        """Open the log.

        Args:
            directory: the run directory.
            level: lowest level of records, a value of ``log_level``.
            num_workers: workers that the learner starts.
            max_bytes: size at which a log starts again.
        """
        super().__init__()
        file = LogFile(directory.log)
        file.setLevel(level.replace("WARN", "WARNING"))
        _use(file.level, is_open=True)
        _package_logger.addHandler(file)
        rotation = LogRotation(directory.logs(num_workers), max_bytes)
        # in the reverse order of these lines, and each even if another one fails
        self.callback(file.close)
        self.callback(_package_logger.removeHandler, file)
        self.callback(_use, file.level, is_open=False)
        self.callback(rotation.close)
