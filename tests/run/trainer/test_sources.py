"""Local and remote sources are equivalent for a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from processes import check_ledger
from small_runs import SMALL

import aiorl
from aiorl.run.report.loggers import read_results

COLUMNS: dict[int, set[str]] = {}
"""Names of transport figures in results, by number of workers."""


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


@pytest.fixture(scope="module", params=[0, 2], ids=["local", "remote"])
def trainer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Make one trainer for all tests of this file, the last of which stops it."""
    settings = {**SMALL, "num_workers": request.param, "observation_filter": "MeanStdFilter"}
    made: Any = aiorl.PPOTrainer(
        {**settings, "run_dir": str(tmp_path_factory.mktemp("run"))}, env="CartPole-v1"
    )
    yield made
    made.stop()


def test_a_call_takes_one_batch_of_the_newest_policy_and_samples_no_more(trainer: Any) -> None:
    for iteration in (1, 2):
        result = trainer.train()
        assert (result["training_iteration"], result["updates_total"], trainer.iteration) == (
            iteration,
        ) * 3
        assert (
            result["ledger"]["sampled"]
            == result["ledger"]["trained"]
            == result["env_steps_trained_total"]
        )
        assert result["policy_lag"]["max"] == 0
        assert result["num_healthy_workers"] == trainer.config.num_workers
        check_ledger(result)
    workers = trainer.workers.remote_workers()
    assert len(workers) == trainer.config.num_workers
    time.sleep(0.5)
    between = trainer.train()["ledger"]["sampled"] - result["ledger"]["sampled"]
    assert 0 < between <= 64, "no steps are sampled between two calls"


def test_the_runs_filter_covers_everything_sampled(trainer: Any) -> None:
    trainer.train()
    steps = trainer.train()["ledger"]["sampled"]
    state = trainer.workers.local_worker().filters["default_policy"].state()
    assert 0.9 * steps < state["n"] < 1.5 * steps, "final observations count as well"


def test_workers_act_with_published_weights(trainer: Any) -> None:
    zero = {name: value * 0 for name, value in trainer.get_weights()["default_policy"].items()}
    trainer.set_weights({"default_policy": zero})
    assert trainer.train()["learner"]["entropy"] == pytest.approx(np.log(2), abs=1e-3)
    local = trainer.workers.local_worker()
    assert local.sample().count
    assert local.get_weights()["default_policy"]["policy/head/bias"].any()


def test_results_have_the_same_figures(trainer: Any) -> None:
    COLUMNS[trainer.config.num_workers] = {*trainer.train()["transport"]}
    assert len({frozenset(found) for found in COLUMNS.values()}) == 1, COLUMNS


@pytest.mark.rest_slow
def test_a_run_restored_in_place_continues_from_the_checkpoint_and_saves_later_progress(
    trainer: Any,
) -> None:
    path, obs, iteration = trainer.save(), np.ones(4), trainer.iteration
    want = trainer.compute_action(obs, full_fetch=True)[2]["action_dist_inputs"]
    trainer.train()
    later = trainer.train()
    assert not np.array_equal(
        trainer.compute_action(obs, full_fetch=True)[2]["action_dist_inputs"], want
    )
    trainer.restore(path)
    np.testing.assert_array_equal(
        trainer.compute_action(obs, full_fetch=True)[2]["action_dist_inputs"], want
    )
    assert trainer.iteration == iteration
    result = trainer.train()
    assert result["training_iteration"] == iteration + 1
    trainer.save()
    assert aiorl.load_policy(trainer.logdir).env_steps == result["env_steps_trained_total"]
    assert result["env_steps_trained_total"] < later["env_steps_trained_total"]
    numbers = [result["training_iteration"] for result in read_results(Path(trainer.logdir))]
    assert numbers == list(range(1, iteration + 2))


def test_stop_can_be_repeated_saves_the_last_update_and_leaves_no_process(trainer: Any) -> None:
    steps = trainer.train()["env_steps_trained_total"]
    trainer.stop()
    trainer.stop()
    assert aiorl.load_policy(trainer.logdir).env_steps == steps
    assert not [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith(("aiorl-trainer", "aiorl-update"))
    ]
    assert not [pid for pid in children() if "aiorl.worker" in psutil.Process(pid).cmdline()]
    for call in (trainer.train, trainer.save, trainer.get_weights):
        with pytest.raises(RuntimeError):
            call()
