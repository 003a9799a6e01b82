"""Checkpoints in passing and at the end do not get in each other's way."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiorl.algorithms.algorithm import AlgorithmState
from aiorl.learner import saving as module
from aiorl.learner.checkpoint import load_newest_valid, save_checkpoint
from aiorl.learner.saving import Saver
from aiorl.learner.service import Counters
from aiorl.learner.update_thread import StateTaken
from aiorl.process.tasks import Tasks
from aiorl.protocol.ledger import Ledger
from aiorl.report.results import Results


class Updates:
    """Counts how often the state is asked for."""

    requests = 0
    last_requests = 0

    def request_state(self) -> None:
        self.requests += 1

    def request_last_state(self) -> None:
        self.last_requests += 1


def make(folder: Path, before: Any = lambda: None) -> tuple[Saver, Updates, Any]:
    updates = Updates()
    service: Any = SimpleNamespace(
        publisher=SimpleNamespace(filter_states=dict),
        counters=Counters(),
        session=SimpleNamespace(ledger=Ledger()),
    )
    saver = Saver(
        SimpleNamespace(env="E-v1", algo="ppo", checkpoint_keep=3),
        SimpleNamespace(checkpoints=folder, run_id="ab"),
        SimpleNamespace(spaces={}),
        updates,
        service,
        Results(100, 0.0),
        Tasks(pytest.fail),
        before_writing=before,
        on_error=pytest.fail,
    )
    service.counters.updates = 1
    return saver, updates, service


def taken(value: float) -> StateTaken:
    return StateTaken(AlgorithmState({"w": np.full(2, value)}), 0)


def no_wait() -> None:
    raise AssertionError("there is no need to wait")


def test_the_last_checkpoint_is_of_the_state_after_the_running_update_however_long_it_takes(tmp_path: Path) -> None:
    saver, updates, service = make(tmp_path)

    async def run() -> None:
        waits = asyncio.Event()
        saver.keep(lambda: taken(1.0).state)
        last = asyncio.create_task(saver.await_last_update(0.0, asyncio.Event(), waits.set))
        await waits.wait()
        assert updates.last_requests == 1
        service.counters.updates = 2
        saver.state_taken(taken(2.0))
        await last
        await saver.save_last()

    asyncio.run(run())
    newest = load_newest_valid(tmp_path)
    assert newest.tensors["algorithm/w"].tolist() == [2, 2]
    assert newest.meta["counters"]["updates"] == newest.number == 2
    assert saver.newest == str(newest.path)


@pytest.mark.parametrize("when", ["from the beginning", "later"])
def test_in_a_hurry_it_is_of_the_state_after_the_last_finished_update_with_the_counts_of_then(
    tmp_path: Path, when: str
) -> None:
    saver, _, service = make(tmp_path)

    async def run() -> None:
        hurry = asyncio.Event()
        saver.keep(lambda: taken(1.0).state)
        service.counters.env_steps_sampled = 5  # what comes in while the next update runs
        if when == "later":
            await saver.await_last_update(0.0, hurry, hurry.set)
        else:
            hurry.set()
            await saver.await_last_update(0.0, hurry, no_wait)
        assert saver.has_news
        service.counters.updates = 2  # it ends after all, too late
        await saver.save_last()

    asyncio.run(run())
    newest = load_newest_valid(tmp_path)
    assert newest.tensors["algorithm/w"].tolist() == [1, 1]
    assert newest.meta["counters"] == {**newest.meta["counters"], "updates": 1, "env_steps_sampled": 0}


def test_an_update_that_fails_at_the_end_is_not_waited_for(tmp_path: Path) -> None:
    saver, updates, _ = make(tmp_path)

    async def run() -> None:
        saver.keep(lambda: taken(1.0).state)
        await saver.await_last_update(0.0, asyncio.Event(), saver.updates_failed)
        await saver.await_last_update(0.0, asyncio.Event(), no_wait)
        assert updates.last_requests == 1
        await saver.save_last()

    asyncio.run(run())
    assert load_newest_valid(tmp_path).tensors["algorithm/w"].tolist() == [1, 1]


def test_without_an_update_in_this_session_there_is_nothing_to_save(tmp_path: Path) -> None:
    saver, _, service = make(tmp_path)

    async def run() -> None:
        assert not saver.has_news
        service.counters.updates = 0
        task = asyncio.create_task(saver.await_last_update(20.0, asyncio.Event(), no_wait))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        saver.state_taken(taken(0.0))
        await task
        assert not saver.has_news

    asyncio.run(run())


def test_one_in_passing_that_is_being_written_comes_before_the_last(tmp_path: Path, monkeypatch: Any) -> None:
    saver, updates, service = make(tmp_path)
    begun, go = threading.Event(), threading.Event()
    numbers = []

    def slowly(folder: Path, number: int, *args: Any, **kwargs: Any) -> Path:
        begun.set()
        assert go.wait(20)
        numbers.append(number)
        return save_checkpoint(folder, number, *args, **kwargs)

    monkeypatch.setattr(module, "save_checkpoint", slowly)

    async def run() -> None:
        saver.save_in_passing()
        saver.save_in_passing()  # one is enough
        while not updates.requests:
            await asyncio.sleep(0)
        saver.state_taken(taken(1.0))
        await asyncio.to_thread(begun.wait, 20)
        service.counters.updates = 2
        saver.keep(lambda: taken(2.0).state)
        last = asyncio.create_task(saver.save_last())
        await asyncio.sleep(0)
        go.set()
        await last

    asyncio.run(run())
    assert (numbers, updates.requests) == ([1, 2], 1)
    assert load_newest_valid(tmp_path).tensors["algorithm/w"].tolist() == [2, 2]


def test_one_in_passing_that_waits_for_its_state_gives_way_to_the_last(tmp_path: Path) -> None:
    saver, updates, _ = make(tmp_path)

    async def run() -> None:
        saver.save_in_passing()
        while not updates.requests:
            await asyncio.sleep(0)
        saver.keep(lambda: taken(1.0).state)
        await saver.save_last()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
    assert load_newest_valid(tmp_path).number == 1


def test_counts_are_those_of_the_state_also_where_the_next_update_is_accounted_for_at_once(tmp_path: Path) -> None:
    saver, updates, service = make(tmp_path)

    async def run() -> None:
        saver.save_in_passing()
        while not updates.requests:
            await asyncio.sleep(0)
        saver.state_taken(taken(1.0))
        service.counters.updates = 2  # in the same turn of the loop
        while not saver.newest:
            await asyncio.sleep(0.001)

    asyncio.run(run())
    assert load_newest_valid(tmp_path).number == 1


def test_the_directory_is_seen_to_before_each_checkpoint(tmp_path: Path) -> None:
    looked = []
    saver, _, _ = make(tmp_path, lambda: looked.append(1))

    async def run() -> None:
        saver.keep(lambda: taken(1.0).state)
        await saver.save_last()

    asyncio.run(run())
    assert looked == [1]
