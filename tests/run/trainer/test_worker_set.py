"""Calls of the workers that sample for a trainer."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from processes import check_ledger, wait_until
from small_runs import SMALL

import aiorl
from aiorl.actors.references import get
from aiorl.errors import (
    ActorError,
    ActorLost,
    CallTimeout,
    ConfigError,
    RemoteError,
    UnsendableError,
)

WAIT_S = 60.0


class Paid(gymnasium.Env[Any, Any]):
    """Episodes of four steps with the same reward.

    Attributes:
        wage: the reward.
    """

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.wage = 1.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return np.zeros(2, np.float32), self.wage, self.t == 4, False, {}


def pay(env: Any, wage: float) -> None:
    env.unwrapped.wage = wage


def wage_of(env: Any) -> float:
    return float(env.unwrapped.wage)


def set_wage(worker: Any, wage: float) -> list[float]:
    worker.foreach_env(partial(pay, wage=wage))
    return list(worker.foreach_env(wage_of))


def index_of(worker: Any, index: int) -> tuple[int, int]:
    return worker.worker_index, index


def name_of(policy: Any, policy_id: str) -> str:
    return policy_id


def fail(worker: Any) -> None:
    raise ZeroDivisionError("in the worker")


def too_many_arrays(worker: Any, *others: Any) -> list[Any]:
    return [np.zeros(1)] * 5000


def itself(worker: Any) -> Any:
    return worker


def wait_for(worker: Any, path: str) -> int:
    """Say which process this is in a file, and wait until the file is gone, or forever."""
    if worker.worker_index != 1:
        return 0
    Path(path).write_text(str(os.getpid()))
    while Path(path).exists():
        threading.Event().wait(0.01)
    return os.getpid()


class RaisesWages(aiorl.DefaultCallbacks):
    def on_train_result(self, *, trainer: Any, result: dict[str, Any], **kwargs: Any) -> None:
        wage = result["training_iteration"] + 1.0
        result["wages"] = trainer.workers.foreach_worker(partial(set_wage, wage=wage))


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Make a trainer with two workers for the tests of this file, the last of which adds others."""
    settings = {**SMALL, "num_workers": 2, "callbacks": RaisesWages}
    run_dir = str(tmp_path_factory.mktemp("run"))
    with aiorl.PPOTrainer({**settings, "run_dir": run_dir}, env=Paid) as made:
        yield made


def test_a_curriculum_changes_the_environments_of_all_workers_in_on_train_result(
    trainer: Any,
) -> None:
    for iteration in (1, 2, 3):
        result = trainer.train()
        assert result["wages"] == [[iteration + 1.0] * 2] * 3
        assert result["hist_stats"]["episode_reward"][-16:] == [4.0 * iteration] * 16
        check_ledger(result)


def test_methods_of_running_workers_are_called_between_fragments_without_a_hole_in_the_ledger(
    trainer: Any,
) -> None:
    before = trainer.train()
    workers = trainer.workers.remote_workers()
    assert [worker.index for worker in workers] == [1, 2]
    batches = get([worker.sample.remote() for worker in workers for _ in range(3)], WAIT_S)
    assert [batch.count for batch in batches] == [32] * 6
    batch, count = get(workers[0].sample_with_count.remote(), WAIT_S)  # a reference to each
    assert count == batch.count == 32
    weights = get(workers[1].get_weights.remote(), WAIT_S)["default_policy"]
    for name, value in trainer.get_weights()["default_policy"].items():
        np.testing.assert_array_equal(weights[name], value)
    assert {episode.episode_length for episode in get(workers[0].get_metrics.remote())} == {4}
    result = trainer.train()
    check_ledger(result)
    assert result["ledger"]["sampled"] == before["ledger"]["sampled"] + 64
    assert result["ledger"]["trained"] == result["ledger"]["sampled"]
    assert result["episodes_this_iter"] == 16, "without those of the calls"


def test_references_are_arguments_of_running_workers(trainer: Any) -> None:
    first, second = trainer.workers.remote_workers()
    weights = get(first.get_weights.remote(), WAIT_S)
    shifted = {
        policy_id: {name: array + 1 for name, array in arrays.items()}
        for policy_id, arrays in weights.items()
    }
    shared = aiorl.put(shifted)
    for worker in (first, second):
        worker.set_weights.remote(shared)
    of_a_call = second.get_weights.remote()
    first.set_weights.remote(weights=of_a_call)
    for worker in (first, second):
        for name, array in get(worker.get_weights.remote(), WAIT_S)["default_policy"].items():
            np.testing.assert_array_equal(array, shifted["default_policy"][name])
    failed = first.apply.remote(fail)
    with pytest.raises(RemoteError, match="in the worker"):
        second.set_weights.remote(failed)


def test_functions_are_called_with_all_workers_in_the_order_of_their_index(trainer: Any) -> None:
    workers = trainer.workers
    assert workers.foreach_worker_with_index(index_of) == [(0, 0), (1, 1), (2, 2)]
    assert workers.foreach_policy(name_of) == ["default_policy"] * 3
    assert workers.foreach_trainable_policy(name_of) == ["default_policy"] * 3
    assert get(workers.remote_workers()[1].apply.remote(index_of, 7), WAIT_S) == (2, 7)


def test_what_cannot_be_sent_is_refused_and_errors_come_back(trainer: Any) -> None:
    called: list[Any] = []
    with pytest.raises(UnsendableError, match="lambda"):
        trainer.workers.foreach_worker(lambda worker: called.append(worker))
    assert not called, "it would have been called with the local worker first"
    worker = trainer.workers.remote_workers()[0]
    for method, arguments, kind in [
        ("apply", [fail], "ZeroDivisionError"),
        ("apply", [itself], "UnsendableError"),
        ("apply", [too_many_arrays], "UnsendableError"),
        ("fly", [], "AttributeError"),
        ("stop", [], "RuntimeError"),
    ]:
        with pytest.raises(RemoteError) as raised:
            get(getattr(worker, method).remote(*arguments), WAIT_S)
        assert raised.value.kind == kind
        assert "sampler_unit.py" not in raised.value.remote_traceback, "it is not the user's"
    with pytest.raises(UnsendableError):
        get(worker.apply.remote(too_many_arrays, *too_many_arrays(None)), WAIT_S)
    with pytest.raises(ZeroDivisionError):
        trainer.workers.foreach_worker(fail)
    assert trainer.train()["num_healthy_workers"] == 2


def test_a_worker_that_does_not_answer_in_time_is_named(trainer: Any, tmp_path: Path) -> None:
    path = tmp_path / "waits"
    with pytest.raises(CallTimeout, match="worker 1"):
        trainer.workers.foreach_worker(partial(wait_for, path=str(path)), timeout_s=0.5)
    wait_until(path.exists)
    path.unlink()
    assert trainer.train()["num_healthy_workers"] == 2


def test_calls_of_a_killed_worker_are_lost_and_its_successor_has_another_handle(
    trainer: Any, tmp_path: Path
) -> None:
    path = tmp_path / "waits"
    first, second = trainer.workers.remote_workers()
    lost = [first.apply.remote(wait_for, str(path)), first.get_weights.remote()]
    wait_until(path.exists)
    os.kill(int(path.read_text()), signal.SIGKILL)
    for call in lost:
        with pytest.raises(ActorLost):
            get(call, WAIT_S)
    assert get(second.apply.remote(index_of, 0), WAIT_S) == (2, 0)
    wait_until(lambda: len(trainer.workers.remote_workers()) == 2)
    assert first not in trainer.workers.remote_workers()
    with pytest.raises(ActorLost):
        get(first.sample.remote(), WAIT_S)
    result = trainer.train()
    check_ledger(result)
    assert trainer.workers.foreach_worker_with_index(index_of) == [(0, 0), (1, 1), (2, 2)]


def test_workers_can_be_added(trainer: Any) -> None:
    trainer.workers.add_workers(1)
    assert [worker.index for worker in trainer.workers.remote_workers()] == [1, 2, 3]
    assert trainer.train()["num_healthy_workers"] == 3
    with pytest.raises(ConfigError):
        trainer.workers.add_workers(-1)
    calls = [worker.sample.remote() for worker in trainer.workers.remote_workers()]
    assert [batch.count for batch in get(calls, WAIT_S)] == [32] * 3


@pytest.mark.slow
def test_each_sampler_of_a_streaming_run_answers_while_training_goes_on(tmp_path: Path) -> None:
    settings = {
        "num_workers": 1,
        "samplers_per_worker": 2,
        "num_envs_per_worker": 2,
        "rollout_fragment_length": 16,
        "train_batch_size": 64,
        "model": {"fcnet_hiddens": [8]},
        "compilation_cache": "off",
        "eager": True,
    }
    with aiorl.IMPALATrainer({**settings, "run_dir": str(tmp_path / "run")}, env=Paid) as trainer:
        counts: list[int] = []
        is_over = threading.Event()

        def call() -> None:
            while not is_over.is_set():
                calls = [worker.sample.remote() for worker in trainer.workers.remote_workers()]
                counts.extend(batch.count for batch in get(calls, WAIT_S))

        thread = threading.Thread(target=call)
        thread.start()
        try:
            wait_until(lambda: bool(counts))
            results = [trainer.train() for _ in range(5)]
        finally:
            is_over.set()
            thread.join()
        assert set(counts) == {32}
        for result in results:
            check_ledger(result)
        assert trainer.workers.foreach_worker(partial(set_wage, wage=3.0)) == [[3.0] * 2] * 3


def test_calls_end_with_the_trainer(tmp_path: Path) -> None:
    settings = {**SMALL, "num_workers": 1, "run_dir": str(tmp_path / "run")}
    path = tmp_path / "waits"
    with aiorl.PPOTrainer(settings, env=Paid) as trainer:
        (worker,) = trainer.workers.remote_workers()
        call = worker.apply.remote(wait_for, str(path))
        wait_until(path.exists)
    with pytest.raises(ActorError):
        get(call, WAIT_S)
    with pytest.raises(RuntimeError):
        worker.sample.remote()


def test_without_worker_processes_any_function_will_do(tmp_path: Path) -> None:
    with aiorl.PPOTrainer({**SMALL, "run_dir": str(tmp_path / "run")}, env=Paid) as trainer:
        trainer.train()
        wages = trainer.workers.foreach_worker(lambda worker: set_wage(worker, 2.0))
        assert wages == [[2.0, 2.0]]
        assert trainer.train()["episode_reward_max"] == 8.0
        assert trainer.workers.remote_workers() == []
        assert trainer.workers.foreach_policy(name_of) == ["default_policy"]
        with pytest.raises(ConfigError, match="num_workers"):
            trainer.workers.add_workers(1)
