"""The settings that algorithms share which train on whole fragments."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorl.errors import ConfigError
from aiorl.learning.algorithms.actor_critic_config import ActorCriticConfig


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 64))
def test_a_train_batch_is_whole_fragments_or_the_nearest_sizes_are_named(size: int, length: int, envs: int) -> None:
    values = {"train_batch_size": size, "rollout_fragment_length": length, "num_envs_per_worker": envs}
    if size % (length * envs) == 0:
        ActorCriticConfig.from_mapping(values)
        return
    with pytest.raises(ConfigError) as caught:
        ActorCriticConfig.from_mapping(values)
    offered = [int(word.strip(",")) for word in caught.value.hint.split() if word.strip(",").isdecimal()]
    assert offered
    for fitting in offered:
        assert abs(fitting - size) < length * envs or fitting == length * envs
        ActorCriticConfig.from_mapping({**values, "train_batch_size": fitting})


def test_whole_episodes_take_any_train_batch_size() -> None:
    values = {"train_batch_size": 1000, "rollout_fragment_length": 300}
    ActorCriticConfig.from_mapping({**values, "batch_mode": "complete_episodes"})
