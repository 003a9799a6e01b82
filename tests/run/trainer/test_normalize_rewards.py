"""Runs that learn from scaled rewards: results, checkpoints and resumed runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_runs import SMALL

import aiorl
from aiorl.acting.filters import returns_of
from aiorl.data import columns as c
from aiorl.errors import CheckpointError
from aiorl.run.policy_group import PolicyGroup

RETURNS = returns_of(c.DEFAULT_POLICY_ID)
SETTINGS = {**SMALL, "normalize_rewards": True, "gamma": 0.9}


def statistic(trainer: Any) -> dict[str, Any]:
    state: dict[str, Any] = trainer._training.core.publisher.filter_states()[RETURNS]
    return state


@pytest.mark.slow
@pytest.mark.parametrize("kind", [aiorl.PPOTrainer, aiorl.IMPALATrainer])
def test_episodes_are_reported_unscaled_and_the_statistic_is_kept_in_checkpoints(
    kind: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with kind({**SETTINGS, "sgd_minibatch_size": 64}, env="CartPole-v1") as trainer:
        batches: list[Any] = []
        make_batch = PolicyGroup.make_batch

        def noting(group: PolicyGroup, fragments: Any) -> Any:
            batches.extend(fragments)
            return make_batch(group, fragments)

        monkeypatch.setattr(PolicyGroup, "make_batch", noting)
        for _ in range(3):
            result = trainer.train()
        assert result["episode_reward_mean"] == result["episode_len_mean"] > 8
        state = statistic(trainer)
        assert state["n"] == result["env_steps_trained_total"]
        last = batches[-1][c.DEFAULT_POLICY_ID]
        if kind is aiorl.IMPALATrainer:
            rewards = last[c.REWARDS][last.get(c.VALID, np.ones(last[c.REWARDS].shape, np.bool_))]
            np.testing.assert_allclose(rewards, 1 / np.sqrt(state["m2"][0] / state["n"]), rtol=0.1)
        else:
            # 10 before scaling: they converge to 1 / (1 - gamma)
            assert np.abs(last[c.VALUE_TARGETS]).max() < 6
        path = trainer.save(tmp_path / "saved")
        assert min(trainer.evaluate(episodes=1, seed=1).returns) >= 8
    with aiorl.Trainer.restore(path, num_workers=0) as other:
        for name, array in state.items():
            np.testing.assert_array_equal(statistic(other)[name], array)
        other.train()
        assert statistic(other)["n"] > state["n"]
    with pytest.raises(CheckpointError, match="normalize_rewards"):
        aiorl.Trainer.restore(path, normalize_rewards=False)
    with kind(
        {**SETTINGS, "init_from": path, "sgd_minibatch_size": 64}, env="CartPole-v1"
    ) as third:
        assert statistic(third)["n"] == state["n"]
