"""Log files that neither fill the disk nor end a run when the disk is full.

Logs are limited from outside: `rotate` copies the content of a file to another one and empties it. So any number of
processes can write to a log, with any library, as long as they append.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from aiorl.acting.run_dir import RunDirectory
from aiorl.config.schema import CommonConfig

logger = logging.getLogger(__name__)

_CHUNK = 1 << 20
_LOOK_S = 0.5


def rotate(path: Path, max_bytes: int) -> bool:
    """Move the newest `max_bytes` of a log to NAME.1 and empty it, if it is larger than that.

    Lines written during this call may be lost. If the disk has no space for NAME.1, its content is lost, too.

    Args:
        path: a log, which need not exist; all writers must open it in append mode.
        max_bytes: size above which the log is emptied.

    Returns:
        True if the log was emptied.

    Raises:
        OSError: the log cannot be read or emptied.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return False
    if size <= max_bytes:
        return False
    aside = path.with_name(path.name + ".1")
    aside.unlink(missing_ok=True)
    try:
        with path.open("rb") as old, aside.open("xb") as new:
            old.seek(size - max_bytes)
            left = max_bytes - len(old.readline(_CHUNK))  # start at the beginning of a line
            while left > 0 and (chunk := old.read(min(left, _CHUNK))):
                new.write(chunk)
                left -= len(chunk)
    except OSError:
        aside.unlink(missing_ok=True)
    os.truncate(path, 0)
    return True


class KeptSmall:
    """Watcher that rotates logs when they have grown, until it is closed or the process ends."""

    def __init__(self, logs: Sequence[Path], max_bytes: int, *, look_s: float = _LOOK_S) -> None:
        """Start to watch, in a new thread.

        Args:
            logs: the files; missing ones are skipped.
            max_bytes: size above which a log is rotated. Together with NAME.1 it takes at most twice that, plus the
                data written between two checks.
            look_s: seconds between two checks.
        """
        self._paths = [path.absolute() for path in logs]  # valid even if the working directory changes
        self._max_bytes = max_bytes
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, args=(look_s,), name="log-rotation", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._is_over.set()
        self._thread.join()

    def _look(self, look_s: float) -> None:
        failing: set[Path] = set()
        while True:
            for path in self._paths:
                try:
                    if rotate(path, self._max_bytes):
                        logger.info("%s was full; its content was moved to %s.1", path, path.name)
                    failing.discard(path)
                except OSError as error:
                    if path not in failing:
                        failing.add(path)
                        logger.warning("%s can't be kept small: %s", path, error.strerror or error)
            if self._is_over.wait(look_s):
                return


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
        """Report once that the file can't be written; report other errors, such as a bad format string, as usual."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        former, self.stream = self.stream, None  # the next record opens it again
        with contextlib.suppress(OSError):
            if former is not None:
                former.close()
        if not self._has_failed:
            self._has_failed = True  # this file loses the next line, too, but other handlers show it
            logger.error("%s can't be written (%s); the run continues", self.baseFilename, error.strerror or error)


_logger = logging.getLogger("aiorl")


_lock = threading.Lock()
_levels: list[int] = []
"""Levels of the open logs."""
_own_level = logging.NOTSET
"""Level that the program has set for aiorl's logger."""


def _use(level: int, *, is_open: bool) -> None:
    """Make aiorl's logger pass records of a level while a log is open, and restore the program's own level after it."""
    global _own_level
    with _lock:
        if not _levels:
            _own_level = _logger.level
        (_levels.append if is_open else _levels.remove)(level)
        _logger.setLevel(_own_level)
        if _levels and not _logger.isEnabledFor(min(_levels)):
            _logger.setLevel(min(_levels))


class RunLog:
    """Log file of a run while it is open; the size of this log and of the workers' logs is limited meanwhile.

    If one process has several runs, each log contains the records of all of them, from its own ``log_level`` up.
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
        self._kept = KeptSmall(directory.logs(config.num_workers), config.log_max_bytes)

    def close(self) -> None:
        """Close the files."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._file.close)
            stack.callback(_logger.removeHandler, self._file)
            stack.callback(_use, self._file.level, is_open=False)
            stack.callback(self._kept.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
