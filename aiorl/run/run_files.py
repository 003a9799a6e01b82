"""The results that a run writes while it goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiorl.acting.run_dir import RunDirectory
from aiorl.config.layers import without_secrets
from aiorl.config.schema import CommonConfig
from aiorl.run.report.loggers import BackgroundLogger, Loggers, make_loggers, open_loggers
from aiorl.run.restoring import RunState
from aiorl.run.training import Observer


class RunFiles(Observer):
    """Writes the results of a run beside it, as long as its directory is there."""

    def __init__(self, config: CommonConfig, directory: RunDirectory) -> None:
        """Open nothing yet.

        Args:
            config: the effective configuration.
            directory: the run's.
        """
        self._config = config
        self._directory = directory
        self._loggers: BackgroundLogger | None = None
        self._users: Loggers | None = None

    def open(self, resumed: RunState | None = None) -> None:
        """Open the files of results, and take off the results that are later than a resume.

        Raises:
            ConfigError: one can't be written, or a logger of the user's can't be made.
        """
        iteration = step = None
        if resumed is not None:
            iteration, step = int(resumed.results["training_iteration"]), resumed.counters.env_steps_sampled
        path = self._directory.path
        self._loggers = BackgroundLogger(open_loggers(path, resume_iteration=iteration, resume_step=step))
        self._users = make_loggers(self._config.loggers, path.absolute(), without_secrets(self._config.to_dict()))

    def write(self, result: Mapping[str, Any]) -> None:
        """Have a result written; it is there in a moment, and at the latest when `flush` returns.

        Raises: CheckpointError if the directory is gone.
        """
        self._directory.check_there()
        for loggers in (self._loggers, self._users):
            if loggers is not None:
                loggers.write(result)

    def flush(self) -> None:
        """Wait until all results are written."""
        if self._loggers is not None:
            self._loggers.flush()

    def before_checkpoint(self) -> None:
        """Write all results that come before the checkpoint.

        Raises: CheckpointError if the directory is gone.
        """
        self._directory.check_there()
        self.flush()

    def close(self) -> None:
        """Close the files."""
        for loggers in (self._loggers, self._users):
            if loggers is not None:
                loggers.close()
