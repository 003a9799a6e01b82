"""DQN from the config to a policy that acts, in one process and with workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from aiorl import DQNConfig, Trainer, load_policy
from aiorl.data import columns as c
from aiorl.errors import ConfigError, UnsupportedSpaceError
from aiorl.learning.replay import spec as memory

SMALL: dict[str, Any] = {
    "model": {"fcnet_hiddens": [8]}, "num_envs_per_worker": 2, "rollout_fragment_length": 8, "train_batch_size": 8,
    "training_intensity": 2, "learning_starts": 32, "replay_capacity": 200, "broadcast_updates": 2,
    "checkpoint_interval_s": 0, "timesteps_per_iteration": 64, "seed": 3, "prioritized_replay": True, "n_step": 3,
    "log_sys_usage": False, "xla": "off", "num_workers": 0, "min_iter_time_s": 0,
}  # fmt: skip


def make_config(run_dir: Path, **settings: Any) -> DQNConfig:
    return DQNConfig(**{"env": "CartPole-v1", "run_dir": str(run_dir), **SMALL, **settings})


def weights_of(trainer: Any) -> dict[str, Any]:
    found: dict[str, Any] = trainer.get_weights()
    return {f"{policy_id}/{name}": array for policy_id, own in found.items() for name, array in own.items()}


def test_it_stores_and_trains_acts_and_is_exported(tmp_path: Path) -> None:
    trainer: Any = make_config(tmp_path / "run").build()
    result = {}
    for _ in range(4):
        result = trainer.train()
    learner = result["learner"]
    steps = result["timesteps_total"]
    assert steps == result["env_steps_trained_total"] == result["ledger"]["trained"] > 200
    assert (learner["rows_stored"], learner["replay_rows"], learner["rows_evicted"]) == (steps, 200, steps - 200)
    assert learner["training_intensity"] == pytest.approx(2.0, abs=0.1)
    assert learner["rows_trained"] == pytest.approx(2 * steps, rel=0.3)

    obs = np.array([0.01, 0.02, 0.03, 0.04], np.float32)
    best = trainer.compute_action(obs)
    action, _, found = trainer.compute_action(obs, full_fetch=True)
    assert action == best == found["action_dist_inputs"].argmax()
    (written,) = trainer.export_policy_model(tmp_path / "export").values()
    session = onnxruntime.InferenceSession(written)
    assert session.run(["action"], {"obs": obs[None]})[0].tolist() == [best]
    path = trainer.save()
    assert trainer.get_policy().global_timestep == steps
    trainer.set_weights(
        {c.DEFAULT_POLICY_ID: {name: own * 2 for name, own in trainer.get_policy().get_weights().items()}}
    )
    tensors = trainer._training.learning.group.get_state().tensors
    for name in trainer.get_policy().get_weights():
        target, own = (tensors[f"{c.DEFAULT_POLICY_ID}/{part}/{name}"] for part in ("target", "weights"))
        np.testing.assert_array_equal(target, own)
    trainer.stop()
    policy = load_policy(path)
    assert policy.compute_single_action(obs) == best
    assert policy.policy.global_timestep == steps  # by which it explores


def test_whoever_restores_a_checkpoint_trains_as_the_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    """G5: what is stored, too, and its priorities; workers begin anew, so whole episodes are sampled."""
    settings = {"batch_mode": "complete_episodes"}
    first = make_config(tmp_path / "first", **settings).build()
    for _ in range(3):
        first.train()
    path = first.save(tmp_path / "saved")
    assert json.loads((Path(path) / "meta.json").read_text())["pieces"]
    second = Trainer.restore(path, run_dir=str(tmp_path / "second"))
    for _ in range(2):
        one, other = first.train(), second.train()
    assert one["learner"]["rows_stored"] == other["learner"]["rows_stored"] > 256
    assert one["learner"]["loss"] == other["learner"]["loss"]
    found = weights_of(second)
    for name, array in weights_of(first).items():
        np.testing.assert_array_equal(array, found[name], name)
    first.stop()
    second.stop()


@pytest.mark.parametrize("looks_back", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_recurrent_one_stores_sequences_and_acts_with_a_state(tmp_path: Path, looks_back: bool) -> None:
    """In lockstep; a network that looks back is polled."""
    model = {"fcnet_hiddens": [8], "use_lstm": True, "lstm_cell_size": 4, "lstm_use_prev_action_reward": looks_back}
    trainer: Any = make_config(
        tmp_path / "run", env="aiorl.testing.envs:CartPoleWithoutVelocities", model=model, rollout_fragment_length=12,
        replay_sequence_length=6, burn_in=2,
    ).build()  # fmt: skip
    for _ in range(4):
        learner = trainer.train()["learner"]
    assert learner["training_intensity"] == pytest.approx(2.0, abs=0.1)
    assert learner["replay_rows"] == 200
    assert learner["updates_skipped"] == 0
    path = trainer.save()
    trainer.stop()
    policy = load_policy(path)
    assert policy.is_recurrent
    obs, state, seen = np.array([0.01, 0.03], np.float32), policy.get_initial_state(), []
    for _ in range(2):
        action, state, found = policy.compute_single_action(obs, state, *([0, 1.0] if looks_back else []))
        assert action == found["action_dist_inputs"].argmax()
        seen.append(found["action_dist_inputs"].tolist())
    assert seen[0] != seen[1], "the state counts"


RED_AND_BLUE = {
    "env": "aiorl.testing.multi_agent_envs:CountingMultiAgentEnv",
    "multiagent": {
        "policies": {"red": None, "blue": {"config": {"training_intensity": 1.0, "dueling": False}}},
        "policy_mapping_fn": "general_parts:by_number",
    },
}


def test_replays_that_fit_alone_but_not_all_together_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 0)
    with pytest.raises(ConfigError) as refused:
        make_config(tmp_path / "run", **RED_AND_BLUE).build()
    assert str(refused.value).count("200 rows of") == 2
    both = refused.value.value
    monkeypatch.setattr(memory, "available_bytes", lambda: both * 3 // 4)
    with pytest.raises(ConfigError, match="needs"):
        make_config(tmp_path / "other", **RED_AND_BLUE).build()


def test_each_of_several_policies_has_a_replay_of_its_own(tmp_path: Path) -> None:
    trainer = make_config(tmp_path / "run", **RED_AND_BLUE).build()
    for _ in range(3):
        result = trainer.train()
    learner = result["learner"]
    assert learner["red/rows_stored"] > 64
    assert learner["blue/rows_stored"] > 64
    assert learner["red/training_intensity"] == pytest.approx(2.0, abs=0.2)
    assert learner["blue/training_intensity"] == pytest.approx(1.0, abs=0.2)
    trainer.stop()


def test_actions_that_are_no_choices_are_refused_with_the_algorithms_that_take_them(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedSpaceError, match="dqn") as caught:
        make_config(tmp_path / "run", env="Pendulum-v1").build()
    assert "ppo" in str(caught.value)
