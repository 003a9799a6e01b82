"""Ape-X: DQN with other defaults, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from aiorl.data import columns as c
from aiorl.errors import ConfigError
from aiorl.learning.algorithms.apex import Apex, ApexConfig
from aiorl.learning.algorithms.dqn import DQN, DQNConfig
from aiorl.learning.algorithms.registry import algorithm_class


def test_its_plans_are_those_of_dqn_with_the_same_settings() -> None:
    config = ApexConfig(env="E")
    same = DQNConfig(**{**config.to_dict(), "algo": "dqn"})
    assert algorithm_class("apex") is Apex
    assert Apex.lease_plan(config) == DQN.lease_plan(same)
    assert Apex.sample_plan(config) == DQN.sample_plan(same)
    assert Apex.acting_settings(config) == {"exploration": {"type": "PerWorkerEpsilonGreedy"}}
    assert Apex.sample_plan(config).postprocess_params == {"gamma": 0.99, "n": 3}
    assert c.PRIORITIES in Apex.sample_plan(config).columns


def test_what_it_combines_is_switched_on_and_each_part_can_be_switched_off() -> None:
    parts = ("double_q", "dueling", "prioritized_replay", "worker_priorities", "per_worker_epsilon")
    config = ApexConfig(env="E")
    assert all(getattr(config, name) for name in parts)
    off: dict[str, Any] = dict.fromkeys(parts, False)
    assert c.PRIORITIES not in Apex.sample_plan(ApexConfig(env="E", **off, n_step=1)).columns


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"prioritized_replay": False}, "worker_priorities"),
        ({"num_workers": 0}, "per_worker_epsilon"),
        ({"model": {"use_gru": True}}, "worker_priorities"),
        ({"n_step": 51, "rollout_fragment_length": 50}, "n_step"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ApexConfig(env="E", **settings)
    assert caught.value.key == key
