"""Replay algorithms that mix stored and sampled experience, and that train on stored experience
alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored_rows import write

from aiorl.config.schema import CommonConfig
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import ConfigError
from aiorl.learning.algorithms.apex import ApexConfig
from aiorl.learning.algorithms.dqn import DQNConfig
from aiorl.learning.algorithms.sac import SACConfig
from aiorl.learning.algorithms.td3 import TD3Config

SMALL: dict[str, Any] = {
    "num_workers": 0,
    "seed": 3,
    "min_iter_time_s": 0,
    "eager": True,
    "log_sys_usage": False,
    "timesteps_per_iteration": 256,
    "training_intensity": 0.125,
    "train_batch_size": 32,
    "learning_starts": 64,
    "checkpoint_interval_s": 0,
    "replay_capacity": 5000,
    "model": {"fcnet_hiddens": [4]},
}
REWARD = 70.0
"""Reward of each stored step, which no environment here gives."""


def record(path: Path, num_obs: int, actions: Any) -> str:
    """Write 12 episodes of 50 steps, without new_obs; the first two numbers of an observation are
    episode and step.
    """
    episode, step = np.divmod(np.arange(600), 50)
    obs = np.zeros((600, num_obs))
    obs[:, 0] = episode
    obs[:, 1] = step
    rows = SampleBatch(
        obs=obs,
        actions=actions,
        rewards=np.full(600, REWARD),
        terminateds=step == 49,
        truncateds=np.zeros(600, bool),
        eps_id=episode,
        t=step,
    )
    return str(write(path / "demos.json", rows))


def trained(config: CommonConfig, num_iterations: int = 3) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the last result of a run, and rows drawn from its replay."""
    with config.build() as trainer:
        for _ in range(num_iterations):
            result = trainer.train()
        (learner,) = trainer._training.learning.group.learners.values()
        return result, {
            name: column.copy() for name, column in learner.feed.replay.sample(4000).columns.items()
        }


def check_stored(rows: dict[str, Any], n_step: int) -> np.ndarray:
    """Check returns and following observations of stored rows; return which rows are stored.

    Rows at the end of a batch sum fewer rewards.
    """
    is_stored = rows["n_step_returns"] > REWARD / 2
    stored = {name: column[is_stored] for name, column in rows.items()}
    is_end = stored["discounts"] == 0
    steps = np.round(np.log(np.where(is_end, 1.0, stored["discounts"])) / np.log(0.99)).astype(int)
    steps[is_end] = 50 - stored["obs"][is_end][:, 1]
    assert set(steps) == set(range(1, n_step + 1))
    assert (steps == n_step).mean() > 0.8
    np.testing.assert_allclose(
        stored["n_step_returns"], REWARD * (1 - 0.99**steps) / 0.01, rtol=1e-4
    )
    following = stored["obs"][~is_end]
    following[:, 1] += steps[~is_end]
    np.testing.assert_array_equal(stored["new_obs"][~is_end], following)
    return is_stored


CASES: list[Any] = [
    (
        DQNConfig,
        "CartPole-v1",
        {"n_step": 3, "prioritized_replay": False, "observation_filter": "MeanStdFilter"},
    ),
    pytest.param(SACConfig, "Pendulum-v1", {}, marks=pytest.mark.slow),
    pytest.param(SACConfig, "CartPole-v1", {}, marks=pytest.mark.slow),
    pytest.param(
        TD3Config,
        "Pendulum-v1",
        {"rollout_fragment_length": 5, "n_step": 3},
        marks=pytest.mark.slow,
    ),
    pytest.param(ApexConfig, "CartPole-v1", {"per_worker_epsilon": False}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "env", "settings"), CASES)
def test_r244_stored_and_sampled_steps_come_into_the_replay_by_their_shares(
    tmp_path: Path, kind: Any, env: str, settings: dict[str, Any]
) -> None:
    is_discrete = env == "CartPole-v1"
    actions = np.arange(600) % 2 if is_discrete else np.linspace(-2, 2, 600)
    demos = record(tmp_path, 4 if is_discrete else 3, actions)
    own = {**SMALL, "rollout_fragment_length": 12, "num_envs_per_worker": 2, **settings}
    config = kind(**own, env=env, input={"sampler": 0.4, demos: 0.6}, run_dir=str(tmp_path / "run"))
    result, rows = trained(config)
    assert result["learner"]["rows_stored"] == result["timesteps_total"] >= 3 * 256
    assert result["learner"]["rows_trained"] > 0
    if is_discrete:  # an episode of Pendulum takes 200 steps
        assert result["episodes_total"] > 0
    is_stored = check_stored(rows, config.n_step)
    if not config.prioritized_replay:
        assert is_stored.mean() == pytest.approx(0.6, abs=0.1)
    played = rows["actions"][is_stored].reshape(-1)
    steps = (rows["obs"][is_stored][:, 0] * 50 + rows["obs"][is_stored][:, 1]).astype(int)
    np.testing.assert_allclose(played, actions[steps], atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "env"),
    [(DQNConfig, "CartPole-v1"), pytest.param(SACConfig, "Pendulum-v1", marks=pytest.mark.slow)],
)
def test_r244_a_directory_alone_trains_on_each_stored_step_without_sampling(
    tmp_path: Path, kind: Any, env: str
) -> None:
    (tmp_path / "demos").mkdir()
    is_discrete = env == "CartPole-v1"
    actions = np.arange(600) % 2 if is_discrete else np.linspace(-2, 2, 600)
    record(tmp_path / "demos", 4 if is_discrete else 3, actions)
    config = kind(**SMALL, env=env, input=str(tmp_path / "demos"), run_dir=str(tmp_path / "run"))
    result, rows = trained(config, 4)
    assert result["learner"]["rows_stored"] == 600 < result["timesteps_total"]
    assert result["learner"]["rows_trained"] > 0
    assert check_stored(rows, 1).all()


@pytest.mark.slow
def test_recurrent_networks_train_on_stored_episodes(tmp_path: Path) -> None:
    demos = record(tmp_path, 4, np.arange(600) % 2)
    model = {"fcnet_hiddens": [4], "use_lstm": True, "lstm_cell_size": 4}
    own = {
        **SMALL,
        "rollout_fragment_length": 40,
        "num_envs_per_worker": 1,
        "train_batch_size": 80,
        "model": model,
    }
    config = DQNConfig(
        **own, env="CartPole-v1", input={"sampler": 0.4, demos: 0.6}, run_dir=str(tmp_path / "run")
    )
    result, sequences = trained(config)
    is_stored = (sequences["n_step_returns"] > REWARD / 2).any(axis=1)
    assert 0.1 < is_stored.mean() < 0.9
    assert result["learner"]["rows_trained"] > 0


@pytest.mark.parametrize("kind", [DQNConfig, SACConfig, TD3Config, ApexConfig])
def test_one_pass_into_a_replay_that_must_be_full_is_refused(kind: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(env="CartPole-v1", input="data", input_epochs=1, learning_starts=None)
    assert caught.value.key == "input_epochs"
