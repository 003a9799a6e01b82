"""What a run tells, and its end, without TensorFlow: it comes whatever fails, and what comes after it does no harm."""

from __future__ import annotations

import asyncio
import functools
import logging
import shutil
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from aiorl.config.schema import CommonConfig
from aiorl.errors import EndpointClosed
from aiorl.learner import run as module
from aiorl.learner.run import Run
from aiorl.learner.run_dir import RunDirectory
from aiorl.learner.update_thread import UpdateFailed, WarmUpDone
from aiorl.report.console import PlainDisplay
from aiorl.report.log_files import LogFile
from aiorl.report.loggers import Loggers, open_loggers, read_results


class SilentDisplay:
    """Notes that it was closed; a tick of it may fail."""

    error: Exception | None = None
    is_closed = False

    def start(self, now: float) -> None: ...

    def status(self, text: str, now: float) -> None: ...

    def event(self, text: str, now: float, level: int = 0) -> None: ...

    def tick(self, now: float) -> None:
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Run, Any]]:
    """Makes runs without workers whose model is never ready."""
    monkeypatch.setattr(module, "prepare_environment", lambda config: None)

    async def never(self: Run, checkpoint: Any) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(Run, "_build", never)

    def make(**options: Any) -> tuple[Run, Any]:
        config = CommonConfig.from_mapping(
            {"env": "CartPole-v1", "seed": 1, "num_workers": 0, "run_dir": str(tmp_path / "run"), **options}
        )
        display: Any = SilentDisplay()
        return Run(config, RunDirectory.open(config), display), display

    return make


def test_a_task_of_the_run_that_dies_ends_it_with_its_error(start: Callable[..., tuple[Run, Any]]) -> None:
    run, display = start()
    display.error = ZeroDivisionError("the display is broken")
    with pytest.raises(ZeroDivisionError, match="the display is broken"):
        asyncio.run(asyncio.wait_for(run.run(), 20))
    assert display.is_closed


def test_an_error_in_a_callback_of_the_loop_ends_the_run_and_all_is_released(
    start: Callable[..., tuple[Run, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    run, display = start()

    def break_down() -> None:
        raise ZeroDivisionError("a callback is broken")

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.1, break_down)
        await asyncio.wait_for(run.run(), 20)

    with pytest.raises(ZeroDivisionError, match="a callback is broken"):
        asyncio.run(main())
    assert display.is_closed
    assert "a callback is broken" in caplog.text
    with pytest.raises(EndpointClosed):
        run._service._endpoint.broadcast([b""])


def test_each_step_of_the_end_is_taken_whatever_becomes_of_the_others(
    start: Callable[..., tuple[Run, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, display = start()
    monkeypatch.setattr(module, "_END_STEP_S", 0.05)
    released = []

    class Part:
        """Something started that does not end as it should."""

        def close(self, reason: str = "", *, final: bool = False) -> Any:
            raise ZeroDivisionError("it cannot be closed")

        def stop(self, grace_s: float = 0.0) -> Awaitable[None]:
            return asyncio.sleep(60)

    part: Any = Part()

    async def main() -> None:
        run.on_release = lambda: released.append("begun")
        run._service = run._loggers = part
        await asyncio.wait_for(run._release(None, part, "the end", final=True), 10)

    asyncio.run(main())
    assert released == ["begun"]
    assert display.is_closed
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "the connections could not be ended",
        "the workers could not be ended within 0.05 s",
        "the files could not be ended",
    ]


def test_what_the_update_thread_says_after_the_end_is_left_out(start: Callable[..., tuple[Run, Any]]) -> None:
    run, _ = start()
    errors: list[Any] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(0.1, run.request_stop, "enough")
        outcome = await asyncio.wait_for(run.run(), 20)
        assert outcome.ok
        loop.set_exception_handler(lambda loop, context: errors.append(context))
        for event in (WarmUpDone(1.0), UpdateFailed(ZeroDivisionError())):
            run._on_update_thread(event)
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert not errors
    late = threading.Thread(target=run._on_update_thread, args=(WarmUpDone(1.0),))  # when the loop is closed
    late.start()
    late.join(5)


def test_how_patient_the_learner_is_with_its_workers_is_what_the_config_says(
    start: Callable[..., tuple[Run, Any]],
) -> None:
    run, _ = start(transport={"heartbeat_interval_s": 11, "heartbeat_timeout_s": 33, "lease_timeout_s": 44})

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.1, run.request_stop, "enough")
        await asyncio.wait_for(run.run(), 20)

    asyncio.run(main())
    settings = run._service.session.settings
    assert (settings.heartbeat_interval_s, settings.heartbeat_timeout_s, settings.lease_timeout_s) == (11, 33, 44)


def test_files_of_a_directory_that_was_removed_are_opened_anew_and_closed_at_the_end(
    start: Callable[..., tuple[Run, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = start()
    directory = run._directory
    directory.save_address("tcp://127.0.0.1:5557")
    opened: list[Loggers] = []
    closed: list[Loggers] = []

    def open_them(path: Path) -> Loggers:
        opened.append(open_loggers(path, tensorboard=False))
        monkeypatch.setattr(opened[-1], "close", functools.partial(close, opened[-1], opened[-1].close))
        return opened[-1]

    def close(loggers: Loggers, close_files: Callable[[], None]) -> None:
        closed.append(loggers)
        close_files()

    monkeypatch.setattr(module, "open_loggers", open_them)
    run._loggers = open_them(directory.path)
    log = LogFile(directory.log)
    logging.getLogger().addHandler(log)
    try:
        logging.getLogger("aiorl").warning("before")
        shutil.rmtree(directory.path)
        run._keep_directory()
        logging.getLogger("aiorl").warning("after")
        run._keep_directory()
        run._loggers.write({"training_iteration": 1})
        asyncio.run(run._release(None, None, "the end", final=True))
    finally:
        logging.getLogger().removeHandler(log)
        log.close()
    assert len(opened) == 2
    assert closed == opened
    assert "after" in directory.log.read_text()
    assert [result["training_iteration"] for result in read_results(directory.path)] == [1]


class Recorder(PlainDisplay):
    """Keeps what it is to show."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def event(self, text: str, now: float, level: int = logging.INFO) -> None:
        """Keeps an event."""
        self.shown.append(text)


def test_no_line_of_what_is_told_passes_for_a_line_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Several lines are moved in, control characters are gone, and there is an end to it."""
    config = CommonConfig.from_mapping({"env": "CartPole-v1", "run_dir": str(tmp_path / "run")})
    display = Recorder()
    run = Run(config, RunDirectory.open(config), display)
    with caplog.at_level(logging.INFO):
        run._tell(
            "worker 1 failed: \x1b[2Jboom\n2026-01-01 00:00:00,000 ERROR aiorl: forged\u2028x\rabc", logging.ERROR
        )
        run._tell("long " * 100_000, logging.INFO)
    first, long = display.shown
    assert first.split("\n") == [
        "worker 1 failed: ?[2Jboom",
        "    2026-01-01 00:00:00,000 ERROR aiorl: forged",
        "    x",
        "    abc",
    ]
    assert len(long) <= 24_000
    assert [record.getMessage() for record in caplog.records] == [first, long]
