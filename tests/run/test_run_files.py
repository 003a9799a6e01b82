"""A run directory that is taken away while the run goes on: what is open there is opened anew, until that works."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aiorl.acting.run_dir import RunDirectory
from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError
from aiorl.run import run_files as module
from aiorl.run.report.log_files import LogFile
from aiorl.run.report.loggers import Loggers, open_loggers, read_results
from aiorl.run.run_files import RunFiles


class Opened(Loggers):
    """Loggers that note their end."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True
        super().close()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Callable[[Path], None]]:
    """Logs to a file, as a learner does, until the test ends."""
    handlers = []

    def log_to(path: Path) -> None:
        handlers.append(LogFile(path))
        logging.getLogger().addHandler(handlers[-1])

    yield log_to
    for handler in handlers:
        logging.getLogger().removeHandler(handler)
        handler.close()


def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunFiles, RunDirectory, list[str], list[Opened]]:
    config = CommonConfig.from_mapping({"env": "CartPole-v1", "run_dir": str(tmp_path / "run")})
    directory = RunDirectory.open(config)
    directory.save_address("tcp://127.0.0.1:5557")
    told: list[str] = []
    opened: list[Opened] = []

    def open_them(path: Path, **options: object) -> Opened:
        opened.append(Opened(open_loggers(path, tensorboard=False)._named))
        return opened[-1]

    monkeypatch.setattr(module, "open_loggers", open_them)
    files = RunFiles(config, directory, lambda text, level: told.append(text))
    files.open()
    return files, directory, told, opened


def test_files_of_a_directory_that_was_removed_are_opened_anew_and_closed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Callable[[Path], None]
) -> None:
    files, directory, told, opened = make(tmp_path, monkeypatch)
    log(directory.log)
    logging.getLogger("aiorl").warning("before")
    shutil.rmtree(directory.path)
    files.keep()
    logging.getLogger("aiorl").warning("after")
    files.keep()
    files.write({"training_iteration": 1})
    files.close()
    assert [loggers.is_closed for loggers in opened] == [True, True]
    assert "after" in directory.log.read_text()
    assert [result["training_iteration"] for result in read_results(directory.path)] == [1]
    assert len(told) == 1
    assert "was removed or renamed; it is made again" in told[0]


def test_files_that_cannot_be_opened_in_the_new_directory_are_tried_again_and_that_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Callable[[Path], None]
) -> None:
    files, directory, told, _ = make(tmp_path, monkeypatch)
    log(directory.log)
    works, open_log = module.open_loggers, LogFile.open_again
    faults = iter(["no room", "still no room", "no descriptor"])

    def fails(*arguments: object, **options: object) -> Loggers:
        raise ConfigError(next(faults))

    shutil.rmtree(directory.path)
    monkeypatch.setattr(module, "open_loggers", fails)
    for iteration in range(3):
        files.write({"training_iteration": iteration})
    monkeypatch.setattr(module, "open_loggers", works)
    monkeypatch.setattr(LogFile, "open_again", lambda self: False)
    files.write({"training_iteration": 3})
    monkeypatch.setattr(LogFile, "open_again", open_log)
    files.write({"training_iteration": 4})
    logging.getLogger("aiorl").warning("at last")
    files.close()
    assert [result["training_iteration"] for result in read_results(directory.path)] == [3, 4]
    assert "at last" in directory.log.read_text()
    first, last = told
    assert first.endswith(": no room")
    assert "it is made again" in last
