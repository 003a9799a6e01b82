"""The files that a run writes while it goes: results and logs, also where its directory is taken away meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from aiorl.acting.run_dir import RunDirectory
from aiorl.config.layers import without_secrets
from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError
from aiorl.run.report.background import BackgroundLogger
from aiorl.run.report.log_files import LogFile
from aiorl.run.report.loggers import Loggers, make_loggers, open_loggers
from aiorl.run.restoring import RunState
from aiorl.run.training import Observer


class RunFiles(Observer):
    """Writes the results of a run beside it, and sees that its directory is there.

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
        self._loggers: BackgroundLogger | None = None
        self._users: Loggers | None = None
        self._is_new = self._is_log_gone = self._are_results_gone = False
        self._fault = ""

    def open(self, resumed: RunState | None = None) -> None:
        """Open the files of results, and take off the results that are later than a resume.

        Raises:
            ConfigError: one can't be written, or a logger of the user's can't be made.
        """
        iteration = step = None
        if resumed is not None:
            iteration, step = int(resumed.results["training_iteration"]), resumed.counters.env_steps_sampled
        path = self._directory.path
        opened = open_loggers(path, resume_iteration=iteration, resume_step=step)
        self._loggers = BackgroundLogger(opened)
        if self._users is None:
            config = without_secrets(self._config.to_dict())
            self._users = make_loggers(self._config.loggers, path.absolute(), config)

    def write(self, result: Mapping[str, Any]) -> None:
        """Have a result written; it is there in a moment, and at the latest when `flush` returns."""
        self.keep()
        for loggers in (self._loggers, self._users):
            if loggers is not None:
                loggers.write(result)

    def flush(self) -> None:
        """Wait until all results are written."""
        if self._loggers is not None:
            self._loggers.flush()

    def before_checkpoint(self) -> None:
        """See that there is a directory, and write all results that come before the checkpoint."""
        self.keep()
        self.flush()

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
            handlers = [*logging.getLogger().handlers, *logging.getLogger("aiorl").handlers]  # the latter of trainers
            logs = [handler for handler in handlers if isinstance(handler, LogFile)]
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
        for loggers in (self._loggers, self._users):
            if loggers is not None:
                loggers.close()
