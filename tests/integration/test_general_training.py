"""Whole runs on the general path with real processes: several policies, nested spaces, callbacks,
memory, mistakes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from processes import Processes, StartedLearner
from safetensors.numpy import load_file

SMALL = (
    "--seed=1",
    "--num-workers=1",
    "--num-envs-per-worker=4",
    "--rollout-fragment-length=32",
    "--train-batch-size=256",
    "--sgd-minibatch-size=64",
    "--num-sgd-iter=2",
    "--xla=off",
    "--model.fcnet-hiddens=[16]",
)
TWO = (
    "--env=general_runs:Poles",
    "--multiagent.policies={left: null, right: null}",
    "--multiagent.policy-mapping-fn=general_runs:side",
)
LONG = ("--seed=1", "--xla=auto", "--stop-timesteps=100000")
IMPALA = pytest.param("impala", marks=pytest.mark.nightly)
APPO = pytest.param("appo", marks=pytest.mark.nightly)

Run = Callable[..., StartedLearner]


@pytest.fixture
def run(processes: Processes) -> Run:
    return processes.learner


def finished(learner: StartedLearner, status: int = 0, timeout_s: float = 90.0) -> dict[str, Any]:
    """Return the last result of a run that has ended."""
    assert learner.wait(timeout_s) == status, f"{learner.text}\n{learner.log}"
    results = learner.results()
    return results[-1] if results else {}


def tensors(learner: StartedLearner) -> dict[str, Any]:
    newest = sorted((learner.run_dir / "checkpoints").iterdir())[-1]
    return load_file(newest / "tensors.safetensors")


def moved(before: dict[str, Any], after: dict[str, Any], policy_id: str) -> bool:
    names = [name for name in before if name.startswith(f"algorithm/{policy_id}/weights/")]
    assert names
    return any(not np.array_equal(before[name], after[name]) for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["ppo", IMPALA, "appo"])
def test_two_policies_learn_in_one_run_and_a_resumed_run_continues_with_both(
    run: Run, ledger_balances: Any, algo: str
) -> None:
    options = (f"--algo={algo}", *SMALL, *TWO, "--observation-filter=MeanStdFilter")
    first = run(*options, "--stop-timesteps=1500")
    result = finished(first)
    ledger_balances(result)
    assert result["updates_total"] >= 5
    assert result["agent_steps_total"] > result["timesteps_total"], "two agents take a row each"
    assert set(result["policy_reward_mean"]) == {"left", "right"}
    assert {"left/policy_loss", "right/policy_loss", "left/entropy"} <= result["learner"].keys()
    before = tensors(first)
    assert int(before["filter/left/n"]) > 500
    second = run("--stop-timesteps=2500", resume=True)
    later = finished(second)
    ledger_balances(later)
    assert later["updates_total"] > result["updates_total"]
    assert later["timesteps_total"] > result["timesteps_total"]
    after = tensors(second)
    assert after.keys() == before.keys()
    assert moved(before, after, "left")
    assert moved(before, after, "right")
    assert int(after["filter/right/n"]) > int(before["filter/right/n"])
    kernels = [name for name in before if "weights" in name and "kernel" in name]
    assert max(float(np.abs(after[name] - before[name]).max()) for name in kernels) < 0.3, (
        "not another start"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "options", "least"),
    [
        (
            "ppo",
            (
                *SMALL,
                "--train-batch-size=512",
                "--num-sgd-iter=8",
                "--lr=0.003",
                "--stop-timesteps=8000",
            ),
            40.0,
        ),
        *(
            pytest.param(algo, LONG, 100.0, marks=pytest.mark.nightly)
            for algo in ("ppo", "impala", "appo")
        ),
    ],
    ids=["", "long ppo", "long impala", "long appo"],
)
def test_agents_of_both_policies_learn_to_balance(
    run: Run, algo: str, options: Any, least: float
) -> None:
    """Untrained policies balance for about 20 steps."""
    learner = run(f"--algo={algo}", *options, *TWO, "--env-config={agents: 4}")
    result = finished(learner, timeout_s=280)
    assert min(result["policy_reward_mean"].values()) > least, result["policy_reward_mean"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "callbacks"),
    [
        ("ppo", ()),
        pytest.param("impala", ("--callbacks=general_parts:Noting",), marks=pytest.mark.slow),
    ],
)
def test_actions_of_bits_are_learned_in_lockstep_and_polled(
    run: Run, algo: str, callbacks: Any
) -> None:
    learner = run(
        f"--algo={algo}",
        *SMALL,
        *callbacks,
        "--env=general_runs:Bits",
        "--lr=0.01",
        "--stop-timesteps=8000",
    )
    result = finished(learner)
    assert result["episode_reward_mean"] > 12.5, "10 by chance, 20 at best"
    assert 0 < result["learner"]["entropy"] < 3 * np.log(2)


@pytest.mark.slow
def test_a_policy_learns_next_to_a_users_own_and_a_fixed_one(run: Run) -> None:
    policies = "{left: null, right: {class: 'general_runs:Pusher', config: {way: 1}}, other: null}"
    learner = run(
        *SMALL,
        "--env=general_runs:Poles",
        f"--multiagent.policies={policies}",
        "--env-config={agents: 3}",
        "--multiagent.policy-mapping-fn=general_runs:side",
        "--multiagent.policies-to-train=[left]",
        "--stop-timesteps=800",
    )
    result = finished(learner)
    assert result["policy_reward_mean"]["right"] < 12, "always pushing one way, a pole falls soon"
    assert {name.partition("/")[0] for name in result["learner"] if "/" in name} == {"left"}
    saved = tensors(learner)
    assert {name.split("/")[1] for name in saved if "/" in name} == {"left", "other"}
    assert not any(name.startswith("algorithm/other/optimizer") for name in saved)


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["ppo", IMPALA, APPO])
def test_dict_observations_and_tuple_actions_can_be_learned(run: Run, algo: str) -> None:
    learner = run(
        f"--algo={algo}", *SMALL, "--env=general_runs:Nested", "--lr=0.003", "--stop-timesteps=3000"
    )
    result = finished(learner)
    assert result["agent_steps_total"] == result["timesteps_total"]
    rewards = [
        float(line["episode_reward_mean"])
        for line in learner.results()
        if line["episode_reward_mean"]
    ]
    assert rewards[-1] > rewards[0]
    assert result["policy_reward_mean"] == {}


def test_callbacks_measure_on_workers_and_change_the_result_on_the_learner(run: Run) -> None:
    """R90, R180: custom metrics and histories arrive in result.jsonl."""
    learner = run(*SMALL, "--callbacks=general_runs:Watching", "--stop-timesteps=1000")
    result = finished(learner)
    assert result["custom_metrics"]["polls_per_step_mean"] == 1.0
    assert set(result["hist_stats"]["lengths"]) <= {
        float(length) for length in result["hist_stats"]["episode_lengths"]
    }
    assert [line["seen"] for line in learner.results()] == [
        f"iteration {line['training_iteration']}" for line in learner.results()
    ]
    assert (
        "custom_metrics/polls_per_step_mean"
        in (learner.run_dir / "progress.csv").read_text().splitlines()[0]
    )


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["ppo", IMPALA, APPO])
def test_memory_that_sees_previous_actions_and_rewards_is_trained(run: Run, algo: str) -> None:
    learner = run(
        f"--algo={algo}",
        *SMALL,
        "--env=general_runs:LastMove",
        "--model.use-lstm=true",
        "--model.lstm-use-prev-action-reward=true",
        "--model.lstm-cell-size=16",
        "--lr=0.01",
        "--rollout-fragment-length=16",
        f"--stop-timesteps={6000 if algo == 'ppo' else 12000}",
        "--stop-return=10",
    )
    result = finished(learner)
    # without memory of the previous action, at most every second of 15 actions is rewarded
    assert result["episode_reward_mean_last_100"] > 9.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "polled", [(), ("--callbacks=general_runs:Watching",)], ids=["in lockstep", "polled"]
)
def test_byte_images_can_be_learned_through_a_filter(run: Run, polled: tuple[str, ...]) -> None:
    """R39, R136: the network takes the filter's output, which consists of floats."""
    images = (
        *SMALL,
        "--env=general_runs:Bytes",
        "--model.conv-filters=[[4, 8, 8]]",
        "--observation-filter",
    )
    learner = run(*images, "MeanStdFilter", *polled, "--stop-timesteps=500")
    result = finished(learner)
    assert result["updates_total"] >= 2
    found = tensors(learner)
    assert found["filter/default_policy/n"] >= 500
    np.testing.assert_allclose(found["filter/default_policy/mean"].mean(), 127.5, atol=2.0)
    if polled:
        return
    resumed = run("--observation-filter=NoFilter", "--stop-timesteps=1000", resume=True)
    finished(resumed, status=1)
    assert "observation_filter" in resumed.text


@pytest.mark.parametrize(
    ("value", "is_found_late", "options"),
    [
        ("'left'", False, (*TWO, "--env-config={nameless: true}")),
        ("RuntimeError('the hook fails on purpose')", True, ("--callbacks=general_runs:Failing",)),
        ("'stranger'", True, (*TWO, "--multiagent.policy-mapping-fn=general_runs:stranger")),
    ],
)
def test_a_mistake_ends_the_run_with_one_plain_sentence(
    run: Run, value: str, is_found_late: bool, options: tuple[str, ...]
) -> None:
    learner = run(*SMALL, *options, "--stop-timesteps=500")
    assert learner.wait(60) == (1 if is_found_late else 2), learner.text
    assert learner.run_dir.exists() == is_found_late
    (error,) = [line for line in learner.text.splitlines() if line.startswith("aiorl: ")]
    assert value in error
    assert "Traceback" not in learner.text


def test_a_hook_that_fails_on_a_worker_ends_the_run_and_is_named(run: Run) -> None:
    learner = run(*SMALL, "--callbacks=general_runs:Slipping", "--stop-timesteps=100000")
    assert learner.wait(60) == 1, learner.text
    assert re.search(r"'general_runs:Slipping': on_episode_end .*KeyError\('speed'\)", learner.text)
