"""`aiorl status`: from the files of a run, and from its learner over the network."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from processes import Processes, Started, StartedLearner, free_address, wait_until

from aiorl.errors import AiorlError
from aiorl.keys import make_keys
from aiorl.net.protocol import events as ev
from aiorl.net.protocol.learner_session import LearnerSession
from aiorl.net.protocol.roster import Worker
from aiorl.net.wire import messages as m
from aiorl.run.overview import Overview
from aiorl.status import main, shown, status_of_learner, status_of_run


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.end()


@pytest.fixture
def run(processes: Processes, tmp_path: Path) -> tuple[StartedLearner, Started]:
    """A learner with keys and one worker of its own, and a worker that has joined; both have
    sampled.
    """
    make_keys(tmp_path / "keys")
    keys = f"--keys={tmp_path / 'keys'}"
    learner = processes.learner(
        "--num-workers=1", f"--bind={free_address()}", keys, "--min-iter-time-s=0.2"
    )
    worker = processes.worker(learner.address, keys)
    learner.wait_for_result(
        lambda result: result["num_healthy_workers"] == 2 and result["training_iteration"] > 3
    )
    return learner, worker


def workers_in(account: dict[str, Any]) -> set[tuple[str, bool, bool]]:
    return {(row["host"], row["local"], row["env_steps"] > 0) for row in account["workers"]}


@pytest.mark.slow
def test_a_learner_tells_who_runs_where_to_those_who_have_a_key(
    run: tuple[StartedLearner, Started], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learner, _ = run
    account = asyncio.run(status_of_learner([learner.address], tmp_path / "keys"))
    here = socket.gethostname()
    assert workers_in(account) == {(here, True, True), (here, False, True)}
    assert (account["learner"]["host"], account["learner"]["pid"]) == (here, learner.pid)
    assert account["result"]["updates_total"] > 0
    assert all(f"{row['pid']}" in shown(account) for row in account["workers"])
    make_keys(tmp_path / "others")
    with pytest.raises(AiorlError, match=learner.address):
        asyncio.run(status_of_learner([learner.address], tmp_path / "others", wait_s=1.0))
    assert main([f"run:{learner.run_dir}", f"--keys={tmp_path / 'keys'}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_alive"] is True


@pytest.mark.slow
def test_the_files_of_a_run_tell_the_same_and_how_it_ended(
    run: tuple[StartedLearner, Started],
) -> None:
    learner, worker = run
    wait_until(
        lambda: (
            workers_in(status_of_run(learner.run_dir))
            == {(socket.gethostname(), local, True) for local in (True, False)}
        )
    )
    worker.send(signal.SIGTERM)
    wait_until(
        lambda: (
            [gone["words"] for gone in status_of_run(learner.run_dir)["gone"]]
            == ["left: ended by SIGTERM"]
        )
    )
    account = status_of_run(learner.run_dir)
    assert account["is_alive"]
    assert "worker-1.txt" in account["logs"]
    learner.send(signal.SIGINT)
    assert learner.wait(15) == 0
    account = status_of_run(learner.run_dir)
    assert (account["is_alive"], account["learner"]["end"]) == (False, "Ended by Ctrl-C.")
    assert "Ctrl-C" in shown(account)


def test_a_killed_learner_is_seen_to_be_gone(run: tuple[StartedLearner, Started]) -> None:
    learner, _ = run
    learner.process.kill()
    learner.wait()
    account = status_of_run(learner.run_dir)
    assert account["is_alive"] is False
    assert account["result"]["updates_total"] > 0
    assert "is gone" in shown(account)


def test_wrong_targets_take_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    assert main(["run:" + str(tmp_path), "--keys", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err
    assert (said.count("\n"), str(tmp_path) in said) == (2, True)
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2


# Rates
# --------------------------------------------------------------------------------------------------


class Sampled:
    """Overview of a run whose workers send fragments at given times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(
            "aiorl.run.overview.time",
            SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now),
        )
        self.overview = Overview("e")
        self.workers: list[Worker] = []
        self.overview.workers = lambda: self.workers

    def join(self, slot: int, host: str) -> None:
        self.workers.append(Worker(slot, f"i{slot}", "w", host, 7, False, None, None, 0.0))
        self.overview.note(ev.WorkerJoined(slot, f"i{slot}", host, 7, False), 0)

    def send(self, slot: int, env_steps: int, env_s: float) -> None:
        message: Any = SimpleNamespace(
            env_steps=env_steps, first_version=0, perf={"env_wait_time": env_s}
        )
        self.overview.note(ev.SamplesAccepted(slot, f"i{slot}", message), 0)

    def account(self) -> dict[str, Any]:
        directory = SimpleNamespace(run_id="r", path=Path("/r"))
        training: Any = SimpleNamespace(directory=directory, status="", silent_s=0.0)
        return self.overview.account(training)


def test_rates_of_workers_cover_whole_fragments_of_any_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They once covered 5 s, and healthy workers had none."""
    run = Sampled(monkeypatch)
    run.join(1, "a")
    run.join(2, "b")
    for second in range(1, 101):
        run.now = float(second)
        run.send(1, env_steps=100, env_s=0.1)
        if second % 20 == 0:
            run.send(2, env_steps=400, env_s=16.0)
        if second > 40:
            rates = [worker["env_steps_per_s"] for worker in run.account()["workers"]]
            assert rates == pytest.approx([100, 20], rel=0.1)
    run.now = 1000.0
    assert max(worker["env_steps_per_s"] for worker in run.account()["workers"]) < 1
    account = run.account()
    assert [worker["env_step_ms"] for worker in account["workers"]] == pytest.approx([1, 40])
    (sentence,) = account["advice"]
    assert "b is the slowest host" in sentence
    assert "40 ms" in sentence
    assert sentence in shown(account)


@pytest.mark.parametrize("perf", [{}, {"env_wait_time": float("nan")}, {"env_wait_time": 1e308}])
def test_a_worker_with_unusable_figures_has_a_rate(
    monkeypatch: pytest.MonkeyPatch, perf: dict[str, float]
) -> None:
    run = Sampled(monkeypatch)
    run.join(1, "a")
    run.now = 10.0
    run.send(1, env_steps=100, env_s=perf.get("env_wait_time", 0.0))
    (worker,) = run.account()["workers"]
    assert (worker["env_steps_per_s"], worker["env_step_ms"]) == (10.0, 0.0)


def test_a_learner_that_is_always_busy_says_that_more_workers_do_not_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Sampled(monkeypatch)
    run.join(1, "a")

    numbers = itertools.count(1)

    def account(waited_s: float, update_s: float) -> dict[str, Any]:
        times = {"wait_for_batch_s": waited_s, "update_s": update_s, "make_batch_s": 0.08}
        run.overview.result = {"learner": times, "updates_total": next(numbers)}
        return run.account()

    # the batch of the first update comes while that is compiled
    assert account(0.0, 0.9)["learner"]["busy"] is None
    assert account(0.5, 0.42)["learner"]["busy"] == pytest.approx(0.5)
    for _ in range(9):
        busy = account(0.02, 0.9)
    assert run.account()["learner"]["busy"] == busy["learner"]["busy"]  # no update since then
    for _ in range(20):
        account(0.02, 0.9)
    (sentence,) = account(0.02, 0.9)["advice"]
    assert "98 %" in sentence
    assert "more workers" in sentence
    for _ in range(9):
        advice = account(0.5, 0.42)["advice"]
    assert advice == []


def test_hosts_have_the_names_of_their_slurm_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    assert Sampled(monkeypatch).account()["learner"]["host"] == "node7"


# Never trusting a byte
# --------------------------------------------------------------------------------------------------

NAMES = (
    "run_id",
    "learner",
    "result",
    "workers",
    "gone",
    "logs",
    "slot",
    "host",
    "words",
    "end",
    "addresses",
    "time",
)
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5)
    ),
)


@given(st.dictionaries(st.sampled_from(NAMES), anything))
def test_any_account_is_shown_in_printable_lines(account: dict[str, Any]) -> None:
    text = shown(account)
    assert text.replace("\n", "").isprintable()


@given(st.binary(max_size=99))
def test_any_files_of_a_run_are_shown(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    folder = tmp_path_factory.mktemp("run")
    (folder / "logs").mkdir()
    (folder / "run.json").write_text('{"run_id": "r", "address": "tcp://h:1"}')
    for name in ("status.json", "lock", "result.jsonl", "log.txt", "logs/worker-1.txt"):
        (folder / name).write_bytes(content)
    assert shown(status_of_run(folder))


def test_a_learner_answers_strangers_but_not_without_end() -> None:
    session = LearnerSession("run", "life")
    for _ in range(1000):
        session.receive(b"p", m.StatusRequest(100), 1.0)
    asked = session.events()
    assert asked[:16] == [ev.StatusRequested(b"p", 100)] * 16
    assert [type(event) for event in asked[16:]] == [ev.PeerRejected]


def test_an_account_is_bounded() -> None:
    overview = Overview("e")
    overview.workers = lambda: [
        Worker(slot, f"i{slot}", "w", "\u2028h" * 100, 7, False, None, None, 0.0)
        for slot in range(1, 4097)
    ]
    for slot in range(1, 4097):
        overview.note(ev.WorkerJoined(slot, f"i{slot}", "h", 7, False), 0)
        overview.note(ev.WorkerFailed(slot, "env", "m" * 4000, ""), 0)
        overview.note(ev.WorkerLost(slot, f"i{slot}", "r" * 4000, 0), 0)
    directory = SimpleNamespace(run_id="r", path=Path("/r"))
    training: Any = SimpleNamespace(directory=directory, status="", silent_s=0.0)
    account = overview.account(training, max_bytes=100_000)
    assert len(json.dumps(account)) <= 100_000
    assert 0 < len(account["workers"]) < account["num_workers"] == account["num_gone"] == 4096
