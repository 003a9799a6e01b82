"""Checkpoints in passing and at the end do not get in each other's way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiorl.algorithms.algorithm import AlgorithmState
from aiorl.learner.checkpoint import load_newest_valid
from aiorl.learner.saving import Saver
from aiorl.learner.service import Counters
from aiorl.learner.update_thread import StateTaken
from aiorl.process.tasks import Tasks
from aiorl.protocol.ledger import Ledger
from aiorl.report.results import Results


class Updates:
    """Counts how often the state is asked for."""

    requests = 0

    def request_state(self) -> None:
        self.requests += 1


def make(folder: Path) -> tuple[Saver, Updates, Any]:
    updates = Updates()
    service: Any = SimpleNamespace(
        publisher=SimpleNamespace(filter_states=dict),
        counters=Counters(updates=1),
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
        on_error=pytest.fail,
    )
    return saver, updates, service


def taken(value: float) -> StateTaken:
    return StateTaken(AlgorithmState({"w": np.full(2, value)}), 0)


def test_the_last_checkpoint_waits_for_one_in_passing_and_each_gets_its_own_state(tmp_path: Path) -> None:
    saver, updates, service = make(tmp_path)

    async def run() -> None:
        saver.save_in_passing()
        saver.save_in_passing()  # one is enough
        await saver.finish(0.01)  # the update takes longer
        last = asyncio.create_task(saver.save(5.0))
        await asyncio.sleep(0.01)
        assert updates.requests == 1
        saver.state_taken(taken(1.0))
        while updates.requests < 2:
            await asyncio.sleep(0.001)
        assert load_newest_valid(tmp_path).tensors["algorithm/w"].tolist() == [1, 1]
        service.counters.updates = 2
        saver.state_taken(taken(2.0))
        await last

    asyncio.run(run())
    newest = load_newest_valid(tmp_path)
    assert newest.tensors["algorithm/w"].tolist() == [2, 2]
    assert saver.newest == str(newest.path)


def test_a_last_checkpoint_does_not_wait_for_ever(tmp_path: Path) -> None:
    saver, _, _ = make(tmp_path)

    async def run() -> None:
        saver.save_in_passing()
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await saver.save(0.01)

    asyncio.run(run())
