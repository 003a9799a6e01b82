from __future__ import annotations

import asyncio
import errno
import logging
import os
import sys
from pathlib import Path

import psutil
import pytest

from aiorl.process.children import HOPELESS, RUN_IS_OVER
from aiorl.process.supervisor import ChildEvent, ChildGaveUp, ChildKilled, ChildRestarting, ChildStarted, Supervisor

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def exits_with(status: int) -> list[str]:
    return [sys.executable, "-S", "-c", f"import sys; sys.exit({status})"]


def supervise(command: list[str], slots: list[int], **options: object) -> tuple[Supervisor, list[ChildEvent]]:
    events: list[ChildEvent] = []
    options.setdefault("max_restarts", 2)
    options.setdefault("on_failure", pytest.fail)
    return Supervisor(lambda slot: command, slots, on_event=events.append, **options), events  # type: ignore[arg-type]


def test_a_child_that_says_that_the_run_is_over_is_not_started_again() -> None:
    async def main() -> list[ChildEvent]:
        supervisor, events = supervise(exits_with(RUN_IS_OVER), [1, 2])
        await supervisor.start()
        await supervisor.wait()
        assert not supervisor.pids
        await supervisor.stop()
        return events

    events = asyncio.run(main())
    assert [type(event) for event in events] == [ChildStarted, ChildStarted]
    assert [event.slot for event in events] == [1, 2]


def test_a_failing_child_is_restarted_as_often_as_allowed_with_growing_pauses() -> None:
    async def main() -> list[ChildEvent]:
        supervisor, events = supervise(exits_with(7), [3], max_restarts=2)
        await supervisor.start()
        await supervisor.wait()
        return events

    events = asyncio.run(main())
    waits = [event.wait_s for event in events if isinstance(event, ChildRestarting)]
    assert waits == sorted(waits)
    assert len(waits) == 2
    assert events[-1] == ChildGaveUp(3, 7, 2)
    assert len({event.pid for event in events if isinstance(event, ChildStarted)}) == 3


def test_a_child_that_ends_with_0_for_no_reason_that_we_know_is_started_again() -> None:
    async def main() -> list[ChildEvent]:
        supervisor, events = supervise(exits_with(0), [1], max_restarts=1)
        await supervisor.start()
        await supervisor.wait()
        return events

    assert [type(event) for event in asyncio.run(main())] == [ChildStarted, ChildRestarting, ChildStarted, ChildGaveUp]


def test_a_child_for_which_there_is_no_hope_is_not_started_again() -> None:
    async def main() -> list[ChildEvent]:
        supervisor, events = supervise(exits_with(HOPELESS), [1])
        await supervisor.start()
        await supervisor.wait()
        return events

    assert asyncio.run(main())[1:] == [ChildGaveUp(1, HOPELESS, 0)]


def test_a_child_that_is_of_no_use_can_be_killed_and_is_started_again() -> None:
    async def main() -> list[ChildEvent]:
        supervisor, events = supervise(SLEEP, [1], max_restarts=1)
        await supervisor.start()
        supervisor.kill(1)
        async with asyncio.timeout(10):
            while not any(isinstance(event, ChildRestarting) for event in events):
                await asyncio.sleep(0.01)
        supervisor.kill(1)  # there is none between two
        while len([event for event in events if isinstance(event, ChildStarted)]) < 2:
            await asyncio.sleep(0.01)
        await supervisor.stop(grace_s=0.0)
        return events

    started, killed, restarting, again = asyncio.run(main())
    assert (killed, restarting) == (ChildKilled(1), ChildRestarting(1, -9, 1, 0.2))
    assert isinstance(started, ChildStarted)
    assert isinstance(again, ChildStarted)
    assert started.pid != again.pid


def test_a_child_that_cannot_be_started_for_now_is_tried_again() -> None:
    """As when the process is out of descriptors."""
    commands = iter([exits_with(1), ["/nowhere/program"], exits_with(RUN_IS_OVER)])

    async def main() -> list[ChildEvent]:
        events: list[ChildEvent] = []
        supervisor = Supervisor(
            lambda slot: next(commands), [1], max_restarts=2, on_event=events.append, on_failure=pytest.fail
        )
        await supervisor.start()
        await supervisor.wait()
        return events

    kinds = [type(event) for event in asyncio.run(main())]
    assert kinds == [ChildStarted, ChildRestarting, ChildRestarting, ChildStarted]


def test_a_child_that_lacks_a_process_for_now_is_tried_again_until_there_is_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spawn = asyncio.create_subprocess_exec
    errors: list[Exception] = [OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))] * 5
    errors.append(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))

    async def lacking(*command: str, **options: object) -> asyncio.subprocess.Process:
        if has_started and errors:
            raise errors.pop()
        has_started.append(True)
        return await spawn(*command, **options)  # type: ignore[arg-type]

    has_started: list[bool] = []
    monkeypatch.setattr(asyncio, "create_subprocess_exec", lacking)

    async def main() -> list[ChildEvent]:
        supervisor, events = supervise(exits_with(1), [1], max_restarts=1, try_again_s=0.01)
        await supervisor.start()
        await supervisor.wait()
        return events

    with caplog.at_level(logging.WARNING, "aiorl"):
        events = asyncio.run(main())
    assert not errors
    assert [type(event) for event in events] == [ChildStarted, ChildRestarting, ChildStarted, ChildGaveUp]
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == "worker 1 can't be started for now (Too many open files); tried again every 0.01 s"


def test_a_child_that_lacks_a_process_keeps_nobody_from_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        supervisor, events = supervise(exits_with(1), [1], try_again_s=60.0)
        await supervisor.start()

        async def lacking(*command: str, **options: object) -> asyncio.subprocess.Process:
            tried.set()
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        tried = asyncio.Event()
        monkeypatch.setattr(asyncio, "create_subprocess_exec", lacking)
        await tried.wait()
        async with asyncio.timeout(10):
            await supervisor.stop()
        assert [type(event) for event in events] == [ChildStarted, ChildRestarting]

    asyncio.run(main())


def test_an_error_of_the_supervisor_itself_is_told() -> None:
    commands = iter([exits_with(1)])

    async def main() -> BaseException:
        failed = asyncio.get_running_loop().create_future()
        supervisor = Supervisor(lambda slot: next(commands), [1], max_restarts=2, on_failure=failed.set_result)
        await supervisor.start()
        return await asyncio.wait_for(failed, 10)

    assert isinstance(asyncio.run(main()), RuntimeError)  # out of commands, in a coroutine


def test_once_it_is_told_to_stop_nothing_is_started_again() -> None:
    async def main() -> list[ChildEvent]:
        supervisor, events = supervise(SLEEP, [1, 2])
        await supervisor.start()
        stopping = asyncio.create_task(supervisor.stop(grace_s=0.5))
        await asyncio.sleep(0)
        supervisor.kill(1)
        await stopping
        return events

    assert [type(event) for event in asyncio.run(main())] == [ChildStarted, ChildStarted, ChildKilled]


def test_a_healthy_time_gives_the_restarts_back() -> None:
    async def main() -> list[ChildEvent]:
        supervisor, events = supervise(exits_with(1), [1], max_restarts=1, healthy_after_s=0.0)
        await supervisor.start()
        while sum(isinstance(event, ChildRestarting) for event in events) < 3:
            await asyncio.sleep(0.02)
        await supervisor.stop(grace_s=0.0)
        return events

    events = asyncio.run(main())
    assert not any(isinstance(event, ChildGaveUp) for event in events)
    assert {event.restarts for event in events if isinstance(event, ChildRestarting)} == {1}


@pytest.mark.parametrize("code", ["", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"])
def test_stop_ends_children_even_if_they_ignore_sigterm(code: str, tmp_path: Path) -> None:
    async def main() -> list[psutil.Process]:
        command = [sys.executable, "-c", f"{code}import time; print(1, flush=True); time.sleep(60)"]
        supervisor, _ = supervise(command, [1], log_path=lambda slot: tmp_path / "log")
        await supervisor.start()
        processes = [psutil.Process(pid) for pid in supervisor.pids.values()]
        async with asyncio.timeout(10):
            while not (tmp_path / "log").read_text():
                await asyncio.sleep(0.01)
        await supervisor.stop(grace_s=0.1)
        return processes

    assert not any(process.is_running() for process in asyncio.run(main()))


def test_output_goes_to_the_slots_log_and_the_environment_is_extended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import os; print(os.environ['GREETING'])"]

    async def main() -> None:
        supervisor, _ = supervise(
            command,
            [4],
            environment_of=lambda slot: {"GREETING": "hello"},
            log_path=lambda slot: tmp_path / f"{slot}.txt",
            max_restarts=0,
        )
        await supervisor.start()
        await supervisor.wait()

    asyncio.run(main())
    assert (tmp_path / "4.txt").read_text() == "hello\n"


def test_a_program_that_cannot_be_started_raises() -> None:
    async def main() -> None:
        supervisor, _ = supervise(["/nowhere/program"], [1])
        await supervisor.start()

    with pytest.raises(OSError, match="nowhere"):
        asyncio.run(main())


def test_a_child_without_its_supervisor_sees_the_end_of_its_input(tmp_path: Path) -> None:
    """The parent watch's other half: the pipe ends with the parent, also by SIGKILL."""
    child = "from aiorl.process.children import watch_parent; import time; watch_parent(grace_s=0.1); time.sleep(60)"
    parent = (
        "import asyncio, sys\n"
        "from aiorl.process.supervisor import Supervisor\n"
        f"command = [sys.executable, '-c', {child!r}]\n"
        "async def main():\n"
        "    supervisor = Supervisor(lambda slot: command, [1], max_restarts=0, on_failure=print)\n"
        "    await supervisor.start()\n"
        "    print(supervisor.pids[1], flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )

    async def main() -> int:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", parent, stdout=asyncio.subprocess.PIPE, cwd=tmp_path
        )
        assert process.stdout is not None
        pid = int(await process.stdout.readline())
        child_process = psutil.Process(pid)
        process.kill()
        await process.wait()
        return await asyncio.to_thread(child_process.wait, 10)

    assert asyncio.run(main()) in (3, None)
