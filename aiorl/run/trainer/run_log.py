"""The log of a run that a program makes: what aiorl says meanwhile, in the run's log.txt."""

from __future__ import annotations

import contextlib
import logging
import threading
from types import TracebackType
from typing import Self

from aiorl.acting.run_dir import RunDirectory
from aiorl.config.schema import CommonConfig
from aiorl.run.report.log_files import KeptSmall, LogFile

_logger = logging.getLogger("aiorl")


class _Level:
    """The level of aiorl's logger: the program's own, or a lower one that the log of a run needs while it is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._needed: list[int] = []
        self._own = logging.NOTSET

    def need(self, level: int) -> None:
        with self._lock:
            if not self._needed:
                self._own = _logger.level
            self._needed.append(level)
            self._set()

    def release(self, level: int) -> None:
        with self._lock:
            self._needed.remove(level)
            self._set()

    def _set(self) -> None:
        _logger.setLevel(self._own)
        if self._needed and not _logger.isEnabledFor(min(self._needed)):
            _logger.setLevel(min(self._needed))


_level = _Level()


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
        self._file = LogFile.of_run(directory.log)
        self._file.setLevel(config.log_level.replace("WARN", "WARNING"))
        _level.need(self._file.level)
        _logger.addHandler(self._file)
        self._kept = KeptSmall(directory.logs(config.num_workers), config.log_max_bytes)
        self._is_open = True

    def close(self) -> None:
        """Let go of the files; may be repeated."""
        if not self._is_open:
            return
        self._is_open = False
        with contextlib.ExitStack() as stack:
            stack.callback(self._file.close)
            stack.callback(_logger.removeHandler, self._file)
            stack.callback(_level.release, self._file.level)
            stack.callback(self._kept.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
