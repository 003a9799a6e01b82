"""Update thread: order of events, bounds, errors, stopping."""

from __future__ import annotations

import dataclasses
import math
import queue
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from aiorl.errors import TrainingDiverged
from aiorl.learning.algorithm import AlgorithmState, LeasePlan, UpdateResult
from aiorl.net.protocol.events import SamplesAccepted
from aiorl.net.wire.messages import Samples
from aiorl.run.ingest import AssembledBatch
from aiorl.run.policy_group import UpdateDone, Updater, WarmUpDone
from aiorl.run.update_thread import UpdateEvent, UpdatesEnded, UpdateThread

TIMEOUT_S = 20.0
PLAN = LeasePlan("streaming", 1)


class FakeGroup:
    """Fake group that records calls on a tape, and can wait in an update until released."""

    def __init__(self) -> None:
        self.tape: list[str] = []
        self.threads: set[str] = set()
        self.go = threading.Event()
        self.go.set()
        self.begun = threading.Semaphore(0)
        self.fail_in: str = ""
        self.num_updates = 0

    def _note(self, what: str) -> None:
        self.threads.add(threading.current_thread().name)
        self.tape.append(what)
        if what.startswith(self.fail_in or "-"):
            raise TrainingDiverged("the test wants it so")

    def warm_up(self) -> None:
        self._note("warm_up")

    def make_batch(self, fragments: Any) -> dict[str, Any]:
        self._note(f"make_batch {len(fragments)}")
        return {"x": np.zeros(1)}

    def update(self, batch: Any, env_steps_total: int) -> UpdateResult:
        self.begun.release()
        assert self.go.wait(TIMEOUT_S)
        self._note(f"update {env_steps_total}")
        return UpdateResult({"loss": 1.0})

    def get_weights(self, since: int) -> dict[str, Any]:
        self._note("get_weights")
        return {"learns": {"w": np.ones(2, np.float32)}}

    def hold_state(self) -> Callable[[], AlgorithmState]:
        self._note("hold_state")
        state = AlgorithmState({}, {"n": len(self.tape)})
        return lambda: state


def batch(env_steps: int = 10) -> AssembledBatch:
    samples = Samples(1, 1, env_steps, env_steps, 0, 0, 1, env_steps, {}, {}, {}, {})
    return AssembledBatch((SamplesAccepted(0, "ab", samples),), env_steps)


@pytest.fixture
def group() -> FakeGroup:
    return FakeGroup()


@pytest.fixture
def events() -> queue.Queue[UpdateEvent]:
    return queue.Queue()


@pytest.fixture
def thread(group: Any, events: queue.Queue[UpdateEvent]) -> Iterator[UpdateThread]:
    thread = UpdateThread(Updater(group, PLAN, env_steps_total=100), events.put)
    yield thread
    group.go.set()
    thread.stop()
    assert thread.join(TIMEOUT_S)


def test_warms_up_first_then_updates_in_order_and_counts_env_steps(
    thread: UpdateThread, group: FakeGroup, events: queue.Queue[UpdateEvent]
) -> None:
    thread.start()
    assert isinstance(events.get(timeout=TIMEOUT_S), WarmUpDone)
    for env_steps in (10, 5):
        thread.submit_nowait(batch(env_steps))
        done = events.get(timeout=TIMEOUT_S)
        assert isinstance(done, UpdateDone)
        assert done.batch.env_steps == env_steps
        assert done.weights["learns"]["w"].tolist() == [1.0, 1.0]
        assert done.state().values == {"n": len(group.tape)}, "as the update left it"
        assert min(done.wait_s, done.make_batch_s, done.update_s) >= 0
    assert group.tape == [
        "warm_up",
        "make_batch 1",
        "update 100",
        "get_weights",
        "hold_state",
        "make_batch 1",
        "update 110",
        "get_weights",
        "hold_state",
    ]
    assert group.threads == {"aiorl-update"}


def test_the_end_of_the_program_waits_for_an_update_that_a_stopped_run_has_left() -> None:
    program = """
    import time
    from aiorl.run.update_thread import UpdateThread

    class Compiles:
        def warm_up(self):
            time.sleep(0.5)
            print("compiled", flush=True)

    thread = UpdateThread(Compiles(), lambda event: None)
    thread.start()
    thread.stop()
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (0, "compiled\n"), ended.stderr


def test_weights_are_published_after_a_number_of_updates_or_an_interval(group: Any) -> None:
    often = Updater(group, dataclasses.replace(PLAN, publish_every=3, publish_interval_s=math.inf))
    published = [often.update(batch()).weights is not None for _ in range(7)]
    assert published == [True, False, False, True, False, False, True]
    late = Updater(group, dataclasses.replace(PLAN, publish_every=1000, publish_interval_s=1e-9))
    assert all(late.update(batch()).weights is not None for _ in range(3))


def test_stored_experience_is_returned_once_after_a_request(group: Any) -> None:
    updater = Updater(group, PLAN)
    group.hold_experience = lambda: {"learns": "held"}
    assert updater.update(batch()).experience is None
    updater.wants_experience.set()
    assert updater.update(batch()).experience == {"learns": "held"}
    assert updater.update(batch()).experience is None


@pytest.mark.parametrize("where", ["warm_up", "make_batch", "update", "get_weights"])
def test_an_error_ends_the_thread_and_is_delivered_with_its_batch(
    thread: UpdateThread, group: FakeGroup, events: queue.Queue[UpdateEvent], where: str
) -> None:
    group.fail_in = where
    thread.submit_nowait(batch(7))
    if where != "warm_up":
        thread.submit_nowait(batch(8))
    thread.start()
    found = [events.get(timeout=TIMEOUT_S) for _ in range(1 if where == "warm_up" else 2)]
    failed = found[-1]
    assert isinstance(failed, UpdatesEnded)
    assert isinstance(failed.error, TrainingDiverged)
    assert (failed.batch is None) == (where == "warm_up")
    assert failed.batch is None or failed.batch.env_steps == 7
    assert failed.num_left == 1
    assert thread.join(TIMEOUT_S)


def test_stopping_finishes_only_the_running_update(
    thread: UpdateThread, group: FakeGroup, events: queue.Queue[UpdateEvent]
) -> None:
    group.go.clear()
    thread.start()
    thread.submit_nowait(batch())
    assert group.begun.acquire(timeout=TIMEOUT_S)
    thread.submit_nowait(batch())
    thread.stop()
    assert not thread.join(0.01)
    group.go.set()
    assert thread.join(TIMEOUT_S)
    assert [type(events.get_nowait()) for _ in range(2)] == [WarmUpDone, UpdateDone]
    assert events.get_nowait() == UpdatesEnded(num_left=1)
    assert events.empty()
