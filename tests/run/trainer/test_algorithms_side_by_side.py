"""Policies of different algorithms in one run, from the config to checkpoints, evaluation and
export.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiorl import DQNConfig, PPOConfig, Trainer, load_policy
from aiorl.acting.acting_state import SavedRun
from aiorl.config.layers import load_config
from aiorl.config.schema import CommonConfig
from aiorl.errors import CheckpointError
from aiorl.learning.algorithms.registry import config_class
from aiorl.run.build import plan_learning
from aiorl.sampling.policies import learned_policies

SMALL: dict[str, Any] = {
    "env": "general_runs:Poles",
    "num_workers": 0,
    "num_envs_per_worker": 2,
    "rollout_fragment_length": 8,
    "seed": 3,
    "checkpoint_interval_s": 0,
    "log_sys_usage": False,
    "eager": True,
    "min_iter_time_s": 0,
    "model": {"fcnet_hiddens": [8]},
}


def beside(other: Any) -> dict[str, Any]:
    return {"policies": {"left": None, "right": other}, "policy_mapping_fn": "general_runs:side"}


def arrays_of(trainer: Any) -> dict[str, Any]:
    return {
        f"{policy_id}/{name}": array
        for policy_id, own in trainer.get_weights().items()
        for name, array in own.items()
    }


def moved(before: dict[str, Any], after: dict[str, Any], policy_id: str) -> bool:
    return any(
        not np.array_equal(before[name], after[name])
        for name in before
        if name.startswith(f"{policy_id}/")
    )


def check_saved(trainer: Any, path: str, other: str) -> None:
    """Check that policies restored, resumed or loaded from a checkpoint have both algorithms."""
    mine, run_dir = arrays_of(trainer), trainer.logdir
    entry = trainer.config.multiagent.policies["right"]
    restored = Trainer.restore(path, run_dir=f"{run_dir}-again")
    theirs = arrays_of(restored)
    assert mine.keys() == theirs.keys()
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)
    assert restored.config.multiagent.policies["right"] == entry
    restored.train()
    restored.stop()
    acting = SavedRun.open(path).acting
    assert [acting.part.policies[name].algo for name in ("left", "right")] == [None, other]
    told = learned_policies(acting.part, acting.graphs)
    assert told["right"][3]["learning"]["algo"] == other, (
        "the columns from which a worker would make gradients"
    )
    observation = np.zeros(4, np.float32)
    assert load_policy(path, policy_id="right").compute_single_action(observation) in (0, 1)
    trainer.stop()
    resumed: CommonConfig = plan_learning(
        load_config(config_class, overrides={"resume": run_dir})
    ).config
    assert resumed.multiagent.policies["right"] == entry
    assert (entry["class"], entry["observation_space"], entry["action_space"]) == (
        other,
        None,
        None,
    )


@pytest.mark.slow
def test_ppo_and_a2c_learn_side_by_side_and_both_are_saved(tmp_path: Path) -> None:
    config = PPOConfig(
        **SMALL,
        train_batch_size=32,
        sgd_minibatch_size=16,
        num_sgd_iter=2,
        run_dir=str(tmp_path / "run"),
        multiagent=beside(
            {"class": "a2c", "config": {"sgd_minibatch_size": None, "num_sgd_iter": 1}}
        ),
    )
    trainer = config.build()
    before = arrays_of(trainer)
    result = trainer.train()
    assert moved(before, arrays_of(trainer), "left")
    assert moved(before, arrays_of(trainer), "right")
    assert "left/clip_fraction" in result["learner"]
    assert "right/policy_loss" in result["learner"]
    assert "right/clip_fraction" not in result["learner"]
    path = trainer.save()
    assert set(trainer.evaluate(episodes=1).policy_returns) == {"left", "right"}
    entry = trainer.config.multiagent.policies["right"]
    check_saved(trainer, path, "a2c")
    with Trainer.restore(path, run_dir=str(tmp_path / "faster"), lr=0.125) as faster:
        assert faster.config.multiagent.policies["right"]["defaults"] == {
            **entry["defaults"],
            "lr": 0.125,
        }
    with pytest.raises(CheckpointError, match=r"\{'right': 'a2c'\}"):
        Trainer.restore(path, run_dir=str(tmp_path / "other"), multiagent=beside(None))


@pytest.mark.slow
def test_dqn_and_sac_have_their_own_replay_and_exploration(tmp_path: Path) -> None:
    config = DQNConfig(
        **SMALL,
        train_batch_size=8,
        training_intensity=0.5,
        learning_starts=16,
        replay_capacity=200,
        broadcast_updates=2,
        timesteps_per_iteration=64,
        run_dir=str(tmp_path / "run"),
        multiagent=beside({"class": "sac", "config": {"random_timesteps": 7}}),
    )
    trainer = config.build()
    before = arrays_of(trainer)
    learner = trainer.train()["learner"]
    assert moved(before, arrays_of(trainer), "left")
    assert moved(before, arrays_of(trainer), "right")
    assert min(learner["left/rows_stored"], learner["right/rows_stored"]) > 16
    path = trainer.save()
    parts = SavedRun.open(path).acting.part.policies
    assert parts["left"].config["exploration"]["type"] == "EpsilonGreedy"
    assert parts["right"].config["exploration"]["random_timesteps"] == 7
    check_saved(trainer, path, "sac")
