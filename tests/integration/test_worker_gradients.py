"""Whole runs whose worker processes compute the gradients."""

from __future__ import annotations

import signal

import pytest
from learner_server import LOADED_CHILDREN

A3C = (
    "--algo=a3c",
    "--num-sgd-iter=1",
    "--rollout-fragment-length=16",
    "--train-batch-size=64",
    "--num-workers=1",
    "--seed=1",
    "--xla=off",
)


@pytest.mark.slow
def test_a3c_learns_through_two_workers_that_compute_gradients(processes, ledger_balances) -> None:
    """With the preset's settings, the age of a gradient's weights is bounded and each step is
    accounted for.
    """
    options = (
        "--preset=a3c-cartpole",
        "--num-sgd-iter=1",
        "--rollout-fragment-length=32",
        "--seed=1",
        "--num-envs-per-worker=8",
        "--train-batch-size=256",
        "--max-policy-lag=6",
        "--model.fcnet-hiddens=[64,64]",
        "--stop-return=195",
        "--stop-time-s=150",
        "--xla=auto",
    )
    learner = processes.learner(*options)
    assert learner.wait(200) == 0, learner.text
    results = learner.results()
    for result in results:
        ledger_balances(result)
    last = results[-1]
    assert last["episode_reward_mean_last_100"] >= 195
    assert last["policy_lag"]["max"] <= 6
    assert last["updates_total"] > 100
    assert set(last["ledger"]["discarded"]) <= {"stale"}


@pytest.mark.slow
def test_a_run_of_gradients_continues_after_a_kill(processes, ledger_balances, until) -> None:
    learner = processes.learner(*A3C, "--checkpoint-interval-s=0.5", "--min-iter-time-s=0.5")
    until(lambda: len(list((learner.run_dir / "checkpoints").glob("checkpoint-*"))) > 1, 60)
    learner.send(signal.SIGKILL)
    learner.wait()
    before = learner.results()[-1]
    again = processes.learner(
        f"--stop-timesteps={before['env_steps_trained_total'] + 3000}", resume=True
    )
    assert again.wait(90) == 0, again.text
    last = again.results()[-1]
    assert last["updates_total"] > before["updates_total"]
    ledger_balances(last)


@pytest.mark.slow
def test_a_worker_without_tensorflow_ends_the_run_and_names_the_package_to_install(
    processes,
) -> None:
    learner = processes.learner(
        *A3C, "--env=general_parts:without_tensorflow", environment=LOADED_CHILDREN
    )
    assert learner.wait(60) == 1
    (said,) = [line for line in learner.text.splitlines() if line.startswith("aiorl: ")]
    assert "'tensorflow'" in said
    assert "[learner]" in said
    assert "Traceback" not in learner.text
