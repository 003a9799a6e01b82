from __future__ import annotations

import ast
import asyncio
import logging
from pathlib import Path

import pytest

import aiorl
from aiorl.process.tasks import Tasks, first_of

SOURCES = Path(aiorl.__file__).parent
STARTS_TASKS = {"create_task", "ensure_future"}
OWNERS = {
    "compat/remote.py",
    "process/tasks.py",
    "run/threads.py",
    "run/local_source.py",
    "net/transport/relay.py",
}
"""Modules that start tasks; all but the first await those that they start."""


async def fails() -> None:
    raise ValueError("on purpose")


def test_a_task_that_dies_is_reported_and_logged_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> BaseException:
        failed = asyncio.get_running_loop().create_future()
        tasks = Tasks(failed.set_result)
        tasks.start(fails(), "doomed")
        return await asyncio.wait_for(failed, 5)

    assert str(asyncio.run(main())) == "on purpose"
    (record,) = caplog.records
    assert "doomed" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[1] is not None


def test_close_ends_every_task_except_the_calling_one_and_reports_nothing() -> None:
    async def main() -> list[bool]:
        tasks = Tasks(pytest.fail)
        closed = asyncio.Event()

        async def close() -> None:
            await tasks.close()
            closed.set()

        sleeping = [tasks.start(asyncio.sleep(60), "sleep") for _ in range(2)]
        await asyncio.sleep(0)
        closing = tasks.start(close(), "close")
        await asyncio.wait_for(closed.wait(), 5)
        await closing
        return [task.cancelled() for task in sleeping]

    assert asyncio.run(main()) == [True, True]


def test_close_does_not_wait_for_a_task_that_will_not_end(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        tasks = Tasks(pytest.fail)
        may_end = asyncio.Event()

        async def stubborn() -> None:
            while not may_end.is_set():
                try:
                    await may_end.wait()
                except asyncio.CancelledError:
                    continue

        task = tasks.start(stubborn(), "stubborn")
        await asyncio.sleep(0)
        await tasks.close(timeout_s=0.01)
        assert not task.done()
        may_end.set()
        await task

    asyncio.run(main())
    (record,) = caplog.records
    assert "stubborn" in record.getMessage()
    assert record.levelno == logging.WARNING


def test_a_step_that_is_done_first_keeps_its_result_or_error() -> None:
    async def main() -> None:
        other: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = await first_of(asyncio.sleep(0, "result"), other)
        assert task is not None
        assert task.result() == "result"
        failed = await first_of(fails(), other)
        assert failed is not None
        with pytest.raises(ValueError, match="on purpose"):
            failed.result()

    asyncio.run(main())


def test_a_step_is_cancelled_when_the_other_is_done_first() -> None:
    async def main() -> None:
        other: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        other.set_result(None)
        cancelled = asyncio.Event()

        async def step() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                cancelled.set()

        assert await first_of(step(), other) is None
        assert cancelled.is_set()
        assert await first_of(fails(), other) is None  # and its error is not left unretrieved

    asyncio.run(main())


def test_tasks_are_started_by_owners_only() -> None:
    """A task without an owner dies in silence."""
    owners = set()
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute | ast.Name):
                name = node.attr if isinstance(node, ast.Attribute) else node.id
                if name in STARTS_TASKS:
                    owners.add(path.relative_to(SOURCES).as_posix())
    assert owners == OWNERS
