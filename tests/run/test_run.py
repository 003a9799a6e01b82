"""Reports and end of a run, without TensorFlow: it ends whatever fails, and later events do no
harm.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from in_process import LENGTH, NUM_ENVS, FakeAlgorithm, fake_learning, with_settings

from aiorl.acting.checkpoint import find_checkpoint
from aiorl.acting.run_dir import RunDirectory
from aiorl.config.parts import RunParts
from aiorl.config.schema import CommonConfig
from aiorl.errors import CheckpointError, MemoryQuotaError
from aiorl.keys import make_keys
from aiorl.net.transport.zmq_learner import ZmqLearnerEndpoint
from aiorl.process import tasks as tasks_module
from aiorl.run import run as run_module, training as module
from aiorl.run.counters import Counters
from aiorl.run.observers import RunFiles
from aiorl.run.remote_source import RemoteSource
from aiorl.run.report.figures import summary_lines
from aiorl.run.report.loggers import read_results
from aiorl.run.run import Outcome, Run
from aiorl.run.training import Iteration, Training

ROOT = Path(__file__).parents[2]


class Showing:
    """Display that records its output and whether it was closed; its tick can fail."""

    error: Exception | None = None
    is_closed = False
    compiling = threading.Event()

    def __init__(self) -> None:
        self.shown: list[tuple[str, str]] = []
        self.compiling.clear()

    def start(self, now: float) -> None: ...

    def status(self, text: str, now: float) -> None:
        self.shown.append(("status", text))
        if "TensorFlow" not in text:
            self.compiling.set()

    def way(self, name: str, text: str, now: float) -> None:
        self.shown.append((name, text))

    def update(self, result: Any, now: float) -> None: ...

    def event(self, text: str, now: float, level: int = 0) -> None:
        self.shown.append(("event", text))

    def tick(self, now: float) -> None:
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Run, Any]]:
    """Return a factory of runs without workers, whose model is never ready."""
    monkeypatch.setattr(module, "prepare_environment", lambda runtime: None)

    async def never(self: RemoteSource, step: Any) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(RemoteSource, "build", never)

    def make(**options: Any) -> tuple[Run, Any]:
        defaults = {
            "env": "CartPole-v1",
            "seed": 1,
            "num_workers": 0,
            "run_dir": str(tmp_path / "run"),
        }
        bind = "tcp://127.0.0.2:0"  # otherwise it would have no workers
        config = CommonConfig.from_mapping({**defaults, "bind": bind, **options})
        display: Any = Showing()
        return Run(config, RunDirectory.open(config), lambda _: display), display

    return make


def training_of(run: Run) -> Training:
    assert run.training is not None
    return run.training


def source_of(run: Run) -> RemoteSource:
    source = training_of(run).source
    assert isinstance(source, RemoteSource)
    return source


def test_a_task_of_the_run_that_dies_ends_it_with_its_error(
    start: Callable[..., tuple[Run, Any]],
) -> None:
    run, display = start()
    display.error = ZeroDivisionError("the display is broken")
    with pytest.raises(ZeroDivisionError, match="the display is broken"):
        asyncio.run(asyncio.wait_for(run.run(), 20))
    assert display.is_closed


def test_r184_a_learner_over_its_memory_quota_ends_with_a_clear_error(
    start: Callable[..., tuple[Run, Any]],
) -> None:
    run, display = start(memory=2**20)
    with pytest.raises(MemoryQuotaError) as caught:
        asyncio.run(asyncio.wait_for(run.run(), 20))
    assert (caught.value.key, caught.value.max_bytes) == ("memory", 2**20)
    assert display.is_closed


def test_each_step_of_the_end_is_taken_even_if_others_fail(
    start: Callable[..., tuple[Run, Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, display = start()
    monkeypatch.setattr(tasks_module, "_END_S", 0.05)
    released: list[str] = []
    left: list[Any] = []
    kinds: tuple[Any, ...] = (ZmqLearnerEndpoint, RunFiles)
    closes = {kind: kind.close for kind in kinds}

    def fail(part: Any) -> None:
        left.append(part)
        raise ZeroDivisionError("it cannot be closed")

    def end() -> None:
        monkeypatch.setattr(source_of(run).workers_here, "stop", lambda grace_s: asyncio.sleep(60))
        for kind in kinds:
            monkeypatch.setattr(kind, "close", fail)
        run.request_stop("enough")

    async def main() -> None:
        run.on_release = lambda: released.append("begun")
        asyncio.get_running_loop().call_later(0.1, end)
        await asyncio.wait_for(run.run(), 10)
        for part in left:
            if (waiting := closes[type(part)](part)) is not None:
                await waiting

    asyncio.run(main())
    assert released == ["begun"]
    assert display.is_closed
    told = [record for record in caplog.records if record.name == tasks_module.__name__]
    assert [bool(record.exc_info) for record in told] == [True, False, True]
    assert "0.05 s" in told[1].getMessage()


def test_reported_text_cannot_forge_lines_of_the_log(
    start: Callable[..., tuple[Run, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """Several lines are indented, control characters are replaced, and the length is limited."""
    run, display = start()

    def tell() -> None:
        said = (
            "worker 1 failed: \x1b[2Jboom\n2026-01-01 00:00:00,000 ERROR aiorl: forged\u2028x\rabc"
        )
        training_of(run).tell(said, logging.ERROR)
        training_of(run).tell("long " * 100_000, logging.INFO)
        run.request_stop("enough")

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.1, tell)
        await asyncio.wait_for(run.run(), 10)

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    first, long = [text for kind, text in display.shown if kind == "event"]
    assert first.split("\n") == [
        "worker 1 failed: ?[2Jboom",
        "    2026-01-01 00:00:00,000 ERROR aiorl: forged",
        "    x",
        "    abc",
    ]
    assert len(long) <= 24_000
    assert {first, long} <= {record.getMessage() for record in caplog.records}


@pytest.mark.parametrize("while_it", ["loads", "compiles"])
def test_stop_time_counts_from_the_start_of_the_run(
    start: Callable[..., tuple[Run, Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    while_it: str,
) -> None:
    run, _ = start(stop_time_s=0.5)
    done = threading.Event()
    if while_it == "compiles":
        config = CommonConfig(env="CartPole-v1")
        algorithm = FakeAlgorithm(config)
        monkeypatch.setattr(algorithm, "warm_up", lambda: done.wait(30))

        async def build(self: RemoteSource, step: Any) -> Any:
            return fake_learning(config, algorithm)

        monkeypatch.setattr(RemoteSource, "build", build)
    try:
        outcome = asyncio.run(asyncio.wait_for(run.run(), 20))
    finally:
        done.set()
    assert (outcome.ok, outcome.result) == (True, {})
    assert "0.5 s" in outcome.reason
    assert read_results(tmp_path / "run") == []
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    (line,) = summary_lines(run.summary(outcome))
    assert outcome.reason in line
    assert str(tmp_path / "run") in line


@pytest.fixture
def trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Run, Any, Outcome]]:
    """Return a function that runs a fake algorithm with a real worker process to the end."""
    monkeypatch.setenv(
        "PYTHONPATH", f"{ROOT}:{ROOT / 'tests' / 'support'}:{ROOT / 'tests' / 'run'}"
    )

    def train(algorithm: type[FakeAlgorithm], **options: Any) -> tuple[Run, Any, Outcome]:
        def build(config: CommonConfig, *arguments: Any, **options: Any) -> Any:
            return fake_learning(config, algorithm(config))

        monkeypatch.setattr(run_module, "build_learning", build)
        settings = {
            "env": "CartPole-v1",
            "seed": 1,
            "num_workers": 1,
            "run_dir": str(tmp_path / "run"),
            **options,
        }
        config = CommonConfig.from_mapping(settings)
        display: Any = Showing()
        with RunDirectory.open(config) as directory:
            run = Run(config, directory, lambda _: display)
            outcome = asyncio.run(asyncio.wait_for(run.run(), 60))
        return run, display, outcome

    return train


def test_one_last_result_covers_all_updates_including_running_ones(
    trained: Callable[..., tuple[Run, Any, Outcome]], tmp_path: Path
) -> None:
    steps = 4 * 4 * LENGTH * NUM_ENVS
    _, _, outcome = trained(with_settings(mode="streaming", update_s=0.2), stop_timesteps=steps)
    assert outcome.ok
    results = read_results(tmp_path / "run")
    last, before = results[-1], results[-2]
    assert (
        last["env_steps_trained_total"]
        == last["ledger"]["trained"]
        >= steps
        > before["env_steps_trained_total"]
    )
    assert last["updates_total"] == find_checkpoint(tmp_path / "run").number


def test_work_before_the_first_update_and_the_join_command_are_shown(
    trained: Callable[..., tuple[Run, Any, Outcome]],
) -> None:
    compiles = with_settings(warm_up=lambda self: Showing.compiling.wait(20))
    run, display, outcome = trained(compiles, stop_timesteps=100)
    said = [text for kind, text in display.shown if kind == "status"]
    assert ["TensorFlow" in text for text in said[:2]] == [True, False]
    (command,) = [text for kind, text in display.shown if kind == "join"]
    assert command == f"aiorl worker --connect {source_of(run).address}"
    assert command not in dict(run.summary(outcome).next_steps).values(), "the run is over"


def test_the_join_command_names_the_keys_in_use(
    start: Callable[..., tuple[Run, Any]], tmp_path: Path
) -> None:
    folder = tmp_path / "my keys"
    make_keys(folder)
    run, display = start(keys=str(folder), stop_time_s=0.2)
    asyncio.run(asyncio.wait_for(run.run(), 20))
    assert display.shown[0] == (
        "join",
        f"aiorl worker --connect {source_of(run).address} --keys '{folder}'",
    )


def test_a_wait_for_workers_is_reported_with_the_join_command(
    start: Callable[..., tuple[Run, Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, _ = start(bind="tcp://0.0.0.0:0", insecure=True, stop_time_s=1.2)
    monkeypatch.setattr(Training, "silent_s", 71.0)
    asyncio.run(asyncio.wait_for(run.run(), 20))
    said = next(text for text in caplog.messages if "71 s" in text)
    assert source_of(run).join_command in said
    assert "0.0.0.0" not in said
    assert "num_workers: 0" in said


@pytest.mark.parametrize("num_sessions", [1, 20])
def test_a_week_has_few_results_however_often_it_is_resumed(
    monkeypatch: pytest.MonkeyPatch, num_sessions: int
) -> None:
    """There was one a second, 415 MB a day."""
    now = 1e5
    monkeypatch.setattr("aiorl.run.training.time", SimpleNamespace(monotonic=lambda: now))
    counters = Counters()
    parts = RunParts.of(CommonConfig(env="x"))
    ages = [0.0]
    age_s = 0.0
    for _ in range(num_sessions):
        end_s = age_s + 7 * 86_400 / num_sessions
        now += 1e5  # between two sessions
        iteration = Iteration(parts.report, counters, is_paced=True, age_s=age_s)
        while age_s < end_s:
            step_s = max(0.05, age_s / 36_000)
            age_s += step_s
            now += step_s
            counters.env_steps_trained += 1
            if iteration.is_due():
                ages.append(age_s)
                iteration.begin()
    assert 15_000 < len(ages) < 23_000
    pauses = [later - earlier for earlier, later in itertools.pairwise(ages) if later < 3600]
    assert max(pauses) < 1.2, "as often as ever in the first hour"


def test_a_directory_that_was_removed_or_taken_over_by_another_run_is_reported(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    config = CommonConfig(env="x", run_dir=str(run_dir))
    files = RunParts.of(config).files
    with RunDirectory.open(config) as directory:
        run_files = RunFiles(files, directory)
        run_files.before_checkpoint()
        shutil.rmtree(run_dir)
        with pytest.raises(CheckpointError):
            run_files.before_checkpoint()
        with RunDirectory.open(config) as other:
            RunFiles(files, other).write({})
            with pytest.raises(CheckpointError):
                run_files.write({})
