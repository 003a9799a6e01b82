"""The files that a run writes while it goes: results and logs, also where its directory is taken away meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError
from aiorl.learner.run_dir import RunDirectory
from aiorl.report.log_files import LogFile
from aiorl.report.loggers import Loggers, open_loggers

__all__ = ["RunFiles"]


class RunFiles:
    """Writes the results of a run, and sees that its directory is there.

    One that was removed, renamed or replaced is made again, so that at least what was learned is not lost with it.
    """

    def __init__(self, config: CommonConfig, directory: RunDirectory, tell: Callable[[str, int], None]) -> None:
        """Nothing is open yet.

        Args:
            config: the effective configuration.
            directory: the run's.
            tell: told (text, logging level) what users want to know.
        """
        self._config = config
        self._directory = directory
        self._tell = tell
        self._loggers: Loggers | None = None
        self._is_new = self._is_log_gone = self._are_results_gone = False
        self._fault = ""

    def open(self, *, resume_iteration: int | None = None, resume_step: int | None = None) -> None:
        """Open the files of results, and take off what is there of later ones than those of a resume.

        Raises:
            ConfigError: one can't be written.
        """
        self._loggers = open_loggers(self._directory.path, resume_iteration=resume_iteration, resume_step=resume_step)

    def write(self, result: Mapping[str, Any]) -> None:
        """Write a result."""
        self.keep()
        if self._loggers is not None:
            self._loggers.write(result)

    def keep(self) -> None:
        """Make the directory again if it is gone, and open anew what was open there; what fails is tried again."""
        try:
            if self._directory.make_again(self._config):
                self._is_new = self._is_log_gone = True
                self._are_results_gone = self._loggers is not None
            if self._are_results_gone:
                former = self._loggers
                self.open()
                self._are_results_gone = False
                if former is not None:
                    former.close()
        except ConfigError as error:
            if not self._fault:
                self._fault = str(error)
                self._tell(f"the run directory is gone, and what was in it can't be made again: {error}", logging.ERROR)
            return
        self._fault = ""
        if self._is_log_gone:
            logs = [handler for handler in logging.getLogger().handlers if isinstance(handler, LogFile)]
            self._is_log_gone = not all([log.open_again() for log in logs])
        if self._is_new:
            self._is_new = False
            self._tell(
                f"the run directory {self._directory.path} was removed or renamed; it is made again, without "
                "the results and checkpoints that were in it, and training goes on",
                logging.ERROR,
            )

    def close(self) -> None:
        """Close the files."""
        if self._loggers is not None:
            self._loggers.close()
