"""DQN, SAC and TD3 from the config to a policy that acts, in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import onnxruntime
import pytest
from gymnasium import spaces

from aiorl import DQNConfig, SACConfig, TD3Config, Trainer, load_policy
from aiorl.acting.checkpoint import find_checkpoint
from aiorl.data import columns as c
from aiorl.errors import ConfigError, UnsupportedSpaceError
from aiorl.learning.replay import spec as memory

SMALL: dict[str, Any] = {
    "model": {"fcnet_hiddens": [8]},
    "num_envs_per_worker": 2,
    "rollout_fragment_length": 8,
    "learning_starts": 32,
    "checkpoint_interval_s": 0,
    "timesteps_per_iteration": 64,
    "seed": 3,
    "log_sys_usage": False,
    "num_workers": 0,
    "min_iter_time_s": 0,
}
DQN: dict[str, Any] = {
    **SMALL,
    "env": "CartPole-v1",
    "train_batch_size": 32,
    "training_intensity": 2,
    "replay_capacity": 200,
    "broadcast_updates": 2,
    "prioritized_replay": True,
    "n_step": 3,
    "eager": True,
}
ACTOR: dict[str, Any] = {
    **SMALL,
    "env": "Pendulum-v1",
    "train_batch_size": 32,
    "training_intensity": 0.25,
    "random_timesteps": 32,
    "replay_capacity": 2000,
    "n_step": 2,
    "eager": True,
    "timesteps_per_iteration": 32,
}


def make_config(run_dir: Path, **settings: Any) -> DQNConfig:
    return DQNConfig(**{**DQN, "run_dir": str(run_dir), **settings})


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (DQNConfig, {**DQN, "replay_capacity": 100, "eager": False, "xla": "off"}),
        pytest.param(
            SACConfig, {**ACTOR, "use_sde": True, "sde_sample_freq": 12}, marks=pytest.mark.slow
        ),
        pytest.param(TD3Config, ACTOR, marks=pytest.mark.slow),
        pytest.param(
            SACConfig,
            {**ACTOR, "env": "CartPole-v1", "training_intensity": 2},
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_it_trains_acts_is_exported_and_continues_identically_from_a_checkpoint(
    kind: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    """G5: this includes the replay's content and priorities.

    Workers start again, so whole episodes are sampled.
    """
    first = kind(run_dir=str(tmp_path / "run"), batch_mode="complete_episodes", **settings).build()
    for _ in range(2):
        first.train()
    path = first.save(tmp_path / "saved")
    assert json.loads((Path(path) / "meta.json").read_text())["pieces"]
    second = Trainer.restore(path, run_dir=str(tmp_path / "second"))
    one, other = first.train()["learner"], second.train()["learner"]
    assert one["rows_stored"] == other["rows_stored"] > 64
    assert one["num_sgd_steps"] > 0
    losses = [name for name in one if name.endswith("loss")]
    assert [one[name] for name in losses] == [other[name] for name in losses] != []
    found = second.get_weights()[c.DEFAULT_POLICY_ID]
    for name, array in first.get_weights()[c.DEFAULT_POLICY_ID].items():
        np.testing.assert_array_equal(array, found[name], name)
    obs = np.array(
        [0.01, 0.02, 0.03, 0.04][: 4 if settings["env"] == "CartPole-v1" else 3], np.float32
    )
    best = first.compute_action(obs)
    (written,) = first.export_policy_model(tmp_path / "export").values()
    session = onnxruntime.InferenceSession(written)
    np.testing.assert_allclose(session.run(["action"], {"obs": obs[None]})[0][0], best, rtol=1e-5)
    np.testing.assert_allclose(
        load_policy(first.save()).compute_single_action(obs), best, rtol=1e-5
    )
    first.stop()
    second.stop()


class Aim(gymnasium.Env[Any, Any]):
    """Environment that shows a number to choose; its reward is minus the distance."""

    observation_space = action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.goal = self.np_random.uniform(-0.8, 0.8, 1).astype(np.float32)
        return self.goal, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.goal, -abs(float(action[0] - self.goal[0])), True, False, {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "own"), [(SACConfig, {"use_sde": True, "sde_sample_freq": 4}), (TD3Config, {})]
)
def test_actors_learn_to_aim(kind: Any, own: dict[str, Any], tmp_path: Path) -> None:
    """A guess misses by 0.6 on average."""
    settings = {
        **ACTOR,
        **own,
        "env": f"{__name__}:Aim",
        "eager": False,
        "xla": "off",
        "n_step": 1,
        "train_batch_size": 64,
        "training_intensity": 64,
        "lr": 3e-3,
        "actor_lr": 3e-3,
        "model": {"fcnet_hiddens": [32]},
    }
    with kind(run_dir=str(tmp_path / "run"), **settings).build() as trainer:
        for _ in trainer.iterate(stop_timesteps=500):
            pass
        assert trainer.evaluate(episodes=50).mean > -0.15


@pytest.mark.parametrize(
    ("kind", "settings", "names"),
    [
        (DQNConfig, {**DQN, "env": "Pendulum-v1"}, ["dqn", "ppo"]),
        (TD3Config, {**ACTOR, "env": "CartPole-v1"}, ["td3", "dqn", "sac"]),
    ],
)
def test_unsuitable_actions_are_refused_with_the_algorithms_that_support_them(
    kind: Any, settings: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedSpaceError) as caught:
        kind(run_dir=str(tmp_path / "run"), **settings).build()
    assert all(name in str(caught.value) for name in names)


def test_it_stores_and_trains_at_the_configured_rates(tmp_path: Path) -> None:
    trainer: Any = make_config(tmp_path / "run").build()
    result = {}
    for _ in range(4):
        result = trainer.train()
    learner = result["learner"]
    steps = result["timesteps_total"]
    assert steps == result["env_steps_trained_total"] == result["ledger"]["trained"] > 200
    assert (learner["rows_stored"], learner["replay_rows"], learner["rows_evicted"]) == (
        steps,
        200,
        steps - 200,
    )
    assert learner["training_intensity"] == pytest.approx(2.0, abs=0.1)
    assert learner["rows_trained"] == pytest.approx(2 * steps, rel=0.3)

    obs = np.array([0.01, 0.02, 0.03, 0.04], np.float32)
    action, _, found = trainer.compute_action(obs, full_fetch=True)
    assert action == found["action_dist_inputs"].argmax()
    path = trainer.save()
    assert (
        trainer.get_policy().global_timestep == load_policy(path).policy.global_timestep == steps
    ), "exploration"
    trainer.set_weights(
        {
            c.DEFAULT_POLICY_ID: {
                name: own * 2 for name, own in trainer.get_policy().get_weights().items()
            }
        }
    )
    tensors = find_checkpoint(trainer.save()).under("algorithm/")
    for name in trainer.get_policy().get_weights():
        target, own = (
            tensors[f"{c.DEFAULT_POLICY_ID}/{part}/{name}"] for part in ("target", "weights")
        )
        np.testing.assert_array_equal(target, own)
    trainer.stop()


@pytest.mark.slow
@pytest.mark.parametrize("uses_previous_step", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_recurrent_one_stores_sequences_and_acts_with_a_state(
    tmp_path: Path, uses_previous_step: bool
) -> None:
    """It is sampled in lockstep; a network that takes previous actions is polled."""
    model = {
        "fcnet_hiddens": [8],
        "use_lstm": True,
        "lstm_cell_size": 4,
        "lstm_use_prev_action_reward": uses_previous_step,
    }
    trainer: Any = make_config(
        tmp_path / "run",
        env="aiorl.testing.envs:CartPoleWithoutVelocities",
        model=model,
        rollout_fragment_length=12,
        replay_sequence_length=6,
        burn_in=2,
        replay_capacity=120,
    ).build()
    for _ in range(3):
        learner = trainer.train()["learner"]
    assert learner["training_intensity"] == pytest.approx(2.0, abs=0.1)
    assert learner["replay_rows"] == 120
    assert learner["updates_skipped"] == 0
    path = trainer.save()
    trainer.stop()
    policy = load_policy(path)
    assert policy.is_recurrent
    obs, state, seen = np.array([0.01, 0.03], np.float32), policy.get_initial_state(), []
    for _ in range(2):
        action, state, found = policy.compute_single_action(
            obs, state, *([0, 1.0] if uses_previous_step else [])
        )
        assert action == found["action_dist_inputs"].argmax()
        seen.append(found["action_dist_inputs"].tolist())
    assert seen[0] != seen[1], "the action depends on the state"


RED_AND_BLUE = {
    "env": "aiorl.testing.multi_agent_envs:CountingMultiAgentEnv",
    "multiagent": {
        "policies": {
            "red": None,
            "blue": {"config": {"training_intensity": 1.0, "dueling": False}},
        },
        "policy_mapping_fn": "general_parts:by_number",
    },
}


def test_replays_that_together_exceed_the_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 0)
    with pytest.raises(ConfigError) as refused:
        make_config(tmp_path / "run", **RED_AND_BLUE).build()
    assert str(refused.value).count("200 ") == 2
    both = refused.value.value
    monkeypatch.setattr(memory, "available_bytes", lambda: both * 3 // 4)
    with pytest.raises(ConfigError) as refused:
        make_config(tmp_path / "other", **RED_AND_BLUE).build()
    assert refused.value.value == both


def test_each_of_several_policies_has_its_own_replay(tmp_path: Path) -> None:
    trainer = make_config(tmp_path / "run", **RED_AND_BLUE).build()
    for _ in range(3):
        result = trainer.train()
    learner = result["learner"]
    assert learner["red/rows_stored"] > 64
    assert learner["blue/rows_stored"] > 64
    assert learner["red/training_intensity"] == pytest.approx(2.0, abs=0.2)
    assert learner["blue/training_intensity"] == pytest.approx(1.0, abs=0.2)
    trainer.stop()
