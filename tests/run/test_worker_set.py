"""The learner's own workers: whatever ends one, or stops it, another takes its place while the run goes on."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from in_process import BlockingEnv, InProcess, learner_over_tcp, until

from aiorl.config.worker import TransportConfig
from aiorl.net.protocol.learner_session import LearnerSettings
from aiorl.process.children import ChildEvent, ChildKilled, ChildRestarting, ChildStarted
from aiorl.run.local_workers import LocalWorkers

ROOT = Path(__file__).parents[2]


def local_workers(both: InProcess, folder: Path, events: list[ChildEvent], **options: Any) -> LocalWorkers:
    service = both.service
    workers = LocalWorkers(
        1,
        service.address,
        service.session,
        max_restarts=3,
        environment={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}:{ROOT / 'tests' / 'run'}"},
        log_path=lambda slot: folder / f"{slot}.txt",
        on_event=events.append,
        on_failure=pytest.fail,
        **options,
    )
    workers.may_be_lost = True
    return workers


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGSTOP])
async def test_a_local_worker_that_is_ended_or_stopped_from_outside_is_replaced(
    tmp_path: Path, number: signal.Signals
) -> None:
    events: list[ChildEvent] = []
    both = learner_over_tcp()
    workers = local_workers(both, tmp_path, events)
    await workers.start()
    await both.updates_done(2, 60)
    victim = workers.pids[1]
    os.kill(victim, number)
    await until(lambda: workers.pids.get(1, victim) != victim)
    await until(lambda: both.service.session.slots == [1])
    await both.updates_done(len(both.updates) + 2, 60)
    assert not psutil.pid_exists(victim)
    leaving = asyncio.create_task(workers.stop(5.0))
    await both.close()
    await leaving
    assert not workers.pids
    started, *between, again = events
    assert started.slot == again.slot == 1
    if number == signal.SIGTERM:
        assert between == [ChildRestarting(1, 128 + signal.SIGTERM, 1, 0.2)]
    else:
        assert between == [ChildKilled(1), ChildRestarting(1, -signal.SIGKILL, 1, 0.2)]


class SlowlyBuilt(BlockingEnv):
    """Building it keeps all other code of its process from running for longer than any heartbeat may take."""

    def __init__(self) -> None:
        super().__init__(step_s=0.0)
        ctypes.PyDLL(None).usleep(1_500_000)  # holds Python's lock


@pytest.mark.slow
async def test_a_worker_whose_environment_is_built_in_silence_is_neither_lost_nor_killed(tmp_path: Path) -> None:
    events: list[ChildEvent] = []
    settings = LearnerSettings(TransportConfig(heartbeat_interval_s=0.1, heartbeat_timeout_s=1.0, build_timeout_s=60.0))
    both = learner_over_tcp(session_settings=settings, env="test_worker_set:SlowlyBuilt")
    workers = local_workers(both, tmp_path, events, come_back_s=0.2)
    await workers.start()
    await both.updates_done(2, 60)
    assert sum("joined" in text for text in both.events) == 1
    leaving = asyncio.create_task(workers.stop(5.0))
    await both.close()
    await leaving
    assert [type(event) for event in events] == [ChildStarted]


class Watched:
    """LocalWorkers above processes that are none, with a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import aiorl.run.local_workers as module

        self.stopped: set[int] = set()
        self.killed: list[int] = []
        self.pids = {1: 101, 2: 102}
        self.working: set[int] = set()
        session = SimpleNamespace(has_brought=self.working.__contains__)
        both: Any = SimpleNamespace(service=SimpleNamespace(address="tcp://nowhere:1", session=session))
        self.workers = local_workers(both, Path(), [], come_back_s=5.0)
        fake: Any = SimpleNamespace(pids=self.pids, kill=self.killed.append, look=lambda: None)
        self.workers._children = fake
        monkeypatch.setattr(module, "_is_stopped", lambda pid: pid in self.stopped)

    def look(self, now: float, *registered: int) -> list[int]:
        self.killed.clear()
        self.workers._kill_lost(registered, now)
        return list(self.killed)


def test_who_was_lost_has_some_time_to_come_back_and_is_killed_then(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    assert watched.look(0.0, 1, 2) == []
    assert watched.look(1.0, 2) == watched.look(5.9, 2) == []
    assert watched.look(5.95, 1, 2) == []  # it is back
    assert watched.look(6.0, 2) == watched.look(10.9, 2) == []
    assert watched.look(11.1, 2) == [1]
    watched.pids[1] = 103  # the next process has a start of its own
    assert watched.look(11.2, 2) == watched.look(40.0, 2) == []
    assert watched.look(41.0, 1, 2) == []


def test_who_was_lost_because_its_process_is_stopped_is_killed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    watched.stopped.add(101)
    assert watched.look(0.0, 1, 2) == []  # not silent for long enough yet
    assert watched.look(0.2, 2) == []
    assert watched.look(0.4, 2) == [1]


def test_restarts_are_forgotten_only_of_a_worker_that_has_brought_a_fragment(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    supervised = watched.workers.has_worked
    watched.look(0.0, 1, 2)
    assert not supervised(1)
    watched.working.add(1)
    watched.look(0.2, 1, 2)
    watched.working.clear()  # it is lost, and its process ends
    watched.look(0.4, 2)
    assert supervised(1)
    assert not supervised(2)
    watched.workers._handle(ChildStarted(1, 103, 1))
    assert not supervised(1)
