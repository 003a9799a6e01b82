"""Trainers at odd moments: what is interrupted, broken off, gone back on, refused, or forgotten."""

from __future__ import annotations

import asyncio
import gc
import json
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
from gymnasium import spaces
from small_runs import SMALL

import aiorl
from aiorl.acting.checkpoint import find_checkpoint
from aiorl.errors import BatchError, CheckpointError, ConfigError, InternalError
from aiorl.run import local_source, saving
from aiorl.run.threads import LoopThread
from aiorl.run.trainer import trainer as trainer_module


class Interrupted(gymnasium.Env[Any, Any]):
    """Presses Ctrl-C at the step that it is told."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)
    steps, at_step = 0, -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        Interrupted.steps += 1
        if Interrupted.steps == Interrupted.at_step:
            raise KeyboardInterrupt
        return np.zeros(2, np.float32), 1.0, Interrupted.steps % 5 == 0, False, {}


def small(folder: Path, env: Any = "CartPole-v1", **settings: Any) -> Any:
    return aiorl.PPOTrainer({**SMALL, "run_dir": str(folder), **settings}, env=env)


def weights_of(trainer: aiorl.Trainer) -> dict[str, Any]:
    found: dict[str, Any] = trainer.get_weights()["default_policy"]  # type: ignore[attr-defined]
    return found


def saved_weights(path: Path) -> dict[str, Any]:
    return find_checkpoint(path).under("algorithm/default_policy/weights/")


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


# What a trainer goes on from


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Directory, checkpoint and weights of a run of three iterations."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    with small(folder) as trainer:
        for _ in range(3):
            trainer.train()
        path = trainer.save()
        return folder, path, weights_of(trainer)


def test_without_workers_too_a_run_begins_with_the_weights_that_init_from_names(tmp_path: Path, saved: Any) -> None:
    with small(tmp_path / "run", init_from=saved[1]) as trainer:
        assert trainer.iteration == 0
        assert_same(weights_of(trainer), saved[2])
    with pytest.raises(ConfigError, match="init_from can't be used"):
        small(tmp_path / "other", "Acrobot-v1", init_from=saved[1])


def test_without_workers_too_resume_goes_on_with_the_run(tmp_path: Path) -> None:
    with small(tmp_path / "run") as trainer:
        trainer.train()
        trainer.train()
        weights = weights_of(trainer)
    with small(tmp_path / "run", run_dir=None, resume=str(tmp_path / "run")) as trainer:
        assert trainer.iteration == 2
        assert_same(weights_of(trainer), weights)
        assert trainer.train()["training_iteration"] == 3
    assert len((tmp_path / "run" / "result.jsonl").read_text().splitlines()) == 3


def test_after_going_back_to_a_checkpoint_the_newest_one_is_of_what_was_trained_since(tmp_path: Path) -> None:
    trainer = small(tmp_path / "run")
    trainer.train()
    path = trainer.save()
    for _ in range(3):
        trainer.train()
    later = trainer.save()
    trainer.restore(path)
    trainer.train()
    weights = weights_of(trainer)
    trainer.stop()
    assert_same(saved_weights(tmp_path / "run"), weights)
    assert aiorl.load_policy(later).env_steps > aiorl.load_policy(tmp_path / "run").env_steps  # nothing is lost


def test_a_directory_restores_what_was_saved_there_last_also_by_another_run(tmp_path: Path, saved: Any) -> None:
    with aiorl.Trainer.restore(saved[1], run_dir=str(tmp_path / "one")) as trainer:
        trainer.save(tmp_path / "cartpole")
    with small(tmp_path / "two", seed=2) as trainer:
        trainer.train()
        trainer.save(tmp_path / "cartpole")
        weights = weights_of(trainer)
    assert_same(saved_weights(tmp_path / "cartpole"), weights)


def test_a_trainer_goes_on_where_it_refuses_to_restore_a_checkpoint_of_another_environment(
    tmp_path: Path, saved: Any
) -> None:
    with small(tmp_path / "run", Interrupted) as trainer:
        trainer.train()
        with pytest.raises(CheckpointError, match=r"belongs to another run.*init_from"):
            trainer.restore(saved[1])
        assert trainer.train()["training_iteration"] == 2


def test_a_path_may_begin_with_the_home_directory(tmp_path: Path, monkeypatch: Any, saved: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with aiorl.Trainer.restore(saved[1], run_dir=str(tmp_path / "run")) as trainer:
        assert trainer.save("~/saved").startswith(str(tmp_path / "saved"))


def test_a_checkpoint_is_written_every_interval(tmp_path: Path) -> None:
    with small(tmp_path / "run", checkpoint_interval_s=1e-3) as trainer:
        trainer.train()
        while not list((tmp_path / "run" / "checkpoints").glob("checkpoint-*")):  # it is written in passing
            time.sleep(0.01)
        assert aiorl.load_policy(tmp_path / "run").env_steps == 64
    with small(tmp_path / "other", checkpoint_interval_s=0) as trainer:
        trainer.train()
        assert not list((tmp_path / "other" / "checkpoints").iterdir())


# What goes wrong


def test_what_a_logger_creator_raises_reaches_the_caller_and_nothing_is_left(tmp_path: Path) -> None:
    threads = set(threading.enumerate())

    def creator(config: dict[str, Any]) -> Any:
        raise ValueError("my logger")

    with pytest.raises(ValueError, match="my logger"):
        aiorl.PPOTrainer({**SMALL, "run_dir": str(tmp_path / "run")}, env="CartPole-v1", logger_creator=creator)
    assert set(threading.enumerate()) <= threads
    assert not trainer_module._running


def test_weights_that_are_no_numbers_are_refused_and_those_before_stay(tmp_path: Path) -> None:
    with small(tmp_path / "run") as trainer:
        before = weights_of(trainer)
        with pytest.raises(ConfigError, match="not finite"):
            trainer.set_weights({"default_policy": {name: value * np.nan for name, value in before.items()}})
        assert_same(weights_of(trainer), before)


def test_an_iteration_broken_off_goes_on_with_other_weights(tmp_path: Path) -> None:
    Interrupted.steps, Interrupted.at_step = 0, 104  # in the second iteration
    with small(tmp_path / "run", Interrupted) as trainer:
        trainer.train()
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.set_weights(trainer.get_weights())
        ledger = trainer.train()["ledger"]
    assert ledger["trained"] == 128
    assert ledger["sampled"] == 128 + ledger["discarded"]["stale"] + sum(ledger["lost"].values())


def test_a_trainer_that_nobody_refers_to_is_still_stopped_at_the_end(tmp_path: Path) -> None:
    small(tmp_path / "run").train()
    gc.collect()
    gc.collect()
    trainer_module._stop_all()
    assert aiorl.load_policy(tmp_path / "run").env_steps == 64


def test_a_run_directory_that_is_moved_away_is_an_error_that_says_so(tmp_path: Path) -> None:
    trainer = small(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    for step in (trainer.train, trainer.stop):
        with pytest.raises(CheckpointError, match="was removed, renamed or replaced"):
            step()


def test_two_environments_of_one_name_that_only_this_process_knows_are_not_mistaken_for_each_other(
    tmp_path: Path,
) -> None:
    def maker(name: str) -> Callable[[Any], Any]:
        return lambda context: gymnasium.make(name)

    with small(tmp_path / "one", maker("CartPole-v1")) as one, small(tmp_path / "other", maker("Acrobot-v1")) as other:
        one.evaluate(1, seed=1)
        other.evaluate(1, seed=1)
        assert one.config.env != other.config.env


def test_an_iteration_whose_evaluation_is_interrupted_is_written_down(tmp_path: Path, monkeypatch: Any) -> None:
    def interrupted(*args: Any, **how: Any) -> Any:
        raise KeyboardInterrupt

    with small(tmp_path / "run", evaluation_interval=1, evaluation_num_episodes=1) as trainer:
        monkeypatch.setattr(local_source, "evaluate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        monkeypatch.undo()
        trainer.train()
    lines = (tmp_path / "run" / "result.jsonl").read_text().splitlines()
    assert [json.loads(line)["training_iteration"] for line in lines] == [1, 2]


def test_a_second_thread_in_train_is_refused_and_the_first_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    with small(tmp_path / "run") as trainer:
        refused: list[str] = []

        def ask_from_another_thread(result: Any) -> None:
            def ask() -> None:
                with pytest.raises(RuntimeError) as caught:
                    trainer.train()
                refused.append(str(caught.value))

            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()

        monkeypatch.setattr(trainer, "_evaluate", ask_from_another_thread)
        assert trainer.train()["training_iteration"] == 1
        assert "one thread at a time" in refused[0]
        monkeypatch.undo()
        assert trainer.train()["training_iteration"] == 2


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_ends_and_leaves_the_trainer_to_its_parent(tmp_path: Path) -> None:
    with small(tmp_path / "run") as trainer:
        lock = (tmp_path / "run" / "lock").read_text()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                trainer_module._stop_all()  # as at the end of a program
                trainer.__exit__(None, None, None)
                trainer._directory.close()
                with pytest.raises(RuntimeError, match="the process that forked"):
                    trainer.train()
                status = 0
            finally:
                os._exit(status)
        process = psutil.Process(child)
        try:
            assert process.wait(20) == 0
        finally:
            if process.is_running():
                process.kill()
        assert (tmp_path / "run" / "lock").read_text() == lock != ""
        assert trainer.train()["training_iteration"] == 1


@pytest.mark.parametrize("kind", [aiorl.IMPALATrainer, aiorl.A2CTrainer])
def test_every_algorithm_trains_on_whole_episodes(kind: Any, tmp_path: Path) -> None:
    settings = {"run_dir": str(tmp_path), "batch_mode": "complete_episodes", "sgd_minibatch_size": 64}
    with kind({**SMALL, **settings}, env="CartPole-v1") as trainer:
        assert trainer.train()["env_steps_trained_total"] > 0


def test_a_fragment_that_cannot_be_trained_on_ends_training_instead_of_being_sampled_for_ever(
    tmp_path: Path, monkeypatch: Any
) -> None:
    with small(tmp_path / "run") as trainer:
        trainer.train()

        def refuse(fragments: Any) -> None:
            raise BatchError("obs", "a number", "nonsense")

        monkeypatch.setattr(trainer._training.flow, "_check_fragment", refuse)
        with pytest.raises(InternalError, match="malformed"):
            trainer.train()


# Ctrl-C


def press_ctrl_c() -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


@pytest.mark.parametrize("time_of_many", range(25))  # the signal comes before, between and after looks for one
def test_what_is_interrupted_has_ended_before_the_caller_goes_on(time_of_many: int) -> None:
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


def test_a_checkpoint_that_was_interrupted_is_whole_before_the_next_one_is_written(
    tmp_path: Path, monkeypatch: Any
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

    with small(tmp_path / "run") as trainer:
        trainer.train()
        monkeypatch.setattr(saving, "save_checkpoint", slow)
        with pytest.raises(KeyboardInterrupt):
            trainer.save()
        trainer.save()
    assert most == [1]


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def interrupt_when(condition: Callable[[], Any]) -> None:
    def wait() -> None:
        while not condition():
            time.sleep(0.01)
        press_ctrl_c()

    threading.Thread(target=wait, daemon=True).start()


def test_ctrl_c_while_a_trainer_is_made_leaves_no_worker_and_no_loop(tmp_path: Path) -> None:
    before = set(children())
    interrupt_when(lambda: set(children()) - before)
    with pytest.raises(KeyboardInterrupt):
        small(tmp_path / "run", num_workers=1)
    assert not set(children()) - before
    assert not [thread for thread in threading.enumerate() if thread.name == "aiorl-trainer"]


def test_ctrl_c_while_a_trainer_is_stopped_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    before = set(children())
    trainer = small(tmp_path / "run", num_workers=1, evaluation_interval=1)
    steps = trainer.train()["env_steps_trained_total"]
    interrupt_when(lambda: trainer._is_stopped)
    with pytest.raises(KeyboardInterrupt):
        trainer.stop()
    assert aiorl.load_policy(tmp_path / "run").env_steps == steps
    assert not set(children()) - before
    assert not [thread for thread in threading.enumerate() if thread.name == "aiorl-trainer"]
