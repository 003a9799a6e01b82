"""Whole runs without workers, from the command line and with `aiorl.train`, in one process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_children import children_of
from processes import Processes, StartedLearner, check_ledger
from small_runs import SMALL, Played, raising

import aiorl
from aiorl.acting.checkpoint import find_checkpoint
from aiorl.errors import EnvError
from aiorl.run.report.loggers import read_results
from aiorl.run.threads import BrokenOff, LoopThread

ROOT = Path(__file__).parents[3]
ENVS = '''
import time
import gymnasium
import numpy as np

class Plain(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        Plain.steps += 1
        self.act()
        return np.zeros(2, np.float32), 1.0, Plain.steps % 20 == 0, False, {}

    def act(self):
        pass

class Stuck(Plain):
    """Environment that never returns from step after a while, and ignores Ctrl-C."""

    def act(self):
        while Plain.steps > 3000:
            try:
                print("stuck", flush=True)
                time.sleep(600)
            except KeyboardInterrupt:
                print("not I", flush=True)

class Breaking(Plain):
    """Environment that prints, then starts the debugger."""

    def act(self):
        if Plain.steps == 30:
            print("said by the environment")
            answer = 6 * 7
            breakpoint()
'''


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Callable[..., StartedLearner]]:
    """Return a function that starts learners without workers, which know the environments of
    ``alone_envs``.
    """
    (tmp_path / "alone_envs.py").write_text(ENVS)
    started = Processes(tmp_path)

    def start(*options: str, **how: Any) -> StartedLearner:
        environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
        return started.learner(
            "--num-workers=0", "--seed=1", *options, environment=environment, **how
        )

    yield start
    started.end()


def end_by(learner: StartedLearner, number: int) -> float:
    """Stop a learner by a signal, and return the seconds until its end."""
    began = time.monotonic()
    learner.send(number)
    assert learner.wait(30) == (0 if number == signal.SIGINT else 143), learner.text
    return time.monotonic() - began


def test_ctrl_c_during_an_update_is_noticed() -> None:
    code = """
import asyncio, time
from aiorl.run.threads import LoopThread
loop, stopped = LoopThread("run"), asyncio.Event()
def update():
    print("updating", flush=True)
    time.sleep(1)
async def train():
    await loop.in_caller(update)
    await stopped.wait()
    print("ended", flush=True)
loop.on_stop_signals(lambda name: stopped.set())
loop.call(train())
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "updating\n"
    process.send_signal(signal.SIGINT)
    try:
        assert process.communicate(timeout=20)[0] == "ended\n"
    finally:
        process.kill()


@pytest.mark.slow
def test_a_run_without_workers_is_one_process_and_resumes_after_ctrl_c(
    alone: Callable[..., StartedLearner],
) -> None:
    learner = alone("--min-iter-time-s=0.05", "--checkpoint-interval-s=0.2")
    learner.wait_for_result(lambda result: result["updates_total"] >= 10)
    assert children_of(learner.pid) == set()
    assert end_by(learner, signal.SIGINT) < 5
    assert "Ctrl-C" in learner.text
    assert "aiorl.worker" not in learner.text
    files = {path.name for path in learner.run_dir.iterdir()}
    assert {
        "config.yaml",
        "run.json",
        "log.txt",
        "progress.csv",
        "result.jsonl",
        "learning_curve.png",
    } <= files
    assert any(name.startswith("events.out.tfevents") for name in files)
    assert len(list((learner.run_dir / "checkpoints").iterdir())) > 1
    first = learner.results()
    assert (
        find_checkpoint(learner.run_dir).meta["counters"]["updates"] == first[-1]["updates_total"]
    )

    resumed = alone("--min-iter-time-s=0.05", resume=True)
    resumed.wait_for_result(lambda result: result["updates_total"] > first[-1]["updates_total"] + 3)
    assert end_by(resumed, signal.SIGTERM) < 5
    assert "SIGTERM" in resumed.text
    results = resumed.results()
    assert [result["training_iteration"] for result in results] == list(range(1, len(results) + 1))
    assert results[: len(first)] == first
    for result in results:
        check_ledger(result)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_environment_that_never_returns_does_not_block_the_end_of_the_run(
    alone: Callable[..., StartedLearner], number: int
) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("SIGHUP is ignored here, as under nohup")
    learner = alone("--env=alone_envs:Stuck")
    learner.wait_for("stuck")
    assert end_by(learner, number) < 5
    assert learner.wait() == (0 if number == signal.SIGINT else 143)
    assert "not I" in learner.text
    assert find_checkpoint(learner.run_dir).meta["counters"]["updates"] > 0


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no pseudo-terminals")
def test_a_debugger_in_the_environment_has_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "alone_envs.py").write_text(ENVS)
    options = (
        "--env=alone_envs:Breaking",
        "--eager",
        "--num-sgd-iter=1",
        "--stop-timesteps=100",
        "--train-batch-size=200",
        "--rollout-fragment-length=50",
        "--num-envs-per-worker=1",
        "--sgd-minibatch-size=50",
    )
    command = [
        sys.executable,
        "-m",
        "aiorl.learner",
        "--num-workers=0",
        f"--run-dir={tmp_path / 'run'}",
        *options,
    ]
    ours, theirs = pty.openpty()
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "TERM": "xterm",
        "COLUMNS": "120",
    }
    shown = b""
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        try:
            while b"(Pdb) " not in shown:
                shown += os.read(ours, 4096)
            time.sleep(1.2)  # a panel would be redrawn meanwhile
            os.write(ours, b"p answer + 1000\nc\n")
            with contextlib.suppress(OSError):  # the other end is closed
                while more := os.read(ours, 4096):
                    shown += more
            assert process.wait(30) == 0, shown.decode(errors="replace")
        finally:
            process.kill()
            os.close(ours)
    before, _, after = shown.partition(b"(Pdb) ")
    assert "─".encode() in before  # the panel
    assert b"said by the environment" in before
    assert b"1042" in after
    assert "─".encode() not in after
    assert b"200" in after


@pytest.fixture
def train(tmp_path: Path, played: type[Played]) -> Iterator[Callable[..., dict[str, Any]]]:
    """Train with an environment that only this process knows."""
    # ignored in a shell's background
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    class Own(Played):
        pass

    def run(env: Any = Own, **settings: Any) -> dict[str, Any]:
        return aiorl.train(env, config={**SMALL, "run_dir": str(tmp_path / "run"), **settings})

    yield run
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)
    assert not [thread for thread in threading.enumerate() if thread.name == "aiorl-run"]


def test_train_samples_learns_and_evaluates_in_the_callers_thread(
    train: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Played.at_step = {10: lambda: print("said by the environment")}
    others = children_of(os.getpid())  # of other tests
    num_others = len(others)
    Played.at_step[20] = lambda: others.update(children_of(os.getpid()))
    result = train(stop_timesteps=200, evaluation_interval=1, evaluation_num_episodes=2)
    assert Played.threads == {threading.get_ident()}
    assert len(others) == num_others
    printed = capsys.readouterr().out
    assert "said by the environment" in printed
    assert "256" in result["reason"]
    results = read_results(tmp_path / "run")
    assert [each["evaluation"]["episodes_this_iter"] for each in results[:2]] == [2, 2]
    assert aiorl.load_policy(result["checkpoint"]).env_steps == 256
    assert (tmp_path / "run" / "best").is_dir()


def test_an_environments_error_ends_train_and_progress_is_saved(
    train: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    Played.at_step = {150: raising(ZeroDivisionError("the rail has an end"))}
    with pytest.raises(EnvError, match="the rail has an end"):
        train()
    assert aiorl.load_policy(tmp_path / "run").env_steps == 128


def test_ctrl_c_during_a_step_ends_train_and_it_returns(
    train: Callable[..., dict[str, Any]],
) -> None:
    Played.at_step = {150: lambda: (signal.raise_signal(signal.SIGINT), time.sleep(60))}
    began = time.monotonic()
    result = train()
    assert time.monotonic() - began < 50
    assert "Ctrl-C" in result["reason"]
    assert (
        aiorl.load_policy(result["checkpoint"]).env_steps
        == result["env_steps_trained_total"]
        == 128
    )
    assert Played.steps == 150


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (ValueError(), ValueError),
        (StopIteration(), RuntimeError),
        (SystemExit(), BrokenOff),
        (KeyboardInterrupt(), BrokenOff),
        (asyncio.CancelledError(), BrokenOff),
    ],
)
def test_a_steps_error_reaches_its_caller_and_the_next_step_is_called(
    raised: BaseException, expected: type[BaseException]
) -> None:
    loop = LoopThread("test")

    async def ask() -> int:
        with pytest.raises(expected):
            await loop.in_caller(raising(raised))
        return await loop.in_caller(threading.get_ident)

    try:
        assert loop.call(ask()) == threading.get_ident()
    finally:
        loop.close()
