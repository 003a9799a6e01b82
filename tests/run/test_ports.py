"""Both implementations of each port of a run keep its promises. Those of grants are in `test_core`,
those of endpoints in `tests/net/transport/test_endpoint_contract.py`.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from in_process import FakeAlgorithm, InProcess

from aiorl.acting.run_dir import RunDirectory
from aiorl.config.parts import RunParts
from aiorl.config.schema import CommonConfig
from aiorl.errors import InternalError
from aiorl.learning.algorithm import LeasePlan
from aiorl.net.protocol.events import SamplesAccepted
from aiorl.net.wire.messages import Samples
from aiorl.run import training as module
from aiorl.run.ingest import AssembledBatch
from aiorl.run.local_source import InlineUpdates
from aiorl.run.policy_group import PolicyGroup, UpdateDone, Updater
from aiorl.run.ports import Updates
from aiorl.run.training import Training
from aiorl.run.update_thread import UpdateEvent, UpdateThread

TIMEOUT_S = 20.0

# Updates
# --------------------------------------------------------------------------------------------------


class Storing(FakeAlgorithm):
    """Algorithm that stores experience."""

    @property
    def stores_experience(self) -> bool:
        return True

    def hold_experience(self) -> Any:
        return len(self.batches)


class Driven(Protocol):
    """Updates, and a function that waits for the next one to end."""

    updates: Updates

    def next_done(self) -> UpdateDone: ...

    def close(self) -> None: ...


class InThread:
    """Updates in a thread."""

    def __init__(self, updater: Updater) -> None:
        self._events: queue.Queue[UpdateEvent] = queue.Queue()
        self._thread = UpdateThread(updater, self._events.put)
        self.updates: Updates = self._thread
        self._thread.start()

    def next_done(self) -> UpdateDone:
        while True:
            event = self._events.get(timeout=TIMEOUT_S)
            if isinstance(event, UpdateDone):
                return event

    def close(self) -> None:
        self._thread.stop()
        assert self._thread.join(TIMEOUT_S)


class Inline:
    """Updates in the thread that asks for them."""

    def __init__(self, updater: Updater) -> None:
        self._inline = InlineUpdates(updater)
        self.updates: Updates = self._inline
        updater.warm_up()

    def next_done(self) -> UpdateDone:
        assert self._inline.is_due
        return self._inline.make_next()

    def close(self) -> None:
        self._inline.stop()


@pytest.fixture(params=[InThread, Inline], ids=["thread", "inline"])
def driven(request: pytest.FixtureRequest) -> Iterator[Any]:
    algorithm = Storing(CommonConfig(env="CartPole-v1"))
    updater = Updater(PolicyGroup({"default_policy": algorithm}), LeasePlan("streaming", 1))
    both = request.param(updater)
    yield both
    both.close()


def batch(env_steps: int) -> AssembledBatch:
    columns: Any = {"default_policy": {}}
    samples = Samples(1, 1, env_steps, env_steps, 0, 0, 1, env_steps, columns, {}, {}, {})
    return AssembledBatch((SamplesAccepted(0, "ab", samples),), env_steps)


def test_updates_end_in_the_order_of_their_train_batches(driven: Driven) -> None:
    for env_steps in (3, 4):
        driven.updates.submit_nowait(batch(env_steps))
    assert [driven.next_done().batch.env_steps for _ in range(2)] == [3, 4]


def test_each_update_has_its_own_weights_and_state(driven: Driven) -> None:
    ended = []
    for _ in range(2):
        driven.updates.submit_nowait(batch(1))
        ended.append(driven.next_done())
    first, second = [next(iter(done.weights["default_policy"].values())) for done in ended]  # type: ignore[index]
    assert (first != second).any()
    assert all(callable(done.state) for done in ended)


def test_stored_experience_comes_once_with_the_update_after_the_question(driven: Driven) -> None:
    experience = []
    for asks in (False, True, False):
        if asks:
            driven.updates.updater.wants_experience.set()
        driven.updates.submit_nowait(batch(1))
        experience.append(driven.next_done().experience)
    assert experience == [None, {"default_policy": 2}, None]


def test_stopping_can_be_repeated(driven: Driven) -> None:
    driven.updates.stop()
    driven.updates.stop()


# A training, as sources and observers see it
# --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["training", "double"])
def view(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Any]]:
    """Return a function that makes a training or its double on the running loop."""
    if request.param == "double":
        yield lambda: InProcess(num_workers=0)
        return
    monkeypatch.setattr(module, "prepare_environment", lambda runtime: None)
    settings = {"env": "CartPole-v1", "num_workers": 0, "run_dir": str(tmp_path / "run")}
    config = CommonConfig.from_mapping(settings)

    def tell(text: str, level: int) -> None: ...

    def source(training: Any, core: Any) -> Any:
        return _Silent()

    with RunDirectory.open(config) as directory:
        parts = RunParts.of(config)
        yield lambda: Training(parts, directory, tell, source, build=pytest.fail)


class _Silent:
    """Source that does nothing."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.play = None
        self.status = ""

    def stop(self) -> None: ...


def test_a_view_has_totals_results_and_a_directory(view: Callable[[], Any]) -> None:
    async def look() -> None:
        training = view()
        assert training.counters.updates == training.results.training_iteration == 0
        assert training.counters is training.core.counters
        assert training.results is training.core.results
        assert training.directory.run_id
        assert training.play is None
        assert training.silent_s == 0.0
        assert isinstance(training.status, str)

    asyncio.run(look())


def test_the_first_reason_to_end_counts(view: Callable[[], Any]) -> None:
    async def end() -> None:
        training = view()
        assert not training.end.has_come
        training.stop("Done: enough.", final=False)
        training.fail(InternalError("too late"))
        assert training.end.has_come
        assert training.end.reason == "Done: enough."
        assert not training.end.is_final

    asyncio.run(end())


def test_a_failure_ends_it_with_the_error(view: Callable[[], Any]) -> None:
    async def end() -> None:
        training = view()
        training.fail(InternalError("broken"))
        training.stop("too late")
        with pytest.raises(InternalError, match="broken"):
            _ = training.end.reason

    asyncio.run(end())
