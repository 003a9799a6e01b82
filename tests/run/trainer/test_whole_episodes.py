"""Train batches of whole episodes, in one process and with workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import aiorl


@pytest.mark.parametrize(
    ("kind", "num_workers", "envs", "length"),
    [
        (aiorl.PGTrainer, 0, 1, 25),
        pytest.param(aiorl.PPOTrainer, 1, 2, 50, marks=pytest.mark.slow),
        pytest.param(aiorl.PGTrainer, 2, 1, 25, marks=pytest.mark.slow),
    ],
)
def test_a_batch_has_its_env_steps_even_if_episodes_are_longer_than_fragments(
    kind: type[aiorl.Trainer], num_workers: int, envs: int, length: int, tmp_path: Path
) -> None:
    """Pendulum's episodes have 200 steps: 64 fragments of 25 steps, or 16 of 100, would make up
    1,600.
    """
    settings: dict[str, Any] = {
        "env": "Pendulum-v1",
        "num_workers": num_workers,
        "num_envs_per_worker": envs,
        "train_batch_size": 1600,
        "rollout_fragment_length": length,
        "batch_mode": "complete_episodes",
        "model": {"fcnet_hiddens": [8]},
        "seed": 1,
        "min_iter_time_s": 0,
        "eager": True,
        "num_sgd_iter": 1,
        "sgd_minibatch_size": None,
        "log_sys_usage": False,
        "run_dir": str(tmp_path / "run"),
    }
    with kind(config=settings) as trainer:
        results = [trainer.train() for _ in range(2)]
    assert [result["timesteps_this_iter"] for result in results] == [1600] * 2
    ledger = results[-1]["ledger"]
    assert ledger["sampled"] == ledger["trained"] == 3200, "no steps are sampled in vain"


def test_batches_of_different_sizes_share_one_compilation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {
        "env": "CartPole-v1",
        "num_workers": 0,
        "num_envs_per_worker": 4,
        "train_batch_size": 512,
        "sgd_minibatch_size": 128,
        "batch_mode": "complete_episodes",
        "model": {"fcnet_hiddens": [8]},
        "seed": 1,
        "min_iter_time_s": 0,
        "xla": "off",
        "log_sys_usage": False,
        "run_dir": str(tmp_path / "run"),
    }
    with caplog.at_level("INFO", "aiorl"), aiorl.PPOTrainer(config=settings) as trainer:
        steps = {trainer.train()["timesteps_this_iter"] for _ in range(4)}
    assert len(steps) > 2
    assert not [text for text in caplog.messages if "for batches of" in text]
