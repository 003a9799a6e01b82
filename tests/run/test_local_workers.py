"""Local workers of the learner: one that ends or stops is replaced, or the run ends with the
reason.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from in_process import QUICK, InProcess, learner_over_tcp, until

from aiorl.config.parts import RunParts
from aiorl.config.schema import CommonConfig
from aiorl.errors import WorkerError
from aiorl.net.protocol.events import WorkerFailed
from aiorl.process.children import ChildGaveUp, ChildRestarting, ChildStarted
from aiorl.run import local_workers as module
from aiorl.run.local_workers import LocalWorkers

HINT = "--ignore-worker-failures"


async def stop(both: InProcess) -> None:
    leaving = asyncio.create_task(both.source.workers_here.stop(5.0))
    await both.close()
    await leaving


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGSTOP]
)
async def test_a_local_worker_that_is_ended_or_stopped_from_outside_is_replaced(
    number: signal.Signals,
) -> None:
    both = learner_over_tcp(num_workers=1)
    workers = both.source.workers_here
    await workers.start()
    await both.updates_done(2, 60)
    victim = workers.pids[1]
    os.kill(victim, number)
    await until(lambda: workers.pids.get(1, victim) != victim)
    await until(lambda: both.source.session.slots == [1])
    await both.updates_done(len(both.updates) + 2, 60)
    assert not psutil.pid_exists(victim)
    await stop(both)
    assert not workers.pids
    (ended,) = [text for text in both.events if "0.2 s" in text]
    assert ("SIGKILL" in ended) == (number == signal.SIGSTOP)


@pytest.mark.slow
async def test_a_worker_that_builds_its_environment_for_long_is_neither_lost_nor_killed() -> None:
    patient = {**QUICK.model_dump(), "build_timeout_s": 60.0}
    both = learner_over_tcp(transport=patient, env="in_process:SlowlyBuilt", num_workers=1)
    both.source.workers_here.come_back_s = 0.2
    await both.source.workers_here.start()
    pids = {**both.source.workers_here.pids}
    await both.updates_done(2, 60)
    assert both.source.workers_here.pids == pids
    await stop(both)
    assert both.failure is None, both.failure
    assert (
        len({fragment.incarnation for done in both.updates for fragment in done.batch.fragments})
        == 1
    )


class FakeChildren:
    """Fake processes with ids of 100 plus their slot."""

    def __init__(self, command: Any, slots: Any, *, has_worked: Any, **options: Any) -> None:
        self.pids = {slot: 100 + slot for slot in slots if command(slot)}
        self.killed: list[int] = []
        self.kill = self.killed.append
        self.has_worked = has_worked

    def poll(self) -> None: ...


class Watched:
    """Local workers of a fake run, with fake processes."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, num_workers: int = 2, **options: Any
    ) -> None:
        self.told: list[str] = []
        self.errors: list[BaseException] = []
        self.stopped: set[int] = set()
        self.working: set[int] = set()
        self.session = SimpleNamespace(
            slots=[],
            has_sent=self.working.__contains__,
            reserve_slot=lambda *_: None,
            mark_process_lost=lambda *_: None,
        )
        self.training: Any = SimpleNamespace(
            counters=SimpleNamespace(env_steps_sampled=7),
            directory=SimpleNamespace(worker_log=lambda slot: Path(f"worker-{slot}.txt")),
            tell=lambda text, level: self.told.append(text),
            fail=self.errors.append,
        )

        def make(*args: Any, **options: Any) -> FakeChildren:
            self.children = FakeChildren(*args, **options)
            return self.children

        monkeypatch.setattr(module, "Children", make)
        monkeypatch.setattr(module, "_is_stopped", lambda pid: pid in self.stopped)
        settings = {"env": "CartPole-v1", "num_workers": num_workers, **options}
        sample = RunParts.of(CommonConfig.from_mapping(settings)).sample
        session: Any = self.session
        self.workers = LocalWorkers(self.training, session, "ipc://nowhere", sample)
        self.workers.may_be_lost = True

    def look(self, now: float, *registered: int) -> list[int]:
        self.children.killed.clear()
        self.session.slots = registered
        self.workers.look(now)
        return list(self.children.killed)

    def fails(self, slot: int, message: str, kind: str = "env") -> None:
        self.workers.on_failed(WorkerFailed(slot, kind, message, "Traceback"))

    @property
    def error(self) -> str:
        (error,) = self.errors
        assert isinstance(error, WorkerError)
        return str(error)


def test_a_lost_worker_is_killed_unless_it_comes_back_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch)
    assert watched.look(0.0, 1, 2) == []
    assert watched.look(1.0, 2) == watched.look(5.9, 2) == []
    assert watched.look(5.95, 1, 2) == []  # it is back
    assert watched.look(6.0, 2) == watched.look(10.9, 2) == []
    assert watched.look(11.1, 2) == [1]
    watched.children.pids[1] = 103  # the next process starts with full time
    assert watched.look(11.2, 2) == watched.look(40.0, 2) == []
    assert watched.look(41.0, 1, 2) == []


def test_a_lost_worker_whose_process_is_stopped_is_killed_immediately(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch)
    watched.stopped.add(101)
    assert watched.look(0.0, 1, 2) == []  # not absent for long enough yet
    assert watched.look(0.2, 2) == []
    assert watched.look(0.4, 2) == [1]


def test_restarts_are_forgotten_only_after_a_worker_has_sent_a_fragment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch)
    watched.look(0.0, 1, 2)
    assert not watched.children.has_worked(1)
    watched.working.add(1)
    watched.look(0.2, 1, 2)
    watched.working.clear()  # it is lost, and its process ends
    watched.look(0.4, 2)
    assert watched.children.has_worked(1)
    assert not watched.children.has_worked(2)
    watched.workers.on_child(ChildStarted(1, 103))
    assert not watched.children.has_worked(1)


# Effects of failures on the run
# --------------------------------------------------------------------------------------------------


def test_the_error_of_a_worker_given_up_contains_its_last_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch)
    watched.fails(1, "the licence is gone")
    watched.workers.on_child(ChildGaveUp(1, 1, 3))
    assert all(value in watched.error for value in ("the licence is gone", "worker-1.txt", HINT))


def test_the_error_of_a_worker_given_up_says_why_its_fragments_were_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch)
    watched.workers.on_refused(1, "column 't': two agents")
    watched.workers.on_refused(9, "of a worker that others started")
    watched.workers.on_child(ChildGaveUp(1, 1, 3))
    assert "it sent a malformed fragment: column 't': two agents" in watched.error


def test_ignored_failures_end_the_run_only_if_no_worker_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch, ignore_worker_failures=True)
    watched.fails(1, "boom", "setup")
    del watched.children.pids[1]
    watched.workers.on_child(ChildGaveUp(1, 1, 3))
    assert not watched.errors
    assert "boom" in watched.told[0]
    del watched.children.pids[2]
    watched.workers.on_child(ChildGaveUp(2, -9, 3))
    assert HINT not in watched.error


def test_a_worker_that_cannot_be_set_up_ends_the_run_immediately_with_a_hint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch, 3)
    watched.fails(7, "a mistake of another program", "setup")
    assert not watched.errors
    watched.fails(1, "no such package", "setup")
    assert all(value in watched.error for value in ("no such package", "worker-1.txt", HINT))


def test_the_same_failure_in_every_worker_before_any_sample_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch, 3)
    for slot, pid in ((1, 17), (1, 19), (2, 23)):
        watched.fails(slot, f"environment 1 of pid {pid}: boom")
    assert not watched.errors
    watched.fails(3, "environment 4 of pid 42: boom")
    assert all(value in watched.error for value in ("pid 42: boom", "worker-3.txt"))


@pytest.mark.parametrize(("sampled", "others"), [(9, []), (7, [4]), (7, [])])
def test_the_run_continues_after_different_failures_or_samples_or_with_other_workers(
    monkeypatch: pytest.MonkeyPatch, sampled: int, others: list[int]
) -> None:
    watched = Watched(monkeypatch)
    watched.training.counters.env_steps_sampled, watched.session.slots = sampled, others
    watched.fails(1, "boom")
    watched.fails(2, "boom" if others or sampled > 7 else "bang")
    assert not watched.errors


def test_restarts_after_equal_failures_are_reported_once_and_all_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(monkeypatch, 8)
    with caplog.at_level(logging.INFO):
        for slot in range(1, 9):
            watched.fails(slot, f"boom {slot}" if slot > 1 else "bang")
            watched.workers.on_child(ChildRestarting(slot, 1, 1, 0.2))
        watched.workers.on_child(ChildRestarting(5, -9, 2, 0.5))
    assert [re.findall(r"-?\d+", text)[:2] for text in watched.told] == [
        ["1", "1"],
        ["2", "1"],
        ["5", "-9"],
    ]
    assert len(caplog.records) == 6
