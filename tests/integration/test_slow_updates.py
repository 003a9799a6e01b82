"""Runs with updates of many seconds: each that has trained leaves a checkpoint, and a resume
continues from it.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from aiorl.acting.checkpoint import Checkpoint, list_checkpoints, load_newest_valid

SLOW_UPDATES = Path(__file__).parent.parent / "support" / "slow_updates.py"
SMALL = (
    "--env=CartPole-v1",
    "--num-workers=1",
    "--train-batch-size=200",
    "--rollout-fragment-length=50",
    "--num-envs-per-worker=1",
    "--xla=off",
    "--checkpoint-interval-s=0",
)


@pytest.fixture
def slowly(processes):
    """Start a learner whose updates are slow from a given one on; after 2 s it reports that it
    waits.
    """

    def start(slow_from: int, *options: str, slow_s: float = 20.0):
        environment = {"SLOW_FROM": str(slow_from), "SLOW_S": str(slow_s)}
        return processes.learner(
            *SMALL, *options, environment=environment, script=str(SLOW_UPDATES)
        )

    return start


def resumed_from(checkpoint: Checkpoint, processes) -> None:
    updates, trained = (
        checkpoint.meta["counters"][name] for name in ("updates", "env_steps_trained")
    )
    assert checkpoint.number == updates
    assert checkpoint.meta["ledger"]["trained"] == trained
    resumed = processes.learner(f"--stop-timesteps={trained + 1}", resume=True)
    assert resumed.wait(60) == 0, resumed.text
    assert str(checkpoint.path) in resumed.log
    assert resumed.results()[-1]["updates_total"] > updates


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="SIGINT"),
        pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_a_signal_does_not_wait_for_a_slow_update_and_saves_the_state_before_it(
    slowly, processes, until, tmp_path, number
) -> None:
    learner = slowly(3, "--algo=ppo", "--sgd-minibatch-size=50", "--num-sgd-iter=1")
    learner.wait_for("update 3 begins", 120.0)
    folder = tmp_path / "run" / "checkpoints"
    assert list_checkpoints(folder) == []
    learner.send(number)
    until(lambda: list_checkpoints(folder), 5.0, "a checkpoint")
    assert learner.wait(15) == (0 if number == signal.SIGINT else 143), learner.text
    assert "update 3 ends" not in learner.text
    newest = load_newest_valid(folder)
    assert newest.number == 2
    assert str(newest.path) in learner.text
    if number == signal.SIGTERM:
        resumed_from(newest, processes)


@pytest.mark.slow
def test_a_stop_criterion_waits_for_a_slow_update_and_says_so(slowly, processes, tmp_path) -> None:
    learner = slowly(2, "--algo=impala", "--stop-timesteps=400", slow_s=3.0)
    learner.wait_for("update 2 ends", 120.0)
    learner.wait_for("update 3 begins")
    learner.wait_for("Ctrl-C", 15.0)
    assert learner.wait() == 0, learner.text
    assert "update 3 ends" in learner.text
    newest = load_newest_valid(tmp_path / "run" / "checkpoints")
    assert newest.number == 3
    resumed_from(newest, processes)


@pytest.mark.slow
def test_ctrl_c_ends_the_wait_for_the_last_update_with_the_state_before_it(
    slowly, tmp_path
) -> None:
    learner = slowly(2, "--algo=impala", "--stop-timesteps=400", slow_s=6.0)
    learner.wait_for("Ctrl-C", 120.0)
    learner.send(signal.SIGINT)
    assert learner.wait(10) == 0, learner.text
    assert "update 3 ends" not in learner.text
    assert load_newest_valid(tmp_path / "run" / "checkpoints").number == 2
