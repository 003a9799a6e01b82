"""Log files that neither fill the disk nor end a run when it is full.

Logs are bounded from outside: `rotate` copies what a file holds to another one and empties it. So it does not matter
who writes, through which library, or how many processes; all they have to do is append.
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
    """Set aside the newest `max_bytes` of a log as NAME.1 and empty it, if it has grown beyond that.

    What is written in that moment may be lost. Where the disk has no room for NAME.1, what it would hold is lost too.

    Args:
        path: a log, or none; everybody who writes it has to open it to append.
        max_bytes: size beyond which it is emptied.
    Returns: whether it was emptied.
    Raises: OSError when that can't be done.
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
            left = max_bytes - len(old.readline(_CHUNK))  # a line begins there
            while left > 0 and (chunk := old.read(min(left, _CHUNK))):
                new.write(chunk)
                left -= len(chunk)
    except OSError:
        aside.unlink(missing_ok=True)
    os.truncate(path, 0)
    return True


class KeptSmall:
    """Looks at logs, and rotates those that have grown, until it is closed or the process ends."""

    def __init__(self, logs: Sequence[Path], max_bytes: int, *, look_s: float = _LOOK_S) -> None:
        """Begin, in a thread of its own.

        Args:
            logs: the files; those that are not there are passed over.
            max_bytes: each takes twice that at most, NAME.1 included, and what is written between two looks.
            look_s: time between two looks.
        """
        self._paths = [path.absolute() for path in logs]  # also where somebody changes the working directory
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
                        logger.info("%s was full; what it held is in %s.1", path, path.name)
                    failing.discard(path)
                except OSError as error:
                    if path not in failing:
                        failing.add(path)
                        logger.warning("%s can't be kept small: %s", path, error.strerror or error)
            if self._is_over.wait(look_s):
                return


class LogFile(logging.FileHandler):
    """The log of a run: each line says when, how severe and from which module.

    Where it can't be written, that is said once and costs nothing else.

    Args:
        path: appended to.
    Raises: OSError when it can't be opened for writing.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Say once that the disk takes no more; anything else, such as a wrong format string, as logging says it."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        former, self.stream = self.stream, None  # opened by the next record
        with contextlib.suppress(OSError):
            if former is not None:
                former.close()
        if not self._has_failed:
            self._has_failed = True  # the next line comes here too, and is lost; other handlers show it
            logger.error("%s can't be written (%s); the run goes on", self.baseFilename, error.strerror or error)


_logger = logging.getLogger("aiorl")


_lock = threading.Lock()
_levels: list[int] = []
"""Of the logs that are open."""
_own_level = logging.NOTSET
"""Of aiorl's logger, as the program has set it."""


def _use(level: int, *, is_open: bool) -> None:
    """Have aiorl's logger pass on records of a level while a log is open, and then of the program's own level."""
    global _own_level
    with _lock:
        if not _levels:
            _own_level = _logger.level
        (_levels.append if is_open else _levels.remove)(level)
        _logger.setLevel(_own_level)
        if _levels and not _logger.isEnabledFor(min(_levels)):
            _logger.setLevel(min(_levels))


class RunLog:
    """Writes records of aiorl to a file until it is closed, and keeps that and its workers' logs small meanwhile.

    Where several runs go on in one process, each has the records of all that are as severe as its own ``log_level``.
    """

    def __init__(self, directory: RunDirectory, config: CommonConfig) -> None:
        """Begin.

        Args:
            directory: of the run.
            config: the effective configuration.
        """
        self._file = LogFile(directory.log)
        self._file.setLevel(config.log_level.replace("WARN", "WARNING"))
        _use(self._file.level, is_open=True)
        _logger.addHandler(self._file)
        self._kept = KeptSmall(directory.logs(config.num_workers), config.log_max_bytes)

    def close(self) -> None:
        """Let go of the files."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._file.close)
            stack.callback(_logger.removeHandler, self._file)
            stack.callback(_use, self._file.level, is_open=False)
            stack.callback(self._kept.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
