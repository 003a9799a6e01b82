"""Policies that an algorithm of a user's own updates together: training, checkpoints, evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiorl
from aiorl.acting.checkpoint import find_checkpoint
from aiorl.learning.algorithms.registry import config_class

ALGO = "joint_algorithm:CentralCritic"
SMALL: dict[str, Any] = {
    "algo": ALGO,
    "env": "joint_world:Signals",
    "multiagent": {"policies": "per_agent"},
    "num_workers": 0,
    "num_envs_per_worker": 4,
    "rollout_fragment_length": 16,
    "train_batch_size": 128,
    "sgd_minibatch_size": 64,
    "num_sgd_iter": 4,
    "model": {"fcnet_hiddens": [16]},
    "compilation_cache": "off",
    "xla": "off",
    "seed": 1,
    "min_iter_time_s": 0,
    "log_sys_usage": False,
}

EAGER = {"eager": True, "num_sgd_iter": 1}
"""Settings of updates that take a moment if there are few."""


def build(tmp_path: Path, **changes: Any) -> Any:
    return config_class(ALGO)(**{**SMALL, "run_dir": str(tmp_path / "run"), **changes}).build()


def tensors_of(trainer: Any) -> dict[str, Any]:
    return dict(find_checkpoint(trainer.save()).under("algorithm/"))


@pytest.mark.slow
def test_two_policies_learn_with_one_critic_and_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    with build(tmp_path) as trainer:
        before = trainer.get_weights()
        results = [trainer.train() for _ in range(8)]
        metrics = results[-1]["learner"]
        assert {"left+right/loss", "left+right/left/loss", "left+right/right/ratio"} <= set(metrics)
        assert metrics["left+right/valid_left"] == metrics["left+right/valid_right"] == 1.0
        assert results[-1]["episode_reward_mean"] > results[0]["episode_reward_mean"] + 4
        after = trainer.get_weights()
        for policy_id in ("left", "right"):
            pairs = zip(before[policy_id].values(), after[policy_id].values(), strict=True)
            assert any((old != new).any() for old, new in pairs)
        path = trainer.save(tmp_path / "saved")
        saved = find_checkpoint(path).under("algorithm/")
        owners = {name.split("/")[0] for name in saved}
        assert owners == {"left", "right", "left+right"}
        assert {name.split("/")[1] for name in saved if name.startswith("left/")} == {"weights"}
        assert "left+right/critic/0" in saved
        mean = aiorl.evaluate(path, episodes=5).mean
        assert mean > 16
    policy = aiorl.load_policy(path, policy_id="left")
    assert policy.compute_single_action(np.array([0.0, 1.0], np.float32)) in (0, 1)
    with aiorl.Trainer.restore(path, run_dir=str(tmp_path / "again"), **EAGER) as restored:
        again = tensors_of(restored)
        assert saved.keys() == again.keys()
        assert all(np.array_equal(saved[name], again[name]) for name in saved)
        restored.train()
        assert not np.array_equal(
            tensors_of(restored)["left+right/critic/0"], saved["left+right/critic/0"]
        )


@pytest.mark.slow
def test_workers_send_the_rows_of_both_policies(tmp_path: Path) -> None:
    with build(tmp_path, num_workers=1) as trainer:
        results = [trainer.train() for _ in range(3)]
        assert results[-1]["timesteps_total"] >= 3 * 128
        assert results[-1]["learner"]["left+right/valid_left"] == 1.0
        assert results[-1]["num_healthy_workers"] == 1


def test_a_policy_whose_agent_has_left_has_empty_rows(tmp_path: Path) -> None:
    changes = {"env_config": {"left_stays": 2}, "sgd_minibatch_size": 128, **EAGER}
    with build(tmp_path, **changes) as trainer:
        metrics = trainer.train()["learner"]
        assert metrics["left+right/valid_left"] == pytest.approx(0.25)
        assert metrics["left+right/valid_right"] == 1.0


def test_a_checkpoint_of_a_class_below_another_of_the_users_own_is_restored_as_that_class(
    tmp_path: Path,
) -> None:
    algo = "joint_algorithm:OtherCritic"

    class Base(aiorl.AlgorithmTrainer):
        pass

    class Own(Base):
        _default_config = config_class(algo)

    with Own({**SMALL, **EAGER, "algo": algo, "run_dir": str(tmp_path / "run")}) as trainer:
        path = trainer.save(tmp_path / "saved")
    with aiorl.Trainer.restore(path, run_dir=str(tmp_path / "again")) as restored:
        assert type(restored) is Own
