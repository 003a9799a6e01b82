"""Trainers at odd moments: interrupted, restored, refused or forgotten."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from forked_children import children_of
from small_runs import SMALL, Played, raising

import aiorl
from aiorl.acting.checkpoint import find_checkpoint
from aiorl.errors import CheckpointError, ConfigError
from aiorl.run import local_source, saving
from aiorl.run.report.loggers import read_results
from aiorl.run.threads import LoopThread
from aiorl.run.trainer import trainer as trainer_module

Make = Callable[..., Any]


def weights_of(trainer: aiorl.Trainer) -> dict[str, Any]:
    found: dict[str, Any] = trainer.get_weights()["default_policy"]  # type: ignore[attr-defined]
    return found


def saved_weights(path: str | Path) -> dict[str, Any]:
    return find_checkpoint(path).under("algorithm/default_policy/weights/")


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


# Starting points


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return directory, checkpoint and weights of a run of two iterations."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    with aiorl.PPOTrainer({**SMALL, "run_dir": str(folder)}, env="CartPole-v1") as trainer:
        trainer.train()
        trainer.train()
        path = trainer.save()
        return folder, path, weights_of(trainer)


def test_a_run_without_workers_begins_with_the_weights_of_init_from(make: Make, saved: Any) -> None:
    trainer = make(init_from=saved[1])
    assert trainer.iteration == 0
    assert_same(weights_of(trainer), saved[2])
    with pytest.raises(ConfigError) as caught:
        make("Acrobot-v1", init_from=saved[1])
    assert caught.value.key == "init_from"


def test_a_directory_restores_its_newest_checkpoint_even_if_another_run_wrote_it(
    make: Make, tmp_path: Path, saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path can begin with the home directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with aiorl.Trainer.restore(saved[1], run_dir=str(tmp_path / "one")) as trainer:
        assert trainer.save("~/cartpole").startswith(str(tmp_path / "cartpole"))
    trainer = make(seed=2)
    trainer.train()
    trainer.save(tmp_path / "cartpole")
    assert_same(saved_weights(tmp_path / "cartpole"), weights_of(trainer))


def test_a_checkpoint_is_written_every_interval(make: Make) -> None:
    trainer = make(checkpoint_interval_s=1e-3)
    trainer.train()
    # written during the iteration
    while not list(Path(trainer.logdir, "checkpoints").glob("checkpoint-*")):
        time.sleep(0.01)
    assert aiorl.load_policy(trainer.logdir).env_steps == 64


# Failures


def test_an_error_of_logger_creator_reaches_the_caller_and_leaves_no_files(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    with pytest.raises(ValueError, match="my logger"):
        aiorl.PPOTrainer(
            {**SMALL, "run_dir": str(tmp_path)},
            "CartPole-v1",
            lambda config: raising(ValueError("my logger"))(),
        )
    assert set(threading.enumerate()) <= threads


def test_weights_that_are_not_finite_are_refused_and_the_former_ones_stay(make: Make) -> None:
    trainer = make()
    before = weights_of(trainer)
    with pytest.raises(ConfigError):
        trainer.set_weights(
            {"default_policy": {name: value * np.nan for name, value in before.items()}}
        )
    assert_same(weights_of(trainer), before)


def test_an_interrupted_iteration_continues_with_new_weights(
    make: Make, played: type[Played]
) -> None:
    played.at_step[104] = raising(KeyboardInterrupt())  # in the second iteration
    trainer = make(played)
    trainer.train()
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.set_weights(trainer.get_weights())
    ledger = trainer.train()["ledger"]
    trainer.stop()
    assert ledger["trained"] == aiorl.load_policy(trainer.logdir).env_steps == 128
    assert ledger["sampled"] == 128 + ledger["discarded"]["stale"] + sum(ledger["lost"].values())


def test_a_trainer_without_references_is_stopped_at_exit(tmp_path: Path) -> None:
    aiorl.PPOTrainer({**SMALL, "run_dir": str(tmp_path / "run")}, env="CartPole-v1").train()
    gc.collect()
    trainer_module._stop_all()
    assert aiorl.load_policy(tmp_path / "run").env_steps == 64


def test_a_run_directory_that_was_moved_is_a_clear_error(tmp_path: Path) -> None:
    trainer: Any = aiorl.PPOTrainer({**SMALL, "run_dir": str(tmp_path / "run")}, env="CartPole-v1")
    (tmp_path / "run").rename(tmp_path / "moved")
    for step in (trainer.train, trainer.stop):
        with pytest.raises(CheckpointError) as caught:
            step()
        assert caught.value.path == str(tmp_path / "run")


def test_two_environments_of_the_same_name_in_this_process_are_distinguished(make: Make) -> None:
    def maker(name: str) -> Callable[[Any], Any]:
        return lambda context: gymnasium.make(name)

    one, other = make(maker("CartPole-v1")), make(maker("Acrobot-v1"))
    one.evaluate(1, seed=1)
    other.evaluate(1, seed=1)
    assert one.config.env != other.config.env


def test_the_result_of_an_iteration_with_an_interrupted_evaluation_is_written(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(evaluation_interval=1, evaluation_num_episodes=1)
    with monkeypatch.context() as patch:
        patch.setattr(local_source, "evaluate", lambda *args, **how: raising(KeyboardInterrupt())())
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    trainer.train()
    trainer.stop()
    assert [result["training_iteration"] for result in read_results(Path(trainer.logdir))] == [1, 2]


def test_a_second_thread_in_train_is_refused_and_the_first_continues(
    make: Make, played: type[Played]
) -> None:
    refused: list[bool] = []

    def ask() -> None:
        with pytest.raises(RuntimeError):
            trainer.train()
        refused.append(True)

    def ask_from_another_thread() -> None:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()

    trainer = make(played)
    played.at_step[played.steps + 5] = ask_from_another_thread
    assert trainer.train()["training_iteration"] == 1
    assert refused
    assert trainer.train()["training_iteration"] == 2


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_leaves_the_trainer_to_its_parent(make: Make) -> None:
    trainer = make()
    lock = Path(trainer.logdir, "lock")
    before = lock.read_text()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            trainer_module._stop_all()  # as at the end of a program
            trainer.__exit__(None, None, None)
            with pytest.raises(RuntimeError):
                trainer.train()
            status = 0
        finally:
            os._exit(status)
    assert psutil.Process(child).wait(20) == 0
    assert lock.read_text() == before != ""
    assert trainer.train()["training_iteration"] == 1


# Ctrl-C


def press_ctrl_c() -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


@pytest.mark.parametrize("time_of_many", range(10))  # signals before, between and after checks
def test_an_interrupted_step_has_ended_before_the_caller_continues(time_of_many: int) -> None:
    loop, ended = LoopThread(f"test {time_of_many}"), threading.Event()

    async def step() -> None:
        try:
            press_ctrl_c()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            ended.set()

    try:
        with pytest.raises(KeyboardInterrupt):
            loop.ask(step())
        assert ended.is_set()
    finally:
        loop.close()


def test_an_interrupted_checkpoint_is_complete_before_the_next_one_is_written(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers, most, write = [0], [0], saving.save_checkpoint
    pressed: list[bool] = []

    def slow(*args: Any, **how: Any) -> Path:
        writers[0] += 1
        most[0] = max(most[0], writers[0])
        if not pressed:
            pressed.append(True)
            press_ctrl_c()
        time.sleep(0.2)
        writers[0] -= 1
        return write(*args, **how)

    trainer = make()
    trainer.train()
    monkeypatch.setattr(saving, "save_checkpoint", slow)
    with pytest.raises(KeyboardInterrupt):
        trainer.save()
    trainer.save()
    assert most == [1]


def interrupt_when(condition: Callable[[], Any]) -> None:
    def wait() -> None:
        while not condition():
            time.sleep(0.01)
        press_ctrl_c()

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.slow
def test_ctrl_c_while_a_trainer_starts_or_stops_loses_no_progress_and_leaves_no_process(
    make: Make,
) -> None:
    before = children_of(os.getpid())
    interrupt_when(lambda: children_of(os.getpid()) - before)
    with pytest.raises(KeyboardInterrupt):
        make(num_workers=1)
    assert not children_of(os.getpid()) - before
    trainer = make(num_workers=1, evaluation_interval=1)
    steps = trainer.train()["env_steps_trained_total"]
    interrupt_when(lambda: "stopped" in repr(trainer))
    with pytest.raises(KeyboardInterrupt):
        trainer.stop()
    assert aiorl.load_policy(trainer.logdir).env_steps == steps
    assert not children_of(os.getpid()) - before
    assert not [thread for thread in threading.enumerate() if thread.name == "aiorl-trainer"]
