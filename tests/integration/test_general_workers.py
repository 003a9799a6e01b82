"""Real workers on the general path: external clients, crashing environments, other libraries'
environments.
"""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import pytest
from processes import Processes, StartedLearner, check_ledger, wait_until

SMALL = (
    "--num-workers=1",
    "--num-envs-per-worker=2",
    "--rollout-fragment-length=32",
    "--train-batch-size=128",
    "--sgd-minibatch-size=64",
    "--num-sgd-iter=1",
    "--xla=off",
    "--model.fcnet-hiddens=[8]",
)

Run = Callable[..., StartedLearner]


@pytest.fixture
def run(processes: Processes) -> Run:
    return partial(processes.learner, *SMALL)


def finished(learner: StartedLearner) -> dict[str, Any]:
    assert learner.wait(90) == 0, f"{learner.text}\n{learner.log}"
    result = learner.results()[-1]
    check_ledger(result)
    return result


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"needs {module}")


def test_an_environment_driven_by_clients_can_be_learned(run: Run) -> None:
    result = finished(
        run("--env=general_parts:Talkative", "--num-envs-per-worker=1", "--stop-timesteps=500")
    )
    assert result["episode_len_mean"] == 5
    assert result["episode_reward_mean"] == 15
    assert result["updates_total"] >= 4


def test_a_worker_with_a_silent_client_keeps_beating_and_leaves_with_the_learner(run: Run) -> None:
    """R9: it neither counts as lost nor outlives the run."""
    learner = run(
        "--env=general_parts:Silent",
        "--num-envs-per-worker=1",
        "--transport.heartbeat-interval-s=0.2",
        "--transport.heartbeat-timeout-s=1",
        "--stop-time-s=600",
    )
    worker = psutil.Process(learner.wait_for_joined())
    time.sleep(2.0)  # twice the heartbeat timeout
    assert worker.is_running()
    learner.send(2)
    assert learner.wait(20) == 0
    worker.wait(3)
    assert len(re.findall(rf"\b{worker.pid}\b", learner.text)) == 1, "it joined once"


@pytest.mark.slow
def test_crashed_environments_are_replaced_and_none_outlives_a_killed_worker(run: Run) -> None:
    learner = run(
        "--env=aiorl.testing.envs:FaultyEnv",
        "--env-config={fault: exit, at_step: 60}",
        "--remote-worker-envs=true",
        "--max-env-restarts-per-hour=1000",
        "--max-worker-restarts=0",
        "--stop-time-s=120",
    )
    # each environment has crashed twice
    learner.wait_for_result(lambda result: result["updates_total"] >= 2)
    (worker,) = [psutil.Process(pid) for pid in learner.worker_pids()]
    # an environment that has just crashed is missing for a moment; a stopped worker starts none
    # meanwhile
    wait_until(lambda: len(worker.children(recursive=True)) >= 2, 20, "both environments")
    worker.suspend()
    children = worker.children(recursive=True)
    assert children
    worker.kill()
    wait_until(
        lambda: not any(child.is_running() for child in children), 20, "the end of the environments"
    )
    assert learner.wait(30) == 1
    assert "SIGKILL" in learner.text


@pytest.mark.slow
@needs("pettingzoo")
def test_a_pettingzoo_game_is_played_by_two_policies(run: Run) -> None:
    result = finished(
        run(
            "--env=pettingzoo:classic.rps_v2",
            "--env-config={max_cycles: 15}",
            "--multiagent.policies={red: null, blue: null}",
            "--multiagent.policy-mapping-fn=general_parts:by_number",
            "--stop-timesteps=400",
        )
    )
    assert result["agent_steps_total"] == 2 * result["timesteps_total"]
    assert result["policy_reward_mean"]["red"] == pytest.approx(
        -result["policy_reward_mean"]["blue"]
    )


@pytest.mark.slow
@needs("gym")
def test_an_environment_of_the_old_gym_package_and_sampling_in_the_background(run: Run) -> None:
    learner = run("--env=gym:CartPole-v1", "--sample-async=true", "--stop-timesteps=500")
    assert finished(learner)["episode_reward_mean"] > 5
    assert "sample_async" in learner.worker_log
