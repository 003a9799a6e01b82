"""Actors in the shape of Ray, in real processes: references, classes, failures, ends of programs."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import remote_counters as things
from remote_counters import Counter

import aiorl
from aiorl.actors.hub import Actors
from aiorl.errors import (
    ActorError,
    ActorLost,
    ConfigError,
    RemoteError,
    RemoteProtocolError,
    UnsendableError,
)

SUPPORT = Path(things.__file__).parent
RemoteCounter = aiorl.remote(Counter)


@pytest.fixture(scope="module", autouse=True)
def end() -> Iterator[None]:
    yield
    aiorl.shutdown()


@pytest.fixture(scope="module")
def shared() -> Any:
    """A counter for tests that do not depend on its number."""
    return RemoteCounter.remote(100)


@pytest.fixture(scope="module")
def second() -> Any:
    return RemoteCounter.remote()


@pytest.fixture
def slow(second: Any) -> Any:
    """A counter at 5, for calls that the test makes wait."""
    aiorl.get(second.begin.remote(5), timeout=30)
    return second


def test_r252_calls_return_references_and_run_in_order_in_another_process(shared: Any) -> None:
    """R252."""
    counter = RemoteCounter.remote(number=100)
    refs = [counter.add.remote(delta) for delta in (1, 2, 3)]
    assert aiorl.get(refs) == [101, 103, 106]
    assert aiorl.get(refs[0]) == 101
    assert aiorl.get(counter.add_on_loop.remote(delta=0)) == 106
    assert aiorl.get(counter.pid.remote()) not in (os.getpid(), aiorl.get(shared.pid.remote()))
    assert aiorl.get(counter.pair.remote()) == [106, -106]
    with pytest.raises(TypeError, match=r"add\.remote"):
        counter.add(1)
    with pytest.raises(AttributeError, match="private"):
        counter._add.remote(1)
    aiorl.kill(counter)


def test_references_as_arguments_are_resolved_before_the_call_is_sent(
    shared: Any, slow: Any, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    number = slow.wait_for.remote(str(file))
    total = shared.same.remote(number, 1, named=number)
    later = shared.same.remote(2)
    assert aiorl.wait([total, later], num_returns=2, timeout=0) == ([], [total, later])
    file.touch()
    assert aiorl.get(total) == ((5, 1), {"named": 5})
    assert aiorl.get(later) == ((2,), {})
    started = RemoteCounter.remote(slow.add.remote(1))
    assert aiorl.get(started.add.remote(slow.add.remote(1))) == 13
    aiorl.get(slow.begin.remote(0))
    with pytest.raises(RemoteError, match="divide raised ZeroDivisionError"):
        aiorl.get(shared.same.remote(slow.divide.remote(1)))
    aiorl.kill(started)


def test_wait_returns_as_soon_as_enough_calls_have_ended(
    shared: Any, slow: Any, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    waiting = slow.wait_for.remote(str(file))
    quick = [shared.same.remote(number) for number in range(3)]
    assert aiorl.wait([waiting, *quick], num_returns=3) == (quick, [waiting])
    assert aiorl.wait([waiting, *quick]) == (quick[:1], [waiting, *quick[1:]])
    assert aiorl.wait([waiting], timeout=0.05) == ([], [waiting])
    with pytest.raises(TimeoutError, match="it continues"):
        aiorl.get([*quick, waiting], timeout=0.05)
    file.touch()
    assert aiorl.wait([waiting, *quick], num_returns=4) == ([waiting, *quick], [])
    assert aiorl.wait([]) == ([], [])
    with pytest.raises(ValueError, match="twice"):
        aiorl.wait([waiting, waiting])
    with pytest.raises(ValueError, match="num_returns is 2"):
        aiorl.wait([waiting], num_returns=2)
    with pytest.raises(TypeError, match="got a int"):
        aiorl.get([5])


def test_arguments_are_those_at_the_time_of_the_call_whatever_changes_later(shared: Any) -> None:
    array = np.ones(1000)
    weights = {"w": array}
    ref = aiorl.put(weights)
    call = shared.same.remote(weights)
    array[:] = 2.0
    weights["v"] = array
    assert aiorl.get(ref)["w"].sum() == 1000
    (arrived,), _ = aiorl.get(call)
    assert list(arrived) == ["w"]
    assert arrived["w"].sum() == 1000
    with pytest.raises(ValueError, match="read-only"):
        aiorl.get(ref)["w"][:] = 0.0
    assert aiorl.get(shared.same.remote(ref, ref))[0][1]["w"].sum() == 1000
    with pytest.raises(TypeError, match="reference"):
        aiorl.put(ref)


def test_changes_of_what_get_returns_reach_no_later_call_or_reader(shared: Any) -> None:
    value = {"list": [1], "array": np.zeros(3)}
    result = shared.as_it_is.remote(value)
    for ref in (result, aiorl.put(value)):
        read = aiorl.get(ref)
        read["list"].append(2)
        read["array"] = None
        assert aiorl.get(ref)["list"] == [1]
        (arrived,), _ = aiorl.get(shared.same.remote(ref))
        assert arrived["list"] == [1]
        assert arrived["array"].sum() == 0
    assert not aiorl.get(result)["array"].flags.writeable
    first, second = shared.pair_of_lists.remote()
    aiorl.get(first).append(2)
    assert aiorl.get([first, second]) == [[1], [-1]]


def test_code_that_an_actor_names_is_imported_neither_here_nor_by_another_actor(
    shared: Any,
) -> None:
    ref = shared.as_it_is.remote(Counter)
    with pytest.raises(RemoteProtocolError, match=r"remote_counters:Counter.* send data"):
        aiorl.get(ref)
    with pytest.raises(RemoteProtocolError, match="an actor can't send"):
        aiorl.get(shared.same.remote(ref))


def test_an_actor_of_an_actor_can_be_called_by_no_one_else(second: Any) -> None:
    counter = RemoteCounter.remote()
    inner = aiorl.get(counter.start_another.remote())
    with pytest.raises(AttributeError, match="another actor has started it, which alone can call"):
        _ = inner.add
    with pytest.raises(RemoteError, match="another actor has started it, which alone can call"):
        aiorl.get(second.add_to.remote(inner, 1))
    aiorl.kill(counter)


def test_a_reference_is_awaited_on_any_event_loop(shared: Any, slow: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"

    async def main() -> None:
        assert await shared.same.remote(1) == ((1,), {})
        waiting = slow.wait_for.remote(str(file))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await waiting
        file.touch()
        assert await asyncio.gather(waiting, shared.same.remote(2)) == [5, ((2,), {})]

    asyncio.run(main())


def test_handles_are_arguments_and_the_other_actor_calls_them(shared: Any, slow: Any) -> None:
    counters = [RemoteCounter.remote(number) for number in (1, 2)]
    assert aiorl.get(shared.add_to.remote(counters[0], 10)) == 11
    assert aiorl.get(shared.add_to_all.remote(counters, 10)) == [21, 12]
    assert aiorl.get(shared.add_in_thread_to.remote(counters[0], 1)) == ([22, 23], [])
    with pytest.raises(RemoteError, match=r"write: await add"):
        aiorl.get(shared.add_by_reference.remote(counters[0]))
    (handle,), _ = aiorl.get(shared.same.remote(counters[1]))
    assert aiorl.get(handle.add.remote(1)) == 13
    with pytest.raises(RemoteError, match=r"Counter\.add raised TypeError"):
        aiorl.get(handle.add.remote("a"))
    ref = aiorl.put({"counters": counters, "other": slow})
    assert aiorl.get(ref)["counters"] == counters
    assert aiorl.get(aiorl.get(ref)["other"].pair.remote()) == [5, -5]
    assert len({handle, counters[1], aiorl.get(ref)["other"]}) == 2
    for other in (counters[0], handle):
        aiorl.kill(other)
    with pytest.raises(ActorLost):
        aiorl.get(counters[1].add.remote(1))


def test_a_handle_is_an_argument_before_its_actor_has_started(
    shared: Any, slow: Any, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    later = RemoteCounter.remote(slow.wait_for.remote(str(file)))
    sum_of_later = shared.add_to.remote(later, 10)
    failing = RemoteCounter.remote(shared.divide.remote("a"))
    with pytest.raises(RemoteError, match="could not be started"):
        aiorl.get(shared.add_to.remote(failing, 10))
    file.touch()
    assert aiorl.get(sum_of_later) == 15
    aiorl.kill(later)


def test_a_decorated_class_has_its_options_and_makes_plain_objects_too() -> None:
    counter = things.Decorated.remote(1)
    assert aiorl.get(counter.variable.remote("OMP_NUM_THREADS")) == "3"
    assert aiorl.get(counter.variable.remote("TF_NUM_INTRAOP_THREADS")) == "3"
    other = things.Decorated.options(num_cpus=0.5, num_gpus=0).remote(1)
    assert aiorl.get(other.variable.remote("OMP_NUM_THREADS")) == "1"
    assert aiorl.get(other.variable.remote("CUDA_VISIBLE_DEVICES")) == ""
    with pytest.raises(
        RemoteError, match=r"^Decorated.nothing .* it has no public method 'nothing'"
    ):
        aiorl.get(counter.nothing.remote())
    names = {f"{'x' * 500}{number}": number for number in range(3_000)}
    with pytest.raises(RemoteError, match=r"^Decorated.same .* exceeds the protocol's limits"):
        aiorl.get(counter.same.remote(names))
    assert things.Decorated(5).add(1) == 6
    with pytest.raises(TypeError, match="put a function into a class"):
        aiorl.remote(write)
    with pytest.raises(ConfigError, match="max_restarts"):
        things.Decorated.options(max_restarts=-1)
    with pytest.raises(ConfigError, match="whole number"):
        RemoteCounter.options(max_restarts=1.5)
    with pytest.raises(ConfigError, match=r"no option 'name', expected one of: num_cpus, .*on\."):
        RemoteCounter.options(name="counter")
    with pytest.raises(ConfigError, match="no option 'lifetime'"):
        aiorl.remote(lifetime="detached")(Counter)
    with pytest.raises(TypeError, match=r"'Derived' derives from .* plain class"):
        type(things.Decorated)("Derived", (things.Decorated,), {})
    with pytest.raises(RemoteError, match=r"is a generator: .* or return a list"):
        aiorl.get(counter.count.remote(2))
    aiorl.kill(counter)
    aiorl.kill(other)


def test_what_exceeds_a_limit_of_memory_is_an_error_of_its_call() -> None:
    heap = 256 << 20
    counter = RemoteCounter.options(memory=heap, object_store_memory=10_000).remote(1)
    assert aiorl.get(counter.add.remote(1)) == 2
    assert aiorl.get(counter.add_on_loop.remote(1)) == 3
    with pytest.raises(
        RemoteError, match=r"Counter\.zeros raised ConfigError: object_store_memory"
    ):
        aiorl.get(counter.zeros.remote(2_000))
    assert aiorl.get(counter.zeros.remote(1_000)).shape == (1_000,)
    with pytest.raises(RemoteError, match="MemoryQuotaError: memory is 268,435,456 bytes"):
        aiorl.get(counter.take_memory.remote(heap))
    aiorl.kill(counter)
    small = RemoteCounter.options(memory=1).remote()
    with pytest.raises(RemoteError, match="Counter raised MemoryQuotaError"):
        aiorl.get(small.add.remote(1))


def test_an_actor_that_cannot_be_made_says_so_in_its_calls(caplog: Any) -> None:
    counter = RemoteCounter.remote(-1)
    refs = [counter.add.remote(1), counter.add.remote(2)]
    for ref in refs:
        with pytest.raises(RemoteError, match="Counter raised ValueError: a counter begins at 0"):
            aiorl.get(ref)
    aiorl.kill(counter)

    class Local:
        pass

    with pytest.raises(ConfigError, match="top level of a module"):
        aiorl.remote(Local).remote()
    with pytest.raises(UnsendableError, match="lambda"):
        RemoteCounter.remote(lambda: 1)


def test_a_lost_actor_is_named_and_started_again_if_it_may() -> None:
    counter = RemoteCounter.options(max_restarts=1).remote(5)
    aiorl.get(counter.add.remote(1))
    with pytest.raises(ActorLost) as lost:
        aiorl.get(counter.die.remote())
    assert lost.value.is_restarting
    assert aiorl.get(counter.add.remote(1)) == 6
    with pytest.raises(ActorLost) as lost:
        aiorl.get(counter.die.remote())
    assert not lost.value.is_restarting
    with pytest.raises(ActorLost):
        aiorl.get(counter.add.remote(1))


def test_an_error_that_no_one_reads_is_logged(shared: Any, caplog: Any) -> None:
    shared.divide.remote("a")
    aiorl.get(shared.same.remote())
    assert [record.message for record in caplog.records if "Counter.divide" in record.message]
    caplog.clear()
    with pytest.raises(RemoteError):
        aiorl.get(shared.divide.remote("a"))
    assert not caplog.records


def test_an_actor_is_killed_at_once_or_terminates_after_its_calls(tmp_path: Path) -> None:
    file = tmp_path / "file"
    counter = RemoteCounter.remote(5)
    pid = aiorl.get(counter.pid.remote())
    waiting = counter.wait_for.remote(str(file))
    ended = counter.__ray_terminate__.remote()
    late = counter.add.remote(1)
    with pytest.raises(ActorLost, match="__ray_terminate__"):
        aiorl.get(late)
    assert aiorl.wait([ended], timeout=0.05) == ([], [ended])
    file.touch()
    assert aiorl.get([waiting, ended, counter.__ray_terminate__.remote()]) == [5, None, None]
    assert not psutil.pid_exists(pid)
    stuck = RemoteCounter.remote(5)
    aiorl.get(stuck.pid.remote())
    waiting = stuck.wait_for.remote(str(tmp_path / "never"))
    aiorl.kill(stuck)
    with pytest.raises(ActorLost):
        aiorl.get(waiting)
    starting = RemoteCounter.remote(5)
    waiting = starting.add.remote(1)
    aiorl.kill(starting)
    with pytest.raises(ActorLost):
        aiorl.get(waiting)
    with pytest.raises(TypeError, match="kill takes a handle"):
        aiorl.kill(5)  # type: ignore[arg-type]


def test_actors_are_started_and_called_in_any_thread(shared: Any) -> None:
    results = []

    def work() -> None:
        counter = RemoteCounter.remote(1)
        results.append(aiorl.get([counter.add.remote(1), shared.same.remote(1)]))
        aiorl.kill(counter)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[2, ((1,), {})]] * 2


# Programs
# --------------------------------------------------------------------------------------------------


def run(program: str, folder: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, write(program, folder)],
        env={**os.environ, "PYTHONPATH": str(SUPPORT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **more,
    )


def write(program: str, folder: Path) -> str:
    path = folder / "program.py"
    path.write_text(program, encoding="utf-8")
    return str(path)


POLICY_GRADIENT = """\
import aiorl as ray
from aiorl import RolloutWorker, SampleBatch
from gymnasium import spaces
import numpy as np
from remote_things import make_env
from plain_policies import PlainPolicy, VECTOR

# the loop in RLlib's documentation of RolloutWorker

if __name__ == "__main__":
    ray.init()
    policy = PlainPolicy(VECTOR, spaces.Discrete(2), {})
    workers = [
        RolloutWorker.as_remote().remote(env_creator=make_env, policy=PlainPolicy)
        for _ in range(2)
    ]
    for _ in range(3):
        weights = ray.put({"default_policy": policy.get_weights()})
        for w in workers:
            w.set_weights.remote(weights)
        batch = SampleBatch.concat_samples(ray.get([w.sample.remote() for w in workers]))
        print(policy.learn_on_batch(batch)["rows"], float(policy.weight[0]))
        policy.apply_gradients(policy.compute_gradients(batch)[0])
    print(ray.get([w.get_weights.remote() for w in workers])[1]["default_policy"]["w"][0])
"""


def test_r252_a_loop_written_for_ray_runs_after_a_change_of_imports(tmp_path: Path) -> None:
    """R252."""
    ended = run(POLICY_GRADIENT, tmp_path)
    assert ended.stderr == ""
    assert ended.stdout.split("\n")[:-1] == ["200 0.0", "200 200.0", "200 400.0", "400.0"]


ENDS = """\
import sys
import aiorl

@aiorl.remote
class Counter:
    def pid(self):
        import os
        return os.getpid()

    def wait(self):
        import time
        time.sleep(100)

if __name__ == "__main__":
    counters = [Counter.remote() for _ in range(2)]
    print(*aiorl.get([counter.pid.remote() for counter in counters]), flush=True)
    {end}
"""


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    ("end", "status"),
    [
        pytest.param("pass", 0, marks=pytest.mark.slow),
        ("raise ValueError", 1),
        ("counters[0].wait.remote(); sys.exit(3)", 3),
        ("aiorl.shutdown(); assert not aiorl.is_initialized(); Counter.remote()", 0),
    ],
)
def test_a_program_leaves_no_process_however_it_ends(end: str, status: int, tmp_path: Path) -> None:
    ended = run(ENDS.format(end=end), tmp_path)
    assert ended.returncode == status, ended.stderr
    assert not any(psutil.pid_exists(int(pid)) for pid in ended.stdout.split())


def test_calls_in_a_fork_are_errors_and_its_own_actors_work(tmp_path: Path) -> None:
    program = """\
import os
import sys
import aiorl
from aiorl.errors import ActorError
from remote_counters import Counter

RemoteCounter = aiorl.remote(Counter)

if __name__ == "__main__":
    counter = RemoteCounter.remote(5)
    pending = counter.wait_for.remote(sys.argv[0] + ".missing")
    pid = os.fork()
    if pid:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    for call in (
        lambda: counter.add.remote(1),
        lambda: aiorl.get(pending),
        lambda: aiorl.wait([pending]),
        lambda: aiorl.kill(counter),
    ):
        try:
            call()
        except ActorError as error:
            print("fork" in str(error))
    print(aiorl.get(RemoteCounter.remote(1).add.remote(1)))
"""
    ended = run(program, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [*["True"] * 4, "2"]


def test_ctrl_c_in_get_ends_the_program_and_its_actors(tmp_path: Path) -> None:
    program = ENDS.format(end="aiorl.get(counters[0].wait.remote())")
    process = subprocess.Popen(
        [sys.executable, write(program, tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert b"KeyboardInterrupt" in errors
    assert process.returncode in (1, 130, -signal.SIGINT)
    assert len(pids) == 2
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.slow
def test_processes_of_other_hosts_join_a_program_that_listens(tmp_path: Path) -> None:
    program = """\
import subprocess, sys
import psutil
import aiorl
from remote_counters import Counter

if __name__ == "__main__":
    try:
        aiorl.init(num_cpus=2)
    except ValueError as error:
        print(type(error).__name__)
    address = aiorl.init(bind="tcp://127.0.0.1:0")
    try:
        aiorl.init()
    except RuntimeError as error:
        print(type(error).__name__)
    assert aiorl.init(ignore_reinit_error=True) == address
    worker = subprocess.Popen([sys.executable, "-m", "aiorl.worker", "--connect", address])
    RemoteCounter = aiorl.remote(Counter).options(on="joined")
    limited = RemoteCounter.options(num_cpus=3).remote()
    process = psutil.Process(aiorl.get(limited.pid.remote()))
    print(worker.pid in [parent.pid for parent in process.parents()])
    print(aiorl.get(limited.variable.remote("OMP_NUM_THREADS")))
    aiorl.kill(limited)
    following = RemoteCounter.remote()
    print(aiorl.get(following.variable.remote("OMP_NUM_THREADS")))
    aiorl.shutdown()
    worker.wait(20)
"""
    ended = run(program, tmp_path, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["ConfigError", "ActorError", "True", "3", "1"]


def test_a_value_that_several_calls_use_is_sent_once_to_those_that_can_be_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    aiorl.shutdown()
    aiorl.init(bind="tcp://127.0.0.1:0")
    shares: list[int] = []
    releases: list[int] = []
    share, release = Actors.share, Actors.release
    monkeypatch.setattr(Actors, "share", lambda *args: shares.append(share(*args)) or shares[-1])
    monkeypatch.setattr(Actors, "release", lambda *args: releases.append(args[1]) or release(*args))
    counters = [RemoteCounter.remote(number) for number in range(4)]
    values = {"w": np.arange(10_000.0)}
    ref = aiorl.put(values)
    aiorl.get(counters[0].same.remote(ref))
    assert shares == []
    calls = [
        counters[0].same.remote(ref),
        counters[1].same.remote(1, ref, 2, named=3),
        counters[2].same.remote(1, first=2, named=ref),
        counters[3].same.remote(ref, aiorl.put(5), named=ref),
    ]
    results = aiorl.get(calls)
    arrived = [results[0][0][0], results[1][0][1], results[2][1]["named"], results[3][0][0]]
    for value in arrived:
        np.testing.assert_array_equal(value["w"], values["w"])
    assert results[1][0][0::2] == (1, 2)
    assert results[1][1] == {"named": 3}
    assert results[2][0] == (1,)
    assert results[2][1]["first"] == 2
    assert results[3][0][1] == 5
    assert len(shares) == 1
    other = aiorl.put(values)
    aiorl.get([counter.same.remote(other) for counter in counters])
    assert len(shares) == 2
    assert aiorl.get(counters[0].same.remote(ref))[0][0]["w"][1] == 1.0  # sent again by itself
    assert len(shares) == 2
    del ref, other
    gc.collect()
    aiorl.get(counters[0].add.remote(1))
    assert releases == shares


def test_the_end_of_the_hub_ends_the_calls_of_all_threads() -> None:
    counter = RemoteCounter.remote(5)
    aiorl.get(counter.add.remote(1))
    errors = []

    def work(begun: threading.Event) -> None:
        try:
            while True:
                aiorl.get(counter.add.remote(1), timeout=60)
                begun.set()
        except Exception as error:
            errors.append(type(error))

    all_begun = [threading.Event() for _ in range(4)]
    threads = [threading.Thread(target=work, args=(begun,)) for begun in all_begun]
    for thread in threads:
        thread.start()
    for begun in all_begun:
        begun.wait()
    aiorl.shutdown()
    for thread in threads:
        thread.join()
    assert all(issubclass(error, ActorError) for error in errors), errors


def test_calls_after_the_end_of_the_hub_are_errors() -> None:
    counter = RemoteCounter.remote(5)
    pending = counter.add.remote(1)
    aiorl.shutdown()
    with pytest.raises(ActorError):
        aiorl.get(pending)
    with pytest.raises(ActorError, match="start new ones"):
        counter.add.remote(1)
    assert not aiorl.is_initialized()
