"""The log of a run that a program makes: what aiorl says meanwhile, in the run's log.txt."""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType
from typing import Self

from aiorl.report.log_files import LogFile

__all__ = ["RunLog"]


class RunLog:
    """Writes records of aiorl to a file, until it is closed.

    Where several runs go on in one process, each has the records of all.
    """

    def __init__(self, path: Path, level: str) -> None:
        """Begin.

        Args:
            path: the file.
            level: least severe messages that are logged, as ``log_level`` says it.
        """
        self._logger = logging.getLogger("aiorl")
        self._file = LogFile.of_run(path)
        self._file.setLevel(level.replace("WARN", "WARNING"))
        if not self._logger.isEnabledFor(self._file.level):
            self._logger.setLevel(self._file.level)
        self._logger.addHandler(self._file)

    def close(self) -> None:
        """Let go of the file."""
        self._logger.removeHandler(self._file)
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
