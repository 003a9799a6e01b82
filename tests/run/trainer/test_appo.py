"""APPO as a library, with several policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from small_runs import SMALL

from aiorl import APPOConfig, APPOTrainer


def test_each_of_several_policies_has_a_target_network_of_its_own(tmp_path: Path) -> None:
    """With settings of its own, too, and all of it in the checkpoint."""
    multiagent = {
        "policies": {"red": None, "blue": {"config": {"target_update_freq": 2}}},
        "policy_mapping_fn": "general_parts:by_number",
    }
    config = APPOConfig(
        env="aiorl.testing.multi_agent_envs:CountingMultiAgentEnv", run_dir=str(tmp_path / "run"),
        multiagent=multiagent, batch_mode="complete_episodes", min_iter_time_s=0, **SMALL,
    )  # fmt: skip

    def follow(trainer: Any) -> list[bool]:
        """Whether each policy's target network is what the policy is now."""
        tensors = trainer._training.learning.group.get_state().tensors
        found = []
        for policy in ("red", "blue"):
            own = {name: array for name, array in tensors.items() if name.startswith(f"{policy}/target/")}
            assert own
            found.append(
                all(np.array_equal(array, tensors[name.replace("target", "weights")]) for name, array in own.items())
            )
        return found

    with config.build() as trainer:
        assert isinstance(trainer, APPOTrainer)
        assert follow(trainer) == [True, True]
        trainer.train()
        assert follow(trainer) == [True, False]
        saved = trainer.save()
        with APPOTrainer.restore(saved, run_dir=str(tmp_path / "again")) as restored:
            assert follow(restored) == [True, False]
            for each in (trainer, restored):
                each.train()
                assert follow(each) == [True, True]
            found = restored.get_weights()
            for policy, weights in trainer.get_weights().items():
                for name, array in weights.items():
                    np.testing.assert_array_equal(array, found[policy][name], name)
