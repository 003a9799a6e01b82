"""A3C runs in one process, and the gradients of its fragments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_runs import SMALL

import aiorl

SETTINGS = {
    **SMALL,
    "train_batch_size": 32,
    "sgd_minibatch_size": None,
    "observation_filter": "MeanStdFilter",
}


def small(
    run_dir: Path, kind: Any = aiorl.A3CTrainer, env: str = "CartPole-v1", **settings: Any
) -> Any:
    return kind({**SETTINGS, "run_dir": str(run_dir), **settings}, env=env)


def test_in_one_process_each_fragments_gradient_is_one_step_and_the_ledger_balances(
    tmp_path: Path,
) -> None:
    with small(tmp_path / "run", min_iter_time_s=0, timesteps_per_iteration=160) as trainer:
        result = trainer.train()
        assert result["updates_total"] == pytest.approx(5, abs=1)
        assert result["learner"]["num_sgd_steps"] == 1.0
        assert {"policy_loss", "vf_loss", "entropy", "loss", "grad_gnorm"} <= result[
            "learner"
        ].keys()
        ledger = result["ledger"]
        assert ledger["sampled"] == ledger["trained"] == result["env_steps_trained_total"]
        assert result["episodes_total"] > 0
        assert result["policy_lag"]["max"] == 1, "it streams, as with workers"
        local = trainer.workers.local_worker()
        gradients, info = local.compute_gradients(local.sample())
        assert info["batch_count"] == info["num_rows"] > 0
        assert gradients.keys() == trainer.get_weights()["default_policy"].keys()


@pytest.mark.rest_slow
@pytest.mark.parametrize("kind", [aiorl.A2CTrainer, aiorl.PGTrainer])
def test_on_policy_algorithms_take_the_same_step_as_with_rows(tmp_path: Path, kind: Any) -> None:
    """Both sample the same fragments, act with the same weights, and so on after each update."""
    weights = []
    for gradients in ("learner", "workers"):
        options = {
            "gradients": gradients,
            "train_batch_size": 64,
            "batch_mode": "truncate_episodes",
        }
        with small(tmp_path / gradients, kind, **options) as trainer:
            for _ in range(2):
                trainer.train()
            weights.append(trainer.get_weights()["default_policy"])
    for name, weight in weights[0].items():
        np.testing.assert_allclose(weights[1][name], weight, rtol=1e-3, atol=1e-4, err_msg=name)


def test_each_trainable_policy_has_its_own_gradients(tmp_path: Path) -> None:
    multiagent = {
        "policies": {"left": {"config": {"gamma": 0.5}}, "right": None},
        "policy_mapping_fn": "general_runs:side",
    }
    with small(tmp_path / "run", env="general_runs:Poles", multiagent=multiagent) as trainer:
        before = trainer.get_weights()
        result = trainer.train()
        after = trainer.get_weights()
    for policy_id in ("left", "right"):
        assert np.isfinite(result["learner"][f"{policy_id}/loss"])
        assert all(
            not np.array_equal(before[policy_id][name], weight)
            for name, weight in after[policy_id].items()
        )
