"""Checkpoints in passing and at the end do not interfere; a resume restores them or refuses
them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from aiorl.acting.checkpoint import (
    Checkpoint,
    list_checkpoints,
    load_checkpoint,
    load_newest_valid,
    save_checkpoint,
)
from aiorl.acting.filters import MeanStdFilter, make_filter
from aiorl.config.parts import RunParts
from aiorl.config.schema import CommonConfig
from aiorl.config.worker import WorkerPart
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.errors import CheckpointError
from aiorl.learning.algorithm import AlgorithmState
from aiorl.net.protocol.ledger import Ledger
from aiorl.run.added_policy import PolicyChanges
from aiorl.run.counters import Counters
from aiorl.run.end import wait_for_last
from aiorl.run.env_changes import EnvChanges
from aiorl.run.report.results import Results
from aiorl.run.restoring import Restored, RunState, take_up
from aiorl.run.saving import Saver


class Held:
    """Stored experience of three rows in two pieces; records that it was closed."""

    def __init__(self) -> None:
        self.values = {"rows": 3}
        self.is_closed = False

    def pieces(self) -> Iterator[tuple[str, int, Any]]:
        yield "rows", 0, np.arange(2)
        yield "rows", 2, np.arange(1)

    def close(self) -> None:
        self.is_closed = True


class Stored:
    """Fake group of policies that store experience or not."""

    def __init__(self, held: Held | None = None) -> None:
        self.held = held

    @property
    def stores_experience(self) -> bool:
        return self.held is not None

    def hold_experience(self) -> dict[str, Any]:
        return {"one": self.held}


def make(
    folder: Path, before: Any = lambda: None, stored: Stored | None = None, ask: Any = lambda: None
) -> tuple[Saver, Any]:
    service: Any = SimpleNamespace(
        directory=SimpleNamespace(checkpoints=folder, run_id="ab"),
        fail=pytest.fail,
        tell=pytest.fail,
        before_checkpoint=before,
        core=SimpleNamespace(
            publisher=SimpleNamespace(filter_states=dict),
            is_idle=True,
            session=SimpleNamespace(ledger=Ledger()),
        ),
        counters=Counters(),
        results=Results(100, 0.0),
    )
    learning: Any = SimpleNamespace(
        spaces={},
        graphs={},
        worker_part=WorkerPart(env="E-v1"),
        group=stored or Stored(),
        changes=PolicyChanges(),
        env_changes=EnvChanges(),
    )
    save = RunParts.of(CommonConfig(env="E-v1")).save
    saver = Saver(service, service.core, learning, ask, save=save)
    service.counters.updates = 1
    return saver, service


def state(value: float) -> Any:
    return lambda: AlgorithmState({"w": np.full(2, value)})


def test_stored_experience_is_written_in_pieces_unless_an_update_runs(tmp_path: Path) -> None:
    held = Held()
    saver, service = make(tmp_path, stored=Stored(held))
    saver.keep(state(1.0))
    found = load_checkpoint(asyncio.run(saver.save_last()))
    assert found.meta["experience"] == {"one": {"rows": 3}}
    pieces = [(name, first, rows.tolist()) for name, first, rows in found.pieces_of("one")]
    assert pieces == [("rows", 0, [0, 1]), ("rows", 2, [0])]
    assert held.is_closed

    service.counters.updates = 2
    # an update runs meanwhile, or the checkpoint is for an evaluation
    for changes in (
        True,
        False,
    ):
        service.core.is_idle = not changes
        saver.keep(state(2.0))
        found = load_checkpoint(asyncio.run(saver.save_last(with_experience=changes)))
        assert "experience" not in found.meta
        assert not found.pieces


def test_a_checkpoint_in_passing_waits_for_the_experience_of_the_next_update(
    tmp_path: Path,
) -> None:
    asked: list[bool] = []
    saver, service = make(tmp_path, stored=Stored(Held()), ask=lambda: asked.append(True))

    async def run() -> None:
        saver.keep(state(0.0))
        service.counters.updates = 2
        saver.keep(state(1.0))
        saver.save_in_passing()
        saver.save_in_passing()
        assert asked == [True]
        await asyncio.sleep(0)
        assert not list_checkpoints(tmp_path)
        service.counters.updates = 3
        saver.keep(state(2.0), {"one": Held()})
        assert saver._passing is not None
        await saver._passing

    asyncio.run(run())
    (path,) = tmp_path.iterdir()
    found = load_checkpoint(path)
    assert (found.number, found.tensors["algorithm/w"].tolist()) == (3, [2.0, 2.0])
    assert len(list(found.pieces_of("one"))) == 2


@pytest.mark.parametrize("hurries", ["from the beginning", "later", "never"])
def test_the_last_checkpoint_has_the_state_and_counters_of_the_last_update_in_time(
    tmp_path: Path, hurries: str
) -> None:
    """It waits until the running update ends, unless there is a hurry."""
    saver, service = make(tmp_path)

    async def run() -> None:
        hurry, update = asyncio.Event(), asyncio.get_running_loop().create_future()

        def wait(text: str, level: int) -> None:
            assert hurries != "from the beginning"
            if hurries == "later":
                hurry.set()
            else:
                service.counters.updates = 2
                saver.keep(state(2.0))
                update.set_result(None)

        saver.keep(state(1.0))
        service.counters.env_steps_sampled = 5  # fragments that arrive while the next update runs
        if hurries == "from the beginning":
            hurry.set()
        await wait_for_last(update, 0.0, hurry, wait)
        assert saver.has_news
        service.counters.updates = 2  # it ends, but too late
        await saver.save_last()

    asyncio.run(run())
    newest, count = load_newest_valid(tmp_path), 2 if hurries == "never" else 1
    assert newest.tensors["algorithm/w"].tolist() == [count, count]
    counters = newest.meta["counters"]
    assert (
        (counters["updates"], counters["env_steps_sampled"])
        == (newest.number, 5 * (count - 1))
        == (count, 5 * (count - 1))
    )
    assert saver.newest == str(newest.path)


# Resume


class Group:
    fixed: ClassVar[dict[str, Any]] = {}
    """Fake group that records whether its state was set."""

    def __init__(self) -> None:
        self.states: list[Any] = []
        self.learners: dict[str, Any] = {}

    def set_state(self, state: Any) -> None:
        self.states.append(state)


def learning(name: str) -> Any:
    part = WorkerPart(env="E", seed=3)
    filters = {DEFAULT_POLICY_ID: make_filter(name, (2,))}
    return SimpleNamespace(
        group=Group(),
        filters=filters,
        graphs={},
        spaces={},
        worker_part=part,
        env_changes=EnvChanges(),
    )


def a_checkpoint(**filter_state: Any) -> Checkpoint:
    tensors = {
        f"filter/{DEFAULT_POLICY_ID}/{name}": np.asarray(array)
        for name, array in filter_state.items()
    }
    meta = {"algorithm": {}, "env": "E", "algo": "ppo", "spaces": {}}
    return Checkpoint(Path("there"), 7, {"algorithm/w": np.ones(2), **tensors}, meta)


def seen() -> dict[str, Any]:
    own = MeanStdFilter((2,))
    own(np.array([[1.0, 2.0], [3.0, 6.0]]))
    return own.state()


@pytest.mark.parametrize("name", ["MeanStdFilter", "ConcurrentMeanStdFilter"])
def test_after_a_resume_statistics_continue_and_workers_have_new_seeds(name: str) -> None:
    run = learning(name)
    take_up(a_checkpoint(**seen()), run)
    (state,) = run.group.states
    assert set(state.tensors) == {"w"}
    for part, array in run.filters[DEFAULT_POLICY_ID].state().items():
        np.testing.assert_array_equal(array, seen()[part])
    assert run.worker_part == WorkerPart(env="E", seed=3, life=7)


@pytest.mark.parametrize(
    ("name", "state", "value"),
    [
        ("NoFilter", seen(), "NoFilter"),
        ("MeanStdFilter", {}, "MeanStdFilter"),
        ("MeanStdFilter", {**seen(), "mean": np.zeros(3)}, "'default_policy'"),
        ("MeanStdFilter", {"n": np.array(2)}, "'default_policy'"),
    ],
)
def test_another_filter_is_refused_before_anything_is_changed(
    name: str, state: dict[str, Any], value: str
) -> None:
    run = learning(name)
    with pytest.raises(CheckpointError, match=value):
        take_up(a_checkpoint(**state), run)
    assert not run.group.states
    assert getattr(run.filters[DEFAULT_POLICY_ID], "count", 0) == 0


COUNTERS = {
    "env_steps_sampled": 60,
    "agent_steps_sampled": 60,
    "env_steps_trained": 40,
    "updates": 2,
    "updates_skipped": 0,
}
LEDGER = {
    "sampled": 70,
    "trained": 40,
    "queued": 20,
    "in_flight": 5,
    "discarded": {"stale": 5},
    "lost": {},
}


def whole(**changed: Any) -> Checkpoint:
    results = Results(100, 0.0).to_state()
    meta = {"counters": COUNTERS, "ledger": LEDGER, "results": results, "algorithm": {}}
    for dotted, value in changed.items():
        part, _, name = dotted.partition("__")
        meta[part] = {**meta[part], name: value} if name else value
    tensors = {"algorithm/default_policy/weights/w": np.ones(2, np.float32)}
    return Checkpoint(Path("there"), 1, tensors, meta)


def test_counters_results_and_ledger_come_back() -> None:
    state = RunState.from_meta(whole())
    assert state.counters == Counters(**COUNTERS)
    assert state.ledger == LEDGER


@pytest.mark.parametrize(
    "changed",
    [
        {"counters": 5},
        {"counters__surprise": 1},
        {"ledger": []},
        {"ledger__sampled": 71},
        {"results": {}},
        {"results__time_total_s": []},
        {"results__hist": [1]},
        {"algorithm": 7},
    ],
)
def test_invalid_meta_is_refused_before_anything_is_built(changed: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        RunState.from_meta(whole(**changed))


def test_the_checkpoint_before_one_with_damaged_experience_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = whole()
    for number in (1, 2):
        pieces = {"default_policy": [("rows", 0, np.arange(3)), ("rows", 3, np.arange(3))]}
        path = save_checkpoint(
            tmp_path / "checkpoints", number, state.tensors, state.meta, pieces=pieces
        )
    assert Restored.find(tmp_path).checkpoint.number == 2
    file = path / "pieces" / "000001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert Restored.find(tmp_path).checkpoint.number == 1
    assert "000001.safetensors" in caplog.text


def test_a_ledger_with_very_large_counts_is_restored() -> None:
    ledger = Ledger()
    for number in range(2000):
        ledger.open(f"{number}")
        ledger.report(f"{number}", 2**53)
        ledger.close(f"{number}", "left")
    assert ledger.lost["left"] > 2**62
    assert (
        RunState.from_meta(
            whole(ledger=json.loads(json.dumps(ledger.as_dict())), counters__env_steps_trained=0)
        ).ledger
        == ledger.as_dict()
    )
