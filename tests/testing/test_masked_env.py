from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from aiorl.data.obs_layout import MaskLayout
from aiorl.testing.masked_env import ACTION_SPACES, ForbiddingEnv


def legal_action(space, mask):
    """The last legal one, for masks in parts."""
    match space:
        case spaces.Discrete():
            return int(np.flatnonzero(mask)[-1] + space.start)
        case spaces.MultiDiscrete():
            return np.array([np.flatnonzero(part)[-1] for part in mask])
        case spaces.MultiBinary():
            return np.array(mask)
        case spaces.Tuple():
            masks = iter(mask)
            return [
                np.zeros(part.shape) if isinstance(part, spaces.Box) else legal_action(part, next(masks))
                for part in space.spaces
            ]
        case spaces.Dict():
            return {name: legal_action(part, mask[name]) for name, part in space.spaces.items()}


@pytest.mark.parametrize("actions", ACTION_SPACES)
@pytest.mark.parametrize("in_info", [False, True])
def test_legal_actions_are_taken_to_the_end_of_the_episode(actions, in_info):
    env = ForbiddingEnv(actions, in_info=in_info)
    layout = MaskLayout(env.action_space)
    obs, info = env.reset(seed=1)
    for step in range(8):
        assert env.observation_space.contains(obs)
        mask = info["action_mask"] if in_info else obs["action_mask"]
        assert len(layout.rows_without_action(layout.from_rows([mask]))) == 0
        obs, reward, terminated, _, info = env.step(legal_action(env.action_space, mask))
        assert reward <= 0
        assert terminated == (step == 7)
    assert not layout.from_rows([info["action_mask"] if in_info else obs["action_mask"]]).any()


def test_a_forbidden_action_raises():
    env = ForbiddingEnv("multi_binary", length=100)
    obs, _ = env.reset(seed=0)
    while obs["action_mask"].all():
        obs, *_ = env.step(np.zeros(4))
    with pytest.raises(RuntimeError, match="forbidden"):
        env.step(np.ones(4))


def test_at_the_step_asked_for_everything_is_forbidden():
    env = ForbiddingEnv(stuck_at=1)
    obs, _ = env.reset(seed=0)
    obs, *_ = env.step(2 + int(obs["action_mask"].argmax()))
    assert not obs["action_mask"].any()
