"""SAC and TD3 from the config to a policy that acts, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from aiorl import SACConfig, TD3Config, Trainer, load_policy
from aiorl.errors import UnsupportedSpaceError

SMALL: dict[str, Any] = {
    "env": "Pendulum-v1", "model": {"fcnet_hiddens": [8]}, "num_envs_per_worker": 2, "rollout_fragment_length": 8,
    "train_batch_size": 32, "training_intensity": 0.25, "learning_starts": 32, "random_timesteps": 32,
    "replay_capacity": 2000, "checkpoint_interval_s": 0, "timesteps_per_iteration": 64, "seed": 3, "n_step": 2,
    "log_sys_usage": False, "eager": True, "num_workers": 0, "min_iter_time_s": 0, "batch_mode": "complete_episodes",
}  # fmt: skip


def check(config: Any, obs: Any) -> None:
    """It trains, acts, is exported, and goes on from a checkpoint as if nothing had happened."""
    first = config.build()
    for _ in range(2):
        first.train()
    path = first.save(Path(config.run_dir) / "saved")
    second = Trainer.restore(path, run_dir=f"{config.run_dir}-2")
    one, other = first.train(), second.train()
    assert one["learner"]["rows_stored"] == other["learner"]["rows_stored"] > 64
    assert one["learner"]["num_sgd_steps"] > 0
    for name in ("loss", "actor_loss"):
        assert one["learner"][name] == other["learner"][name]
    found = second.get_weights()
    for policy_id, weights in first.get_weights().items():
        for name, array in weights.items():
            np.testing.assert_array_equal(array, found[policy_id][name], name)
    best = first.compute_action(obs, explore=False)
    (written,) = first.export_policy_model(Path(config.run_dir) / "export").values()
    session = onnxruntime.InferenceSession(written)
    np.testing.assert_allclose(session.run(["action"], {"obs": obs[None]})[0][0], best, rtol=1e-5)
    np.testing.assert_allclose(load_policy(first.save()).compute_single_action(obs), best, rtol=1e-5)
    first.stop()
    second.stop()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (SACConfig, {"use_sde": True, "sde_sample_freq": 12}),
        (TD3Config, {}),
        (SACConfig, {"env": "CartPole-v1", "training_intensity": 2}),
    ],
)
def test_it_trains_over_a_box_or_choices(kind: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    obs = np.array([0.01, 0.02, 0.03, 0.04][: 4 if "env" in settings else 3], np.float32)
    check(kind(run_dir=str(tmp_path / "run"), **{**SMALL, **settings}), obs)


def test_actions_that_do_not_fit_are_refused_with_the_algorithms_that_take_them(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedSpaceError, match="td3") as caught:
        TD3Config(run_dir=str(tmp_path / "run"), **{**SMALL, "env": "CartPole-v1"}).build()
    assert "dqn" in str(caught.value)
    assert "sac" in str(caught.value)
