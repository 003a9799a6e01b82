"""Runs whose actions lie far from 0: policies act in units of the range, and earlier runs as they
were trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from small_runs import SMALL
from stored_rows import read_once

import aiorl
from aiorl.acting.acting_state import ActingState
from aiorl.acting.checkpoint import find_checkpoint
from aiorl.config import with_former_defaults
from aiorl.config.layers import load_config
from aiorl.errors import CheckpointError, ConfigError
from aiorl.learning.algorithms.registry import config_class
from aiorl.process.log_once import log_once

FROZEN = Path(__file__).parents[2] / "frozen" / "ppo-continuous"
OBS = np.array([0.5, -0.5], np.float32)


class Thrust(gymnasium.Env[Any, Any]):
    """Episodes of four steps; all copies note the actions that reach them."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Box(300.0, 500.0, (1,), np.float32)
    taken: ClassVar[list[float]] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.t = 0
        return OBS, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        Thrust.taken.append(float(action[0]))
        self.t += 1
        return OBS, 1.0, self.t == 4, False, {}


@pytest.fixture(autouse=True)
def fresh() -> None:
    log_once.reset()
    Thrust.taken.clear()


def config(directory: Path, **settings: Any) -> aiorl.PPOConfig:
    return aiorl.PPOConfig(**{**SMALL, "env": Thrust, "run_dir": str(directory), **settings})


def clip_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage() for record in caplog.records if record.name == "aiorl.sampling.clipping"
    ]


def test_a_run_acts_in_units_of_the_range_wherever_its_policy_acts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = {
        "fcnet_hiddens": [8],
        "use_lstm": True,
        "lstm_cell_size": 4,
        "lstm_use_prev_action_reward": True,
    }
    # one update of many rows: each step of a recurrent one takes long
    sizes = {"train_batch_size": 256, "sgd_minibatch_size": 256}
    settings = config(
        tmp_path / "run", model=model, output=str(tmp_path / "rows"), lr=1e-4, **sizes
    )
    with settings.build() as trainer:
        trainer.train()
        state = [
            np.full(shape.shape, 0.1, np.float32)
            for shape in trainer.get_policy().get_initial_state()
        ]
        said = trainer.compute_action(
            OBS, state, prev_action=np.array([480.0], np.float32), prev_reward=1.0
        )[0]
        saved = trainer.save(tmp_path / "saved")
    assert min(Thrust.taken) == 300.0
    assert max(Thrust.taken) == 500.0
    assert np.mean(Thrust.taken) == pytest.approx(400.0, abs=20.0)
    assert not clip_warnings(caplog)

    stored = np.concatenate([batch["actions"] for batch in read_once(str(tmp_path / "rows"))])
    assert np.mean(stored) == pytest.approx(400.0, abs=20.0)
    assert np.std(stored) == pytest.approx(100.0, abs=20.0)

    policy = aiorl.load_policy(saved)
    action, _, beside = policy.compute_single_action(
        OBS, state, np.array([480.0]), 1.0, full_fetch=True
    )
    assert 395.0 < action[0] < 405.0
    assert action[0] == pytest.approx(400.0 + 100.0 * beside["action_dist_inputs"][0], abs=1e-3)
    np.testing.assert_allclose(said, action, rtol=1e-5)

    import onnxruntime as ort

    session = ort.InferenceSession(aiorl.export_policy(saved, tmp_path / "exported")["onnx"])
    names = [item.name for item in session.get_inputs()]
    rows = [
        OBS[None],
        np.array([[480.0]], np.float32),
        np.ones(1, np.float32),
        *(one[None] for one in state),
        np.zeros((1, 1), np.float32),  # the action before it was clipped: here none was
    ]
    found = session.run(["action"], dict(zip(names, rows, strict=True)))[0]
    np.testing.assert_allclose(found[0], action, rtol=1e-5)


def test_actions_that_are_mostly_clipped_are_said_once_to_be_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with config(
        tmp_path, normalize_actions=False, rollout_fragment_length=128, train_batch_size=256
    ).build() as trainer:
        for _ in range(2):
            trainer.train()
    assert set(Thrust.taken) == {300.0}
    (warning,) = clip_warnings(caplog)
    assert "100 %" in warning
    assert "normalize_actions: true" in warning


def test_runs_of_versions_without_the_key_continue_and_act_without_it() -> None:
    resumed = load_config(config_class, overrides={"resume": str(FROZEN)})
    assert resumed.normalize_actions is False
    acting = ActingState.from_checkpoint(find_checkpoint(FROZEN))
    assert acting.config["normalize_actions"] is False
    assert acting.graphs[aiorl.DEFAULT_POLICY_ID]["spec"]["distribution"] == "diag_gaussian"


def test_a_new_run_that_begins_with_another_run_acts_in_its_units(tmp_path: Path) -> None:
    with config(tmp_path / "a", normalize_actions=False).build() as trainer:
        saved = trainer.save(tmp_path / "saved")
    with config(tmp_path / "b", init_from=str(saved)).build() as trainer:
        assert trainer.config.normalize_actions is False
    with pytest.raises(ConfigError, match="normalize_actions") as refused:
        config(tmp_path / "c", init_from=str(saved), normalize_actions=True).build()
    assert refused.value.key == "init_from"
    with pytest.raises(CheckpointError, match="normalize_actions"):
        aiorl.Trainer.restore(
            saved, normalize_actions=True, run_dir=str(tmp_path / "d"), env=Thrust
        )


def test_policies_of_other_algorithms_in_an_earlier_run_keep_their_units() -> None:
    policies = {
        "a": None,
        "b": {"class": "impala", "defaults": {"lr": 0.1}},
        "c": {"class": "x:Y", "defaults": None},
    }
    completed = with_former_defaults({"lr": 0.2, "multiagent": {"policies": policies}})
    assert completed["normalize_actions"] is False
    assert completed["multiagent"]["policies"]["b"]["defaults"] == {
        "lr": 0.1,
        "normalize_actions": False,
        "model": {"conv_parts": False},
    }
    assert completed["multiagent"]["policies"]["c"]["defaults"] is None
    assert with_former_defaults({"normalize_actions": True})["normalize_actions"] is True
