"""Masks that are in infos."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from aiorl.data.action_mask import is_masked
from aiorl.env.action_mask import MaskFromInfo
from aiorl.env.registry import EnvContext, resolve_env
from aiorl.testing.masked_env import ForbiddingEnv


def test_a_gymnasium_environments_mask_comes_out_of_its_info():
    """Taxi-v4 is the one that Gymnasium brings along."""
    env = MaskFromInfo(gymnasium.make("Taxi-v4"))
    plain = gymnasium.make("Taxi-v4")
    assert is_masked(env.observation_space)
    (obs, info), (wanted, _) = env.reset(seed=3), plain.reset(seed=3)
    for _ in range(20):
        assert env.observation_space.contains(obs)
        assert obs["observation"] == wanted
        np.testing.assert_array_equal(obs["action_mask"], info["action_mask"])
        action = int(np.flatnonzero(obs["action_mask"])[0])
        obs, reward, terminated, truncated, info = env.step(action)
        wanted, *same, _ = plain.step(action)
        assert [reward, terminated, truncated] == same


def test_it_can_be_named_in_a_config_with_the_environments_settings():
    env = resolve_env("aiorl.env.action_mask:MaskFromInfo")(EnvContext({"env": "Taxi-v4", "is_rainy": True}))
    assert env.spec.max_episode_steps == 200
    assert env.spec.kwargs["is_rainy"]
    assert is_masked(env.observation_space)


@pytest.mark.parametrize("actions", ["multi_discrete", "tuple"])
def test_masks_in_parts_are_joined_and_none_allows_everything(actions):
    env = MaskFromInfo(ForbiddingEnv(actions, in_info=True))
    obs, info = env.reset(seed=0)
    parts = [np.ravel(part) for part in info["action_mask"]]
    np.testing.assert_array_equal(obs["action_mask"], np.concatenate(parts))
    assert env._mask(0, {})["action_mask"].all()
