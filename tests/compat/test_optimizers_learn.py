"""Each optimizer learns CartPole with remote workers and a policy of its algorithm.

R254.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from optimizer_things import cartpole

import aiorl
from aiorl.compat.optimizers import (
    AsyncGradientsOptimizer,
    AsyncSamplesOptimizer,
    PolicyOptimizer,
    SyncReplayOptimizer,
    SyncSamplesOptimizer,
)
from aiorl.learning.policies import A3CTFPolicy, DQNTFPolicy, PPOTFPolicy, VTraceTFPolicy

pytestmark = pytest.mark.slow

BARS = [60.0, pytest.param(100.0, marks=pytest.mark.nightly)]
"""Mean returns of the last 30 episodes; a policy that has not learned has about 22."""


@pytest.fixture(scope="module", autouse=True)
def end_of_actors() -> Iterator[None]:
    yield
    aiorl.shutdown()


@pytest.mark.parametrize("bar", BARS)
@pytest.mark.parametrize(
    ("kind", "policy", "worker_args", "config", "max_env_steps"),
    [
        (
            SyncSamplesOptimizer,
            PPOTFPolicy,
            {"rollout_fragment_length": 64, "num_envs": 8, "policy_config": {"lr": 2e-3}},
            {"train_batch_size": 1024, "num_sgd_iter": 6, "sgd_minibatch_size": 256},
            40_000,
        ),
        (
            AsyncGradientsOptimizer,
            A3CTFPolicy,
            {"rollout_fragment_length": 32, "num_envs": 4, "policy_config": {"lr": 3e-3}},
            {"grads_per_step": 20},
            150_000,
        ),
        pytest.param(
            SyncReplayOptimizer,
            DQNTFPolicy,
            {
                "rollout_fragment_length": 2,
                "num_envs": 4,
                "policy_config": {
                    "lr": 2e-3,
                    "epsilon_schedule": [[0, 1.0], [1500, 0.05]],
                    "target_update_freq": 50,
                },
            },
            {"train_batch_size": 256},
            30_000,
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            AsyncSamplesOptimizer,
            VTraceTFPolicy,
            {"rollout_fragment_length": 32, "num_envs": 4, "policy_config": {"lr": 3e-3}},
            {"train_batch_size": 256, "rollout_fragment_length": 128},
            150_000,
            marks=pytest.mark.nightly,
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_optimizer_learns(
    kind: type[PolicyOptimizer],
    policy: type[Any],
    worker_args: dict[str, Any],
    config: dict[str, Any],
    max_env_steps: int,
    bar: float,
) -> None:
    optimizer = kind.make(
        aiorl.RolloutWorker,
        {"env_creator": cartpole, "policy": policy, "seed": 1, **worker_args},
        num_workers=2,
        optimizer_config=config,
    )
    mean_return = 0.0
    while not mean_return >= bar and optimizer.num_steps_sampled < max_env_steps:
        for _ in range(50 if kind is SyncReplayOptimizer else 1):
            optimizer.step()
        mean_return = optimizer.collect_metrics(min_history=30)["episode_reward_mean"]
        print(optimizer.num_steps_sampled, mean_return)
    assert mean_return >= bar
    optimizer.stop()
