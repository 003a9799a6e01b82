from __future__ import annotations

import asyncio
import io
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from full_disk import disk_full_after

from aiorl.acting.run_dir import RunDirectory
from aiorl.learning.algorithms.ppo import PPOConfig
from aiorl.process.children import Children
from aiorl.process.kept_logs import rotate
from aiorl.run.report.console import DisplayHandler, PlainDisplay
from aiorl.run.report.figures import Headline
from aiorl.run.report.log_files import LogFile, RunLog


def test_a_large_log_is_set_aside_from_the_beginning_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    assert not rotate(path, 100), "the file does not exist"
    path.write_text("".join(f"line {number:04}\n" for number in range(10)))
    assert not rotate(path, 100)
    with path.open("a") as file:
        file.write("line 0010\n")
    assert rotate(path, 100)
    assert path.read_text() == ""
    assert (tmp_path / "log.txt.1").read_text().splitlines() == [
        f"line {number:04}" for number in range(2, 11)
    ]
    path.write_text("x" * 300)
    assert rotate(path, 100)
    assert (tmp_path / "log.txt.1").stat().st_size <= 100, (
        "even text without lines, and the earlier file is gone"
    )


def test_a_worker_that_prints_for_ever_goes_on_in_a_log_that_stays_small(tmp_path: Path) -> None:
    path = tmp_path / "worker-1.txt"
    endless = (
        "import os, sys\nnumber = 0\nwhile True:\n    os.write(1, b'%012d\\n' % number)\n    number"
        " += 1\n"
    )

    async def main() -> None:
        command = [sys.executable, "-S", "-c", endless]
        children = Children(
            lambda slot: command,
            [1],
            max_restarts=0,
            on_event=lambda event: None,
            log_path=lambda slot: path,
        )
        children.start()
        try:
            rotated = 0
            while rotated < 3:
                rotated += rotate(path, 10_000)
                await asyncio.sleep(0)
            assert children.pids, "the worker has not noticed"
        finally:
            children.stop(signal.SIGKILL)
            while not children.is_over:
                children.poll()

    asyncio.run(main())
    assert (tmp_path / "worker-1.txt.1").stat().st_size <= 10_000
    for file in (path, tmp_path / "worker-1.txt.1"):
        assert b"\0" not in file.read_bytes(), "no hole in place of the old lines"


@pytest.fixture
def shown() -> Iterator[DisplayHandler]:
    """Handler that keeps the records a terminal would show."""
    handler = DisplayHandler()
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)


def test_a_full_disk_is_reported_once_and_has_no_other_effect_on_the_run(
    tmp_path: Path, shown: DisplayHandler, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.txt"
    file = LogFile(path)
    root, own = logging.getLogger(), logging.getLogger("aiorl.test")
    root.addHandler(file)
    try:
        own.warning("first")
        with disk_full_after(60):
            for number in range(50):
                own.warning("this has no room, whatever it says %d", number)
        own.warning("last")
    finally:
        root.removeHandler(file)
        file.close()
    lines = path.read_text().splitlines()
    assert lines[0].endswith("WARNING aiorl.test: first")
    assert lines[-1].endswith("last")
    stream = io.StringIO()
    shown.drain(PlainDisplay(Headline("ppo", "CartPole-v1", num_workers=2, goals={}), stream), 0.0)
    assert sum(str(path) in line for line in stream.getvalue().splitlines()) == 1
    assert all("\0" not in line for line in lines)
    assert "Error" not in capfd.readouterr().err


@pytest.mark.parametrize("make", [LogFile, lambda path: DisplayHandler()], ids=["file", "display"])
def test_a_wrong_format_string_is_reported(
    make: Callable[[Path], logging.Handler], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    handler = make(tmp_path / "log.txt")
    handler.handle(logging.LogRecord("aiorl", logging.WARNING, "", 0, "%d", ("no number",), None))
    handler.close()
    assert "no number" in capfd.readouterr().err


def test_text_that_cannot_be_encoded_is_logged(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "log.txt")
    file.handle(logging.LogRecord("aiorl", logging.INFO, "", 0, "half a pair: \ud800", (), None))
    file.close()
    assert (tmp_path / "log.txt").read_text().endswith(" half a pair: \\ud800\n")


logger = logging.getLogger("aiorl.test")


def run_log(folder: Path, **settings: object) -> RunLog:
    config = PPOConfig(env="CartPole-v1", num_workers=1, run_dir=str(folder), **settings)
    with RunDirectory.open(config) as directory:
        return RunLog(
            directory,
            level=config.log_level,
            num_workers=config.num_workers,
            max_bytes=config.log_max_bytes,
        )


def text(folder: Path) -> str:
    return (folder / "log.txt").read_text()


@pytest.mark.parametrize("own", [logging.NOTSET, logging.ERROR])
def test_each_log_has_its_own_level_and_the_programs_level_is_restored(
    tmp_path: Path, own: int
) -> None:
    logging.getLogger("aiorl").setLevel(own)
    try:
        quiet, loud = (
            run_log(tmp_path / "quiet", log_level="ERROR"),
            run_log(tmp_path / "loud", log_level="INFO"),
        )
        logger.info("one")
        loud.close()
        logger.info("two")
        logger.error("three")
        quiet.close()
        assert logging.getLogger("aiorl").level == own
    finally:
        logging.getLogger("aiorl").setLevel(logging.NOTSET)
    assert ("one" in text(tmp_path / "loud"), "two" in text(tmp_path / "loud")) == (True, False)
    assert "one" not in text(tmp_path / "quiet")
    assert "three" in text(tmp_path / "quiet")


def test_logs_are_kept_small_while_the_run_goes_on(tmp_path: Path) -> None:
    log = run_log(tmp_path, log_max_bytes=1 << 16)
    of_worker = tmp_path / "logs" / "worker-1.txt"
    of_worker.write_text("x" * 70_000)
    logger.info("%s", "y" * 70_000)
    aside = [path.with_name(f"{path.name}.1") for path in (of_worker, tmp_path / "log.txt")]
    while not all(path.exists() for path in aside):
        pass
    log.close()
    of_worker.write_text("x" * 70_000)
    assert of_worker.stat().st_size == 70_000


def test_a_program_without_logging_of_its_own_sees_warnings_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(text: str) -> str:
        logger.info("%s as information", text)
        logger.warning("%s as a warning", text)
        return capsys.readouterr().err

    # without those that commands have added in other tests
    monkeypatch.setattr(logging.getLogger("aiorl"), "handlers", [])
    logs = [run_log(tmp_path / name, log_level="INFO") for name in "ab"]
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    assert shown("two runs") == "two runs as a warning\n"
    own = io.StringIO()
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(own)])
    assert shown("a handler") == ""
    assert own.getvalue().splitlines() == ["a handler as information", "a handler as a warning"]
    for log in logs:
        log.close()
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    assert shown("no run") == "no run as a warning\n"
