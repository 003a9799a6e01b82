"""Actors in real processes: calls, streams, cancellation, losses, restarts, joined processes."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import forked_children
import numpy as np
import psutil
import pytest
from actor_things import Counter, double, make_counter, make_never

from aiorl.actors.hub import Actors
from aiorl.config.code import import_object
from aiorl.errors import (
    ActorError,
    ActorLost,
    ConfigError,
    RemoteError,
    SecurityError,
    UnsendableError,
)
from aiorl.process.children import RUN_IS_OVER, STOPPED
from aiorl.process.tasks import new_event_loop


def with_actors(use: Callable[[Actors], Awaitable[None]], **settings: Any) -> None:
    """Run a function with a hub, on an event loop as programs use it."""

    async def main() -> None:
        async with asyncio.timeout(60), Actors(**settings) as actors:
            await use(actors)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main())


@pytest.fixture(scope="module")
def hub() -> Iterator[tuple[asyncio.Runner, Actors, list[Any]]]:
    """An event loop, a hub on it, and three counters."""

    async def opened() -> tuple[Actors, list[Any]]:
        actors = await Actors().__aenter__()
        return actors, await actors.start(Counter, count=3)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        actors, counters = runner.run(opened())
        yield runner, actors, counters
        runner.run(actors.close())


With = Callable[[Callable[..., Awaitable[None]]], None]


@pytest.fixture
def with_counters(hub: tuple[asyncio.Runner, Actors, list[Any]]) -> With:
    """Run a function with a hub and three counters at 0 that other tests use, too.

    The function ends none of them.
    """
    runner, actors, counters = hub

    async def main(use: Callable[..., Awaitable[None]]) -> None:
        async with asyncio.timeout(60):
            await actors.broadcast(counters, "begin", 0)
            await use(actors, *counters)

    return lambda use: runner.run(main(use))


async def until(is_true: Callable[[], Awaitable[bool]]) -> None:
    while not await is_true():
        await asyncio.sleep(0.02)


def test_methods_of_both_kinds_return_values_and_raise_errors_with_their_traceback(
    with_counters: With,
) -> None:
    async def use(actors: Actors, counter: Any, *others: Any) -> None:
        await counter.begin(100)
        assert await counter.add(1) == 101
        assert await counter.add_on_loop(delta=2) == 103
        assert await counter.pid() != os.getpid()
        weights = {"w": np.arange(300_000, dtype=np.float32), "tuple": (1, "a")}
        arrived = await counter.same(weights)
        np.testing.assert_array_equal(arrived["w"], weights["w"])
        assert arrived["tuple"] == (1, "a")
        with pytest.raises(RemoteError) as caught:
            await counter.fail()
        assert caught.value.kind == "KeyError"
        assert caught.value.method == "Counter.fail"
        assert 'raise KeyError("missing")' in caught.value.remote_traceback
        assert caught.value.remote_traceback.count("File ") == 1, "it begins in the user's code"
        with pytest.raises(RemoteError, match="raised WithoutText"):
            await counter.fail_without_text()
        with pytest.raises(RemoteError, match="StopIteration"):
            await counter.stop_iteration()
        with pytest.raises(RemoteError, match="no public method 'subtract'"):
            await counter.subtract(1)
        with pytest.raises(AttributeError, match="private"):
            counter._add(1)
        with pytest.raises(UnsendableError, match="lambda"):
            counter.call(lambda number: number, 2)
        assert await counter.call(double, 2) == 4
        assert await counter.add(0) == 103

    with_counters(use)


def test_a_function_can_make_the_object_of_an_actor() -> None:
    async def use(actors: Actors) -> None:
        counters = await actors.start(make_counter, 5, count=2)
        assert await actors.broadcast(counters, "add", 1) == [6, 6]

    with_actors(use)


def test_the_end_of_a_program_that_is_making_an_actor_is_no_failure_of_the_actor(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    begun = tmp_path / "begun"

    async def use(actors: Actors) -> None:
        starting = asyncio.create_task(actors.start(make_never, str(begun)))
        await until(lambda: asyncio.to_thread(begun.exists))
        starting.cancel()

    with_actors(use)
    assert capfd.readouterr().err == ""


def test_a_script_without_a_main_guard_does_not_begin_again_in_its_actors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
    import asyncio
    import aiorl

    class Own:
        pass

    async def main():
        async with aiorl.Actors():
            pass

    asyncio.run(main())
    """
    (tmp_path / "unguarded_actors.py").write_text(textwrap.dedent(program))
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="starts actors while it is imported") as caught:
        import_object("unguarded_actors:Own", key="the class of an actor")
    assert "__name__" in caught.value.hint


def test_values_that_do_not_fit_into_a_message_are_errors_of_their_call_alone(
    with_counters: With,
) -> None:
    async def use(actors: Actors, counter: Any, *others: Any) -> None:
        with pytest.raises(RemoteError, match="put numbers into an array"):
            await counter.big(100_000)
        assert await counter.add(1) == 1
        names = {f"{'x' * 500}{number}": number for number in range(3_000)}
        with pytest.raises(RemoteError, match="exceeds the protocol's limits") as caught:
            await counter.same(names)
        assert caught.value.kind == "UnsendableError"
        with pytest.raises(UnsendableError, match="limits"):
            await actors.broadcast([counter], "same", names)
        many = [np.zeros(1)] * 5_000
        with pytest.raises(RemoteError, match="5000 arrays"):
            await counter.same(many)
        stream = aiter(counter.zeros(5_000))
        assert await anext(stream) == 0
        with pytest.raises(RemoteError, match="5000 arrays") as of_stream:
            await anext(stream)
        assert of_stream.value.kind == "UnsendableError"
        assert await counter.add(1) == 2

    with_counters(use)


def test_arrays_arrive_as_they_were_when_they_were_returned_or_passed(with_counters: With) -> None:
    async def use(actors: Actors, counter: Any, *others: Any) -> None:
        arrays = await asyncio.gather(*(counter.add_to_array(1.0) for _ in range(50)))
        assert [array[[0, -1]].tolist() for array in arrays] == [[n, n] for n in range(1, 51)]
        firsts = [array[0] async for array in counter.sums(10)]
        assert firsts == list(range(51, 61))
        array = np.zeros(50_000)
        sums = []
        for _ in range(10):
            sums.append(counter.sum(array))
            array += 1.0
        assert await asyncio.gather(*sums) == [50_000.0 * n for n in range(10)]

    with_counters(use)


def test_streams_of_both_kinds_yield_in_order_with_few_items_under_way(with_counters: With) -> None:
    async def use(actors: Actors, counter: Any, *others: Any) -> None:
        assert [number async for number in counter.count_to(30)] == list(range(30))
        firsts = []
        async for array in counter.arrays(1000):
            firsts.append(int(array[0]))
            if len(firsts) == 5:
                break
        assert firsts == [0, 1, 2, 3, 4]
        gc.collect()  # a stream that no one reads any more is closed

        async def is_closed() -> bool:
            return await counter.num_cancelled() == 1

        await until(is_closed)
        assert await counter.add(0) < 30  # not all 1,000 were made
        with pytest.raises(RemoteError, match="async for"):
            await counter.count_to(3)

    with_counters(use)


def test_tasks_can_iterate_over_streams_that_were_called_before_they_began(
    with_counters: With,
) -> None:
    async def items_of(call: Any) -> list[Any]:
        return [item async for item in call]

    async def use(actors: Actors, *counters: Any) -> None:
        streams = [items_of(counter.count_to(20)) for counter in counters]
        assert await asyncio.gather(*streams) == [list(range(20))] * 3
        late = counters[0].count_to(3)
        while late.is_prepared:  # it is sent after a few turns of the loop
            await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="async for"):
            aiter(late)
        late.cancel()

    with_counters(use)


def test_calls_of_one_actor_are_sent_in_the_order_in_which_they_were_made(
    with_counters: With,
) -> None:
    async def use(actors: Actors, counter: Any, *others: Any) -> None:
        counter.add(1)
        cancelled = counter.add(10)
        cancelled.cancel()
        stream = counter.count_to(2)
        assert await counter.add(1) == 2
        with pytest.raises(RuntimeError, match="async for"):
            aiter(stream)
        stream.cancel()
        counter.add(5)
        assert [number async for number in counter.count_to(3)] == [0, 1, 2]
        assert await counter.add(0) == 2

    with_counters(use)


def test_a_stream_is_closed_in_whatever_thread_it_is_collected(with_counters: With) -> None:
    async def use(actors: Actors, counter: Any, *others: Any) -> None:
        streams = [aiter(counter.arrays(1000))]
        assert (await anext(streams[0]))[0] == 0
        await asyncio.to_thread(streams.clear)

        async def is_closed() -> bool:
            return await counter.num_cancelled() == 1

        await until(is_closed)

    with_counters(use)


def test_cancelling_the_task_that_waits_cancels_the_method(with_counters: With) -> None:
    async def use(actors: Actors, counter: Any, *others: Any) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await counter.wait_for_ever()

        async def is_cancelled() -> bool:
            return await counter.num_cancelled() == 1

        await until(is_cancelled)

    with_counters(use)


def test_actors_call_each_other_by_handles_and_stream_through_the_hub(with_counters: With) -> None:
    async def use(actors: Actors, one: Any, other: Any, *others: Any) -> None:
        assert await one.add_to(other, 5) == 5
        assert await other.add(0) == 5
        assert await one.sum_of(other, 30) == sum(range(30))
        with pytest.raises(RemoteError, match="async def"):
            await one.add_in_thread(other)
        same = await one.same([other])
        assert same == [other]
        assert await same[0].add(1) == 30
        stopped = await actors.start(Counter)
        await actors.stop(stopped)
        with pytest.raises(RemoteError, match="is lost") as caught:
            await one.add_to(stopped, 5)
        assert caught.value.kind == "ActorLost"

    with_counters(use)


def test_a_broadcast_reaches_all_actors_and_as_ready_keeps_them_busy(with_counters: With) -> None:
    async def use(actors: Actors, *counters: Any) -> None:
        big = np.arange(2_000_000, dtype=np.float32)
        arrived = await actors.broadcast([*counters], "same", big)
        for array in arrived:
            np.testing.assert_array_equal(array, big)
        assert await actors.broadcast([*counters], "add", delta=2) == [2, 2, 2]
        results: dict[Any, list[int]] = {counter: [] for counter in counters}
        async for counter, result in actors.as_ready([*counters], "add", 1, in_flight=2):
            results[counter].append(result)
            if sum(map(len, results.values())) == 60:
                break
        for of_actor in results.values():
            assert of_actor == list(range(3, 3 + len(of_actor)))

    with_counters(use)


def test_an_error_in_a_broadcast_is_raised_when_all_its_calls_have_ended(
    with_counters: With,
) -> None:
    async def use(actors: Actors, none: Any, five: Any, *others: Any) -> None:
        await five.begin(5)
        busy = five.sleep(0.7)
        with pytest.raises(RemoteError) as caught:
            await actors.broadcast([none, five], "divide", 10)
        assert caught.value.kind == "ZeroDivisionError"
        assert busy.done()

    with_counters(use)


def test_a_killed_actor_ends_its_own_calls_and_no_others() -> None:
    async def use(actors: Actors) -> None:
        counter, other = await actors.start(Counter, count=2)
        sleeping = other.sleep(0.5)
        waiting = counter.wait_for_ever()
        await asyncio.sleep(0.1)
        os.kill(await counter.pid(), signal.SIGKILL)
        with pytest.raises(ActorLost, match="SIGKILL") as caught:
            await waiting
        assert not caught.value.is_restarting
        with pytest.raises(ActorLost, match="SIGKILL"):  # calls that come later know why, too
            await counter.add(1)
        assert await sleeping == 0.5

    with_actors(use)


def test_a_restarted_actor_is_made_anew_and_its_callers_are_warned() -> None:
    async def use(actors: Actors) -> None:
        counter = await actors.start(Counter, 5, restarts=1)
        await counter.add(3)
        with pytest.raises(ActorLost, match="starts again") as caught:
            await counter.die()
        assert caught.value.is_restarting
        assert await counter.add(1) == 6
        assert actors.num_restarts(counter) == 1
        with pytest.raises(ActorLost) as last:
            await counter.die()
        assert not last.value.is_restarting

    with_actors(use)


def test_an_actor_ends_for_good_or_starts_again_whatever_ends_its_process() -> None:
    async def use(actors: Actors) -> None:
        counter = await actors.start(Counter, 5, restarts=2)
        os.kill(await counter.pid(), signal.SIGTERM)

        async def is_restarted() -> bool:
            return actors.num_restarts(counter) == 1

        await until(is_restarted)
        assert await counter.add(1) == 6
        with pytest.raises(ActorLost):
            await counter.die(RUN_IS_OVER)  # a status after which no process is started again
        with pytest.raises(ActorLost, match="ended"):
            await counter.add(1)

    with_actors(use)


def test_a_stopped_process_is_lost_when_it_has_been_silent_for_too_long() -> None:
    async def use(actors: Actors) -> None:
        counter = await actors.start(Counter, restarts=1)
        os.kill(await counter.pid(), signal.SIGSTOP)
        with pytest.raises(ActorLost, match="silent"):
            await counter.add(1)
        assert await counter.add(1) == 1  # the stopped process was killed

    with_actors(use, silence_s=2.0)


def test_classes_that_can_not_be_made_say_why() -> None:
    class Inner:
        pass

    async def use(actors: Actors) -> None:
        with pytest.raises(RemoteError, match="begins at 0") as caught:
            await actors.start(Counter, -1, restarts=3)
        assert caught.value.kind == "ValueError"
        with pytest.raises(ConfigError, match="imported"):
            await actors.start(Inner)
        with pytest.raises(ConfigError, match="count is -1"):
            await actors.start(Counter, count=-1)
        with pytest.raises(ConfigError, match="restarts is '1'"):
            await actors.start(Counter, restarts="1")
        counter = await actors.start(Counter)
        with pytest.raises(ActorError, match="name of a method"):
            await actors.broadcast([counter], counter.add, 1)
        with pytest.raises(ConfigError, match="can join"):
            await actors.start(Counter, on="joined")

    with_actors(use)


def test_the_end_of_the_block_ends_all_processes_and_calls() -> None:
    pids: list[int] = []
    calls: list[Awaitable[Any]] = []
    reports: list[Any] = []

    async def use(actors: Actors) -> None:
        counters = await actors.start(Counter, count=2)
        pids.extend([await counter.pid() for counter in counters])
        calls.append(counters[0].wait_for_ever())
        counters[1].sleep(100)
        await asyncio.sleep(0.1)

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, news: reports.append(news))
        async with Actors() as actors:
            await use(actors)
        gc.collect()
        with pytest.raises(ActorError, match="ended its actors"):
            await calls[0]

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main())
    assert len(pids) == 2
    assert not any(map(psutil.pid_exists, pids))
    assert not reports, "a call that no one awaits is no news at the end"


def test_processes_of_actors_compute_with_one_thread_unless_the_user_wants_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("MKL_NUM_THREADS", "2")

    async def use(actors: Actors) -> None:
        counter = await actors.start(Counter)
        assert await counter.variable("OMP_NUM_THREADS") == "1"
        assert await counter.variable("MKL_NUM_THREADS") == "2"
        assert "OMP_NUM_THREADS" not in os.environ

    with_actors(use)


def test_the_name_of_a_process_is_known_to_its_hub_alone(with_counters: With) -> None:
    async def use(actors: Actors, counter: Any, *others: Any) -> None:
        assert await counter.variable("AIORL_WORKER_ID") is None
        arguments = " ".join(psutil.Process(await counter.pid()).cmdline())
        assert "aiorl.actors.process" in arguments
        assert not re.search("[0-9a-f]{16}", arguments)

    with_counters(use)


def test_no_process_outlives_a_start_or_stop_that_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forked_children, "MODULES", ())  # forked ones would have started by then

    async def use(actors: Actors) -> None:
        before = set(psutil.Process().children())
        counter = await actors.start(Counter)
        process = psutil.Process(await counter.pid())
        process.suspend()
        stopping = asyncio.create_task(actors.stop(counter))
        starting = asyncio.create_task(actors.start(Counter, count=2))
        await asyncio.sleep(0.1)
        others = set(psutil.Process().children()) - {process, *before}
        for task in (starting, starting, stopping):
            task.cancel()
            await asyncio.sleep(0.1)
        with pytest.raises(asyncio.CancelledError):
            await stopping
        with pytest.raises(asyncio.CancelledError):
            await starting

        async def have_ended() -> bool:
            return not any(map(runs, [process, *others]))

        assert len(others) == 2
        async with asyncio.timeout(3):
            await until(have_ended)

    with_actors(use)


def runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_keys_that_can_not_be_used_are_an_error_also_where_no_one_can_join(tmp_path: Path) -> None:
    with pytest.raises(SecurityError, match="missing"):
        Actors(keys=tmp_path / "missing")


def test_a_fork_that_outlives_its_actor_holds_no_descriptor_of_the_hub() -> None:
    async def use(actors: Actors) -> None:
        counter = await actors.start(Counter, restarts=1)
        pid = await counter.pid()
        before = num_open()
        try:
            with pytest.raises(ActorLost):
                await counter.die_and_leave_a_fork()
            assert await counter.add(1) == 1  # as a new one
            assert num_open() == before
        finally:
            os.killpg(pid, signal.SIGKILL)

    with_actors(use)


def num_open() -> int:
    return psutil.Process().num_fds()


def test_a_fork_of_the_program_does_not_end_its_actors() -> None:
    async def use(actors: Actors) -> None:
        counter = await actors.start(Counter)
        pid = os.fork()
        if pid == 0:
            try:
                await actors.close()
            finally:
                os._exit(0)
        await asyncio.to_thread(os.waitpid, pid, 0)
        assert await counter.add(1) == 1

    with_actors(use)


def test_a_process_that_can_not_be_started_is_an_error_of_the_start_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def use(actors: Actors) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/no/such/python")
            with pytest.raises(OSError, match="no/such"):
                await actors.start(Counter, count=2)
        counter = await actors.start(Counter)
        assert await counter.add(1) == 1

    with_actors(use)


@pytest.mark.slow
def test_processes_join_by_the_worker_command_and_serve_one_actor_after_the_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def use(actors: Actors) -> None:
        command = [sys.executable, "-m", "aiorl.worker", "--connect", actors.address]
        environment = {
            **os.environ,
            "PYTHONPATH": os.path.dirname(sys.modules["actor_things"].__file__ or ""),
        }
        environment.pop("OMP_NUM_THREADS", None)
        worker = await asyncio.to_thread(
            subprocess.Popen, [*command, "--slots", "2"], env=environment
        )
        try:
            await actors.wait_for_processes(2)
            assert f"aiorl worker --connect {actors.address}" in caplog.text
            caplog.clear()
            counters = await actors.start(Counter, count=2, on="joined")
            assert not caplog.records, "no one waits"
            assert actors.num_free == 0
            pids = [await counter.pid() for counter in counters]
            assert await counters[0].variable("OMP_NUM_THREADS") == "1"
            assert await actors.broadcast(counters, "add", 3) == [3, 3]
            await actors.stop(*counters)
            await actors.wait_for_processes(2)
            again = await actors.start(Counter, 7)  # takes a free one
            assert await again.pid() in pids  # a fresh program in the same process
            assert await again.add(0) == 7
            os.kill(await again.pid(), signal.SIGKILL)
            with pytest.raises(ActorLost):
                await again.wait_for_ever()
            await actors.wait_for_processes(2)
            await actors.close()
            assert await asyncio.to_thread(worker.wait, 20) == 0
        finally:
            worker.kill()
            worker.wait()

    with_actors(use, bind="tcp://127.0.0.1:0")


def test_a_joined_process_ends_by_sigterm_whether_it_runs_an_actor_or_not() -> None:
    async def use(actors: Actors) -> None:
        command = [sys.executable, "-m", "aiorl.worker", "--connect", actors.address]
        for has_actor in (False, True):
            worker = await asyncio.to_thread(
                subprocess.Popen, [*command, "--exit-with-parent"], stdin=subprocess.PIPE
            )
            with worker:
                await actors.wait_for_processes(1)
                if has_actor:
                    await actors.start(Fraction, on="joined")
                worker.terminate()
                assert await asyncio.to_thread(worker.wait, 20) == STOPPED
            while actors.num_free:  # until the hub has noticed that it is gone
                await asyncio.sleep(0.01)

    with_actors(use, bind="tcp://127.0.0.1:0")
