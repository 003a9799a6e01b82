"""PPO's settings: which don't go together, and what follows from them."""

from __future__ import annotations

from typing import Any

import pytest

from aiorl.errors import ConfigError
from aiorl.learning.algorithms.ppo import PPOConfig


def test_defaults_go_together() -> None:
    PPOConfig.from_mapping({"env": "CartPole-v1"})


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"train_batch_size": 4000, "rollout_fragment_length": 64}, "train_batch_size"),
        ({"train_batch_size": 2048, "sgd_minibatch_size": 4096}, "sgd_minibatch_size"),
        ({"model": {"use_lstm": True}, "sgd_minibatch_size": 100, "rollout_fragment_length": 64}, "sgd_minibatch_size"),
        ({"lr_schedule": [[10, 1e-3], [5, 1e-4]]}, "lr_schedule"),
        ({"entropy_coeff_schedule": []}, "entropy_coeff_schedule"),
        ({"clip_param": 0}, "clip_param"),
        ({"lambda_": 1.5}, "lambda_"),
        ({"num_sgd_iter": 0}, "num_sgd_iter"),
    ],
)
def test_what_cannot_be_is_refused_by_the_name_of_the_key(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PPOConfig.from_mapping({"env": "CartPole-v1", **settings})
    assert caught.value.key == key


@pytest.mark.parametrize(("batch", "minibatch"), [(4096, 128), (65_536, 2048), (32, 32), (2048, 64)])
def test_minibatches_grow_with_the_train_batch(batch: int, minibatch: int) -> None:
    config = PPOConfig(train_batch_size=batch, num_envs_per_worker=1, rollout_fragment_length=32)
    assert config.minibatch_steps() == minibatch
    assert config.fragments_per_batch() == batch // 32


@pytest.mark.parametrize(("batch", "minibatch"), [(4096, 400), (12_800, 400), (200, 200)])
def test_minibatches_of_a_recurrent_network_hold_four_sequences(batch: int, minibatch: int) -> None:
    sizes = {"train_batch_size": batch - batch % 100, "rollout_fragment_length": 100, "num_envs_per_worker": 1}
    assert PPOConfig(model={"use_lstm": True}, **sizes).minibatch_steps() == minibatch


def test_every_key_says_what_it_means() -> None:
    assert all(field.description for field in PPOConfig.model_fields.values())
