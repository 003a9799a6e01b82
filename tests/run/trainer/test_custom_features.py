"""A network of the user's own returns features, and built-in heads and cells are trained on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from export_worlds import FEATURES
from small_runs import SMALL

import aiorl


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    "settings",
    [
        {"model": {**FEATURES, "free_log_std": True, "use_lstm": True}, "num_workers": 1},
        {"model": {**FEATURES, "vf_share_layers": True}, "use_sde": True},
        {"model": {"fcnet_hiddens": [8], "vf_hiddens": [6, 5]}},
    ],
    ids=["with free deviations and a cell", "with noise of the state", "layers of values"],
)
def test_it_is_trained_saved_and_restored(tmp_path: Path, settings: dict[str, Any]) -> None:
    config = {**SMALL, "env": "Pendulum-v1", "run_dir": str(tmp_path / "run"), **settings}
    with aiorl.PPOTrainer(config) as trainer:
        before = trainer.get_weights()["default_policy"]
        trainer.train()
        after = trainer.get_weights()["default_policy"]
        observation = trainer.get_policy().observation_space.sample()
        action, state, _ = trainer.compute_action(observation, full_fetch=True)
        path = trainer.save()
    unchanged = [name for name, weight in after.items() if np.array_equal(weight, before[name])]
    assert unchanged == []
    policy = aiorl.load_policy(path)
    again, _, _ = policy.compute_single_action(observation, full_fetch=True)
    np.testing.assert_allclose(again, action, rtol=1e-4)
    assert len(state) == 4 * settings["model"].get("use_lstm", False)
    if "vf_hiddens" in settings["model"]:
        assert [after[f"value/dense_{index}/bias"].shape for index in (0, 1)] == [(6,), (5,)]
