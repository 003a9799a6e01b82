"""Whole runs with real processes and environments that raise at actions forbidden by their mask."""

from __future__ import annotations

from typing import Any

import pytest

SMALL = (
    "--seed=1",
    "--num-workers=1",
    "--num-envs-per-worker=4",
    "--rollout-fragment-length=32",
    "--train-batch-size=256",
    "--xla=off",
    "--model.fcnet-hiddens=[16]",
)
PPO = ("--algo=ppo", "--sgd-minibatch-size=64", "--num-sgd-iter=2")
IMPALA = ("--algo=impala",)


def finished(learner: Any) -> list[dict[str, Any]]:
    assert learner.wait(90.0) == 0, f"{learner.text}\n{learner.log}"
    results: list[dict[str, Any]] = learner.results()
    assert results[-1]["updates_total"] >= 3
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(PPO, id="ppo"),
        pytest.param(IMPALA, id="impala", marks=pytest.mark.nightly),
    ],
)
def test_tic_tac_toe_never_ends_by_an_illegal_move(processes: Any, options: Any) -> None:
    """A player that moves illegally gets -1 and the other one 0; the rewards of a legal game sum to
    0.
    """
    pytest.importorskip("pettingzoo")
    pytest.importorskip("pygame")
    learner = processes.learner(
        *SMALL, *options, "--env=pettingzoo:classic.tictactoe_v3", "--stop-timesteps=800"
    )
    results = finished(learner)
    assert results[-1]["episodes_total"] > 50
    for result in results:
        if result["episodes_this_iter"]:
            assert (result["episode_reward_min"], result["episode_reward_max"]) == (0.0, 0.0)


SHORT = "--rollout-fragment-length=8"
"""Sequences of few steps, since each step is traced."""
LAYOUTS = {
    "rows": (),
    "filtered_sequences": ("--model.use-lstm=true", "--observation-filter=MeanStdFilter", SHORT),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "layout", "actions"),
    [
        ("ppo", "rows", "multi_binary"),
        ("ppo", "filtered_sequences", "tuple"),
        ("impala", "rows", "dict"),
        ("impala", "filtered_sequences", "discrete"),
        pytest.param("impala", "filtered_sequences", "multi_discrete", marks=pytest.mark.nightly),
        ("impala", "rows", "multi_discrete"),
    ],
)
def test_masks_forbid_actions_of_every_kind_of_space(
    processes: Any, algo: str, layout: str, actions: str
) -> None:
    """Both algorithms train on both layouts of batches.

    The environment raises at a forbidden action.
    """
    options = (*(PPO if algo == "ppo" else IMPALA), *LAYOUTS[layout])
    learner = processes.learner(
        *SMALL,
        *options,
        "--env=masked_env:ForbiddingEnv",
        f"--env-config={{actions: {actions}}}",
        "--stop-timesteps=1000",
    )
    results = finished(learner)
    assert "forbidden" not in learner.log
    assert 0 < results[-1]["learner"]["entropy"] < 10


@pytest.mark.slow
def test_masks_in_infos_and_a_recurrent_policy_over_streamed_batches(processes: Any) -> None:
    learner = processes.learner(
        *SMALL,
        *IMPALA,
        SHORT,
        "--env=aiorl.env.action_mask:MaskFromInfo",
        "--model.use-gru=true",
        "--env-config={env: 'masked_env:ForbiddingEnv', actions: tuple, in_info: true}",
        "--observation-filter=MeanStdFilter",
        "--stop-timesteps=1000",
    )
    finished(learner)
    assert "forbidden" not in learner.log
